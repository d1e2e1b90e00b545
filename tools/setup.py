"""Makes .venv in the repository root, with everything that `make demo`, `make test` and `make lint` need.

    python3 tools/setup.py            # at once when it is already done; goes on where it was when it was interrupted
    python3 tools/setup.py --bench    # adds what bench/versus_trl.py compares with

cpu    Linux without a GPU: the exact versions of requirements/cpu.lock, with PyTorch's CPU build, never the CUDA one.
gpu    nvidia-smi answers: the newest versions that pyproject.toml allows, vLLM among them.
plain  elsewhere (macOS): the same without vLLM; transformers samples the rollouts.

Standard library only. Nothing here is newer than Python 3.8, so that an old Python says what is missing.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "opd-setup.json"
LOCK, BENCH = ROOT / "requirements" / "cpu.lock", ROOT / "requirements" / "bench.lock"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
OLDEST = (3, 11)
TRIED = ("python3.11", "python3.12", "python3.13")
EXTRAS = {"gpu": "vllm,server,lora,tools,dev", "plain": "server,lora,tools,dev"}
IMPORTED = {"cpu": "torch, transformers, vllm", "gpu": "torch, transformers, vllm", "plain": "torch, transformers"}


class SetupError(Exception):
    """Something that the user can act on; its text is printed without a traceback."""


def kind_of_machine() -> str:
    """Returns cpu, gpu or plain, as above."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        if subprocess.run(["nvidia-smi", "-L"], capture_output=True, timeout=60, check=False).stdout.startswith(b"GPU"):
            return "gpu"
    return "cpu" if platform.system() == "Linux" else "plain"


def find_python() -> str:
    """Returns a Python that is new enough and can make environments; $OPD_PYTHON names one. Raises SetupError."""
    chosen = os.environ.get("OPD_PYTHON")
    if chosen and not _suits(chosen):
        raise SetupError(f"OPD_PYTHON={chosen} is not a Python 3.11 or newer with the modules venv and ensurepip.")
    # The one that runs this comes first, unless it is so new that packages may not be built for it yet.
    names = [*TRIED, sys.executable] if sys.version_info >= (3, 14) else [sys.executable, *TRIED]
    found = chosen or next((name for name in names if _suits(name)), None)
    if found is None:
        raise SetupError(
            "opd needs Python 3.11 or newer with the module venv.\n"
            f"This is Python {platform.python_version()}; {', '.join(TRIED)} are missing or incomplete.\n"
            "Install one (Debian, Ubuntu: apt install python3.11 python3.11-venv) or name it: OPD_PYTHON=/path/to/python3.11"
        )
    return found


def _suits(python: str) -> bool:
    check = f"import ensurepip, sys, venv; sys.exit(sys.version_info[:2] < {OLDEST})"
    try:
        return subprocess.run([python, "-c", check], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def wanted_stamp(kind: str) -> dict[str, str]:
    """Returns what the environment depends on; it is set up again when this changes."""
    digest = hashlib.sha256()
    for file in (LOCK, BENCH, ROOT / "pyproject.toml"):
        digest.update(file.read_bytes())
    return {"root": str(ROOT), "kind": kind, "files": digest.hexdigest()}


def read_stamp() -> dict[str, str]:
    """Returns the stamp of an environment that was finished and whose Python runs, otherwise nothing."""
    try:
        subprocess.run([str(PYTHON), "-c", ""], check=True, capture_output=True)
        return json.loads(STAMP.read_text())
    except (OSError, ValueError, subprocess.CalledProcessError):
        return {}


def set_up(bench: bool) -> None:
    """Makes the environment, or completes it; raises SetupError."""
    wanted, found = wanted_stamp(kind_of_machine()), read_stamp()
    bench = bench or found.get("bench") == "yes"
    wanted["bench"] = "yes" if bench else "no"
    if found == wanted:
        return
    if found and found["root"] != str(ROOT):
        # Its scripts have the old place written into them.
        shutil.rmtree(VENV)
    kept = VENV.exists()
    start = time.monotonic()
    try:
        _install(wanted["kind"], bench)
    except SetupError:
        if not kept:
            raise
        _say("the environment that was there cannot be completed; making a new one")
        shutil.rmtree(VENV)
        _install(wanted["kind"], bench)
    STAMP.write_text(json.dumps(wanted, indent=2) + "\n")
    _say(f"ready in {time.monotonic() - start:.0f} s")


def _install(kind: str, bench: bool) -> None:
    STAMP.unlink(missing_ok=True)
    if (
        not PYTHON.exists()
        or subprocess.run([str(PYTHON), "-m", "pip", "-V"], capture_output=True, check=False).returncode
    ):
        shutil.rmtree(VENV, ignore_errors=True)
        python = find_python()
        _say(f"making .venv with {python}")
        _run([python, "-m", "venv", str(VENV)])
    if kind == "cpu":
        _install_locked()
    else:
        _say(f"installing opd[{EXTRAS[kind]}]")
        _pip("-e", f".[{EXTRAS[kind]}]")
    if bench:
        _pip(*([] if kind != "cpu" else ["--no-deps"]), "-r", str(BENCH))
    _say(f"checking that {IMPORTED[kind]} and opd import")
    _run([str(PYTHON), "-c", f"import {IMPORTED[kind]}, opd.cli"])


def _install_locked() -> None:
    """Installs exactly the lock. Without dependencies being resolved, nothing can bring a CUDA build in."""
    torch = next(line.strip() for line in LOCK.read_text().splitlines() if line.startswith("torch=="))
    _say(f"installing {torch} (190 MB)")
    try:
        _pip("--no-deps", torch)
    except SetupError:
        _say("it is not on the default package index; taking it from PyTorch's")
        _pip("--no-deps", "--extra-index-url", TORCH_CPU_INDEX, torch)
    _say("installing the rest of requirements/cpu.lock (about 500 MB, some minutes)")
    _pip("--no-deps", "-r", str(LOCK))
    # setuptools, which builds it, is in the lock.
    _pip("--no-deps", "--no-build-isolation", "-e", ".")


def _pip(*arguments: str) -> None:
    # Compiling every module costs a minute; Python compiles those that are used.
    _run([str(PYTHON), "-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check", *arguments])


def _run(command: list[str]) -> None:
    result = subprocess.run(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        close_fds=False,  # so that it inherits the lock
    )
    if result.returncode:
        raise SetupError(f"This failed: {' '.join(command)}\n{result.stdout.strip()[-3000:]}")


def _say(text: str) -> None:
    print(f"setup: {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def only_process() -> Iterator[None]:
    """Lets one process at a time work on the environment: `make demo` and `make test` may be started together."""
    folder = os.open(ROOT, os.O_RDONLY)
    # A pip that outlives its killed parent keeps the lock until it is done.
    os.set_inheritable(folder, True)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say("waiting for another set-up of this folder")
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def main() -> int:
    """Returns 0, or 1 after an error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bench", action="store_true", help="also install what the benchmarks compare with")
    options = parser.parse_args()
    try:
        with only_process():
            set_up(options.bench)
    except SetupError as error:
        _say(f"error: {error}\nWhat is installed stays; the same command goes on from there.")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
