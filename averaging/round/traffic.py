"""The streams of a round: their slices, ends and contents, and the answers that go back on them.

The round machine names a slice, its reducer and whether the own contribution is to be sent
(``effects.Upload``). ``Traffic`` turns that into streams: members of one site
send to their delegate instead (``averaging.rules.sites``), a delegate sends the bundle of its site,
a reducer answers its uploads. ``BundleRoster`` decides who is in a bundle.

Live and simulated peers ask the same object. It holds no bytes and opens no stream: the caller
does, and says what became of it.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, replace

from averaging.messages import Commit, Opening
from averaging.round.interface.effects import Enter, Merge
from averaging.rules.sites import carries, riders_of, shares
from averaging.rules.usual_norms import UploadNorm, outlying
from dht.identity import PeerId

NOTHING_TO_GIVE = "it has nothing to give: its numbers are not finite"


AGAIN_S = 0.3
"""Time after which a rider tries its delegate again."""


@dataclass(frozen=True, slots=True)
class Route:
    """One slice, the peer that its stream goes to, and whether the own part is sent there first."""

    slice: int
    to: PeerId
    gives: bool
    by_delegate: bool = False
    """``to`` is the delegate of the sender's site and not the slice's reducer."""
    after_s: float = 0.0
    """Time to wait before the stream is opened."""


class Incoming(enum.Enum):
    """Kinds of incoming streams, from the point of view of the peer that takes them."""

    RIDER = "the contribution of a rider, for the bundle"
    EMPTY_RIDER = "a rider that has nothing to give and waits"
    OWN = "a contribution, or a bundle, to be merged"
    EMPTY = "a member that has nothing to give and waits"
    WAITS = "a member that only waits for the merged slice"


@dataclass(frozen=True, slots=True)
class Payloads:
    """The uploads that a sealed merge of one slice takes, in their order."""

    carriers: tuple[int, ...]
    """Roster indices of their senders."""
    weights: tuple[float, ...]
    members: tuple[int, ...] | None
    """Number of contributors in each; ``None``: one in each."""


class Traffic:
    """One peer's streams of one round: decides, and remembers what it decided."""

    def __init__(self, enter: Enter, *, me: PeerId) -> None:
        self.enter = enter
        self.commit: Commit = enter.commit
        self.entry = enter.entry
        self._me = me
        delegate = None if self.entry is None else self.commit.members[self.entry].delegate
        self.rides = delegate is not None
        """True if the own contribution travels in a delegate's bundle, or not at all."""
        self._delegate = None if delegate is None else self.commit.members[delegate].peer
        self._by_delegate: set[int] = set()
        self._again: set[int] = set()
        """Slices that were sent to the delegate a second time."""
        self._wanted: dict[int, PeerId] = {}
        self.gives = False
        """True while there is a contribution to send, as far as is known."""
        self.inside: tuple[int, ...] | None = None
        """The riders in the bundle, if this peer is a delegate; ``None``: not decided yet."""
        self.reduces = set(enter.slices)
        self.merged: set[int] = set()
        """Merged slices that are here."""
        self._problems: dict[tuple[int, int], str] = {}
        if not self.riders:
            self.inside = ()

    @property
    def riders(self) -> tuple[int, ...]:
        """Roster indices of the members whose uploads come to this peer, their delegate."""
        return () if self.entry is None else riders_of(self.commit, self.entry)

    def has_maps(self, index: int) -> bool:
        """True if merged maps (``averaging.history.parent_maps``) travel ahead of this slice."""
        return self.commit.melds and index == 0

    # Outgoing

    def upload(self, index: int, to: PeerId, *, gives: bool) -> Route | None:
        """The stream for an ``Upload``, which replaces an earlier one of that slice.

        ``None``: the delegate has the slice already, and sends it wherever it is wanted.
        """
        self._wanted[index] = to
        by_delegate = False
        if gives and self.rides:
            if self._delegate is None:
                gives = False  # in the bundle or not at all: it must not be merged twice
            elif index in self._by_delegate:
                return None
            else:
                self._by_delegate.add(index)
                to, by_delegate = self._delegate, True
        return Route(index, to, gives and self.gives, by_delegate)

    def opening(self, route: Route) -> Opening:
        """The header of a stream, made when it opens: the contribution may have proved unfit."""
        return Opening(
            fragment=self.commit.fragment,
            round=self.enter.round,
            slice=route.slice,
            gives=route.gives and self.gives,
            commit=self.enter.encoded,
            signature=self.enter.signature,
            riders=(self.inside or ()) if route.gives else (),
        )

    def broke(self, route: Route) -> list[Route] | None:
        """The streams to open instead of one that broke; ``None``: the round machine decides.

        Without its delegate a rider fetches merged slices where they are made. A delegate refuses a
        round of several lineages until it can judge them. What it needs comes from the leader,
        often over a slower line than the riders' streams, so these are tried once more.
        """
        if not route.by_delegate:
            return None
        if self._delegate is None:
            return []  # another stream to it broke before
        if len(self.commit.parents) > 1 and route.slice not in self._again:
            self._again.add(route.slice)
            return [replace(route, after_s=AGAIN_S)]
        self._delegate = None
        again = [self.upload(i, to, gives=True) for i, to in sorted(self._wanted.items())]
        return [each for each in again if each is not None and each.slice not in self.merged]

    # Incoming

    def arriving(self, opening: Opening, entry: int) -> Incoming:
        """The kind of a stream that the round machine has admitted. ``entry``: its sender's."""
        if self.is_rider(entry):
            return Incoming.RIDER if opening.gives else Incoming.EMPTY_RIDER
        if opening.gives:
            return Incoming.OWN
        if self.commit.members[entry].delegate is None:
            return Incoming.EMPTY
        return Incoming.WAITS

    def is_rider(self, entry: int | None) -> bool:
        return carries(self.commit, self.entry, entry)

    def left_out(self, index: int, entry: int, problem: str) -> None:
        """Remember why an upload is not merged: its sender is told with the merged slice."""
        self._problems[index, entry] = problem

    def problem(self, index: int, entry: int) -> str:
        return self._problems.get((index, entry), "")

    # Merging and answering

    def merge(self, asked: Merge) -> Payloads:
        """The uploads that ``Merge`` takes. All others of that slice are needed no more."""
        bundles, newcomers = asked.bundles, self.commit.on_probation
        taken = shares(asked.contributors, asked.weights, bundles, on_probation=newcomers)
        for share in taken:
            self._problems.pop((asked.slice, share.carrier), None)  # of an earlier attempt
        return Payloads(
            tuple(share.carrier for share in taken),
            tuple(share.weight for share in taken),
            tuple(share.members for share in taken) if bundles or newcomers else None,
        )


class BundleRoster:
    """The members of a delegate's bundle: decided once, when all is here or time is up.

    A rider whose upload has an absurd norm is left out, as a reducer would leave it out; otherwise
    the whole bundle would be refused, and with it the work of everybody at the site.
    """

    __slots__ = ("_absurd_ratio", "_entry", "_here", "_norms", "_slices", "inside", "refused")

    def __init__(
        self, entry: int, riders: Iterable[int], slices: int, *, norm_ratio_max: float
    ) -> None:
        self._entry = entry
        self._slices = slices
        self._absurd_ratio = norm_ratio_max
        self._here: dict[int, set[int]] = {rider: set() for rider in riders}
        self._norms: dict[int, dict[int, UploadNorm]] = {}
        """Norms of uploads by slice and member, the delegate among them."""
        self.inside: tuple[int, ...] | None = None
        """The riders in the bundle, once that is decided."""
        self.refused: dict[int, str] = {}

    def wants(self, rider: int, index: int) -> bool:
        """True if a rider's slice is missing and would still be in time."""
        return self.inside is None and index not in self._here.get(rider, {index})

    def measured(self, member: int, index: int, norm: UploadNorm | None) -> None:
        """Note the norm of a rider's slice, or of the delegate's own."""
        if norm is not None:
            self._norms.setdefault(index, {})[member] = norm

    def take(self, rider: int, index: int, norm: UploadNorm | None) -> None:
        """Note a rider's slice that is here in full and finite."""
        if self.wants(rider, index):
            self._here[rider].add(index)
            self.measured(rider, index, norm)

    def leave_out(self, rider: int) -> None:
        """Expect nothing of a rider any more: its upload cannot be merged."""
        if self.inside is None:
            self._here.pop(rider, None)

    @property
    def is_settled(self) -> bool:
        """True if there is nobody left to wait for."""
        return all(map(self._is_whole, self._here))

    def _is_whole(self, rider: int) -> bool:
        return len(self._here[rider]) == self._slices

    def decide(self) -> tuple[int, ...]:
        for norms in self._norms.values():
            absurd = outlying(norms, norm_ratio_max=self._absurd_ratio)
            self.refused.update((who, why) for who, why in absurd.items() if who != self._entry)
        whole = filter(self._is_whole, sorted(self._here))
        self.inside = tuple(rider for rider in whole if rider not in self.refused)
        return self.inside
