"""The command line as a user meets it: help, exit codes, errors, and what goes to which stream."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from opd.env import as_text

HEAVY = ("torch", "transformers", "vllm", "datasets", "pandas", "numpy", "yaml", "rich")


def opd(*arguments, cwd=None, environment=None, importtime=False):
    """Runs the command as a shell would, without a terminal."""
    flags = ["-X", "importtime"] if importtime else []
    path = str(Path(__file__).resolve().parent.parent)
    return subprocess.run(
        [sys.executable, *flags, "-m", "opd", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path, "PYTHONUTF8": "1", "TERM": "xterm", **(environment or {})},
    )


@pytest.fixture
def models(tmp_path):
    """Two folders that look like models; nothing in these tests gets as far as loading them."""
    for name in ("student", "teacher"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_bytes(b"")
    return ["--student", "./student", "--teacher", "./teacher"]


@pytest.mark.parametrize(
    "arguments", [["--help"], ["distill", "--help"], ["config", "--help"], ["--version"]], ids=" ".join
)
def test_help_imports_nothing_heavy(arguments):
    result = opd(*arguments, importtime=True)
    assert result.returncode == 0
    imported = {
        line.rpartition("|")[2].strip().partition(".")[0]
        for line in result.stderr.splitlines()
        if "import time:" in line
    }
    assert "typer" in imported
    assert not imported.intersection(HEAVY)


def test_help_names_the_ways_to_say_what_to_do():
    text = opd("distill", "--help").stdout
    for part in ("--teacher", "--student", "--data", "KEY=VALUE", "--resume", "--lr", "--json"):
        assert part in text


@pytest.mark.parametrize("group", [[], ["config"], ["recipes"], ["teacher"]], ids=str)
def test_help_cuts_no_description_off(group):
    assert "..." not in opd(*group, "--help").stdout.partition("Commands:")[2]


def test_the_usage_line_has_one_ellipsis_and_the_data_flag_says_how_standard_input_is_named():
    text = opd("distill", "--help").stdout
    assert "[RECIPE | KEY=VALUE]...\n" in text
    assert "-,prompt=COLUMN" in text


def test_a_run_without_anything_is_told_what_it_needs(tmp_path):
    result = opd("distill", cwd=tmp_path)
    assert result.returncode == 2
    assert "missing: student.model, teacher.model, data.train" in result.stderr
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_all_mistakes_are_reported_at_once_without_a_traceback(tmp_path):
    (tmp_path / "mine.yaml").write_text("train:\n  stepz: 3\n  lr: 1e-5\n")
    result = opd("distill", "mine.yaml", "loss.support=topkk", "--steps", "-4", cwd=tmp_path)
    assert result.returncode == 2
    for part in ("mine.yaml:2", "mine.yaml:3", "train.learning_rate", "did you mean topk?", "flag --steps", "missing:"):
        assert part in result.stderr
    assert "Traceback" not in result.stderr


def test_json_errors_are_one_document_on_standard_output(tmp_path):
    result = opd("distill", "train.stepz=3", "--json", cwd=tmp_path)
    document = json.loads(result.stdout)
    assert result.returncode == document["exit_code"] == 2
    assert any("train.stepz" in problem["what"] for problem in document["error"]["problems"])


@pytest.mark.parametrize("environment", [{"OPD_DEBUG": "1"}, {"OPD_DEBUG": ""}], ids=str)
def test_a_traceback_only_when_asked(tmp_path, environment):
    result = opd("distill", cwd=tmp_path, environment=environment)
    assert result.returncode == 2
    assert ("Traceback" in result.stderr) == bool(environment["OPD_DEBUG"])


def test_a_mistyped_option_or_command_is_a_usage_error():
    assert opd("distill", "--stepz", "3").returncode == 2
    assert opd("distil").returncode == 2


def test_a_failure_that_the_user_can_correct_leaves_no_run_directory(tmp_path, models):
    pytest.importorskip("opd.data")
    result = opd("distill", *models, "--data", "nowhere.jsonl", cwd=tmp_path)
    assert result.returncode == 2
    assert "nowhere.jsonl" in result.stderr
    assert not list((tmp_path / "runs").glob("*"))


def test_an_unexpected_failure_is_one_line_and_its_traceback_is_kept_with_the_run(tmp_path, models):
    pytest.importorskip("opd.data")
    # A module that breaks while it is imported stands for whatever nobody thought of.
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "sitecustomize.py").write_text(
        "import sys\nclass Finder:\n    @staticmethod\n    def find_spec(name, path=None, target=None):\n"
        "        if name == 'opd.distill': raise LookupError('something unforeseen')\nsys.meta_path.insert(0, Finder)\n"
    )
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "hello"}\n')
    root = str(Path(__file__).resolve().parent.parent)
    environment = {"PYTHONPATH": os.pathsep.join([str(tmp_path / "broken"), root])}
    result = opd(
        "distill", *models, "--data", "prompts.jsonl", "--output", "runs/mine", cwd=tmp_path, environment=environment
    )
    assert result.returncode == 1
    assert "LookupError: something unforeseen" in result.stderr
    assert "bug in opd" in result.stderr
    assert "Traceback" not in result.stderr
    assert "Traceback" in (tmp_path / "runs" / "mine" / "error.txt").read_text()


def test_resuming_refuses_recipes_and_names_what_may_change(tmp_path):
    result = opd("distill", "demo-cpu", "--resume", "runs/mine", cwd=tmp_path)
    assert result.returncode == 2
    assert "its own directory" in result.stderr


def test_config_show_prints_yaml_with_origins_and_reads_back(tmp_path):
    result = opd("config", "show", "train.learning_rate=1e-5", "loss.support=full", cwd=tmp_path)
    assert result.returncode == 0
    line = next(line for line in result.stdout.splitlines() if "support:" in line)
    assert line.split() == ["support:", "full", "#", "override"]
    (tmp_path / "again.yaml").write_text(result.stdout)
    again = opd("config", "show", "again.yaml", cwd=tmp_path).stdout
    values = [line.partition("  # ")[0].rstrip() for line in result.stdout.splitlines()]
    assert [line.partition("  # ")[0].rstrip() for line in again.splitlines()] == values


def test_config_explain_knows_keys_and_corrects_mistyped_ones():
    assert "1 samples from the policy itself" in opd("config", "explain", "rollout.temperature").stdout
    result = opd("config", "explain", "rollout.temprature")
    assert result.returncode == 2
    assert "rollout.temperature" in result.stderr


def test_config_explain_without_a_key_lists_the_sections_and_an_empty_one_is_told():
    text = opd("config", "explain").stdout
    for section in ("student", "loss", "train"):
        assert f"\n  {section} " in f"\n{text}"
    empty = opd("config", "explain", "")
    assert empty.returncode == 2
    assert "The key is empty" in empty.stderr
    assert "name of a recipe is empty" in opd("config", "show", "").stderr


def test_a_mistyped_recipe_to_copy_gets_the_name_and_nothing_about_settings(tmp_path):
    result = opd("recipes", "cp", "dmo-cpu", "mine.yaml", cwd=tmp_path)
    assert "did you mean demo-cpu?" in result.stderr
    assert "key=value" not in result.stderr


def test_config_schema_is_json():
    assert "loss" in json.loads(opd("config", "schema").stdout)["properties"]


def test_recipes_are_listed_shown_and_copied_but_not_over_a_file(tmp_path):
    listed = opd("recipes", "ls").stdout
    assert "demo-cpu" in listed
    assert "student:" in opd("recipes", "show", "demo-cpu").stdout
    assert opd("recipes", "cp", "demo-cpu", "mine.yaml", cwd=tmp_path).returncode == 0
    assert (tmp_path / "mine.yaml").read_text() == opd("recipes", "show", "demo-cpu").stdout
    again = opd("recipes", "cp", "demo-cpu", "mine.yaml", cwd=tmp_path)
    assert again.returncode == 2
    assert "mine.yaml exists" in again.stderr


def test_env_prints_what_a_bug_report_needs_and_no_secret(tmp_path):
    environment = {"HF_TOKEN": "hf_secret", "OMP_NUM_THREADS": "2"}
    result = opd("env", "--json", environment=environment)
    found = json.loads(result.stdout)
    assert found["packages"]["transformers"]
    assert found["torch"]["gpus"] is not None
    assert found["memory_gib"] > 0
    assert found["variables"]["OMP_NUM_THREADS"] == "2"
    assert "hf_secret" not in result.stdout
    assert f"transformers: {found['packages']['transformers']}" in as_text(found)
