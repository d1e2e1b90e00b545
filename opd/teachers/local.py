"""The in-process teacher: a transformers model that scores packed batches of rollouts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from time import perf_counter

from opd import batching
from opd.config import TeacherSettings
from opd.identity import identity_of
from opd.models import load_model_config, load_tokenizer
from opd.teachers import TeacherCapabilities, TeacherCard, query_of
from opd.teachers.scoring import ScoringModel
from opd.types import Rollout, ScoredRollout, ScoreRequest


def local_card(settings: TeacherSettings) -> TeacherCard:
    """Returns what the model's configuration and tokenizer say; raises PreflightError where there are none."""
    config = load_model_config(settings.model, settings.revision, "teacher").get_text_config()
    return TeacherCard(
        name=settings.model,
        tokenizer=load_tokenizer(settings.model, settings.revision, "teacher"),
        vocab_size=config.vocab_size,
        context_length=getattr(config, "max_position_embeddings", None),
        identity=identity_of(settings.model, settings.revision),
        load=lambda vocab_size: LocalTeacher(settings, vocab_size),
    )


class LocalTeacher:
    """Marks rollouts under the teacher's own prompt ids."""

    def __init__(self, settings: TeacherSettings, vocab_size: int) -> None:
        self.settings = settings
        self.vocab_size = vocab_size
        self.scorer = ScoringModel(settings.model, settings.revision, settings.device, settings.dtype)
        self.capabilities = TeacherCapabilities(
            gather=True, max_topk=None, hidden=True, temperature=True, context_length=self.scorer.context_length
        )
        self.busy_seconds = 0.0

    def score(self, rollouts: Iterable[Rollout], request: ScoreRequest) -> Iterator[ScoredRollout]:
        """Yields every rollout with its scores, a batch of `teacher.batch_tokens` at a time."""

        head = self.scorer.head(self.vocab_size) if request.kind == "full" else None

        def length(rollout: Rollout) -> int:
            return len(rollout.prompt.teacher_ids) + len(rollout.token_ids)

        for group in batching.cut(rollouts, length, self.settings.batch_tokens, packed=self.scorer.packed):
            start = perf_counter()
            scores = self.scorer.score([query_of(rollout, request, self.vocab_size) for rollout in group])
            self.busy_seconds += perf_counter() - start
            for rollout, own in zip(group, scores, strict=True):
                yield ScoredRollout(rollout, own, head)
