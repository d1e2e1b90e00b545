"""What `opd export` writes is the student as it was trained, and loads as any other Hugging Face model."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import PADDED_TOKENS, SHARED_TOKENS, save_tiny_llama
from transformers import AutoModelForCausalLM, AutoTokenizer

from opd import lora
from opd.checkpoint import save_checkpoint
from opd.config import LoraSettings
from opd.errors import CheckpointError, ConfigError, PreflightError, RunDirectoryError
from opd.export import export_run
from opd.identity import identity_of
from opd.recipes import load_config
from opd.runs import RunDirectory

TOKENS = torch.arange(4, 30)[None]


@pytest.fixture(scope="module", params=["tied", "untied"])
def base(request, tmp_path_factory) -> Path:
    """A student: tied, or untied with a padded vocabulary."""
    tied = request.param == "tied"
    folder = tmp_path_factory.mktemp(request.param) / "base"
    return save_tiny_llama(folder, seed=3, vocab_size=SHARED_TOKENS if tied else PADDED_TOKENS, tied=tied)


def run_of(base: Path, folder: Path, *overrides: str) -> RunDirectory:
    flags = {"student": str(base), "teacher": str(base), "data": ["prompts.jsonl"]}
    loaded = load_config([], [f"run.dir={folder}", "run.name=run", *overrides], flags)
    run = RunDirectory.create(loaded)
    run.close()
    return run


@torch.no_grad()
def trained(base: Path, run: RunDirectory, settings: LoraSettings | None = None):
    """Returns a student whose weights have moved, after saving them as the run's checkpoint."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if settings is not None:
        model = lora.wrap(model, settings, seed=0)
    moving = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    generator = torch.Generator().manual_seed(0)
    for parameter in moving.values():
        parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    save_checkpoint(run.checkpoints, 5, {"model": moving, "optimizer": {}}, {}, keep_last=1)
    return model.eval()


def export(run: RunDirectory, folder: Path, **options) -> Path:
    """Returns the folder of an export that had nothing to warn of."""
    return export_run(run.path, folder, warn=pytest.fail, **options).folder


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model(TOKENS).logits


def test_every_weight_the_tokenizer_and_the_template_are_exported(base, tmp_path):
    run = run_of(base, tmp_path)
    student = trained(base, run)
    out = export(run, tmp_path / "out")
    exported, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert torch.equal(logits(exported), logits(student))
    assert not torch.equal(logits(exported), logits(AutoModelForCausalLM.from_pretrained(base)))
    before, after = AutoTokenizer.from_pretrained(base), AutoTokenizer.from_pretrained(out)
    assert (before.get_vocab(), before.chat_template) == (after.get_vocab(), after.chat_template)
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == before.eos_token_id


def test_a_tied_head_is_stored_once_and_stays_tied(base, tmp_path):
    from safetensors import safe_open

    run = run_of(base, tmp_path)
    tied = trained(base, run).config.tie_word_embeddings
    out = export(run, tmp_path / "out")
    with safe_open(out / "model.safetensors", "pt") as file:
        assert ("lm_head.weight" in file.keys()) != tied  # noqa: SIM118 (not a dict)
    exported = AutoModelForCausalLM.from_pretrained(out)
    assert (exported.lm_head.weight is exported.model.embed_tokens.weight) == tied


def test_adapters_are_merged_exactly_once(base, tmp_path):
    run = run_of(base, tmp_path, "student.lora.rank=4", "student.lora.alpha=8")
    student = trained(base, run, LoraSettings(rank=4, alpha=8.0))
    exported = AutoModelForCausalLM.from_pretrained(export(run, tmp_path / "out"))
    torch.testing.assert_close(logits(exported), logits(student), atol=1e-5, rtol=1e-4)
    layer = student.get_base_model().model.layers[1].self_attn.q_proj
    expected = layer.base_layer.weight + 8 / 4 * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    torch.testing.assert_close(exported.model.layers[1].self_attn.q_proj.weight, expected)


def test_adapters_alone_load_onto_their_base_with_peft(base, tmp_path, monkeypatch):
    from peft import AutoPeftModelForCausalLM

    run = run_of(base, tmp_path, "student.lora.rank=4", "student.lora.alpha=8")
    student = trained(base, run, LoraSettings(rank=4, alpha=8.0))
    out = export(run, tmp_path / "out", adapter=True)
    assert not (out / "model.safetensors").exists()
    monkeypatch.chdir(tmp_path)
    torch.testing.assert_close(logits(AutoPeftModelForCausalLM.from_pretrained(out)), logits(student))


def test_the_type_is_that_of_the_student_or_the_one_asked_for(base, tmp_path):
    half = tmp_path / "half"
    AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).save_pretrained(half)
    AutoTokenizer.from_pretrained(base).save_pretrained(half)
    run = run_of(half, tmp_path)
    student = trained(half, run)
    exported = AutoModelForCausalLM.from_pretrained(export(run, tmp_path / "as-released"), dtype="auto")
    assert exported.dtype == torch.bfloat16
    assert torch.equal(exported.model.norm.weight, student.model.norm.weight.bfloat16())
    exported = AutoModelForCausalLM.from_pretrained(export(run, tmp_path / "exact", dtype="float32"), dtype="auto")
    assert exported.dtype == torch.float32
    assert torch.equal(exported.model.norm.weight, student.model.norm.weight)


@torch.no_grad()
@pytest.mark.parametrize("tied", [True, False])
def test_vllm_loads_the_folder_and_continues_as_transformers_does(tied, tmp_path):
    pytest.importorskip("vllm")
    from opd.samplers import vllm

    # The CPU engine has attention for heads of 32 and more.
    base = save_tiny_llama(tmp_path / "base", seed=3, vocab_size=SHARED_TOKENS, tied=tied, head_dim=32)
    run = run_of(base, tmp_path)
    student = trained(base, run)
    out = export(run, tmp_path / "out", dtype="float32")
    vllm.prepare_environment()
    options = {"dtype": "float32", "enforce_eager": True, "max_model_len": 64, "kv_cache_memory_bytes": 2**26}
    llm = vllm.start_engine(str(out), options)
    try:
        from vllm import SamplingParams as EngineParams

        greedy = EngineParams(temperature=0, max_tokens=8, ignore_eos=True)
        (result,) = llm.generate([{"prompt_token_ids": TOKENS[0].tolist()}], greedy, use_tqdm=False)
    finally:
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        llm.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()
    expected = TOKENS
    for _ in range(8):
        expected = torch.cat([expected, student(expected).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    assert list(result.outputs[0].token_ids) == expected[0, TOKENS.shape[1] :].tolist()


def test_a_student_released_with_a_temperature_but_without_do_sample_can_be_exported(base, tmp_path):
    copy = tmp_path / "copy"
    AutoModelForCausalLM.from_pretrained(base).save_pretrained(copy)
    AutoTokenizer.from_pretrained(base).save_pretrained(copy)
    settings = json.loads((copy / "generation_config.json").read_text()) | {"temperature": 0.6}
    (copy / "generation_config.json").write_text(json.dumps(settings))
    run = run_of(copy, tmp_path)
    trained(copy, run)
    written = json.loads((export(run, tmp_path / "out") / "generation_config.json").read_text())
    assert (written["temperature"], written["do_sample"]) == (0.6, True)


def test_an_export_never_overwrites(base, tmp_path):
    run = run_of(base, tmp_path)
    trained(base, run)
    out = tmp_path / "out"
    out.mkdir()
    export(run, out)
    with pytest.raises(RunDirectoryError, match="not an empty folder"):
        export(run, out)
    assert not list(tmp_path.glob(".*partial*"))


def test_the_command_says_what_it_wrote_and_nothing_else(base, tmp_path):
    run = run_of(base, tmp_path)
    trained(base, run)

    def opd(*arguments):
        command = [sys.executable, "-m", "opd", "export", run.path, *arguments]
        return subprocess.run([*map(str, command)], capture_output=True, text=True, check=True)

    plain = opd(tmp_path / "plain", "--dtype", "bfloat16")
    assert (plain.stdout, plain.stderr) == (f"wrote {tmp_path / 'plain'}: step 5, bfloat16\n", "")
    written = opd(tmp_path / "json", "--json")
    assert json.loads(written.stdout) == {
        "folder": str(tmp_path / "json"),
        "step": 5,
        "dtype": "float32",
        "checkpoint": str(run.checkpoints / "step-000005"),
    }
    assert written.stderr == ""


def test_the_files_have_the_mode_that_the_umask_gives(base, tmp_path):
    before = os.umask(0o027)
    try:
        run = run_of(base, tmp_path)
        trained(base, run)
        out = export(run, tmp_path / "out")
    finally:
        os.umask(before)
    for folder in (out, run.checkpoints / "step-000005"):
        modes = {file.name: oct(file.stat().st_mode & 0o777) for file in folder.iterdir()}
        assert "model.safetensors" in modes
        assert set(modes.values()) == {"0o640"}, modes


def test_what_is_in_the_way_of_an_export_is_named(base, tmp_path):
    run = run_of(base, tmp_path)
    trained(base, run)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for folder, named in (
        ("file", "file is a file"),
        ("file/below/out", "file is a file"),
        ("dangling", f"dangling is a link to {tmp_path / 'nowhere'}, which is not there"),
        ("dangling/out", "dangling is a link to"),
    ):
        with pytest.raises(RunDirectoryError) as caught:
            export(run, tmp_path / folder)
        assert named in caught.value.why
        assert "in the way" in caught.value.fix
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    export(run, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "empty" / "model.safetensors").exists()


def test_adapters_are_not_exported_onto_another_base_than_theirs(base, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(base, copy)
    run = run_of(copy, tmp_path, "student.lora.rank=4")
    models = {"student": identity_of(str(copy), None)}
    save_checkpoint(
        run.checkpoints, 1, {"model": {"a": torch.zeros(2)}, "optimizer": {}}, {"models": models}, keep_last=1
    )
    (copy / "model.safetensors").write_bytes((copy / "model.safetensors").read_bytes()[:-4] + b"else")
    with pytest.raises(PreflightError, match="The student is not the one"):
        export(run, tmp_path / "out")


def test_a_torn_checkpoint_is_named_and_the_one_before_it_exported(base, tmp_path):
    run = run_of(base, tmp_path)
    student = trained(base, run)
    torn = save_checkpoint(run.checkpoints, 6, {"model": {"a": torch.zeros(2)}, "optimizer": {}}, {}, keep_last=2)
    (torn / "model.safetensors").unlink()
    warnings: list[str] = []
    export_run(run.path, tmp_path / "out", warn=warnings.append)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), logits(student))
    assert [f"{torn} is torn" in text and "step 5 is used" in text for text in warnings] == [True]
    (run.checkpoints / "step-000005" / "state.json").unlink()
    with pytest.raises(CheckpointError, match="none of them is whole"):
        export(run, tmp_path / "again")


def test_a_run_that_cannot_be_exported_says_why(base, tmp_path):
    run = run_of(base, tmp_path)
    with pytest.raises(ConfigError, match="no adapter"):
        export(run, tmp_path / "out", adapter=True)
    with pytest.raises(CheckpointError, match="has no checkpoint"):
        export(run, tmp_path / "out")
    parts = {"model": {"model.embed_tokens.weight": torch.zeros(3, 2)}, "optimizer": {}}
    save_checkpoint(run.checkpoints, 1, parts, {}, keep_last=1)
    with pytest.raises(CheckpointError, match="another model"):
        export(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()
