"""The vLLM sampler: an engine in this process, stepped by hand so that rollouts come out one by one.

The engine starts with dummy weights: what is on disk is never sampled from, only what was pushed. It is told that its
output head is not tied to its embedding, because a CPU engine keeps a packed copy of the head that a reload of tied
weights leaves stale, without any error; the head is therefore pushed under its own name.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from opd.config import VllmSettings
from opd.errors import OpdError, PreflightError, TrainingError
from opd.samplers import Capabilities, SamplingParams, check_prompts, draw_seed
from opd.types import FinishReason, Prompt, Rollout

CPU_BLOCK_TOKENS = 32
"""Tokens of a KV-cache block: the least that the CPU engine's attention kernels are made for."""


def prepare_environment() -> None:
    """Sets what vLLM reads when it is imported, leaving alone what the user has set.

    Only one setting is not the user's choice: the engine has to live in this process to take tensors from it.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    defaults = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        # vLLM reduces the whole process to one thread where this is unset.
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    }
    if os.environ.get("OPD_DEBUG", "") in ("", "0"):
        defaults["VLLM_LOGGING_LEVEL"] = "ERROR"
        logging.getLogger("torch._library.triton").setLevel(logging.ERROR)
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def kv_cache_gib(model_config: Any, dtype: torch.dtype, sequences: int, context_length: int) -> float:
    """Returns the GiB of KV cache for `sequences` at once of `context_length` tokens: no more than 4 but for one sequence."""
    heads = getattr(model_config, "num_key_value_heads", None) or model_config.num_attention_heads
    head_dim = getattr(model_config, "head_dim", None) or model_config.hidden_size // model_config.num_attention_heads
    token = 2 * model_config.num_hidden_layers * heads * head_dim * dtype.itemsize
    # One block more: the engine keeps one for itself.
    sequence = (-(-context_length // CPU_BLOCK_TOKENS) + 1) * CPU_BLOCK_TOKENS * token
    return max(min(sequences * sequence / 2**30, 4.0), 2 * sequence / 2**30)


class VllmSampler:
    """Samples with an in-process vLLM engine, on a CPU or a GPU."""

    name = "vllm"

    def __init__(
        self,
        model: str,
        settings: VllmSettings,
        *,
        revision: str | None = None,
        vocab_size: int,
        dtype: torch.dtype,
        context_length: int,
        on_cpu: bool,
        reads_text: bool = False,
        seed: int = 0,
        embedding: str = "model.embed_tokens.weight",
        head: str = "lm_head.weight",
    ) -> None:
        """Starts the engine for the architecture that `model` names; its weights come with load_weights.

        `context_length` bounds prompt and completion; `reads_text` loads the tokenizer, for stop strings; `embedding` and
        `head` are the names of the two weights with one row a token, which are cut to `vocab_size` rows so that a padding
        id can never be sampled. Raises PreflightError when the engine does not start.
        """
        self.vocab_size = vocab_size
        self.dtype = dtype
        self.capabilities = Capabilities(
            topk_when_truncated=False,
            shares_weights=False,
            sleeps=settings.sleep and not on_cpu,
            context_length=context_length,
        )
        self._reads_text = reads_text
        self._embedding, self._head = embedding, head
        self._version: int | None = None
        self._calls = 0
        self._asleep = False
        prepare_environment()
        options: dict[str, Any] = {
            "revision": revision,
            "skip_tokenizer_init": not reads_text,
            "load_format": "dummy",
            "dtype": str(dtype).removeprefix("torch."),
            "max_model_len": context_length,
            "max_num_seqs": settings.max_concurrent,
            "max_logprobs": -1,
            "logprobs_mode": "processed_logprobs",
            "enable_prefix_caching": True,
            "enforce_eager": on_cpu if settings.enforce_eager is None else settings.enforce_eager,
            "generation_config": "vllm",
            "hf_overrides": {"tie_word_embeddings": False, "vocab_size": vocab_size},
            "seed": seed,
        }
        if on_cpu:
            if settings.cpu_kv_cache_gib is not None:
                options["kv_cache_memory_bytes"] = int(settings.cpu_kv_cache_gib * 2**30)
            # vLLM's 128 would share no prompt shorter than that between the rollouts of a group.
            options["block_size"] = CPU_BLOCK_TOKENS
            # A prompt cut in two has its seeded draw taken back, which the engine cannot do with a CPU generator: it
            # crashes as soon as more prompts wait than fit into one pass.
            options["enable_chunked_prefill"] = False
        else:
            options["gpu_memory_utilization"] = settings.gpu_memory_utilization
            options["enable_sleep_mode"] = settings.sleep
        try:
            self._llm = start_engine(model, options)
        except OpdError:
            raise
        except Exception as error:
            raise PreflightError(
                "The vLLM engine did not start.",
                where=f"student.model={model}, vllm.*",
                why=_reason(error),
                fix="give it memory (vllm.gpu_memory_utilization, or vllm.cpu_kv_cache_gib on a CPU), see its log with "
                "OPD_DEBUG=1, or use rollout.sampler=hf",
            ) from error

    def generate(self, prompts: Sequence[Prompt], params: SamplingParams, seed: int) -> Iterator[Rollout]:
        """Yields group_size rollouts a prompt, each as soon as the engine finishes it.

        `topk_ids` is None when the distribution is truncated: the engine knows the ids of what it samples from only.
        Raises TrainingError when no weights were loaded yet, or for prompts that do not fit the context.
        """
        if self._version is None:
            raise TrainingError(
                "The vLLM engine has no weights yet.", fix="call load_weights (push_weights) before the first rollout"
            )
        if params.stop and not self._reads_text:
            raise TrainingError(
                "The vLLM engine was started without a tokenizer, so it cannot look for stop strings.",
                fix="set rollout.stop before the run starts, or use stop_token_ids",
            )
        check_prompts(prompts, params, self.capabilities.context_length)
        self.wake()
        engine, version, k = (
            self._llm.llm_engine,
            self._version,
            0 if params.truncates else min(params.topk, self.vocab_size),
        )
        self._calls += 1
        waiting: dict[str, tuple[Prompt, int]] = {}
        try:
            for prompt in prompts:
                for sample in range(params.group_size):
                    name = f"{self._calls}-{prompt.index}-{sample}"
                    tokens = {"prompt_token_ids": list(prompt.student_ids)}
                    waiting[name] = (prompt, sample)
                    engine.add_request(name, tokens, self._request(params, k, draw_seed(seed, prompt.index, sample)))
            while waiting:
                for output in engine.step():
                    prompt, sample = waiting.pop(output.request_id)
                    yield _rollout(output.outputs[0], prompt, sample, k, version)
        finally:
            # Left early (an error, an interrupt, a consumer that stops): the next call must not find old requests.
            if waiting:
                engine.abort_request(list(waiting))
                while engine.has_unfinished_requests():
                    engine.step()

    @torch.no_grad()
    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replaces the engine's weights and forgets what was computed with the old ones; wakes it when asleep."""
        self.wake()
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": self._engine_weights(named_tensors)})
        # Cached keys and values of shared prompt prefixes belong to the old weights.
        self._llm.llm_engine.reset_prefix_cache()
        self._version = version

    def sleep(self) -> None:
        """Frees the engine's GPU memory (weights go to main memory) until it is needed; nothing on a CPU."""
        if self.capabilities.sleeps and not self._asleep:
            self._llm.sleep(level=1)
            self._asleep = True

    def wake(self) -> None:
        """Takes the GPU memory back."""
        if self._asleep:
            self._llm.wake_up()
            self._asleep = False

    def close(self) -> None:
        """Frees the engine and the process group it made, so that another can start in this process."""
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        self._llm.llm_engine.engine_core.shutdown()
        del self._llm
        cleanup_dist_env_and_memory()

    def _engine_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The tensors in the engine's type, cut to the shared vocabulary, with the head under its own name."""
        tied: Tensor | None = None
        has_head = False
        for name, tensor in named_tensors:
            has_head = has_head or name == self._head
            if name in (self._embedding, self._head, self._head.removesuffix("weight") + "bias"):
                tensor = tensor[: self.vocab_size]
            tensor = tensor.to(self.dtype)
            if name == self._embedding:
                tied = tensor
            yield name, tensor
        if not has_head and tied is not None:
            yield self._head, tied

    def _request(self, params: SamplingParams, k: int, seed: int) -> Any:
        """The engine's own parameters of one completion."""
        from vllm import SamplingParams as EngineParams
        from vllm.sampling_params import RequestOutputKind

        return EngineParams(
            max_tokens=params.max_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            min_p=params.min_p,
            stop=list(params.stop),
            stop_token_ids=list(params.stop_token_ids),
            # Ends are ours to name: the engine's own idea of them depends on which files lie beside the model.
            ignore_eos=True,
            seed=seed,
            logprobs=k,
            flat_logprobs=True,
            detokenize=bool(params.stop),
            skip_special_tokens=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )


def _rollout(completion: Any, prompt: Prompt, sample: int, k: int, version: int) -> Rollout:
    """Returns the engine's finished completion as ours; raises TrainingError for one that did not end by rule."""
    if completion.finish_reason not in ("stop", "length"):
        raise TrainingError(
            f"The vLLM engine gave up on a completion ({completion.finish_reason}).",
            where=f"prompt {prompt.index}, sample {sample}",
            fix="see its log with OPD_DEBUG=1",
        )
    reason: FinishReason = completion.finish_reason
    token_ids = torch.tensor(list(completion.token_ids), dtype=torch.int64)
    # A position holds the sampled token, then the K most probable by rank (the sampled one may come twice).
    flat = completion.logprobs
    ids = torch.tensor(flat.token_ids, dtype=torch.int64).view(-1, k + 1)[: len(token_ids)]
    logprobs = torch.tensor(flat.logprobs, dtype=torch.float32).view(-1, k + 1)[: len(token_ids), 0]
    return Rollout(
        prompt=prompt,
        sample=sample,
        token_ids=token_ids,
        logprobs=logprobs.contiguous(),
        finish_reason=reason,
        policy_version=version,
        topk_ids=ids[:, 1:].contiguous() if k else None,
    )


def _reason(error: Exception) -> str:
    """Returns the first sentence of an engine error that says something; pydantic wraps it in a heading and a footer."""
    lines = [line.strip().removeprefix("Value error, ") for line in str(error).splitlines() if line.strip()]
    found = next((line for line in lines if "validation error" not in line), type(error).__name__)
    return found.partition(" [type=")[0].partition(". ")[0]


def start_engine(model: str, options: dict[str, Any]) -> Any:
    """Returns the engine, with the process around it as it was."""
    with _undisturbed(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm import LLM
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            # One comparison in the engine's sampler would otherwise be compiled, which needs a C++ compiler at run time.
            type(current_platform).simple_compile_backend = "eager"
        return LLM(model, **options)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Keeps the engine's start from changing the process: its random state, torch.set_num_threads, standard output."""
    set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
    state = torch.get_rng_state()
    sys.stdout.flush()
    stdout = os.dup(1)
    # C++ libraries print greetings on standard output, where `--json` promises one document.
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        os.close(stdout)
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(threads)
        torch.set_rng_state(state)
