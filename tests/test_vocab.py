"""Which pairs of tokenizers are one vocabulary, and what is said of those that are not."""

import pytest
from bpe import LINES, bpe
from tokenizers import normalizers

from opd.errors import PreflightError
from opd.vocab import compare


def refusal(student, teacher):
    with pytest.raises(PreflightError) as caught:
        compare(student, teacher, 512, 512)
    return str(caught.value)


def test_padding_of_the_models_is_no_difference():
    tokenizer = bpe()
    for sizes in ((len(tokenizer), 512), (512, len(tokenizer)), (512, 640)):
        verdict = compare(tokenizer, bpe(), *sizes)
        assert verdict.shared_size == len(tokenizer)
        assert verdict.findings == []
        assert verdict.identical
        assert not verdict.template_differs


def test_ids_without_a_logit_are_not_shared():
    assert compare(bpe(), bpe(), 290, 512).shared_size == 290


def test_different_tokens_are_refused_with_the_first_ids_and_both_tokens():
    student, teacher = bpe(), bpe([line.replace("spider", "beetle") for line in LINES])
    assert len(student) == len(teacher)
    message = refusal(student, teacher)
    ours, theirs = ({i: t for t, i in tokenizer.get_vocab().items()} for tokenizer in (student, teacher))
    first = next(i for i in range(len(student)) if ours[i] != theirs[i])
    assert f"id {first} is {ours[first]!r} for the student and {theirs[first]!r} for the teacher" in message
    assert "same tokenizer" in message


def test_a_smaller_vocabulary_of_the_same_text_is_another_one():
    assert "differently" in refusal(bpe(size=280), bpe(size=300))


def test_the_same_tokens_merged_in_another_order_are_refused():
    import json

    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    serialised = json.loads(bpe().backend_tokenizer.to_str())
    serialised["model"]["merges"].reverse()
    reversed_merges = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(serialised)), bos_token="<|endoftext|>", eos_token="<|im_end|>"
    )
    assert "merge 0 is" in refusal(bpe(), reversed_merges)


def test_a_normalizer_that_changes_texts_is_refused():
    message = refusal(bpe(), bpe(normalizer=normalizers.Lowercase()))
    assert "cut texts differently" in message
    assert "normalizer" in message


def test_a_normalizer_that_changes_nothing_is_only_mentioned():
    verdict = compare(bpe(), bpe(normalizer=normalizers.Sequence([])), 512, 512)
    assert verdict.shared_size == len(bpe())
    assert len(verdict.findings) == 1


def test_added_tokens_at_the_end_of_one_are_left_out_and_mentioned():
    longer = bpe(extra=["<think>", "</think>"])
    for pair, role in (((longer, bpe()), "student"), ((bpe(), longer), "teacher")):
        verdict = compare(*pair, 512, 512)
        assert verdict.shared_size == len(bpe())
        assert len(verdict.findings) == 1
        assert not verdict.identical
        assert f"The {role}'s tokenizer has 2 tokens more at the end ('<think>', '</think>')" in verdict.findings[0]


def test_different_end_tokens_are_mentioned_because_completions_can_grow():
    findings = compare(bpe(eos="<|endoftext|>"), bpe(), 512, 512).findings
    assert len(findings) == 1
    assert "'<|endoftext|>' (id 0)" in findings[0]
    assert "'<|im_end|>' (id 2)" in findings[0]
    assert "rollout.stop_token_ids" in findings[0]


def test_an_end_token_that_is_not_shared_is_mentioned():
    student = bpe(extra=["<end>"], eos="<|im_end|>")
    student.eos_token = "<end>"
    assert any("no completion can end with it" in finding for finding in compare(student, bpe(), 512, 512).findings)


def test_different_chat_templates_are_mentioned():
    for template in ("{{ messages[0].content }}", None):
        verdict = compare(bpe(template=template), bpe(), 512, 512)
        assert verdict.template_differs
        assert len(verdict.findings) == 1
        assert "teacher.prompt" in verdict.findings[0]
