"""`opd teacher serve`: a teacher that other processes and machines ask for scores. `wire.py` has the protocol.

Nothing that a client sends is trusted: it needs the token where there is one, its size is known before it is read, and
`wire.decode_queries` checks every number in it before the model sees it.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import math
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from opd import __version__
from opd.errors import OpdError
from opd.teachers import wire
from opd.teachers.batcher import Batcher, QueueFull
from opd.teachers.fingerprint import tokenizer_fingerprint, weights_fingerprint
from opd.teachers.scoring import ScoringModel
from opd.types import Query, TeacherScores

TOKEN_BUCKETS = (64, 256, 1024, 2048, 4096, 8192, 16384, 32768, 65536)


Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """What a server takes from its clients."""

    max_batch_tokens: int
    """Tokens of one forward pass; a longer sequence has one of its own."""
    max_queue_tokens: int
    """Tokens that may wait; beyond them a request is answered 503."""
    max_tokens: int
    """Tokens of one request; beyond them it is answered 413."""
    max_topk: int
    """Ids of a support at most."""
    token: str | None = None
    """The bearer token that every request has to bring, except for /health."""


class _Meters:
    """What /metrics shows."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def made(kind: Any, name: str, text: str, **extra: Any) -> Any:
            return kind(f"opd_teacher_{name}", text, registry=self.registry, **extra)

        self.requests = made(Counter, "requests", "Score requests, by status.", labelnames=["status"])
        self.cancelled = made(Counter, "cancelled", "Score requests whose client went away before the answer.")
        self.tokens = made(Counter, "tokens", "Tokens of prompts and completions that went through the model.")
        self.busy = made(Counter, "busy_seconds", "Seconds in which the model was at work.")
        self.batch_tokens = made(Histogram, "batch_tokens", "Tokens of a forward pass.", buckets=TOKEN_BUCKETS)
        self.latency = made(Histogram, "latency_seconds", "Seconds from a request's first byte to its answer.")
        self.rate = made(Gauge, "tokens_per_second", "Tokens a second of the last forward pass.")
        self.queued_requests = made(Gauge, "queued_requests", "Requests that wait for a forward pass.")
        self.queued_tokens = made(Gauge, "queued_tokens", "Tokens that wait for a forward pass.")

    def batch(self, tokens: int, sequences: int, seconds: float) -> None:
        """Books a forward pass."""
        self.tokens.inc(tokens)
        self.busy.inc(seconds)
        self.batch_tokens.observe(tokens)
        self.rate.set(tokens / seconds)


class ScoringServer:
    """The routes, around one model and its queue."""

    def __init__(self, model: ScoringModel, settings: ServerSettings) -> None:
        self.model = model
        self.settings = settings
        self.limits = wire.Limits(model.vocab_size, model.context_length, settings.max_tokens, settings.max_topk)
        self.weight_version = 0
        self.meters = _Meters()
        self.batcher = Batcher(
            model.score,
            max_batch_tokens=settings.max_batch_tokens,
            max_queue_tokens=settings.max_queue_tokens,
            observer=self.meters,
        )
        self._info = self._describe()
        self._tokenizer_files = _files_of(model.tokenizer)
        routes = [
            Route("/health", self._health),
            Route("/metrics", self._guarded(self._metrics)),
            Route("/v1/info", self._guarded(self._give_info)),
            Route("/v1/tokenizer", self._guarded(self._give_tokenizer)),
            Route("/v1/head", self._guarded(self._meant(self._give_head))),
            Route("/v1/score", self._guarded(self._meant(self._score)), methods=["POST"]),
        ]
        self.app = Starlette(routes=routes, exception_handlers={404: _no_route, 405: _no_route})

    def _describe(self) -> dict[str, Any]:
        head = self.model.head(self.model.vocab_size)
        return {
            "model": self.model.name,
            "opd": __version__,
            "protocol": wire.PROTOCOL,
            "tokenizer_fingerprint": tokenizer_fingerprint(self.model.tokenizer),
            "weights_fingerprint": weights_fingerprint(self.model.model),
            "weight_version": self.weight_version,
            "vocab_size": self.model.vocab_size,
            "head_rows": head.weight.shape[0],
            "hidden_size": head.weight.shape[1],
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "context_length": self.model.context_length,
            "eos_token_ids": list(self.model.eos_ids),
            "max_tokens": self.settings.max_tokens,
            "max_batch_tokens": self.settings.max_batch_tokens,
            "capabilities": {
                "kinds": list(wire.KINDS),
                "max_topk": self.settings.max_topk,
                "temperature": True,
                "entropy": True,
            },
        }

    def _guarded(self, route: Handler) -> Handler:
        """The route, for those who bring the token."""

        async def guarded(request: Request) -> Response:
            if self.settings.token is not None and not _authorised(request, self.settings.token):
                return _refusal(401, "This server needs its token: send Authorization: Bearer … (OPD_TEACHER_TOKEN).")
            return await route(request)

        return guarded

    def _meant(self, route: Handler) -> Handler:
        """The route, for those who mean these weights, or do not say which."""

        async def meant(request: Request) -> Response:
            wanted = request.headers.get(wire.WEIGHTS_HEADER)
            if wanted is not None and wanted != self._info["weights_fingerprint"]:
                return _refusal(409, f"This server has other weights: those of {self.model.name}.")
            return await route(request)

        return meant

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _metrics(self, request: Request) -> Response:
        requests, tokens = self.batcher.queued
        self.meters.queued_requests.set(requests)
        self.meters.queued_tokens.set(tokens)
        return PlainTextResponse(generate_latest(self.meters.registry), media_type=CONTENT_TYPE_LATEST)

    async def _give_info(self, request: Request) -> Response:
        return JSONResponse(self._info)

    async def _give_tokenizer(self, request: Request) -> Response:
        return JSONResponse({"files": self._tokenizer_files})

    async def _give_head(self, request: Request) -> Response:
        tied = bool(getattr(self.model.model.config.get_text_config(), "tie_word_embeddings", False))
        head = self.model.head(self.model.vocab_size)
        body = await asyncio.to_thread(wire.encode_head, head, self.weight_version, tied=tied)
        return Response(body, media_type=wire.MEDIA_TYPE)

    async def _score(self, request: Request) -> Response:
        start = perf_counter()
        response = await self._scored(request)
        self.meters.requests.labels(str(response.status_code)).inc()
        self.meters.latency.observe(perf_counter() - start)
        return response

    async def _scored(self, request: Request) -> Response:
        try:
            body = await self._body(request)
            queries = await asyncio.to_thread(wire.decode_queries, body, self.limits)
            future = self.batcher.submit(queries)
        except wire.WireError as error:
            return _refusal(error.status, str(error))
        except QueueFull as full:
            response = _refusal(503, "The queue is full; send the request again after the seconds in Retry-After.")
            response.headers["Retry-After"] = str(max(1, math.ceil(full.retry_after)))
            return response
        except ClientDisconnect:
            self.meters.cancelled.inc()
            return _refusal(499, "The client went away.")
        answer: asyncio.Future[list[TeacherScores]] = asyncio.wrap_future(future)
        gone: asyncio.Future[None] = asyncio.ensure_future(_disconnected(request))
        both: list[asyncio.Future[Any]] = [answer, gone]
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if not answer.done():
            # Nobody would read the scores: what is still queued of them is not computed.
            answer.cancel()
            self.meters.cancelled.inc()
            return _refusal(499, "The client went away.")
        if (failure := answer.exception()) is not None:
            return _refusal(500, _sentence(failure))
        body = await asyncio.to_thread(self._encoded, queries, answer.result())
        return Response(body, media_type=wire.MEDIA_TYPE)

    def _encoded(self, queries: list[Query], scores: list[TeacherScores]) -> bytes:
        request = queries[0].request
        known = request.kind == "topk" and request.support_of == "student"
        return wire.encode_scores(scores, self.weight_version, support_known=known)

    async def _body(self, request: Request) -> bytes:
        """The body, read no further than a request may be long; raises WireError."""
        limit = self.limits.max_body_bytes
        too_large = wire.WireError(
            f"The body has more than {limit} bytes; this server takes {self.limits.max_tokens} tokens a request: "
            "send fewer sequences at a time.",
            status=413,
        )
        declared = request.headers.get("content-length", "0")
        if not declared.isdecimal() or int(declared[:20]) > limit:
            raise too_large
        received = bytearray()
        async for chunk in request.stream():
            received += chunk
            if len(received) > limit:
                raise too_large
        return bytes(received)


async def _disconnected(request: Request) -> None:
    """Returns when the client has gone; the body has been read, so nothing else can come."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _authorised(request: Request, token: str) -> bool:
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    # As bytes: comparing texts in constant time takes ASCII only.
    same = hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), token.encode())
    return same and scheme.lower() == "bearer"


def _refusal(status: int, sentence: str) -> Response:
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
    return JSONResponse({"error": sentence}, status_code=status, headers=headers)


async def _no_route(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    return _refusal(
        status, "There is no such route; POST /v1/score, GET /v1/info, /v1/head, /v1/tokenizer, /health, /metrics."
    )


def _sentence(error: BaseException) -> str:
    if isinstance(error, OpdError):
        return " ".join([error.what, *(f"{label}: {text}." for label, text in error.details())])
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0][:200]}"


def _files_of(tokenizer: Any) -> dict[str, str]:
    """The tokenizer's files as texts, as save_pretrained writes them; a name or path of this machine is left out."""
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer.save_pretrained(scratch)
        files = {
            name: (Path(scratch) / name).read_text("utf-8")
            for name in wire.TOKENIZER_FILES
            if (Path(scratch) / name).exists()
        }
    if "tokenizer_config.json" in files:
        config = json.loads(files["tokenizer_config.json"])
        config.pop("name_or_path", None)
        files["tokenizer_config.json"] = json.dumps(config)
    return files
