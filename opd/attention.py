"""Attention over packed sequences: each attends to itself only, on any device, without padding and without an N × N mask.

The function is registered with transformers under SEGMENTED. Without `segment_lengths` it is transformers' own SDPA
attention, so generation with a cache goes on as usual.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

SEGMENTED = "opd_segmented"


def segmented_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    segment_lengths: tuple[int, ...] | None = None,
    sliding_window: int | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Returns causal attention inside each segment, [1, N, heads, head_dim].

    query [1, heads, N, head_dim], key and value [1, kv_heads, N, head_dim], N = sum of segment_lengths. attention_mask is
    ignored when segment_lengths is given.
    """
    if segment_lengths is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
    groups = query.shape[1] // key.shape[1]
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    # split and cat are each other's backward; slices would each allocate a gradient of the whole length.
    outputs = [
        scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=(mask := _window_mask(q.shape[2], sliding_window, q.device)),
            dropout_p=dropout,
            is_causal=mask is None,
            scale=scaling,
        )
        for q, k, v in zip(*(tensor.split(segment_lengths, dim=2) for tensor in (query, key, value)), strict=True)
    ]
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


def _window_mask(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """[L, L] bool: causal and within the window; None where plain causal attention is the same."""
    if window is None or length <= window:
        return None
    position = torch.arange(length, device=device)
    distance = position[:, None] - position[None, :]
    return (distance >= 0) & (distance < window)


AttentionInterface.register(SEGMENTED, segmented_attention)
AttentionMaskInterface.register(SEGMENTED, sdpa_mask)
