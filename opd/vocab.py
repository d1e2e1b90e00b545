"""Whether student and teacher mean the same by a token id: the one thing that every loss here rests on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from opd.errors import PreflightError

SHOWN_IDS = 5
"""Differing ids that an error names."""
SAMPLED_TOKENS = 2000
"""Tokens of the vocabulary whose text is tokenised by both, to see whether they are cut the same way."""
PROBES = (
    "The QUICK brown fox doesn't jump; it's 12345.678% lazy.\n\n\tdef f(x):\r\n    return x**2  # ok",
    "  leading, trailing   and  inner spaces  ",
    "Ünïcödé é e\u0301 ﬁ ½ 你好，世界 こんにちは مرحبا שלום Здравствуйте 🙂👩‍👩‍👧",
    "https://example.org/a_b?c=d&e=[1, 2, 3] {'k': \"v\"} <b>x</b> \\frac{1}{2} $x^2$",
)
OTHER_PAIR = "choose a student and a teacher of one family (same tokenizer), such as Qwen/Qwen3-0.6B and Qwen/Qwen3-8B"


@dataclass(frozen=True, slots=True)
class VocabVerdict:
    """What two tokenizers have in common."""

    shared_size: int
    """Ids 0 … shared_size−1 are the same token for both, and both models have a logit for them."""
    identical: bool
    """Whether neither tokenizer has a token that the other lacks."""
    template_differs: bool
    """Whether the chat templates differ, or only one of the two has one."""
    findings: list[str]
    """What a user should know: extra tokens, other end tokens, other chat templates."""


def compare(
    student_tokenizer: Any, teacher_tokenizer: Any, student_vocab_size: int, teacher_vocab_size: int
) -> VocabVerdict:
    """Returns the shared vocabulary of the two; the sizes are those of the models' logits.

    Padding of the logits and added tokens at the end of one tokenizer are no hindrance. Raises PreflightError naming
    the first ids that differ, or the text that is cut differently, since a loss would compare unrelated tokens.
    """
    student, teacher = _tokens(student_tokenizer), _tokens(teacher_tokenizer)
    both = min(highest_id(student_tokenizer), highest_id(teacher_tokenizer)) + 1
    shared = min(both, student_vocab_size, teacher_vocab_size)
    where = f"{student_tokenizer.name_or_path} (student) and {teacher_tokenizer.name_or_path} (teacher)"
    differing = [number for number in range(both) if student.get(number) != teacher.get(number)]
    if differing:
        shown = "; ".join(
            f"id {number} is {_show(student.get(number))} for the student and {_show(teacher.get(number))} for the teacher"
            for number in differing[:SHOWN_IDS]
        )
        raise PreflightError(
            f"Student and teacher have different tokens: {len(differing)} of {both} ids differ.",
            where=where,
            why=shown,
            fix=OTHER_PAIR,
        )
    if shared == 0:
        raise PreflightError("Student and teacher share no token.", where=where, fix=OTHER_PAIR)
    pipelines = _pipelines(student_tokenizer, teacher_tokenizer)
    same_merges = _compare_merges(*pipelines, where)
    findings = []
    for role, tokens, tokenizer, other in (
        ("student", student, student_tokenizer, "teacher"),
        ("teacher", teacher, teacher_tokenizer, "student"),
    ):
        if extra := sorted(number for number in tokens if number >= both):
            added = set(tokenizer.get_added_vocab().values())
            ordinary = [number for number in extra if number not in added]
            if ordinary and not same_merges:
                raise PreflightError(
                    f"The {role}'s tokenizer has {len(ordinary)} ordinary tokens that the {other}'s lacks.",
                    where=where,
                    why=f"the first is id {ordinary[0]}, {_show(tokens[ordinary[0]])}, so texts are cut differently",
                    fix=OTHER_PAIR,
                )
            names = ", ".join(_show(tokens[number]) for number in extra[:SHOWN_IDS])
            findings.append(
                f"The {role}'s tokenizer has {len(extra)} tokens more at the end ({names}{', …' if len(extra) > SHOWN_IDS else ''}); "
                "they take no part in sampling and losses."
            )
    findings += _compare_cuts(student_tokenizer, teacher_tokenizer, pipelines, both, where)
    findings += special_token_findings(student_tokenizer, teacher_tokenizer, shared)
    templates = _templates(student_tokenizer, teacher_tokenizer)
    return VocabVerdict(shared, len(student) == len(teacher), bool(templates), findings + templates)


def _tokens(tokenizer: Any) -> dict[int, str]:
    return {number: token for token, number in tokenizer.get_vocab().items()}


def highest_id(tokenizer: Any) -> int:
    """Returns the largest id that a token has; −1 for an empty tokenizer."""
    return max(_tokens(tokenizer), default=-1)


def _show(token: str | None) -> str:
    return "no token" if token is None else repr(token)


def _pipelines(student_tokenizer: Any, teacher_tokenizer: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Both serialised tokenizers; empty for one without a fast backend."""
    backends = [getattr(tokenizer, "backend_tokenizer", None) for tokenizer in (student_tokenizer, teacher_tokenizer)]
    student, teacher = ("{}" if backend is None else backend.to_str() for backend in backends)
    # Parsing a large vocabulary takes a second, and most pairs are equal.
    parsed = json.loads(student)
    return parsed, parsed if student == teacher else json.loads(teacher)


def _compare_merges(student_pipeline: dict[str, Any], teacher_pipeline: dict[str, Any], where: str) -> bool:
    """Whether both are BPE with the same merges; raises PreflightError where only the merges differ."""
    student = student_pipeline.get("model", {}).get("merges")
    teacher = teacher_pipeline.get("model", {}).get("merges")
    if student is None or teacher is None:
        return False
    if student != teacher:
        position = next(
            (i for i, (ours, theirs) in enumerate(zip(student, teacher, strict=False)) if ours != theirs),
            min(len(student), len(teacher)),
        )
        ours, theirs = (
            repr(" ".join(merges[position])) if position < len(merges) else "none" for merges in (student, teacher)
        )
        raise PreflightError(
            "Student and teacher have the same tokens but build them differently.",
            where=where,
            why=f"merge {position} is {ours} for the student and {theirs} for the teacher",
            fix=OTHER_PAIR,
        )
    return True


def _compare_cuts(
    student_tokenizer: Any,
    teacher_tokenizer: Any,
    pipelines: tuple[dict[str, Any], dict[str, Any]],
    both: int,
    where: str,
) -> list[str]:
    """Findings about normaliser and pre-tokeniser; raises PreflightError where a text is cut differently."""
    ours, theirs = pipelines
    parts = [part for part in ("normalizer", "pre_tokenizer") if ours.get(part) != theirs.get(part)]
    if ours and theirs and not parts and ours["model"]["type"] == theirs["model"]["type"]:
        return []
    added = set(student_tokenizer.get_added_vocab().values())
    ordinary = [number for number in range(both) if number not in added]
    numbers = ordinary[:: max(1, len(ordinary) // SAMPLED_TOKENS)]
    sample = [token for token in student_tokenizer.convert_ids_to_tokens(numbers) if token is not None]
    for text in (*PROBES, *student_tokenizer.convert_tokens_to_string(sample).split("\n")):
        cut = [tok(text, add_special_tokens=False)["input_ids"] for tok in (student_tokenizer, teacher_tokenizer)]
        if cut[0] != cut[1]:
            at = next((i for i, pair in enumerate(zip(*cut, strict=False)) if pair[0] != pair[1]), min(map(len, cut)))
            pieces = [
                f"…{tok.convert_ids_to_tokens(ids[at : at + 3])}"
                for tok, ids in zip((student_tokenizer, teacher_tokenizer), cut, strict=True)
            ]
            raise PreflightError(
                "Student and teacher have the same tokens but cut texts differently.",
                where=where,
                why=f"{text[:30]!r} is {pieces[0]} for the student and {pieces[1]} for the teacher"
                + (f"; their {' and '.join(parts)} differ" if parts else ""),
                fix=OTHER_PAIR,
            )
    names = " and ".join(parts) or "model"
    return [f"The tokenizers differ in {names} as written, but cut all texts that were tried into the same tokens."]


def special_token_findings(student_tokenizer: Any, teacher_tokenizer: Any, shared: int) -> list[str]:
    """Returns what to know of the end tokens, one sentence each; `shared` is the size of the shared vocabulary.

    A base student with an instruct teacher of another end token is the known trap: completions grow without end.
    """
    findings = []
    student, teacher = student_tokenizer.eos_token_id, teacher_tokenizer.eos_token_id
    if student != teacher:
        findings.append(
            f"The student ends with {_show(student_tokenizer.eos_token)} (id {student}), the teacher with "
            f"{_show(teacher_tokenizer.eos_token)} (id {teacher}): the student is taught not to write its own end token, "
            "and completions can grow to rollout.max_tokens; add the teacher's to rollout.stop_token_ids, or use a pair "
            "of base models or of chat models."
        )
    if student is not None and student >= shared:
        findings.append(
            f"The student's end token {_show(student_tokenizer.eos_token)} (id {student}) is not among the {shared} shared "
            "tokens, so no completion can end with it."
        )
    return findings


def _templates(student_tokenizer: Any, teacher_tokenizer: Any) -> list[str]:
    student, teacher = student_tokenizer.chat_template, teacher_tokenizer.chat_template
    if student == teacher:
        return []
    if student is None or teacher is None:
        lacking, having = ("student", "teacher") if student is None else ("teacher", "student")
        what = f"The {having} has a chat template, the {lacking} has none"
    else:
        what = "The chat templates of student and teacher differ"
    return [
        f"{what}: the teacher sees the student's prompt as it is, unless teacher.prompt renders one of its own "
        "(teacher.prompt.chat=auto)."
    ]
