"""The promise of `make demo`, kept in full: minutes long."""

import json
import subprocess

import pytest
from conftest import ROOT


@pytest.mark.slow
def test_the_demo_heals_the_pruned_student(tmp_path):
    command = ["make", "--silent", "demo", f"DEMO_ARGS=--json run.dir={tmp_path}"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    summary = json.loads(result.stdout.splitlines()[-1])
    before, after = summary["before"], summary["after"]
    assert after["reverse_kl"] <= 0.6 * before["reverse_kl"]
    assert after["overlap"] > before["overlap"]
    assert after["teacher_text_reverse_kl"] < before["teacher_text_reverse_kl"]
    assert after["completion_length_tokens"] == pytest.approx(after["teacher_completion_length_tokens"], rel=0.2)
    assert after["student_entropy"] == pytest.approx(after["teacher_entropy"], rel=0.2)
    with open(f"{summary['run']}/metrics.jsonl") as lines:
        assert max(json.loads(line)["engine_mismatch_nats"] for line in lines) < 0.01
