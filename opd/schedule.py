"""AdamW and its learning rate as a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import nn

from opd.config import TrainSettings


def learning_rate_at(step: int, settings: TrainSettings) -> float:
    """Returns the learning rate of optimizer step `step` (from 0): a linear warm-up, then the schedule down to 0."""
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / (settings.warmup_steps + 1)
    done = (step - settings.warmup_steps) / max(1, settings.steps - settings.warmup_steps)
    match settings.schedule:
        case "constant":
            factor = 1.0
        case "linear":
            factor = 1.0 - done
        case "cosine":
            factor = 0.5 * (1.0 + math.cos(math.pi * done))
    return settings.learning_rate * max(factor, 0.0)


def build_optimizer(parameters: Mapping[str, nn.Parameter], settings: TrainSettings) -> torch.optim.AdamW:
    """Returns AdamW over the parameters; weight decay goes to matrices only, not to norms and biases."""
    matrices = [p for p in parameters.values() if p.ndim >= 2]
    vectors = [p for p in parameters.values() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
        fused=True,
    )
