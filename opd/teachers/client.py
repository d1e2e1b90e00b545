"""A teacher behind scoring servers (`opd teacher serve`): the same scores as in-process, over the wire."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from opd.config import TeacherSettings
from opd.errors import PreflightError, TrainingError
from opd.heads import Head
from opd.models import load_tokenizer, resolve_device
from opd.teachers import TeacherCapabilities, TeacherCard, query_of, wire
from opd.teachers.flow import Scored, stream
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
        self.replicas = Replicas(
            settings,
            check=self._check,
            info_path="/v1/info",
            media_type=wire.MEDIA_TYPE,
            start="opd teacher serve MODEL --port 8100",
            warn=warn,
        )
        self.replicas.run(self.replicas.connect())
        self.replicas.mean({wire.WEIGHTS_HEADER: self.info["weights_fingerprint"]})
        self.request_tokens = min(settings.batch_tokens, self.info["max_tokens"])
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
        files = json.loads(self.replicas.run(self.replicas.request("GET", "/v1/tokenizer")))["files"]
        name = f"{self.info['model']} at {self.settings.name}"
        with TemporaryDirectory() as scratch:
            for file in wire.TOKENIZER_FILES:
                if file in files:
                    (Path(scratch) / file).write_text(files[file], encoding="utf-8")
            tokenizer = load_tokenizer(scratch, None, "teacher")
        tokenizer.name_or_path = name
        identity = {"weights_fingerprint": str(self.info["weights_fingerprint"])}
        return TeacherCard(
            name, tokenizer, self.info["vocab_size"], self.info["context_length"], identity, self._sharing
        )

    def _sharing(self, vocab_size: int) -> RemoteTeacher:
        self.vocab_size = vocab_size
        return self

    def score(self, rollouts: Iterable[Rollout], request: ScoreRequest) -> Iterator[ScoredRollout]:
        """Yields every rollout with its scores; requests are under way while `rollouts` are still being written.

        Raises TrainingError and TeacherUnavailable.
        """
        results = stream(self, rollouts, request)
        if request.kind != "full":
            yield from (scored for scored, _ in results)
            return
        # A server may have taken new weights in between: hidden states are worth something with their own head alone.
        waiting: list[Rollout] = []
        for scored, version in results:
            if version > self._head_version:
                self._fetch_head()
            if version == self._head_version:
                yield replace(scored, head=self._head)
            else:
                waiting.append(scored.rollout)
        if waiting:
            yield from self.score(waiting, request)

    async def ask(self, rollouts: list[Rollout], request: ScoreRequest) -> list[Scored]:
        """Returns the scores of some rollouts, from one request, and the version of the weights that gave them."""
        queries = [query_of(rollout, request, self.vocab_size) for rollout in rollouts]
        body = await asyncio.to_thread(wire.encode_queries, queries)
        tokens = sum(query.length for query in queries)
        answer = await self.replicas.request("POST", "/v1/score", content=body, tokens=tokens)
        try:
            scores, version = await asyncio.to_thread(wire.decode_scores, answer, queries)
        except wire.WireError as error:
            raise self._unreadable(error) from error
        return [(ScoredRollout(rollout, own), version) for rollout, own in zip(rollouts, scores, strict=True)]

    def _fetch_head(self) -> None:
        body = self.replicas.run(self.replicas.request("GET", "/v1/head"))
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

    async def _check(self, replica: Replica, response: httpx.Response) -> None:
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
