"""A teacher behind scoring servers (`opd teacher serve`): the same scores as in-process, over the wire."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import httpx

from opd.config import TeacherSettings
from opd.errors import PreflightError, TrainingError
from opd.heads import Head
from opd.models import load_tokenizer, resolve_device
from opd.teachers import TeacherCapabilities, TeacherCard, query_of, wire
from opd.teachers.replicas import Replica, Replicas
from opd.teachers.serve import TOKEN_VARIABLE
from opd.types import Rollout, ScoredRollout, ScoreRequest

IDENTITY = ("tokenizer_fingerprint", "weights_fingerprint", "vocab_size", "dtype")
"""What servers of one teacher have in common."""


class RemoteTeacher:
    """Sends rollouts to the servers as they are finished, and gives each back once, with its scores."""

    def __init__(self, settings: TeacherSettings, warn: Callable[[str], None]) -> None:
        """Asks the servers who they are; raises PreflightError where none answers, or they are different teachers."""
        self.settings = settings
        self.device = resolve_device(settings.device)
        self.info: dict[str, Any] = {}
        self.busy_seconds = 0.0
        self.vocab_size = 0
        """The vocabulary that teacher and student share; set once the tokenizers have been compared."""
        self._head: Head | None = None
        self._head_version = -1
        self._replicas = Replicas(settings, check=self._check, info_path="/v1/info", warn=warn)
        self._replicas.run(self._replicas.connect())
        capabilities = self.info["capabilities"]
        self.capabilities = TeacherCapabilities(
            gather="gather" in capabilities["kinds"],
            max_topk=capabilities["max_topk"],
            hidden="full" in capabilities["kinds"],
            temperature=capabilities["temperature"],
            context_length=self.info["context_length"],
        )

    def card(self) -> TeacherCard:
        """Returns what the servers say of their model, with its tokenizer."""
        files = json.loads(self._replicas.run(self._replicas.request("GET", "/v1/tokenizer")))["files"]
        name = f"{self.info['model']} at {self.settings.name}"
        with TemporaryDirectory() as scratch:
            for file in wire.TOKENIZER_FILES:
                if file in files:
                    (Path(scratch) / file).write_text(files[file], encoding="utf-8")
            tokenizer = load_tokenizer(scratch, None, "teacher")
        tokenizer.name_or_path = name
        return TeacherCard(name, tokenizer, self.info["vocab_size"], self.info["context_length"], self._sharing)

    def _sharing(self, vocab_size: int) -> RemoteTeacher:
        self.vocab_size = vocab_size
        return self

    @property
    def head(self) -> Head:
        """The output head, fetched once a weight version."""
        if self._head is None:
            self._fetch_head()
        assert self._head is not None
        return self._head

    def score(self, rollouts: Iterable[Rollout], request: ScoreRequest) -> Iterator[ScoredRollout]:
        """Yields every rollout with its scores; requests are under way while `rollouts` are still being written.

        Raises TrainingError and TeacherUnavailable.
        """
        results = self._stream(rollouts, request)
        if request.kind != "full":
            yield from (scored for scored, _ in results)
            return
        # Hidden states are read with the head of their own weights; a server may have taken new ones in between.
        current: list[ScoredRollout] = []
        while True:
            held = list(results)
            newest = max((version for _, version in held), default=self._head_version)
            if newest != self._head_version:
                self._fetch_head()
            current += [scored for scored, version in held if version == self._head_version]
            stale = [scored.rollout for scored, version in held if version != self._head_version]
            if not stale:
                break
            results = self._stream([*stale, *(scored.rollout for scored in current)], request)
            current = []
        yield from current

    def _stream(self, rollouts: Iterable[Rollout], request: ScoreRequest) -> Iterator[tuple[ScoredRollout, int]]:
        """Yields (rollout with its scores, weight version) in the order of arrival."""
        flow = _Flow(self, request)
        sent = received = 0
        try:
            for rollout in rollouts:
                self._replicas.call_soon(flow.add, rollout)
                sent += 1
                for result in flow.arrived(wait=False):
                    received += 1
                    yield result
            while received < sent:
                for result in flow.arrived(wait=True):
                    received += 1
                    yield result
        finally:
            self._replicas.call_soon(flow.stop)
            self.busy_seconds += flow.busy_seconds

    @property
    def room(self) -> int:
        """Requests that may be under way at the same time."""
        return self._replicas.room

    async def ask(self, rollouts: list[Rollout], request: ScoreRequest) -> list[tuple[ScoredRollout, int]]:
        """Returns the scores of some rollouts, from one request, and the version of the weights that gave them."""
        queries = [query_of(rollout, request, self.vocab_size) for rollout in rollouts]
        body = await asyncio.to_thread(wire.encode_queries, queries)
        tokens = sum(query.length for query in queries)
        answer = await self._replicas.request("POST", "/v1/score", content=body, tokens=tokens)
        try:
            scores, version = await asyncio.to_thread(wire.decode_scores, answer, queries)
        except wire.WireError as error:
            raise self._unreadable(error) from error
        return [(ScoredRollout(rollout, own), version) for rollout, own in zip(rollouts, scores, strict=True)]

    def _fetch_head(self) -> None:
        body = self._replicas.run(self._replicas.request("GET", "/v1/head"))
        try:
            head, self._head_version = wire.decode_head(body, self.vocab_size)
        except wire.WireError as error:
            raise self._unreadable(error) from error
        self._head = head.to(self.device)

    def _unreadable(self, error: wire.WireError) -> TrainingError:
        return TrainingError(
            "The teacher server's answer cannot be read.",
            where=self.settings.name,
            why=str(error),
            fix="run the same version of opd on both sides",
        )

    def _check(self, replica: Replica, response: httpx.Response) -> None:
        """Raises PreflightError where a server is not this teacher, or not one that can be talked to."""
        if response.status_code == 401:
            raise PreflightError(
                "The teacher server wants a token.",
                where=replica.url,
                why=f"{TOKEN_VARIABLE} holds another one, or none",
                fix=f"export {TOKEN_VARIABLE} with the server's token",
            )
        try:
            info = response.json()
            protocol = info["protocol"]
        except (ValueError, KeyError, TypeError):
            raise PreflightError(
                "This is not an opd scoring server.",
                where=f"{replica.url}/v1/info answers {response.status_code}",
                fix="start one with opd teacher serve MODEL, or say teacher.kind=vllm_server for a vllm serve",
            ) from None
        if protocol != wire.PROTOCOL:
            raise PreflightError(
                "The teacher server speaks another version of the protocol.",
                where=f"{replica.url}, opd {info.get('opd')}",
                why=f"it has {protocol}, this version of opd {wire.PROTOCOL}",
                fix="use the same version of opd on both sides",
            )
        if not self.info:
            self.info = info
        if differing := [key for key in IDENTITY if info.get(key) != self.info.get(key)]:
            raise PreflightError(
                f"The teacher servers differ in {', '.join(differing)}.",
                where=f"{replica.url} serves {info.get('model')}, {self.info['model']} was there first",
                why=", ".join(f"{key}: {info.get(key)} and {self.info.get(key)}" for key in differing),
                fix="serve the same model in the same type on every one, or name them as different teachers",
            )


@dataclass(slots=True)
class _Flow:
    """The rollouts of one call of `score` on their way; its state belongs to the event loop, its results to the caller."""

    teacher: RemoteTeacher
    request: ScoreRequest
    busy_seconds: float = 0.0
    """Time in which at least one request was under way."""
    _waiting: deque[Rollout] = field(default_factory=deque)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _results: SimpleQueue[list[tuple[ScoredRollout, int]] | BaseException] = field(default_factory=SimpleQueue)
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

    def arrived(self, *, wait: bool) -> Iterator[tuple[ScoredRollout, int]]:
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
        teacher = self.teacher
        limit = min(teacher.settings.batch_tokens, teacher.info["max_tokens"])
        while self._waiting and len(self._tasks) < teacher.room:
            bundle: list[Rollout] = []
            tokens = 0
            while self._waiting:
                length = len(self._waiting[0].prompt.teacher_ids) + len(self._waiting[0].token_ids)
                if bundle and tokens + length > limit:
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
