"""The run directory: what is in it, that it is never overwritten, and what survives a kill."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys

import pytest

from opd.errors import ConfigError, RunDirectoryError, TrainingError
from opd.metrics import CATALOGUE
from opd.recipes import load_config
from opd.resume import load_resumed, resolve_resume
from opd.runs import RunDirectory, runs_in


@pytest.fixture
def load(tmp_path):
    """Returns a loaded configuration whose runs go under tmp_path/runs."""

    def loaded(*overrides):
        base = ["student.model=org/My Student", "teacher.model=org/teacher", "data.train=[{path: a.jsonl}]"]
        return load_config([], [*base, f"run.dir={tmp_path / 'runs'}", *overrides])

    return loaded


def test_a_run_directory_holds_what_is_needed_to_repeat_it(load):
    run = RunDirectory.create(load("train.steps=7"))
    assert load_config([run.config_file]).config == load("train.steps=7").config
    assert "steps: 7" in run.config_file.read_text()
    assert "train.steps=7" in (run.path / "overrides.txt").read_text().splitlines()
    environment = json.loads((run.path / "env.json").read_text())
    assert environment["packages"]["torch"]
    assert environment["cpu"]["cores"] >= 1


def test_the_kept_configuration_says_no_more_of_a_data_source_than_the_user_did(load):
    run = RunDirectory.create(load())
    (source,) = load_config([run.config_file]).config.data.train
    assert source.model_fields_set == {"path"}


def test_unnamed_runs_are_dated_named_after_the_student_and_counted(load, tmp_path):
    first, second = RunDirectory.create(load()), RunDirectory.create(load())
    assert first.path != second.path
    assert first.path.parent == tmp_path / "runs"
    assert first.path.name.endswith("-my-student-1")
    assert second.path.name.endswith("-my-student-2")


def test_a_named_run_that_exists_is_refused_with_the_three_ways_out(load):
    run = RunDirectory.create(load("run.name=mine"))
    run.append_metrics({"step": 1})
    with pytest.raises(RunDirectoryError) as caught:
        RunDirectory.create(load("run.name=mine"))
    assert caught.value.exit_code == 2
    for way_out in ("--resume", "--output", "--force"):
        assert way_out in caught.value.fix
    assert run.metrics() == [{"step": 1}]


def test_force_removes_what_the_run_wrote_and_nothing_else(load):
    run = RunDirectory.create(load("run.name=mine"))
    run.append_metrics({"step": 1})
    run.write_rollouts(1, [{"prompt_index": 0}])
    (run.path / "notes.md").write_text("mine")
    run.close()
    again = RunDirectory.create(load("run.name=mine"), force=True)
    assert again.metrics() == []
    assert not again.rollouts.exists()
    assert (again.path / "notes.md").read_text() == "mine"


def test_force_does_not_touch_a_folder_that_is_no_run(load, tmp_path):
    folder = tmp_path / "runs" / "thesis"
    folder.mkdir(parents=True)
    (folder / "chapter.tex").write_text("…")
    with pytest.raises(RunDirectoryError, match="not a run directory"):
        RunDirectory.create(load("run.name=thesis"), force=True)
    assert (folder / "chapter.tex").exists()


def test_numbers_that_json_does_not_have_become_null(load):
    run = RunDirectory.create(load())
    run.append_metrics({"step": 1, "loss": math.nan, "by_position": {"loss": [1.0, math.inf]}})
    (line,) = run.metrics_file.read_text().splitlines()
    assert json.loads(line) == {"step": 1, "loss": None, "by_position": {"loss": [1.0, None]}}


def test_rewinding_drops_what_came_after_and_lines_torn_by_a_kill(load):
    run = RunDirectory.create(load())
    for step in (1, 2, 3):
        run.append_metrics({"step": step})
        run.append_eval({"step": step})
        run.write_rollouts(step, [{"sample": 0}])
    (run.rollouts / ".step-000004.jsonl.tmp").write_text("torn")
    with run.metrics_file.open("a") as file:
        file.write('5\n[]\n{"step": 4, "lo')
    run.rewind(2)
    run.append_metrics({"step": 3, "again": True})
    assert run.metrics() == [{"step": 1}, {"step": 2}, {"step": 3, "again": True}]
    assert run.evals() == [{"step": 1}, {"step": 2}]
    assert sorted(file.name for file in run.rollouts.iterdir()) == ["step-000001.jsonl", "step-000002.jsonl"]


def test_a_run_that_cannot_be_written_says_so_and_how_to_go_on(load):
    run = RunDirectory.create(load())
    run.rollouts.write_text("a file is in the way")
    with pytest.raises(TrainingError, match="cannot be written") as caught:
        run.write_rollouts(1, [{"sample": 0}])
    assert "--resume" in caught.value.fix


def test_two_processes_cannot_write_one_run_and_a_killed_one_does_not_block_it(load):
    run = RunDirectory.create(load())
    run.close()
    holder = subprocess.Popen(
        [
            *(sys.executable, "-c"),
            "import sys; from opd.runs import RunDirectory; run = RunDirectory.open(sys.argv[1]); run.lock(); "
            "print('locked', flush=True); sys.stdin.read()",
            str(run.path),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout.readline() == "locked\n"
    with pytest.raises(RunDirectoryError, match="Another process") as caught:
        run.lock()
    assert str(holder.pid) in caught.value.where
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    run.lock()


def test_a_run_that_did_nothing_can_be_discarded_and_one_that_did_cannot(load):
    idle, busy = RunDirectory.create(load("run.name=idle")), RunDirectory.create(load("run.name=busy"))
    busy.append_metrics({"step": 1})
    assert idle.discard_if_unused()
    assert not idle.path.exists()
    assert not busy.discard_if_unused()
    assert busy.config_file.exists()


def test_opening_what_is_no_run_names_the_ones_that_are_there(load, tmp_path):
    run = RunDirectory.create(load())
    with pytest.raises(RunDirectoryError) as caught:
        RunDirectory.open(tmp_path / "runs" / "nowhere")
    assert str(run.path) in caught.value.fix
    with pytest.raises(RunDirectoryError, match="not a run directory"):
        RunDirectory.open(tmp_path)


def test_a_resumed_run_keeps_its_configuration_and_takes_only_what_leaves_it_the_same_run(load):
    run = RunDirectory.create(load("train.steps=5", "loss.topk.k=4", "run.name=mine"))
    resumed = load_resumed(run, ["checkpoint.every=2"], {"steps": 9})
    assert (resumed.config.train.steps, resumed.config.checkpoint.every, resumed.config.loss.topk.k) == (9, 2, 4)
    assert resumed.provenance["loss.topk.k"] == "override"
    assert resumed.provenance["train.steps"] == "flag --steps (on resume)"
    with pytest.raises(ConfigError) as caught:
        load_resumed(run, ["loss.topk.k=8", "run.seed=1"], {})
    assert len(caught.value.problems) == 2
    assert "another run" in str(caught.value.problems[0])


def test_what_was_changed_on_a_resumption_is_kept_with_the_run(load):
    run = RunDirectory.create(load("train.steps=5"))
    resumed = load_resumed(run, ["train.steps=9"], {})
    run.note_resumption(resumed.overrides)
    run.write_config(resumed)
    assert load_resumed(run, [], {}).config.train.steps == 9
    assert (run.path / "overrides.txt").read_text().splitlines()[-1] == "train.steps=9"


def test_a_run_resumed_with_a_changed_setting_can_be_resumed_again(load):
    """What a data source was not told stays untold in config.yaml, however often the run is gone on with."""
    run = RunDirectory.create(load("train.steps=5"))
    first = run.config_file.read_text()
    for steps in (6, 7):
        resumed = load_resumed(run, [f"train.steps={steps}"], {})
        assert resumed.provenance["loss.topk.k"] == "default"
        run.write_config(resumed)
        (source,) = load_config([run.config_file]).config.data.train
        assert source.model_fields_set == {"path"}
    changed = [line for line in run.config_file.read_text().splitlines() if line not in first.splitlines()]
    assert [line.split() for line in changed] == [["steps:", "7", "#", "override", "(on", "resume)"]]


def test_a_resumption_in_another_environment_is_kept_beside_the_first(load, monkeypatch):
    run = RunDirectory.create(load())
    first = json.loads((run.path / "env.json").read_text())
    run.note_resumption([])
    assert json.loads((run.path / "env.json").read_text()) == first

    monkeypatch.setenv("OMP_NUM_THREADS", "77")
    for _ in range(2):
        run.note_resumption([])
        (resumed,) = json.loads((run.path / "env.json").read_text())["resumed"]
        assert resumed["variables"]["OMP_NUM_THREADS"] == "77"
    assert {**json.loads((run.path / "env.json").read_text()), "resumed": None} == {**first, "resumed": None}


@pytest.mark.parametrize("damaged", ["", "{", "[]", "5", '{"resumed": []}'])
def test_a_damaged_environment_does_not_keep_a_run_from_going_on(load, damaged):
    run = RunDirectory.create(load())
    run.env_file.write_text(damaged)
    run.note_resumption([])
    assert json.loads(run.env_file.read_text())["resumed"][-1]["packages"]["torch"]


def test_a_longer_run_under_a_falling_learning_rate_is_a_warning(load):
    run = RunDirectory.create(load("train.schedule=cosine"))
    assert "learning rate" in load_resumed(run, ["train.steps=200"], {}).warnings[0]


def test_resume_auto_takes_the_newest_run_with_a_checkpoint(load, tmp_path):
    import torch

    from opd.checkpoint import save_checkpoint

    with pytest.raises(RunDirectoryError, match="no run with a checkpoint"):
        resolve_resume("auto", tmp_path / "runs")
    saved, _idle = RunDirectory.create(load("run.name=saved")), RunDirectory.create(load("run.name=idle"))
    save_checkpoint(saved.checkpoints, 1, {"model": {"w": torch.zeros(1)}}, {}, keep_last=1)
    assert resolve_resume("auto", tmp_path / "runs").path == saved.path
    assert {run.path for run in runs_in(tmp_path / "runs")} == {saved.path, _idle.path}
    (saved.checkpoints / "step-000001" / "manifest.json").unlink()
    assert resolve_resume("auto", tmp_path / "runs").path == saved.path, "damage is no reason to take another run"


def test_every_metric_has_a_unit_a_direction_and_a_sentence():
    names = [metric.name for metric in CATALOGUE]
    assert len(names) == len(set(names))
    for metric in CATALOGUE:
        assert metric.unit
        assert metric.direction in ("lower", "higher", "neither")
        assert metric.sentence.endswith(".")
