"""The in-process teacher: a transformers model that scores packed batches of rollouts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from opd import batching, linear_loss
from opd.chat import eos_ids
from opd.config import TeacherSettings
from opd.errors import TrainingError
from opd.heads import Head, head_of
from opd.models import choose_layout, load_model, load_tokenizer, predicting_hidden, resolve_device, resolve_dtype
from opd.teachers import TeacherCapabilities
from opd.types import Rollout, ScoredRollout, ScoreRequest, TeacherScores


class LocalTeacher:
    """Marks rollouts under the teacher's own prompt ids; only completion positions meet the head."""

    def __init__(self, settings: TeacherSettings, vocab_size: int) -> None:
        self.settings = settings
        self.device = resolve_device(settings.device)
        self.dtype = resolve_dtype(settings.dtype, self.device)
        self.vocab_size = vocab_size
        self.model = load_model(settings.model, settings.revision, self.dtype, self.device, "teacher")
        self.model.requires_grad_(False)
        tokenizer = load_tokenizer(settings.model, settings.revision, "teacher")
        self.eos_ids = eos_ids(self.model.generation_config, tokenizer)
        self.packed = choose_layout(self.model, "auto", vocab_size, "teacher")
        self.capabilities = TeacherCapabilities(
            gather=True,
            max_topk=None,
            hidden=True,
            temperature=True,
            context_length=getattr(self.model.config, "max_position_embeddings", None),
        )

    @property
    def head(self) -> Head:
        """The output head, cut to the vocabulary that both models share."""
        return head_of(self.model, self.vocab_size)

    def score(self, rollouts: Iterable[Rollout], request: ScoreRequest) -> Iterator[ScoredRollout]:
        """Yields every rollout with its scores, a batch of `teacher.batch_tokens` at a time."""

        def length(rollout: Rollout) -> int:
            return len(rollout.prompt.teacher_ids) + len(rollout.token_ids)

        for group in batching.cut(rollouts, length, self.settings.batch_tokens, packed=self.packed):
            yield from self._score_batch(group, request)

    @torch.no_grad()
    def _score_batch(self, rollouts: list[Rollout], request: ScoreRequest) -> Iterator[ScoredRollout]:
        pairs = [(rollout.prompt.teacher_ids, rollout.token_ids) for rollout in rollouts]
        hidden = predicting_hidden(self.model, batching.lay_out(pairs, packed=self.packed, device=self.device))
        if not hidden.isfinite().all():
            raise TrainingError(
                "The teacher's hidden states are not finite.",
                where=f"prompts {rollouts[0].prompt.index} to {rollouts[-1].prompt.index}",
                fix="use teacher.dtype=float32",
            )
        student_ids = None
        if request.kind == "topk" and request.support_of != "teacher":
            # The support is the student's; a rollout without it was completed by `distill.with_supports` before.
            student_ids = torch.cat([r.topk_ids for r in rollouts if r.topk_ids is not None]).to(self.device)
        token_ids = torch.cat([rollout.token_ids for rollout in rollouts]).to(self.device)
        scores = linear_loss.teacher_scores(hidden, self.head, token_ids, request, student_ids)
        lengths = [len(rollout.token_ids) for rollout in rollouts]
        for number, rollout in enumerate(rollouts):
            yield ScoredRollout(rollout, _slice(scores, sum(lengths[:number]), lengths[number]))


def _slice(scores: TeacherScores, start: int, length: int) -> TeacherScores:
    """The scores of one rollout out of a batch's."""
    from dataclasses import fields

    values = {field.name: getattr(scores, field.name) for field in fields(TeacherScores)}
    return TeacherScores(**{k: v if v is None else v[start : start + length] for k, v in values.items()})
