"""The prompts: rows checked before anything else is loaded, and an endless stream of them that resumes exactly.

Every order is a function of the seed: the shuffle of (seed, source, epoch), the choice between sources of how many
prompts each has given so far, the held-out rows of the seed alone.
"""

from __future__ import annotations

import hashlib
import json
import random
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from opd.config import DataSettings, DataSource
from opd.errors import ConfigError, DataError
from opd.readers import is_stream, read
from opd.sources import STDIN, nearest_names, parse_source, split_revision
from opd.tables import Table, columns_of, kind_of, pick
from opd.types import Prompt

if TYPE_CHECKING:
    from opd.chat import PromptRenderer

__all__ = ["LoadedData", "LoadedSource", "PromptStream", "heldout_prompts", "load_sources", "parse_source"]

USUAL_COLUMNS = ("question", "problem", "instruction", "messages", "query", "input", "text")
"""What data sets call the prompt, for the hint when the column is missing."""
MESSAGE_FORM = 'every message is an object such as {"role": "user", "content": "How many legs has a spider?"}'
CACHED_PROMPTS = 4096
"""Rendered prompts that a source remembers, so that small data sets are tokenised once."""


@dataclass(frozen=True, slots=True)
class LoadedSource:
    """The rows of one source, each with a prompt that is text or chat messages."""

    settings: DataSource
    rows: Sequence[dict[str, Any]]
    places: Sequence[int]
    """Number of each row in the source as it was read."""
    digests: array[int]
    """Hash of each row's prompt; equal prompts have equal ones, in this process only."""
    table: Table

    def place(self, index: int) -> str:
        """Where row `index` stands: file and line, or data set and row."""
        return self.table.place(self.places[index])

    def pick(self, indices: Sequence[int]) -> LoadedSource:
        """Returns the source with these rows only."""
        places = [self.places[index] for index in indices]
        digests = array("q", (self.digests[index] for index in indices))
        return LoadedSource(self.settings, pick(self.rows, indices), places, digests, self.table)


@dataclass(frozen=True, slots=True)
class LoadedData:
    """All sources of a run."""

    sources: list[LoadedSource]
    """Of training prompts."""
    heldout: list[LoadedSource] = field(default_factory=list)
    """Of held-out prompts, where the configuration names some."""


def load_sources(settings: DataSettings) -> LoadedData:
    """Returns every row of every source, each of them checked; needs no tokenizer.

    Raises DataError for what is missing, malformed, empty, or neither a text nor chat messages.
    """
    named = [*settings.train, *settings.heldout]
    streams = [source.path for source in named if source.path == STDIN or is_stream(source)]
    if repeated := [path for path in streams if streams.count(path) > 1]:
        name = "Standard input" if repeated[0] == STDIN else repeated[0]
        raise ConfigError(f"{name} can be read once only.", where="data", fix=f"name {repeated[0]} in one source only")
    return LoadedData([_load(source) for source in settings.train], [_load(source) for source in settings.heldout])


def heldout_prompts(
    data: LoadedData, renderer: PromptRenderer, settings: DataSettings, count: int, seed: int
) -> tuple[list[Prompt], LoadedData]:
    """Returns up to `count` held-out prompts, and the data without them.

    They come from `data.heldout`; where it is empty, distinct prompts are set aside from the training sources, at most
    half of each, and every row with such a prompt leaves the training data. Over-long ones are passed over or cut as
    `data.overlong` says. Raises DataError where all are too long.
    """
    if count == 0:
        return [], data
    sources = data.heldout or data.sources
    views = [_View(source, renderer, settings) for source in sources]
    pool = [(number, index) for number, source in enumerate(sources) for index in range(len(source.rows))]
    random.Random(f"{seed} heldout").shuffle(pool)
    prompts: list[Prompt] = []
    chosen: set[int] = set()
    distinct = [set(source.digests) for source in sources]
    room = [count if data.heldout else len(digests) // 2 for digests in distinct]
    for number, index in pool:
        digest = sources[number].digests[index]
        holders = [holder for holder, digests in enumerate(distinct) if digest in digests]
        if digest in chosen or any(room[holder] == 0 for holder in holders):
            continue
        prompt = views[number].prompt(index, len(prompts))
        if prompt is None:
            continue
        prompts.append(prompt)
        chosen.add(digest)
        for holder in holders:
            room[holder] -= 1
        if len(prompts) == count:
            break
    if not prompts and any(view.overlong for view in views):
        raise min(views, key=lambda view: min(view.overlong.values(), default=1 << 62)).all_overlong()
    if data.heldout or not prompts:
        return prompts, data
    kept = [[i for i, digest in enumerate(source.digests) if digest not in chosen] for source in data.sources]
    return prompts, LoadedData([source.pick(indices) for source, indices in zip(data.sources, kept, strict=True)])


class PromptStream:
    """The endless stream of training prompts.

    Each source is walked in an order of its own for every epoch; the next prompt comes from the source that is
    furthest behind its weight. Raises DataError at construction for a row that does not fit the prompt settings, so
    that no run dies of it halfway.
    """

    def __init__(self, data: LoadedData, renderer: PromptRenderer, settings: DataSettings, seed: int) -> None:
        if not data.sources:
            raise DataError("There are no training prompts.", where="data.train", fix="name a source with --data")
        self._digests = [_check_rows(source, renderer) for source in data.sources]
        self.seed = seed
        self.shuffle = settings.shuffle
        self.sources = data.sources
        self.views = [_View(source, renderer, settings) for source in data.sources]
        self.dropped = 0
        """Draws left out so far because the prompt was too long."""
        self._index = 0
        self._taken = [0] * len(data.sources)
        self._position = [0] * len(data.sources)
        self._orders: dict[int, tuple[int, Sequence[int]]] = {}

    @property
    def epoch(self) -> int:
        """Whole passes over the data so far: those of the source that had fewest."""
        return min(p // len(source.rows) for p, source in zip(self._position, self.sources, strict=True))

    def take(self, count: int) -> list[Prompt]:
        """Returns the next `count` prompts; raises DataError where a source has none that fits the limit."""
        return [self._next() for _ in range(count)]

    def state_dict(self) -> dict[str, Any]:
        """Returns the place in the stream, as JSON can hold it."""
        return {
            "index": self._index,
            "dropped": self.dropped,
            "taken": list(self._taken),
            "position": list(self._position),
            "rows": [len(source.rows) for source in self.sources],
            "digests": list(self._digests),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes to the place of `state`; raises DataError where the data is not what it was."""
        rows = [len(source.rows) for source in self.sources]
        # Checkpoints from before opd kept digests have none.
        digests = state.get("digests", self._digests)
        if (state["rows"], digests) != (rows, self._digests):
            why = f"it had {state['rows']} training rows (one number a source), now it has {rows}"
            raise DataError(
                "The data has changed since the checkpoint.",
                where=", ".join(source.settings.path for source in self.sources),
                why=why if state["rows"] != rows else "it has as many training rows as then, but with other texts",
                fix="put the data back as it was, or begin a new run",
            )
        self._index, self.dropped = state["index"], state["dropped"]
        self._taken, self._position = list(state["taken"]), list(state["position"])

    def _next(self) -> Prompt:
        weights = [source.settings.weight for source in self.sources]
        number = min(range(len(weights)), key=lambda i: ((self._taken[i] + 0.5) / weights[i], i))
        prompt = next(filter(None, self._draws(number)))
        self._taken[number] += 1
        self._index += 1
        return prompt

    def _draws(self, number: int) -> Iterator[Prompt | None]:
        """The next rows of a source, None for each that is too long."""
        view, size = self.views[number], len(self.sources[number].rows)
        while len(view.overlong) < size:
            row = self._row(number)
            self._position[number] += 1
            prompt = view.prompt(row, self._index)
            self.dropped += prompt is None
            yield prompt
        raise view.all_overlong()

    def _row(self, number: int) -> int:
        size = len(self.sources[number].rows)
        epoch, offset = divmod(self._position[number], size)
        if not self.shuffle:
            return offset
        if self._orders.get(number, (None,))[0] != epoch:
            order = list(range(size))
            random.Random(f"{self.seed} {number} {epoch}").shuffle(order)
            self._orders[number] = (epoch, array("q", order))
        return self._orders[number][1][offset]


class _View:
    """The rows of a source as prompts, tokenised when they are drawn."""

    def __init__(self, source: LoadedSource, renderer: PromptRenderer, settings: DataSettings) -> None:
        self.source = source
        self.limit = settings.max_prompt_tokens
        self.truncate = settings.overlong == "truncate_left"
        self.renderer = renderer
        self.overlong: dict[int, int] = {}
        """Row → tokens, for the rows met so far that are left out."""
        self._ids = lru_cache(CACHED_PROMPTS)(self._render)

    def prompt(self, row: int, index: int) -> Prompt | None:
        """Returns row `row` as the `index`-th prompt, None where it is too long."""
        if row in self.overlong:
            return None
        student_ids, teacher_ids = self._ids(row)
        length = max(len(student_ids), len(teacher_ids))
        if length > self.limit:
            if not self.truncate:
                self.overlong[row] = length
                return None
            student_ids, teacher_ids = student_ids[-self.limit :], teacher_ids[-self.limit :]
        return Prompt(index, student_ids, teacher_ids, self.source.rows[row])

    def all_overlong(self) -> DataError:
        shortest = min(self.overlong, key=self.overlong.__getitem__)
        return DataError(
            f"All {len(self.overlong)} prompts are longer than {self.limit} tokens.",
            where=f"{self.source.settings.path}, data.max_prompt_tokens={self.limit}",
            why=f"the shortest ({self.source.place(shortest)}) has {self.overlong[shortest]}",
            fix=f"data.max_prompt_tokens={self.overlong[shortest]} or more, or data.overlong=truncate_left",
        )

    def _render(self, row: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        try:
            return self.renderer.render(self.source.rows[row], self.source.settings.prompt)
        except DataError as error:
            error.where = error.where or self.source.place(row)
            raise


def _load(source: DataSource) -> LoadedSource:
    table = read(source)
    if len(table.rows) == 0:
        raise DataError("The data set is empty.", where=split_revision(source.path)[0], fix="name one with rows")
    digests = array("q")
    for index, row in enumerate(columns_of(table.rows, [source.prompt])):
        try:
            prompt = _checked_prompt(row, source.prompt)
        except DataError as error:
            error.where = f"{table.place(index)}, column {source.prompt}"
            raise
        digests.append(hash(prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True, default=str)))
    return LoadedSource(source, table.rows, range(len(table.rows)), digests, table)


def _check_rows(source: LoadedSource, renderer: PromptRenderer) -> str:
    """Returns a digest of all that the prompts are made of, the same in every process; raises DataError for a row that does not fit."""
    column = source.settings.prompt
    columns = sorted({column, *renderer.columns})
    digest = hashlib.blake2b(digest_size=16)
    for index, row in enumerate(columns_of(source.rows, columns)):
        try:
            renderer.check(row, column)
        except DataError as error:
            error.where = source.place(index)
            raise
        digest.update(json.dumps([row.get(name) for name in columns], sort_keys=True, default=str).encode())
    return digest.hexdigest()


def _checked_prompt(row: dict[str, Any], column: str) -> str | list[dict[str, Any]]:
    """Returns the prompt of a row; raises DataError, without the place, where there is none that can be used."""
    if column not in row:
        close = nearest_names(column, row) or [name for name in USUAL_COLUMNS if name in row]
        raise DataError(
            f"There is no column {column}.",
            why=f"the row has {', '.join(map(str, row)) or 'no columns'}",
            fix=f"did you mean prompt={close[0]}?" if close else "name the prompt's column with prompt=COLUMN",
        )
    prompt = row[column]
    if isinstance(prompt, str):
        if not prompt.strip():
            raise DataError("The prompt is empty.", fix="remove the row or give it a prompt")
        return prompt
    if not isinstance(prompt, list):
        raise DataError(
            f"The prompt is {kind_of(prompt)}.",
            fix="a prompt is a text or a list of chat messages; name another column with prompt=COLUMN",
        )
    if not prompt:
        raise DataError("The list of chat messages is empty.", fix="remove the row or give it a message")
    for number, message in enumerate(prompt, start=1):
        if not isinstance(message, dict):
            raise DataError(f"Message {number} is {kind_of(message)}, not an object.", fix=MESSAGE_FORM)
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                has = f"its {key} is {kind_of(message[key])}" if key in message else f"it has {', '.join(message)}"
                raise DataError(f"Message {number} has no {key} that is a text.", why=has, fix=MESSAGE_FORM)
    if not any(message["content"].strip() for message in prompt):
        raise DataError("No chat message holds any text.", fix="remove the row or give it a message")
    return prompt
