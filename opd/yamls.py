"""YAML as recipes use it: the YAML 1.2 scalars, an error for every doubtful thing, and the line of every value.

PyYAML follows YAML 1.1, where `1e-5` is a text, `no` is false, `010` is eight and a repeated key silently wins.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from opd.errors import ConfigError

Path = tuple[str | int, ...]
"""Keys and list indices from the top of the document."""

_NULL, _BOOL, _INT, _FLOAT = (f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float"))
_STR = "tag:yaml.org,2002:str"
_SCALARS = (
    (_NULL, re.compile(r"^(~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    (_BOOL, re.compile(r"^(true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    (_INT, re.compile(r"^([-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$"), list("-+0123456789")),
    (
        _FLOAT,
        re.compile(r"^([-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$"),
        list("-+.0123456789"),
    ),
)


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list[Any]] = {}


class _Dumper(yaml.SafeDumper):
    """Quotes every text that YAML 1.1 *or* 1.2 would read as something else."""

    yaml_implicit_resolvers = {first: list(rules) for first, rules in yaml.SafeDumper.yaml_implicit_resolvers.items()}


for _tag, _pattern, _first in _SCALARS:
    _Loader.add_implicit_resolver(_tag, _pattern, _first)
    _Dumper.add_implicit_resolver(_tag, _pattern, _first)


def _represent_text(dumper: yaml.SafeDumper, text: str) -> ScalarNode:
    return dumper.represent_scalar(_STR, text, style='"' if "\n" in text else None)


_Dumper.add_representer(str, _represent_text)


@dataclass(frozen=True, slots=True)
class Document:
    """A parsed document and, for every value in it, its line and how its scalar was written."""

    value: Any
    lines: dict[Path, int]
    """From 1."""
    texts: dict[Path, str]
    """Scalars as written, so that `revision: 1234567` can be a text where a text is wanted."""


def parse(text: str, source: str) -> Document:
    """Returns the document in `text`; raises ConfigError naming `source` and the line of what is wrong."""
    try:
        node = _Loader(text).get_single_node()
    except yaml.MarkedYAMLError as error:
        raise _syntax_error(error, text, source) from error
    except yaml.YAMLError as error:
        raise ConfigError("Not valid YAML.", where=source, why=str(error).splitlines()[0]) from error
    document = Document(None, {}, {})
    value = None if node is None else _construct(node, (), source, document)
    return Document(value, document.lines, document.texts)


def dump(value: Any) -> str:
    """Returns `value` on one line, so that `parse` gives it back."""
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, allow_unicode=True, width=1 << 30, sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...")


def _syntax_error(error: yaml.MarkedYAMLError, text: str, source: str) -> ConfigError:
    mark = error.problem_mark or error.context_mark
    line = mark.line if mark else 0
    written = text.splitlines()[line] if line < len(text.splitlines()) else ""
    fix = (
        "indent with spaces, not tabs" if "\t" in written else "check the indentation, the quotes and the colons there"
    )
    why = error.problem or "it could not be read"
    if error.context and error.context_mark:
        why = f"{why} {error.context} that began at line {error.context_mark.line + 1}"
    return ConfigError("Not valid YAML.", where=f"{source}:{line + 1}", why=why, fix=fix)


def _construct(node: Node, path: Path, source: str, document: Document) -> Any:
    line = node.start_mark.line + 1
    document.lines.setdefault(path, line)
    if isinstance(node, MappingNode):
        return _construct_mapping(node, path, source, document)
    if isinstance(node, SequenceNode):
        return [_construct(item, (*path, index), source, document) for index, item in enumerate(node.value)]
    assert isinstance(node, ScalarNode)
    document.texts[path] = node.value
    try:
        return _scalar(node.tag, node.value)
    except ValueError as error:
        raise ConfigError(f"The tag {node.tag} cannot be used here.", where=f"{source}:{line}") from error


def _construct_mapping(node: MappingNode, path: Path, source: str, document: Document) -> dict[str, Any]:
    mapping: dict[str, Any] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, ScalarNode):
            raise ConfigError("A key must be a plain name.", where=f"{source}:{line}")
        key = key_node.value
        if key in mapping:
            raise ConfigError(
                f"The key {key} appears twice.",
                where=f"{source}:{line}, first at line {document.lines[(*path, key)]}",
                why="one of the two values would be lost",
                fix="remove one of them",
            )
        document.lines[(*path, key)] = line
        mapping[key] = _construct(value_node, (*path, key), source, document)
    return mapping


def _scalar(tag: str, text: str) -> Any:
    if tag == _NULL:
        return None
    if tag == _BOOL:
        return text.lower() == "true"
    if tag == _INT:
        return int(text, 0) if text.startswith(("0x", "0o")) else int(text)
    if tag == _FLOAT:
        return float(re.sub(r"\.(?=inf|nan)", "", text.lower()))
    if tag == _STR:
        return text
    raise ValueError(tag)
