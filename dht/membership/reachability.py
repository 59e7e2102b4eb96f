"""Verdict whether other peers can dial this one, from the results of their dials. Pure.

A dial proves something only for peers at the same distance as the dialling one: a neighbour in the
local network gets through where a stranger finds a closed router. So the verdict is for one scope,
that in which the known peers live (``scope_that_counts``), and about the addresses that can be used
from there.

A peer asks for dial-backs when it starts, when its addresses or the scope change, and periodically.
One fresh connection that arrives proves that it is reachable. The opposite takes two failures,
which are those of two helpers where there are several. A dial that was not made says nothing, and
neither does a connection that came in otherwise: the router lets in whom this peer has called, too.
``dht.presence.dial_back`` asks for dial-backs and reports their results here.

``Proximity`` tells how far away peers are: on the same machine, in the same local network, or on
the internet. A peer that is or was connected is as far away as its connection shows. For other
members the addresses that they announce are compared with the own ones. Many homes have the same
private network, so a member that seems to be in ours is taken for one elsewhere if it does not
answer, or if it says that it can only dial out: a neighbour would have been connected.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from multiaddr import Multiaddr

from dht.addresses import Scope, is_loopback, parse, scope_guessed, scope_of, scope_seen
from dht.bounded_mapping import BoundedMapping, by_age
from dht.host import Connection
from dht.identity import PeerId
from dht.membership.table import Member

_FROM = {
    Scope.MACHINE: " from the same machine",
    Scope.NETWORK: " from the local network",
    Scope.INTERNET: "",
}

NO_ADDRESS = "it has no address that others can use from outside its own network"
NOT_ASKED = "no peer was asked yet"

FIRST_RETRY_S = 5.0
"""Pause between checks while nothing is known."""
RECHECK_REACHABLE_S = 600.0
RECHECK_DIAL_OUT_S = 120.0
HELPERS_PER_CHECK = 3
DENIALS_MIN = 2

_IN_WORDS = {
    ("dial to self",): (
        "the only address known of it is private, and this machine has the same in its own network"
    ),
    ("refused",): "its machine is up, but nothing listens at its address (connection refused)",
    ("no route", "unreachable"): "no route leads to its address from this machine",
    ("no answer", "not answer", "silent for", "timeout", "deadline", "backoff"): (
        "nothing answers at its address; it may be gone, or behind a router or firewall"
    ),
    ("no addresses", "no address"): "no address of it is known",
}
"""Signs in the reason of a failed dial, and their meaning. The first entry that fits holds."""


def in_words(reachable: bool | None, reason: str) -> str:
    """The reason why a peer could not be reached, for people who do not know what a dial is.

    ``reachable``: the verdict in its record. ``reason``: what the transport said.
    """
    if reachable is False:
        return "it is behind a router or firewall that lets no connection in"
    lower = reason.lower()
    for signs, words in _IN_WORDS.items():
        if any(sign in lower for sign in signs):
            return words
    return reason


def scope_that_counts(members: Iterable[Scope | None], connected: Iterable[Scope]) -> Scope | None:
    """Scope from which a peer has to be dialled to be reachable for all members.

    ``members``: the scopes of the other members of the run, ``None`` for an unknown one. While no
    scope of a member is known, the scopes of the connected peers count. ``None``: no peer is known.
    """
    farthest: Scope | None = None
    for scope in members:
        if scope is Scope.INTERNET:
            return scope  # none is farther, and there may be thousands
        if scope is not None and (farthest is None or scope > farthest):
            farthest = scope
    return max(connected, default=None) if farthest is None else farthest


@dataclass(slots=True)
class Reachability:
    """The verdict for the scope that counts, and the time of the next check."""

    scope: Scope | None = Scope.INTERNET
    """The scope that counts; ``None``: no peer is known."""

    due_at: float = 0.0
    usable: frozenset[str] = frozenset()
    """The own addresses that can be used from the scope that counts."""

    settled: bool = False
    """The verdict is about the present addresses."""

    _addresses: frozenset[str] | None = None
    _reachable: bool | None = None
    _reason: str = NOT_ASKED
    _denials: int = 0
    """Failures since the last verdict."""

    @property
    def reachable(self) -> bool | None:
        """Say whether others can dial this peer; ``None``: not known yet."""
        return False if self._addresses == frozenset() else self._reachable

    @property
    def reason(self) -> str:
        if self._addresses == frozenset():
            return "it has no direct address"
        return "no other peer is known yet" if self.scope is None else self._reason

    def announce(self, addresses: frozenset[str], *, now: float) -> bool:
        """Set the present direct addresses. Says whether they changed.

        The verdict about the old addresses is kept until the new ones were tried, because one more
        address does not make a peer unreachable. The verdict does not change with an address that
        cannot be used from the scope that counts.
        """
        if addresses == self._addresses:
            return False
        if self._addresses is None:
            self.due_at = now
        self._addresses = addresses
        self._choose_usable(now)
        return True

    def count_in(self, scope: Scope | None, *, now: float) -> bool:
        """Set the scope that counts. Says whether it changed.

        What comes in from farther away comes in from nearby; nothing else is known of a new scope.
        """
        if scope is self.scope:
            return False
        if not self._reachable or scope is None or self.scope is None or scope > self.scope:
            self._reachable, self._reason = None, NOT_ASKED
            self.settled, self._denials, self.due_at = False, 0, now
        self.scope = scope
        self._choose_usable(now)
        return True

    def _choose_usable(self, now: float) -> None:
        own = () if self.scope is None or self._addresses is None else self._addresses
        usable = frozenset(at for at in own if scope_of(parse(at)) >= (self.scope or Scope.MACHINE))
        if usable == self.usable:
            return
        self.usable, self.settled, self._denials, self.due_at = usable, False, 0, now
        if not usable and self._reachable:
            self._reachable, self._reason = False, NO_ADDRESS

    def confirmed(self, helper: PeerId, *, now: float, scope: Scope = Scope.INTERNET) -> bool:
        """Note a fresh connection from ``scope``. Says whether the verdict changed."""
        before = self.reachable
        if self.scope is not None and scope >= self.scope and self.usable:
            self._reachable, self._reason = True, f"{helper} dialled it{_FROM[scope]}"
            self.settled, self._denials = True, 0
            self.due_at = now + self._pause_s()
        return self.reachable != before

    def denied(self, reason: str, *, now: float) -> bool:
        """Note that a helper could not reach this peer. Says whether that is news."""
        before = self.reachable
        self._denials += 1
        if self._denials >= DENIALS_MIN:
            self._reachable, self._reason, self.settled, self._denials = False, reason, True, 0
        self.due_at = now + self._pause_s()
        return self.reachable != before

    def not_tried(self, reason: str) -> None:
        """Note that a helper did not dial, which says nothing about this peer."""
        if self._reachable is None:
            self._reason = f"no helper could dial: {reason}"

    def asked(self, *, now: float) -> None:
        """Note that a check begins. If it remains inconclusive, the next one follows soon."""
        self.due_at = now + self._pause_s()

    def _pause_s(self) -> float:
        if not self.settled or self._denials:
            return FIRST_RETRY_S
        return RECHECK_REACHABLE_S if self.reachable else RECHECK_DIAL_OUT_S


PEERS_MAX = 4096


class Proximity:
    """Scope of each known peer."""

    def __init__(self) -> None:
        self.own: tuple[Multiaddr, ...] = ()
        """The addresses that distances are measured from."""

        self.present: dict[PeerId, Multiaddr] = {}
        """Remote address of each direct connection, as of the last look."""

        self._seen = BoundedMapping[PeerId, Scope]("distances", PEERS_MAX, worth=by_age)
        """Scope of peers that are or were connected."""

    def look(self, connections: Sequence[Connection]) -> None:
        """Take in the present connections."""
        self.present = {c.peer: c.address for c in connections if not c.relayed}
        for connection in connections:
            self._seen.renew(connection.peer, scope_seen(connection.address, self.own))

    def scope_that_counts(
        self, members: Iterable[Member], *, count_connected: bool
    ) -> Scope | None:
        """The scope in which the members of the run live; ``None``: no peer is known.

        ``count_connected``: peers that are connected count like members.
        """
        # Those that are or were connected first: nobody has to read their addresses.
        in_order = sorted(members, key=lambda member: member.peer not in self._seen)
        connected = [self._seen[peer] for peer in self.present]
        scopes = map(self._scope_of_member, in_order)
        return scope_that_counts(chain(connected, scopes) if count_connected else scopes, connected)

    def farthest(self, members: Iterable[Member], *, but: Scope) -> Scope:
        """The farthest scope of these members and ``but``."""
        scopes = map(self._scope_of_member, members)
        return max([but, *(scope for scope in scopes if scope is not None)])

    def scope_of_connected(self, peer: PeerId) -> Scope:
        """The scope of a peer that is ``present``."""
        return self._seen[peer]

    def _scope_of_member(self, member: Member) -> Scope | None:
        if (seen := self._seen.get(member.peer)) is not None:
            return seen
        has_other = not all(map(is_loopback, member.addresses))
        if has_other and (member.failed_at is not None or member.reachable is False):
            return Scope.INTERNET  # another home, whose private network has the same numbers
        return scope_guessed(member.addresses, self.own)
