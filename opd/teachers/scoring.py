"""A transformers model that scores sequences: what the in-process teacher and the scoring server have in common."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from opd import batching, linear_loss
from opd.attention import Prefix
from opd.chat import eos_ids
from opd.errors import TrainingError
from opd.heads import Head, head_of
from opd.models import choose_layout, load_model, load_tokenizer, predicting_hidden, resolve_device, resolve_dtype
from opd.types import Query, ScoreRequest, TeacherScores
from opd.vocab import highest_id


class PrefixCache:
    """Prompts that were read lately, up to a number of tokens; the one that was not used for longest goes first."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.tokens = 0
        self._prefixes: OrderedDict[tuple[int, ...], Prefix] = OrderedDict()

    def get(self, prompt: tuple[int, ...]) -> Prefix | None:
        """Returns what is remembered of a prompt."""
        if prompt in self._prefixes:
            self._prefixes.move_to_end(prompt)
        return self._prefixes.get(prompt)

    def put(self, prompt: tuple[int, ...], prefix: Prefix) -> None:
        """Remembers a prompt, unless it is longer than everything that may be remembered."""
        if prompt in self._prefixes or len(prompt) > self.max_tokens:
            return
        self._prefixes[prompt] = prefix
        self.tokens += len(prompt)
        while self.tokens > self.max_tokens:
            self.tokens -= len(self._prefixes.popitem(last=False)[0])


class ScoringModel:
    """A causal language model without gradients; only completion positions meet its head."""

    def __init__(
        self, model: str, revision: str | None, device: str, dtype: str, *, prefix_cache_tokens: int = 0
    ) -> None:
        """`prefix_cache_tokens`: prompt tokens whose keys and values are remembered from one call to the next."""
        self.name = model
        self.device = resolve_device(device)
        self.dtype = resolve_dtype(dtype, self.device)
        self.tokenizer = load_tokenizer(model, revision, "teacher")
        self.model = load_model(model, revision, self.dtype, self.device, "teacher")
        self.model.requires_grad_(False)
        config = self.model.config.get_text_config()
        self.vocab_size = min(config.vocab_size, highest_id(self.tokenizer) + 1)
        """Ids that are tokens; the rows of the head beyond them are padding."""
        self.context_length: int | None = getattr(config, "max_position_embeddings", None)
        self.eos_ids = eos_ids(self.model.generation_config, self.tokenizer)
        self.packed = choose_layout(self.model, "auto", self.vocab_size, "teacher")
        self.prefixes = PrefixCache(prefix_cache_tokens)
        if prefix_cache_tokens and self.packed and not self._remembers_exactly():
            self.prefixes = PrefixCache(0)

    def head(self, vocab_size: int) -> Head:
        """The output head, cut to the vocabulary that teacher and student share."""
        return head_of(self.model, vocab_size)

    @torch.no_grad()
    def score(self, queries: Sequence[Query]) -> list[TeacherScores]:
        """Returns the scores of every query, from one forward pass; raises TrainingError where they are not finite."""
        hidden = self._hidden(queries)
        if not hidden.isfinite().all():
            raise TrainingError(
                "The teacher's hidden states are not finite.",
                where=self.name,
                why=f"a product overflowed in {str(self.dtype).removeprefix('torch.')}",
                fix="run the teacher in float32 (teacher.dtype=float32, or --dtype float32 of opd teacher serve)",
            )
        scores: list[TeacherScores] = []
        start = 0
        for (request, vocab_size), group in groupby(queries, lambda query: (query.request, query.vocab_size)):
            alike = list(group)
            lengths = [len(query.token_ids) for query in alike]
            rows = hidden[start : start + sum(lengths)]
            start += len(rows)
            supports = [query.student_ids for query in alike if query.student_ids is not None]
            joined = linear_loss.teacher_scores(
                rows,
                self.head(vocab_size),
                torch.cat([query.token_ids for query in alike]).to(self.device),
                request,
                torch.cat(supports).to(self.device) if supports else None,
            )
            scores += joined.split(lengths)
        return scores

    def _hidden(self, queries: Sequence[Query]) -> Tensor:
        """The hidden states [T, D] that predict the completions' tokens; prompts that are remembered are not read again."""
        pairs = [(query.prompt_ids, query.token_ids) for query in queries]
        if not self.packed or not self.prefixes.max_tokens:
            return predicting_hidden(self.model, batching.lay_out(pairs, packed=self.packed, device=self.device))
        prompts = dict.fromkeys(tuple(query.prompt_ids) for query in queries)
        known = {prompt: prefix for prompt in prompts if (prefix := self.prefixes.get(prompt)) is not None}
        if len(known) == len(prompts) and all(len(query.token_ids) == 1 for query in queries):
            # Nothing would be left to read, and a row has at least one token.
            known.popitem()
        numbers = {prompt: number for number, prompt in enumerate(known)}
        batch = batching.lay_out(pairs, packed=True, device=self.device, remembered=numbers)
        return predicting_hidden(self.model, batch, list(known.values()), self.prefixes.put)

    @torch.no_grad()
    def _remembers_exactly(self) -> bool:
        """Whether going on from a remembered prompt gives what reading it gives, measured on the model itself."""
        drawn = torch.randint(self.vocab_size, (12,), generator=torch.Generator().manual_seed(0))
        queries = [
            Query(tuple(drawn[:6].tolist()), ids, ScoreRequest("full"), self.vocab_size) for ids in drawn[6:].split(3)
        ]
        read = self._hidden(queries)
        gone_on = self._hidden(queries)
        # Rounding alone: a bfloat16 has 8 bits, a float32 24.
        return bool((read - gone_on).norm() <= (0.05 if self.dtype == torch.bfloat16 else 1e-4) * read.norm())
