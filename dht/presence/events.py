"""Events of a presence: reported to its owner and written to the log."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

_logger = logging.getLogger("dht.presence")

Fact = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class PresenceEvent:
    """Something that a human may want to know. ``text`` is one line."""

    name: str
    """``connected``, ``nobody_answered``, ``peer_joined``, ``peer_left``, ``peer_lost``,
    ``reachability``, ``hello_refused``, ``other_run``, ``clock_off``, ``identity_in_use``,
    ``cache_unreadable``, ``cache_unwritable``, ``directive``, ``invite_ends`` or
    ``not_admitted``."""

    text: str
    fields: Mapping[str, Fact] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Events:
    """Reports the events of one presence to its owner and to the log."""

    on_event: Callable[[PresenceEvent], None] | None = None
    on_reachable: Callable[[bool], Awaitable[None]] | None = None
    """Told ``True`` when others can dial this peer, ``False`` when not, or no longer known."""

    def tell(self, event: str, text: str, **fields: Fact) -> None:
        """Log an event and pass it to the owner."""
        _logger.info("%s %s", event, " ".join(f"{name}={fields[name]}" for name in fields))
        if self.on_event is not None:
            self.on_event(PresenceEvent(event, text, fields))
