"""A transformers model that scores sequences: what the in-process teacher and the scoring server have in common."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch

from opd import batching, linear_loss
from opd.chat import eos_ids
from opd.errors import TrainingError
from opd.heads import Head, head_of
from opd.models import choose_layout, load_model, load_tokenizer, predicting_hidden, resolve_device, resolve_dtype
from opd.types import Query, TeacherScores
from opd.vocab import highest_id


class ScoringModel:
    """A causal language model without gradients; only completion positions meet its head."""

    def __init__(self, model: str, revision: str | None, device: str, dtype: str) -> None:
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

    def head(self, vocab_size: int) -> Head:
        """The output head, cut to the vocabulary that teacher and student share."""
        return head_of(self.model, vocab_size)

    @torch.no_grad()
    def score(self, queries: Sequence[Query]) -> list[TeacherScores]:
        """Returns the scores of every query, from one forward pass; raises TrainingError where they are not finite."""
        pairs = [(query.prompt_ids, query.token_ids) for query in queries]
        hidden = predicting_hidden(self.model, batching.lay_out(pairs, packed=self.packed, device=self.device))
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
