"""Checks golden files through the functions that training calls: `python tests/golden.py FILE… [--dtype float32]`.

Prints the largest error of every per-token case and diagnostic, and exits 1 where one is off or a name is unknown.
The student's head is the identity, so that hidden states are logits and the gradient of the chunked loss is theirs.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# A clone is checked whether or not it is installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from opd import diagnostics, losses
from opd.config import LossSettings
from opd.heads import Head
from opd.linear_loss import head_loss, support_ids, teacher_scores
from opd.types import ScoreRequest, Targets, TeacherScores

TOLERANCE = {"float64": 1e-6, "float32": 1e-4}
CHUNK_TOKENS = 4

NUMBER = r"[0-9.]+(?:e[+-]?[0-9]+)?"
CASE = re.compile(
    r"(?P<support>full|sampled|topk\.(?P<of>student|teacher|union|intersection)\.(?P<mass>tail|renormalize|weighted))"
    rf"\.(?P<divergence>reverse_kl|forward_kl|jsd@(?P<beta>{NUMBER}))"
    r"(?:\.(?P<estimator>policy_gradient|k2))?"
    r"(?:\.baseline=(?P<baseline>none|kl))?"
    rf"(?:\.(?P<importance>clip\((?P<low>{NUMBER}),\s*(?P<high>{NUMBER})\)|truncated_is\((?P<cap>{NUMBER})\)))?"
    rf"(?:@temperature=(?P<temperature>{NUMBER}))?"
)


def settings_of(name: str, k: int) -> LossSettings:
    """Returns the loss settings that a case name spells, such as topk.student.tail.jsd@0.5 or sampled.reverse_kl.clip(0.2,0.28).

    Raises ValueError for a name that cannot be read, and for a combination that the configuration refuses.
    """
    case = CASE.fullmatch(name)
    if case is None:
        raise ValueError("the name cannot be read")
    if case["support"] != "sampled" and (case["estimator"] or case["baseline"]):
        raise ValueError("estimators and baselines belong to sampled")
    values: dict[str, Any] = {
        "support": case["support"].partition(".")[0],
        "divergence": case["divergence"].partition("@")[0],
        "sampled": {"estimator": case["estimator"] or "policy_gradient", "baseline": case["baseline"] or "none"},
        "temperature": float(case["temperature"] or 1),
        "chunk_tokens": CHUNK_TOKENS,
    }
    if case["of"]:
        values["topk"] = {"k": k, "of": case["of"], "mass": case["mass"]}
    if case["beta"]:
        values["jsd_beta"] = float(case["beta"])
    if case["low"]:
        values |= {"importance": "clip", "clip_low": float(case["low"]), "clip_high": float(case["high"])}
    if case["cap"]:
        values |= {"importance": "truncated", "importance_cap": float(case["cap"])}
    return LossSettings.model_validate(values)


def identity_head(golden: dict[str, Any], dtype: torch.dtype) -> Head:
    """Returns the head under which hidden states are logits."""
    return Head(torch.eye(golden["V"], dtype=dtype), None, 1.0, None, golden["V"])


def targets_of(golden: dict[str, Any], scores: TeacherScores, dtype: torch.dtype, first: Any = None) -> Targets:
    """Returns what training would give the loss, every token of weight 1."""
    return Targets(
        token_ids=torch.tensor(golden["sampled"]),
        weights=torch.ones(golden["T"], dtype=dtype),
        sampler_logprobs=torch.zeros(golden["T"], dtype=dtype),
        first_logprobs=None if first is None else torch.tensor(first, dtype=dtype),
        teacher_logprobs=scores.sampled_logprobs,
        support_ids=scores.support_ids,
        support_logprobs=scores.support_logprobs,
        tail_logprobs=scores.tail_logprobs,
        teacher_hidden=scores.hidden,
        teacher_topk_ids=scores.topk_ids,
        teacher_entropy=scores.entropy,
    )


def run_case(name: str, golden: dict[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns value [T], gradient in the student's logits [T, V] and, where there is one, the advantage of a case."""
    settings = settings_of(name, golden["K"])
    student = torch.tensor(golden["student_logits"], dtype=dtype, requires_grad=True)
    teacher = torch.tensor(golden["teacher_logits"], dtype=dtype)
    head = identity_head(golden, dtype)
    full = settings.support == "full" or settings.sampled.baseline == "kl"
    request = ScoreRequest("full" if full else settings.support, settings.temperature, golden["K"])
    # The file's supports, so that tokens of equal probability are not a matter of how a sort breaks ties.
    supports = {of: torch.tensor(ids) for of, ids in golden["support"].items()}
    ids = support_ids(supports["student"], supports["teacher"], settings.topk.of)
    scores = teacher_scores(teacher, head, torch.tensor(golden["sampled"]), request, ids)
    targets = targets_of(golden, scores, dtype, golden["per_token"][name].get("old_logprob"))
    loss, stats = head_loss(
        student,
        head,
        targets,
        settings,
        teacher_head=head if full else None,
        rollout_temperature=settings.temperature,
        diagnostics_k=0,
    )
    loss.backward()
    assert student.grad is not None
    found = {"value": stats.loss, "grad": student.grad}
    if settings.support == "sampled" and settings.sampled.estimator == "policy_gradient":
        baseline = -stats.reverse_kl if settings.sampled.baseline == "kl" and stats.reverse_kl is not None else None
        found["advantage"] = losses.advantage(stats.logprob, stats.teacher_logprob, baseline)
    if settings.support == "topk" and settings.topk.mass == "weighted":
        log_p = losses.SupportLogprobs.apply(student.detach() / settings.temperature, ids)[0]
        found["advantage"] = losses.candidate_advantages(log_p, scores.support_logprobs)
    return found


def run_diagnostics(golden: dict[str, Any], support: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns every diagnostic of LOSSES section 8 that training logs per token, by its golden name.

    `support` is full, where the loss has the teacher's logits, or topk, where it has the teacher's scores only.
    """
    student = torch.tensor(golden["student_logits"], dtype=dtype)
    teacher = torch.tensor(golden["teacher_logits"], dtype=dtype)
    head, k = identity_head(golden, dtype), golden["K"]
    request = ScoreRequest(support, k=k, diagnostics_k=k)
    ids = torch.tensor(golden["support"]["student"])
    scores = teacher_scores(teacher, head, torch.tensor(golden["sampled"]), request, ids)
    settings = LossSettings.model_validate({"support": support, "topk": {"k": k}, "chunk_tokens": CHUNK_TOKENS})
    _, stats = head_loss(
        student,
        head,
        targets_of(golden, scores, dtype),
        settings,
        teacher_head=head if support == "full" else None,
        rollout_temperature=1.0,
        diagnostics_k=k,
    )
    return {
        "overlap_ratio": stats.overlap,
        "overlap_token_advantage": stats.overlap_advantage,
        "student_entropy": stats.entropy,
        "teacher_entropy": stats.teacher_entropy,
        "entropy_gap": diagnostics.entropy_gap(stats.entropy, stats.teacher_entropy),
        "overlap_mass_student": stats.overlap_mass_student,
        "overlap_mass_teacher": stats.overlap_mass_teacher,
    }


def largest(found: Tensor, expected: Any) -> float:
    """Returns the largest absolute error; infinite where one is not a number or the shapes differ."""
    expected = torch.tensor(expected, dtype=torch.float64)
    if found.shape != expected.shape:
        return float("inf")
    error = (found.double() - expected).abs().max()
    return float(error) if torch.isfinite(error) else float("inf")


def support_error(golden: dict[str, Any], of: str, dtype: torch.dtype) -> float:
    """Returns how far the logits of a golden support are from those of the ids that training would choose."""
    logits, ids = torch.tensor(golden[f"{of}_logits"], dtype=dtype), torch.tensor(golden["support"][of])
    return largest(logits.gather(1, ids), logits.topk(golden["K"], dim=-1).values.tolist())


def errors_of(golden: dict[str, Any], dtype: torch.dtype) -> Iterator[tuple[str, dict[str, float] | str]]:
    """Yields (name, the largest error of each part) of everything in a file, or (name, why it could not be run)."""
    for of in golden["support"]:
        yield f"support.{of}", {"logits": support_error(golden, of, dtype)}
    for name, case in golden["per_token"].items():
        try:
            found = run_case(name, golden, dtype)
        except ValueError as error:
            yield name, f"unknown case: {str(error).splitlines()[-1].strip()}"
            continue
        unknown, missing = case.keys() - found.keys() - {"old_logprob"}, {"value", "grad"} - case.keys()
        if unknown or missing:
            yield name, f"unknown parts {sorted(unknown)}, missing parts {sorted(missing)}"
            continue
        yield name, {part: largest(value, case[part]) for part, value in found.items() if part in case}
    for support in ("full", "topk"):
        measured = run_diagnostics(golden, support, dtype)
        for name, expected in golden.get("diagnostics", {}).items():
            known = name in measured
            yield (
                f"diagnostics.{name} ({support})",
                {"value": largest(measured[name], expected)} if known else "unknown diagnostic",
            )


def check_file(path: Path, dtype: str) -> bool:
    """Prints the errors of one golden file; returns whether all are within the tolerance."""
    good = True
    for name, result in errors_of(json.loads(path.read_text()), getattr(torch, dtype)):
        if isinstance(result, str):
            ok, text = False, result
        else:
            ok = max(result.values()) <= TOLERANCE[dtype]
            text = ", ".join(f"{part} {error:.1e}" for part, error in result.items())
        good &= ok
        print(f"{'ok  ' if ok else 'FAIL'} {path.name} {name}: {text}")
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--dtype", choices=sorted(TOLERANCE), default="float64")
    options = parser.parse_args()
    results = [check_file(path, options.dtype) for path in options.files]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
