"""`opd distill --replay RUN`: the recorded rollouts and scores of a run instead of prompts, sampler and teacher."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opd.config import Config
from opd.errors import ConfigError, DataError
from opd.recorded import Recorded
from opd.runs import RunDirectory
from opd.samplers import Capabilities, SamplingParams
from opd.teachers import TeacherCapabilities, request_for
from opd.types import Prompt, Rollout, ScoredRollout, ScoreRequest


@dataclass(frozen=True, slots=True)
class _Line:
    """What the run's own record says of a rollout; its tensors are in the score cache."""

    key: str
    index: int
    sample: int
    sampler_logprobs: list[float]
    finish_reason: Any
    policy_version: int


class Recording:
    """The scored rollouts of a run, step by step."""

    def __init__(self, run: RunDirectory, caches: Sequence[Path]) -> None:
        """Raises DataError where the run recorded no scores, or its cache no longer has them."""
        self.run = run
        self.caches = [Recorded(folder) for folder in caches if folder.is_dir()]
        self.steps = [_lines_of(file) for file in sorted(run.rollouts.glob("step-*.jsonl"))]
        missing = sum(self._cache_of(line.key) is None for lines in self.steps for line in lines)
        if not self.steps or missing:
            raise DataError(
                "The run has no recorded scores to replay."
                if not self.steps
                else f"The scores of {missing} of the run's rollouts are not there.",
                where=str(run.path),
                why=f"they are looked for in {', '.join(map(str, caches)) or 'no folder'} (teacher.cache)",
                fix="replay a run that had teacher.cache=DIR and run.save_rollouts=true, with the folder still in place",
            )

    @property
    def vocab_size(self) -> int:
        """The vocabulary that the scores are over."""
        return self._of(self.steps[0][0]).vocab_size(self.steps[0][0].key)

    def request(self, step: int) -> ScoreRequest:
        """What the teacher was asked in a step (from 0)."""
        line = self.steps[step][0]
        return self._of(line).request(line.key)

    def scored(self, line: _Line) -> ScoredRollout:
        """A scored rollout as it was in this run: equal completions of other samples, or runs, share their scores."""
        item = self._of(line).read(line.key)
        rollout = replace(
            item.rollout,
            prompt=replace(item.rollout.prompt, index=line.index),
            sample=line.sample,
            logprobs=torch.tensor(line.sampler_logprobs),
            finish_reason=line.finish_reason,
            policy_version=line.policy_version,
        )
        return replace(item, rollout=rollout)

    def _cache_of(self, key: str) -> Recorded | None:
        return next((cache for cache in self.caches if key in cache), None)

    def _of(self, line: _Line) -> Recorded:
        cache = self._cache_of(line.key)
        assert cache is not None
        return cache


def open_recording(config: Config) -> Recording:
    """Returns what `run.replay` names; raises what Recording raises, and ConfigError where the loss needs other scores."""
    assert config.run.replay is not None
    run = RunDirectory.open(config.run.replay)
    recording = Recording(run, [Path(t.cache) for t in config.all_teachers if t.cache is not None])
    if config.train.steps > len(recording.steps):
        raise ConfigError(
            f"The run recorded {len(recording.steps)} steps, fewer than train.steps={config.train.steps}.",
            where=str(run.path),
            fix=f"use train.steps={len(recording.steps)} or less",
        )
    asked, wanted = recording.request(0), request_for(config.loss, 0)
    differing = [name for name in ("kind", "k", "support_of") if getattr(asked, name) != getattr(wanted, name)]
    if wanted.kind != "topk":
        differing = [name for name in differing if name == "kind"]
    # Hidden states are divided by the temperature in the loss; other scores were made at one.
    if wanted.kind != "full" and asked.temperature != wanted.temperature:
        differing.append("temperature")
    if differing:
        raise ConfigError(
            "The recorded scores are not those that this loss needs.",
            where=str(run.path),
            why="; ".join(
                f"{name}: recorded {getattr(asked, name)}, needed {getattr(wanted, name)}" for name in differing
            ),
            fix="keep loss.support, loss.topk.k, loss.topk.of and loss.temperature as they were in that run",
        )
    return recording


class ReplayedPrompts:
    """The prompts of the recorded steps, a step at a time."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.dropped = 0
        self.epoch = 0
        self._step = 0

    def take(self, count: int) -> list[Prompt]:
        """Returns the prompts of the next recorded step, however many they are."""
        lines = self.recording.steps[self._step]
        self._step += 1
        found = {line.index: self.recording.scored(line).rollout.prompt for line in lines}
        return list(found.values())

    def state_dict(self) -> dict[str, Any]:
        """Returns the place in the recording."""
        return {"step": self._step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes to a place."""
        self._step = state["step"]


class ReplayedSampler:
    """Gives the rollouts that were written then."""

    name = "replay"
    capabilities = Capabilities(topk_when_truncated=True, shares_weights=True, sleeps=False, context_length=None)

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self._lines: dict[int, list[_Line]] = {}
        for lines in recording.steps:
            for line in lines:
                self._lines.setdefault(line.index, []).append(line)

    def generate(self, prompts: Sequence[Prompt], params: SamplingParams, seed: int) -> Iterator[Rollout]:
        """Yields the recorded rollouts of the prompts."""
        for prompt in prompts:
            yield from (self.recording.scored(line).rollout for line in self._lines[prompt.index])

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """There is nothing that writes."""

    def sleep(self) -> None:
        """There is no memory to give back."""

    def wake(self) -> None:
        """See sleep."""

    def close(self) -> None:
        """See sleep."""


class ReplayedTeacher:
    """Gives the scores that were given then."""

    capabilities = TeacherCapabilities(gather=True, max_topk=None, hidden=True, temperature=True, context_length=None)
    busy_seconds = 0.0

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self._lines = {(line.index, line.sample): line for lines in recording.steps for line in lines}

    def score(self, rollouts: Iterable[Rollout], request: ScoreRequest) -> Iterator[ScoredRollout]:
        """Yields every rollout with its recorded scores."""
        for rollout in rollouts:
            yield replace(self.recording.scored(self._lines[rollout.key]), rollout=rollout)


def _lines_of(file: Path) -> list[_Line]:
    """The rollouts of one step; raises DataError where they were recorded without scores."""
    lines = []
    for number, text in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            record = json.loads(text)
            lines.append(
                _Line(
                    record["recorded_as"],
                    record["prompt_index"],
                    record["sample"],
                    record["sampler_logprobs"],
                    record["finish_reason"],
                    record["policy_version"],
                )
            )
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                "A rollout has no recorded scores.",
                where=f"{file}:{number}",
                why=f"it has no {error.args[0]}" if isinstance(error, KeyError) else "the line is damaged",
                fix="replay a run that had teacher.cache=DIR from its first step",
            ) from error
    return lines
