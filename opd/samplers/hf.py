"""The transformers sampler: batched decoding with a KV cache, on the student's own module.

It needs no second copy of the weights and runs wherever the model runs. Finished rows leave the batch, so one long
completion does not cost a whole batch of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from opd.errors import TrainingError
from opd.samplers import Capabilities, SamplingParams, check_prompts, draw_seed
from opd.sampling import truncated_logprobs
from opd.types import FinishReason, Prompt, Rollout


@dataclass(slots=True)
class Row:
    """One completion while it is being written."""

    prompt: Prompt
    sample: int
    generator: torch.Generator
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    topk_ids: list[Tensor] = field(default_factory=list)

    def rollout(self, reason: FinishReason, version: int) -> Rollout:
        """Returns the finished completion."""
        return Rollout(
            prompt=self.prompt,
            sample=self.sample,
            token_ids=torch.tensor(self.token_ids, dtype=torch.int64),
            logprobs=torch.tensor(self.logprobs, dtype=torch.float32),
            finish_reason=reason,
            policy_version=version,
            topk_ids=torch.stack(self.topk_ids) if self.topk_ids else None,
        )


class HfSampler:
    """Samples from any transformers causal language model; the student's rollouts or a teacher's own completions."""

    name = "hf"

    def __init__(
        self,
        *,
        model: Any,
        vocab_size: int,
        compute_dtype: torch.dtype,
        batch_size: int,
        version: Callable[[], int],
        tokenizer: Any = None,
        context_length: int | None = None,
    ) -> None:
        """`version` tells which policy the module holds now; `tokenizer` is needed for stop strings only."""
        self.model = model
        self.vocab_size = vocab_size
        self.compute_dtype = compute_dtype
        self.batch_size = batch_size
        self.version = version
        self.tokenizer = tokenizer
        self.capabilities = Capabilities(
            topk_when_truncated=True, shares_weights=True, sleeps=False, context_length=context_length
        )

    def generate(self, prompts: Sequence[Prompt], params: SamplingParams, seed: int) -> Iterator[Rollout]:
        """Yields group_size rollouts a prompt as they finish; the same call gives the same tokens, bit for bit.

        Raises TrainingError for prompts that do not fit the context and for logits that are not finite.
        """
        check_prompts(prompts, params, self.capabilities.context_length)
        rows = [
            Row(prompt, sample, torch.Generator().manual_seed(draw_seed(seed, prompt.index, sample)))
            for prompt in prompts
            for sample in range(params.group_size)
        ]
        # Neighbours in length share a batch, so little of it is padding.
        rows.sort(key=lambda row: (len(row.prompt.student_ids), row.prompt.index, row.sample))
        weights = self._compute_weights()
        for start in range(0, len(rows), self.batch_size):
            yield from self._decode(rows[start : start + self.batch_size], params, weights)

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Nothing to copy: the module is the student's own, so the tensors are not even asked for."""

    def sleep(self) -> None:
        """Nothing to give back: no memory outlives generate()."""

    def wake(self) -> None:
        """Always ready."""

    def close(self) -> None:
        """Nothing to free: the module belongs to its owner."""

    def _decode(self, rows: list[Row], params: SamplingParams, weights: dict[str, Tensor]) -> Iterator[Rollout]:
        """Writes one batch of completions, token by token."""
        version = self.version()
        device = self.model.get_input_embeddings().weight.device
        longest = max(len(row.prompt.student_ids) for row in rows)
        step_ids = torch.zeros(len(rows), longest, dtype=torch.int64)
        attended = torch.zeros(len(rows), longest, dtype=torch.int64)
        for r, row in enumerate(rows):
            ids = row.prompt.student_ids
            step_ids[r, longest - len(ids) :] = torch.tensor(ids)
            attended[r, longest - len(ids) :] = 1
        attended = attended.to(device)
        positions = (attended.cumsum(-1) - 1).clamp(min=0)
        cache = None
        while True:
            logits, cache = self._forward(step_ids.to(device), attended, positions, cache, weights)
            drawn = self._draw(logits, rows, params)
            finished = [self._finish_reason(row, params) for row in rows]
            yield from (row.rollout(reason, version) for row, reason in zip(rows, finished, strict=True) if reason)
            going = [r for r, reason in enumerate(finished) if reason is None]
            if not going:
                return
            if len(going) < len(rows):
                index = torch.tensor(going, device=device)
                cache.batch_select_indices(index)
                rows = [rows[r] for r in going]
                drawn, attended, positions = drawn[index.to(drawn.device)], attended[index], positions[index]
            step_ids = drawn[:, None]
            attended = torch.cat([attended, attended.new_ones(len(rows), 1)], dim=1)
            positions = positions[:, -1:] + 1

    def _forward(
        self, ids: Tensor, attended: Tensor, positions: Tensor, cache: Any, weights: dict[str, Tensor]
    ) -> tuple[Tensor, Any]:
        """Returns the logits [rows, V] after the last token, and the cache with these tokens in it."""
        # Entered for one call only: a context held across a yield would leak into the code that consumes the rollouts.
        with torch.no_grad(), _evaluating(self.model), self._autocast(ids.device):
            arguments = {
                "input_ids": ids,
                "attention_mask": attended,
                "position_ids": positions,
                "past_key_values": cache,
                "use_cache": True,
                "logits_to_keep": 1,
            }
            output = torch.func.functional_call(self.model, weights, kwargs=arguments, args=(), tie_weights=False)
            return output.logits[:, -1, : self.vocab_size].float(), output.past_key_values

    @torch.no_grad()
    def _draw(self, logits: Tensor, rows: list[Row], params: SamplingParams) -> Tensor:
        """Appends one token to every row and returns them [rows]: inverse CDF of one uniform number a row."""
        logprobs = truncated_logprobs(logits, params.temperature, params.top_k, params.top_p, params.min_p)
        cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
        total = cumulative[:, -1:]
        if not torch.isfinite(total).all():
            bad = rows[int((~torch.isfinite(total[:, 0])).nonzero()[0])]
            raise TrainingError(
                "The model's logits are not finite.",
                where=f"prompt {bad.prompt.index}, sample {bad.sample}, completion token {len(bad.token_ids)}",
                why="the weights, or the products in the compute type, overflowed",
                fix="lower train.learning_rate, or use student.compute_dtype=float32",
            )
        uniform = torch.stack([torch.rand(1, generator=row.generator, dtype=torch.float64) for row in rows])
        # Strictly below the total, or rounding could pick a token that cannot be drawn.
        target = torch.minimum(uniform.to(total.device) * total, torch.nextafter(total, torch.zeros_like(total)))
        drawn = torch.searchsorted(cumulative, target, right=True)
        chosen = logprobs.gather(-1, drawn)[:, 0].tolist()
        drawn = drawn[:, 0].cpu()
        k = min(params.topk, self.vocab_size)
        topk = logits.topk(k, dim=-1).indices.cpu() if k else None
        for r, row in enumerate(rows):
            row.token_ids.append(int(drawn[r]))
            row.logprobs.append(chosen[r])
            if topk is not None:
                row.topk_ids.append(topk[r])
        return drawn

    def _finish_reason(self, row: Row, params: SamplingParams) -> FinishReason | None:
        """Returns why the row ends after its last token, or None when it goes on."""
        if row.token_ids[-1] in params.stop_token_ids or self._writes_stop(row, params.stop):
            return "stop"
        return "length" if len(row.token_ids) >= params.max_tokens else None

    def _writes_stop(self, row: Row, stop: tuple[str, ...]) -> bool:
        if not stop:
            return False
        if self.tokenizer is None:
            raise TrainingError(
                "This sampler has no tokenizer, so it cannot look for stop strings.", fix="use stop_token_ids"
            )
        # A character takes up to four bytes and a token holds at least one, so the tail holds any stop string whole.
        tail = row.token_ids[-4 * max(map(len, stop)) - 1 :]
        text = self.tokenizer.decode(tail, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return any(string in text for string in stop)

    def _compute_weights(self) -> dict[str, Tensor]:
        """Returns the linear layers' weights in the compute type, by parameter name; empty where they are in it already.

        Autocast would convert all of them again for every token, which costs more than the products themselves.
        """
        if self.compute_dtype == torch.float32:
            return {}
        return {
            f"{name}.weight": module.weight.detach().to(self.compute_dtype)
            for name, module in self.model.named_modules()
            if isinstance(module, nn.Linear) and module.weight.dtype == torch.float32
        }

    def _autocast(self, device: torch.device) -> torch.autocast:
        enabled = self.compute_dtype != torch.float32
        return torch.autocast(device.type, dtype=self.compute_dtype, enabled=enabled)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Dropout off inside, and the model as it was afterwards."""
    training = model.training
    if training:
        model.eval()
    try:
        yield
    finally:
        if training:
            model.train()
