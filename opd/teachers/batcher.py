"""Continuous batching by tokens: requests of several clients share forward passes, and none waits for a longer one to end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from time import perf_counter
from typing import Protocol

from opd.types import Query, TeacherScores


class QueueFull(Exception):
    """The queue has no room for a request now; `retry_after` is the number of seconds in which it should have."""

    def __init__(self, retry_after: float) -> None:
        super().__init__("the queue is full")
        self.retry_after = retry_after


class Observer(Protocol):
    """Who is told of what the batcher does."""

    def batch(self, tokens: int, sequences: int, seconds: float) -> None:
        """A forward pass is done."""


@dataclass(slots=True, eq=False)
class _Job:
    """One request on its way: sequences are scored in order, a few in each batch."""

    queries: Sequence[Query]
    future: Future[list[TeacherScores]]
    taken: int = 0
    """Sequences that are in a batch, or done."""
    scores: list[TeacherScores] = field(default_factory=list)


class Batcher:
    """One thread that scores, and the jobs that wait for it.

    A batch takes one sequence of every waiting request in turn until `max_batch_tokens` are full, so a short request is
    done after a batch or two, however long the others are. A sequence longer than that has a batch of its own.
    """

    def __init__(
        self,
        score: Callable[[Sequence[Query]], list[TeacherScores]],
        *,
        max_batch_tokens: int,
        max_queue_tokens: int,
        observer: Observer,
    ) -> None:
        self._score = score
        self._observer = observer
        self.max_batch_tokens = max_batch_tokens
        self.max_queue_tokens = max_queue_tokens
        self._jobs: list[_Job] = []
        self._changed = threading.Condition()
        self._closed = False
        self._tokens_per_second = float(max_batch_tokens)
        self._thread = threading.Thread(target=self._run, name="scoring", daemon=True)
        self._thread.start()

    @property
    def queued(self) -> tuple[int, int]:
        """(requests, tokens) that wait for a batch."""
        with self._changed:
            return sum(not job.future.cancelled() for job in self._jobs), self._queued_tokens()

    def submit(self, queries: Sequence[Query]) -> Future[list[TeacherScores]]:
        """Queues a request; cancelling its future drops what has not been scored. Raises QueueFull.

        A request that alone is larger than the queue is taken when nothing else waits.
        """
        job = _Job(queries, Future())
        with self._changed:
            waiting = self._queued_tokens()
            if waiting and waiting + sum(query.length for query in queries) > self.max_queue_tokens:
                raise QueueFull(waiting / self._tokens_per_second)
            self._jobs.append(job)
            self._changed.notify()
        return job.future

    def close(self) -> None:
        """Ends the thread after the batch that it is at; what still waits is cancelled."""
        with self._changed:
            self._closed = True
            for job in self._jobs:
                job.future.cancel()
            self._changed.notify()
        self._thread.join()

    def _queued_tokens(self) -> int:
        return sum(
            query.length for job in self._jobs if not job.future.cancelled() for query in job.queries[job.taken :]
        )

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._jobs and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                batch = self._take()
            if batch:
                self._work(batch)

    def _take(self) -> list[tuple[_Job, Query]]:
        """The next batch: one sequence a request, round after round, while the budget lasts."""
        batch: list[tuple[_Job, Query]] = []
        tokens = 0
        waiting = [job for job in self._jobs if not job.future.cancelled()]
        # Those that did not fit are first in the next batch, or they would wait for as long as shorter ones come in.
        self._jobs = []
        while waiting:
            again = []
            for job in waiting:
                query = job.queries[job.taken]
                if batch and tokens + query.length > self.max_batch_tokens:
                    self._jobs.append(job)
                    continue
                batch.append((job, query))
                tokens += query.length
                job.taken += 1
                if job.taken < len(job.queries):
                    again.append(job)
            waiting = again
        return batch

    def _work(self, batch: list[tuple[_Job, Query]]) -> None:
        # The sequences of one request side by side: they often share a prompt and always share what they ask for.
        order: dict[int, int] = {}
        for job, _ in batch:
            order.setdefault(id(job), len(order))
        batch.sort(key=lambda item: order[id(item[0])])
        start = perf_counter()
        try:
            scores = self._score([query for _, query in batch])
        except Exception as error:
            self._find_culprit(batch, error)
            return
        seconds = perf_counter() - start
        tokens = sum(query.length for _, query in batch)
        self._tokens_per_second = 0.7 * self._tokens_per_second + 0.3 * tokens / seconds
        self._observer.batch(tokens, len(batch), seconds)
        for (job, _), own in zip(batch, scores, strict=True):
            job.scores.append(own)
            if len(job.scores) == len(job.queries) and job.future.set_running_or_notify_cancel():
                job.future.set_result(job.scores)

    def _find_culprit(self, batch: list[tuple[_Job, Query]], error: Exception) -> None:
        """Fails the request that a batch failed for; requests that only shared the batch are scored without it."""
        jobs = list({id(job): job for job, _ in batch}.values())
        if len(jobs) > 1:
            for job in jobs:
                self._work([item for item in batch if item[0] is job])
            return
        job = jobs[0]
        with self._changed:
            if job in self._jobs:
                self._jobs.remove(job)
        if job.future.set_running_or_notify_cancel():
            job.future.set_exception(error)
