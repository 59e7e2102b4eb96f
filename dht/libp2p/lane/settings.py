"""Port, limits and deadlines of a direct lane (``dht.libp2p.lane.lane``)."""

from __future__ import annotations

from dataclasses import dataclass

CONNECT_S = 3.0
"""Time for a TCP connection, before the peer counts as one behind a router and is met. It suffices
for a SYN that is sent twice."""

RETRY_MAX_S = 1800.0
MEET_AGAIN_FIRST_S = 2.0
MEET_AGAIN_MAX_S = 60.0
"""``retry_first_s`` and ``RETRY_MAX_S`` for a peer that can only be met, with which nothing goes
through the daemon."""

CONNECTIONS_MAX = 256
"""Limit of connections that other peers have dialled."""

TICKET_LIFE_S = 30.0
RELAY_S = 8.0
"""Time to get a connection through a relay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneSettings:
    """Port and limits of a lane."""

    port: int = 0
    """TCP port to listen on, beside the daemon's own; 0: any free port."""

    told_port: int | None = None
    """Port that other peers are told to dial instead: that of a router or proxy in front."""

    wait_s: float = 1.0
    """Time that a stream waits for a new connection before it takes the daemon. It suffices for
    three round trips on a far link. Traffic through the daemon is not paced: on a home line it
    fills the queue, before which the paced connections withdraw to their floor."""

    dial_timeout_s: float = 10.0
    answer_timeout_s: float = 2.0
    """Time after which a kept connection is dropped if the other side does not answer on it."""

    idle_max_s: float = 120.0
    """Time after which the dialling side closes an unused connection. The other side closes it
    after twice as long, in case the dialling side is gone."""

    retry_first_s: float = 30.0
    """A peer that could not be dialled is dialled again after this, then after twice as long each
    time, up to ``RETRY_MAX_S``."""

    per_peer_max: int = 8
    """Limit of connections with one peer, in each direction."""

    strangers_max: int = 32
    """Limit of those whose peer has not yet proved that it has a ticket's keys."""
    greet_timeout_s: float = 5.0
    meeting_s: float = 4.0
    """Time for two peers behind routers to meet, once they know each other's outer addresses. It
    is spent in vain before a relay is tried."""

    meetings_max: int = 16
    """Limit of meetings at once to which other peers have called."""

    polite: bool = True
    """Leave room on the own line for others (``dht.libp2p.lane.pacing``)."""


def parse_lane(text: str) -> LaneSettings | None:
    """Settings from a command line's ``auto``, ``off``, PORT, or PORT:TOLD_PORT.

    ``None`` stands for ``off``. Raises ``ValueError``.
    """
    if text == "off":
        return None
    if text == "auto":
        return LaneSettings()
    ports = text.split(":")
    if len(ports) > 2 or not all(
        port.isascii() and port.isdigit() and 0 < int(port) <= 65535 for port in ports
    ):
        raise ValueError(
            f"lane is {text!r}; it is a TCP port, PORT:OUTER_PORT behind a router, 'auto' or 'off'"
        )
    return LaneSettings(port=int(ports[0]), told_port=int(ports[-1]))
