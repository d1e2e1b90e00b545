"""Facts about truncated distributions: the same definition on both sides of the engine check."""

import pytest
import torch

from opd.sampling import truncated_logprobs


def logits_of(rows=7, vocabulary=50, seed=0):
    return 3 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed))


def test_without_truncation_it_is_log_softmax_exactly():
    logits = logits_of()
    assert torch.equal(truncated_logprobs(logits, 0.7), (logits / 0.7).log_softmax(-1))


def test_bfloat16_logits_are_widened_and_float64_stays():
    assert truncated_logprobs(logits_of().bfloat16()).dtype == torch.float32
    assert truncated_logprobs(logits_of().double()).dtype == torch.float64


@pytest.mark.parametrize(
    "settings", [{"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.2}, {"top_k": 9, "top_p": 0.8, "min_p": 0.01}]
)
def test_what_remains_adds_up_to_one_and_keeps_its_proportions(settings):
    logits = logits_of()
    cut, whole = truncated_logprobs(logits, 1.3, **settings), truncated_logprobs(logits, 1.3)
    inside = cut.isfinite()
    assert (inside.sum(-1) >= 1).all()
    assert (inside.sum(-1) < logits.shape[-1]).all()
    assert torch.allclose(cut.exp().sum(-1), torch.ones(7), atol=1e-6)
    for row in range(7):
        difference = (cut - whole)[row, inside[row]]
        assert torch.allclose(difference, difference[0].expand_as(difference), atol=1e-5)


def test_top_k_keeps_the_k_most_probable_tokens():
    cut = truncated_logprobs(logits_of(), top_k=5)
    assert torch.equal(cut.isfinite().nonzero()[:, 1].view(7, 5), logits_of().topk(5).indices.sort(-1).values)


def test_top_p_keeps_the_smallest_set_that_reaches_p():
    probs = torch.tensor([[0.5, 0.3, 0.15, 0.05]])
    kept = truncated_logprobs(probs.log(), top_p=0.7).isfinite()
    assert kept.tolist() == [[True, True, False, False]]


def test_top_p_smaller_than_the_first_token_keeps_that_one():
    assert truncated_logprobs(torch.tensor([[2.0, 1.0, 0.0]]), top_p=0.01).isfinite().tolist() == [[True, False, False]]


def test_min_p_is_a_share_of_the_most_probable_token_after_temperature():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    assert truncated_logprobs(logits, min_p=0.4).isfinite().sum() == 2
    # At temperature 2 the ratios are the square roots, so 0.15/0.5 counts as 0.55.
    assert truncated_logprobs(logits, 2.0, min_p=0.4).isfinite().sum() == 3


def test_top_p_counts_the_mass_that_top_k_left():
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    # Of all tokens the first two hold 0.7; of the best two the first alone holds 0.57.
    assert truncated_logprobs(logits, top_p=0.55).isfinite().sum() == 2
    assert truncated_logprobs(logits, top_k=2, top_p=0.55).isfinite().sum() == 1


@pytest.mark.parametrize(
    "settings", [{}, {"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.1}, {"top_k": 9, "top_p": 0.8, "min_p": 0.05}]
)
def test_it_is_what_vllm_computes(settings):
    pytest.importorskip("vllm")
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    logits, temperature = logits_of(), 0.8
    theirs = logits / temperature
    if "min_p" in settings:
        probs = theirs.softmax(-1)
        theirs = theirs.masked_fill(probs < settings["min_p"] * probs.amax(-1, keepdim=True), -torch.inf)
    k = torch.full((7,), settings["top_k"]) if "top_k" in settings else None
    p = torch.full((7,), settings["top_p"]) if "top_p" in settings else None
    theirs = apply_top_k_top_p_pytorch(theirs, k, p, allow_cpu_sync=True).log_softmax(-1)
    assert torch.allclose(truncated_logprobs(logits, temperature, **settings), theirs, atol=1e-6)
