"""Facts about the scoring server: its scores are the in-process teacher's, and nothing that is sent to it stops it."""

import json
import socket
import threading
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import fields, replace

import httpx
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from safetensors.torch import save
from serving import running

from opd.attention import Prefix
from opd.config import LossSettings, TeacherSettings
from opd.errors import ConfigError, PreflightError, TeacherUnavailable
from opd.heads import Head
from opd.linear_loss import head_loss
from opd.teachers import find_teacher, query_of, wire
from opd.teachers.batcher import Batcher, QueueFull
from opd.teachers.scoring import PrefixCache, ScoringModel
from opd.teachers.serve import ServeRequest, serve
from opd.teachers.server import ScoringServer, ServerSettings
from opd.types import Prompt, Query, Rollout, ScoreRequest, Targets, TeacherScores

VOCABULARY, CONTEXT = 64, 256
SMALL = ServerSettings(max_batch_tokens=256, max_queue_tokens=4096, max_tokens=1024, max_topk=32)


@contextmanager
def served(model, server_settings=SMALL, port=0):
    """A scoring server of the model; yields its address."""
    server = ScoringServer(model, server_settings)
    try:
        with running(server.app, port) as address:
            yield address
    finally:
        server.batcher.close()


@pytest.fixture(scope="module")
def model(two_models):
    return ScoringModel(str(two_models[1]), None, "cpu", "float32")


@pytest.fixture(scope="module")
def url(model):
    with served(model) as address:
        yield address


@pytest.fixture(scope="module")
def local(two_models):
    settings = TeacherSettings(model=str(two_models[1]), dtype="float32")
    return find_teacher(settings, pytest.fail).load(VOCABULARY)


@pytest.fixture(scope="module")
def remote(url):
    return find_teacher(TeacherSettings(model=url), pytest.fail).load(VOCABULARY)


def rollouts_of(count=12, k=5, seed=0):
    """Completions of four prompts, each with random distinct ids as the student's support."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for number in range(count):
        prompt = tuple(range(3, 8 + number % 4))
        ids = torch.randint(VOCABULARY, (1 + 2 * number,), generator=generator)
        support = torch.stack([torch.randperm(VOCABULARY, generator=generator)[:k] for _ in ids])
        rollout = Rollout(Prompt(number % 4, prompt, prompt), number // 4, ids, torch.zeros(len(ids)), "length", 0)
        found.append(replace(rollout, topk_ids=support))
    return found


REQUESTS = [
    ScoreRequest("sampled"),
    ScoreRequest("sampled", temperature=0.7, diagnostics_k=8),
    ScoreRequest("topk", k=5, support_of="teacher"),
    ScoreRequest("topk", k=5, support_of="student", temperature=1.3, diagnostics_k=4),
    ScoreRequest("topk", k=5, support_of="union"),
    ScoreRequest("topk", k=5, support_of="intersection", diagnostics_k=4),
    ScoreRequest("full"),
]


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda r: f"{r.kind} {r.support_of} {r.temperature}")
def test_a_remote_teacher_says_what_the_in_process_one_says(local, remote, request_):
    rollouts = rollouts_of()
    expected = {item.rollout.key: item.scores for item in local.score(rollouts, request_)}
    found = {item.rollout.key: item.scores for item in remote.score(iter(rollouts), request_)}
    assert found.keys() == expected.keys()
    for key, scores in found.items():
        for field in fields(TeacherScores):
            ours, theirs = getattr(scores, field.name), getattr(expected[key], field.name)
            assert (ours is None) == (theirs is None), field.name
            if ours is not None:
                assert ours.dtype == theirs.dtype
                torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5, msg=lambda m, f=field: f"{f.name}: {m}")


def test_hidden_states_come_with_the_head_that_they_are_read_with(local, remote):
    hidden = torch.randn(7, 32, generator=torch.Generator().manual_seed(0))
    ours, theirs = (list(teacher.score(rollouts_of(3), REQUESTS[-1])) for teacher in (remote, local))
    assert torch.equal(ours[0].head.logits(hidden), theirs[0].head.logits(hidden))
    assert ours[0].head is ours[2].head, "fetched once"


def test_the_tokenizer_comes_with_the_server(url, two_models):
    card = find_teacher(TeacherSettings(model=url), pytest.fail)
    own = find_teacher(TeacherSettings(model=str(two_models[1])), pytest.fail)
    assert card.tokenizer.get_vocab() == own.tokenizer.get_vocab()
    assert card.tokenizer.chat_template == own.tokenizer.chat_template
    assert card.context_length == CONTEXT
    assert card.vocab_size == VOCABULARY, "the padded rows of the head are no tokens"


def test_a_sampled_score_costs_four_bytes_a_token():
    sizes = []
    for length in (100, 1100):
        scores = TeacherScores(sampled_logprobs=torch.zeros(length))
        sizes.append(len(wire.encode_scores([scores], 0, support_known=False)))
    assert abs(sizes[1] - sizes[0] - 4 * 1000) <= 16, "a header that says 1100 is a few bytes longer"


def test_the_servers_of_one_teacher_have_the_same_weights(url, two_models):
    other = ScoringModel(str(two_models[0]), None, "cpu", "float32")
    with served(other) as second, pytest.raises(PreflightError, match="differ in weights_fingerprint") as caught:
        find_teacher(TeacherSettings(urls=[url, second]), pytest.fail)
    assert second in caught.value.where


def test_a_server_that_comes_back_is_asked_again_unless_it_has_become_another(model, two_models):
    with served(model) as address:
        settings = TeacherSettings(urls=[address], max_wait=5)
        said = []
        teacher = find_teacher(settings, said.append).load(VOCABULARY)
        assert len(list(teacher.score(rollouts_of(2), REQUESTS[0]))) == 2
    port = int(address.rpartition(":")[2])
    with served(model, port=port):
        assert len(list(teacher.score(rollouts_of(2), REQUESTS[0]))) == 2
    with (
        served(ScoringModel(str(two_models[0]), None, "cpu", "float32"), port=port),
        pytest.raises(TeacherUnavailable) as caught,
    ):
        list(teacher.score(rollouts_of(2), REQUESTS[0]))
    assert "differ in weights_fingerprint" in caught.value.where
    assert "other weights" in said[0], "it answered, and no request failed in between"


def test_no_server_at_the_address_is_said_before_anything_is_loaded():
    with pytest.raises(PreflightError, match="No teacher server answers") as caught:
        find_teacher(TeacherSettings(urls=["http://127.0.0.1:9"]), lambda _: None)
    assert "opd teacher serve" in caught.value.fix


def test_a_server_of_something_else_is_told_apart(tmp_path):
    from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

    with ThreadingHTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        with pytest.raises(PreflightError, match="not an opd scoring server"):
            find_teacher(TeacherSettings(urls=[f"http://127.0.0.1:{other.server_port}"]), pytest.fail)
        other.shutdown()


def test_a_token_is_asked_for_on_every_route_but_health(model, monkeypatch):
    monkeypatch.delenv("OPD_TEACHER_TOKEN", raising=False)
    with served(model, replace(SMALL, token="s3cret")) as address:
        assert httpx.get(f"{address}/health").status_code == 200
        for given_ in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic s3cret"}):
            for route in ("/v1/info", "/v1/head", "/v1/tokenizer", "/metrics"):
                assert httpx.get(address + route, headers=given_).status_code == 401
            assert httpx.post(f"{address}/v1/score", content=b"x", headers=given_).status_code == 401
        with pytest.raises(PreflightError, match="wants a token"):
            find_teacher(TeacherSettings(urls=[address]), pytest.fail)
        monkeypatch.setenv("OPD_TEACHER_TOKEN", "s3cret")
        assert find_teacher(TeacherSettings(urls=[address]), pytest.fail).vocab_size == VOCABULARY


def body_of(count=2, request=REQUESTS[3], **header):
    """A valid body, with entries of its header replaced."""
    queries = [Query((1, 2), r.token_ids, request, VOCABULARY, r.topk_ids) for r in rollouts_of(count)]
    if not request.wants_student_ids:
        queries = [replace(query, student_ids=None) for query in queries]
    body = wire.encode_queries(queries)
    if not header:
        return body
    tensors, found = wire._decode(body)
    return save(tensors, metadata={"opd": json.dumps(found | header)})


def post(url, body):
    return httpx.post(f"{url}/v1/score", content=body)


def tensors_of(**changed):
    tensors, header = wire._decode(body_of())
    tensors |= changed
    return save({name: t for name, t in tensors.items() if t is not None}, metadata={"opd": json.dumps(header)})


REFUSED = {
    "nothing": (b"", "not a safetensors file"),
    "a pickle": (b"\x80\x04K\x01.", "not a safetensors file"),
    "cut": (body_of()[:-3], "not a safetensors file"),
    "a header longer than the body": ((2**62).to_bytes(8, "little") + b"{}", "not a safetensors file"),
    "no opd header": (save({"ids": torch.zeros(1)}), "no entry"),
    "another protocol": (body_of(protocol=7), "Protocol version 7"),
    "another kind": (body_of(kind="everything"), "kind is"),
    "K beyond the limit": (body_of(k=33), "k is 33"),
    "K of no number": (body_of(k=True), "k is true"),
    "temperature 0": (body_of(temperature=0), "temperature is 0"),
    "temperature NaN": (body_of(temperature=float("nan")), "temperature is NaN"),
    "temperature beyond floats": (body_of(temperature=10**400), "temperature is"),
    "a larger vocabulary": (body_of(vocab_size=65), "vocab_size is 65"),
    "ids of floats": (tensors_of(ids=torch.zeros(8)), "ids is float32"),
    "an id out of the vocabulary": (tensors_of(ids=torch.full((8,), 64, dtype=torch.int32)), "ids holds 64"),
    "a negative id": (tensors_of(ids=torch.full((8,), -1, dtype=torch.int32)), "ids holds -1"),
    "lengths that do not add up": (tensors_of(ids=torch.ones(9, dtype=torch.int32)), "but ids has 9"),
    "negative lengths": (tensors_of(lengths=torch.tensor([[9, -1], [2, -2]], dtype=torch.int32)), "lengths holds -2"),
    "lengths of one column": (tensors_of(lengths=torch.tensor([8], dtype=torch.int32)), "lengths [1]"),
    "no lengths": (tensors_of(lengths=None), "has the tensors"),
    "no support": (tensors_of(student_ids=None), "has the tensors"),
    "a support of another shape": (tensors_of(student_ids=torch.ones(4, 4, dtype=torch.int32)), "send [T, K] = [4, 5]"),
    "an id twice": (tensors_of(student_ids=torch.ones(4, 5, dtype=torch.int32)), "an id twice"),
    "a tensor too many": (tensors_of(extra=torch.ones(1)), "extra"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_body_that_cannot_be_scored_gets_one_sentence(url, name):
    body, sentence = REFUSED[name]
    answer = post(url, body)
    assert answer.status_code == 400, answer.text
    assert sentence in answer.json()["error"]
    assert "\n" not in answer.json()["error"]


def test_what_is_too_long_is_told_how_long_it_may_be(url):
    ids = torch.ones(CONTEXT, dtype=torch.int64)
    request = REQUESTS[0]
    one = wire.encode_queries([Query((1,), ids, request, VOCABULARY)])
    assert "context is 256" in post(url, one).json()["error"]
    many = wire.encode_queries([Query((1,), ids[:100], request, VOCABULARY)] * 20)
    answer = post(url, many)
    assert answer.status_code == 413
    assert "takes 1024" in answer.json()["error"]
    assert post(url, b"x" * (wire.Limits(64, 256, 1024, 32).max_body_bytes + 1)).status_code == 413
    chunks = (b"x" * 65536 for _ in range(100))
    assert post(url, chunks).status_code == 413, "also where no Content-Length says so"


@st.composite
def damaged_bodies(draw):
    """A valid body with bytes replaced, inserted, removed or cut off, or with a header of anything."""
    body = bytearray(draw(st.sampled_from([body_of(request=r) for r in REQUESTS])))
    match draw(st.sampled_from(["bytes", "cut", "header", "noise", "tensors"])):
        case "bytes":
            for _ in range(draw(st.integers(1, 8))):
                body[draw(st.integers(0, len(body) - 1))] = draw(st.integers(0, 255))
        case "cut":
            del body[draw(st.integers(0, len(body) - 1)) :]
        case "header":
            anything = st.recursive(
                st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
                lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
                max_leaves=5,
            )
            key = draw(st.sampled_from(["protocol", "kind", "k", "diagnostics_k", "temperature", "vocab_size"]))
            return body_of(**{key: draw(anything)})
        case "noise":
            return draw(st.binary(max_size=200))
        case "tensors":
            dtype = draw(st.sampled_from([torch.int32, torch.int64, torch.float32, torch.bool]))
            shape = draw(st.lists(st.integers(0, 4), max_size=3))
            value = draw(st.integers(-(2**31), 2**31 - 1))
            name = draw(st.sampled_from(["ids", "lengths", "student_ids"]))
            return tensors_of(**{name: torch.full(shape, value).to(dtype)})
    return bytes(body)


def test_two_thousand_damaged_bodies_do_not_stop_the_server(url, local):
    statuses = {}
    with httpx.Client(base_url=url) as client:

        @settings(
            max_examples=2000,
            database=None,
            deadline=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(damaged_bodies())
        def send(body):
            answer = client.post("/v1/score", content=body)
            statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
            # A changed token id is another valid request.
            assert answer.status_code in (200, 400, 413), (answer.status_code, answer.text)
            if answer.status_code != 200:
                assert answer.json()["error"]

        send()
        assert sum(statuses.values()) >= 2000
        assert statuses[400] > 1000
        assert client.get("/health").status_code == 200
        assert client.post("/v1/score", content=body_of()).status_code == 200


def test_metrics_count_tokens_and_answers(url):
    before = httpx.get(f"{url}/metrics").text
    post(url, body_of())
    after = httpx.get(f"{url}/metrics").text

    def value(text, name):
        return next(float(line.split()[1]) for line in text.splitlines() if line.startswith(name))

    tokens = int(wire._decode(body_of())[0]["lengths"].sum())
    assert value(after, "opd_teacher_tokens_total") - value(before, "opd_teacher_tokens_total") == tokens
    name = 'opd_teacher_requests_total{status="200"}'
    assert value(after, name) - value(before, name) == 1


def test_a_prompt_that_was_read_is_not_read_again_and_the_scores_are_the_same(two_models):
    plain, remembering = (
        ScoringModel(str(two_models[1]), None, "cpu", "float32", prefix_cache_tokens=tokens) for tokens in (0, 40)
    )
    read = []
    remembering.model.get_decoder().register_forward_pre_hook(
        lambda module, args, kwargs: read.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    rollouts = rollouts_of(12)
    for group in (rollouts[:4], rollouts[4:8], rollouts[2:12], rollouts[:1], rollouts[:1]):
        queries = [query_of(rollout, REQUESTS[3], VOCABULARY) for rollout in group]
        ours, theirs = remembering.score(queries), plain.score(queries)
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine.support_logprobs, other.support_logprobs, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(mine.sampled_logprobs, other.sampled_logprobs, atol=1e-5, rtol=1e-5)
    completions = [sum(len(r.token_ids) - 1 for r in group) for group in (rollouts[4:8], rollouts[2:12])]
    assert read[1:3] == completions, "only completions are in the row, without their last tokens"
    assert read[3] == read[4] == 5, "a row has at least one token: a prompt whose completion is one token is read again"


def test_the_prompts_that_are_remembered_are_bounded():
    cache = PrefixCache(10)
    for number in range(5):
        cache.put((number,) * 4, Prefix([], torch.zeros(1)))
        cache.get((0,) * 4)
    assert cache.tokens == 8
    assert cache.get((0,) * 4) is not None
    assert cache.get((3,) * 4) is None
    assert cache.get((4,) * 4) is not None
    cache.put((9,) * 11, Prefix([], torch.zeros(1)))
    assert cache.tokens == 8


class Recorder:
    """A model that is slow on demand, and an observer: what came in which batch."""

    def __init__(self):
        self.batches = []
        self.go = threading.Event()

    def score(self, queries):
        self.batches.append([query.prompt_ids[0] for query in queries])
        assert self.go.wait(10)
        if any(query.prompt_ids[0] == 13 for query in queries):
            raise ValueError("thirteen")
        return [TeacherScores(sampled_logprobs=torch.zeros(len(query.token_ids))) for query in queries]

    def batch(self, tokens, sequences, seconds):
        pass


@pytest.fixture
def recorder():
    return Recorder()


@pytest.fixture
def batcher(recorder):
    made = Batcher(recorder.score, max_batch_tokens=40, max_queue_tokens=400, observer=recorder)
    yield made
    recorder.go.set()
    made.close()


def job(name, count, length=10):
    return [Query((name,), torch.ones(length - 1, dtype=torch.int64), REQUESTS[0], VOCABULARY)] * count


def wait_for(condition):
    while not condition():
        threading.Event().wait(0.005)


def test_a_short_request_is_not_behind_a_long_one(batcher, recorder):
    long = batcher.submit(job(1, 12))
    wait_for(lambda: recorder.batches)
    short = [batcher.submit(job(name, 1)) for name in (2, 3)]
    recorder.go.set()
    for future in (*short, long):
        future.result(10)
    assert recorder.batches[0] == [1, 1, 1, 1]
    assert sorted(recorder.batches[1]) == [1, 1, 2, 3], "one of each in turn, the rest of the batch to who has more"
    assert len(long.result()) == 12


def test_a_long_sequence_is_not_passed_over_for_ever(batcher, recorder):
    first = batcher.submit(job(1, 4))
    wait_for(lambda: recorder.batches)
    waiting = [batcher.submit(job(2, 8)), batcher.submit(job(3, 1, length=39)), batcher.submit(job(4, 8))]
    recorder.go.set()
    for future in (first, *waiting):
        future.result(10)
    place = next(number for number, batch in enumerate(recorder.batches) if 3 in batch)
    assert place <= 2


def test_a_full_queue_says_when_to_come_back(batcher, recorder):
    batcher.submit(job(1, 1))
    wait_for(lambda: recorder.batches)
    batcher.submit(job(2, 40))
    with pytest.raises(QueueFull) as full:
        batcher.submit(job(3, 1))
    assert full.value.retry_after > 0


def test_a_cancelled_request_is_not_scored(batcher, recorder):
    batcher.submit(job(1, 1))
    wait_for(lambda: recorder.batches)
    dropped, kept = batcher.submit(job(2, 3)), batcher.submit(job(3, 1))
    assert dropped.cancel()
    recorder.go.set()
    kept.result(10)
    assert not any(2 in batch for batch in recorder.batches)
    with pytest.raises(CancelledError):
        dropped.result(1)


def test_only_the_request_that_fails_fails(batcher, recorder):
    batcher.submit(job(1, 1))
    wait_for(lambda: recorder.batches)
    bad, good = batcher.submit(job(13, 2)), batcher.submit(job(2, 2))
    recorder.go.set()
    assert len(good.result(10)) == 2
    with pytest.raises(ValueError, match="thirteen"):
        bad.result(10)
    assert len(batcher.submit(job(5, 1)).result(10)) == 1


def test_a_client_that_leaves_is_dropped_from_the_queue(model, recorder):
    server = ScoringServer(model, SMALL)
    server.batcher.close()
    server.batcher = Batcher(recorder.score, max_batch_tokens=40, max_queue_tokens=400, observer=recorder)
    with running(server.app) as address:
        # Both are given up by their clients; the first is already with the model.
        for number in (1, 2):
            query = replace(job(number, 1)[0], prompt_ids=(number,))
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{address}/v1/score", content=wire.encode_queries([query]), timeout=0.3)
            wait_for(lambda: recorder.batches)
        wait_for(lambda: server.batcher.queued == (0, 0))
        recorder.go.set()
        query = job(3, 1)[0]
        assert httpx.post(f"{address}/v1/score", content=wire.encode_queries([query])).status_code == 200
        assert recorder.batches == [[1], [3]]
        assert "opd_teacher_cancelled_total 2.0" in httpx.get(f"{address}/metrics").text


def test_a_full_queue_is_503_with_retry_after(model, recorder):
    server = ScoringServer(model, SMALL)
    server.batcher.close()
    server.batcher = Batcher(recorder.score, max_batch_tokens=40, max_queue_tokens=20, observer=recorder)
    with running(server.app) as address:
        server.batcher.submit(job(1, 1))
        wait_for(lambda: recorder.batches)
        server.batcher.submit(job(2, 2))
        answer = post(address, wire.encode_queries(job(3, 1)))
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) >= 1
        recorder.go.set()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_listening_beyond_loopback_needs_a_token(host, monkeypatch):
    monkeypatch.delenv("OPD_TEACHER_TOKEN", raising=False)
    with pytest.raises(ConfigError, match="needs a token"):
        serve(ServeRequest("nowhere", host=host), pytest.fail)


def test_certificates_are_looked_at_before_the_model(tmp_path):
    (tmp_path / "key.pem").write_text("no key")
    both = ServeRequest("nowhere", tls_certificate=tmp_path / "key.pem", tls_key=tmp_path / "key.pem", port=0)
    with pytest.raises(ConfigError, match="cannot be used"):
        serve(both, pytest.fail)
    with pytest.raises(ConfigError, match="certificate and its key"):
        serve(replace(both, tls_key=None), pytest.fail)


def test_a_port_that_is_taken_is_said():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="cannot be listened on"):
            serve(ServeRequest("nowhere", port=taken.getsockname()[1]), pytest.fail)


@pytest.mark.slow
def test_a_large_vocabulary_over_the_wire_is_ninety_times_smaller_than_its_logits_and_the_loss_is_the_same(tmp_path):
    """V = 151,936 and D = 1,536 as in Qwen2.5-1.5B, whose own tokens do not matter here; one layer is enough."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    vocabulary, width = 151_936, 1536
    tokens = Tokenizer(models.WordLevel({f"t{i}": i for i in range(vocabulary)}, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="t1").save_pretrained(tmp_path)
    shape = {"hidden_size": width, "intermediate_size": 256, "num_attention_heads": 12, "num_key_value_heads": 2}
    config = Qwen2Config(vocab_size=vocabulary, num_hidden_layers=1, tie_word_embeddings=True, **shape)
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)

    local = find_teacher(TeacherSettings(model=str(tmp_path), dtype="bfloat16"), pytest.fail).load(vocabulary)
    generator = torch.Generator().manual_seed(0)
    rollouts = []
    for number in range(4):
        ids = torch.randint(vocabulary, (64,), generator=generator)
        rollouts.append(Rollout(Prompt(number, (1, 2, 3), (1, 2, 3)), 0, ids, torch.zeros(64), "length", 0))
    request = REQUESTS[-1]
    answers = []
    real = wire.decode_scores
    with served(local.scorer) as address, pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "decode_scores", lambda body, queries: answers.append(body) or real(body, queries))
        remote = find_teacher(TeacherSettings(model=address), pytest.fail).load(vocabulary)
        ours = {item.rollout.key: item for item in remote.score(rollouts, request)}
    theirs = {item.rollout.key: item for item in local.score(rollouts, request)}
    received = sum(map(len, answers)) / (4 * 64)
    assert 2 * vocabulary / received >= 90, received

    student = torch.randn(64, 32, generator=generator) / 4
    head = Head(torch.randn(vocabulary, 32, generator=generator), None, 1.0, None, vocabulary)
    for key, item in ours.items():
        losses = []
        for one in (item, theirs[key]):
            targets = Targets(
                item.rollout.token_ids, torch.full((64,), 1 / 64), torch.zeros(64), teacher_hidden=one.scores.hidden
            )
            settings_ = LossSettings(support="full")
            extra = {"rollout_temperature": 1.0, "diagnostics_k": 0}
            losses.append(float(head_loss(student, head, targets, settings_, teacher_head=one.head, **extra)[0]))
        assert losses[0] == pytest.approx(losses[1], abs=1e-5)
