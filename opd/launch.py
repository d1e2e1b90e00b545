"""One `opd distill` after the command line is parsed: configuration, run directory, loop, last panel."""

from __future__ import annotations

import shlex
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opd.errors import EXIT_FAILED, ConfigError, Interrupted, OpdError, TeacherUnavailable
from opd.quiet import quieten
from opd.recipes import LoadedConfig, load_config
from opd.runs import RunDirectory, json_values
from opd.trackers import open_trackers, require_installed

if TYPE_CHECKING:
    from opd.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class Request:
    """What the user asked of `opd distill`."""

    recipes: Sequence[str] = ()
    overrides: Sequence[str] = ()
    flags: Mapping[str, Any] | None = None
    """By the names in `recipes.FLAGS`; None = not given."""
    resume: str | None = None
    """A run directory or "auto"."""
    replay: str | None = None
    """A run directory whose recorded scored rollouts are trained on."""
    force: bool = False
    json_output: bool = False


def launch(request: Request) -> dict[str, Any]:
    """Runs a distillation and returns what `--json` prints; raises OpdError for what the user can act on.

    A new run that stops before it measured anything, because of something the user can correct, leaves no directory.
    """
    run, loaded, checkpoint = _resumed(request) if request.resume else _new(request)
    from opd.display import open_display

    display = open_display(loaded.config, json_output=request.json_output)
    try:
        display.phase(f"run {run.path}")
        for warning in loaded.warnings:
            display.warn(warning)
        if request.resume:
            display.note(_going_on(checkpoint, run, loaded.config.train.steps))
        from opd.distill import distill

        quieten()
        trackers = open_trackers(loaded.config.run.trackers, run.path, loaded.config, display.warn)
        try:
            summary = distill(loaded.config, run, display, trackers, checkpoint)
        finally:
            trackers.close()
        if summary.interrupted:
            raise Interrupted(
                f"Stopped after step {summary.steps} of {loaded.config.train.steps}; a checkpoint was saved.",
                where=str(run.path),
                fix=f"go on with: {_resume_command(run)}",
            )
        paths = {"run": str(run.path), "metrics": str(run.metrics_file), "checkpoints": str(run.checkpoints)}
        export = f"opd export {shlex.quote(str(run.path))} my-student"
        display.summary(summary.before, summary.after, paths, [export])
        measured = json_values({"before": summary.before, "after": summary.after})
        return {**paths, "steps": summary.steps, **measured}
    except Interrupted:
        raise
    except TeacherUnavailable as error:
        run.record_error(traceback.format_exc())
        error.fix = f"start it again, then go on with: {_resume_command(run)}"
        raise
    except OpdError as error:
        correctable = error.exit_code != EXIT_FAILED
        if not (correctable and not request.resume and run.discard_if_unused()):
            run.record_error(traceback.format_exc())
        raise
    except KeyboardInterrupt:
        display.close()
        nothing_done = not request.resume and run.discard_if_unused()
        display.warn(
            "Stopped before the first step." if nothing_done else f"Stopped at once; go on with: {_resume_command(run)}"
        )
        raise
    except Exception as error:
        run.record_error(traceback.format_exc())
        error.add_note(f"The traceback is in {run.error_file}")
        raise
    finally:
        display.close()
        run.close()


def _new(request: Request) -> tuple[RunDirectory, LoadedConfig, Checkpoint | None]:
    recipes, overrides = [*request.recipes], [*request.overrides]
    if request.replay is not None:
        # The run's own configuration comes first, so that everything else may differ; its name cannot be had twice.
        recipes.insert(0, str(RunDirectory.open(request.replay).config_file))
        overrides += [f"run.replay={request.replay}"]
        named = any(text.startswith("run.name=") for text in overrides) or (request.flags or {}).get("output")
        overrides += [] if named else ["run.name=null"]
    loaded = load_config(recipes, overrides, request.flags)
    require_installed(loaded.config.run.trackers)
    return RunDirectory.create(loaded, force=request.force), loaded, None


def _resumed(request: Request) -> tuple[RunDirectory, LoadedConfig, Checkpoint | None]:
    """The run as it was begun, and its newest whole checkpoint; where none was ever saved it starts again.

    Raises CheckpointError where all are torn.
    """
    assert request.resume is not None
    if request.recipes or request.force or request.replay:
        given = request.recipes[0] if request.recipes else "--force" if request.force else "--replay"
        raise ConfigError(
            f"{given} cannot be used with --resume.",
            why="a resumed run goes on with the configuration in its own directory",
            fix=f"opd distill --resume {request.resume}, with key=value for the few things that may change",
        )
    from opd.checkpoint import newest_checkpoint
    from opd.resume import load_resumed, resolve_resume

    folders = [text.partition("=")[2] for text in request.overrides if text.startswith("run.dir=")]
    overrides = [text for text in request.overrides if not text.startswith("run.dir=")]
    run = resolve_resume(request.resume, Path(folders[-1] if folders else "runs").expanduser())
    loaded = load_resumed(run, overrides, request.flags or {})
    require_installed(loaded.config.run.trackers)
    run.lock()
    torn: list[str] = []
    checkpoint = newest_checkpoint(run.checkpoints, torn.append)
    loaded = replace(loaded, warnings=(*loaded.warnings, *torn))
    if checkpoint is None:
        run.rewind(-1)
    run.note_resumption(loaded.overrides)
    if loaded.overrides:
        run.write_config(loaded)
    return run, loaded, checkpoint


def _going_on(checkpoint: Checkpoint | None, run: RunDirectory, steps: int) -> str:
    if checkpoint is None:
        return "beginning again from the first step: no checkpoint was saved"
    return f"going on after step {checkpoint.step} of {steps} ({checkpoint.path.relative_to(run.path)})"


def _resume_command(run: RunDirectory) -> str:
    return f"opd distill --resume {shlex.quote(str(run.path))}"
