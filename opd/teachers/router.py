"""Several teachers: which one a prompt belongs to, told from its fields alone, and the scores of each."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import Any

from opd.chat import Ids, Renderer
from opd.config import RoutedTeacher
from opd.errors import DataError
from opd.teachers import Scorer, TeacherCapabilities
from opd.types import Rollout, ScoredRollout, ScoreRequest


class Routes:
    """The rules of `teachers`, and the choice between those that have the same one.

    A pure function of the row and the run's seed: a prompt has the same teacher in every epoch and after a resume.
    """

    def __init__(self, teachers: Sequence[RoutedTeacher], seed: int) -> None:
        self.seed = seed
        self.weights = [teacher.weight for teacher in teachers]
        self.rules: list[tuple[dict[str, list[Any]], list[int]]] = []
        """(column → the values that fit, the teachers with this rule), in the order in which they are tried."""
        for number, teacher in enumerate(teachers):
            rule = {key: value if isinstance(value, list) else [value] for key, value in teacher.match.items()}
            same = next((numbers for known, numbers in self.rules if known == rule), None)
            if same is None:
                self.rules.append((rule, [number]))
            else:
                same.append(number)

    @property
    def columns(self) -> set[str]:
        """Columns that the rules read."""
        return {column for rule, _ in self.rules for column in rule}

    def teacher_of(self, row: Mapping[str, Any]) -> int:
        """Returns the number of the row's teacher; raises DataError, without the place of the row, where no rule fits."""
        for rule, numbers in self.rules:
            if all(column in row and row[column] in values for column, values in rule.items()):
                return numbers[0] if len(numbers) == 1 else self._drawn(row, numbers)
        has = ", ".join(f"{c}: {row[c]!r}" if c in row else f"no {c}" for c in sorted(self.columns))
        raise DataError(
            "No teacher's match fits the row.",
            why=f"it has {has}",
            fix="add its value to a match, or a last teacher without match",
        )

    def _drawn(self, row: Mapping[str, Any], numbers: Sequence[int]) -> int:
        """One of several teachers, each as often as its weight says."""
        written = json.dumps(row, sort_keys=True, default=str)
        digest = hashlib.blake2b(f"{self.seed} {written}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
        place = int.from_bytes(digest, "big") / 2**64 * sum(self.weights[number] for number in numbers)
        for number in numbers[:-1]:
            place -= self.weights[number]
            if place < 0:
                return number
        return numbers[-1]


class RoutedRenderer:
    """Renders every row for the student and for the row's own teacher."""

    def __init__(self, renderers: Sequence[Renderer], routes: Routes) -> None:
        self.renderers = renderers
        self.routes = routes

    @property
    def warnings(self) -> list[str]:
        """What a user should know about the settings, each once."""
        return list(dict.fromkeys(warning for renderer in self.renderers for warning in renderer.warnings))

    @property
    def columns(self) -> set[str]:
        """Columns that templates and rules read, besides the prompt."""
        return self.routes.columns.union(*(renderer.columns for renderer in self.renderers))

    def check(self, row: Mapping[str, Any], column: str) -> None:
        """Raises DataError where no teacher has the row, or it does not fit the settings."""
        self.renderers[self.routes.teacher_of(row)].check(row, column)

    def render(self, row: Mapping[str, Any], column: str) -> tuple[Ids, Ids]:
        """Returns the student's and the teacher's prompt ids."""
        return self.renderers[self.routes.teacher_of(row)].render(row, column)


class RoutedScorer:
    """Sends every rollout to its prompt's teacher; all of them work at the same time."""

    def __init__(self, scorers: Sequence[Scorer], routes: Routes) -> None:
        self.scorers = scorers
        self.routes = routes
        every = [scorer.capabilities for scorer in scorers]
        self.capabilities = TeacherCapabilities(
            gather=all(one.gather for one in every),
            max_topk=_least([one.max_topk for one in every]),
            hidden=all(one.hidden for one in every),
            temperature=all(one.temperature for one in every),
            context_length=_least([one.context_length for one in every]),
        )

    @property
    def busy_seconds(self) -> float:
        """Time in which the teachers had rollouts to score, added up."""
        return sum(scorer.busy_seconds for scorer in self.scorers)

    def score(self, rollouts: Iterable[Rollout], request: ScoreRequest) -> Iterator[ScoredRollout]:
        """Yields every rollout once with the scores of its own teacher; raises what a teacher raises."""
        lanes = [_Lane() for _ in self.scorers]
        results: SimpleQueue[ScoredRollout | BaseException] = SimpleQueue()
        for scorer, lane in zip(self.scorers, lanes, strict=True):
            threading.Thread(target=_work, args=(scorer, lane, request, results), daemon=True).start()
        sent = received = 0
        try:
            for rollout in rollouts:
                lanes[self.routes.teacher_of(rollout.prompt.fields)].put(rollout)
                sent += 1
                while not results.empty():
                    received += 1
                    yield _result(results.get())
            for lane in lanes:
                lane.put(None)
            while received < sent:
                try:
                    # A timeout keeps the main thread open to Ctrl-C.
                    result = results.get(timeout=0.5)
                except Empty:
                    continue
                received += 1
                yield _result(result)
        finally:
            for lane in lanes:
                lane.put(None)


_Lane = SimpleQueue[Rollout | None]
"""The rollouts of one teacher; None ends them."""


def _work(
    scorer: Scorer, lane: _Lane, request: ScoreRequest, results: SimpleQueue[ScoredRollout | BaseException]
) -> None:
    """Scores what comes in a lane, in a thread of its own."""
    try:
        for scored in scorer.score(iter(lane.get, None), request):
            results.put(scored)
    except BaseException as error:
        results.put(error)


def _result(result: ScoredRollout | BaseException) -> ScoredRollout:
    if isinstance(result, BaseException):
        raise result
    return result


def _least(limits: Sequence[int | None]) -> int | None:
    """The smallest limit; None = there is none."""
    return min((limit for limit in limits if limit is not None), default=None)
