"""Streaming to servers: rollouts are sent as they are finished, several in a request where many wait, and answered in any order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import Protocol

from opd.teachers.replicas import Replicas
from opd.types import Rollout, ScoredRollout, ScoreRequest

Scored = tuple[ScoredRollout, int]
"""A rollout with its scores, and the version of the weights that gave them."""


class Asker(Protocol):
    """A teacher whose servers are asked for the scores of some rollouts at a time."""

    replicas: Replicas
    request_tokens: int
    """Tokens of one request."""
    busy_seconds: float

    async def ask(self, rollouts: list[Rollout], request: ScoreRequest) -> list[Scored]:
        """Returns the scores of some rollouts, from one request."""


def stream(teacher: Asker, rollouts: Iterable[Rollout], request: ScoreRequest) -> Iterator[Scored]:
    """Yields every rollout once, in the order of the answers; requests are under way while `rollouts` are being written.

    The time in which at least one request was under way is added to `teacher.busy_seconds`. Raises what a request raised.
    """
    flow = _Flow(teacher, request)
    sent = received = 0
    try:
        for rollout in rollouts:
            teacher.replicas.call_soon(flow.add, rollout)
            sent += 1
            for result in flow.arrived(wait=False):
                received += 1
                yield result
        while received < sent:
            for result in flow.arrived(wait=True):
                received += 1
                yield result
    finally:
        teacher.replicas.call_soon(flow.stop)
        teacher.busy_seconds += flow.busy_seconds


@dataclass(slots=True)
class _Flow:
    """The rollouts of one call of `score` on their way; its state belongs to the event loop, its results to the caller."""

    teacher: Asker
    request: ScoreRequest
    busy_seconds: float = 0.0
    """Time in which at least one request was under way."""
    _waiting: deque[Rollout] = field(default_factory=deque)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _results: SimpleQueue[list[Scored] | BaseException] = field(default_factory=SimpleQueue)
    _since: float = 0.0

    def add(self, rollout: Rollout) -> None:
        """Sends a rollout now, or with the next request where as many as may be are under way."""
        self._waiting.append(rollout)
        self._send()

    def stop(self) -> None:
        """Drops what is under way."""
        self._waiting.clear()
        for task in self._tasks:
            task.cancel()

    def arrived(self, *, wait: bool) -> Iterator[Scored]:
        """Yields what has been answered; with `wait`, what the next answer brings. Raises what a request raised."""
        while True:
            try:
                # A timeout keeps the main thread open to Ctrl-C.
                result = self._results.get(timeout=0.5) if wait else self._results.get_nowait()
            except Empty:
                if wait:
                    continue
                return
            if isinstance(result, BaseException):
                raise result
            yield from result
            if wait:
                return

    def _send(self) -> None:
        while self._waiting and len(self._tasks) < self.teacher.replicas.room:
            bundle: list[Rollout] = []
            tokens = 0
            while self._waiting:
                length = len(self._waiting[0].prompt.teacher_ids) + len(self._waiting[0].token_ids)
                if bundle and tokens + length > self.teacher.request_tokens:
                    break
                bundle.append(self._waiting.popleft())
                tokens += length
            if not self._tasks:
                self._since = perf_counter()
            task = asyncio.ensure_future(self._ask(bundle))
            self._tasks.add(task)
            task.add_done_callback(self._done)

    async def _ask(self, bundle: list[Rollout]) -> None:
        self._results.put(await self.teacher.ask(bundle, self.request))

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not self._tasks:
            self.busy_seconds += perf_counter() - self._since
        if not task.cancelled() and (error := task.exception()) is not None:
            self._results.put(error)
        self._send()
