"""From a run's newest checkpoint to a plain Hugging Face folder that transformers and vLLM load."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from opd import lora
from opd.checkpoint import Checkpoint, latest_checkpoint, load_checkpoint
from opd.config import Config
from opd.errors import CheckpointError, ConfigError, RunDirectoryError
from opd.models import load_model, load_model_config, load_tokenizer
from opd.recipes import load_config
from opd.runs import RunDirectory


def export_run(run: Path, folder: Path, *, adapter: bool = False) -> Path:
    """Writes the trained student to `folder` and returns it.

    The weights take the type that the original model has. LoRA adapters are merged, exactly once, into a fresh copy of the
    base weights; with `adapter` they are written as peft reads them instead. Raises RunDirectoryError when `folder` holds
    anything, CheckpointError when the run has no whole checkpoint or it belongs to another model.
    """
    directory = RunDirectory.open(run)
    config = load_config([str(directory.config_file)], [], {}).config
    path = latest_checkpoint(directory.checkpoints)
    if path is None:
        raise CheckpointError(
            "The run has no whole checkpoint to export.",
            where=str(directory.checkpoints),
            fix=f"opd distill --resume {run}",
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RunDirectoryError("The folder to export to is not empty.", where=str(folder), fix="name a new folder")
    if adapter and config.student.lora is None:
        raise ConfigError(
            "There is no adapter to export: the run trained all weights.", where="--adapter", fix="leave --adapter out"
        )
    aside = folder.with_name(f".{folder.name}.exporting")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        _write(config, path, aside, adapter=adapter)
        if folder.exists():
            folder.rmdir()
        folder.parent.mkdir(parents=True, exist_ok=True)
        aside.rename(folder)
    except OSError as error:
        raise RunDirectoryError("The export could not be written.", where=str(folder), why=str(error)) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder


def _write(config: Config, path: Path, folder: Path, *, adapter: bool) -> None:
    settings = config.student
    model = load_model(settings.model, settings.revision, torch.float32, torch.device("cpu"), "student")
    if settings.lora is not None:
        model = lora.wrap(model, settings.lora, config.run.seed)
    _load_trained(model, path)
    if adapter:
        model.save_pretrained(folder)
    else:
        plain = model
        if settings.lora is not None:
            merged = dict(lora.merged_weights(model))
            plain = load_model(settings.model, settings.revision, torch.float32, torch.device("cpu"), "student")
            plain.load_state_dict(merged, strict=False)
        released = load_model_config(settings.model, settings.revision, "student").get_text_config().dtype
        plain.to(released if isinstance(released, torch.dtype) else torch.float32).save_pretrained(folder)
    load_tokenizer(settings.model, settings.revision, "student").save_pretrained(folder)


@torch.no_grad()
def _load_trained(model: torch.nn.Module, path: Path) -> Checkpoint:
    """Copies a checkpoint's tensors into the parameters of the same names."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    checkpoint = load_checkpoint(path, like={"model": trained})
    for name, parameter in trained.items():
        parameter.copy_(checkpoint.tensors["model"][name])
    return checkpoint
