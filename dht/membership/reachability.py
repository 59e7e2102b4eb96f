"""Can others dial this peer? Decided by what other peers found when they tried.

A dial proves something for those alone who are as far away as the one that dialled: a neighbour
in the local network comes in where a stranger finds a closed router. So there is a verdict for
each scope, about the addresses that can be used from there, and the verdict that counts is that
of the scope in which the known peers live (``scope_that_counts``).

A peer asks for dial-backs when it starts, when its addresses change, and now and then. One fresh
connection that arrived proves that it is reachable; that it is not takes the word of two helpers,
or of the only one there is, twice. A dial that was never made, or that met one of ours halfway,
says nothing. Pure: ``dht.presence.presence`` asks, and tells what came of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from dht.addresses import Scope, parse, scope_of
from dht.identity import PeerId

_FROM = {
    Scope.MACHINE: " from the same machine",
    Scope.NETWORK: " from the local network",
    Scope.INTERNET: "",
}

NO_ADDRESS = "it has no address that others can use from outside its own network"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReachabilitySettings:
    """How often a peer has its reachability tested."""

    first_retry_s: float = 5.0
    """Pause between attempts while nothing is known."""

    recheck_reachable_s: float = 600.0
    recheck_dial_out_s: float = 120.0
    helpers_per_check: int = 3
    denials_min: int = 2

    def __post_init__(self) -> None:
        if self.denials_min < 1:
            raise ValueError(f"denials_min is {self.denials_min}; it is at least 1")
        if self.helpers_per_check < 1:
            raise ValueError(f"helpers_per_check is {self.helpers_per_check}; it is at least 1")


_NO_DIAL = ("dial backoff",)
"""The daemon dialled this peer in vain a moment ago, and does not try again so soon."""

_MET_HALFWAY = ("negotiate", "simultaneous")
"""A TCP connection came about and both sides spoke as the one that dialled. Behind it may as well
be a program of another kind: then nobody knows more than before."""


def was_tried(reason: str) -> bool:
    """Whether a failed dial says anything about the peer that was dialled.

    The reasons of several addresses are one text: one of them that was tried is enough.
    """
    parts = [part.lower() for part in reason.split("; ")]
    return not all(any(sign in part for sign in _NO_DIAL + _MET_HALFWAY) for part in parts)


def scope_that_counts(members: Iterable[Scope | None], connected: Iterable[Scope]) -> Scope | None:
    """Scope from which a peer has to be dialled, to be of use to everybody.

    ``members``: how far away the other members of the run are, ``None`` for one that does not
    tell. While no member is known, the peers connected count. ``None``: there is nobody yet.
    """
    known = [scope for scope in members if scope is not None] or list(connected)
    return max(known, default=None)


@dataclass(slots=True)
class Verdict:
    """What is known for one scope."""

    addresses: frozenset[str] = frozenset()
    """Those that can be used from there."""

    reachable: bool | None = None
    """``None``: not known yet."""

    reason: str = "nobody was asked yet"
    settled: bool = False
    """Whether what is known is about the present addresses."""

    denials: list[PeerId] = field(default_factory=list)


@dataclass(slots=True)
class Reachability:
    """What is known, and when to look again."""

    settings: ReachabilitySettings = field(default_factory=ReachabilitySettings)
    scope: Scope | None = Scope.INTERNET
    """The scope that counts; ``None``: no peer is known."""

    due_at: float = 0.0
    verdicts: dict[Scope, Verdict] = field(
        default_factory=lambda: {scope: Verdict() for scope in Scope}
    )
    _addresses: frozenset[str] | None = None

    @property
    def reachable(self) -> bool | None:
        """``None``: not known yet."""
        if self._addresses == frozenset():
            return False
        return None if self.scope is None else self.verdicts[self.scope].reachable

    @property
    def reason(self) -> str:
        if self._addresses == frozenset():
            return "it has no direct address"
        if self.scope is None:
            return "no other peer is known yet"
        return self.verdicts[self.scope].reason

    @property
    def settled(self) -> bool:
        """Whether what is known is about the present addresses."""
        if self._addresses == frozenset():
            return True
        return self.scope is not None and self.verdicts[self.scope].settled

    @property
    def usable(self) -> frozenset[str]:
        """The addresses that are of use in the scope that counts."""
        return frozenset() if self.scope is None else self.verdicts[self.scope].addresses

    def announce(self, addresses: frozenset[str], *, now: float) -> bool:
        """These are the direct addresses now. Says whether they changed.

        What was known of the old ones is kept until the new ones were tried: an
        address more does not make a good peer bad. Nothing that was known for a scope changes
        with an address that is of no use there.
        """
        if addresses == self._addresses:
            return False
        first = self._addresses is None
        self._addresses = addresses
        for scope, verdict in self.verdicts.items():
            usable = frozenset(a for a in addresses if scope_of(parse(a)) >= scope)
            if usable != verdict.addresses:
                verdict.addresses = usable
                verdict.settled = False
                verdict.denials.clear()
                if not usable and verdict.reachable:
                    verdict.reachable = False
                    verdict.reason = NO_ADDRESS
                if scope is self.scope:
                    self.due_at = now
        if first:
            self.due_at = now
        return True

    def count_in(self, scope: Scope | None, *, now: float) -> bool:
        """Peers live as far away as this. Says whether that changed the scope that counts."""
        if scope is self.scope:
            return False
        self.scope = scope
        if not self.settled:
            self.due_at = now
        return True

    def confirmed(
        self,
        helper: PeerId,
        *,
        now: float,
        scope: Scope = Scope.INTERNET,
        how: str = "dialled it",
    ) -> bool:
        """A fresh connection came in from ``scope``. Says whether that is news.

        It is good for that scope and the narrower ones, where there is an address that others
        can use from there. ``how`` says what the helper did.
        """
        before = self.reachable
        for narrower, verdict in self.verdicts.items():
            if narrower <= scope and verdict.addresses:
                verdict.reachable = verdict.settled = True
                verdict.reason = f"{helper} {how}{_FROM[scope]}"
                verdict.denials.clear()
                if narrower is self.scope:
                    self.due_at = now + self._pause_s()
        return self.reachable != before

    def denied(
        self,
        helper: PeerId,
        reason: str,
        *,
        others: int,
        now: float,
        scope: Scope = Scope.INTERNET,
    ) -> bool:
        """A helper in ``scope`` could not reach it.

        ``others``: helpers that could have been asked as well. Says whether that is news.
        """
        verdict, before = self.verdicts[scope], self.reachable
        verdict.denials.append(helper)
        enough = len(set(verdict.denials)) >= self.settings.denials_min or (
            others == 0 and len(verdict.denials) >= self.settings.denials_min
        )
        if enough:
            verdict.reachable = False
            verdict.settled = True
            verdict.reason = reason
            verdict.denials.clear()
        if scope is self.scope:
            self.due_at = now + (self._pause_s() if enough else self.settings.first_retry_s)
        return self.reachable != before

    def not_tried(self, reason: str, *, scope: Scope) -> None:
        """A helper in ``scope`` did not dial it, which says nothing about this peer."""
        verdict = self.verdicts[scope]
        if verdict.reachable is None:
            verdict.reason = f"nobody could try: {reason}"

    def asked(self, *, now: float) -> None:
        """A check begins. Unless it settles the matter, the next follows soon."""
        self.due_at = now + self._pause_s()

    def _pause_s(self) -> float:
        denials = () if self.scope is None else self.verdicts[self.scope].denials
        if not self.settled or denials:
            return self.settings.first_retry_s
        if self.reachable:
            return self.settings.recheck_reachable_s
        return self.settings.recheck_dial_out_s
