"""The catalogue of metrics: for every key of metrics.jsonl its unit, which way is good, and one sentence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Direction = Literal["lower", "higher", "neither"]


@dataclass(frozen=True, slots=True)
class Metric:
    """What one key of metrics.jsonl or evals.jsonl means."""

    name: str
    unit: str
    direction: Direction
    """Which way is better; "neither" where the value is watched and not improved."""
    sentence: str


CATALOGUE = (
    Metric("step", "steps", "neither", "Optimizer steps taken, this one included; 0 is before the first."),
    Metric("loss", "nats/token", "lower", "What was minimised, under loss.reduction; comparable only between runs with the same loss."),
    Metric("reverse_kl", "nats/token", "lower", "Exact KL(student‖teacher) over the whole vocabulary; present with loss.support=full and in evaluations."),
    Metric("reverse_kl_sampled", "nats/token", "lower", "Mean of log p(y) − log q(y) over the sampled tokens: an unbiased but noisy estimate of the reverse KL, and it can be negative."),
    Metric("overlap", "fraction", "higher", "Share of the student's top-k tokens that are among the teacher's top k."),
    Metric("overlap_advantage", "nats", "higher", "Mean over the shared top-k tokens of p̄·(log q̄ − log p̄), both renormalised on them; never positive, 0 when they agree."),
    Metric("overlap_mass_student", "probability", "higher", "Student's probability on the tokens that both top-k sets share."),
    Metric("overlap_mass_teacher", "probability", "higher", "Teacher's probability on the tokens that both top-k sets share."),
    Metric("support_mass_student", "probability", "neither", "Z_p, the student's probability on the support of a top-K loss; a fall says that mass drains out of it."),
    Metric("support_mass_teacher", "probability", "neither", "Z_q, the teacher's probability on the same support."),
    Metric("degenerate_support_fraction", "fraction", "lower", "Share of positions whose support has fewer than two ids and so contributes no loss (topk.mass=renormalize)."),
    Metric("student_entropy", "nats/token", "neither", "Full-vocabulary entropy of the student; a steady fall far below the teacher's is collapse."),
    Metric("teacher_entropy", "nats/token", "neither", "Full-vocabulary entropy of the teacher at the same positions."),
    Metric("entropy_gap", "nats/token", "lower", "Mean over positions of |H(teacher) − H(student)|."),
    Metric("completion_length_tokens", "tokens", "neither", "Mean length of the student's completions, end-of-sequence token included."),
    Metric("truncated_fraction", "fraction", "lower", "Share of completions that were cut at rollout.max_tokens."),
    Metric("masked_fraction", "fraction", "neither", "Share of completion tokens that loss.mask_* and skip_first_tokens left out."),
    Metric("grad_norm", "nats", "neither", "Global norm of the gradient before clipping."),
    Metric("learning_rate", "per step", "neither", "Learning rate of this step."),
    Metric("engine_mismatch_nats", "nats/token", "lower", "KL by which sampler and student disagree about the same weights and tokens; a jump says that a weight sync failed."),
    Metric("tokens", "tokens", "neither", "Completion tokens of the step."),
    Metric("prompt_tokens", "tokens", "neither", "Prompt tokens of the step, counted once a completion."),
    Metric("tokens_per_second", "tokens/s", "higher", "Completion tokens of the step over step_seconds."),
    Metric("rollout_seconds", "s", "lower", "Time in which the student wrote."),
    Metric("score_seconds", "s", "lower", "Time in which the teacher scored, where it did not overlap with writing."),
    Metric("score_hidden_fraction", "fraction", "higher", "Share of the teacher's working time that was hidden behind the rollouts; 0 with an in-process teacher, which works while nothing is written."),
    Metric("update_seconds", "s", "lower", "Time of forward, backward and optimizer."),
    Metric("sync_seconds", "s", "lower", "Time of sending the weights to the sampler."),
    Metric("step_seconds", "s", "lower", "Time of the whole step."),
    Metric("peak_memory_gib", "GiB", "lower", "Most memory in use so far: of the student's GPU, or of the process on a CPU."),
    Metric("policy_version", "steps", "neither", "Version of the student after the step."),
    Metric("dropped_prompts", "prompts", "lower", "Prompts left out so far because they were too long."),
    Metric("epoch", "epochs", "neither", "Passes over the training prompts that are complete."),
    Metric("by_position", "see the metric", "neither", "The same means by position in the completion: bucket edges in tokens, then one list a metric, null where a bucket is empty."),
    Metric("teacher_text_reverse_kl", "nats/token", "lower", "Reverse KL on completions that the teacher wrote once: evaluations only, and the text does not change as the student does."),
    Metric("teacher_completion_length_tokens", "tokens", "neither", "Mean length of those completions."),
)  # fmt: skip
"""In the order in which they are shown."""

METRICS = {metric.name: metric for metric in CATALOGUE}
