"""Alignment: the hidden state before a token predicts it, in both layouts."""

import pytest
import torch

from opd import batching

PAIRS = [([11, 12, 13], torch.tensor([14, 15])), ([21, 22], torch.tensor([23]))]


def test_packed_rows_point_at_the_token_before_each_completion_token():
    batch = batching.lay_out(PAIRS, packed=True)
    assert batch.input_ids.tolist() == [[11, 12, 13, 14, 21, 22]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 0, 1]]
    assert batch.segments.lengths == (4, 2)
    assert batch.segments.parents == (-1, -1)
    assert batch.predicting_index.tolist() == [2, 3, 5]


def test_a_prompt_that_completions_share_is_in_the_row_once():
    prompt = [1, 2, 3]
    batch = batching.lay_out([(prompt, torch.tensor([7, 8])), (prompt, torch.tensor([9]))], packed=True)
    assert batch.input_ids.tolist() == [[1, 2, 3, 7]]
    assert batch.predicting_index.tolist() == [2, 3, 2]


def test_the_beginning_that_all_prompts_share_is_in_the_row_once():
    system = [1, 2, 3, 4, 5]
    sequences = [
        ([*system, 6], torch.tensor([7, 8])),
        ([*system, 9, 10], torch.tensor([11, 12])),
        (system, torch.tensor([13])),
    ]
    batch = batching.lay_out(sequences, packed=True)
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5, 6, 7, 9, 10, 11]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 6, 5, 6, 7]]
    assert [batch.segments.chain(i) for i in range(3)] == [(0,), (0, 1), (0, 2)]
    assert batch.input_ids[0][batch.predicting_index].tolist() == [6, 7, 10, 11, 5]


def test_padded_rows_point_at_the_same_tokens():
    batch = batching.lay_out(PAIRS, packed=False)
    assert batch.input_ids.tolist() == [[11, 12, 13, 14], [21, 22, 0, 0]]
    assert batch.segments is None
    assert batch.input_ids.flatten()[batch.predicting_index].tolist() == [13, 14, 22]


@pytest.mark.parametrize("packed", [True, False])
def test_groups_keep_the_order_and_respect_the_budget(packed):
    lengths = [5, 3, 9, 2, 2, 2, 12]
    groups = list(batching.cut(lengths, lambda n: n, 10, packed=packed))
    assert [n for group in groups for n in group] == lengths
    for group in groups:
        size = sum(group) if packed else len(group) * max(group)
        assert size <= 10 or len(group) == 1


def test_a_stream_is_taken_only_as_far_as_the_group_that_was_asked_for():
    taken = []

    def stream():
        for n in (4, 4, 4, 4, 4):
            taken.append(n)
            yield n

    next(batching.cut(stream(), lambda n: n, 8, packed=True))
    assert len(taken) == 3


def test_a_sequence_without_completion_is_refused():
    with pytest.raises(ValueError, match="completion token"):
        batching.lay_out([([1, 2], torch.tensor([], dtype=torch.int64))], packed=True)
