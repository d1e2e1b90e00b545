"""Rows out of data sets of the Hugging Face hub and of folders that `datasets` saved."""

from __future__ import annotations

import re
from pathlib import Path

from opd.config import DataSource
from opd.errors import DataError
from opd.sources import HUB, holds_default, split_revision
from opd.tables import KINDS, Rows, Table, first_line


def read_hub(source: DataSource) -> Table:
    """Returns the rows of an `hf://` source; raises DataError where it cannot be fetched."""
    import datasets

    path, in_path = split_revision(source.path)
    name, revision = path.removeprefix(HUB), source.revision or in_path
    where = f"{source.path}" + "".join(
        f",{key}={value}" for key, value in (("name", source.name), ("split", source.split)) if value
    )
    try:
        loaded = datasets.load_dataset(name, source.name, split=source.split, revision=revision)
    except Exception as error:
        raise DataError(
            "The data set could not be loaded from the hub.",
            where=where,
            why=first_line(error),
            fix="check its name, name= (configuration), split= and revision (HF_TOKEN for gated ones); offline, name a local file",
        ) from error
    return Table(Rows(loaded), lambda index: f"{where}, row {index + 1}")


def read_folder(path: Path, source: DataSource) -> Table:
    """Returns the rows of a folder that `save_to_disk` wrote; raises DataError where it is none."""
    import datasets

    if not any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):
        names = sorted(entry.name for entry in path.iterdir())
        usable = [name for name in names if name.lower().endswith(KINDS)]
        raise DataError(
            "The folder was not saved by datasets.",
            where=str(path),
            why=f"it holds {', '.join(names[:6]) or 'nothing'}{' …' if len(names) > 6 else ''}",
            fix=f"name a file in it, such as {path / usable[0]}" if usable else "name a folder that save_to_disk wrote",
        )
    try:
        loaded = datasets.load_from_disk(str(path))
    except Exception as error:
        raise DataError("The folder cannot be read.", where=str(path), why=first_line(error)) from error
    if isinstance(loaded, datasets.DatasetDict):
        name, start, stop = _slice_of(source.split)
        if name not in loaded:
            raise DataError(
                f"The data set has no split {source.split}.",
                where=str(path),
                why=f"it has {', '.join(loaded)}",
                fix=f"write split={next(iter(loaded), 'NAME')}",
            )
        loaded = loaded[name]
        if start is not None or stop is not None:
            loaded = loaded.select(range(*slice(start, stop).indices(len(loaded))))
    elif not holds_default(source, "split"):
        raise DataError(
            f"The data set has no split {source.split}.",
            where=str(path),
            why="it was saved without splits",
            fix="leave out split",
        )
    return Table(Rows(loaded), lambda index: f"{path}, row {index + 1}")


def _slice_of(split: str) -> tuple[str, int | None, int | None]:
    """Returns name, start and stop of `train[10:20]`; percentages are left to the hub's loader."""
    found = re.fullmatch(r"([^\[]+)\[(-?\d*):(-?\d*)\]", split)
    if not found:
        return split, None, None
    start, stop = (int(text) if text else None for text in found.groups()[1:])
    return found[1], start, stop
