"""What a user watches: one row a step on a terminal, plain `name=value` lines where the output is piped."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from opd.config import Config

Record = Mapping[str, Any]

_BARS = "▁▂▃▄▅▆▇█"
_TREND_STEPS = 8
_HEADER_EVERY = 25
RATE = "rate"
"""The form of a rate: whole, with two decimals below 10."""


@dataclass(frozen=True, slots=True)
class _Column:
    title: str
    width: int
    text: Callable[[Record], str]
    rank: int
    """Columns of the highest rank are left out first where the terminal is narrow."""


def _number(name: str, form: str) -> Callable[[Record], str]:
    return lambda record: written(record[name], form) if record.get(name) is not None else "–"


def _entropies(record: Record) -> str:
    return f"{_number('student_entropy', '.2f')(record)} / {_number('teacher_entropy', '.2f')(record)}"


def _split(record: Record) -> str:
    return " ".join(_number(f"{stage}_seconds", ".1f")(record) for stage in ("rollout", "score", "update", "sync"))


def _percent(name: str) -> Callable[[Record], str]:
    return lambda record: f"{100 * record[name]:.0f}%" if record.get(name) is not None else "–"


_COLUMNS = (
    _Column("overlap", 7, _number("overlap", ".3f"), 0),
    _Column("entropy s / t", 13, _entropies, 3),
    _Column("length", 6, _number("completion_length_tokens", ".0f"), 4),
    _Column("cut", 4, _percent("truncated_fraction"), 5),
    _Column("tok/s", 6, _number("tokens_per_second", RATE), 1),
    _Column("roll score upd sync s", 21, _split, 2),
    _Column("mismatch", 8, _number("engine_mismatch_nats", ".4f"), 2),
)

_LINE = (
    ("reverse_kl", ".4f"),
    ("reverse_kl_sampled", ".4f"),
    ("loss", ".4f"),
    ("overlap", ".3f"),
    ("student_entropy", ".3f"),
    ("teacher_entropy", ".3f"),
    ("completion_length_tokens", ".1f"),
    ("truncated_fraction", ".3f"),
    ("tokens_per_second", RATE),
    ("rollout_seconds", ".2f"),
    ("score_seconds", ".2f"),
    ("update_seconds", ".2f"),
    ("sync_seconds", ".2f"),
    ("engine_mismatch_nats", ".5f"),
)
"""What a plain line holds, in this order, under the names of metrics.jsonl."""

_OUTCOME = (
    ("reverse KL, nats/token", ("reverse_kl", "reverse_kl_sampled"), None, ".3f"),
    ("reverse KL on the teacher's texts", ("teacher_text_reverse_kl",), None, ".3f"),
    ("overlap of the top {k} tokens", ("overlap",), None, ".3f"),
    ("entropy, nats/token", ("student_entropy",), "teacher_entropy", ".3f"),
    ("mean length, tokens", ("completion_length_tokens",), "teacher_completion_length_tokens", ".1f"),
)
"""Rows of the last panel: title, names of the student's value (the first that is there), name of the teacher's. {k} is `diagnostics.k`."""


class Display:
    """Progress of one run, on the console it is given; `live` keeps a line with the phase and the time left at the bottom."""

    def __init__(self, console: Console, *, total_steps: int, diagnostics_k: int, live: bool) -> None:
        self._console = console
        self._total_steps = total_steps
        self._diagnostics_k = diagnostics_k
        self._live: Live | None = None
        self._spinner = Spinner("dots", text="starting")
        self._rows = 0
        self._history: deque[float] = deque(maxlen=_TREND_STEPS)
        self._step_seconds: deque[float] = deque(maxlen=10)
        if live:
            self._live = Live(self._spinner, console=console, transient=True, refresh_per_second=4)
            self._live.start()

    def phase(self, text: str) -> None:
        """Says what is going on now, such as "loading the teacher"."""
        if self._live:
            self._spinner.update(text=Text(f"{text} …", style="dim"))
        else:
            self._line(f"{text} …")

    def note(self, text: str) -> None:
        """Says what stays to be read, such as where a resumed run goes on."""
        self._line(text)

    def warn(self, text: str) -> None:
        """Says what the user should know without stopping."""
        self._console.print(Text(f"warning: {text}", style="yellow"), soft_wrap=True)

    def step(self, record: Record) -> None:
        """Shows the metrics of one step."""
        record = with_throughput(record)
        kl = record.get("reverse_kl", record.get("reverse_kl_sampled"))
        if kl is not None:
            self._history.append(kl)
        if record.get("step_seconds"):
            self._step_seconds.append(record["step_seconds"])
        left = self._time_left(record["step"])
        if self._live:
            self._row(record, kl, left)
            self._spinner.update(text=Text(f"step {record['step']} of {self._total_steps}, {left} left", style="dim"))
        else:
            values = [f"{name}={written(record[name], form)}" for name, form in _LINE if record.get(name) is not None]
            self._line(f"step {record['step']}/{self._total_steps} {' '.join(values)} eta={left}")

    def summary(
        self, before: Record | None, after: Record | None, paths: Mapping[str, str], next_commands: list[str]
    ) -> None:
        """Shows the evaluation before and after, where everything is, and what to type next."""
        self.close()
        outcome = outcome_rows(before, after, self._diagnostics_k)
        if not self._console.is_terminal:
            for title, *values in outcome:
                self._line(
                    f"{title}: "
                    + ", ".join(
                        f"{name} {value}"
                        for name, value in zip(("before", "after", "change", "teacher"), values, strict=True)
                        if value
                    )
                )
            for name, path in paths.items():
                self._line(f"{name}: {path}")
            for command in next_commands:
                self._line(f"next: {command}")
            return
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column("on held-out prompts")
        for title in ("before", "after", "change", "teacher"):
            table.add_column(title, justify="right")
        for row in outcome:
            table.add_row(*row)
        where = Table.grid(padding=(0, 2, 0, 0))
        for name, path in paths.items():
            where.add_row(Text(name, style="dim"), Text(path, overflow="fold"))
        for command in next_commands:
            where.add_row(Text("next", style="dim"), Text(command, style="bold", overflow="fold"))
        parts = [table, Text(), where] if outcome else [where]
        self._console.print(Panel(Group(*parts), title="done", title_align="left", expand=False))

    def close(self) -> None:
        """Ends the live line; may be called twice."""
        if self._live:
            self._live.stop()
            self._live = None

    def _line(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, highlight=False, markup=False)

    def _row(self, record: Record, kl: float | None, left: str) -> None:
        digits = len(str(self._total_steps))
        exact = record.get("reverse_kl") is not None
        columns = self._fitting(2 * digits + 1 + 2 + 11 + 2 + _TREND_STEPS + 2 + 8)
        if self._rows % _HEADER_EVERY == 0:
            titles = [
                f"{'step':>{2 * digits + 1}}",
                f"{'reverse KL' if exact else 'KL sampled':>11}",
                " " * _TREND_STEPS,
            ]
            titles += [f"{column.title:>{column.width}}" for column in columns] + [f"{'ETA':>8}"]
            self._console.print(Text("  ".join(titles), style="bold"), no_wrap=True, crop=True)
        self._rows += 1
        shown = written(kl, ".4f") if kl is not None else "–"
        cells = [
            f"{record['step']:>{digits}}/{self._total_steps}",
            f"{shown:>11}",
            f"{sparkline(self._history):>{_TREND_STEPS}}",
        ]
        cells += [f"{column.text(record):>{column.width}}" for column in columns] + [f"{left:>8}"]
        self._console.print(Text("  ".join(cells)), no_wrap=True, crop=True)

    def _fitting(self, taken: int) -> list[_Column]:
        """Returns the columns that the terminal has room for beside the `taken` characters."""
        kept: list[_Column] = []
        for column in sorted(_COLUMNS, key=lambda column: column.rank):
            if taken + column.width + 2 <= self._console.width:
                kept.append(column)
                taken += column.width + 2
        return [column for column in _COLUMNS if column in kept]

    def _time_left(self, step: int) -> str:
        if not self._step_seconds:
            return "–"
        seconds = (self._total_steps - step) * sum(self._step_seconds) / len(self._step_seconds)
        return duration(seconds)


def open_display(config: Config, *, json_output: bool) -> Display:
    """Returns the display for this process: on stderr when stdout is to hold one JSON document; NO_COLOR is respected."""
    console = Console(stderr=json_output, highlight=False)
    return Display(
        console,
        total_steps=config.train.steps,
        diagnostics_k=config.diagnostics.k,
        live=console.is_terminal and not console.is_dumb_terminal,
    )


def with_throughput(record: Record) -> Record:
    """Returns the record with tokens_per_second, which follows from two others."""
    if record.get("tokens_per_second") is None and record.get("step_seconds") and record.get("tokens") is not None:
        return {**record, "tokens_per_second": record["tokens"] / record["step_seconds"]}
    return record


def outcome_rows(
    before: Record | None, after: Record | None, diagnostics_k: int
) -> list[tuple[str, str, str, str, str]]:
    """Returns title, before, after, change and the teacher's value for everything that was measured."""
    if before is None and after is None:
        return []
    first, last = before or {}, after or {}
    rows = []
    for title, names, teacher, form in _OUTCOME:
        name = next((name for name in names if first.get(name) is not None or last.get(name) is not None), None)
        if name is None:
            continue
        title = title.format(k=diagnostics_k)
        if name == "reverse_kl_sampled":
            title = f"{title} (sampled)"
        old, new = first.get(name), last.get(name)
        change = f"{written(100 * (new - old) / abs(old), '+.0f')}%" if old and new is not None else ""
        target = last.get(teacher, first.get(teacher)) if teacher else None
        rows.append((title, _shown(old, form), _shown(new, form), change, _shown(target, form)))
    return rows


def written(value: float, form: str) -> str:
    """Returns the number in a format of Python's or as a RATE; what rounds to zero has no minus."""
    if form == RATE:
        form = ".2f" if abs(value) < 10 else ".0f"
    text = format(value, form)
    return text.removeprefix("-") if float(text) == 0 else text


def sparkline(values: deque[float]) -> str:
    """Returns one bar a value between the smallest and the largest of them."""
    if len(values) < 2:
        return ""
    low, high = min(values), max(values)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in values)


def duration(seconds: float) -> str:
    """Returns 75 as 1:15 and 3675 as 1:01:15."""
    minutes, rest = divmod(round(max(seconds, 0.0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else written(value, form)
