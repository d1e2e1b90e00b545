"""The losses once more, straight from their definitions in probabilities, for tests: slow, float64, plain autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def kl(a: Tensor, b: Tensor) -> Tensor:
    """Returns Σ a log(a / b) over the last dimension."""
    return (a * (a / b).log()).sum(-1)


def divergence(p: Tensor, q: Tensor, kind: str, beta: float) -> Tensor:
    """Returns the divergence of two distributions given as probabilities."""
    if kind == "reverse_kl":
        return kl(p, q)
    if kind == "forward_kl":
        return kl(q, p)
    m = beta * q + (1 - beta) * p
    return beta * kl(q, m) + (1 - beta) * kl(p, m)


def support(student: Tensor, teacher: Tensor, of: str, k: int) -> list[list[int]]:
    """Returns the ids of each position's support."""
    rows = []
    for z, t in zip(student, teacher, strict=True):
        own, others = z.topk(k).indices.tolist(), t.topk(k).indices.tolist()
        match of:
            case "student":
                rows.append(own)
            case "teacher":
                rows.append(others)
            case "union":
                rows.append(own + [i for i in others if i not in own])
            case "intersection":
                rows.append([i for i in own if i in others])
    return rows


def topk(student: Tensor, teacher: Tensor, ids: list[list[int]], mass: str, kind: str, beta: float) -> Tensor:
    """Returns the top-K loss [T] of logits [T, V], one position at a time."""
    values = []
    for p, q, chosen in zip(student.softmax(-1), teacher.softmax(-1), ids, strict=True):
        ps, qs = p[chosen], q[chosen]
        if mass == "tail":
            rest = [i for i in range(len(p)) if i not in chosen]
            ps, qs = torch.cat([ps, p[rest].sum()[None]]), torch.cat([qs, q[rest].sum()[None]])
            if not rest:
                ps, qs = ps[:-1], qs[:-1]
            values.append(divergence(ps, qs, kind, beta))
        elif mass == "renormalize":
            zero = 0 * p.sum()
            values.append(zero if len(chosen) < 2 else divergence(ps / ps.sum(), qs / qs.sum(), kind, beta))
        else:
            weight = (ps / ps.sum() * (qs / ps).log()).detach()
            values.append(-(weight * ps.log()).sum())
    return torch.stack(values)


def sampled(
    student: Tensor, teacher: Tensor, tokens: Tensor, baseline: str, importance: tuple[str, ...], old: Tensor
) -> Tensor:
    """Returns the policy-gradient loss [T]; importance is (), ("clip", low, high) or ("truncated_is", cap)."""
    log_p, log_q = student.log_softmax(-1), teacher.log_softmax(-1)
    at = log_p.gather(1, tokens[:, None])[:, 0]
    advantage = (log_q.gather(1, tokens[:, None])[:, 0] - at).detach()
    if baseline == "kl":
        advantage = advantage + kl(log_p.exp(), log_q.exp()).detach()
    if not importance:
        return -advantage * at
    ratio = (at - old).exp()
    if importance[0] == "truncated_is":
        return -ratio.detach().clamp(max=float(importance[1])) * advantage * at
    low, high = 1 - float(importance[1]), 1 + float(importance[2])
    return -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)


CASES: dict[str, dict[str, Any]] = {
    "full.reverse_kl": {"kind": "reverse_kl"},
    "full.forward_kl@temperature=1.7": {"kind": "forward_kl", "temperature": 1.7},
    "full.jsd@0.3": {"kind": "jsd", "beta": 0.3},
    "full.jsd@0.9@temperature=0.5": {"kind": "jsd", "beta": 0.9, "temperature": 0.5},
    "sampled.reverse_kl.policy_gradient": {},
    "sampled.reverse_kl.policy_gradient@temperature=1.7": {"temperature": 1.7},
    "sampled.reverse_kl.policy_gradient.baseline=kl": {"baseline": "kl"},
    "sampled.reverse_kl.clip(0.1,0.3)": {"importance": ("clip", 0.1, 0.3)},
    "sampled.reverse_kl.baseline=kl.clip(0.1,0.1)": {"baseline": "kl", "importance": ("clip", 0.1, 0.1)},
    "sampled.reverse_kl.truncated_is(3)": {"importance": ("truncated_is", 3.0)},
    "sampled.reverse_kl.truncated_is(1.0)@temperature=2.5": {"importance": ("truncated_is", 1.0), "temperature": 2.5},
    **{
        f"topk.{of}.{mass}.{kind}{'' if kind != 'jsd' else '@0.7'}{suffix}": {
            "of": of,
            "mass": mass,
            "kind": kind,
            "beta": 0.7,
            **({"temperature": 1.3} if suffix else {}),
        }
        for of in ("student", "teacher", "union", "intersection")
        for mass in ("tail", "renormalize", "weighted")
        for kind in (("reverse_kl", "forward_kl", "jsd") if mass != "weighted" else ("reverse_kl",))
        for suffix in (("", "@temperature=1.3") if of == "student" else ("",))
    },
}
"""Case name, as golden files spell it → what it means."""


def loss_of(name: str, student: Tensor, teacher: Tensor, tokens: Tensor, k: int, old: Tensor) -> Tensor:
    """Returns the loss [T] that a case name stands for, differentiable in the student's logits [T, V]."""
    case = CASES[name]
    tau, kind, beta = case.get("temperature", 1.0), case.get("kind", "reverse_kl"), case.get("beta", 0.5)
    z, t = student / tau, teacher / tau
    if name.startswith("sampled"):
        return sampled(z, t, tokens, case.get("baseline", "none"), case.get("importance", ()), old)
    if name.startswith("full"):
        return divergence(z.softmax(-1), t.softmax(-1), kind, beta)
    ids = support(student.detach(), teacher, case["of"], k)
    return topk(z, t, ids, case["mass"], kind, beta)


def golden_file(tokens_count: int, vocab_size: int, k: int, *, scale: float, seed: int) -> dict[str, Any]:
    """Returns a golden file of every case, for random logits with the given standard deviation."""
    generator = torch.Generator().manual_seed(seed)
    shape = (tokens_count, vocab_size)
    student = scale * torch.randn(shape, generator=generator, dtype=torch.float64)
    teacher = student + scale / 2 * torch.randn(shape, generator=generator, dtype=torch.float64)
    tokens = torch.randint(vocab_size, (tokens_count,), generator=generator)
    old = student.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    old = old + torch.randn(tokens_count, generator=generator, dtype=torch.float64)
    per_token = {}
    for name in CASES:
        leaf = student.clone().requires_grad_()
        loss = loss_of(name, leaf, teacher, tokens, k, old)
        (gradient,) = torch.autograd.grad(loss.sum(), leaf)
        per_token[name] = {"value": loss.tolist(), "grad": gradient.tolist()}
        if "importance" in CASES[name]:
            per_token[name]["old_logprob"] = old.tolist()
    return {
        "T": tokens_count,
        "V": vocab_size,
        "K": k,
        "student_logits": student.tolist(),
        "teacher_logits": teacher.tolist(),
        "sampled": tokens.tolist(),
        "support": {of: support(student, teacher, of, k) for of in ("student", "teacher")},
        "per_token": per_token,
    }
