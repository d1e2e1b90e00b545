"""Losses from hidden states and heads, a chunk of tokens at a time, so that no [T, V] tensor ever exists.

The gradient of a chunk is taken at once, in the forward pass, and only the gradients with respect to hidden states and
head are kept. The formulas are those of `losses.py`; this module decides which of them a configuration means.

T completion tokens of a micro-batch, c tokens of a chunk, S ids of a support, V vocabulary, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from opd import diagnostics, losses
from opd.config import LossSettings
from opd.heads import Head
from opd.types import ScoreRequest, Targets, TeacherScores


@dataclass(frozen=True, slots=True)
class TokenStats:
    """Per-token values [T] of one pass, without gradient; None = not measured."""

    loss: Tensor
    """The loss, before the reducer's weights."""
    logprob: Tensor
    """log p(y) at loss.temperature."""
    sampling_logprob: Tensor
    """log p(y) at the rollout's temperature, nothing truncated."""
    teacher_logprob: Tensor
    """log q(y) at loss.temperature."""
    reverse_kl: Tensor | None = None
    """KL(p‖q) over the whole vocabulary."""
    entropy: Tensor | None = None
    teacher_entropy: Tensor | None = None
    support_mass_student: Tensor | None = None
    """Z_p"""
    support_mass_teacher: Tensor | None = None
    """Z_q"""
    degenerate: Tensor | None = None
    """1 where a renormalised support has fewer than two ids."""
    overlap: Tensor | None = None
    overlap_advantage: Tensor | None = None
    overlap_mass_student: Tensor | None = None
    overlap_mass_teacher: Tensor | None = None


def head_loss(
    hidden: Tensor,
    head: Head,
    targets: Targets,
    settings: LossSettings,
    *,
    teacher_head: Head | None,
    rollout_temperature: float,
    diagnostics_k: int,
) -> tuple[Tensor, TokenStats]:
    """Returns Σ_t weight_t·loss_t, differentiable in hidden states [T, D] and head, and the per-token values.

    `diagnostics_k` > 0 adds overlap and entropies. Raises nothing: a loss that is not finite is for the caller to report.
    """
    plan = _Plan(head, targets, settings, teacher_head, rollout_temperature, diagnostics_k)
    needs = torch.is_grad_enabled() and (hidden.requires_grad or head.weight.requires_grad)
    if not needs:
        parts = [plan.chunk(hidden[rows], rows)[1:] for rows in plan.rows()]
        stats = join_stats([part[1] for part in parts])
        return (stats.loss * targets.weights).sum(), stats
    collected: list[TokenStats] = []
    loss = _ChunkedLoss.apply(hidden, head.weight, head.bias, plan, collected)
    return loss, join_stats(collected)


def join_stats(parts: Sequence[TokenStats]) -> TokenStats:
    """Returns the per-token values of several chunks as one; a field that any of them lacks is None."""
    joined = {}
    for field in fields(TokenStats):
        values = [getattr(part, field.name) for part in parts]
        joined[field.name] = None if any(value is None for value in values) else torch.cat(values)
    return TokenStats(**joined)


class _ChunkedLoss(torch.autograd.Function):
    """The weighted loss whose gradients with respect to hidden states, weight and bias are made in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, plan: _Plan, collected: list[TokenStats]
    ) -> Tensor:
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        d_hidden = torch.empty_like(hidden) if wants_hidden else None
        d_weight = torch.zeros_like(weight) if wants_weight else None
        d_bias = torch.zeros_like(bias) if wants_bias and bias is not None else None
        used = weight[: plan.head.vocab_size]
        loss = hidden.new_zeros((), dtype=plan.targets.weights.dtype)
        for rows in plan.rows():
            part = hidden[rows]
            d_product, weighted, stats = plan.chunk(part, rows, with_gradient=True)
            loss = loss + weighted
            collected.append(stats)
            assert d_product is not None
            if d_hidden is not None:
                d_hidden[rows] = d_product @ used.to(d_product.dtype)
            if d_weight is not None:
                accumulator = d_weight[: plan.head.vocab_size]
                if d_product.dtype == accumulator.dtype == part.dtype:
                    accumulator.addmm_(d_product.t(), part)
                else:
                    accumulator += d_product.t() @ part.to(d_product.dtype)
            if d_bias is not None:
                d_bias[: plan.head.vocab_size] += d_product.sum(0)
        ctx.save_for_backward(d_hidden, d_weight, d_bias)
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        scaled = [None if tensor is None else tensor.mul_(upstream) for tensor in ctx.saved_tensors]
        return scaled[0], scaled[1], scaled[2], None, None


@dataclass(frozen=True, slots=True)
class _Plan:
    """Everything that a chunk needs besides its hidden states."""

    head: Head
    targets: Targets
    settings: LossSettings
    teacher_head: Head | None
    rollout_temperature: float
    diagnostics_k: int

    def rows(self) -> list[slice]:
        """The chunks."""
        length, step = len(self.targets.token_ids), self.settings.chunk_tokens
        return [slice(start, min(start + step, length)) for start in range(0, length, step)]

    def chunk(
        self, hidden: Tensor, rows: slice, *, with_gradient: bool = False
    ) -> tuple[Tensor | None, Tensor, TokenStats]:
        """Returns the gradient of the chunk's weighted loss with respect to hidden × weightᵀ, that loss, and its values."""
        targets = Targets(**{f.name: _take(getattr(self.targets, f.name), rows) for f in fields(Targets)})
        with torch.no_grad():
            product = self.head.product(hidden)
            logits = self.head.activate(product)
            teacher_logits = self._teacher_logits(targets)
        with torch.set_grad_enabled(with_gradient):
            leaf = logits.requires_grad_(with_gradient)
            loss, stats = token_loss(
                leaf, targets, self.settings, teacher_logits, self.rollout_temperature, self.diagnostics_k
            )
            weighted = (loss * targets.weights).sum()
        if not with_gradient:
            return None, weighted, stats
        (d_logits,) = torch.autograd.grad(weighted, leaf)
        d_product = self.head.through_activation(d_logits, logits.detach())
        return d_product.to(product.dtype), weighted.detach(), stats

    def _teacher_logits(self, targets: Targets) -> Tensor | None:
        if self.teacher_head is None or targets.teacher_hidden is None:
            return None
        # The teacher computes in its own type, whatever the student's autocast says.
        with torch.autocast(targets.teacher_hidden.device.type, enabled=False):
            return self.teacher_head.logits(targets.teacher_hidden)


def _take(tensor: Tensor | None, rows: slice) -> Tensor | None:
    return None if tensor is None else tensor[rows]


def token_loss(
    logits: Tensor,
    targets: Targets,
    settings: LossSettings,
    teacher_logits: Tensor | None,
    rollout_temperature: float,
    diagnostics_k: int,
) -> tuple[Tensor, TokenStats]:
    """Returns the loss [c] of a chunk, differentiable in the student's logits [c, V], and its per-token values."""
    tempered = logits if settings.temperature == 1 else logits / settings.temperature
    log_q = None if teacher_logits is None else (teacher_logits / settings.temperature).log_softmax(-1)
    sampled = targets.token_ids[:, None]
    entropy = reverse_kl = mass_student = mass_teacher = degenerate = None
    match settings.support:
        case "full":
            assert log_q is not None, "a full-vocabulary loss needs the teacher's hidden states and head"
            loss = losses.FullDivergence.apply(tempered, log_q, settings)
            normaliser = tempered.detach().logsumexp(-1)
            log_p_sampled = tempered.detach().gather(1, sampled)[:, 0] - normaliser
            if settings.divergence == "reverse_kl":
                reverse_kl = loss.detach()
        case "topk":
            ids, support_q = targets.support_ids, targets.support_logprobs
            assert ids is not None and support_q is not None, "a top-K loss needs the teacher's support"
            log_p, tail_p, entropy = losses.SupportLogprobs.apply(tempered, ids)
            loss = losses.topk_loss(log_p, tail_p, support_q.to(log_p.dtype), targets.tail_logprobs, settings)
            mass_student, mass_teacher = log_p.detach().exp().sum(-1), support_q.exp().sum(-1)
            if settings.topk.mass == "renormalize":
                degenerate = (losses.support_size(log_p) < 2).to(loss.dtype)
            # The normaliser follows from any present id; the tail is there even where a support is empty.
            normaliser = tempered.detach().logsumexp(-1)
            log_p_sampled = tempered.detach().gather(1, sampled)[:, 0] - normaliser
        case "sampled":
            at_sampled, _, entropy = losses.SupportLogprobs.apply(tempered, sampled)
            log_p_sampled = at_sampled[:, 0]
            normaliser = tempered.detach().gather(1, sampled)[:, 0] - log_p_sampled.detach()
            if log_q is not None:
                reverse_kl = losses.divergence(tempered.detach().log_softmax(-1), log_q, _REVERSE_KL)
            loss = torch.zeros_like(log_p_sampled)  # made below, when log q(y) is known
    teacher_sampled = targets.teacher_logprobs if log_q is None else log_q.gather(1, sampled)[:, 0]
    assert teacher_sampled is not None
    teacher_sampled = teacher_sampled.to(logits.dtype)
    if settings.support == "sampled":
        loss = _sampled_loss(log_p_sampled, teacher_sampled, reverse_kl, targets, settings)
    loss = _importance(loss, log_p_sampled.detach(), targets, settings)
    stats = TokenStats(
        loss=loss.detach(),
        logprob=log_p_sampled.detach(),
        sampling_logprob=_at_temperature(logits.detach(), sampled, log_p_sampled, settings, rollout_temperature),
        teacher_logprob=teacher_sampled,
        reverse_kl=reverse_kl,
        support_mass_student=mass_student,
        support_mass_teacher=mass_teacher,
        degenerate=degenerate,
    )
    if diagnostics_k:
        stats = _with_diagnostics(
            stats, tempered.detach(), normaliser, entropy, log_q, targets, settings, diagnostics_k
        )
    return loss, stats


_REVERSE_KL = LossSettings(support="full")


def _sampled_loss(
    log_p: Tensor, log_q: Tensor, reverse_kl: Tensor | None, targets: Targets, settings: LossSettings
) -> Tensor:
    """The estimator of loss.support=sampled [c]; clip replaces the policy gradient by its ratio form."""
    if settings.sampled.estimator == "k2":
        return losses.k2(log_p, log_q)
    baseline = None
    if settings.sampled.baseline == "kl":
        assert reverse_kl is not None, "the kl baseline needs the teacher's hidden states and head"
        baseline = -reverse_kl
    advantages = losses.advantage(log_p, log_q, baseline)
    if settings.importance == "clip":
        first = log_p.detach() if targets.first_logprobs is None else targets.first_logprobs.to(log_p.dtype)
        return losses.clipped(log_p, first, advantages, settings.clip_low, settings.clip_high)
    return losses.policy_gradient(log_p, advantages)


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
        return log_p.detach()
    warm = logits / rollout_temperature
    return warm.gather(1, sampled)[:, 0] - warm.logsumexp(-1)


def _with_diagnostics(
    stats: TokenStats,
    logits: Tensor,
    normaliser: Tensor,
    entropy: Tensor | None,
    log_q: Tensor | None,
    targets: Targets,
    settings: LossSettings,
    k: int,
) -> TokenStats:
    """The values with entropies and, where the teacher's top k is known, its overlap with the student's."""
    if entropy is None:
        entropy = diagnostics.entropy_of(logits - normaliser[:, None])
    teacher_entropy = targets.teacher_entropy if log_q is None else diagnostics.entropy_of(log_q)
    stats = replace(stats, entropy=entropy, teacher_entropy=teacher_entropy)
    teacher_ids = targets.teacher_topk_ids if log_q is None else log_q.topk(k, dim=-1).indices
    if teacher_ids is None:
        return stats
    student_ids = logits.topk(k, dim=-1).indices
    shared = diagnostics.shared_ids(student_ids, teacher_ids[:, :k])
    stats = replace(stats, overlap=diagnostics.overlap_ratio(shared))
    if log_q is not None:
        at_ids, known = log_q.gather(1, student_ids), torch.ones_like(shared)
    elif settings.support == "topk" and settings.topk.of in ("student", "union") and k <= settings.topk.k:
        assert targets.support_ids is not None and targets.support_logprobs is not None
        matches = student_ids[:, :, None] == targets.support_ids[:, None, :]
        known = matches.any(-1)
        place = matches.to(torch.uint8).argmax(-1)
        at_ids = targets.support_logprobs.gather(1, place).masked_fill(~known, 0.0)
    else:
        return stats
    student_logprobs = logits.gather(1, student_ids) - normaliser[:, None]
    # A tie at rank k can leave one of the student's ids without a teacher value; it then counts as not shared.
    shared = shared & known
    return replace(
        stats,
        overlap_advantage=diagnostics.overlap_token_advantage(student_logprobs, at_ids.to(logits.dtype), shared),
        overlap_mass_student=diagnostics.overlap_mass(student_logprobs, shared),
        overlap_mass_teacher=diagnostics.overlap_mass(at_ids.to(logits.dtype), shared),
    )


@torch.no_grad()
def topk_ids(hidden: Tensor, head: Head, k: int, chunk_tokens: int) -> Tensor:
    """Returns the k most probable ids [T, k] at hidden states [T, D], by descending probability."""
    return torch.cat([head.logits(part).topk(k, dim=-1).indices for part in hidden.split(chunk_tokens)])


@torch.no_grad()
def teacher_scores(
    hidden: Tensor,
    head: Head,
    token_ids: Tensor,
    request: ScoreRequest,
    student_ids: Tensor | None,
    chunk_tokens: int = 256,
) -> TeacherScores:
    """Returns what was asked of the teacher at hidden states [T, D] and sampled tokens [T].

    student_ids [T, K] is the student's support, for requests of kind topk that are not about the teacher's alone. For the
    full vocabulary the hidden states themselves are the answer: the loss applies the head, chunk by chunk.
    """
    if request.kind == "full":
        return TeacherScores(hidden=hidden)
    parts = []
    for start in range(0, len(hidden), chunk_tokens):
        rows = slice(start, start + chunk_tokens)
        logits = head.logits(hidden[rows]) / request.temperature
        parts.append(_score_chunk(logits, token_ids[rows], request, _take(student_ids, rows)))
    joined = {}
    for field in fields(TeacherScores):
        values = [getattr(part, field.name) for part in parts]
        joined[field.name] = None if values[0] is None else torch.cat(values)
    return TeacherScores(**joined)


def _score_chunk(logits: Tensor, token_ids: Tensor, request: ScoreRequest, student_ids: Tensor | None) -> TeacherScores:
    """The scores of a chunk whose logits [c, V] are already divided by the temperature."""
    own_k = max(request.diagnostics_k, request.k if request.support_of != "student" else 0)
    own_ids = logits.topk(own_k, dim=-1).indices if own_k else None
    diagnosed = own_ids[:, : request.diagnostics_k] if request.diagnostics_k and own_ids is not None else None
    sampled = token_ids[:, None]
    if request.kind == "sampled":
        at_sampled, _, entropy = losses.SupportLogprobs.apply(logits, sampled)
        return TeacherScores(at_sampled[:, 0], topk_ids=diagnosed, entropy=entropy if request.diagnostics_k else None)
    ids = support_ids(student_ids, None if own_ids is None else own_ids[:, : request.k], request.support_of)
    at_ids, tail, entropy = losses.SupportLogprobs.apply(logits, ids)
    return TeacherScores(
        sampled_logprobs=logits.gather(1, sampled)[:, 0] - logits.logsumexp(-1),
        support_ids=ids,
        support_logprobs=at_ids,
        tail_logprobs=tail,
        topk_ids=diagnosed,
        entropy=entropy if request.diagnostics_k else None,
    )


def support_ids(student_ids: Tensor | None, teacher_ids: Tensor | None, of: str) -> Tensor:
    """Returns the support [T, S] of a top-K loss; −1 fills positions with fewer ids (union and intersection)."""
    if of == "teacher":
        assert teacher_ids is not None
        return teacher_ids
    assert student_ids is not None
    if of == "student":
        return student_ids
    assert teacher_ids is not None
    if of == "intersection":
        return student_ids.masked_fill(~diagnostics.shared_ids(student_ids, teacher_ids), -1)
    return torch.cat([student_ids, teacher_ids.masked_fill(diagnostics.shared_ids(teacher_ids, student_ids), -1)], -1)
