"""Losses and scores from hidden states and heads, a chunk of tokens at a time: no [T, V] tensor ever exists.

The gradient of a chunk is taken at once, in the forward pass, and only the gradients with respect to hidden states and
head are kept. What is computed from the logits is decided in `token_loss.py`.

T completion tokens of a micro-batch, c tokens of a chunk, S ids of a support, V vocabulary, D hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from opd import diagnostics, losses
from opd.config import LossSettings
from opd.heads import Head
from opd.token_loss import TokenStats, join_stats, token_loss
from opd.types import ScoreRequest, Targets, TeacherScores

CPU_BLOCK_ELEMENTS = 2**19
"""Logits a CPU thread works on at a time: blocks that stay in the cache take a third of the time of whole chunks."""
CPU_GRADIENT_ROWS = 2048
"""Vocabulary rows of the head's gradient that a CPU adds to at a time."""


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

    `diagnostics_k` > 0 adds overlap and entropies. A loss that is not finite is for the caller to report: it comes back
    as it is, with the values that tell where it happened.
    """
    student_head = head.in_compute_type()
    # What follows is in explicit types: autocast would take sums over the vocabulary to bfloat16, and the teacher with them.
    with torch.autocast(hidden.device.type, enabled=False):
        teacher_head = None if teacher_head is None else teacher_head.in_compute_type()
        plan = _Plan(student_head, targets, settings, teacher_head, rollout_temperature, diagnostics_k)
        trained = [t for t in (hidden, head.weight, head.bias) if t is not None and t.requires_grad]
        if torch.is_grad_enabled() and trained:
            collected: list[TokenStats] = []
            loss = _ChunkedLoss.apply(hidden, head.weight, head.bias, plan, collected)
            return loss, join_stats(collected)
        with torch.no_grad():
            stats = join_stats([s for rows in plan.chunks() for s in plan.run(hidden[rows], rows, gradient=False)[1]])
            return (stats.loss * targets.weights).sum(), stats


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
        vocab_size = plan.head.vocab_size
        for rows in plan.chunks():
            part = hidden[rows]
            d_product, stats = plan.run(part, rows, gradient=True)
            collected += stats
            if d_hidden is not None:
                d_hidden[rows] = d_product @ plan.head.weight
            if d_weight is not None:
                _add_weight_gradient(d_weight[:vocab_size], d_product, part)
            if d_bias is not None:
                d_bias[:vocab_size] += d_product.sum(0)
        ctx.save_for_backward(d_hidden, d_weight, d_bias)
        return (torch.cat([stats.loss for stats in collected]) * plan.targets.weights).sum()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        # In place: a second backward pass through the same loss is refused by autograd's version check.
        scaled = [None if tensor is None else tensor.mul_(upstream) for tensor in ctx.saved_tensors]
        return scaled[0], scaled[1], scaled[2], None, None


def _add_weight_gradient(total: Tensor, d_product: Tensor, hidden: Tensor) -> None:
    """Adds d_productᵀ [V, c] · hidden [c, D] to `total` [V, D], which stays in its own, wider type."""
    if d_product.dtype == total.dtype == hidden.dtype:
        total.addmm_(d_product.t(), hidden)
        return
    hidden = hidden.to(d_product.dtype)
    # A CPU takes half the time when a product in the narrow type is added while it is still in the cache.
    step = CPU_GRADIENT_ROWS if total.device.type == "cpu" else len(total)
    for rows in _cut(len(total), step):
        total[rows] += d_product[:, rows].t() @ hidden


@dataclass(frozen=True, slots=True)
class _Plan:
    """Everything that a chunk needs besides its hidden states."""

    head: Head
    """The student's, in the type of its products."""
    targets: Targets
    settings: LossSettings
    teacher_head: Head | None
    rollout_temperature: float
    diagnostics_k: int

    def chunks(self) -> list[slice]:
        """The rows of each chunk."""
        return _cut(len(self.targets.token_ids), self.settings.chunk_tokens)

    def run(self, hidden: Tensor, rows: slice, *, gradient: bool) -> tuple[Tensor, list[TokenStats]]:
        """Returns the gradient of a chunk's weighted loss with respect to hidden × weightᵀ [c, V], and its values.

        Without `gradient` the tensor that comes back is the product itself.
        """
        product = self.head.product(hidden)
        teacher_product = None
        if self.teacher_head is not None and self.targets.teacher_hidden is not None:
            teacher_product = self.teacher_head.product(self.targets.teacher_hidden[rows])
        parts = []
        for block in _blocks(product):
            within = slice(rows.start + block.start, rows.start + block.stop)
            targets = _rows_of(self.targets, within)
            teacher_logits = None
            if self.teacher_head is not None and teacher_product is not None:
                teacher_logits = self.teacher_head.activate(teacher_product[block])
            logits = self.head.activate(product[block]).detach().requires_grad_(gradient)
            with torch.set_grad_enabled(gradient):
                loss, stats = token_loss(
                    logits, targets, self.settings, teacher_logits, self.rollout_temperature, self.diagnostics_k
                )
            parts.append(stats)
            if gradient:
                (d_logits,) = torch.autograd.grad(loss, logits, targets.weights.to(loss.dtype))
                # A masked token may have an infinite loss, whose gradient times 0 is not a number.
                d_logits[targets.weights == 0] = 0
                # The product has been read; its memory takes the gradient.
                product[block] = self.head.through_activation(d_logits, logits.detach())
        return product, parts


def _rows_of(targets: Targets, rows: slice) -> Targets:
    """The targets of some tokens."""
    cut: dict[str, Any] = {}
    for field in fields(Targets):
        value = getattr(targets, field.name)
        cut[field.name] = None if value is None else value[rows]
    return Targets(**cut)


def _cut(length: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]


def _blocks(product: Tensor) -> list[slice]:
    """The rows of a chunk's logits [c, V] that are worked on at a time: all of them on a GPU."""
    rows, vocabulary = product.shape
    at_once = CPU_BLOCK_ELEMENTS * torch.get_num_threads() // vocabulary
    return _cut(rows, max(1, at_once) if product.device.type == "cpu" else rows)


@torch.no_grad()
def topk_ids(hidden: Tensor, head: Head, k: int, chunk_tokens: int) -> Tensor:
    """Returns the k most probable ids [T, k] at hidden states [T, D], by descending probability."""
    head = head.in_compute_type()
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
    head = head.in_compute_type()
    parts = []
    with torch.autocast(hidden.device.type, enabled=False):
        for rows in _cut(len(hidden), chunk_tokens):
            product = head.product(hidden[rows])
            for block in _blocks(product):
                within = slice(rows.start + block.start, rows.start + block.stop)
                logits = head.activate(product[block])
                own = None if student_ids is None else student_ids[within]
                parts.append(_score_block(logits / request.temperature, token_ids[within], request, own))
    joined: dict[str, Any] = {}
    for field in fields(TeacherScores):
        values = [getattr(part, field.name) for part in parts]
        joined[field.name] = None if values[0] is None else torch.cat(values)
    return TeacherScores(**joined)


def _score_block(logits: Tensor, token_ids: Tensor, request: ScoreRequest, student_ids: Tensor | None) -> TeacherScores:
    """The scores of tokens whose logits [c, V] are already divided by the temperature."""
    own_k = max(request.diagnostics_k, request.k if request.support_of != "student" else 0)
    own_ids = logits.topk(own_k, dim=-1).indices if own_k else None
    diagnosed = own_ids[:, : request.diagnostics_k] if request.diagnostics_k and own_ids is not None else None
    if request.kind == "sampled":
        ids = token_ids[:, None]
    else:
        ids = support_ids(student_ids, None if own_ids is None else own_ids[:, : request.k], request.support_of)
    at_ids, tail, normaliser, entropy = losses.SupportLogprobs.apply(logits, ids)
    topk = request.kind == "topk"
    return TeacherScores(
        sampled_logprobs=logits.gather(1, token_ids[:, None])[:, 0] - normaliser,
        support_ids=ids if topk else None,
        support_logprobs=at_ids if topk else None,
        tail_logprobs=tail if topk else None,
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
