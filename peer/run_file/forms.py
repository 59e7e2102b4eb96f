"""Examples of what a model should answer, as text of which only the answers are predicted. Pure.

An example is a chat, or a prompt with its completion. A template says with which words around them
they become text; it is filled in and never executed. Each answer ends with the token that ends a
document, so that the model learns to stop.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

Kind: TypeAlias = Literal["chat", "completion"]

CONTENT = "{content}"
"""The place in a template that is filled in."""

TEMPLATES: Mapping[Kind, Mapping[str, str]] = {
    "chat": {
        "system": "{content}\n\n",
        "user": "User: {content}\n",
        "assistant": "Assistant: {content}",
    },
    "completion": {"prompt": "{content}", "answer": "{content}"},
}
"""Texts that a run file without a template stands for. They are part of the schema."""

COLUMNS: Mapping[Kind, tuple[str, ...]] = {
    "chat": ("messages",),
    "completion": ("prompt", "completion"),
}
"""Columns of a run file that names none."""

ANSWERS = frozenset(("assistant", "answer"))
"""Roles whose text is predicted."""

SHOWN_MAX = 80


@dataclass(frozen=True, slots=True)
class Turn:
    """Text up to the end of an answer."""

    context: str
    answer: str

    @property
    def text(self) -> str:
        return self.context + self.answer


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleForm:
    """The form of a run's examples. Plain values, for a worker process."""

    kind: Kind
    columns: tuple[str, ...]
    template: dict[str, str]

    def fault(self, values: Sequence[Any]) -> str | None:
        """The reason why the values of the columns are no example; ``None`` if they are one."""
        if self.kind == "completion":
            for column, value in zip(self.columns, values, strict=True):
                if not isinstance(value, str):
                    return f"has no text in the column {column!r}, but {_shown(value)}"
            return None
        (messages,) = values
        if not isinstance(messages, list):
            return f"has no messages in the column {self.columns[0]!r}, but {_shown(messages)}"
        for message in messages:
            is_message = isinstance(message, Mapping) and all(
                isinstance(message.get(name), str) for name in ("role", "content")
            )
            if not is_message:
                return f"has a message without role and content: {_shown(message)}"
            if message["role"] not in self.template:
                return (
                    f"has the role {message['role'][:SHOWN_MAX]!r}; data.template has "
                    f"{', '.join(self.template)}"
                )
        if not any(message["role"] in ANSWERS for message in messages):
            return "has no message of the assistant, so nothing to learn"
        return None

    def turns(self, values: Sequence[Any]) -> Iterator[Turn]:
        """The text of an example that has no ``fault``; text after its last answer is left out.

        Words of a template after the content of an answer belong to the answer.
        """
        said = (
            list(zip(("prompt", "answer"), values, strict=True))
            if self.kind == "completion"
            else [(message["role"], message["content"]) for message in values[0]]
        )
        yield from self._folded(said)[0]

    def opening(self, messages: Sequence[Mapping[str, str]]) -> tuple[list[Turn], str]:
        """A chat that is under way, up to where the next answer begins."""
        role = "assistant" if self.kind == "chat" else "answer"
        said = [(message["role"], message["content"]) for message in messages]
        if self.kind == "completion":
            said = [("prompt", said[-1][1])]
        turns, context = self._folded(said)
        return turns, context + self._around(role)[0]

    def chat_template(self) -> str:
        """The template as transformers writes it down, in Jinja, for other programs."""
        cases: list[str] = []
        for role, text in self.template.items():
            before, after = self._around(role)
            end = " + (eos_token or '')" if role in ANSWERS else ""
            cases.append(
                f"{{% {'el' if cases else ''}if message['role'] == {role!r} %}}"
                f"{{{{ {before!r} + message['content'] + {after!r}{end} }}}}"
            )
            assert CONTENT in text
        (answers,) = (self._around(role)[0] for role in self.template if role in ANSWERS)
        return (
            f"{{% for message in messages %}}{''.join(cases)}{{% endif %}}{{% endfor %}}"
            f"{{% if add_generation_prompt %}}{{{{ {answers!r} }}}}{{% endif %}}"
        )

    def _folded(self, said: Sequence[tuple[str, str]]) -> tuple[list[Turn], str]:
        """The turns of roles and contents, and the text after the last answer."""
        turns: list[Turn] = []
        context = ""
        for role, content in said:
            before, after = self._around(role)
            if role in ANSWERS:
                turns.append(Turn(context + before, content + after))
                context = ""
            else:
                context += before + content + after
        return turns, context

    def _around(self, role: str) -> tuple[str, str]:
        before, _, after = self.template[role].partition(CONTENT)
        return before, after


def form_of(
    kind: str, columns: Sequence[str] | None, template: Mapping[str, str] | None
) -> ExampleForm:
    """The form with these settings of a run file, or what they stand for if they are unset."""
    assert kind in ("chat", "completion")
    return ExampleForm(
        kind=kind,  # type: ignore[arg-type]  # mypy does not narrow a str to literals
        columns=tuple(columns or COLUMNS[kind]),  # type: ignore[index]
        template=dict(template or TEMPLATES[kind]),  # type: ignore[index]
    )


def template_problems(kind: str, template: Mapping[str, str]) -> Iterator[str]:
    """The rules that a template breaks."""
    usual = TEMPLATES[kind]  # type: ignore[index]
    needed = ("user", "assistant") if kind == "chat" else tuple(usual)
    for role in needed:
        if role not in template:
            yield f"has no text for {role!r}; {kind} needs {', '.join(needed)}"
    for role, text in template.items():
        if kind == "completion" and role not in usual:
            yield f"has a text for {role!r}; completion has {', '.join(usual)}"
        if text.count(CONTENT) != 1:
            yield f"has {text[:SHOWN_MAX]!r} for {role!r}; it must have {CONTENT} once"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_MAX else text[: SHOWN_MAX - 3] + "..."
