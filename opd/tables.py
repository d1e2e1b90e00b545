"""Rows in memory or on the disk, whatever they were read from, and where each one stands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

KINDS = (".jsonl", ".jsonl.gz", ".json", ".csv", ".parquet")
"""Endings of the files that can be read."""
BATCH_ROWS = 1000
"""Rows of a data set on the disk that are decoded together."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows in the order of the file, and where each one stands."""

    rows: Sequence[dict[str, Any]]
    place: Callable[[int], str]
    """The place of row i, for people: file:line where there are lines."""


class Rows(Sequence[dict[str, Any]]):
    """A `datasets.Dataset` as a sequence of rows, which stay on the disk until they are drawn."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        return Rows(self.dataset.select(range(len(self))[index])) if isinstance(index, slice) else self.dataset[index]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.dataset)

    def pick(self, indices: Sequence[int]) -> Rows:
        """The rows at `indices`, in that order."""
        return Rows(self.dataset.select(indices))

    def narrowed(self, columns: Iterable[str]) -> Iterator[dict[str, Any]]:
        """Yields all rows with these columns only, where all are there: the others are not decoded."""
        wanted = set(columns)
        whole = not wanted <= set(self.dataset.column_names)
        # Row by row, datasets takes several times as long.
        for batch in (self.dataset if whole else self.dataset.select_columns(sorted(wanted))).iter(BATCH_ROWS):
            for values in zip(*batch.values(), strict=True):
                yield dict(zip(batch, values, strict=True))


def columns_of(rows: Sequence[dict[str, Any]], columns: Iterable[str]) -> Iterable[dict[str, Any]]:
    """Yields all rows, holding at least `columns` where they have them."""
    return rows.narrowed(columns) if isinstance(rows, Rows) else rows


def pick(rows: Sequence[dict[str, Any]], indices: Sequence[int]) -> Sequence[dict[str, Any]]:
    """Returns the rows at `indices`, in that order."""
    return rows.pick(indices) if isinstance(rows, Rows) else [rows[index] for index in indices]


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


def first_line(error: Exception) -> str:
    """Returns the first line of the error's message, or its type where it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
