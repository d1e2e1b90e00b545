"""What a user watches: rows on a terminal, plain lines in a pipe, the panel at the end, and trackers that may fail."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from opd.config import Config
from opd.display import Display, duration, outcome_rows
from opd.errors import ConfigError
from opd.trackers import open_trackers, require_installed

RECORD = {
    "step": 3,
    "loss": 0.4,
    "reverse_kl_sampled": 0.51234,
    "overlap": 0.645,
    "student_entropy": 0.9,
    "teacher_entropy": 0.8,
    "completion_length_tokens": 61.5,
    "truncated_fraction": 0.25,
    "engine_mismatch_nats": 0.0012,
    "rollout_seconds": 1.0,
    "score_seconds": 0.5,
    "update_seconds": 2.0,
    "sync_seconds": 0.25,
    "step_seconds": 4.0,
    "tokens": 1024,
    "by_position": {"edges": [16], "reverse_kl_sampled": [0.5, None]},
}
BEFORE = {
    "reverse_kl": 0.8,
    "overlap": 0.6,
    "student_entropy": 1.0,
    "teacher_entropy": 0.9,
    "completion_length_tokens": 60.0,
}
AFTER = {**BEFORE, "reverse_kl": 0.4, "overlap": 0.7}


def shown(*, terminal, width=160, records=(RECORD,), summary=False, environment=None):
    """Everything that a display writes."""
    output = io.StringIO()
    console = Console(file=output, force_terminal=terminal, width=width, highlight=False, _environ=environment or {})
    display = Display(console, total_steps=10, diagnostics_k=16, live=terminal)
    display.phase("loading the teacher")
    for record in records:
        display.step(record)
    display.warn("a tracker failed")
    if summary:
        display.summary(BEFORE, AFTER, {"run": "runs/mine"}, ["opd export runs/mine my-student"])
    display.close()
    return output.getvalue()


def test_a_pipe_gets_one_plain_line_a_step_with_the_names_of_the_metrics_file():
    text = shown(terminal=False, records=[RECORD, {**RECORD, "step": 4}])
    assert "\x1b" not in text
    lines = [line for line in text.splitlines() if line.startswith("step ")]
    assert len(lines) == 2
    for part in ("step 3/10", "reverse_kl_sampled=0.5123", "overlap=0.645", "tokens_per_second=256", "eta=0:28"):
        assert part in lines[0]
    assert "loading the teacher" in text
    assert "warning: a tracker failed" in text


@pytest.mark.parametrize("live", [True, False])
def test_a_note_stays_when_the_phase_has_moved_on(live):
    stream = io.StringIO()
    display = Display(Console(file=stream, force_terminal=live), total_steps=10, diagnostics_k=16, live=live)
    display.note("going on after step 3 of 10 (checkpoints/step-000003)")
    display.phase("loading the teacher")
    display.close()
    assert "going on after step 3 of 10 (checkpoints/step-000003)\n" in stream.getvalue().replace("\r", "")


def test_a_terminal_gets_a_table_row_a_step():
    text = shown(terminal=True)
    for part in (
        "KL sampled",
        "overlap",
        "3/10",
        "0.5123",
        "0.645",
        "0.90 / 0.80",
        "25%",
        "256",
        "1.0 0.5 2.0 0.2",
        "0:28",
    ):
        assert part in text


@pytest.mark.parametrize("width", [40, 80, 120])
def test_a_row_fits_a_narrow_terminal(width):
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown(terminal=True, width=width))
    rows = [row for row in re.split(r"[\r\n]", text) if "3/10" in row or "ETA" in row]
    assert len(rows) == 2
    assert all(len(row) <= width for row in rows)


def test_an_exact_kl_is_not_called_sampled():
    text = shown(terminal=True, records=[{**RECORD, "reverse_kl": 0.7}])
    assert "reverse KL" in text
    assert "KL sampled" not in text
    assert "0.7000" in text


def test_no_color_is_respected():
    coloured = "\x1b[33m"
    assert coloured in shown(terminal=True, environment={"TERM": "xterm-256color"})
    assert coloured not in shown(terminal=True, environment={"TERM": "xterm-256color", "NO_COLOR": "1"})


def test_a_step_that_measured_little_is_still_shown():
    record = {"step": 1, "loss": None, "reverse_kl_sampled": None}
    assert "step 1/10" in shown(terminal=False, records=[record])
    assert "1/10" in shown(terminal=True, records=[record])


@pytest.mark.parametrize("terminal", [True, False])
def test_the_end_shows_before_after_the_paths_and_the_next_command(terminal):
    text = shown(terminal=terminal, summary=True)
    for part in (
        "reverse KL, nats/token",
        "0.800",
        "0.400",
        "-50%",
        "overlap of the top 16 tokens",
        "0.600",
        "0.700",
        "runs/mine",
        "opd export runs/mine my-student",
    ):
        assert part in text


def test_the_outcome_says_when_the_kl_is_only_a_sampled_estimate():
    (row,) = outcome_rows({"reverse_kl_sampled": 0.5}, {"reverse_kl_sampled": 0.25}, 16)
    assert row == ("reverse KL, nats/token (sampled)", "0.500", "0.250", "-50%", "")
    assert outcome_rows(None, None, 16) == []


def test_a_slow_run_has_a_rate_and_zero_has_no_sign():
    slow = {**RECORD, "tokens": 1, "step_seconds": 4.0, "engine_mismatch_nats": -1e-7, "reverse_kl_sampled": -1e-9}
    line = shown(terminal=False, records=[slow])
    for part in ("tokens_per_second=0.25 ", "engine_mismatch_nats=0.00000 ", "reverse_kl_sampled=0.0000 "):
        assert part in line
    row = shown(terminal=True, records=[slow])
    assert " 0.25 " in row
    assert "-0.0000" not in row
    ((_, _, after, change, _),) = outcome_rows({"reverse_kl": -0.5}, {"reverse_kl": -0.5001}, 16)
    assert (after, change) == ("-0.500", "0%")


@pytest.mark.parametrize(("seconds", "text"), [(5, "0:05"), (75, "1:15"), (3675, "1:01:15"), (-1, "0:00")])
def test_durations_read_as_on_a_clock(seconds, text):
    assert duration(seconds) == text


def test_tensorboard_gets_the_numbers_of_every_step(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    warnings = []
    trackers = open_trackers(["tensorboard"], tmp_path, Config(), warnings.append)
    trackers.log(1, {"loss": 0.5, "by_position": {"edges": []}, "reverse_kl": None})
    trackers.log(2, {"loss": 0.25})
    trackers.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 0.5), (2, 0.25)]
    assert warnings == []


def test_a_tracker_that_fails_is_reported_once_and_never_stops_the_run(tmp_path, monkeypatch):
    (tmp_path / "wandb.py").write_text(
        "class Session:\n"
        "    def log(self, numbers, step): raise ConnectionError('no network')\n"
        "    def finish(self): pass\n"
        "def init(**settings): return Session()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    warnings = []
    trackers = open_trackers(["wandb"], tmp_path, Config(), warnings.append)
    trackers.log(1, {"loss": 0.5})
    trackers.log(2, {"loss": 0.5})
    trackers.close()
    assert len(warnings) == 1
    assert "no network" in warnings[0]


def test_a_tracker_that_does_not_open_is_reported(tmp_path, monkeypatch):
    (tmp_path / "trackio.py").write_text("def init(**settings): raise OSError('disk is full')\n")
    monkeypatch.syspath_prepend(tmp_path)
    warnings = []
    open_trackers(["trackio"], tmp_path, Config(), warnings.append).log(1, {"loss": 0.5})
    assert "disk is full" in warnings[0]


def test_a_tracker_that_is_not_installed_is_refused_before_the_run_with_the_command_that_installs_it():
    with pytest.raises(ConfigError) as caught:
        require_installed(["a_tracker_that_nobody_wrote"])
    assert "pip install a_tracker_that_nobody_wrote" in caught.value.fix
