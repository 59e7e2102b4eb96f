"""What the round machine asks its owner to do. Values only; ``averaging.live.averager`` carries
them out.

The machine never waits for an effect: whatever comes of it is told to it later by one of the
inputs of ``averaging.round.machine.FragmentRounds``, named below at each effect. An effect which
never gets its input is covered by a deadline of the machine's.

A round is named by its digest throughout; the owner gets the commit with ``Enter`` and keeps it,
its retained uploads and its buffers until ``Forget``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from averaging.history.standing import Standing
from averaging.messages import Commit, Message
from dht.identity import PeerId

Value: TypeAlias = str | int | float | bool | tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class Send:
    """Put this on the control link to ``to``. Loss is told by ``lost(to)``, or by nobody."""

    to: PeerId
    message: Message


@dataclass(frozen=True, slots=True)
class Silent:
    """My leader has not answered what I said to it at ``since`` and again later.

    If it was silent about all fragments, while others answered (``averaging.round.silence``): tell
    all the others' machines, by ``silent(peer)``.
    """

    peer: PeerId
    since: float


@dataclass(frozen=True, slots=True)
class TakeSnapshot:
    """Ask the learner for the fragment at its next safe point: ``offered(offer or None)``."""

    reason: str


@dataclass(frozen=True, slots=True)
class Enter:
    """A commit that names me holds for me: prepare buffers. Comes before any other of the round.

    ``entry`` is my index in the roster, ``None`` when I only reduce. ``slices`` are those that I
    reduce. My own contribution counts up to ``commit.members[entry].mark``.
    """

    round: bytes
    commit: Commit
    encoded: bytes
    signature: bytes
    entry: int | None
    slices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Reduce:
    """From now on I also reduce this slice: its reducer before me died."""

    round: bytes
    slice: int


@dataclass(frozen=True, slots=True)
class Upload:
    """Send slice ``slice`` to its reducer on a stream of its own, and wait there for the answer.

    ``what`` is ``"own"``: my encoded contribution, kept until ``Forget``; ``"merged"``: the merged
    slice, which I have and the reducer lacks; ``"nothing"``: I only wait. To myself it is a local
    hand-over. The answer is ``merged_arrived`` (at the reducer itself ``slice_merged``); what goes
    wrong, ``upload_failed``. At the reducer: ``upload_arrived``. An upload of the same slice
    replaces an earlier one.
    """

    round: bytes
    slice: int
    to: PeerId
    what: str


@dataclass(frozen=True, slots=True)
class Merge:
    """Merge these contributors' uploads of a slice that I reduce: ``slice_merged``.

    ``contributors`` are indices into the roster, ascending; ``weights`` are theirs and sum to one.
    For a mix the contributors are the carriers. Uploads of others are dropped.
    """

    round: bytes
    slice: int
    contributors: tuple[int, ...]
    weights: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """The merged slice of ``slice`` may go out on every stream that was opened for it, now and
    later."""

    round: bytes
    slice: int


@dataclass(frozen=True, slots=True)
class RefuseStream:
    """The bulk stream that was opened may not send."""

    reason: str


@dataclass(frozen=True, slots=True)
class Apply:
    """I have all merged slices: take the outer step (or the mixed state): ``finished(round)``.

    ``standing`` is what I stand on afterwards; ``contained`` the mark up to which my own
    outstanding snapshot is in it (``None``: not in it). Nothing can revoke this. In a mix
    ``standing.merged`` is my own side's: hand the real one, out of the merged slices, to
    ``finished``. It also tells up to which mark my work is in it: another side may have merged
    some that mine has not.
    """

    round: bytes
    commit: Commit
    seal: tuple[int, ...]
    digests: tuple[bytes, ...]
    weights: tuple[float, ...]
    standing: Standing
    contained: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """My outstanding snapshot will not be part of a round now.

    ``in_doubt``: it may be, elsewhere; keep it until ``Settle`` or until a standing tells.
    Otherwise it is pending and the learner is released from it. ``round`` is ``None`` before a
    commit.
    """

    round: bytes | None
    reason: str
    in_doubt: bool


@dataclass(frozen=True, slots=True)
class Discard:
    """The learner's pending work is too old to be offered: count it as discarded and let it go.

    The learner goes on from theta as it is here.
    """

    reason: str


@dataclass(frozen=True, slots=True)
class Settle:
    """The doubt about ``round`` is over: my contribution is not in any version that I follow."""

    round: bytes
    reason: str


@dataclass(frozen=True, slots=True)
class Presume:
    """The doubt is over: my contribution up to ``mark`` is merged, on a lineage that is not mine.

    It comes along when lineages are mixed, so it is not offered again. I stand where I stood.
    """

    round: bytes
    mark: int
    reason: str


@dataclass(frozen=True, slots=True)
class Forget:
    """Nobody needs what you keep of this round: uploads, buffers, streams."""

    round: bytes


@dataclass(frozen=True, slots=True)
class CatchUp:
    """I am behind: replay or fetch until ``lineage`` from ``source`` or anybody: ``caught_up``.

    After it the outstanding snapshot is over: it is contained exactly if the new
    standing's ``merged`` covers its mark.
    """

    source: PeerId
    version: int
    lineage: bytes
    reason: str


@dataclass(frozen=True, slots=True)
class Rebase:
    """I am apart and the lighter side: take ``source``'s state instead of mine: ``caught_up``.

    What I moved since ``ancestor`` (``None``: since the start) and is not in the new state stays
    mine to offer.
    """

    source: PeerId
    version: int
    lineage: bytes
    ancestor: int | None
    """The last version that both chains share."""
    reason: str
    others_follow: bool = False
    """Others go on from where I stood, and will be mixed with: what is merged there comes along
    with them, and is not offered again."""


@dataclass(frozen=True, slots=True)
class Fold:
    """I am alone: theta becomes my snapshot, momentum stays; then ``standing``: ``folded``."""

    standing: Standing
    contained: int
    reason: str


@dataclass(frozen=True, slots=True)
class Note:
    """Something a person or a test may want to see. ``event`` names a transition."""

    event: str
    fields: Mapping[str, Value] = field(default_factory=dict)


Effect: TypeAlias = (
    Send
    | Silent
    | TakeSnapshot
    | Enter
    | Reduce
    | Upload
    | Merge
    | Answer
    | RefuseStream
    | Apply
    | GiveUp
    | Discard
    | Settle
    | Presume
    | Forget
    | CatchUp
    | Rebase
    | Fold
    | Note
)


def refusal(effects: Sequence[Effect]) -> str | None:
    """Why the stream may not send that was opened with these effects; ``None`` if it may."""
    return next((effect.reason for effect in effects if isinstance(effect, RefuseStream)), None)
