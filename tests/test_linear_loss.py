"""The chunked head: the same numbers and gradients as plain autograd over whole logits, without the whole logits."""

from dataclasses import fields, replace

import pytest
import reference
import torch
from golden import settings_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
)

from opd import linear_loss
from opd.config import LossSettings
from opd.heads import Head, head_of
from opd.linear_loss import head_loss, support_ids, teacher_scores, topk_ids
from opd.types import ScoreRequest, Targets

T, D, V, K = 13, 6, 31, 5
TEACHER_D = 9


def random(*shape, seed, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def heads(dtype=torch.float64, bias=True, scale=1.7, softcap=4.0):
    """A student's and a teacher's head, padded to different sizes, whose padding rows would win every top-K."""
    student = Head(random(V + 3, D, seed=1, dtype=dtype), None, scale, softcap, V)
    teacher = Head(random(V + 9, TEACHER_D, seed=2, dtype=dtype), None, 1.0, None, V)
    student.weight[V:] = teacher.weight[V:] = 50
    return replace(student, bias=random(V + 3, seed=3, dtype=dtype) if bias else None), teacher


def plain_logits(hidden, head):
    """The definition of a head."""
    logits = hidden @ head.weight[: head.vocab_size].T
    logits = logits if head.bias is None else logits + head.bias[: head.vocab_size]
    logits = logits * head.logit_scale
    return logits if head.softcap is None else head.softcap * torch.tanh(logits / head.softcap)


TOKENS = torch.randint(V, (T,), generator=torch.Generator().manual_seed(5))
WEIGHTS = torch.rand(T, generator=torch.Generator().manual_seed(6), dtype=torch.float64)


def asked(settings, teacher_head, teacher_hidden, student_ids, *, k=0, old=None):
    """The targets of a loss, as the teacher's scores give them."""
    full = settings.support == "full" or settings.sampled.baseline == "kl"
    kind = "full" if full else settings.support
    request = ScoreRequest(kind, settings.temperature, settings.topk.k, settings.topk.of, k)
    scores = teacher_scores(teacher_hidden, teacher_head, TOKENS, request, student_ids, chunk_tokens=3)
    return Targets(
        token_ids=TOKENS,
        weights=WEIGHTS.to(teacher_hidden.dtype),
        sampler_logprobs=torch.zeros(T, dtype=teacher_hidden.dtype),
        first_logprobs=old,
        teacher_logprobs=scores.sampled_logprobs,
        support_ids=scores.support_ids,
        support_logprobs=scores.support_logprobs,
        tail_logprobs=scores.tail_logprobs,
        teacher_hidden=scores.hidden,
        teacher_topk_ids=scores.topk_ids,
        teacher_entropy=scores.entropy,
    ), (teacher_head if full else None)


def run(values, hidden, head, teacher_head, teacher_hidden, *, k=0, temperature=1.0, old=None):
    settings = LossSettings.model_validate({"topk": {"k": K}} | values)
    own = topk_ids(hidden, head, settings.topk.k, 4)
    targets, used = asked(settings, teacher_head, teacher_hidden, own, k=k, old=old)
    return head_loss(
        hidden, head, targets, settings, teacher_head=used, rollout_temperature=temperature, diagnostics_k=k
    )


@pytest.mark.parametrize("chunk_tokens", [1, 5, 100])
@pytest.mark.parametrize("name", reference.CASES)
def test_value_and_gradients_are_those_of_plain_autograd_over_whole_logits(name, chunk_tokens):
    head, teacher_head = heads()
    hidden, teacher_hidden = random(T, D, seed=7).requires_grad_(), random(T, TEACHER_D, seed=8)
    head.weight.requires_grad_()
    head.bias.requires_grad_()
    old = random(T, seed=9) - 3
    values = settings_of(name, K).model_dump() | {"chunk_tokens": chunk_tokens}
    loss, stats = run(values, hidden, head, teacher_head, teacher_hidden, old=old)
    (3 * loss).backward()
    found = [tensor.grad for tensor in (hidden, head.weight, head.bias)]

    logits = plain_logits(hidden, head)
    per_token = reference.loss_of(name, logits, plain_logits(teacher_hidden, teacher_head), TOKENS, K, old)
    expected = torch.autograd.grad(3 * (per_token * WEIGHTS).sum(), (hidden, head.weight, head.bias))
    torch.testing.assert_close(stats.loss, per_token.detach())
    torch.testing.assert_close(loss, (per_token * WEIGHTS).sum())
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want)
    assert not head.weight.grad[V:].any()


@pytest.mark.parametrize("support", ["sampled", "topk", "full"])
def test_only_what_is_trained_gets_a_gradient(support):
    head, teacher_head = heads()
    teacher_hidden = random(T, TEACHER_D, seed=8)
    both = random(T, D, seed=7).requires_grad_()
    trained = replace(head, weight=head.weight.clone().requires_grad_(), bias=head.bias.clone().requires_grad_())
    run({"support": support}, both, trained, teacher_head, teacher_hidden)[0].backward()

    lora = random(T, D, seed=7).requires_grad_()
    run({"support": support}, lora, head, teacher_head, teacher_hidden)[0].backward()
    torch.testing.assert_close(lora.grad, both.grad)

    for name in ("weight", "bias"):
        only = replace(head, **{name: getattr(head, name).clone().requires_grad_()})
        run({"support": support}, random(T, D, seed=7), only, teacher_head, teacher_hidden)[0].backward()
        torch.testing.assert_close(getattr(only, name).grad, getattr(trained, name).grad)


@pytest.mark.parametrize("support", ["sampled", "topk", "full"])
def test_a_head_tied_to_the_embedding_gets_both_gradients(support):
    head, teacher_head = heads(bias=False, softcap=None)
    embedding = head.weight.clone().requires_grad_()
    tied = replace(head, weight=embedding)
    inputs, teacher_hidden = torch.arange(T), random(T, TEACHER_D, seed=8)
    loss, _ = run({"support": support}, torch.tanh(embedding[inputs]), tied, teacher_head, teacher_hidden)
    loss.backward()

    hidden = torch.tanh(head.weight[inputs]).requires_grad_()
    untied = replace(head, weight=head.weight.clone().requires_grad_())
    run({"support": support}, hidden, untied, teacher_head, teacher_hidden)[0].backward()
    expected = untied.weight.grad.clone()
    expected[inputs] += hidden.grad * (1 - hidden.detach().square())
    torch.testing.assert_close(embedding.grad, expected)


@pytest.mark.parametrize("support", ["sampled", "topk", "full"])
def test_without_gradients_the_values_are_the_same(support):
    head, teacher_head = heads()
    hidden, teacher_hidden = random(T, D, seed=7).requires_grad_(), random(T, TEACHER_D, seed=8)
    loss, stats = run({"support": support}, hidden, head, teacher_head, teacher_hidden, k=K)
    with torch.no_grad():
        measured, others = run({"support": support}, hidden, head, teacher_head, teacher_hidden, k=K)
    assert not measured.requires_grad
    torch.testing.assert_close(measured, loss.detach())
    for field in fields(stats):
        mine, other = getattr(stats, field.name), getattr(others, field.name)
        assert (mine is None) == (other is None)
        if mine is not None:
            assert not mine.requires_grad
            assert mine.shape == (T,)
            torch.testing.assert_close(mine, other)


def test_a_second_backward_pass_is_refused_instead_of_scaled_twice():
    head, teacher_head = heads()
    hidden = random(T, D, seed=7).requires_grad_()
    loss, _ = run({"support": "full"}, hidden, head, teacher_head, random(T, TEACHER_D, seed=8))
    (2 * loss).backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()


@pytest.mark.parametrize("support", ["sampled", "topk", "full"])
def test_autocast_runs_products_in_bfloat16_and_sums_in_float32(support):
    head, teacher_head = heads(torch.float32, softcap=None, scale=1.0)
    hidden, teacher_hidden = (
        random(T, D, seed=7, dtype=torch.float32),
        random(T, TEACHER_D, seed=8, dtype=torch.float32),
    )

    def gradients(enabled):
        part, weight = hidden.clone().requires_grad_(), head.weight.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            loss, stats = run({"support": support}, part, replace(head, weight=weight), teacher_head, teacher_hidden)
        loss.backward()
        return stats, part.grad, weight.grad

    exact, d_hidden, d_weight = gradients(False)
    stats, low_hidden, low_weight = gradients(True)
    assert stats.loss.dtype == low_hidden.dtype == low_weight.dtype == torch.float32
    torch.testing.assert_close(stats.logprob, exact.logprob, atol=0.1, rtol=0)
    assert (low_hidden - d_hidden).norm() < 0.03 * d_hidden.norm()
    assert (low_weight - d_weight).norm() < 0.03 * d_weight.norm()
    # Rounding the logits is all that bfloat16 does: from there on the numbers are those of float32.
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = plain_logits(
            hidden.bfloat16(), replace(head, weight=head.weight.bfloat16(), bias=head.bias.bfloat16())
        )
    expected = logits.float().log_softmax(-1).gather(1, TOKENS[:, None])[:, 0]
    torch.testing.assert_close(stats.logprob, expected, atol=0.04, rtol=0)
    if support == "full":
        assert (stats.loss >= 0).all()


@pytest.mark.parametrize("values", [{"support": "sampled"}, {"support": "topk"}, {"support": "full"}], ids=str)
def test_no_tensor_as_large_as_all_logits_is_ever_made(values, monkeypatch):
    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            self.elements = max([self.elements, *sizes])
            return result

    head, teacher_head = heads()
    head.weight.requires_grad_()
    hidden, teacher_hidden = random(T, D, seed=7).requires_grad_(), random(T, TEACHER_D, seed=8)
    with Largest() as largest:
        loss, _ = run(values | {"chunk_tokens": 3}, hidden, head, teacher_head, teacher_hidden, k=K)
        loss.backward()
    assert largest.elements <= max(4 * V, head.weight.numel(), teacher_head.weight.numel())
    assert largest.elements < T * V


@pytest.mark.parametrize("name", ["full.reverse_kl", "topk.student.tail.jsd@0.7", "sampled.reverse_kl.policy_gradient"])
def test_the_size_of_the_blocks_that_fit_the_cache_changes_nothing(name, monkeypatch):
    head, teacher_head = heads()
    hidden, teacher_hidden = random(T, D, seed=7).requires_grad_(), random(T, TEACHER_D, seed=8)
    values = settings_of(name, K).model_dump() | {"chunk_tokens": 7}
    found = []
    for elements in (1, 2 * V, 10**6):
        monkeypatch.setattr(linear_loss, "CPU_BLOCK_ELEMENTS", elements)
        loss, stats = run(values, hidden, head, teacher_head, teacher_hidden, k=K)
        found.append((loss.detach(), stats.overlap, *torch.autograd.grad(loss, hidden)))
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-12, atol=0)


@pytest.mark.parametrize("product_dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_weight_gradient_is_summed_in_its_own_type_and_block_by_block(product_dtype):
    """bfloat16 would round the small second addend away; the blocks of rows end in a short one."""
    rows = 2 * linear_loss.CPU_GRADIENT_ROWS + 7
    d_product, hidden = random(16, rows, seed=11, dtype=product_dtype), random(16, D, seed=12, dtype=product_dtype)
    total = torch.zeros(rows, D, dtype=torch.float32)
    linear_loss._add_weight_gradient(total, d_product, hidden)
    linear_loss._add_weight_gradient(total, d_product / 1024, hidden)
    expected = (1 + 1 / 1024) * d_product.double().t() @ hidden.double()
    rounding = 3e-3 if product_dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(total.double(), expected, rtol=rounding, atol=10 * rounding)


def test_the_sampling_log_probability_is_at_the_rollout_temperature():
    head, teacher_head = heads()
    hidden = random(T, D, seed=7)
    logits = plain_logits(hidden, head)
    for temperature in (1.0, 0.6):
        _, stats = run(
            {"support": "topk", "temperature": 1.5},
            hidden,
            head,
            teacher_head,
            random(T, TEACHER_D, seed=8),
            temperature=temperature,
        )
        for found, tau in ((stats.sampling_logprob, temperature), (stats.logprob, 1.5)):
            expected = (logits / tau).log_softmax(-1).gather(1, TOKENS[:, None])[:, 0]
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("of", ["student", "teacher", "union", "intersection"])
def test_scores_on_a_support_are_the_teachers_log_probabilities(of):
    head, teacher_head = heads()
    hidden, teacher_hidden = random(T, D, seed=7), random(T, TEACHER_D, seed=8)
    own = topk_ids(hidden, head, K, 4)
    request = ScoreRequest("topk", 1.3, K, of, diagnostics_k=3)
    scores = teacher_scores(teacher_hidden, teacher_head, TOKENS, request, own, chunk_tokens=4)
    log_q = (plain_logits(teacher_hidden, teacher_head) / 1.3).log_softmax(-1)
    wanted = reference.support(plain_logits(hidden, head), plain_logits(teacher_hidden, teacher_head), of, K)
    for t, ids in enumerate(wanted):
        present = scores.support_ids[t] >= 0
        assert sorted(scores.support_ids[t][present].tolist()) == sorted(ids)
        torch.testing.assert_close(scores.support_logprobs[t][present], log_q[t][scores.support_ids[t][present]])
        assert scores.support_logprobs[t][~present].isneginf().all()
        outside = torch.ones(V, dtype=torch.bool)
        outside[ids] = False
        torch.testing.assert_close(scores.tail_logprobs[t], log_q[t][outside].logsumexp(-1))
    torch.testing.assert_close(scores.sampled_logprobs, log_q.gather(1, TOKENS[:, None])[:, 0])
    torch.testing.assert_close(scores.entropy, -(log_q.exp() * log_q).sum(-1))
    assert torch.equal(scores.topk_ids, log_q.topk(3).indices)


def test_a_padding_id_is_in_no_support():
    head, teacher_head = heads()
    hidden, teacher_hidden = random(T, D, seed=7).abs(), random(T, TEACHER_D, seed=8).abs()
    assert (hidden @ head.weight.T).argmax(-1).min() >= V
    own = topk_ids(hidden, head, K, 4)
    request = ScoreRequest("topk", 1.0, K, "union", K)
    scores = teacher_scores(teacher_hidden, teacher_head, TOKENS, request, own)
    assert max(int(own.max()), int(scores.support_ids.max()), int(scores.topk_ids.max())) < V


def test_a_union_holds_no_id_twice_and_an_intersection_may_be_empty():
    student, teacher = torch.tensor([[3, 1, 2], [0, 1, 2]]), torch.tensor([[2, 3, 9], [7, 8, 9]])
    assert support_ids(student, teacher, "union").tolist() == [[3, 1, 2, -1, -1, 9], [0, 1, 2, 7, 8, 9]]
    assert support_ids(student, teacher, "intersection").tolist() == [[3, -1, 2], [-1, -1, -1]]


def test_the_tail_is_exact_in_float32_where_the_support_holds_nearly_everything():
    logits = torch.full((1, 1000), -20.0)
    logits[0, :2] = torch.tensor([3.0, 2.0])
    head = Head(torch.eye(1000), None, 1.0, None, 1000)
    scores = teacher_scores(logits, head, torch.tensor([0]), ScoreRequest("topk", k=2), torch.tensor([[0, 1]]))
    exact = logits.double().log_softmax(-1)[0, 2:].logsumexp(-1)
    assert exact < -16  # 1 − Z is below what float32 can tell from 0
    torch.testing.assert_close(scores.tail_logprobs[0].double(), exact, rtol=1e-6, atol=0)


def test_full_scores_are_the_hidden_states():
    _, teacher_head = heads()
    hidden = random(T, TEACHER_D, seed=8)
    scores = teacher_scores(hidden, teacher_head, TOKENS, ScoreRequest("full"), None)
    assert scores.hidden is hidden
    assert scores.sampled_logprobs is None


@pytest.mark.parametrize("of", ["student", "union"])
def test_diagnostics_from_scores_equal_those_from_the_teachers_logits(of):
    head, teacher_head = heads()
    hidden, teacher_hidden = random(T, D, seed=7), random(T, TEACHER_D, seed=8)
    _, full = run({"support": "full"}, hidden, head, teacher_head, teacher_hidden, k=K)
    topk = {"support": "topk", "topk": {"k": K, "of": of}}
    _, scored = run(topk, hidden, head, teacher_head, teacher_hidden, k=K)
    assert 0 < full.overlap.mean() < 1
    for name in ("entropy", "teacher_entropy", "overlap", "overlap_advantage", "overlap_mass_student"):
        torch.testing.assert_close(getattr(scored, name), getattr(full, name))
    torch.testing.assert_close(scored.overlap_mass_teacher, full.overlap_mass_teacher)
    assert scored.reverse_kl is None


@pytest.mark.parametrize(
    "values",
    [
        {"support": "sampled"},
        {"support": "topk", "topk": {"k": K, "of": "teacher"}},
        {"support": "topk", "topk": {"k": K, "of": "intersection"}},
        {"support": "topk", "topk": {"k": K - 1}},
    ],
    ids=str,
)
def test_where_the_teachers_values_at_the_students_ids_are_unknown_only_the_overlap_is_told(values):
    head, teacher_head = heads()
    _, stats = run(values, random(T, D, seed=7), head, teacher_head, random(T, TEACHER_D, seed=8), k=K)
    assert stats.overlap is not None
    assert stats.overlap_advantage is None
    assert stats.overlap_mass_teacher is None


@pytest.mark.parametrize("divergence", ["reverse_kl", "forward_kl", "jsd"])
def test_the_exact_reverse_kl_is_told_whatever_is_minimised(divergence):
    head, teacher_head = heads()
    hidden, teacher_hidden = random(T, D, seed=7), random(T, TEACHER_D, seed=8)
    values = {"support": "full", "divergence": divergence}
    _, stats = run(values, hidden, head, teacher_head, teacher_hidden, k=K)
    p, q = plain_logits(hidden, head).softmax(-1), plain_logits(teacher_hidden, teacher_head).softmax(-1)
    torch.testing.assert_close(stats.reverse_kl, reference.kl(p, q))


SMALL = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize(
    "model",
    [
        lambda: Gemma2ForCausalLM(Gemma2Config(**SMALL, head_dim=8, final_logit_softcapping=2.0)),
        lambda: GraniteForCausalLM(GraniteConfig(**SMALL, logits_scaling=7.0)),
        lambda: CohereForCausalLM(CohereConfig(**SMALL, logit_scale=0.3)),
    ],
    ids=["gemma2 caps", "granite divides", "cohere multiplies"],
)
def test_what_a_model_does_to_its_logits_is_part_of_its_head(model):
    torch.manual_seed(0)
    model = model().eval()
    with torch.no_grad():
        model.get_output_embeddings().weight.normal_(0, 1)
        tokens = torch.arange(8)[None]
        hidden = model.model(tokens).last_hidden_state[0]
        torch.testing.assert_close(head_of(model, 33).logits(hidden), model(tokens).logits[0, :, :33])
