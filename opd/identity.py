"""Whether the models of a resumed run are those it was begun with, told without reading them."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path

from opd.errors import PreflightError
from opd.models import WEIGHT_PATTERNS

SAMPLES, SAMPLE_BYTES = 64, 1 << 16

Identity = dict[str, str]
"""What is compared (the name of a file, the revision, a server's fingerprint) → its value."""


def identity_of(model: str, revision: str | None) -> Identity:
    """Returns the checksums of a local folder's configuration and of samples of its weights; of a hub name the revision."""
    folder = Path(model)
    if not folder.is_dir():
        return {"revision": str(revision)}
    files = [folder / "config.json", *(file for pattern in WEIGHT_PATTERNS for file in folder.glob(pattern))]
    return {file.name: _sampled(file) for file in sorted(files)}


def require_same_models(before: Mapping[str, Identity], now: Mapping[str, Identity], names: Mapping[str, str]) -> None:
    """Raises PreflightError where a model ("student", "teacher") is another one; one that is not known was not kept.

    `names`: what the user calls each.
    """
    for role, known in before.items():
        changed = sorted(key for key in known.keys() | now[role].keys() if known.get(key) != now[role].get(key))
        if changed:
            raise PreflightError(
                f"The {role} is not the one that the run was begun with.",
                where=names[role],
                why=f"changed since the checkpoint: {', '.join(changed)}",
                fix="put the model back as it was and resume, or begin a new run with this one",
            )


def _sampled(file: Path) -> str:
    """Returns size and checksum of evenly spaced parts of a file, both ends among them: a few MiB, however large it is."""
    size = file.stat().st_size
    checksum = 0
    with file.open("rb") as handle:
        for number in range(SAMPLES):
            handle.seek(max(0, size - SAMPLE_BYTES) * number // (SAMPLES - 1))
            checksum = zlib.crc32(handle.read(SAMPLE_BYTES), checksum)
    return f"{size} bytes, crc32 {checksum:08x}"
