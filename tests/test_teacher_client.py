"""Facts about runs with a teacher behind servers: the same losses as in-process, whatever happens to a server."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from functools import cached_property
from pathlib import Path

import pytest

from opd.errors import TeacherUnavailable
from opd.launch import Request, launch

TOLERANCE = 1e-6
"""Relative, in float32: batches differ in their composition, so sums are rounded differently."""


class Server:
    """`opd teacher serve` in a process of its own."""

    def __init__(self, model, port=0):
        command = [sys.executable, "-m", "opd", "teacher", "serve", str(model), "--dtype", "float32"]
        self.model = model
        self.process = subprocess.Popen(
            [*command, "--port", str(port)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    @cached_property
    def url(self):
        """Waits until it answers, so that several can start at the same time."""
        return re.search(r"http://\S+", self.process.stdout.readline()).group()

    def signal(self, number):
        self.process.send_signal(number)

    def kill(self):
        self.process.kill()
        self.process.wait()

    def restarted(self):
        """The same on the same port."""
        port = int(self.url.rpartition(":")[2])
        self.kill()
        return Server(self.model, port)


@pytest.fixture
def servers(two_models):
    """Starts servers of the teacher and ends them with the test."""
    started = []

    def start(model=two_models[1], port=0):
        started.append(Server(model, port))
        return started[-1]

    start.all = started
    yield start
    for server in started:
        server.kill()


def run(two_models, prompts_file, folder, name, *overrides, teacher=None):
    student, model = two_models
    settings = [
        *("rollout.sampler=hf", "rollout.prompts=4", "rollout.group_size=2", "rollout.max_tokens=8", "train.steps=12"),
        *("eval.prompts=4", "eval.max_tokens=8", "eval.teacher_completions=0", "train.learning_rate=1e-3"),
        *("student.compute_dtype=float32", "loss.topk.k=8", "diagnostics.k=8", "data.max_prompt_tokens=64"),
        *(f"run.dir={folder}", f"run.name={name}"),
    ]
    if teacher is None:
        settings.append("teacher.dtype=float32")
    flags = {"student": str(student), "teacher": teacher or str(model), "data": [f"{prompts_file},prompt=question"]}
    return launch(Request(overrides=[*settings, *overrides], flags=flags))


def records(folder, name, file="metrics.jsonl"):
    return [json.loads(line) for line in (Path(folder) / name / file).read_text().splitlines()]


def assert_same(folder, name, expected):
    ours, theirs = records(folder, name), records(folder, expected)
    assert [record["step"] for record in ours] == [record["step"] for record in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        for key in ("loss", "reverse_kl_sampled", "overlap", "teacher_entropy", "grad_norm"):
            assert mine[key] == pytest.approx(
                other[key], rel=TOLERANCE * 10 if key == "grad_norm" else TOLERANCE, abs=TOLERANCE
            ), key
        assert mine["tokens"] == other["tokens"]
    assert len(records(folder, name, "evals.jsonl")) == len(records(folder, expected, "evals.jsonl"))


@pytest.fixture(scope="module")
def local_run(two_models, prompts_file, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    run(two_models, prompts_file, folder, "local")
    return folder


def test_one_server_gives_the_losses_of_the_in_process_teacher(two_models, prompts_file, local_run, servers):
    server = servers()
    run(two_models, prompts_file, local_run, "remote", teacher=server.url)
    assert_same(local_run, "remote", "local")
    for support in ("sampled", "full"):
        run(two_models, prompts_file, local_run, f"local-{support}", f"loss.support={support}")
        run(two_models, prompts_file, local_run, f"remote-{support}", f"loss.support={support}", teacher=server.url)
        assert_same(local_run, f"remote-{support}", f"local-{support}")


def wait_until(condition, seconds=60):
    for _ in range(seconds * 100):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it did not happen")


def test_a_server_killed_in_the_middle_of_a_step_loses_nothing_and_comes_back(
    two_models, prompts_file, local_run, servers, capfd
):
    first, second = servers(), servers()
    metrics = local_run / "failover" / "metrics.jsonl"

    def steps():
        return metrics.read_bytes().count(b"\n") if metrics.exists() else 0

    def interfere():
        wait_until(lambda: steps() >= 1)
        # Stopped, it holds what it is asked; the run comes to a stand within a step, and only then is it killed.
        first.signal(signal.SIGSTOP)
        seen = -1
        while seen != steps():
            seen = steps()
            threading.Event().wait(1.0)
        first.signal(signal.SIGKILL)
        servers.all.append(first.restarted())

    thread = threading.Thread(target=interfere)
    thread.start()
    run(two_models, prompts_file, local_run, "failover", teacher=f"{first.url},{second.url}")
    thread.join()
    assert_same(local_run, "failover", "local")
    assert f"{first.url} does not answer" in capfd.readouterr().out


def test_a_run_whose_servers_are_all_gone_saves_and_goes_on_when_one_is_back(
    two_models, prompts_file, local_run, servers
):
    server = servers()
    metrics = local_run / "gone" / "metrics.jsonl"

    def interfere():
        wait_until(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= 2)
        server.kill()

    thread = threading.Thread(target=interfere)
    thread.start()
    with pytest.raises(TeacherUnavailable, match="could be reached for 1 s") as caught:
        # Slow enough that the server is gone before the run is done.
        run(
            two_models,
            prompts_file,
            local_run,
            "gone",
            "teacher.max_wait=1",
            "checkpoint.every=0",
            "train.steps=2000",
            teacher=server.url,
        )
    thread.join()
    assert caught.value.exit_code == 1
    assert f"opd distill --resume {local_run / 'gone'}" in caught.value.fix
    done = len(records(local_run, "gone"))
    assert [path.name for path in (local_run / "gone" / "checkpoints").iterdir()] == [f"step-{done:06d}"]
    servers.all.append(server.restarted())
    assert servers.all[-1].url == server.url, "it answers"
    launch(Request(resume=str(local_run / "gone"), overrides=[f"train.steps={done + 2}"]))
    run(two_models, prompts_file, local_run, "through", f"train.steps={done + 2}")
    assert_same(local_run, "gone", "through")


def test_a_second_server_is_asked_where_the_first_is_slow(two_models, prompts_file, local_run, servers):
    first, second = servers(), servers()
    metrics = local_run / "hedged" / "metrics.jsonl"

    def interfere():
        wait_until(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= 1)
        first.signal(signal.SIGSTOP)

    thread = threading.Thread(target=interfere)
    thread.start()
    run(two_models, prompts_file, local_run, "hedged", "teacher.hedge_after=0.2", teacher=f"{first.url},{second.url}")
    thread.join()
    assert_same(local_run, "hedged", "local")


def test_https_with_a_certificate_of_ones_own(two_models, prompts_file, local_run, tmp_path, monkeypatch):
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    command = [sys.executable, "-m", "opd", "teacher", "serve", str(two_models[1]), "--port", "0", "--dtype", "float32"]
    process = subprocess.Popen(
        [*command, "--tls-certificate", str(certificate), "--tls-key", str(key)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"OPD_TEACHER_TOKEN": "a-token"},
    )
    try:
        url = re.search(r"https://\S+", process.stdout.readline()).group()
        monkeypatch.setenv("OPD_TEACHER_TOKEN", "a-token")
        run(two_models, prompts_file, local_run, "tls", teacher=url)
        assert_same(local_run, "tls", "local")
    finally:
        process.terminate()
        assert process.wait() == 0, "SIGTERM ends a server in order"
