"""The keys of the configuration, read off the pydantic models: their types, docs, nearest names, JSON schema and page.

`opd config explain`, recipes/schema.json, docs/configuration.md and the error messages all come from here, so they
cannot disagree with the configuration.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache
from typing import Any, Literal, Union

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from opd.config import Config
from opd.errors import ConfigError
from opd.yamls import Path, dump

OTHER_NAMES = {
    "lr": "train.learning_rate",
    "max_steps": "train.steps",
    "num_train_epochs": "train.steps",
    "gradient_accumulation_steps": "train.microbatch_tokens",
    "grad_clip": "train.max_grad_norm",
    "batch_size": "rollout.prompts",
    "per_device_train_batch_size": "rollout.prompts",
    "num_generations": "rollout.group_size",
    "max_new_tokens": "rollout.max_tokens",
    "max_completion_length": "rollout.max_tokens",
    "beta": "loss.jsd_beta",
    "kl_type": "loss.divergence",
    "lora_r": "student.lora.rank",
    "lora_alpha": "student.lora.alpha",
    "torch_dtype": "student.compute_dtype",
    "output_dir": "run.dir",
    "save_steps": "checkpoint.every",
    "report_to": "run.trackers",
}
"""What other tools call a key, for the nearest names."""

_BOUNDS: tuple[tuple[type, str, str], ...] = ((Ge, "ge", "≥"), (Gt, "gt", ">"), (Le, "le", "≤"), (Lt, "lt", "<"))


@dataclass(frozen=True, slots=True)
class Key:
    """One key of the configuration: a section (`train`) or a leaf (`train.steps`); items of lists are `data.train[].path`."""

    path: str
    annotation: Any
    default: Any
    """PydanticUndefined where the key must be given."""
    doc: str
    section: type[BaseModel] | None
    """The model behind a section, or behind the items of a list of sections."""
    bounds: str
    """Such as " ≥ 0 and < 1"; empty where there is none."""

    @property
    def is_section(self) -> bool:
        """Whether the value is a mapping of keys known here."""
        return self.section is not None and not self.is_list

    @property
    def is_list(self) -> bool:
        """Whether the value can be a list."""
        return any(typing.get_origin(choice) is list for choice in _choices_of(self.annotation))

    @property
    def is_text(self) -> bool:
        """Whether the value can be any text and no number, so that `revision: 1234567` means the text."""
        kinds = _choices_of(self.annotation)
        return str in kinds and not any(kind in (int, float, bool) for kind in kinds)

    @property
    def choices(self) -> tuple[str, ...]:
        """The names that are allowed, where the key takes one of a few."""
        return tuple(_literals(self.annotation))

    def takes_word(self, text: str) -> bool:
        """Whether `text` is a name that the key takes as it is, not as the item of a list."""
        kinds = _choices_of(self.annotation)
        return any(typing.get_origin(kind) is Literal and text in typing.get_args(kind) for kind in kinds)

    @property
    def kind(self) -> str:
        """The type in words, such as "a whole number ≥ 1, or null"."""
        return _words(self.annotation, self.bounds)


@cache
def keys() -> dict[str, Key]:
    """Returns every key by its dotted path, sections before what they hold."""
    return {key.path: key for key in _walk(Config, "")}


def key_at(path: Path) -> Key | None:
    """Returns the key at a path into the values (list indices allowed), or None where there is no such key."""
    return keys().get(schema_path(path))


def schema_path(path: Path) -> str:
    """Returns ("data", "train", 0, "path") as data.train[].path."""
    return "".join("[]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")


def dotted(path: Path) -> str:
    """Returns ("data", "train", 0, "path") as data.train[0].path."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")


def nearest(name: str, limit: int = 3) -> list[str]:
    """Returns the keys whose full path or last part resembles `name`, best first."""
    section, _, leaf = name.rpartition(".")
    known = [OTHER_NAMES[leaf]] if leaf in OTHER_NAMES else []
    scored = []
    for path in keys():
        own_section, _, own_leaf = path.rpartition(".")
        score = max(_alike(name, path), _alike(leaf, own_leaf) - 0.05)
        if section == own_section and _alike(leaf, own_leaf) > 0.5:
            score += 0.25
        if score >= 0.7 and path not in known and not name.startswith(f"{path}."):
            scored.append((-score, path))
    return (known + [path for _, path in sorted(scored)])[:limit]


def nearest_choice(value: object, choices: tuple[str, ...]) -> str | None:
    """Returns the allowed name that resembles `value`, if any does."""
    best = max(choices, key=lambda choice: _alike(str(value), choice), default=None)
    return best if best is not None and _alike(str(value), best) >= 0.6 else None


def explain(name: str | None = None) -> str:
    """Returns what `opd config explain` prints, for no key the sections; raises ConfigError for an unknown key."""
    if name is None:
        return _explained([key for key in keys().values() if "." not in key.path])
    if not name.strip():
        raise ConfigError(
            "The key is empty.", fix="name one, such as loss.topk.mass, or leave it out to see the sections"
        )
    key = keys().get(name.replace("[0]", "[]"))
    if key is None:
        close = nearest(name)
        fix = f"did you mean {' or '.join(close)}?" if close else "opd config show lists all keys"
        raise ConfigError(f"There is no key {name}.", fix=fix)
    if key.section is None:
        return "\n".join((key.path, f"  {key.doc}", f"  type:    {key.kind}", f"  default: {default_text(key)}"))
    inner = key.path + ("[]" if key.is_list else "")
    members = [other for other in keys().values() if other.path.rpartition(".")[0] == inner]
    return "\n".join((f"{key.path}: {key.kind}", f"  {key.doc}", "", _explained(members)))


def _explained(members: list[Key]) -> str:
    """One line a key: its path and what it means."""
    width = max(len(member.path) for member in members)
    return "\n".join(f"  {member.path:<{width}}  {member.doc}" for member in members)


def default_text(key: Key) -> str:
    """Returns the default as YAML, "required" where there is none."""
    if key.default is PydanticUndefined or key.path in ("student.model", "teacher.model", "data.train"):
        return "required"
    return dump(key.default)


def json_schema() -> dict[str, Any]:
    """Returns the JSON schema of a recipe."""
    schema = Config.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "opd recipe"} | schema


def configuration_page() -> str:
    """Returns docs/configuration.md."""
    lines = [
        "# Configuration",
        "",
        "Generated by `python tools/generate.py` from the docstrings of `opd/config.py`; do not edit.",
        "Every key is spelled the same in a recipe, in `key=value` on the command line and in error messages.",
        "",
    ]
    sections = [(key.path + ("[]" if key.is_list else ""), key) for key in keys().values() if key.section]
    for inner, section in sections:
        members = [key for key in keys().values() if key.path.rpartition(".")[0] == inner and not key.is_section]
        lines += [f"## `{section.path}`", "", _escape(section.doc), ""]
        lines += ["| key | type | default | |", "|---|---|---|---|"]
        for key in members:
            default = "required" if default_text(key) == "required" else f"`{_escape(default_text(key))}`"
            lines.append(f"| `{key.path}` | {_escape(key.kind)} | {default} | {_escape(key.doc)} |")
        lines.append("")
    return "\n".join(lines).rstrip("\n") + "\n"


def _walk(model: type[BaseModel], prefix: str) -> Iterator[Key]:
    for name, field in model.model_fields.items():
        key = _key(f"{prefix}{name}", field)
        yield key
        if key.section is not None:
            yield from _walk(key.section, f"{key.path}[]." if key.is_list else f"{key.path}.")


def _key(path: str, field: FieldInfo) -> Key:
    default = field.get_default(call_default_factory=True)
    if isinstance(default, BaseModel):
        default = default.model_dump()
    section = next((found for choice in _choices_of(field.annotation) if (found := _section_in(choice))), None)
    return Key(path, field.annotation, default, field.description or "", section, _bounds(field))


def _section_in(annotation: Any) -> type[BaseModel] | None:
    if typing.get_origin(annotation) is list:
        annotation = typing.get_args(annotation)[0]
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _bounds(field: FieldInfo) -> str:
    metadata = list(field.metadata)
    for choice in typing.get_args(field.annotation):
        # `Annotated[float, Field(gt=0)] | None` keeps its bounds inside the union.
        for inner in getattr(choice, "__metadata__", ()):
            metadata += inner.metadata if isinstance(inner, FieldInfo) else [inner]
    found = [
        f"{sign} {getattr(item, attribute)}"
        for kind, attribute, sign in _BOUNDS
        for item in metadata
        if isinstance(item, kind)
    ]
    return " " + " and ".join(found) if found else ""


def _choices_of(annotation: Any) -> tuple[Any, ...]:
    """Members of a union (one for everything else), without `Annotated`, also in lists; None is NoneType."""
    if typing.get_origin(annotation) is typing.Annotated:
        annotation = typing.get_args(annotation)[0]
    if typing.get_origin(annotation) in (Union, types.UnionType):
        return tuple(inner for member in typing.get_args(annotation) for inner in _choices_of(member))
    if (
        typing.get_origin(annotation) is list
        and typing.get_origin(item := typing.get_args(annotation)[0]) is typing.Annotated
    ):
        return (types.GenericAlias(list, typing.get_args(item)[0]),)
    return (annotation,)


def _literals(annotation: Any) -> Iterator[str]:
    for choice in _choices_of(annotation):
        if typing.get_origin(choice) is Literal:
            yield from typing.get_args(choice)
        elif typing.get_origin(choice) is list:
            yield from _literals(typing.get_args(choice)[0])


def _words(annotation: Any, bounds: str) -> str:
    names = {
        str: "a text",
        int: f"a whole number{bounds}",
        float: f"a number{bounds}",
        bool: "true or false",
        type(None): "null",
    }
    plurals = {str: "texts", int: "whole numbers", float: "numbers"}
    words = []
    for choice in _choices_of(annotation):
        origin, inside = typing.get_origin(choice), typing.get_args(choice)
        if origin is Literal:
            words.append(inside[0] if len(inside) == 1 else f"one of {', '.join(inside)}")
        elif origin is list and typing.get_origin(inside[0]) is Literal:
            words.append(f"a list of any of {', '.join(typing.get_args(inside[0]))}")
        elif origin is list:
            words.append(f"a list of {plurals.get(inside[0], 'mappings')}")
        else:
            words.append(names.get(choice, "a mapping"))
    return ", or ".join(words)


def _alike(one: str, other: str) -> float:
    return SequenceMatcher(None, one.lower(), other.lower()).ratio()


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
