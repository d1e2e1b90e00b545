"""The losses against golden files and their definitions, the identities that make them right, and the reducer."""

import copy
import json
import math
import subprocess
import sys
from pathlib import Path

import golden
import pytest
import reference
import torch

from opd import losses
from opd.config import LossSettings
from opd.errors import TrainingError
from opd.heads import Head
from opd.linear_loss import head_loss, support_ids, teacher_scores
from opd.token_loss import token_loss
from opd.types import Prompt, Rollout, ScoreRequest, Targets

HERE = Path(__file__).parent
FILES = sorted((HERE / "golden").glob("*.json"))
EDGE = HERE / "golden" / "losses_edge.json"

EVERY_LOSS = [
    {"support": "full", "divergence": "reverse_kl"},
    {"support": "full", "divergence": "forward_kl"},
    {"support": "full", "divergence": "jsd", "jsd_beta": 0.3},
    {"support": "sampled"},
    {"support": "sampled", "sampled": {"estimator": "k2"}},
    {"support": "sampled", "sampled": {"baseline": "kl"}},
    *(
        {"support": "topk", "divergence": divergence, "topk": {"k": 4, "of": of, "mass": mass}}
        for of in ("student", "teacher", "union", "intersection")
        for mass in ("tail", "renormalize", "weighted")
        for divergence in (("reverse_kl", "forward_kl", "jsd") if mass != "weighted" else ("reverse_kl",))
    ),
]


def random_logits(rows, vocabulary, seed, scale=2.0):
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(rows, vocabulary, generator=generator, dtype=torch.float64)


def run(student, teacher, tokens, values, *, weights=None, chunk_tokens=3, **targets):
    """(loss, per-token values, gradient in the student's logits), through the functions that training calls."""
    settings = LossSettings.model_validate({"chunk_tokens": chunk_tokens} | values)
    vocabulary = student.shape[1]
    head = Head(torch.eye(vocabulary, dtype=student.dtype), None, 1.0, None, vocabulary)
    full = settings.support == "full" or settings.sampled.baseline == "kl"
    kind = "full" if full else settings.support
    request = ScoreRequest(kind, settings.temperature, settings.topk.k, settings.topk.of)
    own = student.topk(min(settings.topk.k, vocabulary), dim=-1).indices
    scores = teacher_scores(teacher, head, tokens, request, own)
    ones = torch.ones(len(tokens), dtype=student.dtype)
    leaf = student.clone().requires_grad_()
    loss, stats = head_loss(
        leaf,
        head,
        Targets(
            token_ids=tokens,
            weights=ones if weights is None else weights,
            sampler_logprobs=targets.get("sampler_logprobs", ones),
            first_logprobs=targets.get("first_logprobs"),
            teacher_logprobs=scores.sampled_logprobs,
            support_ids=scores.support_ids,
            support_logprobs=scores.support_logprobs,
            tail_logprobs=scores.tail_logprobs,
            teacher_hidden=scores.hidden,
        ),
        settings,
        teacher_head=head if full else None,
        rollout_temperature=settings.temperature,
        diagnostics_k=0,
    )
    loss.backward()
    return loss.detach(), stats, leaf.grad


def expected_gradient(student, teacher, values):
    """E over y ~ p of the gradient in one position's logits [V], by enumerating every token y."""
    vocabulary = len(student)
    p = student.softmax(-1)
    _, _, gradient = run(
        student.expand(vocabulary, -1),
        teacher.expand(vocabulary, -1),
        torch.arange(vocabulary),
        values,
        weights=p,
    )
    return gradient.sum(0)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_golden_files(file, dtype, capsys):
    assert golden.check_file(file, dtype), capsys.readouterr().out


@pytest.mark.parametrize(
    ("count", "vocabulary", "k", "scale"), [(5, 19, 5, 1.0), (9, 40, 2, 2.0), (3, 12, 12, 1.0), (6, 30, 7, 12.0)]
)
def test_other_sizes_and_parameters_match_the_definitions(tmp_path, capsys, count, vocabulary, k, scale):
    file = tmp_path / "other.json"
    file.write_text(json.dumps(reference.golden_file(count, vocabulary, k, scale=scale, seed=count)))
    assert golden.check_file(file, "float64"), capsys.readouterr().out


def corrupted(change):
    content = json.loads(EDGE.read_text())
    change(content)
    return content


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content["per_token"]["topk.student.tail.jsd@0.5"]["value"].__setitem__(1, 0.690465),
        lambda content: content["per_token"]["full.forward_kl"]["grad"][2].__setitem__(0, 1e-5),
        lambda content: content["per_token"]["sampled.reverse_kl.policy_gradient"]["advantage"].__setitem__(0, 0.1),
        lambda content: content["per_token"]["full.forward_kl"].pop("grad"),
        lambda content: content["per_token"]["full.forward_kl"].update(curvature=[0.0]),
        lambda content: content["diagnostics"]["entropy_gap"].__setitem__(0, 1e-5),
        lambda content: content["diagnostics"].update(perplexity=[1.0] * 5),
        lambda content: content["support"]["teacher"][1].reverse(),
        *(
            lambda content, name=name: content["per_token"].update(
                {name: copy.deepcopy(content["per_token"]["full.reverse_kl"])}
            )
            for name in (
                "full.total_variation",
                "full.reverse_kl.baseline=kl",
                "full.jsd",
                "full.jsd@1.0",
                "topk.reverse_kl",
                "topk.everyone.tail.reverse_kl",
                "topk.student.weighted.forward_kl",
                "sampled.forward_kl",
                "sampled.reverse_kl.k3",
                "sampled.reverse_kl.clip(0.2)",
                "full.reverse_kl@temperature=",
                "full.reverse_kl ",
            )
        ),
    ],
)
def test_a_wrong_number_and_an_unknown_name_fail(tmp_path, change):
    file = tmp_path / "changed.json"
    file.write_text(json.dumps(corrupted(change)))
    assert not golden.check_file(file, "float64")


def test_the_golden_command_exits_1_for_a_wrong_file_among_right_ones(tmp_path):
    wrong = tmp_path / "wrong.json"
    wrong.write_text(json.dumps(corrupted(lambda content: content["per_token"].update({"full.hellinger": {}}))))
    command = [sys.executable, str(HERE / "golden.py"), str(wrong), str(EDGE)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert result.returncode == 1
    failed = [line for line in result.stdout.splitlines() if not line.startswith("ok ")]
    assert len(failed) == 1
    assert "full.hellinger: unknown case" in failed[0]


@pytest.mark.parametrize("divergence", ["reverse_kl", "forward_kl", "jsd"])
def test_the_closed_form_gradient_is_that_of_autograd(divergence):
    settings = LossSettings(support="full", divergence=divergence, jsd_beta=0.3)
    logits = random_logits(3, 7, seed=1).requires_grad_()
    log_q = random_logits(3, 7, seed=2).log_softmax(-1)
    assert torch.autograd.gradcheck(lambda z: losses.FullDivergence.apply(z, log_q, settings)[0], logits)


def test_the_gradient_of_log_probabilities_and_tail_is_that_of_autograd():
    ids = torch.tensor([[0, 3, -1], [-1, -1, -1], [6, 2, 1]])
    logits = random_logits(3, 7, seed=3).requires_grad_()

    def present(z):
        logprobs, tail, _, _ = losses.SupportLogprobs.apply(z, ids)
        return logprobs[ids >= 0], tail

    assert torch.autograd.gradcheck(present, logits)
    logprobs, tail, normaliser, entropy = losses.SupportLogprobs.apply(logits, ids)
    assert logprobs[1].isneginf().all()
    assert tail[1].abs() < 1e-15
    torch.testing.assert_close(normaliser, logits.logsumexp(-1))
    torch.testing.assert_close(entropy, torch.distributions.Categorical(logits=logits).entropy())


@pytest.mark.parametrize(
    "values",
    [
        {"support": "sampled"},
        {"support": "sampled", "sampled": {"estimator": "k2"}},
        {"support": "sampled", "sampled": {"baseline": "kl"}},
        {"support": "sampled", "importance": "clip"},
        {"support": "sampled", "importance": "truncated"},
        {"support": "sampled", "temperature": 1.0, "sampled": {"baseline": "kl"}, "importance": "clip"},
        {"support": "topk", "topk": {"k": 7, "mass": "weighted"}},
        {"support": "topk", "topk": {"k": 7, "mass": "renormalize"}},
        {"support": "topk", "topk": {"k": 7, "mass": "tail"}},
    ],
)
def test_what_estimates_reverse_kl_has_its_gradient_in_expectation(values):
    student, teacher = random_logits(1, 7, seed=4)[0], random_logits(1, 7, seed=5)[0]
    exact = expected_gradient(student, teacher, {"support": "full"})
    torch.testing.assert_close(expected_gradient(student, teacher, values), exact, atol=1e-12, rtol=0)


def test_an_advantage_that_does_not_depend_on_the_token_has_no_gradient_in_expectation():
    # k1 back-propagated directly is an advantage of −1 everywhere; a KL summed over a support is one number a position.
    logits = random_logits(1, 7, seed=6)[0].requires_grad_()
    log_p = logits.log_softmax(-1)
    loss = (log_p.exp().detach() * losses.policy_gradient(log_p, torch.full((7,), -1.0))).sum()
    (gradient,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(gradient, torch.zeros(7, dtype=torch.float64), atol=1e-15, rtol=0)


def test_the_kl_baseline_centres_the_advantage():
    student, teacher = random_logits(7, 7, seed=4)[:1].expand(7, -1), random_logits(7, 7, seed=5)[:1].expand(7, -1)
    _, stats, _ = run(student, teacher, torch.arange(7), {"support": "sampled", "sampled": {"baseline": "kl"}})
    advantage = -stats.loss / stats.logprob
    assert abs(float((stats.logprob.exp() * advantage).sum())) < 1e-12


@pytest.mark.parametrize("divergence", ["reverse_kl", "forward_kl", "jsd"])
@pytest.mark.parametrize("k", [1, 2, 5, 15, 16])
def test_the_tail_loss_is_a_lower_bound_that_is_tight_at_the_whole_vocabulary(divergence, k):
    student, teacher, tokens = random_logits(20, 16, seed=7), random_logits(20, 16, seed=8), torch.zeros(20).long()
    _, full, exact = run(student, teacher, tokens, {"support": "full", "divergence": divergence})
    values = {"support": "topk", "divergence": divergence, "topk": {"k": k}}
    _, topk, gradient = run(student, teacher, tokens, values)
    assert (topk.loss >= 0).all()
    assert (topk.loss <= full.loss + 1e-12).all()
    if k >= 15:  # with 15 of 16 ids the bucket holds one token
        torch.testing.assert_close(topk.loss, full.loss)
        torch.testing.assert_close(gradient, exact)


def test_a_renormalised_position_with_fewer_than_two_ids_adds_nothing_and_is_counted():
    student = torch.tensor([[5.0, 4, 0, 0], [5, 4, 0, 0], [5, 4, 0, 0]], dtype=torch.float64)
    teacher = torch.tensor([[4.0, 5, 0, 0], [5, 0, 4, 0], [0, 0, 5, 4]], dtype=torch.float64)
    values = {"support": "topk", "topk": {"k": 2, "of": "intersection", "mass": "renormalize"}}
    _, stats, gradient = run(student, teacher, torch.zeros(3).long(), values)
    assert stats.degenerate.tolist() == [0, 1, 1]
    assert stats.loss[0] > 0
    assert stats.loss[1:].tolist() == [0, 0]
    assert not gradient[1:].any()


@pytest.mark.parametrize("values", EVERY_LOSS, ids=str)
def test_a_teacher_that_equals_the_student_gives_no_loss_and_no_gradient(values):
    logits = random_logits(6, 11, seed=9)
    _, stats, gradient = run(logits, logits, torch.arange(6), values)
    assert stats.loss.abs().max() < 1e-12
    assert gradient.abs().max() < 1e-12


def run_on_logits(student, teacher, tokens, values):
    """(per-token loss, gradient in the student's logits) where logits may be −inf, which no product of a head can be."""
    settings = LossSettings.model_validate(values)
    k = settings.topk.k
    full = settings.support == "full" or settings.sampled.baseline == "kl"
    ids = tokens[:, None]
    if settings.support == "topk":
        ids = support_ids(student.topk(k, dim=-1).indices, teacher.topk(k, dim=-1).indices, settings.topk.of)
    at_ids, tail, normaliser, _ = losses.SupportLogprobs.apply(teacher, ids)
    targets = Targets(
        token_ids=tokens,
        weights=torch.ones(len(tokens), dtype=student.dtype),
        sampler_logprobs=torch.zeros(len(tokens), dtype=student.dtype),
        teacher_logprobs=teacher.gather(1, tokens[:, None])[:, 0] - normaliser,
        support_ids=ids,
        support_logprobs=at_ids,
        tail_logprobs=tail,
    )
    leaf = student.clone().requires_grad_()
    loss, _ = token_loss(leaf, targets, settings, teacher if full else None, 1.0, 0)
    return loss.detach(), torch.autograd.grad(loss.sum(), leaf)[0]


@pytest.mark.parametrize("values", EVERY_LOSS, ids=str)
def test_a_teacher_that_forbids_tokens_gives_a_finite_gradient_or_a_loss_that_is_not_finite(values):
    student, teacher = random_logits(6, 11, seed=10), random_logits(6, 11, seed=11)
    tokens = torch.tensor([0, 1, 2, 3, 4, 5])
    teacher[1, [1, 4]] = -torch.inf
    teacher[2, 3:] = -torch.inf
    teacher[3] = torch.where(torch.arange(11) == 3, 0.0, -torch.inf)
    student[4, 9] = -1e4  # its probability underflows to 0, and the teacher forbids it
    teacher[4, 9] = -torch.inf
    student[5, 9] = teacher[5, 9] = -torch.inf
    loss, gradient = run_on_logits(student, teacher, tokens, values)
    finite = loss.isfinite()
    assert finite[[0, 4, 5]].all()
    assert gradient[finite].isfinite().all()
    if values.get("divergence") in ("forward_kl", "jsd"):
        assert finite.all()
    if values == EVERY_LOSS[0]:
        assert finite.tolist() == [True, False, False, False, True, True]


@pytest.mark.parametrize("values", EVERY_LOSS, ids=str)
def test_a_masked_token_that_the_teacher_forbids_spoils_nothing(values):
    student, teacher = random_logits(4, 11, seed=12), random_logits(4, 11, seed=13)
    tokens, weights = torch.tensor([0, 1, 2, 3]), torch.tensor([0.5, 0.0, 0.5, 0.0], dtype=torch.float64)
    expected, _, gradient = run(student, teacher, tokens, values, weights=weights)
    teacher[1] = torch.where(torch.arange(11) == 5, 0.0, -torch.inf)
    student[3] = torch.nan
    loss, stats, with_forbidden = run(student, teacher, tokens, values, weights=weights)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(with_forbidden, gradient)
    assert stats.loss[[1, 3]].tolist() == [0, 0]


@pytest.mark.parametrize("values", EVERY_LOSS, ids=str)
def test_logits_that_are_not_numbers_never_pass_for_a_loss(values):
    student, teacher = random_logits(3, 11, seed=14), random_logits(3, 11, seed=15)
    student[1] = torch.nan
    loss, _, _ = run(student, teacher, torch.arange(3), values)
    assert not loss.isfinite()


@pytest.mark.parametrize("importance", ["clip", "truncated"])
def test_at_the_first_pass_importance_changes_nothing(importance):
    student, teacher, tokens = random_logits(6, 9, seed=16), random_logits(6, 9, seed=17), torch.arange(6)
    _, plain_stats, plain = run(student, teacher, tokens, {"support": "sampled"})
    first = plain_stats.logprob
    for first_logprobs in (None, first):
        values = {"support": "sampled", "importance": importance}
        _, _, gradient = run(student, teacher, tokens, values, first_logprobs=first_logprobs)
        torch.testing.assert_close(gradient, plain)


def test_clip_stops_a_token_that_has_moved_far_enough_in_the_direction_of_its_advantage():
    student, teacher, tokens = random_logits(4, 9, seed=18), random_logits(4, 9, seed=19), torch.arange(4)
    _, stats, _ = run(student, teacher, tokens, {"support": "sampled"})
    rising = stats.teacher_logprob > stats.logprob
    assert rising.any()
    assert (~rising).any()
    moved = stats.logprob - torch.where(rising, math.log(1.29), math.log(0.79))
    values = {"support": "sampled", "importance": "clip", "clip_low": 0.2, "clip_high": 0.28}
    _, _, gradient = run(student, teacher, tokens, values, first_logprobs=moved)
    assert not gradient.any()
    other_way = stats.logprob + torch.where(rising, math.log(1.29), math.log(0.79))
    _, _, gradient = run(student, teacher, tokens, values, first_logprobs=other_way)
    assert (gradient.abs().amax(-1) > 0).all()


@pytest.mark.parametrize("support", ["sampled", "topk", "full"])
def test_the_update_ratio_and_the_sampler_correction_are_two_factors(support):
    student, teacher, tokens = random_logits(3, 20, seed=20), random_logits(3, 20, seed=21), torch.arange(3)
    _, plain, gradient = run(student, teacher, tokens, {"support": support})
    first = plain.logprob - torch.tensor([0.1, 5.0, -0.2]).double()
    sampler = first - torch.tensor([0.3, 0.2, 7.0]).double()
    update = torch.tensor([math.exp(0.1), 2.0, math.exp(-0.2)]).double()
    correction = torch.tensor([math.exp(0.3), math.exp(0.2), 3.0]).double()
    both = {"importance": "truncated", "sampler_correction": "truncated", "sampler_correction_cap": 3.0}
    for values, factor in (
        ({"importance": "truncated"}, update),
        (both, update * correction),
    ):
        _, stats, scaled = run(
            student,
            teacher,
            tokens,
            {"support": support} | values,
            first_logprobs=first,
            sampler_logprobs=sampler,
        )
        torch.testing.assert_close(stats.loss, plain.loss * factor)
        torch.testing.assert_close(scaled, gradient * factor[:, None])


def rollout(token_ids, finish_reason="stop", sample=0):
    ids = torch.tensor(token_ids)
    return Rollout(Prompt(0, (1,), (1,)), sample, ids, torch.zeros(len(ids)), finish_reason, 0)


STEP = [rollout([5, 6, 7, 2]), rollout([5, 8], "length", 1), rollout([2], sample=2)]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, [[1 / 7] * 4, [1 / 7] * 2, [1 / 7]]),
        ({"reduction": "sequence_mean"}, [[1 / 12] * 4, [1 / 6] * 2, [1 / 3]]),
        ({"reduction": "token_sum"}, [[1 / 3] * 4, [1 / 3] * 2, [1 / 3]]),
        ({"skip_first_tokens": 1}, [[0, 1 / 4, 1 / 4, 1 / 4], [0, 1 / 4], [0]]),
        ({"skip_first_tokens": 1, "reduction": "sequence_mean"}, [[0, 1 / 6, 1 / 6, 1 / 6], [0, 1 / 2], [0]]),
        ({"skip_first_tokens": 1, "reduction": "token_sum"}, [[0, 1 / 3, 1 / 3, 1 / 3], [0, 1 / 3], [0]]),
        ({"mask_truncated": True}, [[1 / 5] * 4, [0, 0], [1 / 5]]),
        ({"mask_token_ids": [5, 2]}, [[0, 1 / 3, 1 / 3, 0], [0, 1 / 3], [0]]),
        (
            {"mask_token_ids": [5], "mask_truncated": True, "reduction": "sequence_mean"},
            [[0, 1 / 6, 1 / 6, 1 / 6], [0, 0], [1 / 2]],
        ),
    ],
)
def test_weights_of_a_step(values, expected):
    weights = losses.token_weights(STEP, LossSettings.model_validate(values))
    for got, want in zip(weights, expected, strict=True):
        torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float32))


@pytest.mark.parametrize(
    ("values", "rollouts", "named"),
    [
        ({"skip_first_tokens": 4}, STEP, "skip_first_tokens=4"),
        ({"mask_token_ids": [5, 6, 7, 8, 2]}, STEP, "mask_token_ids"),
        ({"mask_truncated": True}, [rollout([1, 2, 3], "length")], "mask_truncated"),
    ],
)
def test_a_step_without_one_token_names_the_option_that_emptied_it(values, rollouts, named):
    with pytest.raises(TrainingError, match=named):
        losses.token_weights(rollouts, LossSettings.model_validate(values))


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "token_sum"])
@pytest.mark.parametrize("support", ["sampled", "topk", "full"])
def test_the_gradient_does_not_depend_on_how_the_step_is_cut(reduction, support):
    settings = LossSettings.model_validate({"reduction": reduction, "mask_token_ids": [6]})
    weights = torch.cat(losses.token_weights(STEP, settings)).double()
    student, teacher = random_logits(7, 20, seed=22), random_logits(7, 20, seed=23)
    tokens = torch.cat([item.token_ids for item in STEP])
    _, _, whole = run(student, teacher, tokens, {"support": support}, weights=weights, chunk_tokens=100)
    for sizes in ([4, 3], [4, 2, 1], [1] * 7):
        parts = zip(*(tensor.split(sizes) for tensor in (student, teacher, tokens, weights)), strict=True)
        cut = [run(s, t, y, {"support": support}, weights=w)[2] for s, t, y, w in parts]
        torch.testing.assert_close(torch.cat(cut), whole, rtol=1e-12, atol=0)
