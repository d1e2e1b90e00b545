"""Whether a model's stored weights are those that its configuration describes.

transformers fills a layer that the file lacks with random numbers and leaves out one that the configuration lacks: a run
would go on with a model that nobody released.
"""

from __future__ import annotations

import copy
import json
import math
import os
import struct
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from opd.errors import PreflightError

INDEX = "model.safetensors.index.json"
LARGEST_HEADER_BYTES = 100_000_000
"""What safetensors itself accepts."""

Shape = tuple[int, ...]


def check_files(model: str, config: Any, role: str) -> None:
    """Reads the headers of a local folder's *.safetensors, which costs no weights.

    Raises PreflightError where a file is missing or cut short, or where a tensor is not of the size that the configuration
    gives it. Models from the hub and *.bin files are left to `check_loaded`.
    """
    folder = Path(model)
    if not folder.is_dir():
        return
    wanted = _configured_shapes(config)
    prefix = wanted.pop("", None)
    for file in _files(folder, role):
        for name, shape in _read_header(file, role).items():
            configured = wanted.get(name, wanted.get(f"{prefix}.{name}"))
            # transformers transposes some tensors as it loads them, so that here only the sizes count.
            if configured is not None and math.prod(shape) != math.prod(configured):
                raise _misfit(role, model, name, shape, configured, str(file))


def check_loaded(model: Any, info: Mapping[str, Any], name: str, role: str) -> None:
    """Raises PreflightError where transformers reports weights as missing, as left out or as of another shape.

    Weights of parts that the model does not have at all (a vision tower, layers for the prediction of several tokens) may be
    left out; those of its own layers may not.
    """
    for tensor, stored, configured in sorted(info["mismatched_keys"], key=str):
        raise _misfit(role, name, tensor, tuple(stored), tuple(configured), name)
    if missing := sorted(info["missing_keys"]):
        raise PreflightError(
            f"The {role}'s weights lack {_named(missing)}.",
            where=f"{role}.model={name}",
            why="its config.json describes them, and transformers would fill them with random numbers",
            fix="put the right config.json beside the weights (num_hidden_layers, tie_word_embeddings …), or fetch the model anew",
        )
    if dropped := sorted(key for key in info["unexpected_keys"] if _is_own(key, model)):
        raise PreflightError(
            f"The {role}'s weights hold {_named(dropped)}, which its configuration does not have.",
            where=f"{role}.model={name}",
            why="transformers would leave them out, and what is left is another model",
            fix="put the right config.json beside the weights (num_hidden_layers, biases, norms …), or fetch the model anew",
        )


def _is_own(key: str, model: Any) -> bool:
    """Whether a stored weight that was not used belongs to the layers that the model has, or to one more of them."""
    if not key.endswith((".weight", ".bias")):
        return False  # buffers of old versions, scales of caches
    modules = dict(model.named_modules())
    for name in (key, f"{model.base_model_prefix}.{key}"):
        holder = modules.get(name.rpartition(".")[0])
        if holder is not None:
            # GPT-2's attn.bias is a stored mask: the module has no parameters of its own.
            return any(True for _ in holder.parameters(recurse=False))
        parts = name.split(".")
        for depth in range(1, len(parts) - 1):
            layers = modules.get(".".join(parts[:depth]))
            if isinstance(layers, nn.ModuleList):
                return not _predicts_several(parts[depth], len(layers), model.config.get_text_config())
    return False


def _predicts_several(index: str, layers: int, config: Any) -> bool:
    """Whether a stored layer comes after the last and is for the prediction of several tokens, as the configuration says."""
    several = getattr(config, "num_nextn_predict_layers", None) or 0
    return index.isdecimal() and layers <= int(index) < layers + several


def _configured_shapes(config: Any) -> dict[str, Shape]:
    """Returns name → shape as the configuration has them, and the prefix of the trunk under ""; empty where unknown."""
    if getattr(config, "quantization_config", None) is not None:
        return {}
    try:
        with torch.device("meta"):
            empty: Any = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    except Exception:
        return {}  # some architectures cannot be built without memory; `check_loaded` sees them
    shapes: dict[str, Any] = {name: tuple(tensor.shape) for name, tensor in empty.state_dict().items()}
    return shapes | {"": empty.base_model_prefix}


def _files(folder: Path, role: str) -> list[Path]:
    """Returns the files that transformers would read."""
    whole, index = folder / "model.safetensors", folder / INDEX
    if whole.is_file():
        return [whole]
    if not index.is_file():
        return []
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(index, role, f"it is no index of weights: {error}") from error
    if absent := [name for name in names if not (folder / name).is_file()]:
        raise PreflightError(
            f"The {role}'s folder lacks {_named(absent)}.",
            where=str(folder),
            why=f"{INDEX} names {len(names)} files",
            fix="copy or fetch the missing files too",
        )
    return [folder / name for name in names]


def _read_header(file: Path, role: str) -> dict[str, Shape]:
    """Returns name → shape of the tensors in a file; raises PreflightError where its size is not what the header says."""
    size = file.stat().st_size
    try:
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            if length > min(size, LARGEST_HEADER_BYTES):
                raise _damaged(file, role, f"its header has {length} bytes, the file {size}")
            header = json.loads(opened.read(length))
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        end = 8 + length + max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
        shapes = {name: tuple(entry["shape"]) for name, entry in tensors.items()}
    except OSError as error:
        raise _damaged(file, role, error.strerror or str(error)) from error
    except (struct.error, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise _damaged(file, role, f"it has no header of a safetensors file ({size} bytes)") from error
    if end != size:
        raise _damaged(file, role, f"it has {size} bytes, its header says {end}")
    return shapes


def _damaged(file: Path, role: str, why: str) -> PreflightError:
    return PreflightError(
        f"The {role}'s weights cannot be read.",
        where=str(file),
        why=why,
        fix="copy or fetch the file again: it was cut short, or it is not what its name says",
    )


def _misfit(role: str, model: str, name: str, stored: Shape, configured: Shape, where: str) -> PreflightError:
    return PreflightError(
        f"The {role}'s {name} has the shape {list(stored)}, its configuration wants {list(configured)}.",
        where=where,
        why="weights and config.json are not of the same model",
        fix=f"put the right config.json into {os.path.join(model, '')} (vocab_size, hidden_size …), or fetch the model anew",
    )


def _named(names: Collection[str]) -> str:
    """Returns the first few names, and how many more there are."""
    shown = list(names)[:3]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")
