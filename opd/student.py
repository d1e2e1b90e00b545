"""The trainable model: float32 master weights, one optimizer step per batch of scored rollouts, a version per step.

The gradient of a step does not depend on how it is cut into micro-batches: every token's weight in the step's loss is
known before the first forward pass (`losses.token_weights`), and micro-batches only add up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from opd import batching, linear_loss, lora
from opd.chat import eos_ids
from opd.config import Config, LossSettings
from opd.diagnostics import engine_mismatch
from opd.errors import TrainingError
from opd.heads import Head, head_of
from opd.linear_loss import TokenStats, join_stats
from opd.losses import token_weights
from opd.models import choose_layout, load_model, load_tokenizer, predicting_hidden, resolve_device, resolve_dtype
from opd.sampling import truncated_logprobs
from opd.schedule import build_optimizer, learning_rate_at
from opd.sync import check_mismatch
from opd.types import Rollout, ScoredRollout, Targets

VERIFIED_ROLLOUTS = 4
"""Rollouts compared with the engine when truncation makes the comparison expensive."""


@dataclass(frozen=True, slots=True)
class Update:
    """What one call of `Student.update` did."""

    loss: float
    """Σ weight·loss over the step's tokens at the first pass, in nats (per token for token_mean)."""
    grad_norm: float
    """Global norm before clipping, last pass."""
    learning_rate: float
    stats: TokenStats
    """Per-token values of all rollouts in the order of `scored`, from the first pass."""
    weights: Tensor
    """[T] the reducer's weights; 0 = masked."""
    scored: list[ScoredRollout]
    """The batch, in `batching.in_order`."""
    engine_mismatch: float
    """Nats a token between sampler and student, at the first pass (LOSSES section 8)."""


class Student:
    """The model that is trained, its optimizer, and the version that rollouts are stamped with."""

    def __init__(self, config: Config, vocab_size: int) -> None:
        settings = config.student
        self.config = config
        self.device = resolve_device(settings.device)
        self.compute_dtype = resolve_dtype(settings.compute_dtype, self.device)
        self.vocab_size = vocab_size
        self.tokenizer = load_tokenizer(settings.model, settings.revision, "student")
        self.model = load_model(settings.model, settings.revision, torch.float32, self.device, "student")
        self.eos_ids = eos_ids(self.model.generation_config, self.tokenizer)
        self.context_length: int | None = getattr(self.model.config, "max_position_embeddings", None)
        self.packed = choose_layout(self.model, settings.attention, vocab_size, "student")
        if settings.gradient_checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        if settings.lora:
            self.model = lora.wrap(self.model, settings.lora, config.run.seed)
        self.trainable = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.optimizer = build_optimizer(self.trainable, config.train)
        self.version = 0

    @property
    def head(self) -> Head:
        """The output head as it is now; its weight is the parameter itself, so gradients reach it."""
        return head_of(self.model, self.vocab_size)

    def compute(self) -> AbstractContextManager[Any]:
        """The context in which matrix products run in `compute_dtype` from float32 weights."""
        enabled = self.compute_dtype != torch.float32
        return torch.autocast(self.device.type, dtype=self.compute_dtype, enabled=enabled)

    def update(self, scored: Sequence[ScoredRollout], *, diagnostics_k: int) -> Update:
        """Takes `train.inner_epochs` optimizer steps on one batch and returns what they did.

        Raises TrainingError when a loss or the gradient is not finite or no token has a support to learn from (no step is
        taken then), or when the options mask every token.
        """
        scored = batching.in_order(scored)
        rollouts = [item.rollout for item in scored]
        weights = token_weights(rollouts, self.config.loss)
        first: TokenStats | None = None
        mismatch = 0.0
        self.model.train()
        for _ in range(self.config.train.inner_epochs):
            self.optimizer.zero_grad(set_to_none=True)
            stats = self._accumulate(scored, weights, first, diagnostics_k if first is None else 0)
            if first is None:
                self._require_supports(stats, torch.cat(weights))
                first, mismatch = stats, self.verify_engine(rollouts, stats, truncated=self.config.rollout.truncates)
            grad_norm = self._step()
        self.model.eval()
        assert first is not None
        self.version += 1
        flat = torch.cat(weights)
        return Update(
            loss=float((first.loss.cpu() * flat).sum()),
            grad_norm=grad_norm,
            learning_rate=self.optimizer.param_groups[0]["lr"],
            stats=first,
            weights=flat,
            scored=scored,
            engine_mismatch=mismatch,
        )

    def _accumulate(
        self,
        scored: list[ScoredRollout],
        weights: list[Tensor],
        first: TokenStats | None,
        diagnostics_k: int,
    ) -> TokenStats:
        """Adds the gradient of the whole step, micro-batch by micro-batch; returns its per-token values."""
        lengths = [len(item.rollout.token_ids) for item in scored]
        first_logprobs = None if first is None else first.logprob.split(lengths)
        temperature = self.config.rollout.temperature
        parts = []
        for group in self._groups(range(len(scored)), lambda i: scored[i].rollout, lambda i: scored[i].head):
            items = [scored[i] for i in group]
            targets = batching.targets_of(
                items,
                [weights[i] for i in group],
                None if first_logprobs is None else [first_logprobs[i] for i in group],
                self.device,
            )
            loss, stats = self._loss(items, targets, self.config.loss, temperature, diagnostics_k)
            self._require_finite_loss(loss, stats, items)
            loss.backward()
            parts.append(stats)
        return join_stats(parts)

    def _loss(
        self,
        items: list[ScoredRollout],
        targets: Targets,
        settings: LossSettings,
        rollout_temperature: float,
        diagnostics_k: int,
    ) -> tuple[Tensor, TokenStats]:
        """The weighted loss of one micro-batch and its per-token values."""
        with self.compute():
            return linear_loss.head_loss(
                self._hidden([item.rollout for item in items]),
                self.head,
                targets,
                settings,
                teacher_head=items[0].head,
                rollout_temperature=rollout_temperature,
                diagnostics_k=diagnostics_k,
            )

    def _step(self) -> float:
        """One AdamW step at the scheduled learning rate; returns the gradient's norm before clipping."""
        limit = self.config.train.max_grad_norm
        norm = torch.nn.utils.clip_grad_norm_(self.trainable.values(), limit if limit is not None else torch.inf)
        if not torch.isfinite(norm):
            bad = [name for name, p in self.trainable.items() if p.grad is not None and not p.grad.isfinite().all()]
            raise TrainingError(
                f"The gradient of step {self.version + 1} is not finite; no step was taken.",
                where=", ".join(bad[:3]) + (f" and {len(bad) - 3} more parameters" if len(bad) > 3 else ""),
                why="the loss was finite, so a product in the backward pass overflowed",
                fix="lower train.learning_rate, or use student.compute_dtype=float32",
            )
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate_at(self.version, self.config.train)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(norm)

    def _require_supports(self, stats: TokenStats, weights: Tensor) -> None:
        """Raises TrainingError where every support that counts has fewer than two ids: the loss is 0 whatever the student does."""
        if stats.degenerate is None or not bool((stats.degenerate.cpu()[weights > 0] == 1).all()):
            return
        topk = self.config.loss.topk
        raise TrainingError(
            f"There is nothing to learn from in step {self.version + 1}; no step was taken.",
            where=f"loss.topk.of={topk.of}, loss.topk.mass=renormalize, loss.topk.k={topk.k}",
            why="every support has fewer than two ids, and renormalising one id makes its probability 1 for both models",
            fix="use loss.topk.of=union or loss.topk.mass=tail",
        )

    def _require_finite_loss(self, loss: Tensor, stats: TokenStats, items: list[ScoredRollout]) -> None:
        """Raises TrainingError, naming the completion token and what the teacher forbids there."""
        if torch.isfinite(loss):
            return
        index = position = int((~stats.loss.isfinite()).to(torch.uint8).argmax())
        for item in items:
            if position < len(item.rollout.token_ids):
                break
            position -= len(item.rollout.token_ids)
        token = int(item.rollout.token_ids[position])
        forbidden = forbidden_ids(item, position)
        if forbidden:
            names = ", ".join(f"{i} ({self.tokenizer.decode([i])!r})" for i in forbidden[:3])
            more = f" and of {len(forbidden) - 3} others" if len(forbidden) > 3 else ""
            why = f"the teacher's probability of token {names}{more} is 0 there, and the student's is not"
            fix = "use loss.divergence=jsd, which is finite there"
            if self.config.loss.support == "sampled":
                fix = "mask the token with loss.mask_token_ids, or use loss.support=full with loss.divergence=jsd"
        else:
            why = f"the student's log-probability of the token is {float(stats.logprob[index]):.4g}"
            fix = "lower train.learning_rate, or use student.compute_dtype=float32"
        raise TrainingError(
            f"The loss of step {self.version + 1} is not finite; no step was taken.",
            where=f"prompt {item.rollout.prompt.index}, sample {item.rollout.sample}, completion token {position} "
            f"(id {token}, {self.tokenizer.decode([token])!r})",
            why=why,
            fix=fix,
        )

    @torch.no_grad()
    def measure(
        self,
        scored: Sequence[ScoredRollout],
        settings: LossSettings,
        *,
        rollout_temperature: float = 1.0,
        diagnostics_k: int,
    ) -> TokenStats:
        """Returns per-token values of scored rollouts, in their order, without touching weights or gradients."""
        parts = []
        for items in self._groups(scored, lambda item: item.rollout, lambda item: item.head):
            weights = [torch.ones(len(item.rollout.token_ids)) for item in items]
            targets = batching.targets_of(items, weights, None, self.device)
            parts.append(self._loss(items, targets, settings, rollout_temperature, diagnostics_k)[1])
        return join_stats(parts)

    @torch.no_grad()
    def verify_engine(self, rollouts: Sequence[Rollout], stats: TokenStats, *, truncated: bool) -> float:
        """Returns the engine mismatch of rollouts that this version wrote; raises TrainingError above sync.max_mismatch.

        When sampling truncates the distribution, the student's logits have to be truncated in the same way, which costs a
        sort of the vocabulary: then only the first rollouts are compared.
        """
        settings = self.config.rollout
        if not truncated:
            ours, theirs = stats.sampling_logprob.cpu(), torch.cat([rollout.logprobs for rollout in rollouts])
        else:
            rollouts = rollouts[:VERIFIED_ROLLOUTS]
            with self.compute():
                hidden = self._hidden(rollouts)
                logits = self.head.logits(hidden).float()
            nucleus = truncated_logprobs(logits, settings.temperature, settings.top_k, settings.top_p, settings.min_p)
            token_ids = torch.cat([rollout.token_ids for rollout in rollouts])
            ours = nucleus.cpu().gather(1, token_ids[:, None])[:, 0]
            theirs = torch.cat([rollout.logprobs for rollout in rollouts])
            # A token at the very edge of the nucleus can fall outside the student's by rounding; it has no finite ratio.
            inside = ours.isfinite()
            if inside.float().mean() > 0.9:
                ours, theirs = ours[inside], theirs[inside]
        mismatch = float(engine_mismatch(ours, theirs).mean())
        check_mismatch(mismatch, self.config.sync.max_mismatch, self.version)
        return mismatch

    @torch.no_grad()
    def topk_ids(self, rollouts: Sequence[Rollout], k: int) -> list[Tensor]:
        """Returns the student's k most probable ids [T, k] at every completion token of every rollout."""
        found: list[Tensor] = []
        for group in self._groups(rollouts, lambda rollout: rollout):
            with self.compute():
                ids = linear_loss.topk_ids(self._hidden(group), self.head, k, self.config.loss.chunk_tokens)
            found += ids.cpu().split([len(rollout.token_ids) for rollout in group])
        return found

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, tensor) of every weight under its plain Hugging Face name; adapters come merged, as copies."""
        if self.config.student.lora:
            yield from lora.merged_weights(self.model)
        else:
            yield from ((name, parameter.detach()) for name, parameter in self.model.named_parameters())

    def _groups(self, items: Any, rollout_of: Any, head_of: Any = lambda _: None) -> Iterator[list[Any]]:
        """Cuts items into micro-batches, each with one teacher's head."""

        def length(item: Any) -> int:
            rollout = rollout_of(item)
            return len(rollout.prompt.student_ids) + len(rollout.token_ids)

        for _, alike in groupby(items, lambda item: id(head_of(item))):
            yield from batching.cut(alike, length, self.config.train.microbatch_tokens, packed=self.packed)

    def _hidden(self, rollouts: Sequence[Rollout]) -> Tensor:
        pairs = [(rollout.prompt.student_ids, rollout.token_ids) for rollout in rollouts]
        return predicting_hidden(self.model, batching.lay_out(pairs, packed=self.packed, device=self.device))

    def state(self) -> dict[str, dict[str, Tensor]]:
        """The tensors of a checkpoint: trained weights and the optimizer's moments, by parameter name."""
        moments: dict[str, Tensor] = {}
        for name, parameter in self.trainable.items():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                moments[f"{name}.{key}"] = value.detach()
        return {"model": {name: p.detach() for name, p in self.trainable.items()}, "optimizer": moments}

    @torch.no_grad()
    def load_state(self, tensors: dict[str, dict[str, Tensor]], version: int) -> None:
        """Restores what `state` gave; names and shapes have been checked by `Checkpoint.tensors`."""
        for name, parameter in self.trainable.items():
            parameter.copy_(tensors["model"][name])
        for name, parameter in self.trainable.items():
            keys = [key for key in tensors["optimizer"] if key.rpartition(".")[0] == name]
            if keys:
                self.optimizer.state[parameter] = {
                    key.rpartition(".")[2]: tensors["optimizer"][key].clone() for key in keys
                }
        self.version = version


@torch.no_grad()
def forbidden_ids(item: ScoredRollout, position: int) -> list[int]:
    """Returns the ids in the loss's support to which the teacher gives no probability at a completion token."""
    scores = item.scores
    if scores.hidden is not None and item.head is not None:
        logits = item.head.logits(scores.hidden[position][None].to(item.head.weight.device))[0]
        return torch.isneginf(logits).nonzero()[:, 0].tolist()
    if scores.support_ids is not None and scores.support_logprobs is not None:
        ids = scores.support_ids[position]
        return ids[(ids >= 0) & torch.isneginf(scores.support_logprobs[position])].tolist()
    if scores.sampled_logprobs is not None and torch.isneginf(scores.sampled_logprobs[position]):
        return [int(item.rollout.token_ids[position])]
    return []
