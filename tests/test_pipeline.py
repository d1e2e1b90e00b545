"""Facts about what is refused before any weights are loaded."""

import json
import shutil

import pytest

from opd.config import Config
from opd.errors import PreflightError
from opd.pipeline import build_pipeline, check_pair
from opd.teachers import find_teacher

SHARED_TOKENS, CONTEXT = 64, 256


def pair(two_models, **sections):
    student, teacher = two_models
    base = {"student": {"model": str(student)}, "teacher": {"model": str(teacher)}, "data": {"max_prompt_tokens": 32}}
    rollout = {"rollout": {"max_tokens": 32}}
    return Config.model_validate(base | rollout | sections)


def checked(config, warn):
    return check_pair(config, find_teacher(config.teacher, warn), warn)


def test_vocabularies_padded_to_different_sizes_share_the_smaller_one(two_models):
    warnings = []
    assert checked(pair(two_models), warnings.append) == SHARED_TOKENS


def test_prompt_and_completion_that_do_not_fit_the_context_name_the_settings(two_models):
    config = pair(two_models, rollout={"max_tokens": CONTEXT - 31})
    with pytest.raises(PreflightError, match="longer than the student's context") as caught:
        checked(config, pytest.fail)
    assert f"rollout.max_tokens={CONTEXT - 31}" in caught.value.where
    assert str(CONTEXT) in caught.value.fix


@pytest.mark.parametrize(
    ("key", "sections"),
    [
        ("loss.topk.k", {"loss": {"support": "topk", "topk": {"k": SHARED_TOKENS + 1}}}),
        ("diagnostics.k", {"diagnostics": {"k": SHARED_TOKENS + 1}}),
    ],
)
def test_a_k_larger_than_the_vocabulary_is_refused(two_models, key, sections):
    with pytest.raises(PreflightError, match=f"{key}={SHARED_TOKENS + 1} is larger") as caught:
        checked(pair(two_models, **sections), lambda _: None)
    assert str(SHARED_TOKENS) in caught.value.fix


@pytest.mark.parametrize(
    ("key", "sections"),
    [
        ("rollout.stop_token_ids", lambda ids: {"rollout": {"max_tokens": 32, "stop_token_ids": ids}}),
        ("loss.mask_token_ids", lambda ids: {"loss": {"mask_token_ids": ids}}),
    ],
)
def test_an_id_that_no_token_has_is_refused(two_models, key, sections):
    checked(pair(two_models, **sections([0, SHARED_TOKENS - 1])), lambda _: None)
    with pytest.raises(PreflightError, match=f"{key} has the id {SHARED_TOKENS}"):
        checked(pair(two_models, **sections([0, SHARED_TOKENS])), lambda _: None)


@pytest.mark.parametrize("role", ["student", "teacher"])
def test_weights_that_do_not_fit_their_configuration_are_known_before_any_are_loaded(
    two_models, prompts_file, tmp_path, role
):
    folders = dict(zip(("student", "teacher"), two_models, strict=True))
    damaged = shutil.copytree(folders[role], tmp_path / role)
    settings = json.loads((damaged / "config.json").read_text())
    (damaged / "config.json").write_text(json.dumps(settings | {"intermediate_size": 48}))
    config = pair(
        tuple((folders | {role: damaged}).values()),
        data={"max_prompt_tokens": 32, "train": f"{prompts_file},prompt=question"},
    )
    phases = []
    with pytest.raises(PreflightError, match=f"{role}'s model.layers.0.mlp"):
        build_pipeline(config, phases.append, lambda _: None, {})
    assert not any("loading" in phase for phase in phases)
