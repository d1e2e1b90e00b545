"""The servers of a remote teacher: which one is asked, what happens when one fails, and when it is asked again.

Everything runs on one event loop in a thread of its own, so that requests are under way while the sampler writes.
"""

from __future__ import annotations

import asyncio
import os
import random
import ssl
import threading
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from time import monotonic
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx

from opd.config import TeacherSettings
from opd.errors import PreflightError, TeacherUnavailable, TrainingError
from opd.teachers.serve import TOKEN_VARIABLE, is_loopback

T = TypeVar("T")

CONNECT_SECONDS = 10.0
FIRST_BACKOFF, LONGEST_BACKOFF = 0.25, 10.0
"""Seconds between attempts: doubled each time, with up to half of it left to chance."""
MOST_SERVER_ERRORS = 3
"""Attempts of a request that servers answer with an error of their own before the run stops."""


class _Busy(Exception):
    """The server has no room now, and says in how many seconds it might."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class _Gone(Exception):
    """The server does not answer."""


class _Failed(Exception):
    """The server answered with an error of its own."""


@dataclass(slots=True, eq=False)
class Replica:
    """One server."""

    url: str
    up: bool = True
    trouble: str = ""
    """Why it is not up."""
    requests: int = 0
    tokens: int = 0
    """What is under way to it."""


class Replicas:
    """Servers of one teacher. Every method but `run` and `submit` belongs to the event loop."""

    def __init__(
        self,
        settings: TeacherSettings,
        *,
        check: Callable[[Replica, httpx.Response], Awaitable[None]],
        info_path: str,
        media_type: str,
        start: str,
        warn: Callable[[str], None],
    ) -> None:
        """`check` raises PreflightError where a server's answer at `info_path` shows that it is another teacher.

        `media_type` is that of requests; `start` is what starts a server.
        """
        self.settings = settings
        self.replicas = [Replica(url) for url in settings.urls]
        self._check = check
        self._info_path = info_path
        self._media_type = media_type
        self._start = start
        self._warn = warn
        self._jitter = random.Random()
        self._probes: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="teacher-client", daemon=True).start()
        self._changed: asyncio.Condition
        self._client: httpx.AsyncClient
        self.run(self._open())

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine on the loop and returns its result; Ctrl-C ends the waiting."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def call_soon(self, function: Callable[..., None], *arguments: Any) -> None:
        """Has the loop call a function."""
        self._loop.call_soon_threadsafe(function, *arguments)

    def mean(self, headers: dict[str, str]) -> None:
        """Sends headers with every request from now on."""
        self._client.headers.update(headers)

    @property
    def room(self) -> int:
        """Requests that may be under way at the same time."""
        return self.settings.window * max(1, sum(replica.up for replica in self.replicas))

    async def _open(self) -> None:
        self._changed = asyncio.Condition()
        token = os.environ.get(TOKEN_VARIABLE)
        authorization = {"Authorization": f"Bearer {token}"} if token else {}
        self._client = httpx.AsyncClient(
            headers={"Content-Type": self._media_type, **authorization},
            timeout=httpx.Timeout(self.settings.timeout, connect=CONNECT_SECONDS),
            # A request waits for room here and not in the connection pool.
            limits=httpx.Limits(max_connections=None),
            # The system's certificates, and SSL_CERT_FILE for one's own.
            verify=ssl.create_default_context(),
            # A proxy for the outer world is of no use on the way to this machine.
            trust_env=not all(is_loopback(urlsplit(url).hostname or "") for url in self.settings.urls),
        )

    async def connect(self) -> None:
        """Asks every server who it is. Raises PreflightError where one is another teacher, or none answers."""
        for replica in self.replicas:
            try:
                await self._check(replica, await self.fetch(replica, "GET", self._info_path))
            except httpx.HTTPError as error:
                self._lose(replica, _reason(error))
        if not any(replica.up for replica in self.replicas):
            raise PreflightError(
                "No teacher server answers.",
                where=", ".join(f"{replica.url} ({replica.trouble})" for replica in self.replicas),
                fix=f"start one: {self._start} (it answers when the model is loaded)",
            )

    async def fetch(self, replica: Replica, method: str, path: str, content: bytes | None = None) -> httpx.Response:
        """Returns what one server answers, whatever it is; for `check`, which is about that server."""
        return await self._client.request(method, replica.url + path, content=content)

    async def request(self, method: str, path: str, *, content: bytes | None = None, tokens: int = 0) -> bytes:
        """Returns the body of an answer of whichever server gives one.

        Raises TrainingError where the request itself is at fault, and TeacherUnavailable when it could not be answered for
        `teacher.max_wait`.
        """
        failing_since: float | None = None
        errors, attempt = 0, 0
        trouble = ""
        while True:
            waited = 0.0 if failing_since is None else monotonic() - failing_since
            if failing_since is not None and waited >= self.settings.max_wait:
                raise self._unavailable(trouble)
            replica = await self._free_replica(self.settings.max_wait - waited)
            try:
                return await self._hedged(replica, method, path, content, tokens)
            except _Busy as busy:
                trouble = str(busy)
                await asyncio.sleep(max(min(busy.retry_after, LONGEST_BACKOFF), self._backoff(attempt)))
            except _Gone as gone:
                trouble = str(gone)
                self._lose(replica, trouble)
            except _Failed as failed:
                errors += 1
                if errors >= MOST_SERVER_ERRORS:
                    raise TrainingError(
                        "The teacher server cannot answer a request.",
                        where=replica.url,
                        why=f"{failed} ({errors} attempts)",
                        fix="see what the server printed; the run goes on with --resume when it is mended",
                    ) from failed
                await asyncio.sleep(self._backoff(attempt))
            attempt += 1
            failing_since = monotonic() if failing_since is None else failing_since

    async def _hedged(self, replica: Replica, method: str, path: str, content: bytes | None, tokens: int) -> bytes:
        """The answer of one server, or of a second one where the first takes longer than `teacher.hedge_after`."""
        tasks = {asyncio.ensure_future(self._send(replica, method, path, content, tokens))}
        try:
            if self.settings.hedge_after is not None:
                await asyncio.wait(tasks, timeout=self.settings.hedge_after)
                others = [other for other in self._available() if other is not replica]
                if not any(task.done() for task in tasks) and others:
                    tasks.add(asyncio.ensure_future(self._send(_least_loaded(others), method, path, content, tokens)))
            while True:
                done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    if task.exception() is None or not pending:
                        return task.result()
                tasks = pending
        finally:
            for task in tasks:
                task.cancel()

    async def _send(self, replica: Replica, method: str, path: str, content: bytes | None, tokens: int) -> bytes:
        """One request to one server."""
        replica.requests += 1
        replica.tokens += tokens
        try:
            response = await self._client.request(method, replica.url + path, content=content)
        except httpx.HTTPError as error:
            raise _Gone(_reason(error)) from error
        finally:
            replica.requests -= 1
            replica.tokens -= tokens
            await self._tell()
        if response.is_success:
            return response.content
        said = sentence(response)
        match response.status_code:
            case 503 | 429:
                retry_after = response.headers.get("retry-after", "")
                raise _Busy(said, float(retry_after) if retry_after.isdecimal() else 0.0)
            case 409 | 502 | 504:
                # Another model in its place, or a proxy whose server is gone.
                raise _Gone(said)
            case status if status >= 500:
                raise _Failed(said)
        raise TrainingError(
            f"The teacher server refuses a request ({response.status_code}).",
            where=f"{replica.url}{path}",
            why=said,
            fix=f"set {TOKEN_VARIABLE} to the server's token" if response.status_code == 401 else "",
        )

    def _available(self) -> list[Replica]:
        return [r for r in self.replicas if r.up and r.requests < self.settings.window]

    async def _free_replica(self, patience: float) -> Replica:
        """The least loaded server that has room; waits for one, up to `patience` seconds while none is up at all."""
        async with self._changed:
            while not (free := self._available()):
                if any(replica.up for replica in self.replicas):
                    await self._changed.wait()
                    continue
                try:
                    await asyncio.wait_for(self._changed.wait(), max(patience, 0))
                except TimeoutError:
                    if not any(replica.up for replica in self.replicas):
                        raise self._unavailable("") from None
            return _least_loaded(free)

    def _lose(self, replica: Replica, trouble: str) -> None:
        """Takes a server out, and asks after it until it is back."""
        if not replica.up:
            return
        replica.up, replica.trouble = False, trouble
        self._warn(f"The teacher server {replica.url} does not answer ({trouble}).")
        probe = asyncio.ensure_future(self._probe(replica))
        self._probes.add(probe)
        probe.add_done_callback(self._probes.discard)

    async def _probe(self, replica: Replica) -> None:
        attempt = 0
        while not replica.up:
            await asyncio.sleep(self._backoff(attempt))
            attempt += 1
            try:
                response = await self._client.get(replica.url + self._info_path, timeout=CONNECT_SECONDS)
                await self._check(replica, response)
            except httpx.HTTPError as error:
                replica.trouble = _reason(error)
            except PreflightError as error:
                if replica.trouble != error.what:
                    self._warn(f"{error.what} {error.why}")
                replica.trouble = error.what
            else:
                replica.up, replica.trouble = True, ""
                self._warn(f"The teacher server {replica.url} is back.")
                await self._tell()

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _backoff(self, attempt: int) -> float:
        longest = min(FIRST_BACKOFF * 2 ** min(attempt, 16), LONGEST_BACKOFF)
        return longest * (1 - self._jitter.random() / 2)

    def _unavailable(self, trouble: str) -> TeacherUnavailable:
        troubles = [f"{replica.url}: {replica.trouble or trouble or 'no answer'}" for replica in self.replicas]
        return TeacherUnavailable(
            f"No teacher server could be reached for {self.settings.max_wait:g} s (teacher.max_wait).",
            where="; ".join(troubles),
        )


def _least_loaded(replicas: list[Replica]) -> Replica:
    return min(replicas, key=lambda replica: (replica.tokens, replica.requests))


def _reason(error: httpx.HTTPError) -> str:
    return str(error).strip() or type(error).__name__


def sentence(response: httpx.Response) -> str:
    """Returns what the server said, in one line; vLLM's errors are objects with a message."""
    try:
        error = response.json()["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return (response.text.strip() or response.reason_phrase).splitlines()[0][:200]
