"""Whole runs through the command line, with tiny models and the transformers sampler."""

import fcntl
import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import termios
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from opd.errors import CheckpointError, PreflightError, RunDirectoryError
from opd.export import export_run
from opd.launch import Request, launch
from opd.metrics import METRICS
from opd.samplers.hf import HfSampler

UNREPEATABLE = ("_seconds", "per_second", "memory", "time")


@pytest.fixture(scope="module")
def arguments(two_models, prompts_file):
    """`opd distill` on tiny models: a step takes a fraction of a second."""
    student, teacher = two_models
    return [
        *("--student", str(student), "--teacher", str(teacher), "--data", f"{prompts_file},prompt=question"),
        *("rollout.sampler=hf", "rollout.prompts=4", "rollout.group_size=2", "rollout.max_tokens=8"),
        *("eval.prompts=4", "eval.max_tokens=8", "eval.every=2", "train.learning_rate=1e-3", "checkpoint.every=1"),
        *(
            "student.compute_dtype=float32",
            "teacher.dtype=float32",
            "loss.topk.k=8",
            "diagnostics.k=8",
            "data.max_prompt_tokens=64",
        ),
    ]


def opd(*arguments, check=True):
    result = subprocess.run(
        [sys.executable, "-m", "opd", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    if check:
        assert result.returncode == 0, result.stderr
    return result


def here(arguments, *overrides):
    """The same without a process of its own, which costs ten seconds of imports."""
    flags = dict(zip(("student", "teacher", "data"), arguments[1:6:2], strict=True))
    flags["data"] = [flags["data"]]
    return launch(Request(overrides=[*arguments[6:], *overrides], flags=flags))


def metrics_of(run, file="metrics.jsonl"):
    records = [json.loads(line) for line in (Path(run) / file).read_text().splitlines()]
    return [{k: v for k, v in record.items() if not any(mark in k for mark in UNREPEATABLE)} for record in records]


@pytest.fixture(scope="module")
def uninterrupted(arguments, tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    here(arguments, "train.steps=6", f"run.dir={folder}", "run.name=whole")
    return folder / "whole"


def test_a_run_leaves_metrics_rollouts_checkpoints_and_its_configuration(uninterrupted):
    records = metrics_of(uninterrupted)
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    for record in records:
        assert record.keys() <= METRICS.keys(), "every metric has its entry in the catalogue"
        assert record["engine_mismatch_nats"] < 1e-5
        assert 0 <= record["overlap"] <= 1
    rollouts = [json.loads(line) for line in sorted(uninterrupted.glob("rollouts/*.jsonl"))[0].read_text().splitlines()]
    assert len(rollouts) == 8
    assert len(rollouts[0]["token_ids"]) == len(rollouts[0]["sampler_logprobs"])
    assert (uninterrupted / "config.yaml").exists()
    assert (uninterrupted / "env.json").exists()


def test_held_out_prompts_are_measured_once_a_version_also_when_a_finished_run_is_resumed(arguments, tmp_path):
    here(arguments, "train.steps=3", f"run.dir={tmp_path}", "run.name=one")
    first = (tmp_path / "one" / "evals.jsonl").read_text()
    assert [record["step"] for record in metrics_of(tmp_path / "one", "evals.jsonl")] == [0, 2, 3]
    again = launch(Request(resume=str(tmp_path / "one")))
    assert (tmp_path / "one" / "evals.jsonl").read_text() == first
    assert again["before"]["reverse_kl"] != again["after"]["reverse_kl"]
    # Killed between the checkpoint and its evaluation.
    (tmp_path / "one" / "evals.jsonl").write_text(first.splitlines()[0] + "\n")
    launch(Request(resume=str(tmp_path / "one")))
    assert (tmp_path / "one" / "evals.jsonl").read_text().splitlines()[-1] == first.splitlines()[-1]


def test_training_brings_the_student_nearer_to_the_teacher(arguments, tmp_path):
    result = opd("distill", *arguments, "train.steps=30", "loss.support=full", f"run.dir={tmp_path}", "--json")
    summary = json.loads(result.stdout)
    assert summary["after"]["reverse_kl"] < 0.8 * summary["before"]["reverse_kl"]
    assert summary["after"]["overlap"] > summary["before"]["overlap"]
    assert summary["after"]["teacher_text_reverse_kl"] < summary["before"]["teacher_text_reverse_kl"]


def test_a_run_killed_at_any_moment_and_resumed_equals_the_one_that_was_not(arguments, uninterrupted, tmp_path):
    generator = random.Random(os.getpid())
    run = tmp_path / "killed"
    command = [
        sys.executable,
        "-m",
        "opd",
        "distill",
        *arguments,
        "train.steps=6",
        f"run.dir={tmp_path}",
        "run.name=killed",
    ]
    wanted = generator.randint(1, 5)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    metrics = run / "metrics.jsonl"
    while process.poll() is None:
        if metrics.exists() and metrics.read_bytes().count(b"\n") >= wanted:
            process.send_signal(signal.SIGKILL)
            break
    process.wait()
    assert process.returncode == -signal.SIGKILL, f"the run ended before it could be killed at step {wanted}"
    opd("distill", "--resume", run)
    assert metrics_of(run) == metrics_of(uninterrupted)
    assert metrics_of(run, "evals.jsonl") == metrics_of(uninterrupted, "evals.jsonl")
    assert sorted(p.name for p in run.glob("rollouts/*")) == sorted(p.name for p in uninterrupted.glob("rollouts/*"))


def test_interrupting_saves_and_the_resumed_run_is_the_same(arguments, uninterrupted, tmp_path):
    run = tmp_path / "stopped"
    command = [sys.executable, "-m", "opd", "distill", *arguments, "train.steps=6", "checkpoint.every=0"]
    process = subprocess.Popen(
        [*command, f"run.dir={tmp_path}", "run.name=stopped"],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    metrics = run / "metrics.jsonl"
    while process.poll() is None:
        if metrics.exists() and metrics.read_bytes().count(b"\n") >= 2:
            process.send_signal(signal.SIGINT)
            break
    _, errors = process.communicate()
    assert process.returncode == 130, errors
    assert "opd distill --resume" in errors
    opd("distill", "--resume", run)
    assert metrics_of(run) == metrics_of(uninterrupted)


def test_a_run_whose_terminal_is_closed_finishes_its_step_and_saves(arguments, tmp_path):
    """Whatever it prints after that fails, as on any terminal that is gone."""
    command = [sys.executable, "-m", "opd", "distill", *arguments, "train.steps=500", "checkpoint.every=0"]
    ours, terminal = os.openpty()
    process = subprocess.Popen(
        [*command, "eval.prompts=0", f"run.dir={tmp_path}", "run.name=closed"],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
        # The terminal of the new session, whose leader is told when it closes.
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(terminal)
    metrics = tmp_path / "closed" / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.read_bytes().count(b"\n") >= 2):
        if select.select([ours], [], [], 0.05)[0]:
            os.read(ours, 1 << 16)
    os.close(ours)
    assert process.wait(timeout=60) == 130
    steps = [record["step"] for record in metrics_of(tmp_path / "closed")]
    assert 2 <= steps[-1] < 500
    assert [path.name for path in (tmp_path / "closed" / "checkpoints").iterdir()] == [f"step-{steps[-1]:06d}"]


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(arguments, uninterrupted, tmp_path, capsys):
    run = tmp_path / "damaged"
    shutil.copytree(uninterrupted, run)
    (run / "checkpoints" / "step-000006" / "optimizer.safetensors").write_bytes(b"nothing")
    launch(Request(resume=str(run)))
    said = capsys.readouterr().out
    assert "step-000006 is torn (optimizer.safetensors has 7 bytes" in said
    assert "the one of step 5 is used instead" in said
    assert "going on after step 5 of 6 (checkpoints/step-000005)" in said
    assert metrics_of(run) == metrics_of(uninterrupted)


def test_a_run_whose_checkpoints_are_all_torn_begins_again_only_when_told_to(
    arguments, uninterrupted, tmp_path, capsys
):
    run = tmp_path / "damaged"
    shutil.copytree(uninterrupted, run)
    for checkpoint in (run / "checkpoints").iterdir():
        (checkpoint / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="none of them is whole") as refused:
        launch(Request(resume=str(run)))
    assert f"remove {run / 'checkpoints'}" in refused.value.fix
    assert metrics_of(run) == metrics_of(uninterrupted), "nothing is thrown away"
    shutil.rmtree(run / "checkpoints")
    launch(Request(resume=str(run)))
    assert "beginning again from the first step" in capsys.readouterr().out
    assert metrics_of(run) == metrics_of(uninterrupted)


@pytest.mark.parametrize("role", ["student", "teacher"])
def test_a_model_that_was_swapped_under_its_name_is_refused_before_the_run_goes_on(
    arguments, two_models, tmp_path, role
):
    copy = tmp_path / role
    shutil.copytree(two_models[role == "teacher"], copy)
    own = list(arguments)
    own[own.index(f"--{role}") + 1] = str(copy)
    here(own, "train.steps=1", "eval.prompts=0", f"run.dir={tmp_path}", "run.name=one")
    weights = load_file(copy / "model.safetensors")
    weights["model.norm.weight"] += 1
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    with pytest.raises(PreflightError, match=f"The {role} is not the one") as refused:
        launch(Request(resume=str(tmp_path / "one"), overrides=["train.steps=2"]))
    assert refused.value.where == str(copy)
    assert "model.safetensors" in refused.value.why
    assert [record["step"] for record in metrics_of(tmp_path / "one")] == [1]


def test_the_teacher_completes_the_held_out_prompts_once_and_no_others(arguments, tmp_path, monkeypatch):
    generate, asked = HfSampler.generate, []

    def counting(sampler, prompts, *more):
        asked.append(len(prompts))
        return generate(sampler, prompts, *more)

    monkeypatch.setattr(HfSampler, "generate", counting)
    here(arguments, "train.steps=1", f"run.dir={tmp_path}", "run.name=one", "eval.prompts=5", "rollout.prompts=3")
    student_before, teacher, step, student_after = asked
    assert student_before == teacher == student_after == 5
    assert step == 3


def test_a_run_in_which_most_tokens_teach_nothing_says_so_once(arguments, tmp_path, capsys):
    loss = ("loss.topk.of=intersection", "loss.topk.mass=renormalize", "loss.topk.k=8")
    here(arguments, "train.steps=2", f"run.dir={tmp_path}", "run.name=one", "eval.prompts=0", *loss)
    fractions = [record["degenerate_support_fraction"] for record in metrics_of(tmp_path / "one")]
    assert all(0.5 < fraction < 1 for fraction in fractions)
    assert capsys.readouterr().out.count("of the tokens taught nothing") == 1


def test_a_run_folder_is_never_overwritten(arguments, uninterrupted):
    before = (uninterrupted / "metrics.jsonl").read_text()
    with pytest.raises(RunDirectoryError) as refused:
        here(arguments, f"run.dir={uninterrupted.parent}", "run.name=whole")
    for way_out in ("--resume", "--force", "run.name"):
        assert way_out in str(refused.value)
    assert (uninterrupted / "metrics.jsonl").read_text() == before


def test_the_exported_student_loads_in_transformers(uninterrupted, tmp_path):
    export_run(uninterrupted, tmp_path / "exported", warn=pytest.fail)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float32)
    assert model(torch.arange(5)[None]).logits.isfinite().all()


@pytest.mark.parametrize(
    "extra",
    [
        ["loss.support=sampled", "rollout.temperature=0.7", "loss.sampler_correction=truncated"],
        ["loss.support=sampled", "loss.sampled.baseline=kl", "train.inner_epochs=2", "loss.importance=clip"],
        ["loss.topk.of=union", "loss.topk.mass=renormalize", "rollout.top_p=0.9"],
        ["student.lora.rank=4", "loss.divergence=jsd"],
        ["student.gradient_checkpointing=true", "loss.temperature=2", "loss.support=full"],
        ["student.attention=padded", "student.lora.rank=2", "student.gradient_checkpointing=true"],
    ],
    ids=lambda extra: " ".join(extra),
)
def test_every_kind_of_run_goes_through(arguments, tmp_path, extra):
    here(arguments, "train.steps=2", f"run.dir={tmp_path}", "run.name=one", "eval.prompts=0", *extra)
    assert len(metrics_of(tmp_path / "one")) == 2
