"""Inputs of a round machine: values only, given to ``FragmentRounds.handle`` with the time.

An input that answers an effect (``averaging.round.effects``) names it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from averaging.history.lineage import Lineage
from averaging.history.merged_map import MergedMap
from averaging.history.standing import Standing
from averaging.messages import Message, Opening
from averaging.round.reducer import Length
from dht.identity import PeerId


@dataclass(frozen=True, slots=True)
class Tick:
    """The machine's deadline has come. Earlier or more often does no harm."""


# The learner


@dataclass(frozen=True, slots=True)
class Progressed:
    """The learner has done a step. Begins a round when one is due."""

    step: int
    step_time_s: float
    waits: bool = False
    """Other fragments have their turn first (``averaging.round.turns``): begin no round."""


@dataclass(frozen=True, slots=True)
class StepsCounted:
    """The learner has done so many steps. Begins nothing."""

    step: int


@dataclass(frozen=True, slots=True)
class Due:
    """Begin a round of this fragment now. A busy machine ignores it, and stays due."""


@dataclass(frozen=True, slots=True)
class GiveWay:
    """Another fragment has its turn first: abandon what is not committed. It stays due."""

    reason: str


@dataclass(frozen=True, slots=True)
class Offer:
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


@dataclass(frozen=True, slots=True)
class Offered:
    """The learner's answer to ``TakeSnapshot``; ``None`` if it has nothing."""

    offer: Offer | None


@dataclass(frozen=True, slots=True)
class Folded:
    """``Fold`` is done."""


# Other peers


@dataclass(frozen=True, slots=True)
class Received:
    """A message about this fragment from an authenticated peer."""

    sender: PeerId
    message: Message


@dataclass(frozen=True, slots=True)
class StreamOpened:
    """A peer has opened a bulk stream. ``RefuseStream`` is among the effects if it may not send.

    The commit may come this way sooner than from the leader. It is judged by its signature, never
    by the peer that carries it.
    """

    sender: PeerId
    opening: Opening


@dataclass(frozen=True, slots=True)
class LinkLost:
    """The link to a peer broke, or something could not be delivered to it."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class PeerSilent:
    """Another fragment of this peer has waited for that one in vain. See ``effects.Silent``."""

    peer: PeerId


# Uploads and slices


@dataclass(frozen=True, slots=True)
class UploadArrived:
    """An upload has ended at its reducer: it is here in full and finite, or has a ``problem``."""

    round: bytes
    slice: int
    sender: PeerId
    problem: str | None
    length: Length | None = None
    """Norm of what is here, to be compared with the others'."""
    riders: tuple[int, ...] = ()
    """Members whose contributions are in it as well (``averaging.rules.sites``)."""


@dataclass(frozen=True, slots=True)
class UploadFailed:
    """A member's stream broke before the merged slice came back on it."""

    round: bytes
    slice: int
    reason: str


@dataclass(frozen=True, slots=True)
class SliceMerged:
    """``Merge`` is done at a reducer."""

    round: bytes
    slice: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class MergedArrived:
    """The merged slice is here, from its reducer, or handed to this peer as its new reducer."""

    round: bytes
    slice: int
    digest: bytes
    parents: tuple[int, ...] | None = None
    """The parents whose merged maps came with it; ``None``: none come with this slice."""
    contributors: tuple[int, ...] | None = None
    """Those whose work its maker claims to have merged; ``None``: it makes no claims."""


Report: TypeAlias = UploadArrived | UploadFailed | SliceMerged | MergedArrived
"""What became of a part of a round, in answer to ``Upload``, ``Reduce``, ``Merge``, ``Answer``."""


@dataclass(frozen=True, slots=True)
class Applied:
    """``Apply`` is done."""

    round: bytes
    merged: MergedMap | None = None
    """Only after a mix or meld: the map out of the merged slices, with a meld's new work."""
    dispersion: float | None = None
    """Only after a meld: how far this peer's weights were from the mean."""


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """``CatchUp`` or ``Rebase`` is done; ``standing`` is ``None`` if it failed."""

    standing: Standing | None
    since: int | None = None
    """The pending work began at this version, not at the one of ``standing``."""
    held_s: float | None = None
    """How long the source was waited for; ``None``: since the effect."""


# This peer


@dataclass(frozen=True, slots=True)
class Leave:
    """Begin no round from here on; one that is under way may still be finished."""

    reason: str


@dataclass(frozen=True, slots=True)
class ReachabilityChanged:
    """It turned out whether others can dial this peer. If not, it neither leads nor reduces."""

    reachable: bool


@dataclass(frozen=True, slots=True)
class LineMeasured:
    """The speed of this peer's line in its slower direction; 0: not known."""

    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class AnswerEveryCall:
    """The end is near: join every leader that calls, however little there is to offer."""


@dataclass(frozen=True, slots=True)
class MergeBeforeLeaving:
    """This peer is about to leave: it answers every call, and its joins say so.

    While no other peer trains, a keeper is company enough; without one, it folds at once.
    """

    leaves: bool = True
    """False: it stays after all."""


@dataclass(frozen=True, slots=True)
class GatherEverybody:
    """The end is near: all peers form one group, as far as a roster can be long."""


@dataclass(frozen=True, slots=True)
class LastRoundOver:
    """The run's date has come, and this fragment's last round is over: this peer merges no more."""


@dataclass(frozen=True, slots=True)
class OrdersChanged:
    """The owner of the run has given a new directive (``averaging.rules.orders``)."""


Input: TypeAlias = (
    Tick
    | Progressed
    | StepsCounted
    | Due
    | GiveWay
    | Offered
    | Folded
    | Received
    | StreamOpened
    | LinkLost
    | PeerSilent
    | Report
    | Applied
    | CaughtUp
    | Leave
    | ReachabilityChanged
    | LineMeasured
    | AnswerEveryCall
    | MergeBeforeLeaving
    | GatherEverybody
    | LastRoundOver
    | OrdersChanged
)
