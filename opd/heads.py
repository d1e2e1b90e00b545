"""The output head: what turns final hidden states into logits, with everything the model's own forward applies to them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear


@dataclass(frozen=True, slots=True)
class Head:
    """Logits = softcap(scale · (hidden × weightᵀ + bias)), cut to the vocabulary that teacher and student share."""

    weight: Tensor
    """[V_model, D]"""
    bias: Tensor | None
    """[V_model] or None"""
    logit_scale: float
    softcap: float | None
    vocab_size: int
    """V: ids from V on are padding, and no logit of theirs exists anywhere."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns the logits [T, V] of hidden states [T, D], in float32 (float64 stays float64)."""
        return self.activate(self.product(hidden))

    def product(self, hidden: Tensor) -> Tensor:
        """Returns hidden × weightᵀ + bias, [T, V] in the type that matrix products run in."""
        weight = self.weight[: self.vocab_size]
        if hidden.dtype != weight.dtype and not torch.is_autocast_enabled(hidden.device.type):
            hidden = hidden.to(weight.dtype)
        return linear(hidden, weight, None if self.bias is None else self.bias[: self.vocab_size])

    def to(self, device: torch.device) -> Head:
        """Returns the head on a device."""
        return replace(self, weight=self.weight.to(device), bias=None if self.bias is None else self.bias.to(device))

    def in_compute_type(self) -> Head:
        """Returns the head without gradient, in the type that autocast would cast it to at every single product."""
        kind, weight = self.weight.device.type, self.weight.detach()[: self.vocab_size]
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
        # Autocast leaves float64 alone.
        dtype = weight.dtype if weight.dtype == torch.float64 else dtype
        bias = None if self.bias is None else self.bias.detach()[: self.vocab_size].to(dtype)
        return replace(self, weight=weight.to(dtype), bias=bias)

    def activate(self, product: Tensor) -> Tensor:
        """Returns the logits of a product: scaled and softcapped, in float32 or float64."""
        logits = product if product.dtype == torch.float64 else product.float()
        if self.logit_scale != 1:
            logits = logits * self.logit_scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits

    def through_activation(self, gradient: Tensor, logits: Tensor) -> Tensor:
        """Returns the gradient with respect to `product`, given the one with respect to the logits [T, V]."""
        if self.softcap is not None:
            gradient = gradient * (1 - (logits / self.softcap).square())
        return gradient if self.logit_scale == 1 else gradient * self.logit_scale


def head_of(model: Any, vocab_size: int) -> Head:
    """Returns the head of a transformers causal language model (or of one wrapped by peft).

    Gemma caps its final logits (`final_logit_softcapping`), Granite divides them (`logits_scaling`), Cohere multiplies
    them (`logit_scale`). `models.choose_layout` measures that there is nothing else.
    """
    layer = model.get_output_embeddings()
    config = model.config.get_text_config()
    scale = 1.0
    if divisor := getattr(config, "logits_scaling", None):
        scale /= divisor
    if factor := getattr(config, "logit_scale", None):
        scale *= factor
    softcap = getattr(config, "final_logit_softcapping", None)
    return Head(layer.weight, getattr(layer, "bias", None), scale, softcap or None, vocab_size)
