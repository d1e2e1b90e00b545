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
_STR, _MAP, _SEQ = (f"tag:yaml.org,2002:{name}" for name in ("str", "map", "seq"))
LARGEST_DEPTH = 50
LONGEST_NUMBER = 1000
"""Characters; Python itself refuses to read whole numbers of more than 4300."""
LARGEST_COUNT = 100_000
"""Values of a document, counted after aliases: a few lines of them can stand for billions."""
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
_PATTERNS = {tag: pattern for tag, pattern, _ in _SCALARS}
_KNOWN = {_STR, *_PATTERNS}


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list[Any]] = {}

    def __init__(self, text: str, source: str) -> None:
        super().__init__(text)
        self.source = source
        self.depth = 0

    def compose_node(self, parent: Node | None, index: int) -> Node | None:
        self.depth += 1
        if self.depth > LARGEST_DEPTH:
            raise _too_deep(f"{self.source}:{self.peek_event().start_mark.line + 1}")
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


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
        node = _Loader(text, source).get_single_node()
    except yaml.MarkedYAMLError as error:
        raise _syntax_error(error, text, source) from error
    except yaml.reader.ReaderError as error:
        raise ConfigError(
            f"The character {error.character:#x} is not allowed in YAML.",
            where=f"{source}:{text.count(chr(10), 0, error.position) + 1}",
            fix=r'remove it, or write it as an escape in double quotes, such as "\u0000"',
        ) from error
    document = Document(None, {}, {})
    value = None if node is None else _Construction(source, document).value_of(node, ())
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


def _too_deep(where: str) -> ConfigError:
    return ConfigError(
        f"The values are nested more than {LARGEST_DEPTH} levels deep.",
        where=where,
        fix="check the brackets there; no key of a recipe needs so many",
    )


class _Construction:
    """From nodes to values, noting where each of them stands."""

    def __init__(self, source: str, document: Document) -> None:
        self.source = source
        self.document = document
        self.count = 0
        self.open: set[int] = set()
        """The collections around the current one, by identity."""

    def value_of(self, node: Node, path: Path) -> Any:
        line = node.start_mark.line + 1
        where = f"{self.source}:{line}"
        self.document.lines.setdefault(path, line)
        self.count += 1
        if self.count > LARGEST_COUNT:
            raise ConfigError(
                f"The document has more than {LARGEST_COUNT} values.",
                where=where,
                why="every alias (*name) counts as all that its anchor holds",
                fix="write fewer aliases of aliases",
            )
        if id(node) in self.open:
            raise ConfigError(
                "An anchor holds itself.", where=where, fix="remove the alias (*name) inside of its own anchor (&name)"
            )
        if len(path) > LARGEST_DEPTH:
            raise _too_deep(where)
        if isinstance(node, ScalarNode):
            self.document.texts[path] = node.value
            if node.tag == _INT and len(node.value) > LONGEST_NUMBER:
                raise ConfigError(f"The number has {len(node.value)} digits.", where=where, fix="write a smaller one")
            try:
                return _scalar(node.tag, node.value)
            except ValueError as error:
                raise _wrong_tag(node.tag, where) from error
        if node.tag not in (_MAP, _SEQ):
            raise _wrong_tag(node.tag, where)
        self.open.add(id(node))
        if isinstance(node, SequenceNode):
            value: Any = [self.value_of(item, (*path, index)) for index, item in enumerate(node.value)]
        else:
            assert isinstance(node, MappingNode)
            value = self.mapping_of(node, path)
        self.open.remove(id(node))
        return value

    def mapping_of(self, node: MappingNode, path: Path) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            where = f"{self.source}:{line}"
            if not isinstance(key_node, ScalarNode):
                raise ConfigError("A key must be a plain name.", where=where)
            key = key_node.value
            if key_node.tag not in _KNOWN:
                raise _wrong_tag(key_node.tag, where)
            if key == "<<":
                raise ConfigError(
                    "Merge keys (<<) are not supported.",
                    where=where,
                    fix="write the keys out, or put the shared ones into a recipe of their own and name both: "
                    "opd distill shared.yaml mine.yaml",
                )
            if key in mapping:
                raise ConfigError(
                    f"The key {key} appears twice.",
                    where=f"{where}, first at line {self.document.lines[(*path, key)]}",
                    why="one of the two values would be lost",
                    fix="remove one of them",
                )
            self.document.lines[(*path, key)] = line
            mapping[key] = self.value_of(value_node, (*path, key))
        return mapping


def _wrong_tag(tag: str, where: str) -> ConfigError:
    shown = tag.replace("tag:yaml.org,2002:", "!!")
    return ConfigError(
        f"The tag {shown} cannot be used here.",
        where=where,
        fix="leave it out; a text that begins with ! goes in quotes",
    )


def _scalar(tag: str, text: str) -> Any:
    """Raises ValueError where a tag, which may be written out as in `!!int x`, does not fit the text."""
    if tag not in _KNOWN or (tag != _STR and not _PATTERNS[tag].match(text)):
        raise ValueError(tag)
    if tag == _NULL:
        return None
    if tag == _BOOL:
        return text.lower() == "true"
    if tag == _INT:
        return int(text, 0) if text.startswith(("0x", "0o")) else int(text)
    if tag == _FLOAT:
        return float(re.sub(r"\.(?=inf|nan)", "", text.lower()))
    return text
