"""Rows out of files, folders, the hub and standard input. Every error names the file and the line."""

from __future__ import annotations

import csv
import gzip
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from opd.config import DataSource
from opd.errors import DataError
from opd.sources import HUB, STDIN, nearest_names, split_revision

KINDS = (".jsonl", ".jsonl.gz", ".json", ".csv", ".parquet")


@dataclass(frozen=True, slots=True)
class Table:
    """Rows in the order of the file, and where each one stands."""

    rows: Sequence[dict[str, Any]]
    place: Callable[[int], str]
    """The place of row i, for people: file:line where there are lines."""


def read(source: DataSource) -> Table:
    """Returns all rows of `source`; raises DataError where it is missing, malformed or cannot be fetched."""
    if source.path.startswith(HUB):
        return _hub(source)
    path = Path(source.path)
    foreign = [key for key in ("name", "split", "revision") if key in source.model_fields_set]
    if foreign and not (path.is_dir() and foreign == ["split"]):
        raise DataError(
            f"{foreign[0]} belongs to data sets of the Hugging Face hub.",
            where=source.path,
            fix=f"leave out {foreign[0]}",
        )
    if source.path == STDIN:
        return _standard_input()
    if path.is_dir():
        return _folder(path, source)
    if not path.is_file():
        raise _missing(path)
    name = path.name.lower()
    kind = next((kind for kind in KINDS if name.endswith(kind)), None)
    try:
        match kind:
            case ".jsonl" | ".jsonl.gz":
                with gzip.open(path, "rb") if kind.endswith("gz") else path.open("rb") as file:
                    return _jsonl(file, source.path)
            case ".json":
                return _json(path)
            case ".csv":
                return _csv(path)
            case ".parquet":
                return _parquet(path)
    except (OSError, EOFError) as error:
        raise DataError("The file cannot be read.", where=source.path, why=str(error)) from error
    raise DataError(
        "The kind of the file is unknown.",
        where=source.path,
        why=f"{path.suffix or 'no ending'} is none of {', '.join(KINDS)}",
        fix="rename it to what it is, or convert it to .jsonl: one JSON object a line",
    )


def _missing(path: Path) -> DataError:
    what, where = "The file does not exist.", str(path)
    folder = path.parent
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", where) and not where.lower().endswith(KINDS):
        return DataError(what, where=where, fix=f"for a data set of the Hugging Face hub write {HUB}{where}")
    if not folder.is_dir():
        return DataError(what, where=where, why=f"there is no folder {folder} either", fix="check the path")
    names = [entry.name for entry in folder.iterdir() if entry.is_dir() or entry.name.lower().endswith(KINDS)]
    close = nearest_names(path.name, names)
    return DataError(what, where=where, fix=f"did you mean {' or '.join(close)}?" if close else "check the path")


def _standard_input() -> Table:
    if sys.stdin is None or sys.stdin.isatty():
        raise DataError(
            "Nothing is piped into standard input.",
            where="data source -",
            fix="pipe JSONL: opd distill … --data - < prompts.jsonl",
        )
    return _jsonl(sys.stdin.buffer, "standard input")


def _jsonl(file: IO[bytes] | gzip.GzipFile, name: str) -> Table:
    rows: list[dict[str, Any]] = []
    lines: list[int] = []
    for number, raw in enumerate(file, start=1):
        row = _json_line(raw, f"{name}:{number}")
        if row is not None:
            rows.append(row)
            lines.append(number)
    return Table(rows, lambda index: f"{name}:{lines[index]}")


def _json_line(raw: bytes, where: str) -> dict[str, Any] | None:
    """The row of one line, None for a blank one."""
    try:
        text = raw.decode("utf-8-sig").strip()
        if not text:
            return None
        value = json.loads(text)
    except UnicodeDecodeError as error:
        raise _not_utf8(error, where) from error
    except json.JSONDecodeError as error:
        raise DataError(
            "The line is not JSON.",
            where=where,
            why=f"{error.msg} at column {error.colno}: {_around(text, error.pos)}",
            fix='every line is one JSON object, such as {"prompt": "How many legs has a spider?"}',
        ) from error
    except RecursionError as error:
        raise DataError("The line is nested too deeply.", where=where) from error
    if not isinstance(value, dict):
        raise DataError(
            f"The line is {kind_of(value)}, not an object.",
            where=where,
            fix='every line is one JSON object, such as {"prompt": "How many legs has a spider?"}',
        )
    return value


def _json(path: Path) -> Table:
    try:
        text = path.read_bytes().decode("utf-8-sig")
        value = json.loads(text)
    except UnicodeDecodeError as error:
        raise _not_utf8(error, str(path)) from error
    except json.JSONDecodeError as error:
        lines = error.msg == "Extra data"
        raise DataError(
            "The file is not JSON.",
            where=f"{path}:{error.lineno}",
            why=f"{error.msg} at column {error.colno}: {_around(text, error.pos)}",
            fix="it looks like one object a line: name it .jsonl" if lines else "a .json file is a list of objects",
        ) from error
    if isinstance(value, dict):
        lists = [name for name, inner in value.items() if isinstance(inner, list)]
        hint = f"; take the list out of {lists[0]}" if len(lists) == 1 else ""
        raise DataError(
            "The file is one object, not a list of rows.",
            where=str(path),
            fix=f"a .json file is a list of objects{hint}",
        )
    if not isinstance(value, list):
        raise DataError(f"The file is {kind_of(value)}, not a list of rows.", where=str(path))
    for index, row in enumerate(value):
        if not isinstance(row, dict):
            raise DataError(
                f"The row is {kind_of(row)}, not an object.",
                where=f"{path}, row {index + 1}",
                fix='a .json file is a list of objects, such as [{"prompt": "How many legs has a spider?"}]',
            )
    return Table(value, lambda index: f"{path}, row {index + 1}")


def _csv(path: Path) -> Table:
    rows: list[dict[str, Any]] = []
    lines: list[int] = []
    csv.field_size_limit(2**31 - 1)
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        try:
            for row in reader:
                if None in row or None in row.values():
                    raise DataError(
                        f"The row has {'more' if None in row else 'fewer'} fields than the header.",
                        where=f"{path}:{reader.line_num}",
                        why=f"the header is {', '.join(reader.fieldnames or [])}",
                        fix='put fields with a comma or a line break in double quotes: "a, b"',
                    )
                rows.append(row)
                lines.append(reader.line_num)
        except csv.Error as error:
            raise DataError("The file is not CSV.", where=f"{path}:{reader.line_num}", why=str(error)) from error
        except UnicodeDecodeError as error:
            raise _not_utf8(error, str(path)) from error
    return Table(rows, lambda index: f"{path}:{lines[index]}")


def _parquet(path: Path) -> Table:
    import pyarrow
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except pyarrow.ArrowException as error:
        raise DataError("The file is not Parquet.", where=str(path), why=str(error).splitlines()[0]) from error
    return Table(rows, lambda index: f"{path}, row {index + 1}")


def _folder(path: Path, source: DataSource) -> Table:
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
        raise DataError("The folder cannot be read.", where=str(path), why=_first_line(error)) from error
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
    return Table(_Rows(loaded), lambda index: f"{path}, row {index + 1}")


def _slice_of(split: str) -> tuple[str, int | None, int | None]:
    """Returns name, start and stop of `train[10:20]`; percentages are left to the hub's loader."""
    found = re.fullmatch(r"([^\[]+)\[(-?\d*):(-?\d*)\]", split)
    if not found:
        return split, None, None
    start, stop = (int(text) if text else None for text in found.groups()[1:])
    return found[1], start, stop


def _hub(source: DataSource) -> Table:
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
            why=_first_line(error),
            fix="check its name, name= (configuration), split= and revision (HF_TOKEN for gated ones); offline, name a local file",
        ) from error
    return Table(_Rows(loaded), lambda index: f"{where}, row {index + 1}")


class _Rows(Sequence[dict[str, Any]]):
    """A `datasets.Dataset` as a sequence of rows, which stay on the disk until they are drawn."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        return _Rows(self.dataset.select(range(len(self))[index])) if isinstance(index, slice) else self.dataset[index]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.dataset)

    def pick(self, indices: Sequence[int]) -> _Rows:
        return _Rows(self.dataset.select(indices))

    def narrowed(self, column: str) -> Iterable[dict[str, Any]]:
        """All rows with one column only: the others are not decoded."""
        return iter(self.dataset.select_columns([column]) if column in self.dataset.column_names else self.dataset)


def column_of(rows: Sequence[dict[str, Any]], column: str) -> Iterable[dict[str, Any]]:
    """Yields all rows, holding at least `column` where they have it."""
    return rows.narrowed(column) if isinstance(rows, _Rows) else rows


def pick(rows: Sequence[dict[str, Any]], indices: Sequence[int]) -> Sequence[dict[str, Any]]:
    """Returns the rows at `indices`, in that order."""
    return rows.pick(indices) if isinstance(rows, _Rows) else [rows[index] for index in indices]


def _not_utf8(error: UnicodeDecodeError, where: str) -> DataError:
    return DataError(
        "The text is not UTF-8.",
        where=where,
        why=f"byte {error.start}: {error.reason}",
        fix="convert it: iconv -t utf-8",
    )


def _around(text: str, position: int) -> str:
    start, stop = max(0, position - 20), position + 20
    return f"{'…' if start else ''}{text[start:stop]}{'…' if stop < len(text) else ''}"


def kind_of(value: Any) -> str:
    """Returns what a JSON value is, in words for an error."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a text"
        case list():
            return "a list"
        case dict():
            return "an object"
    return f"of type {type(value).__name__}"


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
