"""What can be said about a whole configuration without loading a model: required keys, folders, temperatures."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from opd.config import Config

WEIGHT_FILES = ("*.safetensors", "*.bin")


@dataclass(frozen=True, slots=True)
class Check:
    """One finding, and the keys that it is about."""

    keys: tuple[str, ...]
    what: str
    why: str = ""
    fix: str = ""
    warning: bool = False
    """Allowed, but worth a line before the run."""


def check(config: Config, *, complete: bool, bad: Collection[str] = ()) -> list[Check]:
    """Returns all findings, save about keys in `bad` (already refused); with `complete`, also what is missing for a run."""
    findings = [
        *_temperatures(config),
        *_position_edges(config),
        *_stop_strings(config),
        *_run_name(config),
        *_paths(config),
    ]
    if complete:
        findings += [*_required(config, bad), *_models(config), *_teachers(config)]
    return [finding for finding in findings if not set(bad).intersection(finding.keys)]


def _required(config: Config, bad: Collection[str]) -> list[Check]:
    missing = {
        "student.model": (config.student.model, "--student FOLDER_OR_HUB_NAME"),
        "teacher.model": ([t for t in config.all_teachers if t.name], "--teacher FOLDER_OR_HUB_NAME_OR_URL"),
        "data.train": (config.data.train, "--data FILE.jsonl,prompt=COLUMN"),
    }
    absent = {
        key: flag
        for key, (value, flag) in missing.items()
        if not value and not any(name == key or name.startswith(f"{key}[") for name in bad)
    }
    if not absent:
        return []
    return [
        Check(
            keys=tuple(absent),
            what=f"A run needs a student, a teacher and prompts; missing: {', '.join(absent)}.",
            fix=f"{' '.join(absent.values())} (or the same keys in a recipe)",
        )
    ]


def _models(config: Config) -> list[Check]:
    found = (_model_folder(f"{role}.model", name) for role, name in _model_names(config))
    return [finding for finding in found if finding is not None]


def _model_names(config: Config) -> list[tuple[str, str]]:
    if config.run.replay is not None:
        return [("student", config.student.model)]
    teachers = [(f"teachers[{i}]", teacher.model) for i, teacher in enumerate(config.teachers)]
    return [("student", config.student.model), ("teacher", config.teacher.model), *teachers]


def _model_folder(key: str, name: str) -> Check | None:
    """A finding about a model that is named as a local path; hub names are left to the hub."""
    path = Path(name).expanduser()
    if not name or "\0" in name or not (name.startswith((".", "/", "~")) or name.count("/") > 1 or path.exists()):
        return None
    expected = (
        "the folder that save_pretrained wrote (config.json and *.safetensors), or a hub name such as Qwen/Qwen3-0.6B"
    )
    if not path.exists():
        return Check((key,), f"{key}: there is no folder {name}.", fix=f"name {expected}")
    if path.is_file():
        return Check((key,), f"{key}: {name} is a file, not a model folder.", fix=f"name {expected}")
    lacking = [] if (path / "config.json").is_file() else ["config.json"]
    if not any(any(path.glob(pattern)) for pattern in WEIGHT_FILES):
        lacking.append(f"weights ({' or '.join(WEIGHT_FILES)})")
    if not lacking:
        return None
    names = sorted(entry.name for entry in path.iterdir())
    holds = ", ".join(names[:6]) + (" …" if len(names) > 6 else "") if names else "nothing"
    return Check(
        (key,), f"{key}: {name} has no {' and no '.join(lacking)}.", why=f"it holds {holds}", fix=f"name {expected}"
    )


def _teachers(config: Config) -> list[Check]:
    if not config.teachers:
        return []
    nameless = [f"teachers[{i}]" for i, teacher in enumerate(config.teachers) if not teacher.name]
    findings = [
        Check((key,), f"{key} has neither a model nor urls.", fix="give it a model: a folder, a hub name or a URL")
        for key in nameless
    ]
    if config.teacher.name:
        findings.append(
            Check(
                ("teacher", "teachers"),
                "There is a teacher, and there are teachers.",
                fix="leave teacher out; a prompt that no rule fits goes to a last one of teachers without match",
            )
        )
    return findings


def _temperatures(config: Config) -> list[Check]:
    """LOSSES section 6: the sampled estimator is about the distribution that was sampled from."""
    loss, rollout = config.loss, config.rollout
    if loss.support != "sampled":
        return []
    findings = []
    if loss.temperature != rollout.temperature and loss.sampler_correction == "none":
        findings.append(
            Check(
                keys=("loss.support", "loss.temperature", "rollout.temperature", "loss.sampler_correction"),
                what=f"loss.temperature {loss.temperature:g} and rollout.temperature {rollout.temperature:g} differ.",
                why="support: sampled estimates the gradient under the distribution that the tokens were drawn from",
                fix="make them equal, or set loss.sampler_correction=truncated",
            )
        )
    if rollout.truncates:
        findings.append(
            Check(
                keys=("loss.support", "rollout.top_p", "rollout.top_k", "rollout.min_p"),
                what="rollout.top_p, top_k or min_p leaves tokens that can never be drawn: loss.support=sampled is biased by that, "
                "whatever the correction. loss.support=topk or full is not.",
                warning=True,
            )
        )
    return findings


def _position_edges(config: Config) -> list[Check]:
    edges = config.diagnostics.position_edges
    if all(low < high for low, high in zip([0, *edges], edges, strict=False)):
        return []
    return [Check(("diagnostics.position_edges",), f"diagnostics.position_edges must rise from above 0, not {edges}.")]


def _stop_strings(config: Config) -> list[Check]:
    if "" not in config.rollout.stop:
        return []
    return [Check(("rollout.stop",), "rollout.stop holds an empty text, which every completion ends with at once.")]


def _run_name(config: Config) -> list[Check]:
    """A run outside of run.dir, or deeper in it, would not be found by `--resume auto`."""
    name = config.run.name
    if name is None or "\0" in name or (name not in ("", ".", "..") and Path(name).name == name):
        return []
    return [
        Check(
            ("run.name",),
            f"run.name must be the name of one folder, not {name!r}.",
            fix="say where it goes with --output FOLDER/NAME, or with run.dir=FOLDER run.name=NAME",
        )
    ]


def _paths(config: Config) -> list[Check]:
    """The system ends a path at its first null character, and Python refuses to open one."""
    named = {
        "run.dir": config.run.dir,
        "run.name": config.run.name or "",
        "student.model": config.student.model,
        "teacher.model": config.teacher.model,
        "data.train": "".join(source.path for source in config.data.train),
        "data.heldout": "".join(source.path for source in config.data.heldout),
    }
    return [
        Check((key,), f"{key} holds a null character, which no path can.", fix="remove the \\0")
        for key, path in named.items()
        if "\0" in path
    ]
