"""Checks golden files through the functions that training calls: `python tests/golden.py FILE… [--dtype float32]`.

Prints the largest error of every per-token case and diagnostic, and exits 1 where one is off or a name is unknown.
The student's head is the identity, so that hidden states are logits and the gradient of the chunked loss is theirs.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opd import diagnostics
from opd.config import LossSettings
from opd.heads import Head
from opd.linear_loss import head_loss, support_ids, teacher_scores
from opd.types import ScoreRequest, Targets

TOLERANCE = {"float64": 1e-6, "float32": 1e-4}


class UnknownCase(ValueError):
    """A case name that this script cannot read; it fails and is never skipped."""


def settings_of(name: str) -> LossSettings:
    """Returns the loss settings that a case name spells, such as topk.student.tail.jsd@0.5 or sampled.reverse_kl.clip(0.2,0.28)."""
    name, *options = name.split("@temperature=")
    values: dict[str, Any] = {"chunk_tokens": 4}
    if options:
        values["temperature"] = float(options[0])
    parts = re.findall(r"[a-z_0-9]+\([^)]*\)|[a-z_]+@[0-9.]+|[a-z_]+=[a-z_]+|[a-z_0-9]+", name)
    if ".".join(parts) != name:
        raise UnknownCase(name)
    support, *rest = parts
    values["support"] = support
    if support == "topk" and len(rest) >= 2:
        values["topk"] = {"k": 0, "of": rest.pop(0), "mass": rest.pop(0)}
    if rest:
        kind, _, beta = rest.pop(0).partition("@")
        values["divergence"] = kind
        if beta:
            values["jsd_beta"] = float(beta)
    for part in rest:
        apply_option(values, part, name)
    return values


def apply_option(values: dict[str, Any], part: str, name: str) -> None:
    """Adds one trailing part of a case name to the settings."""
    numbers = [float(number) for number in re.findall(r"[0-9.]+", part.partition("(")[2])]
    match part.partition("(")[0]:
        case "policy_gradient":
            values["sampled"] = {"estimator": "policy_gradient"}
        case "k2":
            values["sampled"] = {"estimator": "k2"}
        case "baseline=kl":
            values["sampled"] = {"baseline": "kl"}
        case "baseline=none":
            values["sampled"] = {"baseline": "none"}
        case "clip":
            values |= {"importance": "clip", "clip_low": numbers[0], "clip_high": numbers[1]}
        case "truncated_is":
            values |= {"importance": "truncated", "importance_cap": numbers[0]}
        case _:
            raise UnknownCase(name)


def run_case(name: str, golden: dict[str, Any], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns value [T] and gradient in the student's logits [T, V] of one case."""
    raw = settings_of(name)
    if "topk" in raw:
        raw["topk"]["k"] = golden["K"]
    settings = LossSettings.model_validate(raw)
    student = torch.tensor(golden["student_logits"], dtype=dtype, requires_grad=True)
    teacher = torch.tensor(golden["teacher_logits"], dtype=dtype)
    token_ids = torch.tensor(golden["sampled"])
    head = Head(torch.eye(golden["V"], dtype=dtype), None, 1.0, None, golden["V"])
    needs_full = settings.support == "full" or settings.sampled.baseline == "kl"
    request = ScoreRequest(
        kind="full" if needs_full else settings.support,
        temperature=settings.temperature,
        k=golden["K"],
        support_of=settings.topk.of,
    )
    own = (student.detach()).topk(golden["K"], dim=-1).indices
    scores = teacher_scores(teacher, head, token_ids, request, own)
    first = golden["per_token"][name].get("old_logprob")
    targets = Targets(
        token_ids=token_ids,
        weights=torch.ones(golden["T"], dtype=dtype),
        sampler_logprobs=torch.zeros(golden["T"], dtype=dtype),
        first_logprobs=None if first is None else torch.tensor(first, dtype=dtype),
        teacher_logprobs=scores.sampled_logprobs,
        support_ids=scores.support_ids,
        support_logprobs=scores.support_logprobs,
        tail_logprobs=scores.tail_logprobs,
        teacher_hidden=scores.hidden,
    )
    loss, stats = head_loss(
        student,
        head,
        targets,
        settings,
        teacher_head=head if needs_full else None,
        rollout_temperature=settings.temperature,
        diagnostics_k=0,
    )
    loss.backward()
    return stats.loss, student.grad


def run_diagnostics(golden: dict[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns every diagnostic of LOSSES section 8 that training logs per token, by its golden name."""
    student = torch.tensor(golden["student_logits"], dtype=dtype)
    teacher = torch.tensor(golden["teacher_logits"], dtype=dtype)
    head = Head(torch.eye(golden["V"], dtype=dtype), None, 1.0, None, golden["V"])
    targets = Targets(
        token_ids=torch.tensor(golden["sampled"]),
        weights=torch.ones(golden["T"], dtype=dtype),
        sampler_logprobs=torch.zeros(golden["T"], dtype=dtype),
        teacher_hidden=teacher,
    )
    settings = LossSettings(support="full", chunk_tokens=4)
    with torch.no_grad():
        _, stats = head_loss(
            student, head, targets, settings, teacher_head=head, rollout_temperature=1.0, diagnostics_k=golden["K"]
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


def check_supports(golden: dict[str, Any], dtype: torch.dtype) -> None:
    """Raises UnknownCase when a golden support is not what training would use."""
    for of in ("student", "teacher"):
        logits = torch.tensor(golden[f"{of}_logits"], dtype=dtype)
        own = logits.topk(golden["K"], dim=-1).indices
        if support_ids(own, own, of).tolist() != golden["support"][of]:
            raise UnknownCase(f"support.{of}")


def largest(got: Tensor, expected: Any) -> float:
    """Returns the largest absolute error; infinite where one is not a number."""
    error = (got.double() - torch.tensor(expected, dtype=torch.float64)).abs().max()
    return float(error) if torch.isfinite(error) else float("inf")


def check_file(path: Path, dtype_name: str) -> bool:
    """Prints the errors of one golden file; returns whether all are within the tolerance."""
    golden, dtype = json.loads(path.read_text()), getattr(torch, dtype_name)
    tolerance, good = TOLERANCE[dtype_name], True

    def report(name: str, text: str, ok: bool) -> None:
        nonlocal good
        good &= ok
        print(f"{'ok  ' if ok else 'FAIL'} {path.name} {name}: {text}")

    try:
        check_supports(golden, dtype)
    except UnknownCase as error:
        report(str(error), "differs from what training would use", False)
    for name, case in golden["per_token"].items():
        try:
            value, gradient = run_case(name, golden, dtype)
        except (UnknownCase, ValueError) as error:
            report(name, f"unknown case ({str(error).splitlines()[0]})", False)
            continue
        errors = largest(value, case["value"]), largest(gradient, case["grad"])
        report(name, f"value {errors[0]:.2e}, gradient {errors[1]:.2e}", max(errors) <= tolerance)
    found = run_diagnostics(golden, dtype)
    for name, expected in golden.get("diagnostics", {}).items():
        if name not in found:
            report(f"diagnostics.{name}", "unknown diagnostic", False)
            continue
        error = largest(found[name], expected)
        report(f"diagnostics.{name}", f"{error:.2e}", error <= tolerance)
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--dtype", choices=sorted(TOLERANCE), default="float64")
    options = parser.parse_args()
    passed = [check_file(path, options.dtype) for path in options.files]  # every file, whatever the first one says
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
