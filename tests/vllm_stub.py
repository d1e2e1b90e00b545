"""A server that speaks as a GPU build of `vllm serve` 0.32 does on the routes that opd uses, with real scores.

Requests are checked and answered as in vllm/entrypoints/scale_out/token_in_token_out, .../openai/completion,
sampling_params.py, v1/engine/input_processor.py and v1/worker/gpu/sample/prompt_logprob.py.
"""

from __future__ import annotations

import io
from base64 import b64encode
from dataclasses import dataclass

import numpy
import torch
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

DISABLED = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."
V1_RUNNER = "prompt_logprob_token_ids requires the V2 model runner (VLLM_USE_V2_MODEL_RUNNER=1)."


class Refused(Exception):
    def __init__(self, message, parameter=None, value=None):
        details = [f"{name}={part}" for name, part in (("parameter", parameter), ("value", value)) if part is not None]
        super().__init__(f"{message} ({', '.join(details)})" if details else message)
        self.parameter = parameter


@dataclass
class VllmStub:
    """What the server was started with."""

    model: object
    """A transformers model in float32."""
    root: str
    name: str = "teach"
    max_model_len: int = 128
    max_logprobs: int = 24
    scale_out: bool = True
    v2_runner: bool = True
    raw_logits: bool = False
    api_key: str | None = None
    version: str = "0.32.0"

    @property
    def vocab_size(self):
        return self.model.config.vocab_size

    def app(self):
        routes = [
            Route("/v1/models", self.guarded(self.models)),
            Route("/version", lambda _: JSONResponse({"version": self.version})),
            Route("/inference/v1/generate", self.guarded(self.generate), methods=["POST"]),
            Route("/v1/completions", self.guarded(self.completions), methods=["POST"]),
        ]
        return Starlette(routes=routes)

    def guarded(self, handler):
        async def handle(request):
            if self.api_key and request.headers.get("authorization") != f"Bearer {self.api_key}":
                return JSONResponse({"error": "Unauthorized"}, 401)
            if request.method == "POST" and request.headers.get("content-type") != "application/json":
                return error(415, "Unsupported Media Type: Only 'application/json' is allowed", "UnsupportedMediaType")
            try:
                return await handler(request)
            except Refused as refused:
                return error(400, str(refused), "BadRequestError", refused.parameter)

        return handle

    async def models(self, _):
        card = {"id": self.name, "object": "model", "owned_by": "vllm", "root": self.root, "parent": None}
        return JSONResponse({"object": "list", "data": [card | {"max_model_len": self.max_model_len}]})

    async def generate(self, request):
        if not self.scale_out:
            return error(403, DISABLED, "PermissionDeniedError")
        body = await request.json()
        params = body["sampling_params"]
        rows, at_ids = self.scored(body["token_ids"], params)
        return JSONResponse(
            {
                "request_id": "generate-tokens-0",
                "model": self.name,
                "prompt_logprobs": rows,
                "prompt_token_id_logprobs": at_ids,
                "prompt_token_ids": None,
                "output_mode": "tokens",
                "choices": [{"index": 0, "finish_reason": "length", "token_ids": [0], "logprobs": None}],
            }
        )

    async def completions(self, request):
        body = await request.json()
        prompts = body["prompt"] if isinstance(body["prompt"][0], list) else [body["prompt"]]
        # The route has no prompt_logprob_token_ids, and leaves what it does not know aside.
        body.pop("prompt_logprob_token_ids", None)
        body.pop("prompt_logprob_start", None)
        choices = [
            {"index": i, "text": "", "finish_reason": "length", "prompt_logprobs": self.scored(prompt, body)[0]}
            for i, prompt in enumerate(prompts)
        ]
        return JSONResponse({"object": "text_completion", "model": self.name, "choices": choices})

    def scored(self, ids, params):
        self.check(ids, params)
        with torch.no_grad():
            logits = self.model(torch.tensor([ids])).logits[0, :-1].float()
        values = logits if self.raw_logits else logits.log_softmax(-1)
        rows = at_ids = None
        if (k := params.get("prompt_logprobs")) is not None:
            rows = [None, *(self.row(value, token, k) for value, token in zip(values, ids[1:], strict=True))]
        if (wanted := params.get("prompt_logprob_token_ids")) is not None:
            chosen = values[params.get("prompt_logprob_start") or 0 :].gather(1, torch.tensor(wanted))
            buffer = io.BytesIO()
            numpy.save(buffer, chosen.numpy())
            at_ids = b64encode(buffer.getvalue()).decode()
        return rows, at_ids

    def row(self, values, token, k):
        top = values.topk(k)
        rank = int((values >= values[token]).sum())
        row = {token: (float(values[token]), rank)}
        for place, (value, number) in enumerate(zip(top.values.tolist(), top.indices.tolist(), strict=True), 1):
            row.setdefault(number, (value, place))
        return {str(i): {"logprob": value, "rank": place, "decoded_token": None} for i, (value, place) in row.items()}

    def check(self, ids, params):
        if params["max_tokens"] < 1:
            raise Refused("max_tokens must be at least 1, got 0.", "max_tokens", 0)
        most = self.vocab_size if self.max_logprobs == -1 else self.max_logprobs
        if (k := params.get("prompt_logprobs") or 0) > most:
            message = f"Requested prompt logprobs of {k}, which is greater than max allowed: {most}"
            raise Refused(message, "prompt_logprobs", k)
        if beyond := [int(i) for i in params.get("logit_bias") or {} if int(i) >= self.vocab_size]:
            message = (
                f"token_id(s) {beyond} in logit_bias contain out-of-vocab token ids. Vocabulary size: {self.vocab_size}"
            )
            raise Refused(message, "logit_bias", beyond)
        if max(ids) >= self.vocab_size:
            raise Refused(f"Token id {max(ids)} is out of vocabulary")
        if len(ids) >= self.max_model_len:
            raise Refused(f"The decoder prompt (length {len(ids)}) plus the number of requested output tokens …")
        if (wanted := params.get("prompt_logprob_token_ids")) is None:
            return
        if len(wanted[0]) > most:
            message = f"Requested {len(wanted[0])} token ids per row in prompt_logprob_token_ids, which is greater than max allowed: {most}."
            raise Refused(message, "prompt_logprob_token_ids", len(wanted[0]))
        if not self.v2_runner:
            raise Refused(V1_RUNNER, "prompt_logprob_token_ids")
        rows = max(len(ids) - 1 - (params.get("prompt_logprob_start") or 0), 0)
        if len(wanted) != rows:
            message = f"prompt_logprob_token_ids has {len(wanted)} rows, but the prompt has {rows} scored rows (prompt_len - 1 - prompt_logprob_start)."
            raise Refused(message, "prompt_logprob_token_ids", len(wanted))


def error(status, message, kind, parameter=None):
    return JSONResponse({"error": {"message": message, "type": kind, "param": parameter, "code": status}}, status)
