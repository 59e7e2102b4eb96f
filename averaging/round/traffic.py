"""The streams of a round: their slices, ends and contents, and the answers that go back on them.

The round machine names a slice, its reducer and whether the own contribution is to be sent
(``effects.Upload``). ``Traffic`` turns that into streams: members of one site
send to their delegate instead (``averaging.rules.sites``), a delegate sends the bundle of its site,
a reducer answers its uploads. It holds no bytes and opens no stream: the caller does, and says what
became of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from averaging.messages import Commit, Opening
from averaging.round.interface.effects import Enter, Merge
from averaging.rules.sites import Share, carries, riders_of, shares
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


class Traffic:
    """One peer's streams of one round: decides, and remembers what it decided."""

    def __init__(self, enter: Enter) -> None:
        self.enter = enter
        self.commit: Commit = enter.commit
        self.entry = enter.entry
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

    def is_rider(self, entry: int | None) -> bool:
        return carries(self.commit, self.entry, entry)

    def left_out(self, index: int, entry: int, problem: str) -> None:
        """Remember why an upload is not merged: its sender is told with the merged slice."""
        self._problems[index, entry] = problem

    def problem(self, index: int, entry: int) -> str:
        return self._problems.get((index, entry), "")

    # Merging and answering

    def merge(self, asked: Merge) -> tuple[Share, ...]:
        """The uploads that ``Merge`` takes. All others of that slice are needed no more."""
        taken = shares(
            asked.contributors, asked.weights, asked.bundles, on_probation=self.commit.on_probation
        )
        for share in taken:
            self._problems.pop((asked.slice, share.carrier), None)  # of an earlier attempt
        return taken
