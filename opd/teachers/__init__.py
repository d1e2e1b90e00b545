"""Teachers: whoever can give log-probabilities of the tokens that the student wrote."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from opd.config import Config, LossSettings, TeacherSettings
from opd.errors import PreflightError
from opd.identity import Identity
from opd.types import Query, Rollout, ScoredRollout, ScoreRequest


@dataclass(frozen=True, slots=True)
class TeacherCapabilities:
    """What a teacher can be asked for."""

    gather: bool
    """Log-probabilities at ids that the student chose."""
    max_topk: int | None
    """Most ids of its own top-K; None = the vocabulary."""
    hidden: bool
    """Final hidden states and the head, for full-vocabulary losses."""
    temperature: bool
    """Its logits can be divided by loss.temperature before the log-softmax."""
    context_length: int | None
    """Tokens of prompt and completion that it can read."""
    topk_flag: str = "--max-topk"
    """The flag that its server is started with for a larger max_topk."""
    no_gather_because: str = ""
    """What its server said instead of log-probabilities at given ids."""


@dataclass(frozen=True, slots=True)
class TeacherCard:
    """What is known of a teacher without its weights: enough to find what does not fit before anything is loaded."""

    name: str
    tokenizer: Any
    vocab_size: int
    """Ids that its logits have."""
    context_length: int | None
    """Tokens of prompt and completion that it can read."""
    identity: Identity
    """What tells whether it is the same model as before."""
    load: Callable[[int], Scorer]
    """Makes the scorer, given the size of the vocabulary that teacher and student share."""


class Scorer(Protocol):
    """A teacher as the loop sees it."""

    capabilities: TeacherCapabilities

    @property
    def busy_seconds(self) -> float:
        """Time in which it had rollouts to score, since it was made."""

    def score(self, rollouts: Iterable[Rollout], request: ScoreRequest) -> Iterator[ScoredRollout]:
        """Yields each rollout once with its scores; rollouts are taken from the stream as they are finished.

        Hidden states come with the head that they are to be read with.
        """


def request_for(loss: LossSettings, diagnostics_k: int) -> ScoreRequest:
    """Returns what the loss needs from the teacher."""
    kind = "full" if loss.support == "sampled" and loss.sampled.baseline == "kl" else loss.support
    return ScoreRequest(
        kind=kind,
        temperature=loss.temperature,
        k=loss.topk.k if kind == "topk" else 0,
        support_of=loss.topk.of,
        diagnostics_k=diagnostics_k,
    )


def query_of(rollout: Rollout, request: ScoreRequest, vocab_size: int) -> Query:
    """Returns what a teacher is asked of one rollout.

    Where the request wants the student's support, `distill.with_supports` has completed the rollout with it before.
    """
    return Query(
        prompt_ids=rollout.prompt.teacher_ids,
        token_ids=rollout.token_ids,
        request=request,
        vocab_size=vocab_size,
        student_ids=rollout.topk_ids if request.wants_student_ids else None,
    )


def check_request(request: ScoreRequest, capabilities: TeacherCapabilities, name: str) -> None:
    """Raises PreflightError when the teacher cannot give what the loss needs, naming the teachers that can."""

    def refuse(what: str, where: str, who: str, why: str = "") -> PreflightError:
        return PreflightError(f"The teacher cannot give {what}.", where=f"{where}, {name}", why=why, fix=f"use {who}")

    exact = "an in-process teacher or opd teacher serve"
    if request.kind == "full" and not capabilities.hidden:
        topk = "loss.support=topk" if capabilities.gather else "loss.support=topk with loss.topk.of=teacher"
        # The baseline of the sampled loss takes the full vocabulary too.
        where = "loss.support=full (or loss.sampled.baseline=kl)"
        raise refuse("the full vocabulary", where, f"{exact}, or {topk}")
    if request.wants_student_ids and not capabilities.gather:
        vllm = "a vllm serve on a GPU with the V2 model runner and --enable-scale-out"
        raise refuse(
            "log-probabilities at the student's ids",
            f"loss.topk.of={request.support_of}",
            f"{exact}, {vllm}, or loss.topk.of=teacher",
            capabilities.no_gather_because,
        )
    most = capabilities.max_topk
    for key, k in (("loss.topk.k", request.k), ("diagnostics.k", request.diagnostics_k)):
        if most is not None and k > most:
            raise refuse(
                f"{k} ids", key, f"{key}={most} or less, or start the server with {capabilities.topk_flag} {k}"
            )
    if request.temperature != 1 and not capabilities.temperature:
        raise refuse("scores at a temperature", "loss.temperature", f"{exact}, or loss.temperature=1")


def find_teacher(settings: TeacherSettings, warn: Callable[[str], None]) -> TeacherCard:
    """Returns what is known of the teacher that the configuration names; servers are asked who they are.

    `warn` is told, then and later, of servers that do not answer. Raises PreflightError.
    """
    match settings.resolved_kind:
        case "local":
            from opd.teachers.local import local_card

            return local_card(settings)
        case "opd_server":
            from opd.teachers.client import RemoteTeacher

            return RemoteTeacher(settings, warn).card()
        case "vllm_server":
            from opd.teachers.vllm_server import VllmTeacher

            return VllmTeacher(settings, warn).card()


def build_teacher(config: Config, cards: Sequence[TeacherCard], vocab_size: int) -> Scorer:
    """Returns the teacher, or the teachers as one, checked against what the loss will ask; those in this process load now."""
    request = request_for(config.loss, config.diagnostics.k)
    scorers: list[Scorer] = []
    for card, settings in zip(cards, config.all_teachers, strict=True):
        scorer = card.load(vocab_size)
        check_request(request, scorer.capabilities, card.name)
        if settings.cache is not None:
            from opd.teachers.cache import CachedScorer

            identity = {**card.identity, "dtype": settings.dtype}
            scorer = CachedScorer(scorer, Path(settings.cache), identity, vocab_size)
        scorers.append(scorer)
    if not config.teachers:
        return scorers[0]
    from opd.teachers.router import RoutedScorer, Routes

    return RoutedScorer(scorers, Routes(config.teachers, config.run.seed))
