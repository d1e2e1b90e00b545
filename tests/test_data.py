"""Prompts: what is refused and how, and the stream's orders, mixtures and exact resumption."""

import gzip
import hashlib
import io
import json
import os
import sys
import threading

import pytest
from bpe import CHATML, bpe

from opd.chat import Renderer
from opd.config import ChatSettings, DataSettings, DataSource
from opd.data import PromptStream, heldout_prompts, load_sources, parse_source
from opd.errors import ConfigError, DataError


@pytest.fixture(scope="module")
def renderer():
    tokenizer = bpe()
    return Renderer(tokenizer, ChatSettings(chat="never"), tokenizer, None)


def write(folder, name, rows):
    file = folder / name
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def numbered(folder, name, count, word="number"):
    return write(folder, name, [{"prompt": f"{word} {i}"} for i in range(count)])


def settings_of(*files, **more):
    sources = [file if isinstance(file, DataSource) else DataSource(path=str(file)) for file in files]
    return DataSettings(train=sources, **more)


def stream_of(settings, renderer, seed=0):
    return PromptStream(load_sources(settings), renderer, settings, seed)


def texts(prompts):
    return [prompt.fields["prompt"] for prompt in prompts]


def refusal(source):
    with pytest.raises(DataError) as caught:
        load_sources(DataSettings(train=[source if isinstance(source, DataSource) else DataSource(path=str(source))]))
    return str(caught.value)


# The grammar.


def test_a_source_is_a_path_and_settings_after_commas():
    assert parse_source("a.jsonl") == DataSource(path="a.jsonl")
    assert parse_source("a.csv,prompt=q,weight=2.5") == DataSource(path="a.csv", prompt="q", weight=2.5)
    assert parse_source("-,prompt=q") == DataSource(path="-", prompt="q")
    assert parse_source("hf://org/name@v1.0,name=main,split=train[:100],prompt=q") == DataSource(
        path="hf://org/name", revision="v1.0", name="main", split="train[:100]", prompt="q"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a.jsonl,promt=q", "did you mean prompt?"),
        ("a.jsonl,flavour=q", "prompt, name, split, revision, weight"),
        ("a.jsonl,question", "question is not key=value"),
        ("a.jsonl,", "nothing after a comma"),
        ("a.jsonl,prompt=a,prompt=b", "prompt is given twice"),
        ("hf://a/b@x,revision=y", "revision is given twice"),
        ("a.jsonl,weight=much", "weight=much"),
        ("a.jsonl,weight=0", "weight=0"),
        (",prompt=q", "begins with its path"),
    ],
)
def test_a_source_that_cannot_be_read_says_what_would_be_right(text, expected):
    with pytest.raises(ConfigError) as caught:
        parse_source(text)
    assert expected in str(caught.value)
    assert text in caught.value.where


def test_a_recipe_may_hold_sources_in_either_form():
    assert DataSettings(train="a.jsonl,prompt=q").train == [parse_source("a.jsonl,prompt=q")]
    assert DataSettings(train=["a.jsonl,prompt=q", {"path": "b,c.csv"}]).train == [
        parse_source("a.jsonl,prompt=q"),
        DataSource(path="b,c.csv"),
    ]
    with pytest.raises(ValueError, match="did you mean prompt"):
        DataSettings(train=["a.jsonl,promt=q"])


# Reading.


def test_every_kind_of_file_gives_the_same_rows(tmp_path):
    import datasets

    rows = [{"prompt": 'one, "two"', "answer": "3"}, {"prompt": "völlig\nanders", "answer": "4"}]
    lines = write(tmp_path, "a.jsonl", rows).read_bytes()
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines))
    (tmp_path / "c.json").write_text(json.dumps(rows), encoding="utf-8")
    (tmp_path / "bom.jsonl").write_bytes(b"\xef\xbb\xbf" + lines.replace(b"\n", b"\r\n\r\n"))
    saved = datasets.Dataset.from_list(rows)
    saved.to_csv(str(tmp_path / "d.csv"), index=False)
    saved.to_parquet(str(tmp_path / "e.parquet"))
    saved.save_to_disk(str(tmp_path / "f"))
    datasets.DatasetDict({"train": saved}).save_to_disk(str(tmp_path / "g"))
    for name in ("a.jsonl", "b.jsonl.gz", "c.json", "bom.jsonl", "d.csv", "e.parquet", "f", "g"):
        loaded = load_sources(settings_of(tmp_path / name))
        assert list(loaded.sources[0].rows) == rows, name


def test_a_split_of_a_saved_data_set_can_be_named_and_cut(tmp_path):
    import datasets

    both = {
        name: datasets.Dataset.from_list([{"prompt": f"{name} {i}"} for i in range(5)]) for name in ("train", "test")
    }
    datasets.DatasetDict(both).save_to_disk(str(tmp_path / "saved"))
    source = parse_source(f"{tmp_path / 'saved'},split=test[1:3]")
    assert [row["prompt"] for row in load_sources(settings_of(source)).sources[0].rows] == ["test 1", "test 2"]
    assert "it has train, test" in refusal(parse_source(f"{tmp_path / 'saved'},split=dev"))
    both["train"].save_to_disk(str(tmp_path / "plain"))
    assert "saved without splits" in refusal(parse_source(f"{tmp_path / 'plain'},split=test"))


def test_standard_input_is_read_as_jsonl_and_only_once(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"prompt": "a"}\n{"prompt": "b"}\n')))
    assert [row["prompt"] for row in load_sources(settings_of("-")).sources[0].rows] == ["a", "b"]
    with pytest.raises(ConfigError, match="once"):
        load_sources(settings_of("-", "-"))


def test_a_malformed_line_is_named_with_its_file_and_number(tmp_path):
    file = tmp_path / "bad.jsonl"
    file.write_text('{"prompt": "a"}\n\n{"prompt": "b}\n', encoding="utf-8")
    assert f"{file}:3" in refusal(file)
    file.write_text('{"prompt": "a"}\n["b"]\n', encoding="utf-8")
    assert "The line is a list, not an object" in refusal(file)
    file.write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    assert f"{file}:2" in refusal(file)
    assert "UTF-8" in refusal(file)


def test_json_that_no_tokenizer_can_take_is_named_with_its_line(tmp_path):
    half = write(tmp_path, "half.jsonl", [{"prompt": "whole \U0001f642"}, {"prompt": "cut \ud83d"}])
    assert f"{half}:2" in refusal(half)
    assert "half a character" in refusal(half)
    rows = tmp_path / "half.json"
    rows.write_text('[{"prompt": "a", "hint": "\\uDC00"}]')
    assert "row 1" in refusal(rows)
    number = tmp_path / "number.jsonl"
    number.write_text('{"prompt": "a"}\n{"prompt": "b", "n": ' + "9" * 5000 + "}\n")
    assert f"{number}:2" in refusal(number)
    deep = tmp_path / "deep.json"
    deep.write_text("[" * 200_000)
    assert str(deep) in refusal(deep)
    deep_line = tmp_path / "deep.jsonl"
    deep_line.write_text('{"prompt": "a", "tree": ' + "[" * 200_000 + "]" * 200_000 + "}\n")
    for file, place in ((deep, str(deep)), (deep_line, f"{deep_line}:1")):
        assert "nested too deeply" in refusal(file)
        assert place in refusal(file)
        assert "fix:" in refusal(file)


def test_a_key_that_is_repeated_in_an_object_is_refused_with_its_line(tmp_path):
    file = tmp_path / "twice.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt": "b", "meta": {"n": 1}, "prompt": "c"}\n')
    assert f"{file}:2" in refusal(file)
    assert "The key prompt appears twice" in refusal(file)
    whole = tmp_path / "twice.json"
    whole.write_text('[{"prompt": "a", "meta": {"n": 1, "n": 2}}]')
    assert "The key n appears twice" in refusal(whole)
    assert str(whole) in refusal(whole)


def test_a_compressed_file_under_a_plain_name_is_told_its_name(tmp_path):
    packed = gzip.compress(b'{"prompt": "a"}\n')
    for name, fix in (("a.jsonl", "name it a.jsonl.gz"), ("a.csv", "gunzip"), ("a.json", "gunzip")):
        (tmp_path / name).write_bytes(packed)
        message = refusal(tmp_path / name)
        assert "compressed with gzip" in message
        assert fix in message
    (tmp_path / "plain.jsonl.gz").write_bytes(b'{"prompt": "a"}\n')
    assert "name it .jsonl" in refusal(tmp_path / "plain.jsonl.gz")


def test_what_is_no_file_says_so():
    for path in ("/dev/null", "/dev/zero"):
        message = refusal(parse_source(f"{path},prompt=question"))
        assert "a device, not a file" in message
        assert "does not exist" not in message


def test_a_pipe_of_the_shell_is_read_as_jsonl_and_only_once(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    def write():
        pipe.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    assert [row["prompt"] for row in load_sources(settings_of(pipe)).sources[0].rows] == ["a", "b"]
    writer.join()
    with pytest.raises(ConfigError, match="once"):
        load_sources(settings_of(pipe, pipe))


def test_a_damaged_archive_and_an_impossible_path_are_errors_of_the_data(tmp_path):
    packed = tmp_path / "rows.jsonl.gz"
    packed.write_bytes(gzip.compress(b'{"prompt": "a"}\n' * 100)[:-12])
    assert str(packed) in refusal(packed)
    assert "cannot be read" in refusal("x" * 300 + ".jsonl")


def test_jsonl_under_the_name_json_is_told_so(tmp_path):
    message = refusal(numbered(tmp_path, "a.json", 3))
    assert "name it .jsonl" in message
    assert len(message.splitlines()) == 4


def test_a_csv_row_with_a_field_too_many_is_named(tmp_path):
    file = tmp_path / "a.csv"
    file.write_text("prompt,answer\na,1\nb, c,2\n", encoding="utf-8")
    assert f"{file}:3" in refusal(file)


def test_a_missing_file_gets_the_nearest_name_in_its_folder(tmp_path):
    numbered(tmp_path, "prompts.jsonl", 2)
    assert "did you mean prompts.jsonl?" in refusal(tmp_path / "prompt.jsonl")
    assert "there is no folder" in refusal(tmp_path / "nowhere" / "prompt.jsonl")
    assert "hf://openai/gsm8k" in refusal("openai/gsm8k")


def test_a_folder_of_files_is_told_to_name_one(tmp_path):
    file = numbered(tmp_path, "prompts.jsonl", 2)
    assert str(file) in refusal(tmp_path)


def test_an_unknown_kind_of_file_and_a_setting_that_files_do_not_have(tmp_path):
    (tmp_path / "a.txt").write_text("hello")
    assert ".parquet" in refusal(tmp_path / "a.txt")
    file = numbered(tmp_path, "a.jsonl", 2)
    assert "split belongs to data sets of the Hugging Face hub" in refusal(parse_source(f"{file},split=test"))


def test_a_file_may_be_told_what_it_would_be_told_anyway(tmp_path):
    file = numbered(tmp_path, "a.jsonl", 2)
    told = DataSource(path=str(file), name=None, split="train", revision=None)
    assert len(load_sources(DataSettings(train=[told])).sources[0].rows) == 2


def test_a_hub_that_cannot_be_reached_is_an_error_of_the_data():
    message = refusal(parse_source("hf://nobody-at-all/nothing,name=main"))
    assert "could not be loaded from the hub" in message
    assert "hf://nobody-at-all/nothing,name=main,split=train" in message


def test_an_empty_data_set_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n\n")
    assert "empty" in refusal(tmp_path / "a.jsonl")


def test_a_missing_column_gets_the_columns_and_the_likely_one(tmp_path):
    file = write(tmp_path, "a.jsonl", [{"question": "a", "answer": "b"}])
    message = refusal(file)
    assert "question, answer" in message
    assert "prompt=question" in message
    assert "prompt=answer" in refusal(parse_source(f"{file},prompt=anwser"))


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (None, "The prompt is null"),
        (7, "The prompt is a number"),
        ({"role": "user"}, "The prompt is an object"),
        ("  ", "The prompt is empty"),
        ([], "list of chat messages is empty"),
        ([{"role": "user", "content": " "}], "No chat message holds any text"),
        (["hello"], "Message 1 is a text"),
        ([{"role": "user", "content": "a"}, {"role": "user"}], "Message 2 has no content"),
        ([{"from": "human", "value": "a"}], "it has from, value"),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}]}], "its content is a list"),
    ],
)
def test_a_prompt_that_is_neither_text_nor_messages_is_named_with_its_line(tmp_path, prompt, expected):
    file = write(
        tmp_path, "a.jsonl", [{"prompt": "fine"}, {"prompt": [{"role": "user", "content": "fine"}]}, {"prompt": prompt}]
    )
    message = refusal(file)
    assert expected in message
    assert f"{file}:3" in message


# The stream.


def test_an_epoch_holds_every_prompt_once_and_the_next_one_in_another_order(tmp_path, renderer):
    stream = stream_of(settings_of(numbered(tmp_path, "a.jsonl", 20)), renderer)
    assert stream.epoch == 0
    first, second = stream.take(20), stream.take(20)
    assert stream.epoch == 2
    assert sorted(texts(first)) == sorted(texts(second)) == sorted(f"number {i}" for i in range(20))
    assert texts(first) != texts(second)
    assert [prompt.index for prompt in first + second] == list(range(40))


def test_the_order_is_a_function_of_the_seed(tmp_path, renderer):
    settings = settings_of(numbered(tmp_path, "a.jsonl", 20))
    assert stream_of(settings, renderer, seed=3).take(30) == stream_of(settings, renderer, seed=3).take(30)
    assert texts(stream_of(settings, renderer, seed=3).take(20)) != texts(
        stream_of(settings, renderer, seed=4).take(20)
    )


def test_without_shuffling_the_order_is_that_of_the_file(tmp_path, renderer):
    stream = stream_of(settings_of(numbered(tmp_path, "a.jsonl", 3), shuffle=False), renderer)
    assert texts(stream.take(5)) == ["number 0", "number 1", "number 2", "number 0", "number 1"]


@pytest.mark.parametrize("taken", [0, 1, 7, 13, 29])
def test_a_stream_resumes_at_the_exact_place(tmp_path, renderer, taken):
    sources = (
        parse_source(f"{numbered(tmp_path, 'a.jsonl', 5)},weight=2"),
        DataSource(path=str(numbered(tmp_path, "b.jsonl", 7, word="a much longer text than the others are"))),
        DataSource(path=str(write(tmp_path, "c.jsonl", [{"prompt": "x" * n} for n in range(1, 60, 6)]))),
    )
    settings = settings_of(*sources, max_prompt_tokens=40)
    whole = stream_of(settings, renderer)
    whole.take(taken)
    state = json.loads(json.dumps(whole.state_dict()))
    resumed = stream_of(settings, renderer)
    resumed.load_state_dict(state)
    assert resumed.take(40) == whole.take(40)
    assert (resumed.dropped, resumed.epoch) == (whole.dropped, whole.epoch)


def test_data_that_changed_since_the_checkpoint_is_refused(tmp_path, renderer):
    state = stream_of(settings_of(numbered(tmp_path, "a.jsonl", 5)), renderer).state_dict()
    changed = stream_of(settings_of(numbered(tmp_path, "a.jsonl", 6)), renderer)
    with pytest.raises(DataError, match="changed since the checkpoint"):
        changed.load_state_dict(state)


def test_texts_that_changed_since_the_checkpoint_are_refused_also_where_the_rows_are_as_many(tmp_path):
    tokenizer = bpe()
    hinted = Renderer(tokenizer, ChatSettings(chat="never"), tokenizer, ChatSettings(template="{prompt} {hint}"))
    rows = [{"prompt": f"number {i}", "hint": "a", "unused": "b"} for i in range(5)]

    def stream_after(**change):
        settings = settings_of(write(tmp_path, "a.jsonl", [*rows[:4], {**rows[4], **change}]))
        return stream_of(settings, hinted)

    state = stream_after().state_dict()
    for change in ({"prompt": "number 5"}, {"hint": "b"}):
        with pytest.raises(DataError, match="changed since the checkpoint") as caught:
            stream_after(**change).load_state_dict(state)
        assert "other texts" in caught.value.why
    stream_after(unused="c").load_state_dict(state)
    before_digests = {name: value for name, value in state.items() if name != "digests"}
    stream_after(prompt="number 5").load_state_dict(before_digests)


def test_a_digest_of_the_texts_is_the_same_in_every_process(tmp_path, renderer):
    state = stream_of(settings_of(numbered(tmp_path, "a.jsonl", 2)), renderer).state_dict()
    texts = b'["number 0"]["number 1"]'
    assert state["digests"] == [hashlib.blake2b(texts, digest_size=16).hexdigest()]


def test_sources_are_mixed_by_weight_at_every_moment(tmp_path, renderer):
    settings = settings_of(
        parse_source(f"{numbered(tmp_path, 'a.jsonl', 4, 'left')},weight=3"),
        numbered(tmp_path, "b.jsonl", 100, "right"),
    )
    drawn = texts(stream_of(settings, renderer).take(80))
    for count in range(1, 81):
        assert abs(sum("left" in text for text in drawn[:count]) - 0.75 * count) <= 1


def test_overlong_prompts_are_dropped_and_counted(tmp_path, renderer):
    file = write(tmp_path, "a.jsonl", [{"prompt": "x"}, {"prompt": "x" * 50}, {"prompt": "y"}])
    stream = stream_of(settings_of(file, max_prompt_tokens=10, shuffle=False), renderer)
    assert texts(stream.take(4)) == ["x", "y", "x", "y"]
    assert stream.dropped == 2


def test_overlong_prompts_can_lose_their_beginning_instead(tmp_path, renderer):
    file = write(tmp_path, "a.jsonl", [{"prompt": "abcdefghijk"}])
    whole = stream_of(settings_of(file), renderer).take(1)[0].student_ids
    stream = stream_of(settings_of(file, max_prompt_tokens=4, overlong="truncate_left"), renderer)
    assert stream.take(1)[0].student_ids == whole[-4:]
    assert stream.dropped == 0


def test_the_longer_of_both_renderings_counts(tmp_path):
    tokenizer = bpe()
    plain, long = ChatSettings(chat="never"), ChatSettings(chat="never", template="x" * 30 + "{prompt}")
    file = numbered(tmp_path, "a.jsonl", 3)
    with pytest.raises(DataError, match="longer than 20"):
        stream_of(settings_of(file, max_prompt_tokens=20), Renderer(tokenizer, plain, tokenizer, long)).take(1)


@pytest.mark.parametrize("count", [0, 2])
def test_only_overlong_prompts_end_with_the_limit_and_the_shortest(tmp_path, renderer, count):
    file = write(tmp_path, "a.jsonl", [{"prompt": "x" * n} for n in (30, 20, 25)])
    settings = settings_of(file, max_prompt_tokens=10)

    def first_prompt():
        _, rest = heldout_prompts(load_sources(settings), renderer, settings, count, 0)
        return PromptStream(rest, renderer, settings, 0).take(1)

    with pytest.raises(DataError) as caught:
        first_prompt()
    message = str(caught.value)
    assert "longer than 10 tokens" in message
    assert f"{file}:2) has 20" in message


def test_rows_that_do_not_fit_the_settings_are_known_before_the_first_prompt_is_drawn(tmp_path):
    tokenizer = bpe()
    rows = write(tmp_path, "rows.jsonl", [{"prompt": "a", "hint": "b"}] * 3 + [{"prompt": "c"}])
    hinted = Renderer(tokenizer, ChatSettings(template="{prompt} {hint}"), tokenizer, None)
    own_system = [[{"role": "user", "content": "a"}], [{"role": "system", "content": "b"}]]
    chats = write(tmp_path, "chats.jsonl", [{"prompt": messages} for messages in own_system])
    spoken = Renderer(tokenizer, ChatSettings(), tokenizer, ChatSettings(system="Be brief."))
    for file, renderer, place in ((rows, hinted, f"{rows}:4"), (chats, spoken, f"{chats}:2")):
        with pytest.raises(DataError) as caught:
            stream_of(settings_of(file), renderer)
        assert caught.value.where == place


def test_a_row_that_cannot_be_rendered_is_named(tmp_path):
    tokenizer = bpe(template="{% if messages[0].role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}" + CHATML)
    settings = settings_of(write(tmp_path, "a.jsonl", [{"prompt": [{"role": "tool", "content": "a"}]}]))
    with pytest.raises(DataError) as caught:
        stream_of(settings, Renderer(tokenizer, ChatSettings(), tokenizer, None)).take(1)
    assert "no tools" in caught.value.why
    assert caught.value.where.endswith("a.jsonl:1")


# Held-out prompts.


def test_heldout_prompts_are_never_trained_on_and_the_same_for_a_seed(tmp_path, renderer):
    # Every prompt is there twice: a copy of a held-out prompt must not be trained on either.
    file = write(tmp_path, "a.jsonl", [{"prompt": f"number {i % 20}", "copy": i} for i in range(40)])
    settings = settings_of(file)
    heldout, rest = heldout_prompts(load_sources(settings), renderer, settings, 8, 5)
    assert len(set(texts(heldout))) == 8
    trained = PromptStream(rest, renderer, settings, 5).take(24)
    assert set(texts(trained)) == {f"number {i}" for i in range(20)} - set(texts(heldout))
    assert heldout_prompts(load_sources(settings), renderer, settings, 8, 5)[0] == heldout
    assert heldout_prompts(load_sources(settings), renderer, settings, 8, 6)[0] != heldout


def test_at_most_half_of_each_source_is_set_aside(tmp_path, renderer):
    settings = settings_of(numbered(tmp_path, "a.jsonl", 7, "left"), numbered(tmp_path, "b.jsonl", 1, "right"))
    heldout, rest = heldout_prompts(load_sources(settings), renderer, settings, 64, 0)
    assert len(heldout) == 3
    assert [len(source.rows) for source in rest.sources] == [4, 1]


def test_no_heldout_prompts_leave_the_data_as_it_is(tmp_path, renderer):
    settings = settings_of(numbered(tmp_path, "a.jsonl", 7))
    heldout, rest = heldout_prompts(load_sources(settings), renderer, settings, 0, 0)
    assert heldout == []
    assert len(rest.sources[0].rows) == 7


def test_heldout_sources_of_their_own_leave_the_training_data_whole(tmp_path, renderer):
    own = DataSource(path=str(numbered(tmp_path, "b.jsonl", 3, "held")))
    settings = settings_of(numbered(tmp_path, "a.jsonl", 7), heldout=[own])
    heldout, rest = heldout_prompts(load_sources(settings), renderer, settings, 64, 0)
    assert sorted(texts(heldout)) == ["held 0", "held 1", "held 2"]
    assert len(rest.sources[0].rows) == 7


def test_overlong_prompts_are_not_held_out(tmp_path, renderer):
    file = write(tmp_path, "a.jsonl", [{"prompt": "x" * n} for n in range(5, 45)])
    settings = settings_of(file, max_prompt_tokens=20)
    heldout, _ = heldout_prompts(load_sources(settings), renderer, settings, 10, 0)
    assert len(heldout) == 10
    assert max(len(prompt.student_ids) for prompt in heldout) <= 20


def test_a_saved_data_set_is_set_aside_and_streamed_like_a_file(tmp_path, renderer):
    import datasets

    rows = [{"prompt": f"number {i}", "answer": i} for i in range(12)]
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    by_kind = []
    for path in (tmp_path / "saved", write(tmp_path, "a.jsonl", rows)):
        settings = settings_of(path)
        heldout, rest = heldout_prompts(load_sources(settings), renderer, settings, 4, 0)
        by_kind.append((heldout, PromptStream(rest, renderer, settings, 0).take(20)))
    assert by_kind[0] == by_kind[1]
