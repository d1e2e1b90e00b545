"""Checkpoints: written aside and renamed, so that a torn one is never chosen; tensors as safetensors, never pickle.

checkpoints/step-000010/{model.safetensors, optimizer.safetensors, state.json, manifest.json}; the manifest is written
last and has the size and a checksum of every other file.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from opd.errors import CheckpointError

FORMAT = 1
MANIFEST, STATE = "manifest.json", "state.json"
EDGE_BYTES = 1 << 20
_NAME = re.compile(r"step-(\d+)")
_ASIDE, _REPLACED = ".saving-", ".replaced-"
_NO_ROOM = {errno.ENOSPC: "No space left", errno.EDQUOT: "quota exceeded"}

Parts = Mapping[str, Mapping[str, Tensor]]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint as it was saved."""

    path: Path
    step: int
    tensors: dict[str, dict[str, Tensor]]
    """Part ("model", "optimizer") → name → tensor, on the CPU; mapped from the file, so read when they are used."""
    state: dict[str, Any]
    """Everything else that the run needs to go on."""


def save_checkpoint(folder: Path, step: int, parts: Parts, state: Mapping[str, Any], *, keep_last: int) -> Path:
    """Writes a checkpoint and returns its folder; older ones than the last `keep_last` are removed afterwards.

    Whatever goes wrong, the checkpoints that were there stay, and what was written of this one is removed. Raises
    CheckpointError, which names free and needed space when the disk is full.
    """
    path, aside = folder / f"step-{step:06d}", folder / f"{_ASIDE}{step:06d}"
    needed = sum(tensor.nbytes for tensors in parts.values() for tensor in tensors.values())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in (*folder.glob(f"{_ASIDE}*"), *folder.glob(f"{_REPLACED}*")):
            shutil.rmtree(leftover, ignore_errors=True)
        if (free := shutil.disk_usage(folder).free) < needed:
            raise _no_room(folder, step, needed, free)
        aside.mkdir()
        _write(aside, step, parts, state)
        _put_in_place(aside, path)
    except (OSError, SafetensorError) as error:
        # Rust's input and output errors have no errno, only its text.
        if any(getattr(error, "errno", None) == code or text in str(error) for code, text in _NO_ROOM.items()):
            shutil.rmtree(aside, ignore_errors=True)
            raise _no_room(folder, step, needed, shutil.disk_usage(folder).free) from error
        raise CheckpointError(
            f"The checkpoint of step {step} could not be written.",
            where=str(folder),
            why=str(error),
            fix="earlier checkpoints are untouched; make the folder writable and resume the run",
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    _remove_older(folder, keep_last)
    return path


def checkpoints_in(folder: Path) -> list[Path]:
    """Returns the checkpoint folders by ascending step, torn ones included."""
    if not folder.is_dir():
        return []
    found = {path: _NAME.fullmatch(path.name) for path in folder.iterdir() if path.is_dir()}
    return sorted((path for path, name in found.items() if name), key=lambda path: int(path.name.partition("-")[2]))


def latest_checkpoint(folder: Path) -> Path | None:
    """Returns the newest checkpoint that is whole, or None."""
    return next((path for path in reversed(checkpoints_in(folder)) if what_is_torn(path) is None), None)


def what_is_torn(path: Path) -> str | None:
    """Returns what is wrong with a checkpoint's files, in words, or None when it is whole.

    Cheap whatever the size of the model: only the ends of each file are read.
    """
    try:
        listed = json.loads((path / MANIFEST).read_text())["files"]
        files = {str(name): (int(file["bytes"]), int(file["edges_crc32"])) for name, file in listed.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is missing or unreadable"
    for name, (size, checksum) in files.items():
        file = path / name
        if not file.exists():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size:,} bytes instead of {size:,}"
        if _edges_crc32(file) != checksum:
            return f"{name} is not what was saved: its checksum differs"
    return None


def load_checkpoint(path: Path, *, like: Parts | None = None) -> Checkpoint:
    """Returns a checkpoint. `like`: what the student holds now; its model tensors have to have the same names and shapes.

    Raises CheckpointError for a torn checkpoint and for one of another model.
    """
    if problem := what_is_torn(path):
        raise CheckpointError(
            "The checkpoint is torn.",
            where=str(path),
            why=problem,
            fix="resume from the run directory, which chooses the newest whole checkpoint",
        )
    try:
        written = json.loads((path / MANIFEST).read_text())["format"]
        tensors = {file.stem: load_file(file) for file in sorted(path.glob("*.safetensors"))}
        state = json.loads((path / STATE).read_text())
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise CheckpointError("The checkpoint cannot be read.", where=str(path), why=str(error)) from error
    if written != FORMAT:
        raise CheckpointError(
            "The checkpoint was written by another version of opd.",
            where=str(path),
            why=f"it has format {written}, this version reads {FORMAT}",
            fix="resume with the version in the run's env.json",
        )
    if like is not None:
        _require_same_model(path, tensors.get("model", {}), like["model"])
    return Checkpoint(path, int(state.pop("step")), tensors, state)


def _write(folder: Path, step: int, parts: Parts, state: Mapping[str, Any]) -> None:
    """Writes all files, the manifest last, and has them reach the disk."""
    for part, tensors in parts.items():
        save_file({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, folder / f"{part}.safetensors")
    (folder / STATE).write_text(json.dumps({"step": step, **state}))
    files = {
        file.name: {"bytes": file.stat().st_size, "edges_crc32": _edges_crc32(file)}
        for file in sorted(folder.iterdir())
    }
    for file in folder.iterdir():
        _flush(file)
    (folder / MANIFEST).write_text(json.dumps({"format": FORMAT, "step": step, "files": files}, indent=2))
    _flush(folder / MANIFEST)
    _flush(folder)


def _put_in_place(aside: Path, path: Path) -> None:
    """Renames a written checkpoint to its name; what had that name goes only then."""
    replaced = path.with_name(f"{_REPLACED}{path.name}")
    if path.exists():
        path.rename(replaced)
    aside.rename(path)
    _flush(path.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _remove_older(folder: Path, keep_last: int) -> None:
    """Keeps the newest `keep_last` whole checkpoints; a torn one neither counts nor outlives them."""
    found = checkpoints_in(folder)
    whole = [path for path in found if what_is_torn(path) is None]
    kept = whole[-keep_last:]
    for path in found[: found.index(kept[0])] if kept else []:
        shutil.rmtree(path, ignore_errors=True)


def _require_same_model(path: Path, saved: Mapping[str, Tensor], current: Mapping[str, Tensor]) -> None:
    for name in [*current, *saved]:
        mine, theirs = current.get(name), saved.get(name)
        if mine is not None and theirs is not None and mine.shape == theirs.shape:
            continue
        shapes = [f"{list(t.shape)}" if t is not None else "absent" for t in (theirs, mine)]
        raise CheckpointError(
            "The checkpoint belongs to another model.",
            where=f"{path}, tensor {name}",
            why=f"it is {shapes[0]} in the checkpoint and {shapes[1]} in the student",
            fix="use the student.model (and student.lora) that the run was started with",
        )


def _no_room(folder: Path, step: int, needed: int, free: int) -> CheckpointError:
    return CheckpointError(
        f"There is no room for the checkpoint of step {step}.",
        where=str(folder),
        why=f"it takes {_size(needed)} and {_size(free)} are free",
        fix="earlier checkpoints are untouched; free some space (or lower checkpoint.keep_last) and resume the run",
    )


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 // 10 else f"{count / 2**20:.2f} MiB"


def _edges_crc32(file: Path) -> int:
    """Returns the checksum of a file's first and last MiB: the header of a safetensors file, and its end."""
    with file.open("rb") as handle:
        checksum = zlib.crc32(handle.read(EDGE_BYTES))
        handle.seek(max(EDGE_BYTES, file.stat().st_size - EDGE_BYTES))
        return zlib.crc32(handle.read(), checksum)


def _flush(path: Path) -> None:
    """Makes a file or a folder's entries survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
