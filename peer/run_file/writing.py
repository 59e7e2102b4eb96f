"""Writing a run file as TOML, with a comment for every setting."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from typing import Any

import msgspec

from peer.run_file.sections import RunFile
from peer.run_file.setting_rules import description_of, rule_of, section_in_list, sections_of

_TITLES = {
    "model": "What is trained",
    "data": "What the model is trained on",
    "inner": "How one peer trains",
}


def template(name: str = "my-run") -> str:
    """Run file with every setting at its default and a comment: the output of ``shoal run new``."""
    return to_toml(RunFile(name=name))


def to_toml(run: RunFile, *, notes: Sequence[str] = ()) -> str:
    """Run file with these settings and comments; ``parse`` reads back an equal ``RunFile``.

    ``notes``: further lines for the comment at the top.
    """
    plain = msgspec.to_builtins(run)
    out = [
        "# A run of shoal. Every setting except `seeds` is part of the run's id, and every peer",
        "# that joins adopts it. A setting left out has the default shown by `shoal run new`.",
        *(["#"] if notes else []),
        *(f"# {note}" for note in notes),
    ]
    sections = []
    for field in msgspec.structs.fields(RunFile):
        if sections_of(field.type):
            sections.append(field)
        else:
            out += _setting_lines(field, plain[field.name])
    for field in sections:
        section = getattr(run, field.name)
        out += ["", f"[{field.name}]"]
        recipes = sections_of(field.type)
        tag_field = recipes[0].__struct_config__.tag_field
        if tag_field is None:
            out += _comment(_first_line(section))
        else:
            out += _comment(_TITLES[field.name] + ". One of:")
            for recipe in recipes:
                out += _comment(f"  {recipe.__struct_config__.tag}: {_first_line(recipe)}")
            out.append(f'{tag_field} = "{section.__struct_config__.tag}"')
        settings = msgspec.structs.fields(section)
        for inner in settings:
            if section_in_list(inner.type) is None:
                out += _setting_lines(inner, plain[field.name][inner.name])
        for inner in settings:  # after the plain settings, which would belong to the last table
            if (listed := section_in_list(inner.type)) is not None:
                name = f"{field.name}.{inner.name}"
                out += _list_lines(name, inner, listed, plain[field.name][inner.name])
    return "\n".join(out) + "\n"


def _list_lines(
    name: str, field: msgspec.structs.FieldInfo, listed: type[msgspec.Struct], tables: list[Any]
) -> list[str]:
    lines = ["", *_comment(f"{description_of(field.type)} ({rule_of(field.type)})")]
    for table in tables:
        lines += ["", f"[[{name}]]"]
        for inner in msgspec.structs.fields(listed):
            lines += _setting_lines(inner, table[inner.name])
    return lines


def _first_line(kind: object) -> str:
    documented = kind if isinstance(kind, type) else type(kind)
    assert documented.__doc__ is not None
    return documented.__doc__.split("\n", 1)[0]


def _setting_lines(field: msgspec.structs.FieldInfo, value: Any) -> list[str]:
    rule = rule_of(field.type)
    lines = ["", *_comment(f"{description_of(field.type)} ({rule})")]
    if value is None:
        return [*lines, f"# {field.name} = ..."]
    return [*lines, f"{field.name} = {_toml(value, date=field.name == 'date')}"]


def _comment(text: str) -> list[str]:
    return [f"# {line}" for line in textwrap.wrap(text, 96)]


def _toml(value: Any, *, date: bool = False) -> str:
    if date:
        return str(value)  # a TOML date-time, already in UTC
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_quoted(k)} = {_toml(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return _quoted(value) if isinstance(value, str) else repr(value)


def _quoted(text: str) -> str:
    # JSON and TOML escape alike, except for DEL, which JSON does not escape.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
