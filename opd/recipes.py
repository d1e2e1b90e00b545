"""From recipes, `key=value` overrides and flags to one checked `Config`, with the origin of every value.

Precedence: defaults < recipes from left to right < flags and overrides. Mappings are merged, lists are replaced.
All problems are reported in one go, each with its file and line and with the nearest names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from opd import config_checks, yamls
from opd.config import Config
from opd.errors import ConfigError, OpdError
from opd.schema import dotted, key_at, nearest_choice
from opd.validation import check_keys, validate, where_of
from opd.yamls import Path as KeyPath

FLAGS = {
    "student": "student.model",
    "teacher": "teacher.model",
    "data": "data.train",
    "steps": "train.steps",
    "learning-rate": "train.learning_rate",
    "sampler": "rollout.sampler",
    "seed": "run.seed",
    "output": "run.dir",
}
"""Flag of `opd distill` → the key that it sets (`--output` sets run.dir and run.name)."""

SOURCE_LISTS = ("data.train", "data.heldout")
"""Keys whose overrides are written as on `--data`."""


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A checked configuration and where each of its values comes from."""

    config: Config
    provenance: Mapping[str, str]
    """Dotted key of every leaf → "default", "recipe.yaml:12", "override" or "flag --steps"."""
    overrides: tuple[str, ...] = ()
    """`key=value` and flags as the user typed them."""
    warnings: tuple[str, ...] = ()
    """What is allowed but doubtful; shown before the run."""


@dataclass(slots=True)
class _Layer:
    """Values on their way to a `Config`."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[KeyPath, str] = field(default_factory=dict)


def load_config(
    recipes: Sequence[Path | str] = (),
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
    *,
    complete: bool = True,
) -> LoadedConfig:
    """Returns the configuration that recipes, overrides and flags (by the names in `FLAGS`; None = not given) add up to.

    With `complete`, student, teacher and data must be there and local model folders must hold a model; without it the
    recipe alone is looked at. Raises ConfigError with every problem in `problems`.
    """
    problems: list[OpdError] = []
    layers = [_read_recipe(recipe, problems) for recipe in recipes]
    given = {name: value for name, value in (flags or {}).items() if value not in (None, [], ())}
    flag_layer = _from_flags(given)
    override_layer = _from_overrides(overrides, problems)
    problems += _given_twice(flag_layer, override_layer)
    merged = _Layer()
    for layer in (*layers, flag_layer, override_layer):
        _merge(merged, layer)

    bad = check_keys(merged.values, merged.origins, problems)
    config, bad_values = validate(merged.values, merged.origins, problems)
    bad |= bad_values
    warnings: tuple[str, ...] = ()
    if config is not None:
        checks = config_checks.check(config, complete=complete, bad=bad)
        warnings = tuple(check.what for check in checks if check.warning)
        problems += [
            ConfigError(check.what, where=where_of(check.keys, merged.origins), why=check.why, fix=check.fix)
            for check in checks
            if not check.warning
        ]
    if problems or config is None:
        raise _all_of(problems)
    typed = tuple(_typed_flags(given)) + tuple(overrides)
    return LoadedConfig(config, _provenance(config, merged.origins), typed, warnings)


def shipped_recipes() -> dict[str, Path]:
    """Returns name → file of the recipes that come with the package (or with the checkout)."""
    package = Path(__file__).parent
    installed = package / "shipped"
    folder = installed if installed.is_dir() else package.parent / "recipes"
    return {file.stem: file for file in sorted(folder.glob("*.yaml"))}


def find_recipe(name: Path | str, *, or_setting: bool = False) -> Path:
    """Returns the file of a recipe: a path, or the name of a shipped recipe; raises ConfigError with the nearest names.

    With `or_setting` the name stood where `key=value` could have stood too, which the error then says.
    """
    if not str(name).strip():
        setting = " or write a setting as key=value" if or_setting else ""
        raise ConfigError(
            "The name of a recipe is empty.",
            why="an empty argument often comes from a shell variable that is not set",
            fix=f"name a file or a shipped recipe{setting}, or leave the argument out",
        )
    path = Path(name).expanduser()
    if path.is_file():
        return path
    shipped = shipped_recipes()
    if path.parent == Path() and (found := shipped.get(path.name.removesuffix(".yaml"))):
        return found
    if path.is_dir():
        raise ConfigError(
            f"{name} is a folder, not a recipe.", fix="name a .yaml file in it, or a model with --student or --teacher"
        )
    close = nearest_choice(path.name.removesuffix(".yaml"), tuple(shipped))
    hint = f"did you mean {close}?" if close else f"the shipped recipes are {', '.join(shipped) or 'none'}."
    raise ConfigError(
        f"There is no recipe {name}.",
        why="it is neither a file nor the name of a shipped recipe",
        fix=f"{hint} A setting is written key=value." if or_setting else hint,
    )


def _read_recipe(name: Path | str, problems: list[OpdError]) -> _Layer:
    """Returns the recipe's values; a recipe that cannot be read is a problem and an empty layer."""
    try:
        path = find_recipe(name, or_setting=True)
        document = yamls.parse(path.read_text(encoding="utf-8"), str(path))
    except ConfigError as error:
        problems.append(error)
        return _Layer()
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        problems.append(
            ConfigError(
                "The recipe is not UTF-8 text.",
                where=f"{path}:{line}",
                why=f"byte {error.object[error.start]:#04x}: {error.reason}",
                fix=f"if it is a recipe in another encoding, convert it: iconv -f latin1 -t utf-8 {path} > new.yaml",
            )
        )
        return _Layer()
    except OSError as error:
        problems.append(ConfigError("The recipe cannot be read.", where=str(name), why=error.strerror or str(error)))
        return _Layer()
    if document.value is None:
        return _Layer()
    if not isinstance(document.value, dict):
        problems.append(ConfigError("A recipe is a mapping of keys to values.", where=f"{path}:1"))
        return _Layer()
    _restore_texts(document.value, (), document)
    return _Layer(document.value, {key: f"{path}:{line}" for key, line in document.lines.items()})


def _from_flags(given: Mapping[str, Any]) -> _Layer:
    layer = _Layer()
    for name, value in given.items():
        origin = f"flag --{name}"
        if name == "output":
            folder = Path(value).expanduser()
            _set(layer, ("run", "dir"), str(folder.parent), origin)
            _set(layer, ("run", "name"), folder.name, origin)
        else:
            section, _, leaf = FLAGS[name].partition(".")
            _set(layer, (section, leaf), value, origin)
    return layer


def _from_overrides(overrides: Iterable[str], problems: list[OpdError]) -> _Layer:
    layer = _Layer()
    for text in overrides:
        key, equals, written = text.partition("=")
        path = tuple(key.strip().split("."))
        origin = f"override {text}"
        if not equals or not all(path):
            problems.append(ConfigError(f"{text} is not an override.", fix="write key=value, such as train.steps=200"))
            continue
        try:
            value = _override_value(path, written, origin)
        except OpdError as error:
            error.where = origin
            problems.append(error)
            continue
        _set(layer, path, value, origin)
    return layer


def _override_value(path: KeyPath, written: str, origin: str) -> Any:
    """Returns what is written after `=`: YAML, a text where the key takes a text, a data source, or a list as a,b."""
    known = key_at(path)
    if known is not None and known.is_text:
        return _text_value(written, origin)
    if known is not None and known.path in SOURCE_LISTS and not written.startswith(("[", "{", "null")):
        return written
    document = yamls.parse(written, origin)
    value = document.value
    if known is None or value is None:
        return value
    if isinstance(value, (dict, list)):
        _restore_texts(value, path, yamls.Document(value, {}, {(*path, *k): v for k, v in document.texts.items()}))
        return value
    if known.is_list and not known.takes_word(written):
        # Brackets are patterns to some shells, so a,b is a list too.
        items = [yamls.parse(item, origin) for item in written.split(",")]
        texts = "texts" in known.kind
        return [item.texts.get((), item.value) if texts else item.value for item in items]
    return value


def _text_value(written: str, origin: str) -> str | None:
    """Returns the text after `=`: without its quotes if it has any, None for null, and `Q: {prompt}` as it is."""
    try:
        document = yamls.parse(written, origin)
    except ConfigError:
        return written
    if document.value is None:
        return None
    return document.texts.get((), written)


def _restore_texts(value: Any, path: KeyPath, document: yamls.Document) -> None:
    """Puts numbers and booleans back into the words they were written in, where the key takes a text."""
    items = list(value.items()) if isinstance(value, dict) else list(enumerate(value))
    for part, inner in items:
        here = (*path, part)
        if isinstance(inner, (dict, list)):
            _restore_texts(inner, here, document)
        elif isinstance(inner, (int, float)):
            key = key_at(here)
            holder = key_at(path)
            in_texts = isinstance(value, list) and holder is not None and holder.annotation == list[str]
            if in_texts or (key is not None and key.is_text):
                value[part] = document.texts[here]


def _set(layer: _Layer, path: KeyPath, value: Any, origin: str) -> None:
    """Sets one leaf, making the mappings on the way to it."""
    nested: dict[str, Any] = {}
    inner = nested
    for part in path[:-1]:
        inner = inner.setdefault(str(part), {})
    inner[str(path[-1])] = value
    _merge(layer, _Layer(nested, {path[:depth]: origin for depth in range(1, len(path) + 1)}))


def _merge(base: _Layer, over: _Layer) -> None:
    """Lays `over` on `base`: mappings are merged, everything else is replaced together with its origins."""

    def lay(below: dict[str, Any], above: dict[str, Any], path: KeyPath) -> None:
        for key, value in above.items():
            here = (*path, key)
            if isinstance(value, dict) and isinstance(below.get(key), dict):
                lay(below[key], value, here)
                continue
            for known in [known for known in base.origins if known[: len(here)] == here]:
                del base.origins[known]
            below[key] = value
            base.origins |= {known: origin for known, origin in over.origins.items() if known[: len(here)] == here}

    lay(base.values, over.values, ())


def _given_twice(flags: _Layer, overrides: _Layer) -> list[OpdError]:
    both = [path for path in overrides.origins if path in flags.origins and len(path) > 1]
    return [
        ConfigError(
            f"{dotted(path)} is given twice.",
            where=f"{flags.origins[path]} and {overrides.origins[path]}",
            fix="leave one of them out",
        )
        for path in both
    ]


def _all_of(problems: Sequence[OpdError]) -> ConfigError:
    """Returns one error that holds all problems; a single one speaks for itself."""
    if len(problems) == 1 and isinstance(problems[0], ConfigError):
        return problems[0]
    return ConfigError(f"{len(problems)} problems in the configuration.", problems=list(problems))


def _typed_flags(given: Mapping[str, Any]) -> list[str]:
    return [
        f"--{name} {item}"
        for name, value in given.items()
        for item in (value if isinstance(value, (list, tuple)) else [value])
    ]


def _provenance(config: Config, origins: Mapping[KeyPath, str]) -> dict[str, str]:
    """Returns the origin of every leaf: its own, that of the list it was given in, or "default"."""
    found: dict[str, str] = {}

    def look(value: Any, path: KeyPath, inherited: str) -> None:
        origin = origins.get(path, inherited)
        if isinstance(value, BaseModel):
            for name in type(value).model_fields:
                look(getattr(value, name), (*path, name), origin if name in value.model_fields_set else "default")
        elif isinstance(value, list) and value and isinstance(value[0], BaseModel):
            for index, item in enumerate(value):
                look(item, (*path, index), origin)
        else:
            found[dotted(path)] = "override" if origin.startswith("override ") else origin

    look(config, (), "default")
    return found
