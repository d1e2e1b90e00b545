"""Low-rank adapters through peft. Merged weights are always fresh copies: nothing is ever merged in place, so never twice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from opd.config import LoraSettings
from opd.errors import PreflightError

ADAPTER = "default"


def wrap(model: Any, settings: LoraSettings, seed: int) -> Any:
    """Returns the model with trainable adapters in float32 and everything else frozen; raises PreflightError without peft."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise PreflightError(
            "LoRA needs the package peft.", where="student.lora", fix="pip install 'opd[lora]'"
        ) from error
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]  # peft takes fractions too
        lora_dropout=settings.dropout,
        target_modules=settings.targets,
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            wrapped = get_peft_model(model, config, adapter_name=ADAPTER)
        except ValueError as error:
            raise PreflightError(
                "The adapters fit no module of the student.",
                where=f"student.lora.targets={settings.targets}",
                why=str(error).splitlines()[0],
                fix="use all-linear, or module names such as q_proj and v_proj",
            ) from error
    if wrapped.config.get_text_config().tie_word_embeddings and any(
        hasattr(layer, "lora_A") or hasattr(layer, "lora_embedding_A")
        for layer in (model.get_output_embeddings(), model.get_input_embeddings())
    ):
        raise PreflightError(
            "The student's head and embedding are one tensor, which an adapter on either would untie.",
            where=f"student.lora.targets={settings.targets}",
            fix="leave the head and the embedding out of the targets; all-linear does",
        )
    if getattr(model, "is_gradient_checkpointing", False):
        wrapped.enable_input_require_grads()
    return wrapped


@torch.no_grad()
def merged_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yields (plain Hugging Face name, weight) with every adapter's scaled product added to a copy of its base weight."""
    for name, parameter in model.get_base_model().named_parameters():
        if ".lora_" in name:
            continue
        if name.endswith(".base_layer.weight"):
            module = name.removesuffix(".base_layer.weight")
            layer = model.get_base_model().get_submodule(module)
            yield f"{module}.weight", parameter.detach() + layer.get_delta_weight(ADAPTER).to(parameter.dtype)
        else:
            yield name.replace(".base_layer.", "."), parameter.detach()
