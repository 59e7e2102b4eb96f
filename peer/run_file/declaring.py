"""How the settings of a run file are declared: as fields of msgspec structs, with limits and text.

A text in the annotation is the setting's description, which ``peer.run_file.writing`` prints.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
from msgspec import Meta, Struct

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
