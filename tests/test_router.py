"""Facts about several teachers: every prompt has exactly one, told from its fields, and its scores are that one's."""

import json
from pathlib import Path

import pytest
import torch

from opd.config import Config, RoutedTeacher
from opd.errors import ConfigError, DataError
from opd.launch import Request, launch
from opd.recipes import load_config
from opd.teachers import build_teacher, find_teacher
from opd.teachers.router import Routes
from opd.types import Prompt, Rollout, ScoreRequest

VOCABULARY = 64


def routes_of(*teachers, seed=0):
    return Routes([RoutedTeacher(model="m", **teacher) for teacher in teachers], seed)


def test_the_first_rule_that_fits_has_the_prompt():
    routes = routes_of({"match": {"source": "math"}}, {"match": {"source": ["code", "sql"], "level": 2}}, {})
    rows = [{"source": "math"}, {"source": "sql", "level": 2}, {"source": "sql", "level": 3}, {"question": "?"}]
    assert [routes.teacher_of(row) for row in rows] == [0, 1, 2, 2]


def test_teachers_with_the_same_rule_share_its_prompts_by_weight():
    routes = routes_of({"weight": 3}, {"weight": 1}, {"match": {"a": 1}})
    drawn = [routes.teacher_of({"question": str(number)}) for number in range(4000)]
    assert 0.72 < drawn.count(0) / 4000 < 0.78
    assert drawn.count(2) == 0, "an earlier rule fits everything"
    assert drawn == [routes.teacher_of({"question": str(number)}) for number in range(4000)]
    other = routes_of({"weight": 3}, {"weight": 1}, seed=1)
    assert drawn != [other.teacher_of({"question": str(number)}) for number in range(4000)]


def test_a_prompt_that_no_rule_fits_is_found_when_the_data_is_read(two_models, tmp_path):
    student, teacher = two_models
    file = tmp_path / "mixed.jsonl"
    rows = [{"question": f"{i}?", "source": "math" if i != 6 else "poetry"} for i in range(10)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = [
        f"teachers=[{{model: '{teacher}', match: {{source: math}}}}]",
        f"run.dir={tmp_path}",
        "rollout.sampler=hf",
    ]
    flags = {"student": str(student), "data": [f"{file},prompt=question"]}
    with pytest.raises(DataError, match="No teacher's match fits") as caught:
        launch(Request(overrides=[*settings, "data.max_prompt_tokens=64", "rollout.max_tokens=8"], flags=flags))
    assert caught.value.where == f"{file}:7"
    assert "source: 'poetry'" in caught.value.why


def test_one_teacher_and_several_cannot_be_meant_at_the_same_time(two_models, prompts_file):
    student, teacher = map(str, two_models)
    with pytest.raises(ConfigError, match="There is a teacher, and there are teachers"):
        load_config(
            [],
            [f"teachers=[{{model: '{teacher}'}}]"],
            {"student": student, "teacher": teacher, "data": [str(prompts_file)]},
        )


def config_of(two_models, **sections):
    """The student and two teachers: the padded one for even questions, the student's own weights for odd ones."""
    student, teacher = map(str, two_models)
    teachers = [
        {"model": teacher, "dtype": "float32", "match": {"kind": "even"}},
        {"model": student, "dtype": "float32"},
    ]
    return Config.model_validate({"student": {"model": student}, "teachers": teachers} | sections)


@pytest.mark.parametrize("kind", ["sampled", "full"])
def test_every_rollout_has_the_scores_of_its_own_teacher(two_models, kind):
    config = config_of(two_models)
    cards = [find_teacher(settings, pytest.fail) for settings in config.all_teachers]
    both = build_teacher(config, cards, VOCABULARY)
    alone = [card.load(VOCABULARY) for card in cards]
    generator = torch.Generator().manual_seed(0)
    rollouts = []
    for number in range(8):
        prompt = Prompt(number, (1, 2, 3 + number), (1, 2, 3 + number), {"kind": "even" if number % 2 == 0 else "odd"})
        ids = torch.randint(VOCABULARY, (3 + number,), generator=generator)
        rollouts.append(Rollout(prompt, 0, ids, torch.zeros(len(ids)), "length", 0))
    request = ScoreRequest(kind)
    found = {item.rollout.key: item for item in both.score(iter(rollouts), request)}
    assert len(found) == 8
    for number, rollout in enumerate(rollouts):
        expected = next(iter(alone[number % 2].score([rollout], request)))
        item = found[rollout.key]
        if kind == "full":
            ours, theirs = (one.head.logits(one.scores.hidden) for one in (item, expected))
        else:
            ours, theirs = item.scores.sampled_logprobs, expected.scores.sampled_logprobs
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("support", ["full", "topk"])
def test_a_run_with_two_teachers_learns_nothing_from_the_one_that_is_the_student(two_models, tmp_path, support):
    student, teacher = map(str, two_models)
    file = tmp_path / "mixed.jsonl"
    rows = [{"question": f"what is {i}?", "kind": "even" if i % 2 == 0 else "odd"} for i in range(20)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    teachers = f"teachers=[{{model: '{teacher}', match: {{kind: even}}}}, {{model: '{student}'}}]"
    settings = [
        *(teachers, "rollout.sampler=hf", "rollout.prompts=8", "rollout.max_tokens=6", "train.steps=1"),
        *("student.compute_dtype=float32", "data.max_prompt_tokens=64", "loss.topk.k=8", "diagnostics.k=8"),
        *(f"loss.support={support}", f"run.dir={tmp_path}", "run.name=two", "eval.prompts=4", "eval.max_tokens=4"),
    ]
    launch(Request(overrides=settings, flags={"student": student, "data": [f"{file},prompt=question"]}))
    written = (tmp_path / "two" / "rollouts" / "step-000001.jsonl").read_text().splitlines()
    for record in map(json.loads, written):
        number = int("".join(c for c in record["prompt"].split("user\n")[1] if c.isdigit()))
        differs = max(abs(value) for value in record["reverse_kl_sampled"])
        assert (differs > 0.1) == (number % 2 == 0), (number, differs)
    assert Path(tmp_path / "two" / "metrics.jsonl").exists()
