"""The run directory: what a run was asked, where, what it measured and wrote, and who may write into it.

runs/<date>-<student>-<n>/ holds config.yaml (resolved), overrides.txt, env.json, code.diff, metrics.jsonl, evals.jsonl,
rollouts/step-000012.jsonl, checkpoints/ and, after a failure, error.txt. It is never overwritten.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from opd.errors import RunDirectoryError, TrainingError
from opd.recipes import LoadedConfig
from opd.resolved import resolved_yaml

OWN_FILES = (
    "config.yaml",
    "overrides.txt",
    "env.json",
    "code.diff",
    "metrics.jsonl",
    "evals.jsonl",
    "error.txt",
    "report.html",
)
OWN_FOLDERS = ("rollouts", "checkpoints")


class RunDirectory:
    """One run on disk. Made by `create`, found by `open`; whoever writes into it holds its lock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.yaml"
        self.metrics_file = path / "metrics.jsonl"
        self.evals_file = path / "evals.jsonl"
        self.env_file = path / "env.json"
        self.error_file = path / "error.txt"
        self.rollouts = path / "rollouts"
        self.checkpoints = path / "checkpoints"
        self._lock: IO[str] | None = None

    @classmethod
    def create(cls, loaded: LoadedConfig, *, force: bool = False) -> RunDirectory:
        """Returns a new, locked run directory with config.yaml, overrides.txt, env.json and code.diff in it.

        `force` removes what an earlier run wrote under the same name, and nothing else. Raises RunDirectoryError.
        """
        run = cls(_new_folder(loaded, force))
        run.lock()
        if force:
            run._remove_own_files()
        from opd.env import environment, source_diff

        run.write_config(loaded)
        _write_aside(run.path / "overrides.txt", "".join(f"{text}\n" for text in loaded.overrides))
        _write_aside(run.env_file, json.dumps(environment(), indent=2) + "\n")
        if diff := source_diff():
            _write_aside(run.path / "code.diff", diff)
        return run

    @classmethod
    def open(cls, path: Path | str) -> RunDirectory:
        """Returns the run directory at `path`; raises RunDirectoryError where there is none."""
        run = cls(Path(path).expanduser())
        if not run.path.is_dir():
            close = ", ".join(str(other.path) for other in runs_in(run.path.parent)[:3])
            raise RunDirectoryError(
                f"There is no run {path}.",
                fix=f"the newest runs there are {close}" if close else "opd distill … starts one",
            )
        if not run.config_file.is_file():
            raise RunDirectoryError(
                f"{path} is not a run directory.",
                why="it has no config.yaml",
                fix="name a folder such as runs/2026-01-31-student-1",
            )
        return run

    def lock(self) -> None:
        """Takes the run for this process until it ends or `close`; raises RunDirectoryError when another one has it.

        The operating system drops the lock when its holder dies, however it dies.
        """
        import fcntl

        try:
            handle = (self.path / ".lock").open("a+", encoding="utf-8")
        except OSError as error:
            raise _cannot_write(self.path, error) from error
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            handle.seek(0)
            holder = handle.read().strip() or "unknown"
            handle.close()
            raise RunDirectoryError(
                f"Another process is writing the run {self.path}.",
                where=f"process {holder}",
                fix="wait for it, stop it with Ctrl-C, or use another name: --output runs/NAME",
            ) from None
        except OSError:
            pass  # A file system without locks: better unguarded than unusable.
        handle.truncate(0)
        handle.write(f"{os.getpid()}\n")
        handle.flush()
        self._lock = handle

    def close(self) -> None:
        """Gives the lock back."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def write_config(self, loaded: LoadedConfig) -> None:
        """Writes config.yaml: the resolved configuration with the origin of every value."""
        header = "# The resolved configuration of this run; `opd distill --resume` reads it.\n"
        _write_aside(self.config_file, header + resolved_yaml(loaded))

    def note_resumption(self, overrides: Iterable[str]) -> None:
        """Adds a resumption to overrides.txt, and to "resumed" in env.json the environment where it has changed."""
        from opd.env import environment

        when = datetime.datetime.now().isoformat(timespec="seconds")
        _append(self.path / "overrides.txt", "".join(f"{text}\n" for text in (f"# resumed {when}", *overrides)))

        here = environment()
        try:
            known = json.loads(self.env_file.read_text(encoding="utf-8"))
            last = known["resumed"][-1] if "resumed" in known else known
            same = _lasting(here) == _lasting(last)
        except (OSError, ValueError, TypeError, LookupError, AttributeError):
            known, same = {}, False  # Lost or damaged: what is known from here on is worth keeping all the same.
        if not same:
            everything = {**known, "resumed": [*known.get("resumed", []), {"at": when, **here}]}
            _write_aside(self.env_file, json.dumps(everything, indent=2) + "\n")

    def append_metrics(self, record: Mapping[str, Any]) -> None:
        """Appends one step to metrics.jsonl; numbers that JSON does not have become null."""
        _append(self.metrics_file, _json_line(record))

    def append_eval(self, record: Mapping[str, Any]) -> None:
        """Appends one held-out evaluation to evals.jsonl."""
        _append(self.evals_file, _json_line(record))

    def metrics(self) -> list[dict[str, Any]]:
        """Returns the steps in metrics.jsonl; a last line that was torn by a kill is left out."""
        return _read_lines(self.metrics_file)

    def evals(self) -> list[dict[str, Any]]:
        """Returns the evaluations in evals.jsonl, likewise."""
        return _read_lines(self.evals_file)

    def write_rollouts(self, step: int, records: Iterable[Mapping[str, Any]]) -> None:
        """Writes the rollouts of one step, one JSON line each, aside and renamed."""
        _write_aside(self.rollouts / f"step-{step:06d}.jsonl", "".join(_json_line(record) for record in records))

    def evaluation(self, step: int) -> dict[str, float] | None:
        """Returns the held-out evaluation of a step; None where evals.jsonl has none."""
        record = next((record for record in self.evals() if record.get("step") == step), None)
        if record is None:
            return None
        del record["step"]
        return {name: value for name, value in record.items() if not isinstance(value, Mapping)}

    def rewind(self, step: int) -> None:
        """Drops the metrics, evaluations and rollouts of every step after `step`, and lines torn by a kill."""
        for file in (self.metrics_file, self.evals_file):
            if file.exists():
                kept = [record for record in _read_lines(file) if record.get("step", 0) <= step]
                _write_aside(file, "".join(_json_line(record) for record in kept))
        for file in self.rollouts.glob("*"):
            number = re.fullmatch(r"step-(\d+)\.jsonl", file.name)
            if number is None or int(number[1]) > step:
                file.unlink()

    def record_error(self, traceback: str) -> None:
        """Keeps a traceback in error.txt, where that can be written: the disk may be what failed."""
        with suppress(TrainingError):
            _write_aside(self.error_file, traceback)

    def discard_if_unused(self) -> bool:
        """Removes a run that measured nothing and saved nothing, so that the same command can be given again."""
        used = self.metrics_file.exists() or self.evals_file.exists() or any(self.checkpoints.glob("*"))
        if used:
            return False
        self.close()
        self._remove_own_files()
        (self.path / ".lock").unlink(missing_ok=True)
        if not any(self.path.iterdir()):
            self.path.rmdir()
        return True

    def _remove_own_files(self) -> None:
        for name in OWN_FILES:
            (self.path / name).unlink(missing_ok=True)
        for name in OWN_FOLDERS:
            shutil.rmtree(self.path / name, ignore_errors=True)


def runs_in(folder: Path) -> list[RunDirectory]:
    """Returns the runs under `folder`, the one that was written to last first."""
    found = [RunDirectory(file.parent) for file in folder.glob("*/config.yaml")]
    return sorted(found, key=_last_written, reverse=True)


def _last_written(run: RunDirectory) -> float:
    files = (run.config_file, run.metrics_file, run.checkpoints)
    return max(file.stat().st_mtime for file in files if file.exists())


def _new_folder(loaded: LoadedConfig, force: bool) -> Path:
    """Returns a folder that was just made and is ours; raises RunDirectoryError."""
    settings = loaded.config.run
    parent = Path(settings.dir).expanduser()
    try:
        if settings.name is None:
            return _numbered_folder(parent, loaded.config.student.model)
        path = parent / settings.name
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            _may_replace(path, force)
        path.mkdir(parents=True, exist_ok=True)
        return path
    except OSError as error:
        raise RunDirectoryError(
            "The run directory cannot be made.", where=str(error.filename or parent), why=error.strerror or ""
        ) from error


def _numbered_folder(parent: Path, student: str) -> Path:
    today = datetime.date.today().isoformat()
    name = re.sub(r"[^\w.-]+", "-", Path(student).name).strip("-.").lower() or "student"
    parent.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        path = parent / f"{today}-{name}-{number}"
        try:
            path.mkdir()
            return path
        except FileExistsError:
            number += 1


def _may_replace(path: Path, force: bool) -> None:
    is_run = (path / "config.yaml").is_file()
    if not is_run:
        raise RunDirectoryError(
            f"{path} exists and is not a run directory.",
            why="--force removes only what a run wrote" if force else "a run is never written over other files",
            fix="use another name: --output runs/NAME",
        )
    if not force:
        raise RunDirectoryError(
            f"The run {path} exists.",
            why="a run is never overwritten",
            fix=f"go on with it: --resume {path}; use another name: --output runs/NAME or run.name=NAME; or remove it: --force",
        )


def _lasting(environment: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what of an environment can change a result; the free disk space cannot."""
    return {name: value for name, value in environment.items() if name not in ("at", "disk_free_gib")}


def _append(file: Path, text: str) -> None:
    try:
        with file.open("a", encoding="utf-8") as handle:
            handle.write(text)
    except OSError as error:
        raise _cannot_write(file, error) from error


def _cannot_write(path: Path, error: OSError) -> TrainingError:
    return TrainingError(
        "The run directory cannot be written.",
        where=str(path),
        why=error.strerror or str(error),
        fix="free some space or give it back its permissions, then go on with --resume",
    )


def _read_lines(file: Path) -> list[dict[str, Any]]:
    records = []
    if file.exists():
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(record, dict):
                records.append(record)
    return records


def _json_line(record: Mapping[str, Any]) -> str:
    return json.dumps(json_values(record), ensure_ascii=False, allow_nan=False) + "\n"


def json_values(value: Any) -> Any:
    """Returns the value with null for every number that JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: json_values(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_values(inner) for inner in value]
    return value


def _write_aside(file: Path, text: str) -> None:
    """Writes a file that is either there as a whole or not at all; raises TrainingError when the disk refuses."""
    aside = file.with_name(f".{file.name}.tmp")
    try:
        file.parent.mkdir(exist_ok=True)
        aside.write_text(text, encoding="utf-8")
        os.replace(aside, file)
    except OSError as error:
        raise _cannot_write(file, error) from error
