"""The resolved configuration as YAML, every value with a comment that says where it comes from."""

from __future__ import annotations

from typing import Any

from opd.recipes import LoadedConfig
from opd.schema import dotted, key_at
from opd.yamls import Path as KeyPath
from opd.yamls import dump

_COMMENT = "  # "


def resolved_yaml(loaded: LoadedConfig) -> str:
    """Returns the whole configuration as YAML that `load_config` reads back to the same values."""
    rows: list[tuple[str, str]] = []

    def write(mapping: dict[str, Any], path: KeyPath, indent: str, first: str) -> None:
        for name, value in mapping.items():
            here = (*path, name)
            key = key_at(here)
            if path and isinstance(path[-1], int) and loaded.provenance.get(dotted(here)) == "default":
                # What a data source was not told stays untold: `split` given for a file is an error.
                continue
            lead, first = first, indent
            if isinstance(value, dict) and key is not None and key.is_section:
                rows.append((f"{lead}{name}:", ""))
                write(value, here, f"{indent}  ", f"{indent}  ")
            elif isinstance(value, list) and value and isinstance(value[0], dict):
                rows.append((f"{lead}{name}:", ""))
                for index, item in enumerate(value):
                    write(item, (*here, index), f"{indent}    ", f"{indent}  - ")
            else:
                rows.append((f"{lead}{name}: {dump(value)}", loaded.provenance.get(dotted(here), "")))

    write(loaded.config.model_dump(), (), "", "")
    width = min(60, max(len(text) for text, origin in rows if origin))
    return "".join(f"{text:<{width}}{_COMMENT}{origin}\n" if origin else f"{text}\n" for text, origin in rows)


def origin_on_line(line: str) -> str:
    """Returns the origin that `resolved_yaml` wrote behind a value; empty where there is none."""
    return line.rpartition(_COMMENT)[2].strip() if _COMMENT in line else ""
