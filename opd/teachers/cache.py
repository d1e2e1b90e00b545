"""`teacher.cache`: what the teacher has said is kept, and not asked for again."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from opd.identity import Identity
from opd.recorded import Recorded, key_of
from opd.teachers import Scorer, query_of
from opd.types import Rollout, ScoredRollout, ScoreRequest


class CachedScorer:
    """A teacher whose scores are read from disk where they are there, and written there where they are not."""

    def __init__(self, teacher: Scorer, folder: Path, identity: Identity, vocab_size: int) -> None:
        """`identity`: what the scores depend on besides what is asked; another teacher's are never found."""
        self.teacher = teacher
        self.capabilities = teacher.capabilities
        self.recorded = Recorded(folder)
        self.identity = identity
        self.vocab_size = vocab_size

    @property
    def busy_seconds(self) -> float:
        """Time in which the teacher itself had rollouts to score."""
        return self.teacher.busy_seconds

    def score(self, rollouts: Iterable[Rollout], request: ScoreRequest) -> Iterator[ScoredRollout]:
        """Yields every rollout with its scores; those of a call that ends early are kept too."""
        found: deque[ScoredRollout] = deque()
        keys: dict[tuple[int, int], str] = {}
        fresh: dict[str, ScoredRollout] = {}

        def missing() -> Iterator[Rollout]:
            for rollout in rollouts:
                key = key_of(query_of(rollout, request, self.vocab_size), self.identity)
                if key in self.recorded:
                    found.append(replace(self.recorded.read(key), rollout=rollout))
                else:
                    keys[rollout.key] = key
                    yield rollout

        try:
            for scored in self.teacher.score(missing(), request):
                kept = replace(scored, recorded_as=keys[scored.rollout.key])
                fresh[kept.recorded_as] = kept
                yield kept
                while found:
                    yield found.popleft()
            yield from found
        finally:
            if fresh:
                self.recorded.write(fresh, request, self.vocab_size)
