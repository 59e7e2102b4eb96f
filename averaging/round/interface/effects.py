"""Effects: what a round machine asks its owner to do. Values only.

``averaging.live.averager`` carries them out. The machine
never waits for an effect: the outcome is told to it later by an input
(``averaging.round.interface.inputs``), which is named below at each effect. The machine has a
deadline for each of those inputs.

A round is named by its digest. The owner gets the commit with ``Enter`` and keeps it, its retained
uploads and its buffers until ``Forget``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from msgspec import Struct

from averaging.history.standing import Standing
from averaging.messages import Commit, Message
from averaging.rules.reputation import Deed
from dht.identity import PeerId

Value: TypeAlias = str | int | float | bool | tuple[str, ...] | None


class Send(Struct, frozen=True):
    """Send a message on the control link. A loss is told by ``LinkLost``, or not at all."""

    to: PeerId
    message: Message


class TakeSnapshot(Struct, frozen=True):
    """Ask the learner for the fragment at its next safe point: ``Offered``."""


class Enter(Struct, frozen=True):
    """Take part in a round: prepare buffers. It is the first effect of a round.

    ``entry`` is the own index in the roster, ``None`` at a peer that only reduces. ``slices`` are
    those that it reduces. The own contribution counts up to ``commit.members[entry].mark``.
    """

    round: bytes
    commit: Commit
    encoded: bytes
    signature: bytes
    entry: int | None
    slices: tuple[int, ...]


class Reduce(Struct, frozen=True):
    """Reduce this slice as well: its former reducer is dead. If it is here merged, it goes out."""

    round: bytes
    slice: int


class Upload(Struct, frozen=True):
    """Send slice ``slice`` to its reducer on a stream of its own, and wait there for the answer.

    The encoded contribution is kept until ``Forget``. ``gives``: send it; else only wait. An upload
    to this peer itself is a local hand-over. The answer is ``MergedArrived`` (at the reducer itself
    ``SliceMerged``), the failure ``UploadFailed``. At the reducer: ``UploadArrived``. An upload of
    the same slice replaces an earlier one.
    """

    round: bytes
    slice: int
    to: PeerId
    gives: bool


class Merge(Struct, frozen=True):
    """Merge these contributors' uploads of a slice that this peer reduces: ``SliceMerged``.

    ``contributors`` are indices into the roster, ascending; ``weights`` are theirs and sum to one.
    Uploads of others are dropped. ``bundles``: the riders in the uploads of delegates. The merged
    slice goes out on every stream that was opened for it, now and later.
    """

    round: bytes
    slice: int
    contributors: tuple[int, ...]
    weights: tuple[float, ...]
    bundles: Mapping[int, tuple[int, ...]] = {}


class RefuseStream(Struct, frozen=True):
    """The bulk stream that was opened may not send."""

    reason: str


class Apply(Struct, frozen=True):
    """All merged slices are here: take the outer step: ``Applied``.

    ``standing`` is the standing afterwards; ``contained`` the mark up to which the outstanding
    snapshot is in it (``None``: it is not). Nothing can revoke this. In a meld ``standing.merged``
    is that of the own side: ``Applied`` brings the real one, out of the merged slices. It also
    tells up to which mark the own work is in it: another side may have merged more than this one.
    """

    round: bytes
    commit: Commit
    seal: tuple[int, ...]
    digests: tuple[bytes, ...]
    weights: tuple[float, ...]
    standing: Standing
    contained: int | None
    reason: str


class GiveUp(Struct, frozen=True):
    """The outstanding snapshot will not be part of a round now.

    ``in_doubt``: it may be part of one elsewhere; keep it until another ``GiveUp``, ``Presume`` or
    a new standing. Otherwise it is pending and the learner is released from it. ``round`` is
    ``None`` before a commit, and after a doubt.
    """

    round: bytes | None
    reason: str
    in_doubt: bool


class Discard(Struct, frozen=True):
    """The learner's pending work is too old to be offered: count it as discarded.

    The learner goes on from this peer's theta.
    """

    reason: str


class Presume(Struct, frozen=True):
    """The doubt is over: the contribution up to ``mark`` counts as merged, on another lineage.

    It comes along when lineages are melded, so it is not offered again. The standing is unchanged.
    """

    mark: int


class Forget(Struct, frozen=True):
    """Drop what is kept of this round: uploads, buffers, streams. No peer needs it any more."""

    round: bytes


class CatchUp(Struct, frozen=True):
    """This peer is behind: replay or fetch up to ``lineage`` from any peer: ``CaughtUp``.

    ``source`` said that it has it. Afterwards the outstanding snapshot is over: it is contained
    exactly if the new standing's ``merged`` covers its mark.
    """

    source: PeerId
    version: int
    lineage: bytes


class Rebase(CatchUp, frozen=True):
    """This peer is on the lighter side of a fork: take ``source``'s state instead of its own."""

    others_follow: bool = False
    """Other peers go on with the old standing and will be melded with: work merged there comes
    along with them, and is not offered again."""
    gives_way: bool = False
    """The old standing can be certified to nobody: the new one is taken however light it is."""


class Fold(Struct, frozen=True):
    """No other peer trains: the snapshot becomes theta, momentum stays: ``Folded``."""

    standing: Standing
    contained: int


class Note(Struct, frozen=True):
    """An event for logs and tests, named ``event``. An owner acts only on a ``Blame``."""

    event: str
    fields: Mapping[str, Value] = {}


class Blame(Note, frozen=True):
    """A note of what a peer has done, and the order to hold it against that peer."""

    @property
    def peer(self) -> PeerId:
        return PeerId(str(self.fields["peer"]))

    @property
    def reason(self) -> str:
        return str(self.fields["reason"])


class Strike(Blame, frozen=True):
    """It counts in the peer's reputation."""

    deed: Deed = Deed.IS_LATE


class CountRefused(Blame, frozen=True):
    """Count a refusal of something that the peer sent, as one of ``kind``."""

    kind: str = "refused"


class LeaveOut(Blame, frozen=True):
    """The peer's upload to ``round`` is not merged: by the seal, or by the reducer of ``slice``."""


class WarnOfCommit(Blame, frozen=True):
    """The peer sent something that cannot be read as a commit."""


Effect: TypeAlias = (
    Send
    | TakeSnapshot
    | Enter
    | Reduce
    | Upload
    | Merge
    | RefuseStream
    | Apply
    | GiveUp
    | Discard
    | Presume
    | Forget
    | CatchUp
    | Fold
    | Note
)


def refusal(effects: Sequence[Effect]) -> str | None:
    """The reason in the effects of ``StreamOpened``; ``None`` if the stream may send."""
    return next((effect.reason for effect in effects if isinstance(effect, RefuseStream)), None)
