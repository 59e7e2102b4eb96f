"""Who may use the direct lane: keys told to peers over the daemon, a pair for each connection.

A ticket stands for the peer to which libp2p said it belongs. It is named by a number, which is no
secret: whoever cannot seal with its keys gets nothing by it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from dht.identity import PeerId
from dht.libp2p.seal import Seal, Seals

NUMBER_BYTES = 16


@dataclass(frozen=True, slots=True)
class Ticket:
    """For one connection with ``peer``."""

    peer: PeerId
    dialler_key: bytes = field(repr=False)
    listener_key: bytes = field(repr=False)

    def seals(self, *, dialled: bool) -> Seals:
        """Of the end that dialled, or of the other."""
        diallers, listeners = Seal(self.dialler_key), Seal(self.listener_key)
        return Seals(diallers, listeners) if dialled else Seals(listeners, diallers)


@dataclass(frozen=True, slots=True)
class _Issued:
    ticket: Ticket
    ends_at: float


class Tickets:
    """Those that are good. Bounded: the oldest give way. Times are those of the caller's clock."""

    __slots__ = ("_issued", "life_s", "per_peer_max", "tickets_max")

    def __init__(self, *, life_s: float, per_peer_max: int, tickets_max: int) -> None:
        if life_s <= 0 or not 0 < per_peer_max <= tickets_max:
            raise ValueError(
                f"life_s is {life_s}, per_peer_max is {per_peer_max} and tickets_max is "
                f"{tickets_max}; 0 < life, 0 < per peer <= all"
            )
        self.life_s = life_s
        self.per_peer_max = per_peer_max
        self.tickets_max = tickets_max
        self._issued: OrderedDict[bytes, _Issued] = OrderedDict()

    def __repr__(self) -> str:
        return f"Tickets({len(self._issued)} of {self.tickets_max})"

    def issue(self, number: bytes, ticket: Ticket, *, now: float) -> None:
        """From now on ``number`` names it."""
        if len(number) != NUMBER_BYTES:
            raise ValueError(f"a number of {len(number)} bytes; it has {NUMBER_BYTES}")
        while self._issued and next(iter(self._issued.values())).ends_at <= now:
            self._issued.popitem(last=False)
        own = [n for n, issued in self._issued.items() if issued.ticket.peer == ticket.peer]
        if len(own) >= self.per_peer_max:
            del self._issued[own[0]]
        elif len(self._issued) >= self.tickets_max:
            self._issued.popitem(last=False)
        self._issued[number] = _Issued(ticket, now + self.life_s)

    def redeem(self, number: bytes, *, now: float) -> Ticket | None:
        """The ticket of this number, which is used up by that; ``None`` if there is none."""
        issued = self._issued.pop(number, None)
        return issued.ticket if issued is not None and now < issued.ends_at else None
