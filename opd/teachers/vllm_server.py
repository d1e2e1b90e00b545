"""A teacher behind stock `vllm serve`s: sampled and top-K scores from prompt_logprobs, no full vocabulary."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import httpx

from opd.config import TeacherSettings
from opd.errors import PreflightError, TrainingError
from opd.models import load_tokenizer
from opd.teachers import TeacherCapabilities, TeacherCard, query_of
from opd.teachers.flow import Scored, stream
from opd.teachers.replicas import Replica, Replicas
from opd.teachers.vllm_probe import Served, probe
from opd.teachers.vllm_wire import COMPLETIONS, AnswerError, decode_queries, encode_queries
from opd.types import Rollout, ScoredRollout, ScoreRequest
from opd.vocab import highest_id


class VllmTeacher:
    """Sends rollouts to the servers as they are finished, and gives each back once, with its scores."""

    served: Served
    """What the first server that answered said of itself; the others say the same."""

    def __init__(self, settings: TeacherSettings, warn: Callable[[str], None]) -> None:
        """Probes the servers; raises PreflightError where none answers, one is no vLLM, or they differ."""
        self.settings = settings
        self.warn = warn
        self.busy_seconds = 0.0
        self.vocab_size = 0
        """The vocabulary that teacher and student share; set once the tokenizers have been compared."""
        self.replicas = Replicas(
            settings,
            check=self._check,
            info_path="/v1/models",
            media_type="application/json",
            start="vllm serve MODEL --max-logprobs 32",
            warn=warn,
        )
        self.replicas.run(self.replicas.connect())
        # The generate route takes one sequence a request.
        self.request_tokens = settings.batch_tokens if self.served.route == COMPLETIONS else 1
        self.capabilities = TeacherCapabilities(
            gather=self.served.given_ids,
            max_topk=self.served.max_logprobs,
            hidden=False,
            temperature=False,
            # One token is generated after what is scored.
            context_length=self.served.max_model_len - 1,
            topk_flag="--max-logprobs",
            no_gather_because=self.served.refusal,
        )

    def card(self) -> TeacherCard:
        """Returns what the servers say of their model, with the tokenizer that the settings or the servers name."""
        source = self.settings.model or self.served.root
        try:
            tokenizer = load_tokenizer(source, self.settings.revision, "teacher")
        except PreflightError as error:
            raise PreflightError(
                "The tokenizer of the vLLM server's model cannot be loaded.",
                where=f"teacher.model={source}"
                if self.settings.model
                else f"{source}, as {self.settings.name} names it",
                why=error.why or error.what,
                fix="say teacher.model=FOLDER_OR_HUB_NAME of the served model; vllm serve hands out no tokenizer",
            ) from error
        vocab_size = self.served.vocab_size or highest_id(tokenizer) + 1
        name = f"{self.served.model} at {self.settings.name}"
        # All that a vllm serve tells: a folder whose weights were changed keeps its name.
        identity = {"model": self.served.model, "root": self.served.root}
        return TeacherCard(name, tokenizer, vocab_size, self.capabilities.context_length, identity, self._sharing)

    def _sharing(self, vocab_size: int) -> VllmTeacher:
        self.vocab_size = vocab_size
        if self.served.vocab_size not in (None, vocab_size):
            self.warn(
                f"The vLLM server's probabilities run over {self.served.vocab_size} ids, of which teacher and student "
                f"share {vocab_size}; what it gives to the others (padding, as a rule next to nothing) counts as tail."
            )
        return self

    def score(self, rollouts: Iterable[Rollout], request: ScoreRequest) -> Iterator[ScoredRollout]:
        """Yields every rollout with its scores; requests are under way while `rollouts` are still being written.

        The entropy is absent: it takes the whole vocabulary. Raises TrainingError and TeacherUnavailable.
        """
        yield from (scored for scored, _ in stream(self, rollouts, request))

    async def ask(self, rollouts: list[Rollout], request: ScoreRequest) -> list[Scored]:
        """Returns the scores of some rollouts, from one request; vLLM does not say which weights gave them."""
        queries = [query_of(rollout, request, self.vocab_size) for rollout in rollouts]
        route = self.served.route
        body = await asyncio.to_thread(encode_queries, route, self.served.model, queries)
        tokens = sum(query.length for query in queries)
        answer = await self.replicas.request("POST", route, content=body, tokens=tokens)
        try:
            scores = await asyncio.to_thread(decode_queries, route, answer, queries)
        except AnswerError as error:
            raise TrainingError(
                "The vLLM server's answer cannot be read.",
                where=f"{self.settings.name}{route}, vLLM {self.served.version}",
                why=str(error),
                fix="use another version of vLLM, or opd teacher serve",
            ) from error
        return [(ScoredRollout(rollout, own), 0) for rollout, own in zip(rollouts, scores, strict=True)]

    async def _check(self, replica: Replica, response: httpx.Response) -> None:
        """Raises PreflightError where a server is no vLLM, or not one like the first."""
        served = await probe(replica.url, response, partial(self.replicas.fetch, replica))
        if not hasattr(self, "served"):
            self.served = served
        if differing := self.served.differences(served):
            raise PreflightError(
                f"The vLLM servers differ in {', '.join(differing)}.",
                where=f"{replica.url} serves {served.model}, {self.served.model} was there first",
                why=", ".join(
                    f"{name}: {getattr(served, name)} and {getattr(self.served, name)}" for name in differing
                ),
                fix="start every one with the same model and flags",
            )
