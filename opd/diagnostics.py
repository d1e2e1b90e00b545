"""How two next-token distributions agree, position by position: pure functions of LOSSES section 8.

T positions, k ids in a top-k set, V vocabulary. Log-probabilities and entropies are in nats.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.linalg import vecdot

from opd.losses import without_impossible


def shared_ids(student_ids: Tensor, teacher_ids: Tensor) -> Tensor:
    """Returns [T, k] bool: which of the student's ids [T, k] are among the teacher's [T, k']; −1 never is."""
    return places_of(student_ids, teacher_ids)[1]


def places_of(ids: Tensor, among: Tensor) -> tuple[Tensor, Tensor]:
    """Returns where the ids [T, k] are in `among` [T, k'], and whether they are there at all; −1 never is.

    By sorting, because comparing each with each would take [T, k, k']: for a whole vocabulary, gigabytes a token.
    """
    ascending, order = among.to(ids.dtype).sort(-1)
    nearest = torch.searchsorted(ascending, ids.contiguous()).clamp_max(among.shape[-1] - 1)
    return order.gather(-1, nearest), (ascending.gather(-1, nearest) == ids) & (ids >= 0)


def overlap_ratio(shared: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns [T]: the share of the student's top k that is in the teacher's top k."""
    return shared.to(dtype).mean(-1)


def overlap_token_advantage(student_logprobs: Tensor, teacher_logprobs: Tensor, shared: Tensor) -> Tensor:
    """Returns [T]: the mean over the shared ids of p̄ (log q̄ − log p̄), both renormalised on them; 0 where none is shared.

    student_logprobs and teacher_logprobs are [T, k] at the student's ids. Never positive.
    """
    count = shared.sum(-1)
    log_p = _renormalised(student_logprobs, shared)
    log_q = _renormalised(teacher_logprobs, shared)
    terms = torch.where(shared, log_p.exp() * (log_q - log_p), torch.zeros_like(log_p))
    return torch.where(count > 0, terms.sum(-1) / count.clamp_min(1), torch.zeros_like(terms[:, 0]))


def overlap_mass(logprobs: Tensor, shared: Tensor) -> Tensor:
    """Returns [T]: the probability on the shared ids, given log-probabilities [T, k] at the student's ids."""
    return torch.where(shared, logprobs.exp(), torch.zeros_like(logprobs)).sum(-1)


def entropy_of(logprobs: Tensor) -> Tensor:
    """Returns [T]: the entropy of distributions given as log-probabilities [T, V]."""
    p = logprobs.exp()
    return -vecdot(p, without_impossible(p, logprobs))


def entropy_gap(student_entropy: Tensor, teacher_entropy: Tensor) -> Tensor:
    """Returns [T]: |H(q) − H(p)|."""
    return (teacher_entropy - student_entropy).abs()


def engine_mismatch(student_logprobs: Tensor, sampler_logprobs: Tensor) -> Tensor:
    """Returns [T]: (r − 1) − log r with r = p_student(y) / p_sampler(y); its mean is the KL of two implementations."""
    log_ratio = student_logprobs - sampler_logprobs
    return log_ratio.exp() - 1 - log_ratio


def by_position(values: Tensor, positions: Tensor, edges: Sequence[int]) -> list[float | None]:
    """Returns the mean of values [T] in each bucket [0, e₁), [e₁, e₂), … [eₙ, ∞) of positions [T]; None where empty."""
    bucket = torch.bucketize(positions, torch.tensor(list(edges)), right=True)
    means = []
    for number in range(len(edges) + 1):
        inside = values[bucket == number]
        means.append(float(inside.mean()) if len(inside) else None)
    return means


def _renormalised(logprobs: Tensor, shared: Tensor) -> Tensor:
    """Log-probabilities [T, k] renormalised over the shared ids; 0 elsewhere."""
    kept = logprobs.masked_fill(~shared, -torch.inf)
    total = kept.logsumexp(-1, keepdim=True)
    return torch.where(shared, logprobs - total, torch.zeros_like(logprobs))
