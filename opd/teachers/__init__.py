"""Teachers: whoever can give log-probabilities of the tokens that the student wrote."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from opd.config import Config, LossSettings
from opd.errors import PreflightError
from opd.types import Rollout, ScoredRollout, ScoreRequest

if TYPE_CHECKING:
    from opd.heads import Head


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


class Scorer(Protocol):
    """A teacher as the loop sees it."""

    capabilities: TeacherCapabilities

    @property
    def head(self) -> Head | None:
        """The teacher's output head, when `hidden` scores are to be turned into logits."""

    def score(self, rollouts: Iterable[Rollout], request: ScoreRequest) -> Iterator[ScoredRollout]:
        """Yields each rollout with its scores; rollouts are taken from the stream as they are finished."""


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


def check_request(request: ScoreRequest, capabilities: TeacherCapabilities, kind: str) -> None:
    """Raises PreflightError when the teacher cannot give what the loss needs, naming the teachers that can."""

    def refuse(what: str, where: str, who: str) -> PreflightError:
        return PreflightError(f"The teacher ({kind}) cannot give {what}.", where=where, fix=f"use {who}")

    if request.kind == "full" and not capabilities.hidden:
        raise refuse("the full vocabulary", "loss.support=full", "an in-process teacher, or loss.support=topk")
    if request.kind == "topk" and request.support_of != "teacher" and not capabilities.gather:
        raise refuse("log-probabilities at the student's ids", "loss.topk.of", "loss.topk.of=teacher")
    if request.kind == "topk" and capabilities.max_topk is not None and request.k > capabilities.max_topk:
        raise refuse(f"the top {request.k}", "loss.topk.k", f"loss.topk.k={capabilities.max_topk} or less")
    if request.temperature != 1 and not capabilities.temperature:
        raise refuse("scores at a temperature", "loss.temperature", "an in-process teacher, or loss.temperature=1")


def build_teacher(config: Config, vocab_size: int) -> Scorer:
    """Returns the teacher of the configuration, checked against what the loss will ask of it."""
    from opd.teachers.local import LocalTeacher

    teacher = LocalTeacher(config.teacher, vocab_size)
    check_request(request_for(config.loss, config.diagnostics.k), teacher.capabilities, "in-process")
    return teacher
