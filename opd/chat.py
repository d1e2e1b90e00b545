"""Prompts as token ids: text templates, chat templates, and the ids that end a completion."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from string import Formatter
from typing import Any, Protocol

from opd.config import ChatSettings
from opd.errors import ConfigError, DataError, PreflightError

Ids = tuple[int, ...]
RESERVED_KWARGS = ("tokenize", "return_dict", "return_tensors", "add_generation_prompt", "continue_final_message")
"""What `apply_chat_template` is called with here, so no business of a recipe."""


class PromptRenderer(Protocol):
    """What turns rows of the data into prompt ids."""

    @property
    def warnings(self) -> list[str]:
        """What a user should know about the settings, one sentence each."""

    @property
    def columns(self) -> set[str]:
        """Columns that it reads, besides the prompt."""

    def check(self, row: Mapping[str, Any], column: str) -> None:
        """Raises DataError, without the place of the row, where the row does not fit the settings; tokenises nothing."""

    def render(self, row: Mapping[str, Any], column: str) -> tuple[Ids, Ids]:
        """Returns the student's and the teacher's prompt ids for the prompt in `column` of `row`."""


class Renderer:
    """Renders a row of the data for the student and for the teacher.

    Without `teacher_settings` the teacher sees the student's ids. `warnings` holds what a user should know.
    Raises ConfigError and PreflightError at construction where no row could be rendered as asked.
    """

    def __init__(
        self,
        student_tokenizer: Any,
        student_settings: ChatSettings,
        teacher_tokenizer: Any,
        teacher_settings: ChatSettings | None,
    ) -> None:
        self.student = _View("student", student_tokenizer, student_settings)
        self.teacher = None if teacher_settings is None else _View("teacher", teacher_tokenizer, teacher_settings)

    @property
    def warnings(self) -> list[str]:
        """What a user should know about the settings, one sentence each."""
        return self.student.warnings + (self.teacher.warnings if self.teacher else [])

    @property
    def columns(self) -> set[str]:
        """Columns that the templates name, besides the prompt."""
        views = (self.student, self.teacher) if self.teacher else (self.student,)
        return {name for view in views for _, name in view.parts if name and name != "prompt"}

    def check(self, row: Mapping[str, Any], column: str) -> None:
        """Raises DataError, without the place of the row, where the row does not fit the settings; tokenises nothing."""
        self.student.check(row, column)
        if self.teacher is not None:
            self.teacher.check(row, column)

    def render(self, row: Mapping[str, Any], column: str) -> tuple[Ids, Ids]:
        """Returns the student's and the teacher's prompt ids for the prompt in `column` of `row`.

        A text goes through `template` and, where the model has one, through the chat template as the user's message.
        Chat messages go through the chat template; a last message of the assistant is continued, not answered.
        Raises DataError, without the place of the row, where the row does not fit the settings.
        """
        student_ids = self.student.render(row, column)
        return student_ids, student_ids if self.teacher is None else self.teacher.render(row, column)


class _View:
    """One model's view of the prompts."""

    def __init__(self, role: str, tokenizer: Any, settings: ChatSettings) -> None:
        self.role = role
        self.tokenizer = tokenizer
        self.settings = settings
        self.parts = _template_parts(settings.template, f"{role}.prompt.template")
        self.warnings: list[str] = []
        has_template = tokenizer.chat_template is not None
        if settings.chat == "always" and not has_template:
            raise PreflightError(
                f"The {role}'s tokenizer has no chat template.",
                where=f"{role}.prompt.chat=always, {tokenizer.name_or_path}",
                fix=f"use {role}.prompt.chat=never with a {role}.prompt.template, or a model that was trained for chat",
            )
        self.chat = has_template and settings.chat != "never"
        if self.chat:
            self._probe()
        elif settings.system is not None:
            raise PreflightError(
                f"{role}.prompt.system needs a chat template.",
                where=f"{role}.prompt.system, {tokenizer.name_or_path}",
                why=f"{role}.prompt.chat=never" if has_template else "the tokenizer has none",
                fix=f"put the text into {role}.prompt.template",
            )
        elif settings.chat_template_kwargs:
            self.warnings.append(f"{role}.prompt.chat_template_kwargs has no effect: prompts are rendered without one.")

    def _probe(self) -> None:
        """Renders two messages, so that a template that cannot take the settings or does not read them is known at once."""
        kwargs = self.settings.chat_template_kwargs
        where = f"{self.role}.prompt.chat_template_kwargs"
        if taken := [name for name in RESERVED_KWARGS if name in kwargs]:
            raise ConfigError(f"{taken[0]} cannot be set.", where=where, why="opd sets it itself", fix="remove it")
        try:
            source = self.tokenizer.get_chat_template()
            # Of different lengths: a tokenizer may know none of the words.
            one, other = (self._chat_ids([{"role": "user", "content": text}]) for text in ("1", "one two three"))
        except (DataError, ValueError) as error:
            raise PreflightError(
                f"The {self.role}'s chat template cannot be used as asked.",
                where=f"{self.role}.prompt, {self.tokenizer.name_or_path}",
                why=getattr(error, "why", "") or str(error).splitlines()[0],
                fix="some templates take no system message: leave out system, or put its text into template"
                if self.settings.system is not None
                else f"use {self.role}.prompt.chat=never, or mend the template",
            ) from error
        if one == other:
            raise PreflightError(
                f"The {self.role}'s chat template does not read the messages.",
                where=f"the chat template of {self.tokenizer.name_or_path}",
                why="it renders two different messages alike, so every prompt would be the same",
                fix=f"mend the template, or use {self.role}.prompt.chat=never",
            )
        for name in kwargs:
            if not re.search(rf"\b{re.escape(name)}\b", source):
                self.warnings.append(f"{where}: the {self.role}'s chat template does not use {name}.")

    def render(self, row: Mapping[str, Any], column: str) -> Ids:
        self.check(row, column)
        prompt = row[column]
        if isinstance(prompt, str):
            text = self._fill(row, prompt)
            return self._chat_ids([{"role": "user", "content": text}]) if self.chat else self._text_ids(text)
        note = f"{self.role}.prompt.template has no effect on prompts that are chat messages."
        if self.settings.template != ChatSettings().template and note not in self.warnings:
            self.warnings.append(note)
        return self._chat_ids(prompt)

    def check(self, row: Mapping[str, Any], column: str) -> None:
        """Raises DataError where the row does not fit the settings."""
        prompt = row[column]
        if isinstance(prompt, str):
            for _, name in self.parts:
                if name and name != "prompt" and name not in row:
                    raise DataError(
                        f"{self.role}.prompt.template names the column {name}, which the row does not have.",
                        why=f"its columns are {', '.join(row)}",
                        fix="name one of them or {prompt}; a brace that belongs to the text is doubled: {{ }}",
                    )
            return
        if not self.chat:
            has_template = self.tokenizer.chat_template is not None
            raise DataError(
                f"The prompt is a list of chat messages, but the {self.role} takes text only.",
                why=f"{self.role}.prompt.chat=never" if has_template else "its tokenizer has no chat template",
                fix=f"set {self.role}.prompt.chat=auto"
                if has_template
                else "name a column of texts with prompt=COLUMN",
            )
        if self.settings.system is not None and any(message["role"] == "system" for message in prompt):
            raise DataError(
                "The prompt has a system message of its own.",
                why=f"{self.role}.prompt.system would be a second one",
                fix=f"leave out {self.role}.prompt.system, or the system messages of the data",
            )

    def _fill(self, row: Mapping[str, Any], prompt: str) -> str:
        pieces = []
        for literal, name in self.parts:
            pieces.append(literal)
            if name == "prompt":
                pieces.append(prompt)
            elif name is not None:
                pieces.append(_as_text(row[name]))
        return "".join(pieces)

    def _chat_ids(self, messages: Sequence[Mapping[str, Any]]) -> Ids:
        # Arrow fills fields that a message does not have with None; templates ask whether they are there.
        conversation = [{k: v for k, v in message.items() if v is not None} for message in messages]
        if self.settings.system is not None:
            conversation.insert(0, {"role": "system", "content": self.settings.system})
        continued = conversation[-1]["role"] == "assistant"
        try:
            ids = self.tokenizer.apply_chat_template(
                conversation,
                tokenize=True,
                return_dict=False,
                add_generation_prompt=not continued,
                continue_final_message=continued,
                **self.settings.chat_template_kwargs,
            )
        except Exception as error:
            # Templates raise what they like: jinja2.TemplateError, ValueError, TypeError.
            raise DataError(
                f"The {self.role}'s chat template refuses the prompt.",
                why=(str(error).strip() or type(error).__name__).splitlines()[0],
                fix="check the roles and their order",
            ) from error
        if not ids:
            raise DataError(
                "The prompt has no tokens.",
                why=f"the {self.role}'s chat template writes nothing",
                fix=f"mend the template, or use {self.role}.prompt.chat=never",
            )
        return self._once_begun(ids)

    def _text_ids(self, text: str) -> Ids:
        ids = list(self.tokenizer(text)["input_ids"])
        eos = self.tokenizer.eos_token_id
        if ids and ids[-1] == eos and self.tokenizer(text, add_special_tokens=False)["input_ids"][-1:] != [eos]:
            # Some tokenizers close every text; a completion has to follow here.
            ids.pop()
        if not ids:
            raise DataError(
                "The prompt has no tokens.", fix=f"give it some text, or write one into {self.role}.prompt.template"
            )
        return self._once_begun(ids)

    def _once_begun(self, ids: Sequence[int]) -> Ids:
        """Templates and tokenizers both like to write the first token: one is enough."""
        bos = self.tokenizer.bos_token_id
        return tuple(ids[1:]) if bos is not None and list(ids[:2]) == [bos, bos] else tuple(ids)


def eos_ids(generation_config: Any, tokenizer: Any) -> Ids:
    """Returns the ids that end a completion: the generation configuration's and the tokenizer's, without repeats."""
    configured = getattr(generation_config, "eos_token_id", None)
    ids = list(configured) if isinstance(configured, (list, tuple)) else [configured]
    return tuple(dict.fromkeys(int(token) for token in [*ids, tokenizer.eos_token_id] if token is not None))


def _template_parts(template: str, where: str) -> list[tuple[str, str | None]]:
    """Returns (text, column after it) pairs; columns are plain names, so that no row can reach into an object."""
    try:
        parsed = list(Formatter().parse(template))
    except ValueError as error:
        raise ConfigError(
            f"{where} cannot be read: {error}.",
            where=f"{where}={template!r}",
            fix="a brace that belongs to the text is doubled: {{ }}",
        ) from error
    for _, name, spec, conversion in parsed:
        if name is not None and (not name or re.search(r"[.\[\]]", name) or spec or conversion):
            written = (name or "") + (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "")
            raise ConfigError(
                f"{{{written}}} is not the name of a column.",
                where=f"{where}={template!r}",
                why="a template holds {prompt} and names of columns, nothing else",
                fix="a brace that belongs to the text is doubled: {{ }}",
            )
    if all(name is None for _, name, _, _ in parsed):
        raise ConfigError(
            f"{where} holds neither {{prompt}} nor a column.",
            where=f"{where}={template!r}",
            why="every prompt would be the same",
            fix="put {prompt} where the prompt belongs",
        )
    return [(literal, name) for literal, name, _, _ in parsed]


def _as_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)
