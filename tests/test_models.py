"""Packed batches, our reading of the head, and the refusal of heads that we do not know."""

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from opd import batching
from opd.errors import PreflightError
from opd.heads import head_of
from opd.models import choose_layout, predicting_hidden

SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SYSTEM = [90, 91, 92, 93, 94]
PAIRS = [
    ([*SYSTEM, 1, 2, 3, 4], torch.tensor([5, 6, 7])),
    ([*SYSTEM, 1, 2, 3, 4], torch.tensor([8])),
    ([*SYSTEM, 8, 9], torch.tensor([10, 11, 12, 13, 14, 15])),
    (SYSTEM, torch.tensor([17, 18])),
]


def llama():
    return LlamaForCausalLM(LlamaConfig(**SMALL))


def qwen2():
    return Qwen2ForCausalLM(Qwen2Config(**SMALL))


def mistral_with_a_short_window():
    return MistralForCausalLM(MistralConfig(**SMALL, sliding_window=3, head_dim=8))


def fresh(build, std=0.3):
    """A random model in evaluation mode whose distributions are far from uniform."""
    torch.manual_seed(0)
    model = build().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, std)
    return model


@pytest.mark.parametrize("build", [llama, qwen2, mistral_with_a_short_window])
def test_packed_and_padded_batches_give_what_the_model_gives_alone(build):
    model = fresh(build)
    expected = []
    for prompt, ids in PAIRS:
        tokens = torch.cat([torch.tensor(prompt), ids])[None]
        expected.append(model(tokens).logits[0, len(prompt) - 1 : -1])
    head = head_of(model, 97)
    assert choose_layout(model, "auto", 97, "student")
    for packed in (True, False):
        hidden = predicting_hidden(model, batching.lay_out(PAIRS, packed=packed))
        torch.testing.assert_close(head.logits(hidden), torch.cat(expected), atol=2e-4, rtol=1e-4)


def test_generation_with_left_padding_is_unchanged_by_the_packed_attention():
    model = fresh(llama)
    tokens = torch.tensor([[0, 0, 5, 6], [1, 2, 3, 4]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    before = model.generate(tokens, attention_mask=mask, max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert choose_layout(model, "auto", 97, "student")
    after = model.generate(tokens, attention_mask=mask, max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert torch.equal(before, after)


def test_softcapped_logits_and_attention_fall_back_to_padded_rows():
    model = fresh(lambda: Gemma2ForCausalLM(Gemma2Config(**SMALL, head_dim=8, attn_logit_softcapping=0.5)))
    assert not choose_layout(model, "auto", 97, "teacher")
    with pytest.raises(PreflightError, match="packed"):
        choose_layout(model, "packed", 97, "student")


def test_a_recurrent_model_is_never_packed():
    model = fresh(
        lambda: MambaForCausalLM(MambaConfig(vocab_size=97, hidden_size=32, state_size=4, num_hidden_layers=2))
    )
    assert not choose_layout(model, "auto", 97, "student")


def test_a_head_that_does_more_than_we_know_is_refused():
    model = fresh(llama)
    released = model.forward

    def scaled(*args, **kwargs):
        output = released(*args, **kwargs)
        output.logits = output.logits * 3
        return output

    model.forward = scaled
    with pytest.raises(PreflightError, match="output head"):
        choose_layout(model, "auto", 97, "student")
