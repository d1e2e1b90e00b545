"""Rows out of files, folders, the hub and standard input. Every error names the file and the line."""

from __future__ import annotations

import csv
import gzip
import json
import re
import sys
import zlib
from pathlib import Path
from typing import IO, Any

from opd.config import DataSource
from opd.errors import DataError
from opd.hub import read_folder, read_hub
from opd.sources import HUB, STDIN, holds_default, nearest_names
from opd.tables import KINDS, Table, first_line, kind_of

GZIP = b"\x1f\x8b"
"""How every gzip file begins."""


class _RepeatedKey(ValueError):
    """Its message is the key."""


def read(source: DataSource) -> Table:
    """Returns all rows of `source`; raises DataError where it is missing, malformed or cannot be fetched."""
    if source.path.startswith(HUB):
        return read_hub(source)
    path = Path(source.path)
    try:
        is_folder, is_file = path.is_dir(), path.is_file()
    except OSError as error:
        raise DataError("The path cannot be read.", where=source.path[:100], why=first_line(error)) from error
    foreign = [key for key in ("name", "split", "revision") if not holds_default(source, key)]
    if foreign and not (is_folder and foreign == ["split"]):
        raise DataError(
            f"{foreign[0]} belongs to data sets of the Hugging Face hub.",
            where=source.path,
            fix=f"leave out {foreign[0]}",
        )
    if source.path == STDIN:
        return _standard_input()
    if is_folder:
        return read_folder(path, source)
    if is_stream(source):
        with path.open("rb") as stream:
            return _jsonl(stream, source.path)
    if not is_file:
        raise _no_file(path) if path.exists() else _missing(path)
    name = path.name.lower()
    _refuse_gzip(path, name)
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
    except gzip.BadGzipFile as error:
        raise DataError(
            "The file is not compressed with gzip.", where=source.path, fix="name it .jsonl, if it is JSONL as it is"
        ) from error
    except (OSError, EOFError, zlib.error) as error:
        raise DataError("The file cannot be read.", where=source.path, why=first_line(error)) from error
    raise DataError(
        "The kind of the file is unknown.",
        where=source.path,
        why=f"{path.suffix or 'no ending'} is none of {', '.join(KINDS)}",
        fix="rename it to what it is, or convert it to .jsonl: one JSON object a line",
    )


def is_stream(source: DataSource) -> bool:
    """Whether the source is a named pipe or a `<(command)` of the shell: JSONL that can be read once."""
    try:
        return Path(source.path).is_fifo()
    except OSError:
        return False  # `read` says what is wrong with the path


def _no_file(path: Path) -> DataError:
    what = "a device" if path.is_char_device() or path.is_block_device() else "a socket"
    return DataError(
        f"The path is {what}, not a file.",
        where=str(path),
        fix=f"name a file ({', '.join(KINDS)}), or pipe JSONL into --data -",
    )


def _refuse_gzip(path: Path, name: str) -> None:
    """Raises DataError for a compressed file under the name of a plain one."""
    if name.endswith(".gz"):
        return
    try:
        with path.open("rb") as file:
            compressed = file.read(len(GZIP)) == GZIP
    except OSError as error:
        raise DataError("The file cannot be read.", where=str(path), why=first_line(error)) from error
    if compressed:
        raise DataError(
            "The file is compressed with gzip.",
            where=str(path),
            fix=f"name it {path.name}.gz" if name.endswith(".jsonl") else f"unpack it: gunzip < {path.name} > new-file",
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
        value = json.loads(text, object_pairs_hook=_once_each)
        _refuse_half_characters(value, text, where)
    except UnicodeDecodeError as error:
        raise _not_utf8(error, where) from error
    except json.JSONDecodeError as error:
        raise DataError(
            "The line is not JSON.",
            where=where,
            why=f"{error.msg} at column {error.colno}: {_around(text, error.pos)}",
            fix='every line is one JSON object, such as {"prompt": "How many legs has a spider?"}',
        ) from error
    except (RecursionError, ValueError) as error:
        raise _unreadable(error, where) from error
    if not isinstance(value, dict):
        raise DataError(
            f"The line is {kind_of(value)}, not an object.",
            where=where,
            fix='every line is one JSON object, such as {"prompt": "How many legs has a spider?"}',
        )
    return value


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object with these keys and values; raises _RepeatedKey where one of the values would be lost."""
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        raise _RepeatedKey(next(name for name in names if names.count(name) > 1))
    return value


def _unreadable(error: Exception, where: str) -> DataError:
    """Returns the error for JSON that is well-formed and cannot be used."""
    if isinstance(error, _RepeatedKey):
        return DataError(
            f"The key {error} appears twice in one object.",
            where=where,
            why="one of the two values would be lost",
            fix="remove or rename one of them",
        )
    if isinstance(error, RecursionError):
        return DataError(
            "The JSON is nested too deeply.",
            where=where,
            fix="leave out the column that holds it, or write it as a text",
        )
    return DataError(
        "The JSON cannot be read.",
        where=where,
        why=first_line(error),
        fix="write a number of that many digits as a text",
    )


def _refuse_half_characters(value: Any, text: str, where: str) -> None:
    """Raises DataError for an escape such as \\ud83d without its other half: JSON allows it, no tokenizer takes it."""
    if "\\ud" not in text.lower():
        return
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        code = f"\\u{ord(error.object[error.start]):04x}"
        raise DataError(
            f"The text holds {code}, which is half a character.",
            where=where,
            fix="write the file anew as UTF-8; an emoji that was cut in two often leaves such halves",
        ) from error


def _json(path: Path) -> Table:
    try:
        text = path.read_bytes().decode("utf-8-sig")
        value = json.loads(text, object_pairs_hook=_once_each)
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
    except (RecursionError, ValueError) as error:
        raise _unreadable(error, str(path)) from error
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
        _refuse_half_characters(row, text, f"{path}, row {index + 1}")
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


def _not_utf8(error: UnicodeDecodeError, where: str) -> DataError:
    return DataError(
        "The text is not UTF-8.",
        where=where,
        why=f"byte {error.start}: {error.reason}",
        fix="convert it: iconv -t utf-8",
    )


def _around(text: str, position: int) -> str:
    """What is written there, on one line."""
    start, stop = max(0, position - 20), position + 20
    shown = "".join(character if character.isprintable() else " " for character in text[start:stop])
    return f"{'…' if start else ''}{shown}{'…' if stop < len(text) else ''}"
