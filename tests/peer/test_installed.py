"""Every expected error has a section in the documents, and its message can name it."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from dht.presence.dialler import DialLimited
from peer.errors import NobodyMet, Unusable
from peer.events.table import EXPLAINED
from peer.installed import ANCHOR, chapters, hyphened, pages, section_of

DOCS = Path(__file__).parents[2] / "docs"


INSIDE = {
    "ExpectedError": "the base of all",
    "DhtError": "the base of those of dht/",
    "AveragingError": "the base of those of averaging/",
    "PeerError": "the base of those of peer/",
    "PathError": "the base of those of a file",
    "Failure": "its section is named where it is raised",
    "Unusable": "the same",
    "Declined": "the same",
    "Interrupted": "somebody pressed Ctrl-C",
    "LeftEarly": "the same",
    "DialLimited": "a call is made later; told like `PeerUnreachable`",
    "BadPayload": "a stranger's bytes are refused and counted",
    "LineageBroken": "another source is asked",
    "BulkRefused": "another way is taken",
    "FetchFailed": "an event says so, and it is tried again",
    "Abandoned": "a transfer that nobody waits for",
    "CodecsDiffer": "numpy's codecs are used, and an event says so",
    "PartMissing": "the installation was made by somebody who left the part out",
}
"""Errors without a section, each with what happens instead of a message, or why it has none."""


CLASS = re.compile(r"^class (\w+)\(([^)]*)\):", re.MULTILINE)
"""A class and those it extends. To parse all modules takes seconds."""


@cache
def errors() -> set[str]:
    """The names of all classes of the source that extend an expected error."""
    bases: dict[str, set[str]] = {"ExpectedError": set()}
    for package in ("averaging", "dht", "peer"):
        for path in (DOCS.parent / package).rglob("*.py"):
            for name, above in CLASS.findall(path.read_text()):
                bases.setdefault(name, set()).update(re.findall(r"\w+", above))
    known = {"ExpectedError"}
    while more := {name for name, above in bases.items() if above & known} - known:
        known |= more
    return known


@cache
def sections() -> set[str]:
    """The names of sections that are given where an error is raised."""
    return set(re.findall(r'section="([a-z-]+)"', source()))


@cache
def source() -> str:
    return "\n".join(path.read_text() for path in (DOCS.parent / "peer").rglob("*.py"))


def test_every_error_that_people_meet_has_a_section() -> None:
    assert sections() <= chapters().keys()
    named = {hyphened(name): name for name in errors()}
    missing = {name for short, name in named.items() if short not in chapters()}
    assert missing == INSIDE.keys()


def test_a_section_is_named_for_no_error_that_is_gone() -> None:
    written = "\n".join(path.read_text() for path in pages().values())
    shorts = {hyphened(name) for name in errors()} | sections()
    of_events = {name.replace("_", "-") for name in EXPLAINED}
    warnings = {
        "loop-warning",
        *of_events,
        *re.findall(r'explained\([^)]*?"([a-z-]+)",?\s*\)', source()),
    }
    assert set(ANCHOR.findall(written)) - shorts <= warnings


def test_an_error_of_a_kind_without_a_section_has_that_of_its_base() -> None:
    assert section_of(NobodyMet("here", "nobody")) == "nobody-met"
    assert section_of(DialLimited("anna", "later")) == "peer-unreachable"
    assert section_of(Unusable("no", section="no-adapters")) == "no-adapters"
    assert section_of(OSError()) is None
