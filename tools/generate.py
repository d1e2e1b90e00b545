"""Writes docs/configuration.md and recipes/schema.json from opd/config.py; `--check` only says whether they are stale."""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from opd.schema import configuration_page, json_schema  # noqa: E402


def generated() -> dict[Path, str]:
    """Returns what every generated file should hold."""
    schema = json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"
    return {ROOT / "docs" / "configuration.md": configuration_page(), ROOT / "recipes" / "schema.json": schema}


def stale() -> list[Path]:
    """Returns the generated files that are missing or differ."""
    return [file for file, text in generated().items() if not file.exists() or file.read_text(encoding="utf-8") != text]


def main() -> int:
    """Writes the files, or with --check returns 1 when one is stale."""
    old = stale()
    if "--check" in sys.argv[1:]:
        for file in old:
            print(f"{file.relative_to(ROOT)} is stale: python tools/generate.py")
        return 1 if old else 0
    for file in old:
        file.parent.mkdir(exist_ok=True)
        file.write_text(generated()[file], encoding="utf-8")
        print(f"wrote {file.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
