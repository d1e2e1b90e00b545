"""Packing, alignment and masks: here and nowhere else.

The one convention: index t of a per-token tensor is the value *of* completion token t, so the hidden state that predicts
it is the one of the token before it; for the first completion token that is the last prompt token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from opd.types import Microbatch, ScoredRollout, Targets

Item = TypeVar("Item")


def cut(
    items: Iterable[Item], length_of: Callable[[Item], int], budget_tokens: int, *, packed: bool
) -> Iterator[list[Item]]:
    """Yields `items` in order, in groups of at most `budget_tokens` (rows × longest row when padded).

    An item that is longer than the budget gets a group of its own. Items are taken only as groups are asked for, so a
    stream of rollouts is grouped while it is being written.
    """
    group: list[Item] = []
    total = longest = 0
    for item in items:
        length = length_of(item)
        cost = total + length if packed else (len(group) + 1) * max(longest, length)
        if group and cost > budget_tokens:
            yield group
            group, total, longest = [], 0, 0
        group.append(item)
        total, longest = total + length, max(longest, length)
    if group:
        yield group


def lay_out(
    sequences: Sequence[tuple[Sequence[int], Tensor]], *, packed: bool, device: torch.device | str = "cpu"
) -> Microbatch:
    """Returns the (prompt ids, completion ids [T]) pairs laid out for one forward pass.

    Padding goes to the right and is never attended to by a real token under causal attention, so neither layout needs an
    attention mask. The last token of a sequence predicts nothing and is left out.
    """
    rows, index, start = [], [], 0
    inputs = [torch.cat([torch.tensor(prompt, dtype=torch.int64), ids])[:-1] for prompt, ids in sequences]
    stride = max(len(row) for row in inputs)
    for number, ((prompt, ids), row) in enumerate(zip(sequences, inputs, strict=True)):
        if not len(prompt) or not len(ids):
            raise ValueError("a sequence needs at least one prompt token and one completion token")
        offset = start if packed else number * stride
        index.append(torch.arange(len(ids)) + offset + len(prompt) - 1)
        rows.append(torch.arange(len(row)))
        start += len(row)
    if packed:
        input_ids, position_ids = torch.cat(inputs)[None], torch.cat(rows)[None]
    else:
        input_ids = pad_sequence(inputs, batch_first=True, padding_value=0)
        position_ids = torch.arange(stride).expand(len(inputs), stride).contiguous()
    return Microbatch(
        input_ids=input_ids.to(device),
        position_ids=position_ids.to(device),
        segment_lengths=tuple(len(row) for row in rows) if packed else None,
        predicting_index=torch.cat(index).to(device),
        completion_lengths=tuple(len(ids) for _, ids in sequences),
    )


def targets_of(
    scored: Sequence[ScoredRollout],
    weights: Sequence[Tensor],
    first_logprobs: Sequence[Tensor] | None,
    device: torch.device | str,
) -> Targets:
    """Returns the loss inputs of some scored rollouts, concatenated; `weights` and `first_logprobs` are [T] a rollout."""

    def joined(tensors: Sequence[Tensor | None], fill: float = 0) -> Tensor | None:
        if any(tensor is None for tensor in tensors):
            return None
        return _cat_ragged([tensor for tensor in tensors if tensor is not None], fill).to(device)

    rollouts, scores = [item.rollout for item in scored], [item.scores for item in scored]
    token_ids, token_weights = joined([r.token_ids for r in rollouts]), joined(weights)
    sampler_logprobs = joined([r.logprobs for r in rollouts])
    teacher_logprobs = joined([s.sampled_logprobs for s in scores])
    assert token_ids is not None and token_weights is not None
    assert sampler_logprobs is not None and teacher_logprobs is not None
    return Targets(
        token_ids=token_ids,
        weights=token_weights,
        sampler_logprobs=sampler_logprobs,
        first_logprobs=None if first_logprobs is None else joined(first_logprobs),
        teacher_logprobs=teacher_logprobs,
        support_ids=joined([s.support_ids for s in scores], -1),
        support_logprobs=joined([s.support_logprobs for s in scores], -torch.inf),
        tail_logprobs=joined([s.tail_logprobs for s in scores]),
        teacher_hidden=joined([s.hidden for s in scores]),
        teacher_topk_ids=joined([s.topk_ids for s in scores]),
        teacher_entropy=joined([s.entropy for s in scores]),
    )


def _cat_ragged(tensors: Sequence[Tensor], fill: float) -> Tensor:
    """Concatenates [T_i] or [T_i, S_i] tensors; supports of different width are filled up to the widest."""
    if tensors[0].ndim == 1:
        return torch.cat(list(tensors))
    width = max(tensor.shape[1] for tensor in tensors)
    return torch.cat([torch.nn.functional.pad(t, (0, width - t.shape[1]), value=fill) for t in tensors])
