"""Facts about the vLLM sampler, on a real engine: what it returns is what the pushed weights say."""

import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from opd.config import Config, VllmSettings
from opd.errors import PreflightError, TrainingError
from opd.samplers import SamplingParams, build_sampler
from opd.samplers.hf import HfSampler
from opd.samplers.vllm import VllmSampler
from opd.sampling import truncated_logprobs
from opd.types import Prompt

VOCABULARY = 97
PADDED = 128
CONTEXT = 320
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": PADDED,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "eos_token_id": 3,
}
SETTINGS = VllmSettings(cpu_kv_cache_gib=0.1)


def model_of(seed, kind=LlamaForCausalLM, config=LlamaConfig, tied=True):
    torch.manual_seed(seed)
    model = kind(config(**SIZES, tie_word_embeddings=tied)).eval()
    with torch.no_grad():
        # Padding ids that would win every draw, were they not cut off.
        model.lm_head.weight[VOCABULARY:] = 10 * model.lm_head.weight[0]
    return model


def engine_of(folder, model, **overrides):
    model.save_pretrained(folder)
    options = {"vocab_size": VOCABULARY, "dtype": torch.float32, "context_length": CONTEXT, "on_cpu": True}
    return VllmSampler(str(folder), SETTINGS, **(options | overrides))


def weights_of(model):
    return ((name, parameter.detach()) for name, parameter in model.named_parameters())


@pytest.fixture(scope="module")
def models():
    return model_of(0), model_of(1)


@pytest.fixture(scope="module")
def engine(models, tmp_path_factory):
    sampler = engine_of(tmp_path_factory.mktemp("tiny"), models[0])
    with pytest.raises(TrainingError, match="no weights yet"):
        next(sampler.generate(prompts_of(1), PLAIN, seed=0))
    yield sampler
    sampler.close()


@pytest.fixture
def sampler(engine, models):
    """The engine with the first model's weights, as version 1."""
    engine.load_weights(weights_of(models[0]), 1)
    return engine


def prompts_of(count=6):
    return [Prompt(10 + i, ids := tuple(range(4, 8 + 2 * i)), ids) for i in range(count)]


@torch.no_grad()
def logits_of(model, rollout):
    prompt = rollout.prompt.student_ids
    ids = torch.tensor([[*prompt, *rollout.token_ids.tolist()]])
    return model(ids).logits[0, len(prompt) - 1 : -1, :VOCABULARY]


def error_of(model, rollout, params=None):
    """The largest difference between the sampler's log-probabilities and the model's own."""
    p = params or PLAIN
    expected = truncated_logprobs(logits_of(model, rollout), p.temperature, p.top_k, p.top_p, p.min_p)
    return (rollout.logprobs - expected.gather(1, rollout.token_ids[:, None])[:, 0]).abs().max()


def by_key(rollouts):
    return {rollout.key: rollout for rollout in rollouts}


PLAIN = SamplingParams(max_tokens=12, stop_token_ids=(0, 1, 2), topk=8, group_size=2)


@pytest.mark.parametrize(
    "params",
    [PLAIN, replace(PLAIN, temperature=0.6), replace(PLAIN, temperature=1.4, top_p=0.8, top_k=20, min_p=0.02)],
)
def test_logprobs_are_of_the_distribution_really_sampled_from(sampler, models, params):
    rollouts = list(sampler.generate(prompts_of(), params, seed=1))
    assert sorted(r.key for r in rollouts) == [(10 + i, sample) for i in range(6) for sample in range(2)]
    for rollout in rollouts:
        assert error_of(models[0], rollout, params) < 1e-3
        assert rollout.policy_version == 1


def test_topk_ids_are_exactly_the_k_most_probable_by_rank(sampler, models):
    outside = 0
    for rollout in sampler.generate(prompts_of(), PLAIN, seed=1):
        assert torch.equal(rollout.topk_ids, logits_of(models[0], rollout).topk(8).indices)
        outside += int((rollout.topk_ids != rollout.token_ids[:, None]).all(-1).sum())
    assert outside > 0, "some sampled tokens lie outside the top K, and they are not appended to it"


def test_topk_ids_are_left_out_where_the_engine_knows_only_the_truncated_distribution(sampler):
    truncated = next(iter(sampler.generate(prompts_of(1), replace(PLAIN, top_p=0.5), seed=1)))
    assert truncated.topk_ids is None
    assert not sampler.capabilities.topk_when_truncated
    assert next(iter(sampler.generate(prompts_of(1), replace(PLAIN, topk=0), seed=1))).topk_ids is None


def test_pushed_weights_are_what_is_sampled_from_though_head_and_embedding_are_tied(sampler, models):
    first, second = models
    before = by_key(sampler.generate(prompts_of(), PLAIN, seed=1))
    sampler.load_weights(weights_of(second), 2)
    after = by_key(sampler.generate(prompts_of(), PLAIN, seed=1))
    assert all(error_of(second, rollout) < 1e-3 for rollout in after.values())
    assert max(error_of(first, rollout) for rollout in after.values()) > 0.5
    assert {r.policy_version for r in before.values()} == {1}
    assert {r.policy_version for r in after.values()} == {2}


def test_a_sync_forgets_the_cached_keys_and_values_of_shared_prefixes(sampler, models):
    ids = tuple(int(i) for i in torch.randint(VOCABULARY, (300,), generator=torch.Generator().manual_seed(0)))
    params = SamplingParams(max_tokens=4)

    def error(model, version):
        sampler.load_weights(weights_of(model), version)
        first = next(iter(sampler.generate([Prompt(0, ids, ids)], params, seed=1)))
        cached = next(iter(sampler.generate([Prompt(0, ids, ids)], params, seed=2)))
        return max(error_of(model, rollout, params) for rollout in (first, cached))

    assert error(models[0], 1) < 1e-3
    assert error(models[1], 2) < 1e-3


def test_padding_ids_are_never_sampled(sampler):
    params = SamplingParams(max_tokens=40, temperature=2.0, topk=VOCABULARY, group_size=4)
    for rollout in sampler.generate(prompts_of(), params, seed=1):
        assert rollout.token_ids.max() < VOCABULARY
        assert rollout.topk_ids.max() < VOCABULARY


def test_the_same_call_gives_the_same_tokens_and_another_seed_others(sampler):
    first, again, other = (by_key(sampler.generate(prompts_of(), PLAIN, seed)) for seed in (1, 1, 2))
    assert all(torch.equal(first[key].token_ids, again[key].token_ids) for key in first)
    assert any(not torch.equal(first[key].token_ids, other[key].token_ids) for key in first)
    assert len({tuple(r.token_ids.tolist()) for r in first.values()}) == 12


def test_rollouts_come_out_while_others_are_still_being_written(sampler):
    waiting = sampler.generate(prompts_of(12), PLAIN, seed=3)
    first = next(waiting)
    unfinished = sampler._llm.llm_engine.get_num_unfinished_requests()
    rest = list(waiting)
    assert unfinished > 0
    assert len(first.token_ids) < max(len(rollout.token_ids) for rollout in rest)


def test_a_completion_ends_with_its_stop_id_or_at_the_limit_and_by_no_other_id(sampler):
    rollouts = list(sampler.generate(prompts_of(12), PLAIN, seed=3))
    assert {rollout.finish_reason for rollout in rollouts} == {"stop", "length"}
    for rollout in rollouts:
        ids = rollout.token_ids.tolist()
        assert not set(ids[:-1]) & {0, 1, 2}
        assert (ids[-1] in (0, 1, 2)) == (rollout.finish_reason == "stop")
        assert len(rollout.logprobs) == len(rollout.topk_ids) == len(ids)
    # The configuration beside the weights names 3 as its end; it was not asked for.
    assert any(3 in rollout.token_ids for rollout in rollouts)


def test_a_call_that_is_left_early_leaves_nothing_behind(sampler):
    expected = by_key(sampler.generate(prompts_of(), PLAIN, seed=1))
    waiting = sampler.generate(prompts_of(12), PLAIN, seed=3)
    next(waiting)
    waiting.close()
    assert not sampler._llm.llm_engine.has_unfinished_requests()
    again = by_key(sampler.generate(prompts_of(), PLAIN, seed=1))
    assert sorted(again) == sorted(expected)
    assert all(torch.equal(again[key].token_ids, expected[key].token_ids) for key in expected)


@pytest.mark.parametrize(("length", "message"), [(0, "no tokens"), (310, "leaves no room for 12")])
def test_a_prompt_that_cannot_be_continued_is_named(sampler, length, message):
    ids = tuple(5 for _ in range(length))
    with pytest.raises(TrainingError, match=message) as caught:
        list(sampler.generate([*prompts_of(1), Prompt(77, ids, ids)], PLAIN, seed=1))
    assert caught.value.where == "prompt 77"


def test_stop_strings_without_a_tokenizer_are_refused(sampler):
    with pytest.raises(TrainingError, match="without a tokenizer"):
        next(sampler.generate(prompts_of(1), replace(PLAIN, stop=("x",)), seed=1))


def test_the_process_around_the_engine_is_left_as_it_was(sampler):
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    assert torch.get_num_threads() == 1
    torch.set_num_threads(before)


def test_more_prompt_tokens_than_fit_into_one_pass_of_the_engine(sampler, models):
    prompts = [Prompt(i, ids := (4 + i % 50, *[4 + (7 * i + j) % 80 for j in range(299)]), ids) for i in range(40)]
    rollouts = list(sampler.generate(prompts, replace(PLAIN, max_tokens=2, group_size=1), seed=5))
    assert len(rollouts) == 40
    assert max(error_of(models[0], rollout) for rollout in rollouts[::8]) < 1e-3


@pytest.mark.parametrize("temperature", [0.001, 2.5])
def test_temperatures_that_the_engine_does_not_take_are_refused_before_it_starts(models, temperature):
    student = SimpleNamespace(model=models[0], context_length=None)
    config = Config.model_validate({"rollout": {"sampler": "vllm", "temperature": temperature}})
    with pytest.raises(PreflightError, match=r"between 0\.01 and 2"):
        build_sampler(config, student, pytest.fail)


@pytest.mark.parametrize(
    ("context_length", "kv_cache_gib", "reason"), [(4096, 0.1, "max_model_len"), (CONTEXT, 0.0001, "KV cache")]
)
def test_an_engine_that_does_not_start_says_why(models, tmp_path, context_length, kv_cache_gib, reason):
    models[0].save_pretrained(tmp_path)
    with pytest.raises(PreflightError, match="did not start") as caught:
        VllmSampler(
            str(tmp_path),
            VllmSettings(cpu_kv_cache_gib=kv_cache_gib),
            vocab_size=VOCABULARY,
            dtype=torch.float32,
            context_length=context_length,
            on_cpu=True,
        )
    assert reason in caught.value.why


def test_an_untied_model_with_biases_in_a_second_engine_that_writes_nothing_on_standard_output(tmp_path, capfd):
    model = model_of(2, Qwen2ForCausalLM, Qwen2Config, tied=False)
    torch.nn.init.normal_(model.model.layers[0].self_attn.q_proj.bias)
    sampler = engine_of(tmp_path, model)
    try:
        sampler.load_weights(weights_of(model), 1)
        for rollout in sampler.generate(prompts_of(), PLAIN, seed=1):
            assert error_of(model, rollout) < 1e-3
    finally:
        sampler.close()
    assert capfd.readouterr().out == ""


@pytest.fixture(scope="module")
def smol(smollm2):
    """SmolLM2-135M-Instruct, whose head and embedding are tied, and an engine for it that reads text."""
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    sampler = VllmSampler(
        str(smollm2),
        VllmSettings(cpu_kv_cache_gib=0.25),
        vocab_size=model.config.vocab_size,
        dtype=torch.float32,
        context_length=256,
        on_cpu=True,
        reads_text=True,
    )
    sampler.load_weights(weights_of(model), 0)
    yield model, AutoTokenizer.from_pretrained(smollm2), sampler
    sampler.close()


@torch.no_grad()
def smol_error(model, rollout):
    prompt = rollout.prompt.student_ids
    logits = model(torch.tensor([[*prompt, *rollout.token_ids.tolist()]])).logits[0, len(prompt) - 1 : -1]
    return (logits.log_softmax(-1).gather(1, rollout.token_ids[:, None])[:, 0] - rollout.logprobs).abs().max()


def test_stop_strings_end_a_completion_and_the_tokens_that_spell_them_stay(smol):
    model, tokenizer, sampler = smol
    ids = tuple(tokenizer("1, 2, 3, 4, 5,").input_ids)
    params = SamplingParams(max_tokens=24, temperature=0.05, stop=(" 8", "never"), topk=4)
    rollout = next(iter(sampler.generate([Prompt(0, ids, ids)], params, seed=0)))
    text = tokenizer.decode(rollout.token_ids)
    assert text.endswith("8")
    assert " 8" not in text[:-1]
    assert rollout.finish_reason == "stop"
    assert len(rollout.logprobs) == len(rollout.topk_ids) == len(rollout.token_ids) < 24
    hf = HfSampler(
        model=model,
        vocab_size=model.config.vocab_size,
        compute_dtype=torch.float32,
        batch_size=1,
        version=int,
        tokenizer=tokenizer,
    )
    assert (
        next(iter(hf.generate([Prompt(0, ids, ids)], params, seed=0))).token_ids.tolist() == rollout.token_ids.tolist()
    )


def test_special_tokens_may_be_written_as_stop_strings(smol):
    _, tokenizer, sampler = smol
    ids = tuple(tokenizer("<|im_start|>user\nSay yes.<|im_end|>\n<|im_start|>assistant\n").input_ids)
    params = SamplingParams(max_tokens=64, temperature=0.05, stop=("<|im_end|>",))
    rollout = next(iter(sampler.generate([Prompt(0, ids, ids)], params, seed=0)))
    assert tokenizer.decode(rollout.token_ids[-1]) == "<|im_end|>"
    assert rollout.finish_reason == "stop"


def test_a_sync_reaches_the_tied_head_of_smollm2(smol):
    model, tokenizer, sampler = smol
    ids = tuple(tokenizer("The capital of France is").input_ids)
    params = SamplingParams(max_tokens=16, group_size=2)
    moved = copy.deepcopy(model)
    with torch.no_grad():
        moved.model.embed_tokens.weight[:1000] *= 1.2
        moved.model.layers[7].mlp.down_proj.weight *= 1.1
    assert moved.lm_head.weight is moved.model.embed_tokens.weight
    assert all(smol_error(model, rollout) < 1e-3 for rollout in sampler.generate([Prompt(0, ids, ids)], params, seed=1))
    sampler.load_weights(weights_of(moved), 1)
    after = list(sampler.generate([Prompt(0, ids, ids)], params, seed=1))
    assert all(smol_error(moved, rollout) < 1e-3 for rollout in after)
    assert all(smol_error(model, rollout) > 0.1 for rollout in after)
    sampler.load_weights(weights_of(model), 2)
