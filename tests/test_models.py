"""Packed batches, our reading of the head, and the refusal of heads that we do not know."""

import json

import pytest
import torch
from conftest import save_tiny_llama
from safetensors.torch import load_file, save_file
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
from opd.models import choose_layout, load_model, load_tokenizer, predicting_hidden

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


# Weights and configuration that do not belong together.


def edited(folder, **changes):
    """The folder after changes to its config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder


def with_tensors(folder, more):
    """The folder after tensors were added to its weights."""
    file = folder / "model.safetensors"
    save_file(load_file(file) | more, file, {"format": "pt"})
    return folder


def tiny(tmp_path, **settings):
    return save_tiny_llama(tmp_path / "tiny", seed=1, vocab_size=64, **({"tied": True} | settings))


def load(folder):
    return load_model(str(folder), None, torch.float32, torch.device("cpu"), "student")


def refusal(folder):
    with pytest.raises(PreflightError) as caught:
        load(folder)
    return str(caught.value)


def test_a_model_is_never_filled_up_with_random_layers(tmp_path):
    text = refusal(edited(tiny(tmp_path), num_hidden_layers=3))
    assert "weights lack model.layers.2." in text
    assert "and 6 more" in text
    assert str(tmp_path / "tiny") in text


def test_a_head_that_is_not_tied_has_to_be_in_the_file(tmp_path):
    assert "weights lack lm_head.weight" in refusal(edited(tiny(tmp_path), tie_word_embeddings=False))


def test_no_layer_and_no_bias_of_the_model_is_dropped(tmp_path):
    folder = tiny(tmp_path)
    assert "hold model.layers.1." in refusal(edited(folder, num_hidden_layers=1))
    edited(folder, num_hidden_layers=2)
    bias = {"model.layers.0.self_attn.q_proj.bias": torch.ones(32)}
    assert "hold model.layers.0.self_attn.q_proj.bias" in refusal(with_tensors(folder, bias))


def test_what_other_tools_store_beside_a_model_is_no_reason_to_refuse_it(tmp_path):
    folder = with_tensors(
        tiny(tmp_path, tied=False),
        {
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
            "model.layers.0.self_attn.bias": torch.ones(1, 1, 4, 4),
            "visual.blocks.0.weight": torch.ones(3),
            "mtp.layers.0.input_layernorm.weight": torch.ones(32),
        },
    )
    assert load(folder).lm_head.weight.shape == (64, 32)
    third_layer = {"model.layers.2.input_layernorm.weight": torch.ones(32)}
    assert load(edited(with_tensors(folder, third_layer), num_nextn_predict_layers=1)).model.norm.weight.shape == (32,)
    assert "hold model.layers.2." in refusal(edited(folder, num_nextn_predict_layers=0))


def test_a_trunk_stored_without_its_prefix_is_the_same_model(tmp_path):
    folder = tiny(tmp_path)
    expected = load(folder).state_dict()
    file = folder / "model.safetensors"
    save_file({name.removeprefix("model."): t for name, t in load_file(file).items()}, file, {"format": "pt"})
    torch.testing.assert_close(load(folder).state_dict(), expected)
    assert "hold layers.1." in refusal(edited(folder, num_hidden_layers=1))


@pytest.mark.parametrize(("key", "value"), [("vocab_size", 70), ("hidden_size", 64)])
def test_shapes_of_another_model_are_named_with_the_file_and_both_shapes(tmp_path, key, value):
    folder = edited(tiny(tmp_path), **{key: value})
    wanted = {"vocab_size": [70, 32], "hidden_size": [64, 64]}[key]
    text = refusal(folder)
    assert str(folder / "model.safetensors") in text
    assert f"model.embed_tokens.weight has the shape [64, 32], its configuration wants {wanted}" in text


def test_shapes_in_other_formats_are_refused_with_both_shapes_too(tmp_path):
    folder = tiny(tmp_path)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    text = refusal(edited(folder, vocab_size=70))
    assert "model.embed_tokens.weight has the shape [64, 32], its configuration wants [70, 32]" in text


@pytest.mark.parametrize("kept", [0, 4, 100, -500])
def test_weights_that_were_cut_short_name_the_file(tmp_path, kept):
    folder = tiny(tmp_path)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    text = refusal(folder)
    assert str(file) in text
    assert "copy or fetch the file again" in text
    assert "HF_TOKEN" not in text


def test_a_missing_shard_is_named(tmp_path):
    folder = tiny(tmp_path)
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    names = {
        "model.norm.weight": "model-00001-of-00002.safetensors",
        "lm_head.weight": "model-00002-of-00002.safetensors",
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert "lacks model-00002-of-00002.safetensors" in refusal(folder)


@pytest.mark.parametrize(
    ("content", "expected"),
    [('{"version": "1.0", "model": {"type": "BPE"}}', "added_tokens"), ("", ""), ("{", "")],
)
def test_a_damaged_tokenizer_gets_a_reason_that_is_a_sentence(tmp_path, content, expected):
    folder = tiny(tmp_path)
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(PreflightError) as caught:
        load_tokenizer(str(folder), None, "student")
    assert expected in caught.value.why
    assert " " in caught.value.why
    assert not caught.value.why.endswith(":")
    assert "HF_TOKEN" not in caught.value.fix
