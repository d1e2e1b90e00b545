"""What goes over the wire between a scoring server and its clients: safetensors bodies with a small JSON header.

    POST /v1/score      ids [N] int32, lengths [R, 2] int32 (prompt, completion), student_ids [T, K] int32 where asked
                        → the fields of TeacherScores, each [T, …] over all completions; ids as int32
    GET  /v1/head       → weight [V, D], bias [V] or absent
    GET  /v1/info, /v1/tokenizer, errors: JSON

The header is the metadata entry "opd", a JSON object. N tokens of prompts and completions, R sequences, T completion
tokens, K ids of a support, V vocabulary, D hidden size. Nothing here is trusted: every size is checked against what was
received before anything of that size is made.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from opd.heads import Head
from opd.types import Query, ScoreRequest, TeacherScores

PROTOCOL = 1
"""Version of all this; a server and a client of different versions refuse each other."""
KINDS = ("sampled", "topk", "gather", "union", "intersection", "full")
"""What can be asked for: gather is the top-K loss on ids that the client gives; union and intersection join both."""
MEDIA_TYPE = "application/vnd.opd.safetensors"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
"""Files that a server hands out and a client takes, so that it can compare tokens with the student's and render prompts."""
HEADER = "opd"
WEIGHTS_HEADER = "OPD-Weights"
"""HTTP header of a client: the fingerprint of the weights that it means. A server with others answers 409, for it may have been
replaced between two requests without any of them failing."""
HEADER_BYTES = 1 << 16
"""Bytes of a body that its header may take up besides the tensors."""
MAX_NUMBER = 1e30
TEMPERATURES = (1e-4, 1e4)
"""Outside of them, logits divided by the temperature are nothing that float32 could hold."""
ID_FIELDS = ("support_ids", "topk_ids")
"""Fields of TeacherScores that are ids."""

_OF_KIND = {"topk": "teacher", "gather": "student", "union": "union", "intersection": "intersection"}


class WireError(Exception):
    """A body that cannot be used: one sentence that says what and how to fix it, and the HTTP status for it."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Limits:
    """What a server takes."""

    vocab_size: int
    """Ids are below it."""
    context_length: int | None
    """Tokens of one sequence at most."""
    max_tokens: int
    """Tokens of one request at most."""
    max_topk: int
    """Ids of a support at most."""

    @property
    def max_body_bytes(self) -> int:
        """Bytes of a request at most: every token's id, lengths and support, and the header."""
        return HEADER_BYTES + 4 * self.max_tokens * (3 + self.max_topk)


def encode_queries(queries: Sequence[Query]) -> bytes:
    """Returns the body of a score request; all queries ask for the same."""
    request = queries[0].request
    lengths = [[len(query.prompt_ids), len(query.token_ids)] for query in queries]
    ids = [part for query in queries for part in (torch.tensor(query.prompt_ids, dtype=torch.int64), query.token_ids)]
    tensors = {"ids": torch.cat(ids).int(), "lengths": torch.tensor(lengths, dtype=torch.int32)}
    if request.wants_student_ids:
        tensors["student_ids"] = torch.cat([q.student_ids for q in queries if q.student_ids is not None]).int()
    kind = request.kind if request.kind != "topk" else _kind_of(request.support_of)
    header = {
        "protocol": PROTOCOL,
        "kind": kind,
        "k": request.k,
        "diagnostics_k": request.diagnostics_k,
        "temperature": request.temperature,
        "vocab_size": queries[0].vocab_size,
    }
    return _encode(tensors, header)


def decode_queries(body: bytes, limits: Limits) -> list[Query]:
    """Returns the queries of a score request; raises WireError for everything that a server should not work on."""
    tensors, header = _decode(body)
    request, vocab_size = _request(header, limits)
    wanted = {"ids", "lengths"} | ({"student_ids"} if request.wants_student_ids else set())
    if tensors.keys() != wanted:
        raise WireError(
            f"The body has the tensors {_listed(tensors)}; a request of kind {header['kind']} has {_listed(wanted)}."
        )
    for name, tensor in tensors.items():
        if tensor.dtype != torch.int32:
            raise WireError(f"{name} is {_name(tensor.dtype)}; send it as int32.")
    ids, lengths = tensors["ids"], tensors["lengths"].long()
    if ids.ndim != 1 or lengths.ndim != 2 or lengths.shape[1] != 2 or not len(lengths):
        raise WireError(
            f"ids has the shape {list(ids.shape)} and lengths {list(lengths.shape)}; "
            "send ids [N] and lengths [R, 2], prompt and completion tokens of each sequence."
        )
    if int(lengths.min()) < 1:
        raise WireError(f"lengths holds {int(lengths.min())}; prompt and completion have at least one token each.")
    if int(lengths.sum()) != len(ids):
        raise WireError(f"lengths add up to {int(lengths.sum())} tokens, but ids has {len(ids)}.")
    if len(ids) > limits.max_tokens:
        raise WireError(
            f"The request has {len(ids)} tokens; this server takes {limits.max_tokens}: send fewer sequences at a time.",
            status=413,
        )
    longest = int(lengths.sum(1).max())
    if limits.context_length is not None and longest > limits.context_length:
        raise WireError(
            f"A sequence has {longest} tokens, but the model's context is {limits.context_length}; send shorter ones."
        )
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= limits.vocab_size:
        raise WireError(f"ids holds {low if low < 0 else high}; this model's tokens are 0 to {limits.vocab_size - 1}.")
    ids = ids.long()
    pieces = ids.split(lengths.flatten().tolist())
    prompts, completions = pieces[::2], pieces[1::2]
    if (beyond := max(int(piece.max()) for piece in completions)) >= vocab_size:
        raise WireError(
            f"A completion holds the id {beyond}, which is not below the request's vocab_size {vocab_size}."
        )
    supports: Sequence[Tensor | None] = [None] * len(completions)
    if request.wants_student_ids:
        supports = _supports(tensors["student_ids"], [len(piece) for piece in completions], request.k, vocab_size)
    return [
        Query(tuple(prompt.tolist()), completion, request, vocab_size, support)
        for prompt, completion, support in zip(prompts, completions, supports, strict=True)
    ]


def encode_scores(scores: Sequence[TeacherScores], weight_version: int, *, support_known: bool) -> bytes:
    """Returns the body of an answer; with `support_known` the ids of the support are those that the client sent."""
    tensors: dict[str, Tensor] = {}
    for field in fields(TeacherScores):
        values = [getattr(score, field.name) for score in scores]
        if values[0] is None or (support_known and field.name == "support_ids"):
            continue
        joined = torch.cat(values).cpu()
        tensors[field.name] = joined.int() if field.name in ID_FIELDS else joined.contiguous()
    return _encode(tensors, {"protocol": PROTOCOL, "weight_version": weight_version})


def decode_scores(body: bytes, queries: Sequence[Query]) -> tuple[list[TeacherScores], int]:
    """Returns the scores of every query and the version of the weights that gave them; raises WireError."""
    tensors, header = _decode(body)
    request = queries[0].request
    lengths = [len(query.token_ids) for query in queries]
    total = sum(lengths)
    for name, tensor in tensors.items():
        if name in ID_FIELDS:
            tensors[name] = tensor.long()
    if request.kind == "topk" and request.support_of == "student":
        tensors["support_ids"] = torch.cat([q.student_ids for q in queries if q.student_ids is not None])
    expected = _expected_shapes(request, total)
    for name, shape in expected.items():
        found = tensors.get(name)
        if (
            found is None
            or found.ndim != len(shape)
            or any(w not in (None, s) for w, s in zip(shape, found.shape, strict=True))
        ):
            raise WireError(
                f"The answer's {name} is {'absent' if found is None else list(found.shape)} instead of {list(shape)}."
            )
        if name != "hidden" and name not in ID_FIELDS and found.dtype != torch.float32:
            raise WireError(f"The answer's {name} is {_name(found.dtype)} instead of float32.")
    if tensors.keys() != expected.keys():
        raise WireError(f"The answer has the tensors {_listed(tensors)} instead of {_listed(expected)}.")
    return TeacherScores(**tensors).split(lengths), _integer(header, "weight_version", 0, 2**62)


def encode_head(head: Head, weight_version: int, *, tied: bool) -> bytes:
    """Returns the body of an output head: its weight up to the valid vocabulary, and what is done to its products."""
    tensors = {"weight": head.weight[: head.vocab_size].contiguous().cpu()}
    if head.bias is not None:
        tensors["bias"] = head.bias[: head.vocab_size].contiguous().cpu()
    header = {
        "protocol": PROTOCOL,
        "weight_version": weight_version,
        "logit_scale": head.logit_scale,
        "softcap": head.softcap,
        "vocab_size": head.vocab_size,
        "dtype": _name(head.weight.dtype),
        "tied": tied,
    }
    return _encode(tensors, header)


def decode_head(body: bytes, vocab_size: int) -> tuple[Head, int]:
    """Returns the head, cut to the vocabulary that teacher and student share, and its weight version; raises WireError."""
    tensors, header = _decode(body)
    weight, bias = tensors.get("weight"), tensors.get("bias")
    if weight is None or weight.ndim != 2 or weight.shape[0] < vocab_size:
        raise WireError(
            f"The head's weight is {'absent' if weight is None else list(weight.shape)}; it needs {vocab_size} rows."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise WireError(f"The head's bias has the shape {list(bias.shape)}, its weight {list(weight.shape)}.")
    scale, softcap = _number(header, "logit_scale"), header.get("softcap")
    softcap = None if softcap is None else _number(header, "softcap")
    return Head(weight, bias, scale, softcap, vocab_size), _integer(header, "weight_version", 0, 2**62)


def _kind_of(support_of: str) -> str:
    return next(kind for kind, of in _OF_KIND.items() if of == support_of)


def _request(header: Mapping[str, Any], limits: Limits) -> tuple[ScoreRequest, int]:
    """The request and the vocabulary that it is about."""
    kind = header.get("kind")
    if kind not in KINDS:
        raise WireError(f"kind is {_shown(kind)}; it is one of {', '.join(KINDS)}.")
    vocab_size = _integer(header, "vocab_size", 1, limits.vocab_size)
    most = min(limits.max_topk, vocab_size)
    temperature = _number(header, "temperature", *TEMPERATURES)
    is_topk = kind in _OF_KIND
    request = ScoreRequest(
        kind="topk" if is_topk else kind,
        temperature=temperature,
        k=_integer(header, "k", 1, most) if is_topk else 0,
        support_of=_OF_KIND.get(kind, "student"),  # type: ignore[arg-type]
        diagnostics_k=_integer(header, "diagnostics_k", 0, most),
    )
    return request, vocab_size


def _supports(student_ids: Tensor, lengths: Sequence[int], k: int, vocab_size: int) -> list[Tensor]:
    """The support of each completion."""
    if student_ids.ndim != 2 or student_ids.shape != (sum(lengths), k):
        raise WireError(f"student_ids has the shape {list(student_ids.shape)}; send [T, K] = [{sum(lengths)}, {k}].")
    low, high = int(student_ids.min()), int(student_ids.max())
    if low < 0 or high >= vocab_size:
        raise WireError(f"student_ids holds {low if low < 0 else high}; ids are 0 to {vocab_size - 1}.")
    ordered = student_ids.sort(dim=-1).values
    if bool((ordered[:, 1:] == ordered[:, :-1]).any()):
        raise WireError("student_ids names an id twice at one position; the ids of a support are distinct.")
    return list(student_ids.long().split(list(lengths)))


def _expected_shapes(request: ScoreRequest, total: int) -> dict[str, tuple[int | None, ...]]:
    """Tensor name → shape of an answer; None = any size."""
    if request.kind == "full":
        return {"hidden": (total, None)}
    shapes: dict[str, tuple[int | None, ...]] = {"sampled_logprobs": (total,)}
    if request.kind == "topk":
        width = 2 * request.k if request.support_of == "union" else request.k
        shapes |= {
            "support_ids": (total, width),
            "support_logprobs": (total, width),
            "tail_logprobs": (total,),
        }
    if request.diagnostics_k:
        shapes |= {"topk_ids": (total, request.diagnostics_k), "entropy": (total,)}
    return shapes


def _encode(tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> bytes:
    return save(dict(tensors), metadata={HEADER: json.dumps(header)})


def _decode(body: bytes) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the header of a body; raises WireError for what is not one, or of another protocol."""
    try:
        # Checks that the header is JSON, that offsets are inside the body and that shapes add up to them.
        tensors = load(body)
        length = int.from_bytes(body[:8], "little")
        metadata = json.loads(body[8 : 8 + length]).get("__metadata__") or {}
        header = json.loads(metadata.get(HEADER, "null"))
    except (SafetensorError, ValueError, TypeError, KeyError, AttributeError, RuntimeError, OverflowError) as error:
        # RuntimeError includes RecursionError, for JSON that is nested without end.
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise WireError(f"The body is not a safetensors file with opd's header ({reason[:120]}).") from error
    if not isinstance(header, dict):
        raise WireError(f'The body\'s metadata has no entry "{HEADER}" that is a JSON object.')
    if header.get("protocol") != PROTOCOL:
        raise WireError(
            f"Protocol version {_shown(header.get('protocol'))} is not known here, only {PROTOCOL}: "
            "use the same version of opd on both sides."
        )
    return tensors, header


def _integer(header: Mapping[str, Any], name: str, low: int, high: int) -> int:
    value = header.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise WireError(f"{name} is {_shown(value)}; it is an integer from {low} to {high}.")
    return value


def _number(header: Mapping[str, Any], name: str, low: float = -MAX_NUMBER, high: float = MAX_NUMBER) -> float:
    value = header.get(name)
    # Comparing before converting: an integer may be too large for a float.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise WireError(f"{name} is {_shown(value)}; it is a number from {low:g} to {high:g}.")
    return float(value)


def _shown(value: Any) -> str:
    text = json.dumps(value) if isinstance(value, (str, int, float, type(None))) else type(value).__name__
    return text if len(text) <= 60 else f"{text[:60]}…"


def _listed(names: Any) -> str:
    shown = [name if len(name) <= 40 else f"{name[:40]}…" for name in sorted(names)]
    return ", ".join(shown[:6]) + (", …" if len(shown) > 6 else "") if shown else "none"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
