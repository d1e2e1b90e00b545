"""Models and prompts that tests share: tiny random ones made here, real ones from tools/fetch_models.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Tiny models gain nothing from a second thread and lose much where the threads wait for each other on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).resolve().parent.parent
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|unk|>")
CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 \n.,?!:'-+*/=()"
MERGES = [(" ", "t"), ("h", "e"), ("i", "n"), ("o", "r"), ("a", "n"), ("e", "r"), (" t", "he"), ("u", "s"), ("a", "t")]
SHARED_TOKENS = 64
PADDED_TOKENS = 80
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_tokenizer():
    """Returns a lower-casing byte-pair tokenizer of exactly 64 tokens, with ChatML and <|im_end|> as its end."""
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    tokens = [*SPECIAL, *CHARACTERS, *("".join(pair) for pair in MERGES)]
    assert len(tokens) == SHARED_TOKENS, len(tokens)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocabulary, MERGES, unk_token="<|unk|>"))
    backend.normalizer = normalizers.Lowercase()
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        unk_token="<|unk|>",
        additional_special_tokens=["<|im_start|>"],
        model_max_length=256,
    )
    tokenizer.chat_template = CHATML
    return tokenizer


def save_tiny_llama(
    folder: Path, *, seed: int, vocab_size: int, tied: bool, layers: int = 2, head_dim: int = 8
) -> Path:
    """Writes a random Llama whose next-token distributions are far from uniform, with its tokenizer; returns the folder."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = tiny_tokenizer()
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=256,
        initializer_range=0.3,
        tie_word_embeddings=tied,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def two_models(tmp_path_factory) -> tuple[Path, Path]:
    """(student, teacher): the same 64 tokens; the student's head is tied, the teacher's is not and padded to 80 rows."""
    folder = tmp_path_factory.mktemp("models")
    student = save_tiny_llama(folder / "student", seed=1, vocab_size=SHARED_TOKENS, tied=True)
    teacher = save_tiny_llama(folder / "teacher", seed=2, vocab_size=PADDED_TOKENS, tied=False)
    return student, teacher


@pytest.fixture(scope="session")
def prompts_file(tmp_path_factory) -> Path:
    """A JSONL of 40 short prompts in the column `question`."""
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    questions = [f"what is {i} {'+-*/'[i % 4]} {7 * i % 11}?" for i in range(40)]
    file.write_text("".join(json.dumps({"question": question}) + "\n" for question in questions), encoding="utf-8")
    return file


def fetched(name: str) -> Path:
    """Returns the cached folder of a real model or data set, fetching it the first time."""
    command = [sys.executable, str(ROOT / "tools" / "fetch_models.py"), name]
    return Path(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip())


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The real SmolLM2-135M-Instruct: tied embeddings, 49,152 tokens."""
    return fetched("smollm2-135m")


@pytest.fixture(scope="session")
def humaneval() -> Path:
    """The folder that holds HumanEval's 164 problems in prompts.jsonl."""
    return fetched("humaneval")
