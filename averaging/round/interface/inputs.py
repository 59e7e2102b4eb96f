"""Inputs of a round machine: values only, given to ``FragmentRounds.handle`` with the time.

An input that answers an effect (``averaging.round.interface.effects``) names it.
"""

from __future__ import annotations

from typing import TypeAlias

from msgspec import Struct

from averaging.history.lineage import Lineage
from averaging.history.standing import Standing
from averaging.messages import Message, Opening
from averaging.rules.usual_norms import UploadNorm
from dht.identity import PeerId


class Tick(Struct, frozen=True):
    """The machine's deadline has come. Earlier or more often does no harm."""


# The learner


class Progressed(Struct, frozen=True):
    """The learner has done a step. Begins a round when one is due."""

    step: int
    step_time_s: float
    waits: bool = False
    """Other fragments have their turn first (``averaging.round.turns``): begin no round."""


class Due(Struct, frozen=True):
    """Begin a round of this fragment now. A busy machine ignores it, and stays due."""


class GiveWay(Struct, frozen=True):
    """Another fragment has its turn first: abandon what is not committed. It stays due."""

    reason: str


class Offer(Struct, frozen=True):
    """An offer of the learner: a fragment's pending work, without the numbers.

    See ``averaging.live.learner_port.Snapshot``.
    """

    mark: int
    steps: int
    tokens: int
    """Counted since the mark in the standing's ``merged`` for this incarnation, else since its
    start."""
    base_version: int
    base_lineage: Lineage
    batch_tokens_max: int


class Offered(Struct, frozen=True):
    """The learner's answer to ``TakeSnapshot``; ``None`` if it has nothing."""

    offer: Offer | None


class Folded(Struct, frozen=True):
    """``Fold`` is done."""


# Other peers


class Received(Struct, frozen=True):
    """A message about this fragment from an authenticated peer."""

    sender: PeerId
    message: Message


class StreamOpened(Struct, frozen=True):
    """A peer has opened a bulk stream. ``RefuseStream`` is among the effects if it may not send.

    The commit may come this way sooner than from the leader. It is judged by its signature, never
    by the peer that carries it.
    """

    sender: PeerId
    opening: Opening


class LinkLost(Struct, frozen=True):
    """The link to a peer broke, or something could not be delivered to it."""

    peer: PeerId


# Uploads and slices


class UploadArrived(Struct, frozen=True):
    """An upload has ended at its reducer: it is here in full and finite, or has a ``problem``."""

    round: bytes
    slice: int
    sender: PeerId
    problem: str | None
    norm: UploadNorm | None = None
    """Norm of what is here, to be compared with the others'."""
    riders: tuple[int, ...] = ()
    """Members whose contributions are in it as well (``averaging.rules.sites``)."""


class UploadFailed(Struct, frozen=True):
    """A member's stream broke before the merged slice came back on it."""

    round: bytes
    slice: int
    reason: str


class SliceMerged(Struct, frozen=True):
    """``Merge`` is done at a reducer."""

    round: bytes
    slice: int
    digest: bytes


class MergedArrived(Struct, frozen=True):
    """The merged slice is here, from its reducer, or handed to this peer as its new reducer."""

    round: bytes
    slice: int
    digest: bytes
    contributors: tuple[int, ...]
    """Members whose work the maker of the slice claims to have merged."""


SliceOutcome: TypeAlias = UploadArrived | UploadFailed | SliceMerged | MergedArrived
"""The answers to ``Upload``, ``Reduce`` and ``Merge``, each about one slice."""


class Applied(Struct, frozen=True):
    """``Apply`` is done."""

    round: bytes
    standing: Standing | None = None
    """That of ``Apply``, after a meld with the map out of the merged slices; ``None``: just
    that of ``Apply``."""
    left: bytes | None = None
    """Only after a meld of one group: the digest of the numbers that this peer had before."""


class CaughtUp(Struct, frozen=True):
    """``CatchUp`` is done; ``standing`` is ``None`` if it failed."""

    standing: Standing | None
    since: int | None = None
    """The pending work began at this version, not at the one of ``standing``."""
    held_s: float | None = None
    """Time for which the source was waited for; ``None``: since the effect."""
    reason: str = ""
    """The reason of a failure, for the event ``catch_up_failed``."""


# This peer


class Leave(Struct, frozen=True):
    """Begin no round from here on; one that is under way may still be finished."""


class ReachabilityChanged(Struct, frozen=True):
    """Other peers can dial this one, or cannot, as it turned out. If not, it neither leads nor
    reduces."""

    reachable: bool


class LineMeasured(Struct, frozen=True):
    """The speed of this peer's line in its slower direction; 0: not known."""

    bytes_per_s: float


class EndIsNear(Struct, frozen=True):
    """The run is about to end: all peers form one group, as far as a roster can be long, and join
    every leader that calls, however little there is to offer."""


class MergeBeforeLeaving(Struct, frozen=True):
    """This peer is about to leave: it answers every call, and its joins say so.

    While no other peer trains, a keeper is company enough; without one, it folds at once.
    """

    leaves: bool = True
    """False: it stays after all."""


class LastRoundOver(Struct, frozen=True):
    """The run's date has come, and this fragment's last round is over: this peer merges no more."""


class OrdersChanged(Struct, frozen=True):
    """The owner of the run has given a new directive (``averaging.rules.orders``)."""


Input: TypeAlias = (
    Tick
    | Progressed
    | Due
    | GiveWay
    | Offered
    | Folded
    | Received
    | StreamOpened
    | LinkLost
    | SliceOutcome
    | Applied
    | CaughtUp
    | Leave
    | ReachabilityChanged
    | LineMeasured
    | EndIsNear
    | MergeBeforeLeaving
    | LastRoundOver
    | OrdersChanged
)
