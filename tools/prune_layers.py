"""Makes a depth-pruned copy of a model: some of its decoder layers are left out, everything else stays as it is.

    python tools/prune_layers.py MODEL OUT --layers 12,14,16,18

The result is an ordinary Hugging Face folder: the student of `make demo`, which distillation then heals. It is written aside
and renamed, so OUT is there as a whole or not at all.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

PER_LAYER = ("layer_types", "mlp_layer_types", "layers_block_type", "no_rope_layers")
"""The entries of a configuration that hold one value a layer."""


class PruneError(Exception):
    """Something that the user can act on; its text is printed without a traceback."""


def prune(model: Any, removed: Collection[int]) -> Any:
    """Returns the model without these decoder layers, changed in place; raises PruneError.

    What the configuration says layer by layer (attention types, sliding windows) is pruned with them.
    """
    from torch import nn

    config, decoder = model.config.get_text_config(), model.get_decoder()
    count = len(decoder.layers)
    if not removed or not set(removed) < set(range(count)):
        raise PruneError(
            f"--layers {','.join(map(str, sorted(removed)))}: name some, not all, of the layers 0 to {count - 1}"
        )
    kept = [index for index in range(count) if index not in removed]
    for name in PER_LAYER:
        if value := getattr(config, name, None):
            setattr(config, name, [value[index] for index in kept])
    # Where a model has none, this changes nothing: Qwen2 and Qwen3 derive the types from it when they are given no list.
    if getattr(config, "max_window_layers", None) is not None:
        config.max_window_layers = sum(index < config.max_window_layers for index in kept)
    config.num_hidden_layers = len(kept)
    decoder.layers = nn.ModuleList(decoder.layers[index] for index in kept)
    for position, layer in enumerate(decoder.layers):
        # The key-value cache is indexed by it.
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = position
    return model


def write(source: str, out: Path, removed: Collection[int]) -> None:
    """Writes the pruned copy of the model `source` to `out`; raises PruneError."""
    if out.exists():
        raise PruneError(f"{out} exists; name another folder or remove it")
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = prune(AutoModelForCausalLM.from_pretrained(source, dtype="auto"), removed)
    aside = out.with_name(f".{out.name}.partial-{os.getpid()}")
    try:
        model.save_pretrained(aside)
        AutoTokenizer.from_pretrained(source).save_pretrained(aside)
        aside.rename(out)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def main() -> int:
    """Returns 0, or 1 after an error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder or hub name")
    parser.add_argument("out", type=Path, help="the folder to write")
    parser.add_argument("--layers", required=True, help="the layers to leave out, from 0, with commas between them")
    options = parser.parse_args()
    try:
        removed = {int(number) for number in options.layers.split(",")}
    except ValueError:
        parser.error(f"--layers {options.layers}: give numbers such as 12,14,16,18")
    try:
        write(options.model, options.out, removed)
    except (PruneError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
