"""Fingerprints of a tokenizer and of weights: whether two servers are the same teacher, whether scores are still its own."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Returns a hash of the tokens, of how texts are cut into them, and of the chat template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    parts = [
        json.dumps(sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])),
        "" if backend is None else backend.to_str(),
        json.dumps([tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.chat_template]),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def weights_fingerprint(model: Any) -> str:
    """Returns a hash of every weight's name, type, shape and bytes; about a second a gigabyte.

    All bytes and no sample of them: a fine-tuned copy may differ from its base in one layer alone.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(raw_bytes(tensor))
    return digest.hexdigest()


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """Returns a tensor's bytes; numpy has no bfloat16, so it goes by way of uint8."""
    return tensor.detach().contiguous().cpu().flatten().view(torch.uint8).numpy().tobytes()
