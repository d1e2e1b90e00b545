"""Everything a run needs, built and checked in the order of what it costs: data, tokenizers, then models."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from opd.chat import PromptRenderer, Renderer
from opd.config import Config, SyncSettings
from opd.data import PromptStream, heldout_prompts, load_sources
from opd.errors import PreflightError
from opd.evals import Evaluator
from opd.identity import Identity, identity_of, require_same_models
from opd.memory import keep_freed_memory
from opd.models import load_model_config, load_tokenizer, resolve_device
from opd.samplers import Sampler, build_sampler
from opd.student import Student
from opd.teachers import Scorer, TeacherCard, build_teacher, find_teacher
from opd.teachers.router import RoutedRenderer, Routes
from opd.vocab import compare
from opd.weights import check_files

if TYPE_CHECKING:
    from opd.replay import ReplayedPrompts


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The stages of the loop."""

    prompts: PromptStream | ReplayedPrompts
    sampler: Sampler
    teacher: Scorer
    student: Student
    evaluator: Evaluator | None
    identities: dict[str, Identity]
    """Of "student" and "teacher", as they were loaded."""


def build_pipeline(
    config: Config, phase: Callable[[str], None], warn: Callable[[str], None], begun_with: Mapping[str, Identity]
) -> Pipeline:
    """Returns the stages of a run; every misfit that can be known without weights is raised before any are loaded.

    `phase` is told what is going on, `warn` what a user should know. `begun_with`: the models of a run that is resumed, as
    far as they are known. Raises DataError and PreflightError.
    """
    if config.run.replay is not None:
        return _replayed(config, phase, begun_with)
    phase("reading the data")
    rows = load_sources(config.data)
    phase("comparing the tokenizers")
    cards = [find_teacher(settings, warn) for settings in config.all_teachers]
    identities = {"student": identity_of(config.student.model, config.student.revision)}
    names = {"student": config.student.model}
    for number, card in enumerate(cards):
        role = f"teacher {number + 1}" if config.teachers else "teacher"
        identities[role], names[role] = card.identity, card.name
    require_same_models(begun_with, identities, names)
    vocab_size = min(check_pair(config, card, warn) for card in cards)
    check_weights(config)
    renderer = build_renderer(config, cards)
    heldout, rest = heldout_prompts(rows, renderer, config.data, config.eval.prompts, config.run.seed)
    prompts = PromptStream(rest, renderer, config.data, config.run.seed)
    for warning in renderer.warnings:
        warn(warning)
    if len(heldout) < config.eval.prompts:
        warn(f"the data has room for {len(heldout)} held-out prompts, not the {config.eval.prompts} of eval.prompts")
    if resolve_device(config.student.device).type == "cpu":
        keep_freed_memory()
    phase(f"loading the teacher {', '.join(card.name for card in cards)}")
    teacher = build_teacher(config, cards, vocab_size)
    phase(f"loading the student {config.student.model}")
    student = Student(config, vocab_size)
    phase("starting the sampler")
    sampler = build_sampler(config, student, warn)
    evaluator = Evaluator(config, heldout, teacher, teacher_writer(config, teacher)) if heldout else None
    return Pipeline(prompts, sampler, teacher, student, evaluator, identities)


def _replayed(config: Config, phase: Callable[[str], None], begun_with: Mapping[str, Identity]) -> Pipeline:
    """The stages of a run that trains on what another one recorded; there is nobody to evaluate it with."""
    from opd.replay import ReplayedPrompts, ReplayedSampler, ReplayedTeacher, open_recording

    phase(f"reading what {config.run.replay} recorded")
    recording = open_recording(config)
    identities = {"student": identity_of(config.student.model, config.student.revision)}
    require_same_models(begun_with, identities, {"student": config.student.model})
    phase(f"loading the student {config.student.model}")
    # The rollouts are another policy's as soon as the student moves otherwise than it did then.
    student = Student(config.model_copy(update={"sync": SyncSettings(max_mismatch=math.inf)}), recording.vocab_size)
    return Pipeline(
        ReplayedPrompts(recording), ReplayedSampler(recording), ReplayedTeacher(recording), student, None, identities
    )


def build_renderer(config: Config, cards: Sequence[TeacherCard]) -> PromptRenderer:
    """Returns what renders prompts for the student and for the teacher that each belongs to."""
    student_tokenizer = load_tokenizer(config.student.model, config.student.revision, "student")
    renderers = [
        Renderer(student_tokenizer, config.student.prompt, card.tokenizer, settings.prompt)
        for card, settings in zip(cards, config.all_teachers, strict=True)
    ]
    return RoutedRenderer(renderers, Routes(config.teachers, config.run.seed)) if config.teachers else renderers[0]


def check_weights(config: Config) -> None:
    """Raises PreflightError where a local folder's weights are cut short or do not fit its configuration."""
    models = [("student", config.student.model, config.student.revision)]
    local = [teacher for teacher in config.all_teachers if teacher.resolved_kind == "local"]
    models += [("teacher", teacher.model, teacher.revision) for teacher in local]
    for role, model, revision in models:
        check_files(model, load_model_config(model, revision, role), role)


def check_pair(config: Config, card: TeacherCard, warn: Callable[[str], None]) -> int:
    """Returns the size of the vocabulary that student and teacher share, from tokenizers and configurations alone.

    Raises PreflightError where the tokens differ, where a support is larger than the vocabulary or a token id outside it, or
    where prompt and completion do not fit into a model's context.
    """
    student = config.student
    student_config = load_model_config(student.model, student.revision, "student").get_text_config()
    student_tokenizer = load_tokenizer(student.model, student.revision, "student")
    verdict = compare(student_tokenizer, card.tokenizer, student_config.vocab_size, card.vocab_size)
    for finding in verdict.findings:
        warn(finding)
    for key, k in (("loss.topk.k", config.loss.topk.k), ("diagnostics.k", config.diagnostics.k)):
        if k > verdict.shared_size:
            raise PreflightError(
                f"{key}={k} is larger than the vocabulary.",
                where=f"{key}, {verdict.shared_size} tokens shared by {student.model} and {card.name}",
                fix=f"use at most {verdict.shared_size}",
            )
    for key, ids in (
        ("rollout.stop_token_ids", config.rollout.stop_token_ids),
        ("loss.mask_token_ids", config.loss.mask_token_ids),
    ):
        if ids and max(ids) >= verdict.shared_size:
            raise PreflightError(
                f"{key} has the id {max(ids)}, which no token has.",
                where=f"{key}, {verdict.shared_size} tokens shared by {student.model} and {card.name}",
                fix=f"use ids from 0 to {verdict.shared_size - 1}",
            )
    needed = config.data.max_prompt_tokens + max(config.rollout.max_tokens, config.eval.max_tokens)
    student_context = getattr(student_config, "max_position_embeddings", None)
    for role, context in (("student", student_context), ("teacher", card.context_length)):
        if context is not None and needed > context:
            raise PreflightError(
                f"Prompt and completion can be longer than the {role}'s context of {context} tokens.",
                where=f"data.max_prompt_tokens={config.data.max_prompt_tokens} + "
                f"rollout.max_tokens={config.rollout.max_tokens} (or eval.max_tokens={config.eval.max_tokens})",
                fix=f"make them add up to at most {context}",
            )
    return verdict.shared_size


def teacher_writer(config: Config, teacher: Scorer) -> Sampler | None:
    """Returns a sampler over the in-process teacher, for the evaluation on the teacher's own completions."""
    from opd.samplers.hf import HfSampler
    from opd.teachers.cache import CachedScorer
    from opd.teachers.local import LocalTeacher

    if isinstance(teacher, CachedScorer):
        teacher = teacher.teacher
    if not config.eval.teacher_completions or not isinstance(teacher, LocalTeacher):
        return None
    return HfSampler(
        model=teacher.scorer.model,
        vocab_size=teacher.vocab_size,
        compute_dtype=teacher.scorer.dtype,
        batch_size=config.hf.batch_size,
        version=lambda: 0,
    )
