"""A run's last checkpoint as a plain Hugging Face folder that `AutoModelForCausalLM` and `vllm serve` load."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from opd.checkpoint import Checkpoint, follow_umask, newest_checkpoint
from opd.config import StudentSettings
from opd.errors import CheckpointError, ConfigError, RunDirectoryError
from opd.identity import identity_of, require_same_models
from opd.models import load_model, load_model_config, load_tokenizer
from opd.quiet import quieten
from opd.recipes import load_config
from opd.runs import RunDirectory

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Exported:
    """What an export wrote."""

    folder: Path
    step: int
    dtype: str
    """Type of the weights: float32 or bfloat16."""
    checkpoint: Path


def export_run(
    run: Path, folder: Path, *, warn: Callable[[str], None], adapter: bool = False, dtype: str | None = None
) -> Exported:
    """Writes the newest whole checkpoint of a run to `folder`; `warn` is told of torn ones that are newer.

    Adapters are merged into their base model, or with `adapter` written alone in peft's format. `dtype` (float32 or
    bfloat16) is that of the student's own configuration unless it is given; adapters alone are float32. The folder is
    written aside and renamed. Raises RunDirectoryError where there is something already, CheckpointError where there is no
    checkpoint or it does not fit the run's student, and ConfigError.
    """
    opened = RunDirectory.open(run)
    config = load_config([opened.config_file]).config
    student = config.student
    if adapter and student.lora is None:
        raise ConfigError(
            "The run has no adapter.",
            where=f"student.lora in {opened.config_file}",
            why="every weight was trained",
            fix="leave --adapter out",
        )
    if dtype not in (None, "float32", "bfloat16"):
        raise ConfigError(f"dtype {dtype} cannot be exported.", where="--dtype", fix="use float32 or bfloat16")
    _require_free(folder)
    quieten()
    checkpoint = newest_checkpoint(opened.checkpoints, warn)
    if checkpoint is None:
        raise CheckpointError(
            "The run has no checkpoint.",
            where=str(opened.checkpoints),
            why="it stopped before its first one was saved (checkpoint.every)",
            fix=f"opd distill --resume {shlex.quote(str(run))} begins it again from its first step",
        )
    if student.lora is not None and (begun := checkpoint.state.get("models")):
        # Adapters are worth nothing on another base; other exports take every weight from the checkpoint.
        now = {"student": identity_of(student.model, student.revision)}
        require_same_models({"student": begun["student"]}, now, {"student": student.model})
    tokenizer = load_tokenizer(student.model, student.revision, "student")
    released = torch.float32 if adapter else _released_dtype(student)
    wanted = released if dtype is None else getattr(torch, dtype)
    model = _trained(student, checkpoint, config.run.seed, adapter=adapter).to(wanted)
    _write(folder, model, tokenizer)
    return Exported(folder, checkpoint.step, str(wanted).removeprefix("torch."), checkpoint.path)


def _trained(student: StudentSettings, checkpoint: Checkpoint, seed: int, *, adapter: bool) -> Any:
    """Returns the student with a checkpoint's weights, in float32: a plain model, or with `adapter` peft's wrapped one."""
    model = load_model(student.model, student.revision, torch.float32, CPU, "student")
    if student.lora is None:
        _fill(dict(model.named_parameters()), checkpoint)
        return model
    from opd import lora

    wrapped = lora.wrap(model, student.lora, seed)
    _fill({name: parameter for name, parameter in wrapped.named_parameters() if parameter.requires_grad}, checkpoint)
    if adapter:
        settings = wrapped.peft_config[lora.ADAPTER]
        local = Path(student.model)
        # Whoever loads the adapter may stand in another folder.
        settings.base_model_name_or_path = str(local.absolute()) if local.is_dir() else student.model
        settings.revision = student.revision
        settings.inference_mode = True
        return wrapped
    # The base was just read from disk and is thrown away afterwards, so that merging happens once.
    return wrapped.merge_and_unload(safe_merge=True)


def _released_dtype(student: StudentSettings) -> torch.dtype:
    config = load_model_config(student.model, student.revision, "student")
    return config.get_text_config().dtype or config.dtype or torch.float32


@torch.no_grad()
def _fill(parameters: Mapping[str, Tensor], checkpoint: Checkpoint) -> None:
    """Copies a checkpoint's weights into parameters of the same names; raises CheckpointError when they are not the same."""
    saved = checkpoint.tensors(like={"model": parameters})["model"]
    for name, parameter in parameters.items():
        parameter.copy_(saved[name])


def _require_free(folder: Path) -> None:
    """Raises RunDirectoryError where something is in the way: at the folder itself or above it."""
    if folder.is_dir():
        if any(folder.iterdir()):
            raise RunDirectoryError(
                f"{folder} exists and is not an empty folder.",
                why="an export is never written over other files",
                fix="name another folder, or remove it",
            )
        return
    for path in (folder, *folder.parents):
        if path.is_dir():
            return
        if path.is_symlink() or path.exists():
            what = "a file" if path.exists() else f"a link to {path.readlink()}, which is not there"
            raise RunDirectoryError(
                f"{folder} cannot be made a folder.",
                where=str(path),
                why=f"{path} is {what}",
                fix="name another folder, or remove what is in the way",
            )


def _write(folder: Path, model: Any, tokenizer: Any) -> None:
    """Writes model and tokenizer aside and renames the folder: it is there as a whole or not at all."""
    generation = model.generation_config
    try:
        generation.validate(strict=True)
    except ValueError:
        # Some models are released with a temperature and without do_sample, which transformers does not save again.
        generation.do_sample = True
    # A link to an empty folder stays a link: only its target can be replaced by a folder.
    target = folder.resolve()
    aside = target.with_name(f".{target.name}.partial-{os.getpid()}")
    try:
        aside.parent.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(aside)
        tokenizer.save_pretrained(aside)
        follow_umask(aside)
        aside.replace(target)
    except (OSError, SafetensorError) as error:
        raise RunDirectoryError(
            "The export could not be written.",
            where=str(folder),
            why=str(error),
            fix="free some space or name a folder that can be written; the run is untouched",
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
