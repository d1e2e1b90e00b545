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
    possible = log_a > -torch.inf
    # The masked-out entries are replaced before they meet any arithmetic: 0·inf would be NaN, forwards and backwards.
    log_a = torch.where(possible, log_a, 0.0)
    log_b = torch.where(possible, log_b, 0.0)
    return torch.where(possible, log_a.exp() * (log_a - log_b), 0.0).sum(-1)


def _log_mixture(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    """[T, N] log(βq + (1−β)p); −inf where both are."""
    never = log_p.isneginf() & log_q.isneginf()
    log_p = torch.where(never, 0.0, log_p)
    mixture = torch.logaddexp(log_q + math.log(beta), log_p + math.log(1 - beta))
    return torch.where(never, -torch.inf, mixture)


class FullDivergence(torch.autograd.Function):
    """divergence(log_softmax(z_p), log_softmax(z_q)) [T] for logits [T, V], with the gradient in closed form.

    With g = dL/dp, dL/dz = p (g − Σ p g): for reverse KL g = log p − log q, for forward KL dL/dz = p − q, for jsd
    g = (1−β)(log p − log m). One [T, V] tensor is kept instead of autograd's four.
    """

    @staticmethod
    def forward(ctx: Any, student_logits: Tensor, log_q: Tensor, settings: LossSettings) -> Tensor:
        log_p = student_logits.log_softmax(-1)
        value = divergence(log_p, log_q, settings)
        if ctx.needs_input_grad[0]:
            p = log_p.exp()
            match settings.divergence:
                case "reverse_kl":
                    gradient = torch.where(p > 0, log_p - log_q, 0.0)
                case "forward_kl":
                    ctx.save_for_backward(p.sub_(log_q.exp()))
                    return value
                case "jsd":
                    log_m = _log_mixture(log_p, log_q, settings.jsd_beta)
                    gradient = torch.where(p > 0, (1 - settings.jsd_beta) * (log_p - log_m), 0.0)
            mean = torch.linalg.vecdot(p, gradient)[:, None]
            ctx.save_for_backward(gradient.sub_(mean).mul_(p))
        return value

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * upstream[:, None], None, None


class SupportLogprobs(torch.autograd.Function):
    """(log p at ids [T, S], log of the mass outside them [T], entropy [T]) of logits [T, V].

    The tail is the logsumexp over the complement of the support: log(1 − Z) by subtraction cancels as Z → 1. An id of −1
    stands for no id, gets −inf and no gradient. The entropy is for the eye and carries no gradient.

    Backward, with u = the gradient at the support, v = that at the tail and s = Σ u + v: dL/dz = u − s·p on the support
    and (v − s·p_tail)·softmax over the complement elsewhere, in one pass over [T, V].
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        vocabulary = logits.shape[1]
        absent = ids < 0
        # One more column takes the −1s, so that a row without any id scatters nowhere.
        slots = torch.where(absent, vocabulary, ids)
        outside = torch.nn.functional.pad(logits, (0, 1), value=-torch.inf).scatter_(1, slots, -torch.inf)
        highest = outside.amax(-1, keepdim=True)
        highest = torch.where(highest.isneginf(), 0.0, highest)
        weights = outside.sub_(highest).exp_()
        total = weights.sum(-1)
        tail = total.log() + highest[:, 0]
        at_ids = logits.gather(1, ids.clamp_min(0)).masked_fill(absent, -torch.inf)
        normaliser = torch.logaddexp(at_ids.logsumexp(-1), tail)
        logprobs, log_tail = at_ids - normaliser[:, None], tail - normaliser
        weights.div_(total.clamp_min(torch.finfo(total.dtype).tiny)[:, None])
        expected_logit = log_tail.exp() * torch.linalg.vecdot(weights[:, :vocabulary], logits)
        expected_logit += torch.where(absent, 0.0, logprobs.exp() * at_ids.masked_fill(absent, 0.0)).sum(-1)
        ctx.save_for_backward(weights, slots, logprobs, log_tail)
        entropy = normaliser - expected_logit
        ctx.mark_non_differentiable(entropy)
        return logprobs, log_tail, entropy

    @staticmethod
    def backward(ctx: Any, at_support: Tensor, at_tail: Tensor, _: Tensor) -> tuple[Tensor, None]:
        weights, slots, logprobs, log_tail = ctx.saved_tensors
        at_support = torch.where(logprobs.isneginf(), 0.0, at_support)
        at_tail = torch.where(log_tail.isneginf(), 0.0, at_tail)
        total = at_support.sum(-1) + at_tail
        gradient = weights * (at_tail - total * log_tail.exp())[:, None]
        gradient.scatter_(1, slots, at_support - total[:, None] * logprobs.exp())
        return gradient[:, :-1], None


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
            present = log_p > -torch.inf
            safe_p = torch.where(present, log_p, 0.0)
            advantage = (renormalised(log_p).exp() * (torch.where(present, log_q, 0.0) - safe_p)).detach()
            return -(torch.where(present, advantage, 0.0) * safe_p).sum(-1)


def support_size(logprobs: Tensor) -> Tensor:
    """Returns [T]: the ids of each support, −inf not counted."""
    return (logprobs > -torch.inf).sum(-1)


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
