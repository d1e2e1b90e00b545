"""Seconds a step, tokens/s, peak memory and the split rollout / score / update / sync of a recipe, as one JSON document.

    python bench/step.py recipes/demo-cpu.yaml --steps 6 rollout.prompts=16

The first step is left out (it warms caches up); the others are reported by their median.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

STAGES = ("rollout", "score", "update", "sync")


def measure(arguments: list[str], steps: int) -> dict[str, Any]:
    """Runs `opd distill` on the arguments in a process of its own and returns the medians of its steps."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "opd", "distill", *arguments, f"train.steps={steps}"]
        command += ["eval.prompts=0", "checkpoint.every=0", f"run.dir={folder}", "run.name=bench"]
        result = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
        if result.returncode:
            raise SystemExit(f"opd distill failed with exit code {result.returncode}:\n{result.stderr[-4000:]}")
        lines = (Path(folder) / "bench" / "metrics.jsonl").read_text().splitlines()
    return summarise([json.loads(line) for line in lines])


def summarise(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns medians over all steps but the first."""
    records = records[1:] or records
    seconds = {f"{stage}_seconds": median(r[f"{stage}_seconds"] for r in records) for stage in STAGES}
    return {
        "steps": len(records),
        "step_seconds": median(r["step_seconds"] for r in records),
        "tokens_per_second": median(r["tokens"] / r["step_seconds"] for r in records),
        "completion_length_tokens": median(r["completion_length_tokens"] for r in records),
        "peak_memory_gib": max(r["peak_memory_gib"] for r in records),
        **seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6, help="steps to run, the first one not counted")
    options, recipe = parser.parse_known_args()
    print(json.dumps(measure(recipe, options.steps), indent=2))


if __name__ == "__main__":
    main()
