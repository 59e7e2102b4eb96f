"""Writing a run file as TOML, with a comment for every setting."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from peer.run_file.declaring import (
    description_of,
    fields_of,
    rule_of,
    section_in_list,
    sections_of,
)
from peer.run_file.sections import RunFile, default_of

_TITLES = {
    "model": "What is trained",
    "data": "What the model is trained on",
    "inner": "How one peer trains",
}


SHORT = frozenset(
    (
        *("name", "description", "licence", "seeds"),
        *("model.layers", "model.width", "model.heads", "model.context", "data.sequence_length"),
        *("inner.learning_rate", "inner.batch_size", "schedule.warmup_tokens"),
        *("outer.fragments", "outer.steps_per_cycle", "policy.admission", "end.tokens"),
    )
)
"""Settings of a short file, beside those whose value is not the default."""


def to_toml(
    run: RunFile,
    *,
    notes: Sequence[str] = (),
    short: bool = False,
    every_recipe: bool = False,
) -> str:
    """Run file with these settings and comments; ``parse`` reads back an equal ``RunFile``.

    ``notes``: further lines for the comment at the top. ``short``: without most of the settings
    that have their default. ``every_recipe``: with the settings of the recipes that were not
    chosen, as comments.
    """
    others = ": `shoal run new --all` lists them" if short else ", the value here"
    out = [
        "# A run of shoal. Every setting except `seeds` is part of the run's id, and every peer",
        f"# that joins adopts it. A setting that is left out has its default{others}",
        *([] if short else ["# unless the comment names another one."]),
        *(["#"] if notes else []),
        *(f"# {note}" for note in notes),
        *setting_lines(run, short=short, every_recipe=every_recipe),
    ]
    return "\n".join(out) + "\n"


def setting_lines(
    declared: msgspec.Struct, *, short: bool = False, every_recipe: bool = False
) -> list[str]:
    """All settings with a comment for each: plain ones, then sections, then lists of tables."""
    plain, out = msgspec.to_builtins(declared), []
    sections, lists = [], []
    for field in fields_of(type(declared)):
        if sections_of(field.type):
            sections.append(field)
        elif (listed := section_in_list(field.type)) is not None:
            lists.append((field, listed))
        elif not short or _is_shown(field.name, field, plain[field.name]):
            out += _setting_lines(field, plain[field.name])
    for field in sections:
        section = getattr(declared, field.name)
        out += _section_lines(
            field, section, plain[field.name], short=short, every_recipe=every_recipe
        )
    for field, listed in lists:
        out += _list_lines(field.name, field, listed, plain[field.name])
        if not plain[field.name]:
            out += ["#", f"# [[{field.name}]]"]
            out += _unset_lines(listed)
    return out


def _is_shown(name: str, field: msgspec.structs.FieldInfo, value: Any) -> bool:
    """Return whether a short file has a setting."""
    return name in SHORT or field.required or value != msgspec.to_builtins(default_of(field))


def _section_lines(
    field: msgspec.structs.FieldInfo,
    section: msgspec.Struct,
    plain: Mapping[str, Any],
    *,
    short: bool,
    every_recipe: bool,
) -> list[str]:
    """A section, with the settings of the recipe that was chosen where there are several."""
    settings = [
        inner
        for inner in fields_of(type(section))
        if not short or _is_shown(f"{field.name}.{inner.name}", inner, plain[inner.name])
    ]
    out = ["", f"[{field.name}]"]
    recipes = sections_of(field.type)
    tag_field = recipes[0].__struct_config__.tag_field
    if tag_field is None:
        if not settings:
            return []
        out += _comment(_first_line(section))
    else:
        default = "" if isinstance(section, recipes[0]) else f" (default: {_tag(recipes[0])})"
        out += _comment(f"{_TITLES[field.name]}. One of{default}:")
        for recipe in recipes:
            out += _comment(f"  {_tag(recipe)}: {_first_line(recipe)}")
        out.append(f'{tag_field} = "{_tag(type(section))}"')
    for inner in settings:
        if section_in_list(inner.type) is None and not sections_of(inner.type):
            out += _setting_lines(inner, plain[inner.name])
    for recipe in recipes if every_recipe else ():
        if not isinstance(section, recipe):
            out += _recipe_lines(field.name, recipe, settings)
    for inner in settings:  # after the plain settings, which would belong to the last table
        name, value = f"{field.name}.{inner.name}", plain[inner.name]
        for part in sections_of(inner.type):
            out += _part_lines(name, inner, part, value)
        if (listed := section_in_list(inner.type)) is not None:
            out += _list_lines(name, inner, listed, value)
    return out


def _recipe_lines(
    section: str, recipe: type[msgspec.Struct], shown: Sequence[msgspec.structs.FieldInfo]
) -> list[str]:
    """A recipe that was not chosen, with the settings that differ from those shown, in comments."""
    config = recipe.__struct_config__
    out = ["", f'# With {config.tag_field} = "{config.tag}":']
    known = {field.name: field.default for field in shown}
    for field in fields_of(recipe):
        if known.get(field.name, ...) == field.default:
            continue
        listed = section_in_list(field.type)
        part = listed or next(iter(sections_of(field.type)), None)
        out += _comment(f"{description_of(field.type)} ({rule_of(field.type)})")
        if part is not None:
            head = f"{section}.{field.name}"
            out.append(f"#   [[{head}]]" if listed else f"#   [{head}]")
            out += _unset_lines(part, indent="  ")
        else:
            out.append(f"#   {_default_line(field)}")
    return out if len(out) > 2 else []


def _unset_lines(section: type[msgspec.Struct], indent: str = "") -> list[str]:
    """The settings of a section that is left out, in comments."""
    lines = []
    for field in fields_of(section):
        lines += _comment(f"{indent}{description_of(field.type)} ({rule_of(field.type)})")
        lines.append(f"# {indent}{_default_line(field)}")
    return lines


def _default_line(field: msgspec.structs.FieldInfo) -> str:
    if field.required or field.default in (None, msgspec.NODEFAULT):
        return f"{field.name} = ..."
    return f"{field.name} = {_toml(field.default)}"


def differences(before: RunFile, after: RunFile) -> list[str]:
    """The settings that differ, as ``inner.batch_size was 16 and is 32``. Seeds do not count."""

    def flat(run: RunFile) -> dict[str, Any]:
        plain = msgspec.to_builtins(run)
        del plain["seeds"]
        return {
            f"{section}.{name}" if isinstance(values, dict) else section: value
            for section, values in plain.items()
            for name, value in (values.items() if isinstance(values, dict) else [("", values)])
        }

    old, new = flat(before), flat(after)
    return [
        f"{name} was {_shown(old.get(name))} and is {_shown(new.get(name))}"
        for name in dict.fromkeys([*old, *new])
        if old.get(name) != new.get(name)
    ]


def _shown(value: Any) -> str:
    text = "unset" if value is None else _toml(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _list_lines(
    name: str, field: msgspec.structs.FieldInfo, listed: type[msgspec.Struct], tables: list[Any]
) -> list[str]:
    lines = ["", *_comment(f"{description_of(field.type)} ({rule_of(field.type)})")]
    for table in tables:
        lines += ["", f"[[{name}]]"]
        for inner in fields_of(listed):
            lines += _setting_lines(inner, table[inner.name])
    return lines


def _part_lines(
    name: str,
    field: msgspec.structs.FieldInfo,
    part: type[msgspec.Struct],
    values: dict[str, Any] | None,
) -> list[str]:
    """A section inside a section, in comments if it is left out."""
    lines = ["", *_comment(f"{description_of(field.type)} (a table)")]
    if values is None:
        lines.append(f"# [{name}]")
        return lines + _unset_lines(part)
    lines.append(f"[{name}]")
    for inner in fields_of(part):
        lines += _setting_lines(inner, values[inner.name])
    return lines


def _tag(recipe: type[msgspec.Struct]) -> str:
    return str(recipe.__struct_config__.tag)


def _first_line(kind: object) -> str:
    documented = kind if isinstance(kind, type) else type(kind)
    assert documented.__doc__ is not None
    return documented.__doc__.split("\n", 1)[0]


def _setting_lines(field: msgspec.structs.FieldInfo, value: Any) -> list[str]:
    rule = rule_of(field.type)
    default = default_of(field)
    if default is not msgspec.NODEFAULT and value not in (None, msgspec.to_builtins(default)):
        rule += f"; default: {'unset' if default is None else _toml(default)}"
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
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return _quoted(value) if isinstance(value, str) else repr(value)


def _quoted(text: str) -> str:
    # JSON and TOML escape alike, except for DEL, which JSON does not escape.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
