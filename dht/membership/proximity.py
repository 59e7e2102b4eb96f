"""Network distance of other peers: same machine, same local network, or the internet. Pure.

A peer that is or was connected is as far away as its connection shows. For other members the
addresses that they announce are compared with the own ones. Many homes have the same private
network, so a member that seems to be in ours is taken for one elsewhere if it does not answer, or
if it says that it can only dial out: a neighbour would have been connected.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from multiaddr import Multiaddr

from dht.addresses import Scope, is_loopback, scope_guessed, scope_seen
from dht.bounded_mapping import BoundedMapping, by_age
from dht.host import Connection
from dht.identity import PeerId
from dht.membership.reachability import scope_that_counts
from dht.membership.table import Member

PEERS_MAX = 4096
SEEN_FROM_S = 3600.0
"""Validity of the distance that a connection showed, after the connection was last seen."""


class Proximity:
    """Scope of each known peer."""

    def __init__(self) -> None:
        self.present: dict[PeerId, Multiaddr] = {}
        """Remote address of each direct connection, as of the last look."""

        self._own: tuple[Multiaddr, ...] = ()
        self._seen = BoundedMapping[PeerId, tuple[Scope, float]](
            "distances", PEERS_MAX, worth=by_age
        )
        """Scope of peers that are or were connected, and when that was observed."""

        self._scope_at = BoundedMapping[Multiaddr, Scope]("scopes", PEERS_MAX, worth=by_age)
        """Cache: each look asks about the same few addresses."""

        self._guessed = BoundedMapping[PeerId, tuple[tuple[Multiaddr, ...], Scope | None]](
            "scopes guessed", PEERS_MAX, worth=by_age
        )
        """Cache of guesses, each with the announced addresses that it was made from."""

    def set_own_addresses(self, own: tuple[Multiaddr, ...]) -> None:
        """Set the addresses that distances are measured from."""
        self._own = own
        self._scope_at.clear()
        self._guessed.clear()

    def look(self, connections: Sequence[Connection], *, now: float) -> None:
        """Take in the present connections."""
        self.present = {c.peer: c.address for c in connections if not c.relayed}
        for connection in connections:
            self._seen.renew(connection.peer, (self.scope_seen(connection.address), now))

    def scope_that_counts(
        self, members: Iterable[Member], *, now: float, count_connected: bool
    ) -> Scope | None:
        """The scope in which the members of the run live; ``None``: no peer is known.

        ``count_connected``: peers that are connected count like members.
        """
        scopes = [self._scope_of_member(member, now) for member in members]
        connected = [self._seen[peer][0] for peer in self.present]
        return scope_that_counts([*scopes, *connected] if count_connected else scopes, connected)

    def scope_of_connected(self, peer: PeerId) -> Scope:
        """The scope of a peer that is ``present``."""
        return self._seen[peer][0]

    def scope_seen(self, remote: Multiaddr) -> Scope:
        """The scope of a connection's remote address."""
        scope = self._scope_at.get(remote)
        if scope is None:
            scope = self._scope_at[remote] = scope_seen(remote, self._own)
        return scope

    def _scope_of_member(self, member: Member, now: float) -> Scope | None:
        seen = self._seen.get(member.peer)
        if seen is not None and now - seen[1] < SEEN_FROM_S:
            return seen[0]
        known = self._guessed.get(member.peer)
        if known is None or known[0] != member.addresses:
            known = member.addresses, scope_guessed(member.addresses, self._own)
            self._guessed[member.peer] = known
        has_other = not all(map(is_loopback, member.addresses))
        if has_other and (member.failed_at is not None or member.reachable is False):
            return Scope.INTERNET  # another home, whose private network has the same numbers
        return known[1]
