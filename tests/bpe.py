"""Byte-level BPE tokenizers trained on a few lines, for the tests of prompts and vocabularies."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

LINES = ["How many legs has a spider? A spider has eight legs.", "what is number 12 + 34?", "two words, three words"]
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"
)


def bpe(lines=LINES, *, template=CHATML, bos=False, eos="<|im_end|>", normalizer=None, extra=(), size=300):
    """Returns a tokenizer; with `bos` it puts <|endoftext|> before every text. The same arguments give the same tokens."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        lines,
        trainers.BpeTrainer(
            vocab_size=size, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
        ),
    )
    if normalizer is not None:
        backend.normalizer = normalizer
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{SPECIAL[0]} $A", special_tokens=[(SPECIAL[0], 0)]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=SPECIAL[0], eos_token=eos, pad_token=SPECIAL[0]
    )
    tokenizer.add_tokens(list(extra))
    tokenizer.chat_template = template
    return tokenizer
