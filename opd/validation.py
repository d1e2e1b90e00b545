"""From merged values to a `Config`, or to one sentence a problem: the key, the value, what it may be, and where it stands."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from opd import yamls
from opd.config import Config
from opd.errors import ConfigError, OpdError
from opd.schema import Key, dotted, key_at, keys, nearest, nearest_choice
from opd.yamls import Path as KeyPath

Origins = Mapping[KeyPath, str]
"""Where each given value stands: "recipe.yaml:12", "override key=value", "flag --steps"."""


def check_keys(values: dict[str, Any], origins: Origins, problems: list[OpdError]) -> set[str]:
    """Takes unknown keys and values of the wrong shape out of `values`, and returns the dotted keys that were bad."""
    bad: set[str] = set()

    def look(mapping: dict[str, Any], path: KeyPath) -> None:
        for name in list(mapping):
            here = (*path, name)
            known = key_at(here)
            value = mapping[name]
            if "." in name:
                problems.append(_not_nested(here, origins))
            elif known is None:
                problems.append(_unknown(here, origins))
            elif known.is_section and not isinstance(value, dict) and not (value is None and "null" in known.kind):
                inner = [key for key in keys() if key.startswith(f"{known.path}.")][:3]
                problems.append(
                    ConfigError(
                        f"{known.path} is a section, not {_show(value)}.",
                        where=where_of([known.path], origins),
                        fix=f"set a key in it: {', '.join(inner)} …",
                    )
                )
            elif isinstance(value, dict) and known.is_section:
                look(value, here)
                continue
            elif (number := _too_large(value)) is not None:
                problems.append(
                    ConfigError(
                        f"{dotted(here)}: {_show(number)} is too large.",
                        where=where_of([dotted(here)], origins),
                        why="whole numbers end at 2^63",
                        fix="write a smaller one",
                    )
                )
            elif isinstance(value, list) and known.section is not None:
                for index, item in enumerate(value):
                    if isinstance(item, dict):
                        look(item, (*here, index))
                continue
            elif _is_wrong_number(value, known):
                problems.append(_wrong_value(here, value, known, origins))
            else:
                continue
            bad.add(dotted(here))
            del mapping[name]

    look(values, ())
    return bad


def _is_wrong_number(value: object, key: Key) -> bool:
    """True and false would pass for 1 and 0, and not-a-number or infinity for a number."""
    if isinstance(value, bool):
        return "number" in key.kind and "true or false" not in key.kind
    return isinstance(value, float) and not math.isfinite(value)


def _too_large(value: object) -> int | None:
    """Returns the first whole number that no tensor and no counter can hold, in lists too."""
    items = value if isinstance(value, list) else [value]
    return next((item for item in items if isinstance(item, int) and not -(2**63) <= item < 2**63), None)


def validate(values: dict[str, Any], origins: Origins, problems: list[OpdError]) -> tuple[Config | None, set[str]]:
    """Returns the Config, built without its bad values if there are any, and the dotted keys of those."""
    bad: set[str] = set()
    while True:
        try:
            return Config.model_validate(values), bad
        except ValidationError as error:
            before = len(bad)
            for detail in error.errors():
                path = _known_part(detail["loc"])
                name = dotted(path)
                combination = detail["type"] == "value_error"
                # A section with a bad value is judged with a default in its place: what its validator says may be false.
                if name in bad or (combination and any(key.startswith(f"{name}.") for key in bad)):
                    bad.add(name)
                    _remove(values, path)
                    continue
                bad.add(name)
                problems.append(_refusal(detail, path, origins))
                _remove(values, path)
            if len(bad) == before:
                return None, bad


def _known_part(location: tuple[int | str, ...]) -> KeyPath:
    """Returns pydantic's location without the names of union members that it appends."""
    path: KeyPath = ()
    for part in location:
        if not isinstance(part, int) and key_at((*path, part)) is None:
            break
        path = (*path, part)
    return path


def _remove(values: Any, path: KeyPath) -> None:
    """Removes what is at `path`; an item of a list is removed with the whole list, so that the indices stay true."""
    for depth, part in enumerate(path):
        if isinstance(part, int):
            path = path[:depth]
            break
    for part in path[:-1]:
        values = values.get(part, {})
    if path:
        values.pop(path[-1], None)


def _refusal(detail: Any, path: KeyPath, origins: Origins) -> ConfigError:
    """Returns pydantic's error as a sentence about a key."""
    name, known = dotted(path), key_at(path)
    if detail["type"] == "value_error":
        message = str(detail["ctx"]["error"])
        inside = [key for key in keys() if key.startswith(f"{name}.") and key.removeprefix(f"{name}.") + ":" in message]
        shown = message if message.startswith(name) else f"{name}.{message}"
        return ConfigError(f"{shown.rstrip('.')}.", where=where_of(inside or [name], origins))
    if detail["type"] == "missing":
        return ConfigError(
            f"{name} is missing.", where=where_of([dotted(path[:-1])], origins), fix=known.doc if known else ""
        )
    if known is None or isinstance(path[-1], int):
        holder = key_at(path[:-1])
        kind = f"; {holder.path} is {holder.kind}" if holder else ""
        return ConfigError(f"{name}: {_show(detail['input'])} cannot be used{kind}.", where=where_of([name], origins))
    return _wrong_value(path, detail["input"], known, origins)


def _wrong_value(path: KeyPath, value: object, known: Key, origins: Origins) -> ConfigError:
    name = dotted(path)
    close = nearest_choice(value, known.choices) if known.choices else None
    return ConfigError(
        f"{name} must be {known.kind}, not {_show(value)}.",
        where=where_of([name], origins),
        fix=f"did you mean {close}?" if close else "",
    )


def _not_nested(path: KeyPath, origins: Origins) -> ConfigError:
    """Returns the error about `train.steps: 1` in a recipe, with what to write instead."""
    *sections, leaf = dotted(path).split(".")
    written = f"{{{leaf}: …}}"
    for section in reversed(sections[1:]):
        written = f"{{{section}: {written}}}"
    return ConfigError(
        f"{path[-1]} has dots in it.",
        where=where_of([dotted(path)], origins),
        why="keys with dots are for the command line (key=value); in a recipe sections are nested",
        fix=f"write it nested: {sections[0]}: {written}",
    )


def _unknown(path: KeyPath, origins: Origins) -> ConfigError:
    name = dotted(path)
    close = nearest(name)
    fix = f"did you mean {' or '.join(close)}?" if close else "opd config show lists all keys"
    return ConfigError(f"There is no key {name}.", where=where_of([name], origins), fix=fix)


def where_of(names: Iterable[str], origins: Origins) -> str:
    """Returns the origins of the named keys (of the nearest one above, for a key that is not given itself)."""
    by_name = {dotted(path): origin for path, origin in origins.items()}
    found = [by_name[name] for name in names if name in by_name]
    return ", ".join(dict.fromkeys(found))


def _show(value: object) -> str:
    if isinstance(value, dict):
        return "a mapping"
    shown = yamls.dump(value) if isinstance(value, (str, int, float, list, type(None))) else str(value)
    return shown if len(shown) <= 60 else f"{shown[:60]}…"
