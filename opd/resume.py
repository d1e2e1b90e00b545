"""Going on with a run: which one, from which checkpoint, and what may be different this time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from opd.errors import ConfigError, OpdError, RunDirectoryError
from opd.recipes import LoadedConfig, load_config
from opd.resolved import origin_on_line
from opd.runs import RunDirectory, runs_in

MAY_CHANGE = (
    "train.steps",
    "checkpoint.*",
    "eval.every",
    "run.trackers",
    "run.save_rollouts",
    "student.gradient_checkpointing",
    "teacher.batch_tokens",
    "teacher.urls",
    "teacher.window",
    "teacher.timeout",
    "teacher.max_wait",
    "teacher.hedge_after",
    "train.microbatch_tokens",
    "loss.chunk_tokens",
    "vllm.gpu_memory_utilization",
    "vllm.cpu_kv_cache_gib",
    "vllm.max_concurrent",
    "vllm.sleep",
)
"""Keys of a resumed run that may be given anew: how long it goes on, who is told, how much memory it takes, where the teacher is."""


def resolve_resume(name: str, folder: Path) -> RunDirectory:
    """Returns the run named on `--resume`; `auto` is the newest run under `folder` that has a checkpoint."""
    if name != "auto":
        return RunDirectory.open(name)
    from opd.checkpoint import checkpoints_in

    for run in runs_in(folder):
        # Torn ones count: passing over the run on their account would go on with another one unasked.
        if checkpoints_in(run.checkpoints):
            return run
    raise RunDirectoryError(
        f"There is no run with a checkpoint under {folder}.",
        fix="name one: --resume RUN; a run that was stopped before its first checkpoint starts again from its first step",
    )


def load_resumed(run: RunDirectory, overrides: Sequence[str], flags: Mapping[str, Any]) -> LoadedConfig:
    """Returns the run's own configuration with the few changes that leave it the same run; raises ConfigError."""
    before = load_config([run.config_file])
    after = load_config([run.config_file], overrides, flags)
    old, new = _leaves(before.config.model_dump()), _leaves(after.config.model_dump())
    changed = [key for key in old.keys() | new.keys() if old.get(key) != new.get(key)]
    refused = sorted(key for key in changed if not any(fnmatch(key, pattern) for pattern in MAY_CHANGE))
    problems: list[OpdError] = [
        ConfigError(
            f"{key} cannot change when a run is resumed.",
            where=f"it is {old.get(key)} in {run.config_file}, {new.get(key)} on the command line",
            why="what was done so far would belong to another run",
            fix=f"leave it out, or start a new run; these may change: {', '.join(MAY_CHANGE)}",
        )
        for key in refused
    ]
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise ConfigError(f"{len(problems)} settings cannot change when a run is resumed.", problems=problems)
    warnings = after.warnings
    if "train.steps" in changed and after.config.train.schedule != "constant":
        warnings += (
            f"train.steps changed under schedule: {after.config.train.schedule}; the learning rate bends there.",
        )
    lines = run.config_file.read_text(encoding="utf-8").splitlines()
    provenance = {key: _first_origin(origin, run, lines) for key, origin in after.provenance.items()}
    return replace(after, provenance=provenance, warnings=warnings)


def _first_origin(origin: str, run: RunDirectory, lines: Sequence[str]) -> str:
    """Returns where a value came from when the run began, for one that config.yaml hands on."""
    if origin == "default":
        return origin
    file, _, number = origin.rpartition(":")
    if file != str(run.config_file):
        return f"{origin} (on resume)"
    return origin_on_line(lines[int(number) - 1]) or origin


def _leaves(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= _leaves(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found
