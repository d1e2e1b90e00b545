"""TRL's DistillationTrainer and opd on the same models, prompts, lengths, loss and step count, alternating.

    python bench/versus_trl.py --teacher T --student S --data prompts.jsonl,prompt=question

Each round runs one after the other in fresh processes and compares their medians; the first step of each run is left
out. Both compute the full-vocabulary reverse KL. TRL gets its fastest CPU setting: transformers generation, one device
batch of all prompts, no gradient checkpointing, and bf16 where the processor multiplies bfloat16 natively (elsewhere
bf16 is emulated and many times slower, so it gets float32).
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from statistics import median
from typing import Any

from step import measure


def run_trl(options: argparse.Namespace) -> dict[str, Any]:
    """Trains with TRL in this process; returns its medians."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import DistillationConfig, DistillationTrainer

    from opd.config import DataSettings
    from opd.data import load_sources, parse_source
    from opd.models import fast_bfloat16

    bf16 = fast_bfloat16(torch.device("cpu")) if options.trl_bf16 == "auto" else options.trl_bf16 == "yes"
    source = parse_source(options.data)
    rows = rows_of(load_sources(DataSettings(train=[source])), source.prompt, options.prompts * options.steps)
    ends: list[float] = []
    tokens: list[float] = []

    class Timer(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            ends.append(time.perf_counter())

        def on_log(
            self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any
        ) -> None:
            key = "completions/mean_length"
            if logs and key in logs:
                tokens.append(logs[key] * options.prompts)

    with tempfile.TemporaryDirectory() as folder:
        trainer = DistillationTrainer(
            model=AutoModelForCausalLM.from_pretrained(options.student, dtype=torch.float32),
            teacher_model=AutoModelForCausalLM.from_pretrained(
                options.teacher, dtype=torch.bfloat16 if bf16 else torch.float32
            ),
            args=DistillationConfig(
                output_dir=folder,
                per_device_train_batch_size=options.prompts,
                max_steps=options.steps,
                max_completion_length=options.max_tokens,
                beta=1.0,
                temperature=1.0,
                bf16=bf16,
                gradient_checkpointing=False,
                learning_rate=options.learning_rate,
                shuffle_dataset=False,
                logging_steps=1,
                save_strategy="no",
                report_to=[],
                use_cpu=True,
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": row}]} for row in rows]),
            processing_class=AutoTokenizer.from_pretrained(options.student),
            callbacks=[Timer()],
        )
        trainer.train()
    seconds = [b - a for a, b in pairwise(ends)]
    return {
        "step_seconds": median(seconds),
        "tokens_per_second": median(n / s for n, s in zip(tokens[1:], seconds, strict=False)),
        "completion_length_tokens": median(tokens[1:]) / options.prompts,
        "peak_memory_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "bf16": bf16,
    }


def rows_of(loaded: Any, column: str, count: int) -> list[str]:
    """Returns `count` prompts, from the beginning again where the data set is shorter."""
    texts = [str(row[column]) for row in loaded.sources[0].rows]
    return [texts[i % len(texts)] for i in range(count)]


def run_opd(options: argparse.Namespace) -> dict[str, Any]:
    """Runs `opd distill`; returns its medians."""
    arguments = ["--teacher", options.teacher, "--student", options.student, "--data", options.data]
    arguments += [f"rollout.prompts={options.prompts}", f"rollout.max_tokens={options.max_tokens}", "loss.support=full"]
    arguments += [f"train.learning_rate={options.learning_rate}", "data.shuffle=false", "run.save_rollouts=false"]
    arguments += ["diagnostics.every=0", *options.opd]
    return measure(arguments, options.steps)


def in_own_process(side: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--worker", side, *sys.argv[1:]]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise SystemExit(f"{side} failed:\n{result.stderr[-4000:]}")
    return json.loads(result.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", required=True)
    parser.add_argument("--student", required=True)
    parser.add_argument("--data", required=True, help="a data source in opd's grammar; plain-text prompts")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=4, help="steps of each run, the first one not counted")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--trl-bf16", choices=["auto", "yes", "no"], default="auto")
    parser.add_argument("--opd", action="append", default=[], metavar="KEY=VALUE", help="override for opd")
    parser.add_argument("--worker", choices=["trl", "opd"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(run_trl(options) if options.worker == "trl" else run_opd(options)))
        return
    ratios, memory = [], []
    for number in range(options.rounds):
        sides = ("trl", "opd") if number % 2 == 0 else ("opd", "trl")
        results = {side: in_own_process(side) for side in sides}
        ratios.append(results["opd"]["tokens_per_second"] / results["trl"]["tokens_per_second"])
        memory.append(results["opd"]["peak_memory_gib"] / results["trl"]["peak_memory_gib"])
        print(json.dumps({"round": number + 1, **results, "ratio": ratios[-1]}), flush=True)
    print(
        json.dumps(
            {"tokens_per_second_ratio": median(ratios), "memory_ratio": median(memory), "rounds": options.rounds}
        )
    )


if __name__ == "__main__":
    main()
