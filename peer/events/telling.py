"""Sentences of events, for stories, for the screen, and for this peer's own offer."""

from __future__ import annotations

from peer.events.names import Names
from peer.events.sentences import Event, worded
from peer.events.table import COMMON, TABLE, Audience


def in_story(event: Event, names: Names) -> str:
    """The sentence of an event, with peers by name; the fields of an unknown event."""
    row = TABLE.get(event["event"])
    text = None if row is None else worded(row.sentence, event)
    return names.within(_unknown(event) if text is None else text)


def on_screen(event: Event) -> str | None:
    """The sentence on the screen of a peer's own part; ``None`` for what only programs get."""
    row = TABLE.get(event["event"])
    if row is None:
        return _unknown(event)
    if not row.audience & Audience.SCREEN:
        return None
    text = worded(row.on_screen or row.sentence, event)
    return _unknown(event) if text is None else text


def own_offer(event: Event) -> str | None:
    """The result of this peer's own offer, with the reason; ``None`` for other events."""
    row = TABLE.get(event["event"])
    return None if row is None or row.offer is None else worded(row.offer, event)


def _unknown(event: Event) -> str:
    """An event of another version of Shoal: its ``text``, or its name and fields."""
    if isinstance(event.get("text"), str):
        return str(event["text"])
    fields = [f"{key} {value}" for key, value in event.items() if key not in {*COMMON, "run"}]
    return ", ".join([event["event"].replace("_", " "), *fields])
