"""Prompts as token ids, for a student and a teacher that may be asked differently."""

from types import SimpleNamespace

import pytest
from bpe import CHATML, bpe

from opd.chat import Renderer, eos_ids
from opd.config import ChatSettings
from opd.errors import ConfigError, DataError, PreflightError

ASKED = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


def rendered(settings, row, *, tokenizer=None, column="prompt"):
    """The text of the ids that a student with `settings` is prompted with."""
    tokenizer = tokenizer or bpe()
    ids, _ = Renderer(tokenizer, settings, tokenizer, None).render(row, column)
    return tokenizer.decode(ids)


def messages(*pairs):
    return {"prompt": [{"role": role, "content": content} for role, content in pairs]}


def test_a_text_is_asked_by_the_user_where_the_model_has_a_chat_template():
    assert rendered(ChatSettings(), {"q": "two words"}, column="q") == ASKED.format("two words")


def test_a_text_stays_a_text_where_there_is_none_or_where_never_says_so():
    assert rendered(ChatSettings(), {"prompt": "two words"}, tokenizer=bpe(template=None)) == "two words"
    assert rendered(ChatSettings(chat="never"), {"prompt": "two words"}) == "two words"


def test_messages_go_through_the_chat_template_as_they_are():
    row = messages(("system", "Be short."), ("user", "two?"), ("assistant", "two"), ("user", "three?"))
    expected = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in row["prompt"])
    assert rendered(ChatSettings(), row) == expected + "<|im_start|>assistant\n"


def test_a_last_message_of_the_assistant_is_continued():
    text = rendered(ChatSettings(), messages(("user", "two?"), ("assistant", "It is")))
    assert text == ASKED.format("two?") + "It is"


def test_arguments_of_the_chat_template_reach_it():
    settings = ChatSettings(chat_template_kwargs={"enable_thinking": False})
    assert rendered(settings, {"prompt": "two?"}) == ASKED.format("two?") + "<think></think>"


def test_arguments_that_the_chat_template_does_not_use_are_a_warning():
    tokenizer = bpe()
    settings = ChatSettings(chat_template_kwargs={"enable_thinking": False, "enable_thought": True})
    renderer = Renderer(tokenizer, settings, tokenizer, None)
    assert len(renderer.warnings) == 1
    assert "enable_thought" in renderer.warnings[0]


def test_arguments_that_opd_sets_itself_are_refused():
    with pytest.raises(ConfigError, match="add_generation_prompt"):
        rendered(ChatSettings(chat_template_kwargs={"add_generation_prompt": False}), {"prompt": "two?"})


def test_a_system_message_comes_first_and_only_once():
    settings = ChatSettings(system="Be short.")
    assert rendered(settings, {"prompt": "two?"}).startswith(
        "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user"
    )
    with pytest.raises(DataError, match="system message of its own"):
        rendered(settings, messages(("system", "Be long."), ("user", "two?")))


def test_what_needs_a_chat_template_is_refused_before_the_run_where_there_is_none():
    plain = bpe(template=None)
    with pytest.raises(PreflightError, match="has no chat template"):
        Renderer(plain, ChatSettings(chat="always"), plain, None)
    with pytest.raises(PreflightError, match="system needs a chat template"):
        Renderer(plain, ChatSettings(system="Be short."), plain, None)
    with pytest.raises(DataError, match="takes text only"):
        Renderer(plain, ChatSettings(), plain, None).render(messages(("user", "two?")), "prompt")


def test_a_chat_template_that_cannot_take_the_system_message_is_known_before_the_run():
    strict = bpe(
        template="{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHATML
    )
    with pytest.raises(PreflightError, match="no system role"):
        Renderer(strict, ChatSettings(system="Be short."), strict, None)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("", "writes nothing"),
        ("{% if add_generation_prompt %}{% endif %}", "writes nothing"),
        ("<|im_start|>assistant\n", "does not read the messages"),
    ],
)
def test_a_chat_template_that_renders_no_prompt_is_known_before_the_run(template, expected):
    empty = bpe(template=template)
    with pytest.raises(PreflightError) as caught:
        Renderer(empty, ChatSettings(), empty, None)
    assert expected in str(caught.value)
    assert "student.prompt.chat=never" in caught.value.fix


def test_a_conversation_that_the_chat_template_refuses_is_an_error_of_the_data():
    strict = bpe(template="{% if messages | length > 1 %}{{ raise_exception('one turn only') }}{% endif %}" + CHATML)
    with pytest.raises(DataError, match="one turn only"):
        rendered(ChatSettings(), messages(("user", "two?"), ("user", "three?")), tokenizer=strict)


def test_the_first_token_is_written_once_by_whoever_writes_it():
    begins = bpe(bos=True)
    chatty = bpe(bos=True, template="{{ bos_token }}" + CHATML)
    for tokenizer, settings in (
        (begins, ChatSettings(chat="never")),
        (begins, ChatSettings(chat="never", template="<|endoftext|>{prompt}")),
        (chatty, ChatSettings()),
    ):
        ids, _ = Renderer(tokenizer, settings, tokenizer, None).render({"prompt": "two?"}, "prompt")
        assert ids.count(tokenizer.bos_token_id) == 1
        assert ids[0] == tokenizer.bos_token_id


def test_ids_are_the_same_as_those_of_the_tokenizer_itself():
    tokenizer = bpe()
    ids, _ = Renderer(tokenizer, ChatSettings(), tokenizer, None).render({"prompt": "A spider?"}, "prompt")
    assert list(ids) == tokenizer(ASKED.format("A spider?"), add_special_tokens=False)["input_ids"]


def test_a_template_holds_the_prompt_and_any_column_and_braces_when_doubled():
    settings = ChatSettings(chat="never", template="{{json}} {topic}: {prompt} = {answer} {tags}")
    row = {"question": "2 {prompt}", "topic": "sums", "answer": 4, "tags": ["a"]}
    assert rendered(settings, row, column="question") == '{json} sums: 2 {prompt} = 4 ["a"]'


@pytest.mark.parametrize(
    "template",
    ["{prompt.__class__}", "{prompt[0]}", "{prompt!r}", "{prompt:>9}", "{} {prompt}", "{prompt", "no column"],
)
def test_a_template_takes_names_of_columns_and_nothing_else(template):
    with pytest.raises(ConfigError) as caught:
        rendered(ChatSettings(template=template), {"prompt": "two?"})
    assert "student.prompt.template" in caught.value.where


def test_a_template_with_a_column_that_is_not_there_names_those_that_are():
    with pytest.raises(DataError) as caught:
        rendered(ChatSettings(template="{answer} {prompt}"), {"prompt": "two?", "hint": "2"})
    assert "prompt, hint" in str(caught.value)


def test_the_teacher_sees_the_students_prompt_unless_it_has_one_of_its_own():
    tokenizer = bpe()
    student_ids, teacher_ids = Renderer(tokenizer, ChatSettings(), tokenizer, None).render({"prompt": "two?"}, "prompt")
    assert student_ids == teacher_ids
    own = ChatSettings(system="The answer is {answer}.", template="{prompt} ({answer})")
    student_ids, teacher_ids = Renderer(tokenizer, ChatSettings(), tokenizer, own).render(
        {"prompt": "two?", "answer": 2}, "prompt"
    )
    assert tokenizer.decode(student_ids) == ASKED.format("two?")
    system = "<|im_start|>system\nThe answer is {answer}.<|im_end|>\n"
    assert tokenizer.decode(teacher_ids) == system + ASKED.format("two? (2)")


def test_fields_that_arrow_filled_with_none_do_not_reach_the_chat_template():
    strict = bpe(
        template="{% if messages[0].tool_calls is defined %}{{ raise_exception('tools') }}{% endif %}" + CHATML
    )
    row = {"prompt": [{"role": "user", "content": "two?", "tool_calls": None}]}
    assert rendered(ChatSettings(), row, tokenizer=strict) == ASKED.format("two?")


def test_end_ids_are_those_of_the_generation_configuration_and_of_the_tokenizer():
    tokenizer = bpe()
    assert eos_ids(None, tokenizer) == (2,)
    assert eos_ids(SimpleNamespace(eos_token_id=None), tokenizer) == (2,)
    assert eos_ids(SimpleNamespace(eos_token_id=0), tokenizer) == (0, 2)
    assert eos_ids(SimpleNamespace(eos_token_id=[2, 0]), tokenizer) == (2, 0)
