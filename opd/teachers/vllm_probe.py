"""What a `vllm serve` can do, found by asking it: a handful of requests about three tokens."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field, fields
from math import exp
from typing import Any, Protocol

import httpx

from opd.errors import PreflightError
from opd.teachers.replicas import sentence
from opd.teachers.serve import TOKEN_VARIABLE
from opd.teachers.vllm_wire import COMPLETIONS, GENERATE, AnswerError, at_given_ids, encode, logprob_rows, parsed

PROBE = (0, 1, 2)
"""Token ids that every model has."""
PROBED_IDS = 16
"""Ids of a top K whose log-probabilities are looked at."""
TOO_MANY = 1_000_000_000
"""More ids than any vocabulary has, so that the refusal names the limit."""
ROUTE_IS_ABSENT = (403, 404, 405, 501)
"""Answers of a vLLM that lacks a route, or was started without it."""

_LIMIT = re.compile(r"max allowed:?\s*(\d+)")
_VOCABULARY = re.compile(r"[Vv]ocabulary size:?\s*(\d+)")


@dataclass(frozen=True, slots=True)
class Served:
    """What a server says of itself; servers of one teacher agree in all of it."""

    model: str
    """What its model is called in requests."""
    root: str
    """Where it took the model from: a folder on its machine, or a hub name."""
    max_model_len: int
    version: str
    """Of vLLM."""
    route: str
    """Where it is asked: the generate route where it has it, otherwise completions."""
    max_logprobs: int
    """Ids of a top K, and of a support, at most (--max-logprobs)."""
    vocab_size: int | None
    """Ids that its log-softmax runs over; None where it does not say."""
    given_ids: bool
    """Whether it takes prompt_logprob_token_ids."""
    refusal: str = field(default="", compare=False)
    """Why it does not."""

    def differences(self, other: Served) -> list[str]:
        """Returns the names of what differs."""
        compared = [entry.name for entry in fields(self) if entry.compare]
        return [name for name in compared if getattr(self, name) != getattr(other, name)]


class Fetch(Protocol):
    """One request to the server that is probed, whatever it answers."""

    def __call__(self, method: str, path: str, content: bytes | None = None) -> Awaitable[httpx.Response]: ...


async def probe(url: str, models: httpx.Response, fetch: Fetch) -> Served:
    """Returns what the server at `url` can do, given its answer at /v1/models; raises PreflightError."""
    card = _model_card(url, models)
    version = await fetch("GET", "/version")
    name = card["id"]

    async def ask(route: str, **options: Any) -> httpx.Response:
        tokens: Sequence[Sequence[int]] = [PROBE]
        return await fetch("POST", route, encode(route, name, tokens, options))

    route, absence = GENERATE, ""
    limit = await ask(route, prompt_logprobs=TOO_MANY)
    if limit.status_code in ROUTE_IS_ABSENT:
        route, absence = COMPLETIONS, sentence(limit)
        limit = await ask(route, prompt_logprobs=TOO_MANY)
    max_logprobs = _number(_LIMIT, limit)
    if max_logprobs is None:
        raise PreflightError(
            "The vLLM server gives no log-probabilities of prompts.",
            where=f"{url}{route} answers {limit.status_code}",
            why=sentence(limit),
            fix="serve a text-generation model with vllm serve, without speculative decoding",
        )
    _check_values(url, route, await ask(route, prompt_logprobs=min(max_logprobs, PROBED_IDS)))
    vocabulary = await ask(route, logit_bias={str(TOO_MANY): 0})
    refusal = absence
    if route == GENERATE:
        rows = [[0, 1] for _ in PROBE[1:]]
        refusal = _given_ids_refusal(await ask(route, prompt_logprob_token_ids=rows, prompt_logprob_start=0))
    return Served(
        model=name,
        root=card.get("root") or name,
        max_model_len=card["max_model_len"],
        version=_value(version, "version") or "unknown",
        route=route,
        max_logprobs=max_logprobs,
        vocab_size=_number(_VOCABULARY, vocabulary),
        given_ids=not refusal,
        refusal=refusal,
    )


def _model_card(url: str, models: httpx.Response) -> dict[str, Any]:
    """The served model's entry in the answer of /v1/models; adapters come after it."""
    if models.status_code == 401:
        raise PreflightError(
            "The vLLM server wants a token.",
            where=url,
            why=f"{TOKEN_VARIABLE} holds another one than its --api-key, or none",
            fix=f"export {TOKEN_VARIABLE} with the server's --api-key",
        )
    data = _value(models, "data")
    card = data[0] if isinstance(data, list) and data else None
    if not isinstance(card, dict) or not card.get("id") or not isinstance(card.get("max_model_len"), int):
        raise PreflightError(
            "This is not a vLLM server.",
            where=f"{url}/v1/models answers {models.status_code}",
            fix="start one with vllm serve MODEL, or say teacher.kind=opd_server for an opd teacher serve",
        )
    return card


def _check_values(url: str, route: str, response: httpx.Response) -> None:
    """Raises PreflightError where what the server calls log-probabilities are none."""
    try:
        if not response.is_success:
            raise AnswerError(sentence(response))
        (rows,) = logprob_rows(route, parsed(response.content), [len(PROBE)])
        values = [float(entry["logprob"]) for entry in (rows[-1] or {}).values()]
    except (AnswerError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise PreflightError(
            "The vLLM server's log-probabilities cannot be read.", where=f"{url}{route}", why=str(error)
        ) from error
    # A token of its own beside the top K is part of the same distribution, so the sum is a mass all the same.
    if not values or max(values) > 1e-3 or sum(map(exp, values)) > 1.01:
        raise PreflightError(
            "The vLLM server returns logits instead of log-probabilities.",
            where=f"{url}{route}",
            fix="start it with --logprobs-mode raw_logprobs, the default",
        )


def _given_ids_refusal(response: httpx.Response) -> str:
    """Why there are no log-probabilities at given ids; empty where there are."""
    if not response.is_success:
        return sentence(response)
    try:
        at_given_ids(parsed(response.content), len(PROBE) - 1, 2)
    except AnswerError:
        # Versions that do not know the parameter leave it aside.
        return "it does not know prompt_logprob_token_ids"
    return ""


def _number(pattern: re.Pattern[str], response: httpx.Response) -> int | None:
    found = None if response.is_success else pattern.search(sentence(response))
    return int(found[1]) if found else None


def _value(response: httpx.Response, key: str) -> Any:
    try:
        return response.json()[key]
    except (ValueError, KeyError, TypeError):
        return None
