"""Packing, alignment and masks: here and nowhere else.

The one convention: index t of a per-token tensor is the value *of* completion token t, so the hidden state that predicts
it is the one of the token before it; for the first completion token that is the last prompt token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from opd.types import Microbatch, ScoredRollout, Segments, Targets

Item = TypeVar("Item")

MIN_SHARED_TOKENS = 4
"""A shorter common beginning costs more in attention calls than it saves."""


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


def in_order(scored: Iterable[ScoredRollout]) -> list[ScoredRollout]:
    """Returns the rollouts by (prompt, sample), whatever the order of arrival; those that share a teacher's head together."""
    ordered = sorted(scored, key=lambda item: item.rollout.key)
    heads: dict[int, int] = {}
    for item in ordered:
        heads.setdefault(id(item.head), len(heads))
    return sorted(ordered, key=lambda item: heads[id(item.head)])


def lay_out(
    sequences: Sequence[tuple[Sequence[int], Tensor]],
    *,
    packed: bool,
    device: torch.device | str = "cpu",
    remembered: Mapping[tuple[int, ...], int] | None = None,
) -> Microbatch:
    """Returns the (prompt ids, completion ids [T]) pairs laid out for one forward pass.

    `remembered`: prompt → its number, for those whose keys and values are at hand, so that they need not be in the row.

    The last token of a sequence predicts nothing and is left out. Padding goes to the right, where no real token attends
    to it, so neither layout needs an attention mask.
    """
    if any(not len(prompt) or not len(ids) for prompt, ids in sequences):
        raise ValueError("a sequence needs at least one prompt token and one completion token")
    batch = _packed(sequences, remembered or {}) if packed else _padded(sequences)
    return replace(
        batch,
        input_ids=batch.input_ids.to(device),
        position_ids=batch.position_ids.to(device),
        predicting_index=batch.predicting_index.to(device),
    )


def _padded(sequences: Sequence[tuple[Sequence[int], Tensor]]) -> Microbatch:
    inputs = [torch.cat([torch.tensor(prompt), ids])[:-1] for prompt, ids in sequences]
    rows = pad_sequence(inputs, batch_first=True, padding_value=0)
    index = [
        torch.arange(len(ids)) + number * rows.shape[1] + len(prompt) - 1
        for number, (prompt, ids) in enumerate(sequences)
    ]
    positions = torch.arange(rows.shape[1]).expand(rows.shape).contiguous()
    return Microbatch(rows, positions, None, torch.cat(index))


def _packed(sequences: Sequence[tuple[Sequence[int], Tensor]], remembered: Mapping[tuple[int, ...], int]) -> Microbatch:
    """One row: what all prompts begin with, then every distinct prompt and its completions."""
    answers: dict[tuple[int, ...], list[int]] = {}
    for number, (prompt, _) in enumerate(sequences):
        answers.setdefault(tuple(prompt), []).append(number)
    in_row = [prompt for prompt in answers if prompt not in remembered]
    shared = _common_prefix(in_row)
    tokens, positions, lengths, parents, prefixes = [], [], [], [], []

    def add(ids: Sequence[int] | Tensor, start: int, parent: int, prefix: int = -1) -> int:
        """Appends a segment whose first token is at position `start`; an empty one is its parent."""
        if not len(ids):
            return parent
        tokens.append(torch.as_tensor(ids, dtype=torch.int64))
        positions.append(torch.arange(start, start + len(ids)))
        lengths.append(len(ids))
        parents.append(parent)
        prefixes.append(prefix)
        return len(lengths) - 1

    index: list[Tensor] = [torch.empty(0, dtype=torch.int64)] * len(sequences)
    from_prefix: dict[int, int] = {}
    spans = []
    root = add(in_row[0][:shared], 0, -1) if in_row else -1
    for prompt, numbers in answers.items():
        prefix = remembered.get(prompt, -1)
        known = len(prompt) if prefix >= 0 else shared
        own, node = torch.tensor(prompt[known:], dtype=torch.int64), root if prefix < 0 else -1
        last_of_prompt = sum(lengths) + len(own) - 1 if len(own) else shared - 1
        if prefix < 0:
            spans.append((prompt, ((0, shared), (sum(lengths), sum(lengths) + len(own)))))
        if len(numbers) > 1:
            # A segment for its completions to share; a lone completion is in one with its prompt, which saves a call.
            node, own = add(own, shared, node), own[:0]
        for number in numbers:
            ids = sequences[number][1]
            start = sum(lengths) + len(own)
            add(torch.cat([own, ids[:-1]]), len(prompt) - len(own), node, prefix)
            index[number] = torch.cat([torch.tensor([last_of_prompt]), torch.arange(start, start + len(ids) - 1)])
            if prefix >= 0:
                from_prefix[number] = prefix
    for number, prefix in from_prefix.items():
        index[number][0] = sum(lengths) + prefix
    return Microbatch(
        input_ids=torch.cat(tokens)[None],
        position_ids=torch.cat(positions)[None],
        segments=Segments(tuple(lengths), tuple(parents), tuple(prefixes) if from_prefix else ()),
        predicting_index=torch.cat(index),
        prompt_spans=tuple(spans),
    )


def _common_prefix(prompts: Sequence[Sequence[int]]) -> int:
    """How many tokens all prompts begin with; 0 for a single prompt, or where too few to be worth a segment."""
    if len(prompts) < 2:
        return 0
    first, last = min(map(tuple, prompts)), max(map(tuple, prompts))
    length = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    return length if length >= MIN_SHARED_TOKENS else 0


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
    assert token_ids is not None
    assert token_weights is not None
    assert sampler_logprobs is not None
    return Targets(
        token_ids=token_ids,
        weights=token_weights,
        sampler_logprobs=sampler_logprobs,
        first_logprobs=None if first_logprobs is None else joined(first_logprobs),
        teacher_logprobs=joined([s.sampled_logprobs for s in scores]),
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
