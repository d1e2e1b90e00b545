"""The grammar of a data source on the command line: a path, then key=value after commas."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from pydantic import ValidationError

from opd.config import DataSource
from opd.errors import ConfigError

HUB = "hf://"
STDIN = "-"
KEYS = tuple(name for name in DataSource.model_fields if name != "path")


def parse_source(text: str) -> DataSource:
    """Returns the data source that `text` describes; raises ConfigError.

    Examples: `prompts.jsonl`, `file.csv,prompt=question,weight=2`, `hf://org/name@revision,name=main,split=test`, `-`.
    A path that holds a comma can be written as a mapping in a recipe only.
    """
    path, *settings = (part.strip() for part in text.split(","))
    if not path:
        raise ConfigError(
            "A data source begins with its path.",
            where=text,
            fix="for example prompts.jsonl,prompt=question or hf://openai/gsm8k,name=main,prompt=question",
        )
    values: dict[str, str] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not value:
            raise ConfigError(
                f"{setting or 'Nothing'} is not key=value." if setting else "There is nothing after a comma.",
                where=text,
                fix=f"after the path come {', '.join(f'{name}=…' for name in KEYS)}; a path with a comma goes in a recipe",
            )
        if key not in KEYS:
            close = nearest_names(key, KEYS)
            raise ConfigError(
                f"A data source has no {key}.",
                where=text,
                fix=f"did you mean {close[0]}?" if close else f"it takes {', '.join(KEYS)}",
            )
        if key in values:
            raise ConfigError(f"{key} is given twice.", where=text, fix="leave one of them out")
        values[key] = value
    path, revision = split_revision(path)
    if revision is not None:
        if "revision" in values:
            raise ConfigError(
                "The revision is given twice.", where=text, fix="write it after @ or as revision=, not both"
            )
        values["revision"] = revision
    try:
        return DataSource.model_validate({"path": path, **values})
    except ValidationError as error:
        detail = error.errors()[0]
        raise ConfigError(f"{detail['loc'][0]}={detail['input']}: {detail['msg']}.", where=text) from error


def split_revision(path: str) -> tuple[str, str | None]:
    """Returns the path and, for `hf://org/name@revision`, the revision."""
    if not path.startswith(HUB):
        return path, None
    name, at, revision = path.partition("@")
    return name, revision if at else None


def holds_default(source: DataSource, key: str) -> bool:
    """Whether a key says no more than if it had been left out, as where a tool has written every key down."""
    return bool(getattr(source, key) == DataSource.model_fields[key].default)


def nearest_names(name: str, names: Iterable[str], limit: int = 3) -> list[str]:
    """Returns those of `names` that resemble `name`, best first."""
    by_lower: dict[str, str] = {}
    for known in names:
        by_lower.setdefault(known.lower(), known)
    return [by_lower[match] for match in difflib.get_close_matches(name.lower(), by_lower, limit, 0.6)]
