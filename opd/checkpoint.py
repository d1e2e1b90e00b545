"""Checkpoints: written aside and renamed, so that a torn one is never chosen; tensors as safetensors, never pickle.

checkpoints/step-000010/{model.safetensors, optimizer.safetensors, state.json, manifest.json}; the manifest is written
last and has the size of every other file, a checksum of its ends and one of all its bytes.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import zlib
from collections.abc import Callable, Mapping
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
CHUNK_BYTES = 1 << 22
_NAME = re.compile(r"step-(\d+)")
_ASIDE, _REPLACED = ".saving-", ".replaced-"
_NO_ROOM = {errno.ENOSPC: "No space left", errno.EDQUOT: "quota exceeded"}

Parts = Mapping[str, Mapping[str, Tensor]]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint of which every byte is what was saved."""

    path: Path
    step: int
    state: dict[str, Any]
    """Everything beside the tensors that the run needs to go on."""

    def tensors(self, like: Parts | None = None) -> dict[str, dict[str, Tensor]]:
        """Returns part ("model", "optimizer") → name → tensor, on the CPU; mapped from the file, so read when they are used.

        `like`: what the student holds now; its model tensors have to have the same names and shapes. Raises CheckpointError.
        """
        try:
            found = {file.stem: load_file(file) for file in sorted(self.path.glob("*.safetensors"))}
        except (OSError, SafetensorError) as error:
            raise _unreadable(self.path, error) from error
        if like is not None:
            _require_same_model(self.path, found.get("model", {}), like["model"])
        return found


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
    _remove_others(folder, step, keep_last)
    return path


def checkpoints_in(folder: Path) -> list[Path]:
    """Returns the checkpoint folders by ascending step, torn ones included."""
    if not folder.is_dir():
        return []
    found = {path: _NAME.fullmatch(path.name) for path in folder.iterdir() if path.is_dir()}
    return sorted((path for path, name in found.items() if name), key=_step_of)


def newest_checkpoint(folder: Path, warn: Callable[[str], None]) -> Checkpoint | None:
    """Returns the newest checkpoint that is whole to the last byte, None where none was ever saved.

    `warn` is told of every newer one that is passed over. Raises CheckpointError where there are checkpoints and all are
    torn: whoever asked for one would otherwise begin again and write over them.
    """
    torn: dict[Path, str] = {}
    for path in reversed(checkpoints_in(folder)):
        if problem := what_is_torn(path, every_byte=True):
            torn[path] = problem
            continue
        checkpoint = _load(path)
        for other, reason in torn.items():
            warn(f"the checkpoint {other} is torn ({reason}); the one of step {checkpoint.step} is used instead")
        return checkpoint
    if not torn:
        return None
    raise CheckpointError(
        "The run has checkpoints, and none of them is whole.",
        where=str(folder),
        why="; ".join(f"{path.name}: {problem}" for path, problem in torn.items()),
        fix=f"put one back from a copy, or remove {folder}: the run can then start again from its first step",
    )


def follow_umask(folder: Path) -> None:
    """Gives the files of a folder that was just made the mode that the umask gives to others; safetensors' are 0600."""
    # The folder's mode tells the umask; to ask for it is to change it for all threads.
    mode = folder.stat().st_mode & 0o666
    for file in folder.iterdir():
        file.chmod(mode)


def what_is_torn(path: Path, *, every_byte: bool = False) -> str | None:
    """Returns what is wrong with a checkpoint's files, in words, or None when it is whole.

    Cheap whatever the size of the model, because only the ends of each file are read; with `every_byte` all of it is,
    which finds damage in the middle too, except in checkpoints from before opd kept that checksum.
    """
    try:
        listed = json.loads((path / MANIFEST).read_text())["files"]
        files = {
            str(name): (int(file["bytes"]), int(file["edges_crc32"]), file.get("crc32"))
            for name, file in listed.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is missing or unreadable"
    for name, (size, edges, whole) in files.items():
        file = path / name
        try:
            if not file.exists():
                return f"{name} is missing"
            if file.stat().st_size != size:
                return f"{name} has {file.stat().st_size:,} bytes instead of {size:,}"
            if _edges_crc32(file) != edges or (every_byte and whole is not None and _crc32(file) != whole):
                return f"{name} is not what was saved: its checksum differs"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
    return None


def _load(path: Path) -> Checkpoint:
    """Returns a checkpoint whose files have been verified; raises CheckpointError for one of another version of opd."""
    try:
        written = json.loads((path / MANIFEST).read_text())["format"]
        state = json.loads((path / STATE).read_text())
    except (OSError, ValueError, KeyError) as error:
        raise _unreadable(path, error) from error
    if written != FORMAT:
        raise CheckpointError(
            "The checkpoint was written by another version of opd.",
            where=str(path),
            why=f"it has format {written}, this version reads {FORMAT}",
            fix="resume with the version in the run's env.json",
        )
    return Checkpoint(path, int(state.pop("step")), state)


def _write(folder: Path, step: int, parts: Parts, state: Mapping[str, Any]) -> None:
    """Writes all files, the manifest last, and has them reach the disk."""
    for part, tensors in parts.items():
        save_file({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, folder / f"{part}.safetensors")
    (folder / STATE).write_text(json.dumps({"step": step, **state}))
    follow_umask(folder)
    files = {
        file.name: {"bytes": file.stat().st_size, "edges_crc32": _edges_crc32(file), "crc32": _crc32(file)}
        for file in sorted(folder.iterdir())
    }
    for file in folder.iterdir():
        _flush(file)
    (folder / MANIFEST).write_text(json.dumps({"format": FORMAT, "step": step, "files": files}, indent=2))
    _flush(folder / MANIFEST)
    _flush(folder)


def _step_of(path: Path) -> int:
    return int(path.name.partition("-")[2])


def _put_in_place(aside: Path, path: Path) -> None:
    """Renames a written checkpoint to its name; what had that name goes only then."""
    replaced = path.with_name(f"{_REPLACED}{path.name}")
    if path.exists():
        path.rename(replaced)
    aside.rename(path)
    _flush(path.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _remove_others(folder: Path, step: int, keep_last: int) -> None:
    """Keeps the newest `keep_last` whole checkpoints up to `step`; a torn one neither counts nor outlives them.

    A later one was found damaged, or the run would have gone on from it, and what it was saved of has been done anew.
    """
    found = checkpoints_in(folder)
    whole = [path for path in found if _step_of(path) <= step and what_is_torn(path) is None]
    if kept := whole[-keep_last:]:
        for path in found:
            if path not in kept:
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


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError("The checkpoint cannot be read.", where=str(path), why=str(error))


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


def _crc32(file: Path) -> int:
    """Returns the checksum of all of a file; about a second a gigabyte."""
    checksum = 0
    with file.open("rb") as handle:
        while chunk := handle.read(CHUNK_BYTES):
            checksum = zlib.crc32(chunk, checksum)
    return checksum


def _flush(path: Path) -> None:
    """Makes a file or a folder's entries survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
