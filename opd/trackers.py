"""Sending metrics to trackio, Weights & Biases and TensorBoard; a tracker that fails never stops a run."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opd.config import Config
from opd.errors import ConfigError

PROJECT = "opd"


@dataclass(slots=True)
class _Tracker:
    name: str
    log: Callable[[int, Mapping[str, float]], None]
    close: Callable[[], None]


class Trackers:
    """All trackers of a run. The first failure of one is reported, and it is not asked again."""

    def __init__(self, trackers: list[_Tracker], warn: Callable[[str], None]) -> None:
        self._trackers = trackers
        self._warn = warn

    def log(self, step: int, record: Mapping[str, Any]) -> None:
        """Sends the numbers of one step; nested values such as by_position stay in metrics.jsonl."""
        numbers = {
            name: float(value)
            for name, value in record.items()
            if isinstance(value, (int, float)) and not isinstance(value, bool)
        }
        for tracker in list(self._trackers):
            try:
                tracker.log(step, numbers)
            except Exception as error:
                self._trackers.remove(tracker)
                self._warn(_failure(tracker.name, error))

    def close(self) -> None:
        """Lets every tracker finish sending."""
        for tracker in self._trackers:
            try:
                tracker.close()
            except Exception as error:
                self._warn(_failure(tracker.name, error))
        self._trackers = []


def require_installed(names: Sequence[str]) -> None:
    """Raises ConfigError for trackers whose package is not installed, which is known before the run."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed.",
            where="run.trackers",
            fix=f"pip install {' '.join(missing)}, or leave it out: metrics.jsonl has everything",
        )


def open_trackers(names: Sequence[str], run: Path, config: Config, warn: Callable[[str], None]) -> Trackers:
    """Returns the named trackers for the run directory `run`; one that does not open is reported and left out."""
    opened = []
    for name in names:
        try:
            opened.append(_open(name, run, config.model_dump()))
        except Exception as error:
            warn(_failure(name, error))
    return Trackers(opened, warn)


def _open(name: str, run: Path, values: dict[str, Any]) -> _Tracker:
    match name:
        case "tensorboard":
            from torch.utils.tensorboard import SummaryWriter

            writer = SummaryWriter(str(run / "tensorboard"))

            def write(step: int, numbers: Mapping[str, float]) -> None:
                for metric, value in numbers.items():
                    writer.add_scalar(metric, value, step)
                writer.flush()

            return _Tracker(name, write, writer.close)
        case "wandb":
            wandb = importlib.import_module("wandb")
            # The name as id: a resumed run goes on in the same place.
            session = wandb.init(
                project=PROJECT, name=run.name, id=run.name, resume="allow", dir=str(run), config=values
            )
            return _Tracker(name, lambda step, numbers: session.log(dict(numbers), step=step), session.finish)
        case "trackio":
            trackio = importlib.import_module("trackio")
            trackio.init(project=PROJECT, name=run.name, resume="allow", config=values)
            return _Tracker(name, lambda step, numbers: trackio.log(dict(numbers), step=step), trackio.finish)
        case _:
            raise ValueError(f"there is no tracker {name}")


def _failure(name: str, error: Exception) -> str:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return f"{name} failed and gets no more metrics ({reason}); the run goes on, metrics.jsonl has everything."
