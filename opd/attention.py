"""Attention over packed sequences, on any device, without padding and without an N × N mask.

A packed row is a sequence of segments. Each attends to itself and to the segments it continues: a prompt that several
completions share, or the beginning that several prompts share, is in the row once. Causal attention makes that exact: the
hidden states of a prefix do not depend on what follows it.

The function is registered with transformers under SEGMENTED. Without `segments` it is transformers' own SDPA attention,
so generation with a cache goes on as usual.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from opd.types import Segments

SEGMENTED = "opd_segmented"


@dataclass(frozen=True, slots=True)
class Prefix:
    """What a model remembers of a prompt: enough to go on from its end without reading it again."""

    layers: Sequence[tuple[Tensor, Tensor]]
    """Keys and values [1, kv_heads, P, head_dim] of every layer, positions applied."""
    last_hidden: Tensor
    """[D] final hidden state of the last token, which predicts the next."""


def segmented_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    segments: Segments | None = None,
    mask_cache: dict[tuple[int, int, int | None], Tensor | None] | None = None,
    prefixes: Sequence[Prefix] = (),
    kept: list[tuple[Tensor, Tensor]] | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Returns causal attention of every segment to itself and to those it continues, [1, N, heads, head_dim].

    query [1, heads, N, head_dim], key and value [1, kv_heads, N, head_dim], N = the sum of the segments' lengths.
    attention_mask is ignored when segments are given; mask_cache keeps this forward pass's masks from layer to layer.
    `prefixes` are those that `segments.prefixes` counts; every layer adds its keys and values to `kept`.
    """
    if segments is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    if kwargs.get("softcap") or kwargs.get("s_aux") is not None:
        raise ValueError("softcapped scores and attention sinks are not computed here")
    if kept is not None:
        kept.append((key, value))
    compute_dtype = query.dtype
    if query.device.type == "cpu" and compute_dtype == torch.bfloat16:
        # PyTorch's CPU kernel is slower in bfloat16 than in float32 on segments this short: 1.6 times, forward and backward.
        query, key, value = query.float(), key.float(), value.float()
    groups = query.shape[1] // key.shape[1]
    # split and cat are each other's backward; slices would each allocate a gradient of the whole length.
    queries, keys, values = (
        tensor.split(segments.lengths, dim=2) for tensor in (query, repeat_kv(key, groups), repeat_kv(value, groups))
    )
    masks = {} if mask_cache is None else mask_cache
    outputs = []
    for number, q in enumerate(queries):
        chain = segments.chain(number)
        before = _before(segments, number, prefixes, module, groups, q.dtype)
        k, v = (
            torch.cat([*first, *(part[i] for i in chain)], dim=2) if first or len(chain) > 1 else part[number]
            for first, part in zip(before, (keys, values), strict=True)
        )
        kind = (q.shape[2], k.shape[2], sliding_window)
        if kind not in masks:
            masks[kind] = _mask(*kind, q.device)
        mask = masks[kind]
        outputs.append(
            scaled_dot_product_attention(
                q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, scale=scaling
            )
        )
    return torch.cat(outputs, dim=2).transpose(1, 2).to(compute_dtype).contiguous(), None


def _before(
    segments: Segments, number: int, prefixes: Sequence[Prefix], module: nn.Module, groups: int, dtype: torch.dtype
) -> tuple[list[Tensor], list[Tensor]]:
    """Keys and values of the prefix that a segment continues; nothing where it continues none."""
    if not segments.prefixes or segments.prefixes[number] < 0:
        return [], []
    key, value = prefixes[segments.prefixes[number]].layers[cast(int, module.layer_idx)]
    return [repeat_kv(key.to(dtype), groups)], [repeat_kv(value.to(dtype), groups)]


def _mask(length: int, visible: int, window: int | None, device: torch.device) -> Tensor | None:
    """[L, visible] bool for queries that are the last L of `visible` positions; None where plain causal attention is the same."""
    if length == visible and (window is None or length <= window):
        return None
    distance = torch.arange(visible - length, visible, device=device)[:, None] - torch.arange(visible, device=device)
    return (distance >= 0) if window is None else (distance >= 0) & (distance < window)


AttentionInterface.register(SEGMENTED, segmented_attention)
AttentionMaskInterface.register(SEGMENTED, sdpa_mask)
