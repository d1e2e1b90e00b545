"""Which formulas of `losses.py` a configuration means: logits and targets in, loss and per-token values out.

c tokens of a chunk, S ids of a support, V vocabulary. Every loss of training, evaluation and the golden files comes
through `token_loss`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.linalg import vecdot

from opd import diagnostics, losses
from opd.config import LossSettings
from opd.types import Targets


@dataclass(frozen=True, slots=True)
class TokenStats:
    """Per-token values [T] of one pass, without gradient; None = not measured."""

    loss: Tensor
    """The loss, before the reducer's weights; 0 where the weight is 0."""
    logprob: Tensor
    """log p(y) at loss.temperature."""
    sampling_logprob: Tensor
    """log p(y) at the rollout's temperature, nothing truncated."""
    teacher_logprob: Tensor
    """log q(y) at loss.temperature."""
    reverse_kl: Tensor | None = None
    """KL(p‖q) over the whole vocabulary."""
    entropy: Tensor | None = None
    """H(p) over the whole vocabulary."""
    teacher_entropy: Tensor | None = None
    """H(q) over the whole vocabulary."""
    support_mass_student: Tensor | None = None
    """Z_p"""
    support_mass_teacher: Tensor | None = None
    """Z_q"""
    degenerate: Tensor | None = None
    """1 where a renormalised support has fewer than two ids."""
    overlap: Tensor | None = None
    """|TopK(p) ∩ TopK(q)| / k"""
    overlap_advantage: Tensor | None = None
    overlap_mass_student: Tensor | None = None
    overlap_mass_teacher: Tensor | None = None


def join_stats(parts: Sequence[TokenStats]) -> TokenStats:
    """Returns the per-token values of several chunks as one; a field that any of them lacks is None."""
    joined: dict[str, Any] = {}
    for field in fields(TokenStats):
        values = [getattr(part, field.name) for part in parts]
        joined[field.name] = None if any(value is None for value in values) else torch.cat(values)
    return TokenStats(**joined)


@dataclass(frozen=True, slots=True)
class _View:
    """What a pass over the logits of a chunk found, on the way to its loss."""

    loss: Tensor
    normaliser: Tensor
    """[c] logsumexp of the student's logits at τ."""
    entropy: Tensor | None
    reverse_kl: Tensor | None = None
    mass_student: Tensor | None = None
    mass_teacher: Tensor | None = None
    degenerate: Tensor | None = None


def token_loss(
    logits: Tensor,
    targets: Targets,
    settings: LossSettings,
    teacher_logits: Tensor | None,
    rollout_temperature: float,
    diagnostics_k: int,
) -> tuple[Tensor, TokenStats]:
    """Returns the loss [c] of a chunk, differentiable in the student's logits [c, V], and its per-token values.

    A token of weight 0 has loss 0, whatever the teacher says of it.
    """
    tempered = _tempered(logits, settings.temperature)
    log_q = None if teacher_logits is None else _tempered(teacher_logits, settings.temperature).log_softmax(-1)
    sampled = targets.token_ids[:, None]
    teacher_sampled = targets.teacher_logprobs if log_q is None else log_q.gather(1, sampled)[:, 0]
    assert teacher_sampled is not None, "the teacher's log-probabilities of the sampled tokens are missing"
    teacher_sampled = teacher_sampled.to(logits.dtype)
    match settings.support:
        case "full":
            view = _full(tempered, log_q, sampled, settings)
        case "topk":
            view = _topk(tempered, targets, settings)
        case "sampled":
            view = _sampled(tempered, log_q, teacher_sampled, targets, settings)
    logprob = tempered.detach().gather(1, sampled)[:, 0] - view.normaliser
    loss = torch.where(targets.weights == 0, 0.0, _importance(view.loss, logprob, targets, settings))
    stats = TokenStats(
        loss=loss.detach(),
        logprob=logprob,
        sampling_logprob=_at_temperature(logits.detach(), sampled, logprob, settings, rollout_temperature),
        teacher_logprob=teacher_sampled,
        reverse_kl=view.reverse_kl,
        support_mass_student=view.mass_student,
        support_mass_teacher=view.mass_teacher,
        degenerate=view.degenerate,
    )
    if diagnostics_k:
        stats = _with_diagnostics(stats, tempered.detach(), view, log_q, targets, settings, diagnostics_k)
    return loss, stats


def _tempered(logits: Tensor, temperature: float) -> Tensor:
    return logits if temperature == 1 else logits / temperature


def _full(tempered: Tensor, log_q: Tensor | None, sampled: Tensor, settings: LossSettings) -> _View:
    """The divergence over the whole vocabulary."""
    assert log_q is not None, "a full-vocabulary loss needs the teacher's hidden states and head"
    loss, log_p, entropy = losses.FullDivergence.apply(tempered, log_q, settings)
    normaliser = (tempered.detach().gather(1, sampled) - log_p.gather(1, sampled))[:, 0]
    return _View(loss, normaliser, entropy, loss.detach() if settings.divergence == "reverse_kl" else None)


def _topk(tempered: Tensor, targets: Targets, settings: LossSettings) -> _View:
    """The loss on the support that the teacher scored."""
    ids, log_q = targets.support_ids, targets.support_logprobs
    assert ids is not None, "a top-K loss needs a support"
    assert log_q is not None, "a top-K loss needs the teacher's log-probabilities on the support"
    log_p, tail_p, normaliser, entropy = losses.SupportLogprobs.apply(tempered, ids)
    log_q = log_q.to(log_p.dtype)
    loss = losses.topk_loss(log_p, tail_p, log_q, targets.tail_logprobs, settings)
    degenerate = losses.support_size(log_p) < 2 if settings.topk.mass == "renormalize" else None
    return _View(
        loss,
        normaliser,
        entropy,
        mass_student=log_p.detach().exp().sum(-1),
        mass_teacher=log_q.exp().sum(-1),
        degenerate=None if degenerate is None else degenerate.to(loss.dtype),
    )


def _sampled(
    tempered: Tensor, log_q: Tensor | None, teacher_sampled: Tensor, targets: Targets, settings: LossSettings
) -> _View:
    """The estimator from the sampled token; `importance: clip` replaces the policy gradient by its ratio form."""
    at_sampled, _, normaliser, entropy = losses.SupportLogprobs.apply(tempered, targets.token_ids[:, None])
    log_p = at_sampled[:, 0]
    reverse_kl = None if log_q is None else _reverse_kl(tempered.detach() - normaliser[:, None], log_q)
    if settings.sampled.estimator == "k2":
        return _View(losses.k2(log_p, teacher_sampled), normaliser, entropy, reverse_kl)
    baseline = None
    if settings.sampled.baseline == "kl":
        assert reverse_kl is not None, "the kl baseline needs the teacher's hidden states and head"
        baseline = -reverse_kl
    advantages = losses.advantage(log_p, teacher_sampled, baseline)
    if settings.importance == "clip":
        first = log_p.detach() if targets.first_logprobs is None else targets.first_logprobs.to(log_p.dtype)
        loss = losses.clipped(log_p, first, advantages, settings.clip_low, settings.clip_high)
    else:
        loss = losses.policy_gradient(log_p, advantages)
    return _View(loss, normaliser, entropy, reverse_kl)


def _reverse_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p‖q) [c] of distributions [c, V] without gradient."""
    p = log_p.exp()
    return vecdot(p, losses.without_impossible(p, log_p - log_q))


def _importance(loss: Tensor, log_p: Tensor, targets: Targets, settings: LossSettings) -> Tensor:
    """The loss times the two ratios, kept apart: student now over student at first sight, and that over the sampler."""
    first = log_p if targets.first_logprobs is None else targets.first_logprobs.to(log_p.dtype)
    if settings.importance == "truncated":
        loss = loss * losses.truncated_ratio(log_p, first, settings.importance_cap)
    if settings.sampler_correction == "truncated":
        sampler = targets.sampler_logprobs.to(log_p.dtype)
        loss = loss * losses.truncated_ratio(first, sampler, settings.sampler_correction_cap)
    return loss


def _at_temperature(
    logits: Tensor, sampled: Tensor, log_p: Tensor, settings: LossSettings, rollout_temperature: float
) -> Tensor:
    """log p(y) [c] at the temperature that the sampler used."""
    if rollout_temperature == settings.temperature:
        return log_p
    warm = logits / rollout_temperature
    return warm.gather(1, sampled)[:, 0] - warm.logsumexp(-1)


def _with_diagnostics(
    stats: TokenStats,
    logits: Tensor,
    view: _View,
    log_q: Tensor | None,
    targets: Targets,
    settings: LossSettings,
    k: int,
) -> TokenStats:
    """The values with entropies and, where the teacher's top k is known, its overlap with the student's."""
    teacher_entropy = targets.teacher_entropy if log_q is None else diagnostics.entropy_of(log_q)
    stats = replace(stats, entropy=view.entropy, teacher_entropy=teacher_entropy)
    if log_q is not None and view.reverse_kl is None:
        stats = replace(stats, reverse_kl=_reverse_kl(logits - view.normaliser[:, None], log_q))
    teacher_ids = targets.teacher_topk_ids if log_q is None else log_q.topk(k, dim=-1).indices
    if teacher_ids is None:
        return stats
    student_ids = logits.topk(k, dim=-1).indices
    shared = diagnostics.shared_ids(student_ids, teacher_ids[:, :k])
    stats = replace(stats, overlap=diagnostics.overlap_ratio(shared, logits.dtype))
    if log_q is not None:
        at_ids, known = log_q.gather(1, student_ids), torch.ones_like(shared)
    elif settings.support == "topk" and settings.topk.of in ("student", "union") and k <= settings.topk.k:
        at_ids, known = _from_support(student_ids, targets)
    else:
        return stats
    # Rounding at rank k can leave one of the student's ids without a teacher value; it then counts as not shared.
    shared, at_ids = shared & known, at_ids.to(logits.dtype)
    student_logprobs = logits.gather(1, student_ids) - view.normaliser[:, None]
    return replace(
        stats,
        overlap_advantage=diagnostics.overlap_token_advantage(student_logprobs, at_ids, shared),
        overlap_mass_student=diagnostics.overlap_mass(student_logprobs, shared),
        overlap_mass_teacher=diagnostics.overlap_mass(at_ids, shared),
    )


def _from_support(ids: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
    """(log q, known) [c, k] at ids [c, k], from what the teacher said of the support."""
    assert targets.support_ids is not None
    assert targets.support_logprobs is not None
    place, known = diagnostics.places_of(ids, targets.support_ids)
    return targets.support_logprobs.gather(1, place).masked_fill(~known, 0.0), known
