"""What a stock `vllm serve` is asked, and how its answers are read: vLLM's own JSON, token ids in and numbers out.

    POST /inference/v1/generate   token_ids [N], sampling_params  → prompt_logprobs, prompt_token_id_logprobs
    POST /v1/completions          prompt, R lists of token ids    → prompt_logprobs of each of R choices

A prompt and its completion are sent as one prompt, and one token is generated in vain because vLLM generates at least
one. Entry i of prompt_logprobs says of token i, given those before it: {id: {"logprob": …}} of the K most probable ids
and of the token itself, which comes first and is one more where it is not among the K. prompt_token_id_logprobs is a
.npy of float32 [T, S] in base64: row i is about token prompt_logprob_start + 1 + i.

vLLM's log-softmax runs over every row of the model's head, at temperature 1 whatever is asked. Rows that are no token
of the shared vocabulary (padding) have their part of it, which in-process teachers leave out: log-probabilities are
lower here by −log(1 − that part). Their ids are dropped from a top K, and their part counts as tail.
"""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any

import numpy
import torch
from torch import Tensor

from opd.linear_loss import support_ids
from opd.types import Query, ScoreRequest, TeacherScores

GENERATE = "/inference/v1/generate"
"""Token ids in, token ids out; takes prompt_logprob_token_ids. One sequence a request."""
COMPLETIONS = "/v1/completions"
MINUS_INFINITY = -9999.0
"""What vLLM's JSON has for −inf."""
SMALLEST_TAIL = 2.0**-23
"""Mass outside a support below which 1 − Σ exp is nothing but the rounding of float32 log-probabilities."""

LogprobRows = Sequence[Mapping[str, Any] | None]


class AnswerError(Exception):
    """An answer that is not vLLM's, in one sentence."""


def encode(route: str, model: str, sequences: Sequence[Sequence[int]], options: Mapping[str, Any]) -> bytes:
    """Returns the body that asks `route` for what `options`, sampling parameters of vLLM, want to know of `sequences`."""
    parameters = {"max_tokens": 1, "temperature": 0, **options}
    if route == COMPLETIONS:
        return json.dumps({"model": model, "prompt": sequences, **parameters}).encode()
    (sequence,) = sequences
    # The text of every id would be looked up and sent for nothing.
    parameters["detokenize"] = False
    return json.dumps({"model": model, "token_ids": sequence, "sampling_params": parameters}).encode()


def encode_queries(route: str, model: str, queries: Sequence[Query]) -> bytes:
    """Returns the body of a request that asks the same of every query; on the generate route there is one."""
    options: dict[str, Any] = {"prompt_logprobs": _own_k(queries[0].request)}
    if (student_ids := queries[0].student_ids) is not None:
        options["prompt_logprob_token_ids"] = student_ids.tolist()
        options["prompt_logprob_start"] = len(queries[0].prompt_ids) - 1
    return encode(route, model, [[*query.prompt_ids, *query.token_ids.tolist()] for query in queries], options)


def decode_queries(route: str, body: bytes, queries: Sequence[Query]) -> list[TeacherScores]:
    """Returns the scores of every query; raises AnswerError."""
    answer = parsed(body)
    rows = logprob_rows(route, answer, [query.length for query in queries])
    return [_scores(query, own, answer) for query, own in zip(queries, rows, strict=True)]


def parsed(body: bytes) -> dict[str, Any]:
    """Returns the JSON object of an answer; raises AnswerError."""
    try:
        answer = json.loads(body)
    except ValueError as error:
        raise AnswerError(f"It is no JSON: {error}.") from error
    if not isinstance(answer, dict):
        raise AnswerError(f"It is {type(answer).__name__} instead of an object.")
    return answer


def logprob_rows(route: str, answer: Mapping[str, Any], lengths: Sequence[int]) -> list[LogprobRows]:
    """Returns prompt_logprobs of every sequence of `lengths` tokens; raises AnswerError."""
    try:
        parts = [answer]
        if route == COMPLETIONS:
            parts = sorted(answer["choices"], key=lambda choice: choice["index"])
        found = [part["prompt_logprobs"] for part in parts]
        counts = [len(rows) for rows in found]
    except (KeyError, TypeError) as error:
        raise AnswerError("It has no prompt_logprobs.") from error
    if counts != list(lengths):
        raise AnswerError(f"prompt_logprobs is about {counts} tokens instead of {list(lengths)}.")
    return found


def at_given_ids(answer: Mapping[str, Any], tokens: int, ids: int) -> Tensor:
    """Returns prompt_token_id_logprobs as float32 [tokens, ids]; raises AnswerError."""
    encoded = answer.get("prompt_token_id_logprobs")
    if not isinstance(encoded, str):
        raise AnswerError("It has no prompt_token_id_logprobs.")
    try:
        array = numpy.load(BytesIO(b64decode(encoded)), allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise AnswerError(f"prompt_token_id_logprobs is no .npy: {error}.") from error
    if array.shape != (tokens, ids) or array.dtype.kind != "f":
        raise AnswerError(
            f"prompt_token_id_logprobs is {array.dtype} {list(array.shape)} instead of float32 {[tokens, ids]}."
        )
    return torch.from_numpy(array.astype(numpy.float32))


def _own_k(request: ScoreRequest) -> int:
    """How many of its own most probable ids the teacher is asked for; 0 still gives the tokens' own values."""
    return max(request.diagnostics_k, request.k if request.support_of != "student" else 0)


def _scores(query: Query, rows: LogprobRows, answer: Mapping[str, Any]) -> TeacherScores:
    request, k = query.request, query.request.k
    sampled, own_ids, own_values = _read(query, rows[len(query.prompt_ids) :])
    diagnosed = own_ids[:, : request.diagnostics_k] if request.diagnostics_k else None
    if request.kind == "sampled":
        return TeacherScores(sampled_logprobs=sampled, topk_ids=diagnosed)
    values = own_values[:, :k]
    if query.student_ids is not None:
        at_student = at_given_ids(answer, *query.student_ids.shape)
        values = torch.cat([at_student, values], 1) if request.support_of == "union" else at_student
    ids = support_ids(query.student_ids, own_ids[:, :k], request.support_of)
    values = values.masked_fill(ids < 0, -torch.inf)
    return TeacherScores(
        sampled_logprobs=sampled,
        support_ids=ids,
        support_logprobs=values,
        tail_logprobs=_tail(ids, values, query.vocab_size),
        topk_ids=diagnosed,
    )


def _read(query: Query, rows: LogprobRows) -> tuple[Tensor, Tensor, Tensor]:
    """(log q of the tokens [T], the teacher's own most probable ids [T, K], log q of these [T, K])."""
    k = _own_k(query.request)
    sampled: list[float] = []
    ids: list[list[int]] = []
    values: list[list[float]] = []
    try:
        for token, row in zip(query.token_ids.tolist(), rows, strict=True):
            found = {int(name): float(entry["logprob"]) for name, entry in (row or {}).items()}
            sampled.append(found[token])
            if len(found) > k:
                # More than K: the token itself was not among them.
                del found[token]
            best = sorted((i for i in found if i < query.vocab_size), key=lambda i: -found[i])
            ids.append(best + [-1] * (k - len(best)))
            values.append([found[i] for i in best] + [MINUS_INFINITY] * (k - len(best)))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise AnswerError(f"prompt_logprobs lacks the token itself, or is no mapping of ids ({error!r}).") from error
    if any(len(best) != k for best in ids):
        raise AnswerError(f"prompt_logprobs has more than the {k} ids that were asked for.")
    shape = (len(sampled), k)
    return (
        _with_infinities(torch.tensor(sampled, dtype=torch.float32)),
        torch.tensor(ids, dtype=torch.int64).reshape(shape),
        _with_infinities(torch.tensor(values, dtype=torch.float32).reshape(shape)),
    )


def _with_infinities(values: Tensor) -> Tensor:
    return values.masked_fill(values <= MINUS_INFINITY, -torch.inf)


def _tail(ids: Tensor, values: Tensor, vocab_size: int) -> Tensor:
    """log of the mass outside the support [T], by subtraction.

    A server that returns K log-probabilities leaves nothing to take a logsumexp over. The subtraction cancels as the
    mass of the support goes to 1: the error of the tail's mass is that of the log-probabilities, about 1e-7 a unit of
    mass in float32 and 1e-2 where the server computes in bfloat16. Below SMALLEST_TAIL it is taken for SMALLEST_TAIL.
    """
    inside = values.double().exp().sum(-1).clamp_max(1 - SMALLEST_TAIL)
    tail = torch.log1p(-inside)
    everything = (ids >= 0).sum(-1) == vocab_size
    return tail.masked_fill(everything, -torch.inf).float()
