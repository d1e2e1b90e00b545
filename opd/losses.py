"""The losses of on-policy distillation: tensors in, one value per completion token out, and one reducer.

T completion tokens (positions), S ids of a support, V vocabulary. p = student, q = teacher, y = the sampled token; all
log-probabilities are natural logarithms at loss.temperature, all values nats per completion token. sg[·] = no gradient.

Sources: the three kinds and K = 16 from THUNLP (arXiv 2604.13016); the sampled-token form from Thinking Machines,
"On-Policy Distillation" (2025-10); β from GKD (2306.13649); the closed-form baseline from vOPD (2605.07865).

What is not here, and why: log p(y) − log q(y) back-propagated directly (k1) has expected gradient zero; k3 back-propagated
directly is the forward-KL gradient; a KL summed over a support used as an advantage has expected gradient zero; and a
truncated KL that is not renormalised and has no tail can be made small by draining mass out of the support.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.linalg import vecdot

from opd.config import LossSettings
from opd.errors import TrainingError
from opd.types import Rollout


def divergence(log_p: Tensor, log_q: Tensor, settings: LossSettings) -> Tensor:
    """Returns the divergence [T] of outcomes [T, N] whose probabilities add up to one; −inf is probability zero.

    reverse_kl Σ p (log p − log q) · forward_kl Σ q (log q − log p) · jsd β·KL(q‖M) + (1−β)·KL(p‖M), M = βq + (1−β)p.
    """
    match settings.divergence:
        case "reverse_kl":
            return _kl(log_p, log_q)
        case "forward_kl":
            return _kl(log_q, log_p)
        case "jsd":
            beta = settings.jsd_beta
            log_m = _log_mixture(log_p, log_q, beta)
            return beta * _kl(log_q, log_m) + (1 - beta) * _kl(log_p, log_m)


def _kl(log_a: Tensor, log_b: Tensor) -> Tensor:
    """[T] KL(a‖b) = Σ a (log a − log b); outcomes that a excludes add nothing, whatever b gives them."""
    never = log_a.exp() == 0
    # Such entries are replaced before they meet any arithmetic: 0·inf would be NaN, forwards and backwards.
    log_a = torch.where(never, 0.0, log_a)
    log_b = torch.where(never, 0.0, log_b)
    return torch.where(never, 0.0, log_a.exp() * (log_a - log_b)).sum(-1)


def _log_mixture(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    """[T, N] log(βq + (1−β)p); −inf where both are."""
    never = log_p.isneginf() & log_q.isneginf()
    log_p = torch.where(never, 0.0, log_p)
    mixture = torch.logaddexp(log_q + math.log(beta), log_p + math.log(1 - beta))
    return torch.where(never, -torch.inf, mixture)


def without_impossible(p: Tensor, values: Tensor) -> Tensor:
    """Returns `values` [T, V], with 0 where p is 0 if any is infinite: 0·inf is NaN, and such outcomes add nothing.

    The common case costs one sum, an eighth of what comparing and replacing every entry does.
    """
    return values if values.sum().isfinite() else torch.where(p == 0, 0.0, values)


class FullDivergence(torch.autograd.Function):
    """(the divergence [T], log p [T, V], entropy of p [T]) of logits [T, V] and log q [T, V]; only the first has a gradient.

    The gradient is made in closed form with the value: dL/dz = p (g − Σ p g) where g = dL/dp up to a constant: log p −
    log q for reverse KL, (1−β)(log p − log m) for jsd; p − q for forward KL. One [T, V] tensor is kept instead of
    autograd's four.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, log_q: Tensor, settings: LossSettings) -> tuple[Tensor, Tensor, Tensor]:
        log_p = logits.log_softmax(-1)
        p = log_p.exp()
        match settings.divergence:
            case "reverse_kl":
                to_p = without_impossible(p, log_p - log_q)
                value = from_p = vecdot(p, to_p)
            case "forward_kl":
                q = log_q.exp()
                value = vecdot(q, without_impossible(q, log_q - log_p))
            case "jsd":
                beta, q = settings.jsd_beta, log_q.exp()
                log_m = _log_mixture(log_p, log_q, beta)
                to_p = without_impossible(p, log_p - log_m).mul_(1 - beta)
                from_p = vecdot(p, to_p)
                value = beta * vecdot(q, without_impossible(q, log_q - log_m)) + from_p
        entropy = -vecdot(p, without_impossible(p, log_p))
        ctx.mark_non_differentiable(log_p, entropy)
        ctx.set_materialize_grads(False)
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(
                p.sub_(q) if settings.divergence == "forward_kl" else to_p.sub_(from_p[:, None]).mul_(p)
            )
        return value, log_p, entropy

    @staticmethod
    def backward(ctx: Any, upstream: Tensor | None, *_: None) -> tuple[Tensor | None, None, None]:
        (gradient,) = ctx.saved_tensors
        return None if upstream is None else gradient * upstream[:, None], None, None


class SupportLogprobs(torch.autograd.Function):
    """(log p at ids [T, S], log of the mass outside them [T], the normaliser [T], entropy [T]) of logits [T, V].

    The tail is the logsumexp over the complement of the support: log(1 − Z) by subtraction cancels as Z → 1. An id of −1
    stands for no id, gets −inf and no gradient. Normaliser and entropy are for the eye and carry no gradient.

    Backward, with u = the gradient at the support, v = that at the tail and s = Σ u + v: dL/dz = u − s·p on the support
    and (v − s·p_tail)·softmax over the complement elsewhere, in one pass over [T, V].
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        absent = ids < 0
        # −1 stands in for another id of its row; in a row without any, id 0 is overwritten by itself.
        first = ids.amax(-1, keepdim=True)
        slots = torch.where(absent, first.clamp_min(0), ids)
        hole = torch.where(first < 0, logits[:, :1], -torch.inf)
        weights = logits.scatter(1, slots, hole.expand_as(slots))
        highest = weights.amax(-1, keepdim=True)
        highest = torch.where(highest.isneginf(), 0.0, highest)
        weights.sub_(highest).exp_()
        total = weights.sum(-1)
        at_ids = logits.gather(1, slots).masked_fill(absent, -torch.inf)
        tail = total.log() + highest[:, 0]
        normaliser = torch.logaddexp(at_ids.logsumexp(-1), tail)
        logprobs, log_tail = at_ids - normaliser[:, None], tail - normaliser
        outside = log_tail.exp()
        expected_logit = vecdot(weights, without_impossible(weights, logits))
        expected_logit /= total.clamp_min(torch.finfo(total.dtype).tiny)
        inside = torch.where(logprobs.isneginf(), 0.0, logprobs.exp() * logprobs).sum(-1)
        entropy = outside * (normaliser - expected_logit) - inside
        ctx.save_for_backward(weights, total, slots, logprobs, log_tail)
        ctx.mark_non_differentiable(normaliser, entropy)
        ctx.set_materialize_grads(False)
        return logprobs, log_tail, normaliser, entropy

    @staticmethod
    def backward(ctx: Any, at_support: Tensor | None, at_tail: Tensor | None, *_: None) -> tuple[Tensor | None, None]:
        weights, total, slots, logprobs, log_tail = ctx.saved_tensors
        zero = total.new_zeros(())
        at_support = zero if at_support is None else torch.where(logprobs.isneginf(), 0.0, at_support)
        at_tail = zero if at_tail is None else torch.where(log_tail.isneginf(), 0.0, at_tail)
        at_support, at_tail = at_support.expand_as(logprobs), at_tail.expand_as(total)
        mass = at_support.sum(-1) + at_tail
        scale = (at_tail - mass * log_tail.exp()) / total.clamp_min(torch.finfo(total.dtype).tiny)
        gradient = weights * scale[:, None]
        # The weights are 0 on the support, so adding is setting, and a stand-in for −1 adds 0.
        gradient.scatter_add_(1, slots, at_support - mass[:, None] * logprobs.exp())
        return gradient, None


def tail_outcomes(logprobs: Tensor, log_tail: Tensor) -> Tensor:
    """Returns [T, S+1]: the support and one outcome for everything else."""
    return torch.cat([logprobs, log_tail[:, None]], dim=-1)


def renormalised(logprobs: Tensor) -> Tensor:
    """Returns log-probabilities [T, S] divided by the mass of the support; −inf stays, a row without ids stays −inf."""
    total = torch.where(logprobs.isneginf().all(-1, keepdim=True), 0.0, logprobs).logsumexp(-1, keepdim=True)
    return logprobs - total


def topk_loss(log_p: Tensor, tail_p: Tensor, log_q: Tensor, tail_q: Tensor | None, settings: LossSettings) -> Tensor:
    """Returns the top-K loss [T] from log-probabilities on a support [T, S] (−inf = no id) and its tails [T].

    tail: the divergence of S + 1 outcomes. renormalize: of both distributions renormalised on S; a position with fewer
    than two ids contributes 0. weighted: −Σ sg[p̄ (log q − log p)]·log p, the form of THUNLP's code.
    """
    match settings.topk.mass:
        case "tail":
            if tail_q is None:
                raise TrainingError("The teacher returned no tail mass.", where="loss.topk.mass=tail")
            return divergence(tail_outcomes(log_p, tail_p), tail_outcomes(log_q, tail_q), settings)
        case "renormalize":
            usable = support_size(log_p) >= 2
            # Rows with fewer than two ids leave before the arithmetic, so that their gradient is zero and not NaN.
            placeholder = torch.zeros_like(log_p)
            kept_p = torch.where(usable[:, None], log_p, placeholder)
            kept_q = torch.where(usable[:, None], log_q, placeholder)
            return torch.where(usable, divergence(renormalised(kept_p), renormalised(kept_q), settings), 0.0)
        case "weighted":
            return -(candidate_advantages(log_p, log_q) * torch.where(log_p.isneginf(), 0.0, log_p)).sum(-1)


def candidate_advantages(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Returns p̄ (log q − log p) [T, S] without gradient, p̄ = p renormalised on the support; 0 where there is no id."""
    weight = renormalised(log_p.detach()).exp()
    return torch.where(weight == 0, 0.0, weight * (log_q - log_p.detach()))


def support_size(logprobs: Tensor) -> Tensor:
    """Returns [T]: the ids of each support, −inf not counted."""
    return (~logprobs.isneginf()).sum(-1)


def advantage(log_p: Tensor, log_q: Tensor, baseline: Tensor | None) -> Tensor:
    """Returns A = log q(y) − log p(y) − b [T], without gradient; b = −KL(p‖q) for the closed-form baseline."""
    value = (log_q - log_p).detach()
    return value if baseline is None else value - baseline.detach()


def policy_gradient(log_p: Tensor, advantages: Tensor) -> Tensor:
    """Returns −sg[A]·log p(y) [T]: unbiased for the gradient of the full reverse KL when y ~ p."""
    return -advantages.detach() * log_p


def k2(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Returns ½ (log p(y) − log q(y))² [T], back-propagated directly: its gradient is the policy gradient's."""
    return 0.5 * (log_p - log_q).square()


def clipped(log_p: Tensor, first: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """Returns PPO's −min(ρA, clip(ρ, 1−low, 1+high)·A) [T] with ρ = p(y)/p_first(y)."""
    ratio = (log_p - first).exp()
    advantages = advantages.detach()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


def truncated_ratio(log_p: Tensor, log_reference: Tensor, cap: float) -> Tensor:
    """Returns sg[min(p/p_reference, cap)] [T]."""
    return (log_p - log_reference).exp().clamp_max(cap).detach()


def token_mask(rollout: Rollout, settings: LossSettings) -> Tensor:
    """Returns [T] bool: the completion tokens that count, after the masks of the configuration."""
    mask = torch.ones(len(rollout.token_ids), dtype=torch.bool)
    mask[: settings.skip_first_tokens] = False
    if settings.mask_token_ids:
        mask &= ~torch.isin(rollout.token_ids, torch.tensor(settings.mask_token_ids))
    if settings.mask_truncated and rollout.finish_reason == "length":
        mask[:] = False
    return mask


def token_weights(rollouts: Sequence[Rollout], settings: LossSettings) -> list[Tensor]:
    """Returns each rollout's weights [T]: the loss of a step is Σ weight·loss over all its tokens, however it is cut.

    token_mean: 1 / unmasked tokens of the step. sequence_mean: the mean over completions (those with an unmasked token)
    of each one's mean. token_sum: 1 / completions. Raises TrainingError when no token is left.
    """
    masks = [token_mask(rollout, settings) for rollout in rollouts]
    counts = [int(mask.sum()) for mask in masks]
    if not sum(counts):
        raise TrainingError(
            f"Not one completion token of the step counts: {_emptied_by(rollouts, settings)} masked all of them.",
            why=f"{len(rollouts)} completions, {sum(map(len, masks))} tokens, "
            f"{sum(r.finish_reason == 'length' for r in rollouts)} completions cut at rollout.max_tokens",
            fix="raise rollout.max_tokens, or loosen the option that is named",
        )
    match settings.reduction:
        case "token_mean":
            scales = [1 / sum(counts)] * len(masks)
        case "sequence_mean":
            counted = sum(count > 0 for count in counts)
            scales = [1 / (count * counted) if count else 0.0 for count in counts]
        case "token_sum":
            scales = [1 / len(masks)] * len(masks)
    return [mask.float() * scale for mask, scale in zip(masks, scales, strict=True)]


def _emptied_by(rollouts: Sequence[Rollout], settings: LossSettings) -> str:
    """The options that masked something in this step."""
    responsible = []
    if settings.skip_first_tokens:
        responsible.append(f"loss.skip_first_tokens={settings.skip_first_tokens}")
    if settings.mask_truncated and any(rollout.finish_reason == "length" for rollout in rollouts):
        responsible.append("loss.mask_truncated=true")
    if settings.mask_token_ids:
        responsible.append("loss.mask_token_ids")
    return " and ".join(responsible) or "an empty batch"
