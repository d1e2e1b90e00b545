"""Facts about recorded scores: no teacher is asked twice for the same, and a recorded run can be trained on again."""

import json
import shutil
from pathlib import Path

import pytest

from opd.errors import ConfigError, DataError
from opd.launch import Request, launch
from opd.teachers.local import LocalTeacher

SETTINGS = [
    *("rollout.sampler=hf", "rollout.prompts=4", "rollout.group_size=2", "rollout.max_tokens=6", "train.steps=4"),
    *("eval.prompts=2", "eval.max_tokens=4", "train.learning_rate=1e-3", "student.compute_dtype=float32"),
    *("teacher.dtype=float32", "loss.topk.k=8", "diagnostics.k=8", "data.max_prompt_tokens=64"),
]


def run(two_models, prompts_file, folder, name, *overrides):
    student, teacher = map(str, two_models)
    flags = {"student": student, "teacher": teacher, "data": [f"{prompts_file},prompt=question"]}
    launch(Request(overrides=[*SETTINGS, f"run.dir={folder}", f"run.name={name}", *overrides], flags=flags))
    return folder / name


def values(run, *names):
    records = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]
    return [[record[name] for name in names] for record in records]


@pytest.fixture
def scored(monkeypatch):
    """Counts the rollouts that the teacher itself scores."""
    counted = []
    real = LocalTeacher.score

    def score(self, rollouts, request):
        for item in real(self, rollouts, request):
            counted.append(item.rollout.key)
            yield item

    monkeypatch.setattr(LocalTeacher, "score", score)
    return counted


@pytest.fixture(scope="module", params=["topk", "full", "sampled"])
def recorded(request, two_models, prompts_file, tmp_path_factory):
    folder = tmp_path_factory.mktemp("recorded")
    settings = [f"teacher.cache={folder / 'cache'}", f"loss.support={request.param}"]
    return run(two_models, prompts_file, folder, "first", *settings), settings


def test_a_repeated_run_does_not_ask_the_teacher_and_is_the_same(recorded, two_models, prompts_file, tmp_path, scored):
    first, settings = recorded
    again = run(two_models, prompts_file, tmp_path, "again", *settings)
    assert scored == []
    assert values(again, "loss", "grad_norm") == values(first, "loss", "grad_norm")
    assert (again / "evals.jsonl").read_text() == (first / "evals.jsonl").read_text()


def test_another_request_and_another_teacher_are_not_found(recorded, two_models, prompts_file, tmp_path, scored):
    _, settings = recorded
    run(
        two_models,
        prompts_file,
        tmp_path,
        "hotter",
        *settings,
        "loss.temperature=1.5",
        "rollout.temperature=1.5",
        "train.steps=1",
    )
    assert len(scored) >= 8
    scored.clear()
    other = tmp_path / "teacher"
    shutil.copytree(two_models[0], other)
    run((two_models[0], other), prompts_file, tmp_path, "other", *settings, "train.steps=1")
    assert len(scored) >= 8


def test_a_damaged_shard_is_scored_again(recorded, two_models, prompts_file, tmp_path, scored):
    first, settings = recorded
    cache = tmp_path / "cache"
    shutil.copytree(first.parent / "cache", cache)
    for shard in cache.glob("shard-*"):
        shard.write_bytes(shard.read_bytes()[:50])
    again = run(two_models, prompts_file, tmp_path, "again", f"teacher.cache={cache}", *settings[1:])
    assert len(scored) >= 4 * 8
    assert values(again, "loss") == values(first, "loss")


def test_a_replayed_run_takes_the_same_steps_without_teacher_data_and_sampler(
    recorded, two_models, tmp_path, scored, monkeypatch
):
    first, _ = recorded
    for name in ("opd.pipeline.find_teacher", "opd.pipeline.load_sources", "opd.pipeline.build_sampler"):
        monkeypatch.setattr(name, lambda *_: pytest.fail("not needed"))
    launch(Request(replay=str(first), overrides=[f"run.dir={tmp_path}", "run.name=replayed"]))
    ours, theirs = (values(one, "step", "loss", "grad_norm", "tokens") for one in (tmp_path / "replayed", first))
    for mine, other in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(other, rel=1e-6)


def test_a_replay_may_train_otherwise_and_resumes(recorded, tmp_path):
    first, _ = recorded
    settings = [f"run.dir={tmp_path}", "train.learning_rate=3e-3", "loss.reduction=sequence_mean", "checkpoint.every=1"]
    launch(Request(replay=str(first), overrides=[*settings, "run.name=whole"]))
    launch(Request(replay=str(first), overrides=[*settings, "run.name=halves", "train.steps=2"]))
    launch(Request(resume=str(tmp_path / "halves"), overrides=["train.steps=4"]))
    assert values(tmp_path / "halves", "loss", "grad_norm") == values(tmp_path / "whole", "loss", "grad_norm")
    assert values(tmp_path / "whole", "loss")[-1] != values(first, "loss")[-1]


def test_what_was_not_recorded_is_said(recorded, two_models, prompts_file, tmp_path):
    first, settings = recorded
    here = [f"run.dir={tmp_path}", "run.name=x"]
    with pytest.raises(ConfigError, match="recorded 4 steps, fewer than"):
        launch(Request(replay=str(first), overrides=[*here, "train.steps=9"]))
    other = "full" if "topk" in settings[1] else "topk"
    with pytest.raises(ConfigError, match="not those that this loss needs"):
        launch(Request(replay=str(first), overrides=[*here, f"loss.support={other}"]))
    plain = run(two_models, prompts_file, tmp_path, "plain", "train.steps=1")
    with pytest.raises(DataError, match="no recorded scores"):
        launch(Request(replay=str(plain), overrides=here))
    with pytest.raises(DataError, match="are not there"):
        launch(Request(replay=str(first), overrides=[*here, f"teacher.cache={tmp_path / 'nowhere'}"]))
