"""What a sampler draws from: the policy after temperature and truncation, in the order in which vLLM applies them.

V = vocabulary. Both samplers and the engine check use this one definition, so a truncated distribution means the same
thing on either side.
"""

from __future__ import annotations

import torch
from torch import Tensor


def truncated_logprobs(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> Tensor:
    """Returns the log-probabilities [T, V] that are sampled from; −inf for tokens that can never be drawn.

    logits [T, V]; float32 at least. The order is vLLM's: temperature, then min-p (of the tempered probabilities), then
    top-k, then top-p of what top-k left, renormalised. Ties with the k-th token stay in. Without truncation this is
    exactly log_softmax(logits / temperature).
    """
    scaled = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    vocabulary = scaled.shape[-1]
    if min_p > 0:
        probs = scaled.softmax(-1)
        scaled = scaled.masked_fill(probs < min_p * probs.amax(-1, keepdim=True), -torch.inf)
    if 0 < top_k < vocabulary:
        scaled = scaled.masked_fill(scaled < scaled.topk(top_k, dim=-1).values[..., -1:], -torch.inf)
    if top_p < 1:
        ordered, index = scaled.sort(dim=-1)
        outside = ordered.softmax(-1).cumsum(-1) <= 1 - top_p
        outside[..., -1] = False
        scaled = scaled.masked_fill(torch.zeros_like(outside).scatter(-1, index, outside), -torch.inf)
    return scaled.log_softmax(-1)
