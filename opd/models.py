"""Loading a causal language model, choosing where and in which type it computes, and running its trunk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from opd.attention import SEGMENTED, Prefix
from opd.errors import PreflightError
from opd.heads import head_of
from opd.types import Microbatch
from opd.weights import check_files, check_loaded

WEIGHT_PATTERNS = ("*.safetensors", "*.bin")


def resolve_device(name: str) -> torch.device:
    """Returns the device; auto means cuda when there is one."""
    if name != "auto":
        return torch.device(name)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def fast_bfloat16(device: torch.device) -> bool:
    """Whether bfloat16 matrix products are native: without AVX-512 BF16 or AMX a CPU emulates them, 10 to 100 times slower."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type == "cpu":
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return False


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """Returns the torch type; auto means bfloat16 where it is fast and float32 elsewhere."""
    if name == "auto":
        return torch.bfloat16 if fast_bfloat16(device) else torch.float32
    return torch.bfloat16 if name == "bfloat16" else torch.float32


def load_tokenizer(model: str, revision: str | None, role: str) -> PreTrainedTokenizerBase:
    """Returns the tokenizer of `model`; raises PreflightError when there is none."""
    try:
        return AutoTokenizer.from_pretrained(model, revision=revision)
    except Exception as error:
        raise _load_error("tokenizer", model, role, error) from error


def load_model_config(model: str, revision: str | None, role: str) -> Any:
    """Returns the model's configuration; costs no weights, so misfits can be found before loading them."""
    try:
        return AutoConfig.from_pretrained(model, revision=revision)
    except Exception as error:
        raise _load_error("configuration", model, role, error) from error


def load_model(model: str, revision: str | None, dtype: torch.dtype, device: torch.device, role: str) -> Any:
    """Returns the causal language model on `device` in evaluation mode.

    Raises PreflightError when it cannot be loaded, and when the weights are not all and only those of its configuration.
    """
    folder = Path(model)
    if folder.is_dir() and not any(any(folder.glob(pattern)) for pattern in WEIGHT_PATTERNS):
        raise PreflightError(
            f"The {role}'s folder holds no weights.",
            where=f"{role}.model={model}",
            why=f"none of {', '.join(WEIGHT_PATTERNS)} is in it; it has {_listing(folder)}",
            fix="name the folder that save_pretrained wrote, or a hub name such as Qwen/Qwen3-0.6B",
        )
    check_files(model, load_model_config(model, revision, role), role)
    load: Any = AutoModelForCausalLM.from_pretrained
    try:
        # Tensors of another shape are refused below, by their names; transformers' own error has none.
        loaded, info = load(
            model, revision=revision, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True
        )
    except Exception as error:
        raise _load_error("model", model, role, error) from error
    check_loaded(loaded, info, model, role)
    if getattr(loaded.config.get_text_config(), "attn_logit_softcapping", None):
        # Only the plain implementation caps the scores; SDPA leaves the cap out without a word.
        loaded.set_attn_implementation("eager")
    return loaded.to(device).eval()


def _listing(folder: Path) -> str:
    names = sorted(entry.name for entry in folder.iterdir())
    return ", ".join(names[:6]) + (" …" if len(names) > 6 else "") if names else "no files"


def _load_error(part: str, model: str, role: str, error: Exception) -> PreflightError:
    return PreflightError(
        f"The {role}'s {part} could not be loaded.",
        where=f"{role}.model={model}",
        why=_reason(error),
        fix="the folder is damaged or not whole: copy or fetch the model again"
        if Path(model).is_dir()
        else "check the folder or hub name (and HF_TOKEN for gated models); offline, name a local folder",
    )


def _reason(error: Exception) -> str:
    """The line of a library's error that says something: not a heading that ends with a colon, not a bare key."""
    kind = type(error).__name__
    if isinstance(error, KeyError):
        return f"{kind}: one of its files has no entry {error}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if not line.endswith(":")] or [line.rstrip(":") for line in lines]
    if not telling:
        return kind
    return telling[0] if " " in telling[0] else f"{kind}: {telling[0]}"


def decoder_of(model: Any) -> nn.Module:
    """Returns the part of the model below its head; its `last_hidden_state` comes after the final norm."""
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    return base.get_decoder()


def predicting_hidden(
    model: Any,
    batch: Microbatch,
    prefixes: Sequence[Prefix] = (),
    remember: Callable[[tuple[int, ...], Prefix], None] | None = None,
) -> Tensor:
    """Returns the hidden states [T, D] that predict the completion tokens; only they ever meet the head.

    `prefixes`: the remembered prompts that the batch continues. `remember` is given every prompt that the batch holds.
    """
    extra: dict[str, Any] = {}
    kept: list[tuple[Tensor, Tensor]] | None = None if remember is None else []
    if batch.segments is not None:
        # A 4-D mask is passed on untouched, so transformers does not build an N × N one that nobody reads.
        blank = torch.empty(1, 1, 1, 1, device=batch.input_ids.device)
        extra = {
            "segments": batch.segments,
            "mask_cache": {},
            "attention_mask": blank,
            "prefixes": prefixes,
            "kept": kept,
        }
    output = decoder_of(model)(
        input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False, **extra
    ).last_hidden_state.flatten(0, 1)
    if remember is not None and kept:
        for prompt, spans in batch.prompt_spans:
            layers = [(_spans(key, spans), _spans(value, spans)) for key, value in kept]
            last = next(stop for start, stop in reversed(spans) if stop > start) - 1
            remember(prompt, Prefix(layers, output[last].clone()))
    if prefixes:
        output = torch.cat([output, torch.stack([prefix.last_hidden for prefix in prefixes])])
    return output.index_select(0, batch.predicting_index)


def _spans(tensor: Tensor, spans: Sequence[tuple[int, int]]) -> Tensor:
    """A copy of some positions of [1, heads, N, head_dim]: a view would keep the whole row in memory."""
    return torch.cat([tensor[:, :, start:stop] for start, stop in spans], dim=2)


@torch.no_grad()
def choose_layout(model: Any, wanted: str, vocab_size: int, role: str) -> bool:
    """Returns whether packed batches are used, after measuring on the model itself that they are right.

    Two short sequences go through the model as released (one at a time, with its own head) and packed through the trunk
    and our reading of the head. An architecture whose packed result differs (state-space layers, attention sinks, …)
    falls back to padded rows; one whose head does more than `heads.py` knows is refused rather than trained wrongly.
    Raises PreflightError.
    """
    from opd.batching import lay_out

    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(vocab_size, (24,), generator=generator)
    prompt, other = drawn[:6].tolist(), drawn[6:10].tolist()
    # Two completions of one prompt, and a prompt that begins like it: every kind of segment there is.
    pairs = [(prompt, drawn[10:15]), (prompt, drawn[15:18]), (prompt[:4] + other, drawn[18:22])]
    expected = torch.cat([_released_logits(model, prompt, ids, vocab_size) for prompt, ids in pairs])
    head = head_of(model, vocab_size)

    def error(packed: bool) -> float:
        hidden = predicting_hidden(model, lay_out(pairs, packed=packed, device=device))
        return float((expected.exp() * (expected - head.logits(hidden).float().log_softmax(-1))).sum(-1).mean())

    # KL in nats a token: rounding stays far below, a missing scale or a leak between sequences far above.
    tolerance = 1e-2 if next(model.parameters()).dtype == torch.bfloat16 else 1e-5
    if error(packed=False) > tolerance:
        raise PreflightError(
            f"The {role}'s output head does something that opd does not know.",
            where=f"{role} architecture {type(model).__name__}",
            why="its own logits differ from hidden states × head (scale, softcap and bias are read from its config)",
            fix="please report the architecture; no option works around this, because the loss would be wrong",
        )
    if wanted == "padded":
        return False
    released = model.config._attn_implementation
    if getattr(model, "_supports_attention_backend", False):
        model.set_attn_implementation(SEGMENTED)
        try:
            if error(packed=True) <= tolerance:
                return True
        except (TypeError, ValueError, RuntimeError):
            pass  # the architecture does not take the packed call; padded rows below are right for every causal model
        model.set_attn_implementation(released)
    if wanted == "packed":
        raise PreflightError(
            f"The {role}'s architecture cannot compute packed batches.",
            where=f"student.attention=packed, {type(model).__name__}",
            fix="use student.attention=padded (or auto)",
        )
    return False


def _released_logits(model: Any, prompt: list[int], ids: Tensor, vocab_size: int) -> Tensor:
    """[T, V] log-probabilities of one sequence from the model's own forward pass."""
    tokens = torch.cat([torch.tensor(prompt), ids])[None].to(next(model.parameters()).device)
    logits = model(input_ids=tokens, use_cache=False).logits[0, len(prompt) - 1 : -1, :vocab_size]
    return logits.float().log_softmax(-1)
