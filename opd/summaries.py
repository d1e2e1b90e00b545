"""From per-token values to the numbers of one step or one evaluation: means over unmasked completion tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch import Tensor

from opd.diagnostics import by_position, entropy_gap
from opd.linear_loss import TokenStats
from opd.types import Rollout, ScoredRollout

Item = TypeVar("Item")

STATS_OF_METRIC = {
    "reverse_kl": "reverse_kl",
    "student_entropy": "entropy",
    "teacher_entropy": "teacher_entropy",
    "support_mass_student": "support_mass_student",
    "support_mass_teacher": "support_mass_teacher",
    "overlap": "overlap",
    "overlap_advantage": "overlap_advantage",
    "overlap_mass_student": "overlap_mass_student",
    "overlap_mass_teacher": "overlap_mass_teacher",
    "degenerate_support_fraction": "degenerate",
}
"""Metric name → field of the per-token values whose mean it is."""


@dataclass(slots=True)
class Clock:
    """Seconds booked under the names of stages."""

    seconds: dict[str, float] = field(default_factory=dict)

    def pulling(self, stage: str, items: Iterable[Item]) -> Iterator[Item]:
        """Yields the items and books the time that producing each one took under `stage`."""
        iterator = iter(items)
        while True:
            start = perf_counter()
            try:
                item = next(iterator)
            except StopIteration:
                return
            finally:
                self.seconds[stage] = self.seconds.get(stage, 0.0) + perf_counter() - start
            yield item


def token_means(stats: TokenStats, mask: Tensor) -> dict[str, float]:
    """Returns the mean of every measured per-token value over the tokens where `mask` [T] is set."""
    values = per_token_values(stats)
    return {name: float(value[mask].mean()) for name, value in values.items()}


def per_token_values(stats: TokenStats) -> dict[str, Tensor]:
    """Returns metric name → [T] values on the CPU."""
    values = {"reverse_kl_sampled": (stats.logprob - stats.teacher_logprob).cpu()}
    for metric, name in STATS_OF_METRIC.items():
        if (value := getattr(stats, name, None)) is not None:
            values[metric] = value.cpu().float()
    if "teacher_entropy" in values and "student_entropy" in values:
        values["entropy_gap"] = entropy_gap(values["student_entropy"], values["teacher_entropy"])
    return values


def position_means(
    stats: TokenStats, scored: Sequence[ScoredRollout], mask: Tensor, edges: Sequence[int]
) -> dict[str, Any]:
    """Returns the same means by position bucket: {"edges": […], metric: [mean per bucket, null where empty]}."""
    positions = torch.cat([torch.arange(len(item.rollout.token_ids)) for item in scored])[mask]
    values = per_token_values(stats)
    return {"edges": list(edges)} | {name: by_position(value[mask], positions, edges) for name, value in values.items()}


def length_values(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Returns mean completion length, the truncated share, and the number of completion and of all tokens."""
    lengths = torch.tensor([len(rollout.token_ids) for rollout in rollouts], dtype=torch.float32)
    prompts = sum(len(rollout.prompt.student_ids) for rollout in rollouts)
    return {
        "completion_length_tokens": float(lengths.mean()),
        "truncated_fraction": sum(rollout.finish_reason == "length" for rollout in rollouts) / len(rollouts),
        "tokens": int(lengths.sum()),
        "prompt_tokens": prompts,
    }
