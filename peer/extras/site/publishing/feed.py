"""The feed of a run's exports, in Atom (RFC 4287). Pure.

Atom and not JSON Feed, because its references may be relative: the folder can be served under any
address, and be moved.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from peer.quantities import count_text, loss_at

ATOM = "http://www.w3.org/2005/Atom"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One export on the shelf."""

    name: str
    """Name of its folder."""
    model: str
    """``peer.storage.outer_state.model_name``: equal names have equal parameters."""
    at: float
    """Unix time at which it was written."""
    tokens: int
    loss: float | None
    """Newest held-out loss that was known."""
    loss_tokens: int = 0
    """Merged tokens when it was measured."""
    size_bytes: int
    weights: str
    """Name of the file of parameters, inside its folder."""
    uploaded_to: str = ""
    """Repository on the hub that has it."""

    @property
    def summary(self) -> str:
        loss = ""
        if self.loss is not None:
            loss = f", held-out loss {loss_at(self.loss, self.loss_tokens)}"
        return f"{count_text(self.tokens)} tokens merged{loss}, model {self.model}"


def atom(run_id: str, run_name: str, entries: Sequence[Entry]) -> bytes:
    """The feed, the newest export first. ``entries``: the oldest first."""
    ET.register_namespace("", ATOM)
    feed = ET.Element(f"{{{ATOM}}}feed")
    _add(feed, "id", f"urn:shoal:{run_id}")
    _add(feed, "title", _legal(run_name))
    _add(feed, "updated", _date(entries[-1].at if entries else 0.0))
    ET.SubElement(_add(feed, "author"), f"{{{ATOM}}}name").text = "Shoal"
    _add(feed, "link", rel="self", href="feed.xml", type="application/atom+xml")
    for each in reversed(entries):
        entry = _add(feed, "entry")
        _add(entry, "id", f"urn:shoal:{run_id}:{each.name}")
        _add(entry, "title", f"{_legal(run_name)}: {count_text(each.tokens)} tokens")
        _add(entry, "updated", _date(each.at))
        _add(entry, "summary", each.summary)
        _add(entry, "link", rel="alternate", href=f"{each.name}/README.md", type="text/markdown")
        _add(
            entry,
            "link",
            rel="enclosure",
            href=f"{each.name}/{each.weights}",
            length=str(each.size_bytes),
            type="application/octet-stream",
        )
    ET.indent(feed)
    written: bytes = ET.tostring(feed, encoding="utf-8", xml_declaration=True)
    return written + b"\n"


def _add(parent: ET.Element, tag: str, text: str | None = None, **attributes: str) -> ET.Element:
    made = ET.SubElement(parent, f"{{{ATOM}}}{tag}", attributes)
    made.text = text
    return made


def _date(at: float) -> str:
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%dT%H:%M:%SZ}"


def _legal(text: str) -> str:
    """Text without characters that XML does not allow."""
    return "".join(c if c.isprintable() else " " for c in text)
