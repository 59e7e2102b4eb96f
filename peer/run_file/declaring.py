"""How the settings of a run file are declared, and checks of single settings by their declarations.

Settings are fields of msgspec structs with annotated limits. A text in the annotation is the
setting's description, which ``peer.run_file.writing`` prints. Messages name the value and the rule
that it breaks. Nothing here knows the meaning of a setting. ``TomlLines`` finds the lines of
settings, which ``tomllib`` does not report.
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, time
from functools import cache
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from peer.errors import Fault


@dataclass(frozen=True, slots=True)
class Findings:
    """The faults of a run file that were found so far."""

    lines: TomlLines | None
    """Lines of the settings in the text that they were read from, if they were."""
    faults: list[Fault] = field(default_factory=list)
    whole: str = "a run file"
    """The text or file that is checked, in words."""

    def add(
        self,
        path: tuple[str, ...],
        problem: str,
        nearest: str | None = None,
        *,
        at: tuple[str, ...] | None = None,
    ) -> None:
        """``problem``: words that follow the name of the setting. ``at``: another place to show."""
        line = self.lines.of(path if at is None else at) if self.lines else None
        name = ".".join(path)
        self.faults.append(Fault(name, f"{name} {problem}", line, nearest))


def check_table(
    table: dict[str, Any], kind: type[Struct], path: tuple[str, ...], found: Findings
) -> None:
    """Check one table against its section; a missing tag is set to that of the default recipe."""
    fields = {declared.encode_name: declared for declared in fields_of(kind)}
    tag_field = kind.__struct_config__.tag_field
    for name, value in table.items():
        here = (*path, name)
        if name == tag_field:
            continue
        if name not in fields:
            known = [*([tag_field] if tag_field else []), *fields]
            label = ".".join(path) or found.whole
            problem = f"is not a setting; {label} has {', '.join(known)}"
            found.add(here, problem, nearest(name, known))
        elif sections := sections_of(fields[name].type):
            if not isinstance(value, dict):
                found.add(here, f"is {_shown(value)}; it must be a table: [{'.'.join(here)}]")
            elif (chosen := _choose_section(value, sections, here, found)) is not None:
                check_table(value, chosen, here, found)
        else:
            _check_setting(value, fields[name].type, here, found)
    for name, declared in fields.items():
        if declared.required and name not in table:
            found.add((*path, name), f"is missing; it must be {rule_of(declared.type)}", at=path)


def _check_setting(value: Any, annotation: Any, here: tuple[str, ...], found: Findings) -> None:
    faults_before = len(found.faults)
    listed = section_in_list(annotation)
    if listed is not None and isinstance(value, list):
        for index, item in enumerate(value):
            if isinstance(item, dict):
                check_table(item, listed, (*here, str(index)), found)
    broken = _broken_rule(value, annotation)
    if broken is not None and len(found.faults) == faults_before:
        rule, nearest = broken
        found.add(here, f"is {_shown(value)}; it must be {rule}", nearest)


def sections_of(annotation: Any) -> tuple[type[Struct], ...]:
    """The section types of a field: one, one for each recipe, or none for a plain value.

    A section that may be left out has one type, like one that is always there.
    """
    while typing.get_origin(annotation) is Annotated:
        annotation = typing.get_args(annotation)[0]
    if isinstance(annotation, type) and issubclass(annotation, Struct):
        return (annotation,)
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        members = tuple(m for m in typing.get_args(annotation) if m is not types.NoneType)
        if all(isinstance(member, type) and issubclass(member, Struct) for member in members):
            return members
    return ()


def section_in_list(annotation: Any) -> type[Struct] | None:
    """The section type of a field that is a list of tables."""
    while typing.get_origin(annotation) is Annotated:
        annotation = typing.get_args(annotation)[0]
    if typing.get_origin(annotation) is list:
        (element,) = typing.get_args(annotation)
        if isinstance(element, type) and issubclass(element, Struct):
            return element
    return None


def _choose_section(
    table: dict[str, Any],
    sections: tuple[type[Struct], ...],
    path: tuple[str, ...],
    found: Findings,
) -> type[Struct] | None:
    tag_field = sections[0].__struct_config__.tag_field
    if tag_field is None:
        return sections[0]
    # The first recipe listed is the default.
    tag = table.setdefault(tag_field, sections[0].__struct_config__.tag)
    for section in sections:
        if section.__struct_config__.tag == tag:
            return section
    known = [str(section.__struct_config__.tag) for section in sections]
    problem = f"is {_shown(tag)}; it must be {_listed(known)}"
    found.add((*path, tag_field), problem, nearest(tag, known))
    return None


def _broken_rule(value: Any, annotation: Any) -> tuple[str, str | None] | None:
    """The rule that ``value`` breaks and the nearest valid spelling; ``None`` if it is valid."""
    try:
        msgspec.convert(value, annotation)
    except msgspec.ValidationError:
        words = _literals(annotation)
        return rule_of(annotation), nearest(value, words)
    if isinstance(value, float) and not math.isfinite(value):
        return "a finite number", None
    return None


def _shown(value: Any) -> str:
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def nearest(value: Any, known: Sequence[str], *, cutoff: float = 0.6) -> str | None:
    """The valid name that was probably meant."""
    if not isinstance(value, str):
        return None
    word = value.lower()
    close = difflib.get_close_matches(word, known, n=len(known) or 1, cutoff=cutoff)

    def fit(name: str) -> tuple[float, int]:
        """If two names fit as well, such as int4 and int8 for int5, the nearer comes first."""
        apart = sum(abs(ord(ours) - ord(theirs)) for ours, theirs in zip(name, word, strict=False))
        return -difflib.SequenceMatcher(None, name, word).ratio(), apart

    return min(close, key=fit, default=None)


def _literals(annotation: Any) -> list[str]:
    if typing.get_origin(annotation) is Literal:
        return [word for word in typing.get_args(annotation) if isinstance(word, str)]
    return [word for part in typing.get_args(annotation) for word in _literals(part)]


def _listed(words: Sequence[str]) -> str:
    quoted = [f"'{word}'" for word in words]
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} or {quoted[-1]}"


def rule_of(annotation: Any) -> str:
    """The limits of a setting as text."""
    meta: list[Meta] = []
    while typing.get_origin(annotation) is Annotated:
        annotation, *more = typing.get_args(annotation)
        meta = [*(part for part in more if isinstance(part, Meta)), *meta]
    for part in meta:
        if part.extra and "rule" in part.extra:
            return str(part.extra["rule"])
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return _listed(arguments)
    if origin in (types.UnionType, typing.Union):
        rules = [rule_of(part) for part in arguments if part is not types.NoneType]
        return " or ".join(rules)
    if origin is list:
        sizes = [
            f" of {part.min_length} to {part.max_length}"
            if part.min_length
            else f" of at most {part.max_length}"
            for part in meta
            if part.max_length is not None
        ]
        return f"a list{''.join(sizes)}, each {rule_of(arguments[0])}"
    if origin is tuple and arguments[-1] is not Ellipsis:
        return f"a list of {' and '.join(map(rule_of, arguments))}"
    if origin is tuple:
        return f"a list, each {rule_of(arguments[0])}"
    if origin is dict or section_in_list(list[annotation]):
        return "a table"
    nouns = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
    if annotation is datetime:
        return "a date and time with its offset, such as 2027-03-31T12:00:00Z"
    return " ".join([nouns[annotation], *_limits(meta)])


def _limits(meta: Sequence[Meta]) -> list[str]:
    words = []
    for part in meta:
        if part.ge is not None:
            words.append(f"from {part.ge:g}" if isinstance(part.ge, float) else f"from {part.ge}")
        if part.gt is not None:
            words.append(f"above {part.gt:g}")
        if part.le is not None:
            words.append(f"to {part.le:g}" if isinstance(part.le, float) else f"to {part.le}")
        if part.lt is not None:
            words.append(f"and below {part.lt:g}")
    return words


def description_of(annotation: Any) -> str:
    for part in typing.get_args(annotation)[1:]:
        if isinstance(part, str):
            return part
    raise AssertionError(f"a setting without a description: {annotation}")


_PART = r"""(?:[\w-]++|"[^"\n]*"|'[^'\n]*')"""
_KEY = rf"{_PART}(?:[ \t]*\.[ \t]*{_PART})*"
_LINE = re.compile(rf"[ \t]*(?:(\[\[?)[ \t]*({_KEY})[ \t]*\]\]?[ \t]*(?:#|$)|({_KEY})[ \t]*=)")
"""A line that begins a table, or a setting."""

_LONG_TEXT = re.compile(r"\"\"\"|'''")


class TomlLines:
    """The line of each table and key of a valid TOML text.

    A table in a list has its index in its path: ``("data", "sources", "0", "weight")``. What is
    inside of a value, such as of a table in braces, has the line of the value.
    """

    def __init__(self, text: str) -> None:
        self._known: dict[tuple[str, ...], int] = {}
        sizes: dict[tuple[str, ...], int] = {}
        table: tuple[str, ...] = ()
        in_text = False
        for number, line in enumerate(text.split("\n"), 1):
            match = None if in_text else _LINE.match(line)
            in_text ^= len(_LONG_TEXT.findall(line)) % 2 == 1
            if match is None:
                continue
            bracket, header, key = match.groups()
            if key is not None:
                self._note((*table, *_parts(key)), number)
                continue
            table = _parts(header)
            if bracket == "[[":
                index = sizes[table] = sizes.get(table, -1) + 1
                table = (*table, str(index))
            self._note(table, number)

    def of(self, path: tuple[str, ...]) -> int | None:
        """The line of a setting, or of the nearest table or value that contains it."""
        while path:
            if path in self._known:
                return self._known[path]
            path = path[:-1]
        return None

    def _note(self, path: tuple[str, ...], line: int) -> None:
        for size in range(1, len(path) + 1):
            self._known.setdefault(path[:size], line)


def _parts(key: str) -> tuple[str, ...]:
    """The parts of a dotted key."""
    inside: Any = tomllib.loads(f"{key} = 0")
    parts = []
    while isinstance(inside, dict):
        ((part, inside),) = inside.items()
        parts.append(part)
    return tuple(parts)


PRINTABLE = r"^[^\x00-\x1f\x7f-\x9f]*\Z"
"""No control characters: these texts are shown on the terminals of other people."""


class Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the run file."""


LATER = Meta(extra={"later": True})
"""Marks a setting that this schema got when runs existed already.

At its default it is not in the canonical form, so that those runs keep their ids.
"""


@cache
def fields_of(kind: type[Struct]) -> tuple[msgspec.structs.FieldInfo, ...]:
    """The settings of a section. Each look at a class evaluates its annotations anew."""
    return msgspec.structs.fields(kind)


def is_later(annotation: Any) -> bool:
    """Return whether a setting was declared with ``LATER``."""
    return LATER in getattr(annotation, "__metadata__", ())


def text(pattern: str, rule: str, length_max: int) -> Meta:
    """``rule``: the pattern in words, for people."""
    return Meta(pattern=pattern, max_length=length_max, extra={"rule": rule})


def printable(length_max: int) -> Meta:
    return text(PRINTABLE, "a printable text", length_max)
