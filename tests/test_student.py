"""Facts about one optimizer step: what its gradient is, and what it does not depend on."""

import pytest
import torch

from opd.config import Config
from opd.errors import PreflightError, TrainingError
from opd.student import Student
from opd.teachers import build_teacher, find_teacher, request_for
from opd.types import Prompt, Rollout

VOCABULARY = 64
TRANSFORMERS = {"sampler": "hf"}


def config_of(student_folder, teacher_folder, **sections):
    base = {
        "student": {"model": str(student_folder), "compute_dtype": "float32"},
        "teacher": {"model": str(teacher_folder), "dtype": "float32"},
        "rollout": TRANSFORMERS,
        "train": {"learning_rate": 1e-3},
        "loss": {"chunk_tokens": 5},
    }
    merged = {key: base.get(key, {}) | sections.get(key, {}) for key in base | sections}
    return Config.model_validate(merged)


def rollouts_of(vocab_size, count=8, group=2, seed=0):
    """Random completions of random prompts, of different lengths; their sampler log-probabilities are set by `exact`."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for index in range(count // group):
        prompt = Prompt(index, *2 * [tuple(torch.randint(vocab_size, (3 + index,), generator=generator).tolist())])
        for sample in range(group):
            ids = torch.randint(vocab_size, (4 + 3 * sample + index,), generator=generator)
            found.append(Rollout(prompt, sample, ids, torch.zeros(len(ids)), "length", 0))
    return found


def exact(student, rollouts, k):
    """The rollouts with the student's own log-probabilities and top-K, as a perfect engine would give them."""
    from dataclasses import replace

    ids = student.topk_ids(rollouts, k)
    found = []
    for rollout, topk in zip(rollouts, ids, strict=True):
        tokens = torch.cat([torch.tensor(rollout.prompt.student_ids), rollout.token_ids])[None]
        with torch.no_grad():
            logits = student.model(tokens).logits[0, len(rollout.prompt.student_ids) - 1 : -1, : student.vocab_size]
        logprobs = logits.log_softmax(-1).gather(1, rollout.token_ids[:, None])[:, 0]
        found.append(replace(rollout, logprobs=logprobs, topk_ids=topk))
    return found


def teacher_of(config):
    return build_teacher(config, [find_teacher(config.teacher, pytest.fail)], VOCABULARY)


def scored_by(config, student, k=4):
    rollouts = exact(student, rollouts_of(student.vocab_size), k)
    return list(teacher_of(config).score(rollouts, request_for(config.loss, 4)))


LOSSES = [
    {"support": "full"},
    {"support": "topk", "topk": {"k": 4}},
    {"support": "topk", "topk": {"k": 4, "of": "union", "mass": "renormalize"}},
    {"support": "topk", "topk": {"k": 4, "mass": "weighted"}},
    {"support": "sampled"},
    {"support": "sampled", "sampled": {"baseline": "kl"}},
]


@pytest.mark.parametrize("loss", LOSSES, ids=str)
@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "token_sum"])
def test_the_gradient_does_not_depend_on_the_cut_into_microbatches(two_models, loss, reduction):
    gradients = []
    for budget in (10_000, 60, 30):
        config = config_of(
            *two_models,
            loss={"chunk_tokens": 5, "reduction": reduction, **loss},
            train={"microbatch_tokens": budget, "max_grad_norm": None},
        )
        student = Student(config, VOCABULARY)
        scored = scored_by(config, student)
        gradients.append(gradient_of(student, scored))
    for other in gradients[1:]:
        assert float((other - gradients[0]).norm() / gradients[0].norm()) < 1e-5


def gradient_of(student, scored):
    """The flat gradient of one update, caught before the optimizer moves."""
    caught = {}

    def catch():
        caught["gradient"] = torch.cat([p.grad.flatten() for p in student.trainable.values()]).clone()
        return 0.0

    student._step = catch
    student.update(scored, diagnostics_k=4)
    return caught["gradient"]


@pytest.mark.parametrize("loss", LOSSES[:2], ids=str)
def test_a_teacher_that_is_the_student_gives_no_loss_and_no_gradient(two_models, loss):
    student_folder, _ = two_models
    config = config_of(student_folder, student_folder, loss={"chunk_tokens": 5, **loss})
    student = Student(config, VOCABULARY)
    scored = scored_by(config, student)
    assert float(gradient_of(student, scored).norm()) < 1e-5
    update = student.update(scored, diagnostics_k=4)
    assert abs(update.loss) < 1e-6
    assert float(update.stats.overlap.mean()) == 1


@pytest.mark.parametrize("loss", LOSSES[:4], ids=str)
def test_steps_on_one_batch_bring_the_student_towards_the_teacher(two_models, loss):
    config = config_of(*two_models, loss={"chunk_tokens": 5, **loss}, sync={"max_mismatch": 100.0})
    student = Student(config, VOCABULARY)
    scored = scored_by(config, student)
    measure = config_of(*two_models, loss={"support": "full"})
    full = list(teacher_of(measure).score([s.rollout for s in scored], request_for(measure.loss, 4)))

    def distance():
        return float(student.measure(full, measure.loss, diagnostics_k=4).reverse_kl.mean())

    start = distance()
    for _ in range(12):
        student.update(scored, diagnostics_k=0)
    assert distance() < start
    assert student.version == 12


def test_a_batch_that_the_options_empty_is_an_error_that_names_them(two_models):
    config = config_of(*two_models, loss={"skip_first_tokens": 500})
    student = Student(config, VOCABULARY)
    scored = scored_by(config, student)
    with pytest.raises(TrainingError, match="skip_first_tokens"):
        student.update(scored, diagnostics_k=0)


@pytest.mark.parametrize("support", ["sampled", "topk", "full"])
def test_a_teacher_that_forbids_a_token_stops_the_run_before_a_step_and_is_told_apart(two_models, support):
    config = config_of(*two_models, loss={"support": support, "topk": {"k": VOCABULARY}})
    student = Student(config, VOCABULARY)
    teacher, scored = teacher_of(config), scored_by(config, student, k=VOCABULARY)
    written = int(scored[1].rollout.token_ids[2])
    # A bias of −inf forbids a token everywhere, for every support; the first rollout that meets it is the one named.
    forbidden, position = (written, 2) if support == "sampled" else ((written + 1) % VOCABULARY, 0)
    bias = torch.zeros(teacher.scorer.model.config.vocab_size)
    bias[forbidden] = -torch.inf
    teacher.scorer.model.get_output_embeddings().bias = torch.nn.Parameter(bias, requires_grad=False)
    request = request_for(config.loss, 4)
    scored = [scored[0], *teacher.score([item.rollout for item in scored[1:]], request)]
    before = {name: p.detach().clone() for name, p in student.trainable.items()}
    where = f"prompt 0, sample 1, completion token {position}"
    with pytest.raises(TrainingError) as caught:
        student.update(scored, diagnostics_k=0)
    assert where in caught.value.where
    assert f"probability of token {forbidden} (" in caught.value.why
    assert ("mask_token_ids" in caught.value.fix) == (support == "sampled")
    assert all(torch.equal(before[name], p) for name, p in student.trainable.items())


def test_supports_that_teach_nothing_stop_the_run_before_a_step(two_models):
    topk = {"k": 4, "of": "intersection", "mass": "renormalize"}
    config = config_of(*two_models, loss={"support": "topk", "topk": topk})
    student = Student(config, VOCABULARY)
    scored = scored_by(config, student)
    for item in scored:
        item.scores.support_ids[:, 1:] = -1
        item.scores.support_logprobs[:, 1:] = -torch.inf
    before = {name: parameter.detach().clone() for name, parameter in student.trainable.items()}
    with pytest.raises(TrainingError, match="nothing to learn from in step 1; no step was taken") as caught:
        student.update(scored, diagnostics_k=0)
    assert "loss.topk.of=union or loss.topk.mass=tail" in caught.value.fix
    assert all(torch.equal(before[name], parameter) for name, parameter in student.trainable.items())


def test_an_engine_with_other_weights_stops_the_run_before_a_step(two_models):
    from dataclasses import replace

    config = config_of(*two_models)
    student = Student(config, VOCABULARY)
    scored = scored_by(config, student)
    stale = [replace(s, rollout=replace(s.rollout, logprobs=s.rollout.logprobs - 1.0)) for s in scored]
    with pytest.raises(TrainingError, match="mismatch"):
        student.update(stale, diagnostics_k=0)
    assert student.version == 0


def test_lora_trains_adapters_only_and_syncs_the_weights_merged_once(two_models):
    config = config_of(
        *two_models,
        student={"lora": {"rank": 4}},
        train={"learning_rate": 1e-2},
    )
    student = Student(config, VOCABULARY)
    scored = scored_by(config, student)
    student.update(scored, diagnostics_k=0)
    assert all("lora_" in name for name in student.trainable)
    plain = Student(config_of(*two_models), VOCABULARY)
    names = dict(plain.named_weights())
    merged = dict(student.named_weights())
    assert merged.keys() == names.keys()
    assert any(not torch.equal(merged[name], names[name]) for name in names)
    plain.model.load_state_dict(merged, strict=False)
    tokens = torch.arange(20)[None]
    torch.testing.assert_close(plain.model(tokens).logits, student.model(tokens).logits, atol=1e-5, rtol=1e-4)
    again = dict(student.named_weights())
    assert all(torch.equal(again[name], merged[name]) for name in merged)


def test_an_adapter_on_a_tied_head_is_refused(two_models):
    config = config_of(*two_models, student={"lora": {"rank": 2, "targets": ["lm_head", "q_proj"]}})
    with pytest.raises(PreflightError, match="one tensor"):
        Student(config, VOCABULARY)


def test_a_checkpoint_of_the_student_continues_as_if_nothing_had_happened(two_models):
    config = config_of(*two_models, sync={"max_mismatch": 100.0})
    student = Student(config, VOCABULARY)
    scored = scored_by(config, student)
    student.update(scored, diagnostics_k=0)
    saved = {part: {k: v.clone() for k, v in tensors.items()} for part, tensors in student.state().items()}
    student.update(scored, diagnostics_k=0)
    resumed = Student(config, VOCABULARY)
    resumed.load_state(saved, 1)
    resumed.update(scored, diagnostics_k=0)
    for name, parameter in student.trainable.items():
        assert torch.equal(parameter, resumed.trainable[name])


def test_the_teachers_own_prompt_is_scored_at_the_same_completion_tokens(two_models):
    from dataclasses import replace

    config = config_of(*two_models, loss={"support": "sampled"})
    student = Student(config, VOCABULARY)
    teacher = teacher_of(config)
    longer = (60, 61, 62, 63, 1, 2)
    rollouts = [
        replace(r, prompt=replace(r.prompt, teacher_ids=longer + r.prompt.student_ids)) for r in rollouts_of(VOCABULARY)
    ]
    for item in teacher.score(rollouts, request_for(config.loss, 4)):
        prompt, ids = item.rollout.prompt.teacher_ids, item.rollout.token_ids
        tokens = torch.cat([torch.tensor(prompt), ids])[None]
        logits = teacher.scorer.model(tokens).logits[0, :, :VOCABULARY].log_softmax(-1)
        expected = torch.stack([logits[len(prompt) + t - 1, ids[t]] for t in range(len(ids))])
        torch.testing.assert_close(item.scores.sampled_logprobs, expected, atol=1e-4, rtol=1e-4)
    assert student.version == 0
