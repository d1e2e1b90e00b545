"""Reading recipes, overrides and flags: precedence, origins, and what a mistyped one gets."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import jsonschema
import pytest

from opd.config import Config
from opd.errors import ConfigError
from opd.recipes import find_recipe, load_config, shipped_recipes
from opd.resolved import resolved_yaml
from opd.schema import default_text, explain, json_schema, keys, nearest
from opd.yamls import parse

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def recipe(tmp_path):
    """Writes a recipe and returns its path."""

    def write(text, name="mine.yaml"):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write


def load(*recipes, overrides=(), **flags):
    return load_config(
        recipes, overrides, {name.replace("_", "-"): value for name, value in flags.items()}, complete=False
    )


def problems(*recipes, overrides=(), complete=False, **flags):
    """The texts of all problems."""
    with pytest.raises(ConfigError) as caught:
        load_config(recipes, overrides, flags, complete=complete)
    assert caught.value.exit_code == 2
    return [str(problem) for problem in caught.value.problems or [caught.value]]


def test_later_recipes_win_over_earlier_ones_and_overrides_and_flags_over_all(recipe):
    first = recipe("train: {steps: 1, learning_rate: 1e-3, beta1: 0.5}\nrun: {seed: 1}\n", "first.yaml")
    second = recipe("train: {steps: 2, learning_rate: 2e-3}\n", "second.yaml")
    config = load(first, second, overrides=["train.steps=3"], seed=7).config
    assert (config.train.steps, config.train.learning_rate, config.train.beta1) == (3, 2e-3, 0.5)
    assert config.run.seed == 7
    assert config.train.beta2 == Config().train.beta2


def test_mappings_are_merged_and_lists_are_replaced(recipe):
    first = recipe("student: {prompt: {chat_template_kwargs: {a: 1, b: 2}}}\nrollout: {stop: [x, y]}\n", "first.yaml")
    second = recipe("student: {prompt: {chat_template_kwargs: {b: 3}}}\nrollout: {stop: [z]}\n", "second.yaml")
    config = load(first, second).config
    assert config.student.prompt.chat_template_kwargs == {"a": 1, "b": 3}
    assert config.rollout.stop == ["z"]


def test_every_leaf_says_where_it_comes_from(recipe):
    path = recipe("# a comment\ntrain:\n  steps: 5\ndata:\n  train:\n    - path: a.jsonl\n")
    provenance = load(path, overrides=["loss.support=full"], learning_rate=1e-4).provenance
    assert provenance["train.steps"] == f"{path}:3"
    assert provenance["data.train[0].path"] == f"{path}:6"
    assert provenance["data.train[0].prompt"] == "default"
    assert provenance["loss.support"] == "override"
    assert provenance["train.learning_rate"] == "flag --learning-rate"
    assert provenance["train.beta1"] == "default"


@pytest.mark.parametrize(
    ("written", "value"), [("1e-5", 1e-5), ("1E-5", 1e-5), ("5.e-6", 5e-6), ("2", 2.0), (".5", 0.5)]
)
def test_numbers_are_numbers_however_they_are_written(recipe, written, value):
    assert load(recipe(f"train:\n  learning_rate: {written}\n")).config.train.learning_rate == value
    assert load(overrides=[f"train.learning_rate={written}"]).config.train.learning_rate == value


@pytest.mark.parametrize("written", ["no", "2024-01-01", "1e10", "0123", "true", "1:30"])
def test_a_text_stays_the_text_that_was_written(recipe, written):
    assert load(recipe(f"teacher:\n  revision: {written}\n")).config.teacher.revision == written
    assert load(overrides=[f"teacher.revision={written}"]).config.teacher.revision == written
    assert load(recipe(f"rollout:\n  stop: [{written}]\n")).config.rollout.stop == [written]


def test_null_and_quotes_in_overrides():
    config = load(overrides=["train.max_grad_norm=null", "teacher.revision=null", r'rollout.stop="\n"']).config
    assert config.train.max_grad_norm is None
    assert config.teacher.revision is None
    assert config.rollout.stop == ["\n"]


def test_a_template_with_a_colon_needs_no_quotes_in_an_override():
    template = "Q: {prompt} A: {answer}"
    assert load(overrides=[f"student.prompt.template={template}"]).config.student.prompt.template == template


def test_lists_in_overrides_need_no_brackets():
    config = load(
        overrides=["run.trackers=wandb,tensorboard", "rollout.stop_token_ids=1,2", "student.lora.targets=q,v"]
    ).config
    assert config.run.trackers == ["wandb", "tensorboard"]
    assert config.rollout.stop_token_ids == [1, 2]
    assert config.student.lora.targets == ["q", "v"]
    assert load(overrides=["student.lora.targets=all-linear"]).config.student.lora.targets == "all-linear"


def test_a_data_source_is_written_the_same_on_the_flag_and_in_an_override():
    source = "questions.jsonl,prompt=question"
    by_flag = load(data=[source]).config.data.train
    assert by_flag == load(overrides=[f"data.train={source}"]).config.data.train
    assert (by_flag[0].path, by_flag[0].prompt) == ("questions.jsonl", "question")


def test_a_recipe_may_write_sources_as_on_the_command_line(recipe):
    path = recipe("data:\n  train: [a.jsonl, 'b.jsonl,prompt=q']\n  heldout: c.jsonl\n")
    data = load(path).config.data
    assert [(source.path, source.prompt) for source in data.train] == [("a.jsonl", "prompt"), ("b.jsonl", "q")]
    assert data.heldout[0].path == "c.jsonl"
    assert load(overrides=["data.train=-"]).config.data.train[0].path == "-"


def test_a_mistyped_source_gets_its_place_and_the_nearest_name(recipe):
    for found, where in (
        (problems(complete=True, data=["a.jsonl,promt=q"], student="a/b", teacher="a/b"), "flag --data"),
        (problems(overrides=["data.train=a.jsonl,promt=q"]), "override data.train"),
        (problems(path := recipe("data:\n  train: ['a.jsonl,promt=q']\n")), f"{path}:2"),
    ):
        (text,) = found
        assert "did you mean prompt?" in text
        assert where in text


def test_home_is_expanded_where_no_shell_does_it():
    config = load(overrides=["teacher.model=~/teacher"], student="~/student", data=["~/prompts.jsonl"]).config
    for path in (config.teacher.model, config.student.model, config.data.train[0].path):
        assert path.startswith(str(Path.home()))


def test_output_is_the_run_directory_itself():
    config = load(output="somewhere/mine").config
    assert (config.run.dir, config.run.name) == ("somewhere", "mine")


def test_unknown_keys_get_the_file_the_line_and_the_nearest_names(recipe):
    path = recipe("train:\n  steps: 3\n  learning_rte: 1e-5\nloss:\n  topk:\n    masss: tail\n")
    learning_rate, mass = problems(path)
    assert f"{path}:3" in learning_rate
    assert "train.learning_rate" in learning_rate
    assert f"{path}:6" in mass
    assert "loss.topk.mass" in mass


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("lr", "train.learning_rate"),
        ("train.lr", "train.learning_rate"),
        ("steps", "train.steps"),
        ("trian", "train"),
        ("rollout.max_new_tokens", "rollout.max_tokens"),
        ("beta", "loss.jsd_beta"),
        ("student.dtype", "student.compute_dtype"),
    ],
)
def test_names_of_other_tools_and_misplaced_ones_find_the_key(name, expected):
    assert expected in nearest(name)


def test_all_problems_come_at_once_each_with_its_place(recipe):
    path = recipe(
        "train:\n  steps: -1\n  warmup_steps: many\nloss:\n  support: topkk\nrun: 5\ntrian: {steps: 3}\n"
        "data:\n  train:\n    - {prompt: q}\n    - {path: a.jsonl, wieght: 2}\nstudent: {lora: {rank: 0}}\n"
    )
    found = problems(path, overrides=["eval.every=x", "train.beta1=true"], complete=True)
    expected = [
        ("train.steps must be a whole number ≥ 0, not -1", f"{path}:2"),
        ("train.warmup_steps must be a whole number ≥ 0, not many", f"{path}:3"),
        ("loss.support must be one of sampled, topk, full, not topkk", f"{path}:5"),
        ("run is a section", f"{path}:6"),
        ("There is no key trian", f"{path}:7"),
        ("data.train[0].path is missing", f"{path}:10"),
        ("There is no key data.train[1].wieght", f"{path}:11"),
        ("student.lora.rank must be a whole number ≥ 1, not 0", f"{path}:12"),
        ("eval.every must be a whole number ≥ 0, not x", "override eval.every=x"),
        ("train.beta1 must be a number ≥ 0 and < 1, not true", "override train.beta1=true"),
        ("missing: student.model, teacher.model.", ""),
    ]
    for what, where in expected:
        assert any(what in text and where in text for text in found), what
    assert len(found) == len(expected)


def test_a_wrong_choice_is_told_the_nearest_one():
    (text,) = problems(overrides=["loss.topk.mass=renormalise"])
    assert "did you mean renormalize?" in text
    assert "tail, renormalize, weighted" in text


def test_what_does_not_combine_names_the_reason_and_the_lines(recipe):
    path = recipe("loss:\n  support: sampled\n  divergence: jsd\n")
    (text,) = problems(path)
    assert "reverse_kl only" in text
    assert f"{path}:2" in text
    assert f"{path}:3" in text


def test_a_combination_is_not_judged_by_the_default_of_a_mistyped_value():
    (text,) = problems(overrides=["loss.support=samplde", "loss.importance=clip"])
    assert "samplde" in text


@pytest.mark.parametrize("value", ["-.inf", ".inf", "1e400", ".nan"])
def test_infinity_and_not_a_number_are_not_a_learning_rate(value):
    (text,) = problems(overrides=[f"train.learning_rate={value}"])
    assert "train.learning_rate must be a number > 0" in text


@pytest.mark.parametrize("name", ["../x", "a/b", "/tmp/x", "..", "."])
def test_the_name_of_a_run_is_one_folder(name):
    (text,) = problems(overrides=[f"run.name={name}"])
    assert "run.name must be the name of one folder" in text
    assert "--output" in text


@pytest.mark.parametrize("override", ["rollout.stop_token_ids=[-1]", "loss.mask_token_ids=[-1]", "rollout.stop=['']"])
def test_ids_below_zero_and_empty_stop_strings_are_refused(override):
    (text,) = problems(overrides=[override])
    assert override.partition("=")[0] in text


def test_a_key_given_twice_is_refused_with_both_places(recipe):
    (in_file,) = problems(recipe("run:\n  seed: 1\n  seed: 2\n"))
    assert "seed" in in_file
    assert ":3, first at line 2" in in_file
    (in_flags,) = problems(overrides=["train.steps=3"], steps=5)
    assert "--steps" in in_flags
    assert "override train.steps=3" in in_flags


@pytest.mark.parametrize(
    ("text", "line", "hint"),
    [("train:\n\tsteps: 1\n", 2, "spaces"), ("train: {steps: 1\n", 2, "began at line 1"), ("- a\n- b\n", 1, "mapping")],
)
def test_malformed_yaml_names_file_and_line(recipe, text, line, hint):
    path = recipe(text)
    (found,) = problems(path)
    assert f"{path}:{line}" in found
    assert hint in found


def test_a_file_that_is_not_text_is_refused(tmp_path):
    path = tmp_path / "weights.yaml"
    path.write_bytes(b"run:\n  name: caf\xe9\n")
    (found,) = problems(path)
    assert "UTF-8" in found
    assert f"{path}:2" in found
    assert "iconv" in found


def test_a_run_without_models_and_data_is_told_all_three_with_their_flags():
    (text,) = problems(complete=True)
    for part in ("student.model", "teacher.model", "data.train", "--student", "--teacher", "--data"):
        assert part in text


def test_model_folders_are_looked_at_before_anything_is_loaded(tmp_path):
    empty, config_only, whole = tmp_path / "empty", tmp_path / "config_only", tmp_path / "whole"
    for folder in (empty, config_only, whole):
        folder.mkdir()
    (config_only / "config.json").write_text("{}")
    (whole / "config.json").write_text("{}")
    (whole / "model.safetensors").write_bytes(b"")
    data = "data.train=[{path: a.jsonl}]"

    def found(student):
        return problems(overrides=[data], complete=True, student=str(student), teacher=str(whole))[0]

    assert "there is no folder" in found(tmp_path / "nowhere")
    assert "no config.json and no weights" in found(empty)
    assert "no weights" in found(config_only)
    assert "is a file" in found(whole / "config.json")
    assert load_config([], [data], {"student": "org/name", "teacher": str(whole)}).config.student.model == "org/name"


def test_the_sampled_loss_needs_the_temperature_that_was_sampled_with():
    (text,) = problems(overrides=["loss.support=sampled", "rollout.temperature=0.7"])
    assert "loss.sampler_correction=truncated" in text
    load(overrides=["loss.support=sampled", "rollout.temperature=0.7", "loss.temperature=0.7"])
    load(overrides=["loss.support=sampled", "rollout.temperature=0.7", "loss.sampler_correction=truncated"])
    load(overrides=["loss.support=topk", "rollout.temperature=0.7"])


def test_truncated_sampling_with_the_sampled_loss_is_a_warning():
    assert "biased" in load(overrides=["loss.support=sampled", "rollout.top_p=0.9"]).warnings[0]
    assert load(overrides=["loss.support=topk", "rollout.top_p=0.9"]).warnings == ()


def test_a_recipe_that_does_not_exist_is_told_the_nearest_shipped_one():
    with pytest.raises(ConfigError, match="There is no recipe") as caught:
        find_recipe("demo-cpuu")
    assert "demo-cpu" in caught.value.fix


@pytest.mark.parametrize("name", shipped_recipes())
def test_shipped_recipes_load_by_name_and_fit_the_json_schema(name):
    loaded = load_config([name], complete=False)
    assert loaded.config.student.model
    assert loaded.config.teacher.model
    values = parse(shipped_recipes()[name].read_text(encoding="utf-8"), name).value
    jsonschema.validate(values, json.loads((ROOT / "recipes" / "schema.json").read_text(encoding="utf-8")))


def test_generated_files_are_fresh():
    result = subprocess.run([sys.executable, ROOT / "tools" / "generate.py", "--check"], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def test_the_wheel_holds_every_package_and_the_recipes():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    found = {".".join(file.parent.relative_to(ROOT).parts) for file in (ROOT / "opd").rglob("__init__.py")}
    assert set(settings["packages"]) == found | {"opd.shipped"}
    assert settings["package-dir"]["opd.shipped"] == "recipes"


def test_every_key_is_documented_and_every_default_fits_its_own_type():
    for key in keys().values():
        assert key.doc.endswith((".", ")", "…")), key.path
    assert Config.model_validate(Config().model_dump()) == Config()
    jsonschema.validate(Config().model_dump(mode="json"), json_schema())


def test_explain_gives_the_doc_the_type_and_the_default():
    text = explain("train.max_grad_norm")
    for part in ("Gradient clipping", "a number > 0, or null", "default: 1.0"):
        assert part in text
    assert "one of tail, renormalize, weighted" in explain("loss.topk.mass")
    assert "train.beta1" in explain("train")
    assert default_text(keys()["data.train[].path"]) == "required"
    with pytest.raises(ConfigError) as caught:
        explain("train.lr")
    assert "train.learning_rate" in caught.value.fix


def test_the_resolved_configuration_reads_back_the_same(recipe):
    loaded = load(
        overrides=[
            *("train.learning_rate=1e-5", "teacher.revision=1e10", "student.prompt.template=Q: {prompt}"),
            *(r'rollout.stop=["\n", "no", "a, b", "1e5"]', "student.lora.rank=4", "train.max_grad_norm=null"),
            *("data.train=[{path: a.jsonl}, {path: 'b, c.jsonl', weight: 2}]", "run.trackers=wandb"),
            *("student.prompt.chat_template_kwargs={enable_thinking: false, mode: 'off', n: '1'}",),
        ]
    )
    text = resolved_yaml(loaded)
    assert load(recipe(text)).config == loaded.config
    assert "learning_rate: 1.0e-05" in text
    assert "# override" in text


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9)
)


@pytest.mark.parametrize(
    ("text", "line", "expected"),
    [
        ("run: &a\n  name: [*a]\n", 1, "holds itself"),
        ("run:\n  name: " + "[" * 3000 + "]" * 3000 + "\n", 2, "nested more than"),
        (BOMB, 1, "more than 100000 values"),
        ("run: !foo {seed: 1}\n", 1, "tag !foo"),
        ("run:\n  seed: !foo 1\n", 2, "tag !foo"),
        ("rollout:\n  stop: !!set {a, b}\n", 2, "tag !!set"),
        ("run:\n  !foo seed: 1\n", 2, "tag !foo"),
        ("run:\n  save_rollouts: !!bool maybe\n", 2, "tag !!bool"),
        ("base: &b {seed: 1}\nrun:\n  <<: *b\n", 3, "Merge keys"),
        ("run:\n  seed: 1\n  name: \x07\n", 3, "0x7"),
        ("run:\n  seed: " + "9" * 5000 + "\n", 2, "5000 digits"),
    ],
    ids=["self", "deep", "bomb", "tag", "scalar-tag", "set", "key-tag", "bool", "merge", "bell", "digits"],
)
def test_yaml_that_no_recipe_needs_is_refused_with_its_line(recipe, text, line, expected):
    path = recipe(text)
    (found,) = problems(path)
    assert f"{path}:{line}" in found
    assert expected in found
    assert "fix:" in found


def test_an_alias_stands_for_what_its_anchor_holds(recipe):
    path = recipe("student: {prompt: &p {system: Be brief.}}\nteacher: {prompt: *p}\n")
    config = load(path).config
    assert config.student.prompt == config.teacher.prompt
    assert config.teacher.prompt.system == "Be brief."


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("train.steps: 1\n", "write it nested: train: {steps: …}"),
        ("loss.topk.k: 8\n", "write it nested: loss: {topk: {k: …}}"),
        ("loss: {topk.k: 8}\n", "write it nested: loss: {topk: {k: …}}"),
    ],
)
def test_a_key_with_dots_in_a_recipe_is_told_how_to_nest_it(recipe, text, fix):
    path = recipe(text)
    (found,) = problems(path)
    assert fix in found
    assert f"{path}:1" in found


@pytest.mark.parametrize("override", ["train.steps=" + "1" + 23 * "0", "rollout.stop_token_ids=[9223372036854775808]"])
def test_whole_numbers_that_nothing_can_hold_are_refused(override):
    (text,) = problems(overrides=[override])
    assert override.partition("=")[0] in text
    assert "2^63" in text


@pytest.mark.parametrize("key", ["loss.temperature", "rollout.temperature"])
def test_temperatures_at_which_logits_overflow_or_vanish_are_refused(key):
    for value in ("1e-40", "1e30", "0"):
        (text,) = problems(overrides=[f"{key}={value}"])
        assert f"{key} must be a number ≥ 0.001 and ≤ 1000" in text
    for value in ("0.001", "1000"):
        load(overrides=[f"rollout.temperature={value}", f"loss.temperature={value}"])


@pytest.mark.parametrize("key", ["run.name", "run.dir", "student.model"])
def test_a_path_holds_no_null_character(recipe, key):
    section, leaf = key.split(".")
    (text,) = problems(recipe(f'{section}:\n  {leaf}: "a\\0b"\n'))
    assert key in text
    assert "null character" in text


def test_the_hint_about_settings_is_for_those_who_can_write_one(recipe):
    (text,) = problems("demo-cpuu")
    assert "did you mean demo-cpu? A setting is written key=value." in text
    with pytest.raises(ConfigError) as caught:
        find_recipe("demo-cpuu")
    assert caught.value.fix == "did you mean demo-cpu?"
    (empty,) = problems("")
    assert "The name of a recipe is empty" in empty
