"""On-policy distillation, in reading order.

    prompts ─► the student writes completions ─► the teacher marks every token
                      ▲                                      │
                      └── verified weight sync ◄── one step ◄─┘

The loss is a divergence between the two next-token distributions at every token *the student wrote*
(`losses.py` has the formulas, with their sources). The gradient goes through the student's probabilities at those
positions and not through the choice of the tokens, except for `loss.support: sampled`, which is a policy gradient.

Where this departs from the papers: token ids travel from the sampler to the teacher and are never re-tokenised; a step
has one denominator, the unmasked completion tokens of the whole step, however it is cut into micro-batches; and the
sampler's log-probabilities are compared with the student's own at every step, before the optimizer moves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from opd import batching
from opd.checkpoint import Checkpoint, save_checkpoint
from opd.config import Config
from opd.errors import TeacherUnavailable
from opd.interrupt import StopSignal
from opd.pipeline import Pipeline, build_pipeline
from opd.samplers import SamplingParams
from opd.student import Student, Update
from opd.summaries import Clock, length_values, per_token_values, position_means, token_means
from opd.sync import push_weights
from opd.teachers import request_for
from opd.types import Rollout

if TYPE_CHECKING:
    from opd.display import Display
    from opd.runs import RunDirectory
    from opd.trackers import Trackers


@dataclass(frozen=True, slots=True)
class Summary:
    """How a run went."""

    steps: int
    """Optimizer steps taken in total."""
    interrupted: bool
    """Whether it was asked to stop before its last step; a checkpoint was saved."""
    before: dict[str, float] | None
    """The held-out evaluation before the first step."""
    after: dict[str, float] | None
    """The same after the last."""


def distill(
    config: Config, run: RunDirectory, display: Display, trackers: Trackers, resume: Checkpoint | None
) -> Summary:
    """Trains the student and returns how it went; `resume` is the checkpoint to go on from."""
    # Checkpoints from before opd kept what its models were have none.
    begun_with = resume.state.get("models", {}) if resume else {}
    stages = build_pipeline(config, display.phase, display.warn, begun_with)
    student, sampler = stages.student, stages.sampler
    if resume is not None:
        restore(resume, stages)
        run.rewind(student.version)

    display.phase("sending the student's weights to the sampler")
    push_weights(student, sampler)
    before = evaluate(stages, run, display) if student.version == 0 else run.evaluation(0)

    with StopSignal(display.warn) as stop:
        saved, doubted = student.version, False
        while student.version < config.train.steps and not stop.requested:
            with saving_when_the_teacher_goes(config, stages, run, saved):
                if due(student.version, config.eval.every):
                    evaluate(stages, run, display)
                record = step(config, stages, run, diagnose=due(student.version, config.diagnostics.every))
            run.append_metrics(record)
            trackers.log(student.version, record)
            display.step(record)
            if not doubted and (doubt := doubt_about_supports(record)):
                display.warn(doubt)
                doubted = True
            if due(student.version, config.checkpoint.every):
                saved = save(config, stages, run)
        if saved < student.version:
            save(config, stages, run)

    interrupted = student.version < config.train.steps
    after = None if interrupted else evaluate(stages, run, display)
    return Summary(student.version, interrupted, before, after)


@contextmanager
def saving_when_the_teacher_goes(config: Config, stages: Pipeline, run: RunDirectory, saved: int) -> Iterator[None]:
    """Where no teacher server answers any more, saves what there was before this step; the error goes on."""
    position = stages.prompts.state_dict()
    try:
        yield
    except TeacherUnavailable:
        # The prompts of this step have been drawn but not trained on.
        stages.prompts.load_state_dict(position)
        if saved < stages.student.version:
            save(config, stages, run)
        raise


def step(config: Config, stages: Pipeline, run: RunDirectory, *, diagnose: bool) -> dict[str, Any]:
    """Rollouts, scores, one update, one sync; returns the step's metrics."""
    student, sampler, teacher = stages.student, stages.sampler, stages.teacher
    number, start, clock = student.version + 1, perf_counter(), Clock()
    busy_before = teacher.busy_seconds
    diagnostics_k = config.diagnostics.k if diagnose else 0

    prompts = stages.prompts.take(config.rollout.prompts)
    rollouts = sampler.generate(prompts, sampling_params(config, student), step_seed(config.run.seed, number))
    rollouts = with_supports(clock.pulling("rollout", rollouts), config, student)
    scored = list(teacher.score(rollouts, request_for(config.loss, diagnostics_k)))
    scored_at = perf_counter()

    sampler.sleep()
    update = student.update(scored, diagnostics_k=diagnostics_k)
    updated_at = perf_counter()

    sampler.wake()
    push_weights(student, sampler)
    end = perf_counter()

    if config.run.save_rollouts:
        run.write_rollouts(number, rollout_records(update, student))
    values = update_values(update, config)
    return {
        "step": number,
        **values,
        "tokens_per_second": values["tokens"] / (end - start),
        "rollout_seconds": clock.seconds["rollout"],
        **score_times(scored_at - start - clock.seconds["rollout"], teacher.busy_seconds - busy_before),
        "update_seconds": updated_at - scored_at,
        "sync_seconds": end - updated_at,
        "step_seconds": end - start,
        "policy_version": student.version,
        "dropped_prompts": stages.prompts.dropped,
        "epoch": stages.prompts.epoch,
        "peak_memory_gib": peak_memory_gib(student.device),
    }


def score_times(exposed: float, busy: float) -> dict[str, float]:
    """Returns how long the run waited for the teacher, and the share of the teacher's time that hid behind the rollouts."""
    hidden = 1 - exposed / busy if busy > 0 else 0.0
    return {"score_seconds": exposed, "score_hidden_fraction": min(max(hidden, 0.0), 1.0)}


def sampling_params(config: Config, student: Student) -> SamplingParams:
    """Returns how the student writes: as configured, ended by its own end-of-sequence tokens."""
    rollout, loss = config.rollout, config.loss
    # The sampler's top K is the student's own only while nothing is cut off the distribution.
    wants_ids = loss.support == "topk" and loss.topk.of != "teacher" and not rollout.truncates
    return SamplingParams(
        max_tokens=rollout.max_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        stop=tuple(rollout.stop),
        stop_token_ids=tuple(dict.fromkeys((*student.eos_ids, *rollout.stop_token_ids))),
        topk=loss.topk.k if wants_ids else 0,
        group_size=rollout.group_size,
    )


def with_supports(rollouts: Iterable[Rollout], config: Config, student: Student) -> Iterator[Rollout]:
    """Yields the rollouts with the student's top-K ids wherever the loss needs them and the sampler gave none."""
    if config.loss.support != "topk" or config.loss.topk.of == "teacher":
        yield from rollouts
        return

    def length(rollout: Rollout) -> int:
        return len(rollout.prompt.student_ids) + len(rollout.token_ids)

    for group in batching.cut(rollouts, length, config.train.microbatch_tokens, packed=student.packed):
        missing = [rollout for rollout in group if rollout.topk_ids is None]
        found = iter(student.topk_ids(missing, config.loss.topk.k) if missing else [])
        yield from (r if r.topk_ids is not None else replace(r, topk_ids=next(found)) for r in group)


def step_seed(run_seed: int, number: int) -> int:
    """Returns the sampler's seed of a step; with the prompt's index and the sample it makes every draw reproducible."""
    return (run_seed * 1_000_003 + number) % 2**31


def update_values(update: Update, config: Config) -> dict[str, Any]:
    """Returns the metrics of one update, means over the tokens that counted."""
    mask = update.weights > 0
    lengths = length_values([item.rollout for item in update.scored])
    return {
        "loss": update.loss,
        **token_means(update.stats, mask),
        **lengths,
        "masked_fraction": 1 - float(mask.float().mean()),
        "grad_norm": update.grad_norm,
        "learning_rate": update.learning_rate,
        "engine_mismatch_nats": update.engine_mismatch,
        "by_position": position_means(update.stats, update.scored, mask, config.diagnostics.position_edges),
    }


def doubt_about_supports(record: Mapping[str, Any]) -> str | None:
    """Returns a warning where most tokens of a step taught nothing; none where all did, which `Student.update` refuses."""
    fraction = record.get("degenerate_support_fraction", 0.0)
    if fraction <= 0.5:
        return None
    return (
        f"{fraction:.0%} of the tokens taught nothing in step {record['step']}: their supports have fewer than two ids; "
        "use loss.topk.of=union, loss.topk.mass=tail or a larger loss.topk.k"
    )


def rollout_records(update: Update, student: Student) -> Iterator[dict[str, Any]]:
    """Yields one JSON line a rollout: its text, its ids and the values of every token."""
    lengths = [len(item.rollout.token_ids) for item in update.scored]
    values = per_token_values(update.stats)
    split = {name: value.split(lengths) for name, value in values.items()}
    for number, item in enumerate(update.scored):
        rollout = item.rollout
        yield {
            "prompt_index": rollout.prompt.index,
            "sample": rollout.sample,
            "prompt": student.tokenizer.decode(list(rollout.prompt.student_ids)),
            "completion": student.tokenizer.decode(rollout.token_ids),
            "token_ids": rollout.token_ids.tolist(),
            "finish_reason": rollout.finish_reason,
            "policy_version": rollout.policy_version,
            "sampler_logprobs": rounded(rollout.logprobs),
            **{name: rounded(parts[number]) for name, parts in split.items()},
            **({"recorded_as": item.recorded_as} if item.recorded_as else {}),
        }


def rounded(values: torch.Tensor) -> list[float]:
    """Returns the values with the five decimals that anyone reads."""
    return [round(value, 5) for value in values.tolist()]


def evaluate(stages: Pipeline, run: RunDirectory, display: Display) -> dict[str, float] | None:
    """Measures the student on the held-out prompts and writes the result beside the step metrics; None without such prompts.

    Each version is measured once, however often the run is resumed.
    """
    if stages.evaluator is None:
        return None
    version = stages.student.version
    if (known := run.evaluation(version)) is not None:
        return known
    display.phase(f"evaluating the student {f'after step {version}' if version else 'before training'}")
    result = stages.evaluator.evaluate(stages.student, stages.sampler)
    run.append_eval({"step": version, **result.values, "by_position": result.by_position})
    return result.values


def due(number: int, every: int) -> bool:
    """Whether something that happens every `every` steps (0 = never) happens at step `number`."""
    return every > 0 and number % every == 0


def save(config: Config, stages: Pipeline, run: RunDirectory) -> int:
    """Writes a checkpoint from which the run goes on as if nothing had happened; returns its step."""
    student = stages.student
    save_checkpoint(
        run.checkpoints,
        student.version,
        student.state(),
        {"prompts": stages.prompts.state_dict(), "models": stages.identities},
        keep_last=config.checkpoint.keep_last,
    )
    return student.version


def restore(checkpoint: Checkpoint, stages: Pipeline) -> None:
    """Puts student, optimizer and prompt stream back to where a checkpoint was saved."""
    student = stages.student
    student.load_state(checkpoint.tensors(like=student.state()), checkpoint.step)
    stages.prompts.load_state_dict(checkpoint.state["prompts"])


def peak_memory_gib(device: torch.device) -> float:
    """Returns the most memory used so far: of the GPU, or of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
