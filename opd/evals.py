"""Evaluation on fixed held-out prompts: how far the student is from the teacher, before and after."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from opd import batching
from opd.config import Config, LossSettings, Support
from opd.samplers import Sampler, SamplingParams
from opd.student import Student
from opd.summaries import length_values, position_means, token_means
from opd.teachers import Scorer, request_for
from opd.types import Prompt, Rollout, ScoredRollout

EVAL_SEED = 1_000_003
"""Fixed, so that evaluations before, during and after a run draw with the same random numbers."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One measurement of the student on the held-out prompts."""

    values: dict[str, float]
    """Means on the student's own completions; those named teacher_text_ and teacher_completion_ are of the teacher's fixed completions."""
    by_position: dict[str, object]
    """The same by position in the student's completions."""


class Evaluator:
    """The held-out prompts, and the teacher's own completions of some of them, written once."""

    def __init__(self, config: Config, prompts: Sequence[Prompt], teacher: Scorer, writer: Sampler | None) -> None:
        """`writer` samples from the teacher; None leaves the teacher's own completions out."""
        self.config = config
        self.prompts = list(prompts)
        self.teacher = teacher
        self.writer = writer
        # The whole vocabulary where the teacher can give it: the exact KL, whatever the run trains on.
        support: Support = "full" if teacher.capabilities.hidden else "sampled"
        self.loss = LossSettings(support=support, chunk_tokens=config.loss.chunk_tokens)
        self.request = request_for(self.loss, config.diagnostics.k)
        self._teacher_scored: list[ScoredRollout] | None = None

    def evaluate(self, student: Student, sampler: Sampler) -> Evaluation:
        """Returns reverse KL, overlap, entropies and lengths on completions that the student writes now.

        Raises TrainingError when the engine does not hold the student's weights.
        """
        params = SamplingParams(max_tokens=self.config.eval.max_tokens, stop_token_ids=student.eos_ids)
        scored = self._scored(sampler.generate(self.prompts, params, EVAL_SEED))
        stats = student.measure(scored, self.loss, diagnostics_k=self.config.diagnostics.k)
        rollouts = [item.rollout for item in scored]
        mask = torch.ones(len(stats.loss), dtype=torch.bool)
        values = token_means(stats, mask) | length_values(rollouts)
        values["engine_mismatch_nats"] = student.verify_engine(rollouts, stats, truncated=False)
        if self.writer is not None:
            values |= self._on_teacher_text(student, self.writer)
        return Evaluation(values, position_means(stats, scored, mask, self.config.diagnostics.position_edges))

    def _on_teacher_text(self, student: Student, writer: Sampler) -> dict[str, float]:
        """The reverse KL on completions that the teacher wrote: the same texts before and after."""
        if self._teacher_scored is None:
            params = SamplingParams(max_tokens=self.config.eval.max_tokens, stop_token_ids=student.eos_ids)
            prompts = self.prompts[: self.config.eval.teacher_completions]
            asked = [replace(prompt, student_ids=prompt.teacher_ids) for prompt in prompts]
            by_index = {prompt.index: prompt for prompt in prompts}
            written = writer.generate(asked, params, EVAL_SEED)
            self._teacher_scored = self._scored(replace(r, prompt=by_index[r.prompt.index]) for r in written)
        scored = self._teacher_scored
        stats = student.measure(scored, self.loss, diagnostics_k=0)
        means = token_means(stats, torch.ones(len(stats.loss), dtype=torch.bool))
        lengths = length_values([item.rollout for item in scored])
        return {
            "teacher_text_reverse_kl": means.get("reverse_kl", means["reverse_kl_sampled"]),
            "teacher_completion_length_tokens": lengths["completion_length_tokens"],
        }

    def _scored(self, rollouts: Iterable[Rollout]) -> list[ScoredRollout]:
        return batching.in_order(self.teacher.score(rollouts, self.request))
