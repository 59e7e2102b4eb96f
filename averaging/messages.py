"""What peers say to each other about one round of one fragment, and how it looks on the wire.

Every message is one byte of version and one msgpack array that starts with the message's
name. Sizes are bounded by the types themselves, so what decodes is small; what does not decode is a
``BadMessage`` that the receiver counts. Nothing here decides anything, and no number of a
model is ever in a message: slices travel on bulk streams, which begin with an ``Opening``.

A **round** is named by the blake3 digest of its commit (``Digest``), or, before there is a commit,
by the fragment alone: a peer is in at most one round of a fragment.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, TypeAlias, TypeVar

import blake3
import msgspec
from msgspec import Meta, Struct

from dht.identity import PeerId

VERSION = 1
"""First byte of every message. A peer that hears another one counts it and says so.

It stays at 1 until the first release, whatever changes before: nobody runs an older one. From then
on a change of the golden file is a change of this number."""

MESSAGE_MAX_BYTES = 64 << 10
"""No control message is larger; a commit of 64 members with their chains is half of it."""

ROSTER_MAX = 64
LINKS_MAX = 32
FAILED_MAX = 16
CODECS_MAX = 16

Digest: TypeAlias = Annotated[bytes, Meta(min_length=32, max_length=32)]
Topic: TypeAlias = Annotated[bytes, Meta(min_length=16, max_length=16)]
Peer: TypeAlias = Annotated[PeerId, Meta(min_length=1, max_length=64)]
COUNT_MAX = 2**53 - 1
"""A double holds every count up to it exactly."""

Count: TypeAlias = Annotated[int, Meta(ge=0, le=COUNT_MAX)]
Index: TypeAlias = Annotated[int, Meta(ge=0, lt=2**16)]
Reason: TypeAlias = Annotated[str, Meta(max_length=300)]
Name: TypeAlias = Annotated[str, Meta(min_length=1, max_length=40)]
Seconds: TypeAlias = Annotated[float, Meta(ge=0.0, le=1e7)]
BytesPerSecond: TypeAlias = Annotated[float, Meta(ge=0.0, le=1e15)]
Indices: TypeAlias = Annotated[tuple[Index, ...], Meta(max_length=ROSTER_MAX)]
Ballot: TypeAlias = Count


class BadMessage(ValueError):
    """Bytes from a peer that are no message of ours."""


def check_incarnation(incarnation: int, *, name: str = "incarnation") -> None:
    """Raise ``ValueError`` for an incarnation that no message can hold.

    Bounds of fields are checked only where bytes are decoded, that is by the other peers: a peer
    with such an incarnation would send commits that all of them drop.
    """
    if not 0 <= incarnation <= COUNT_MAX:
        raise ValueError(f"{name} is {incarnation}; it is between 0 and {COUNT_MAX}")


class _Part(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A piece of a message."""


class _Message(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    fragment: Index


# Parts


class Link(_Part, frozen=True):
    """One version of a chain: after it, this many tokens of all peers were merged."""

    version: Count
    lineage: Digest
    tokens: Count


Links: TypeAlias = Annotated[tuple[Link, ...], Meta(max_length=LINKS_MAX)]


class Head(_Part, frozen=True):
    """Where a peer stands, with a thinned-out chain: newest first, then ever further apart.

    Enough for anybody to find a common ancestor, exact when it is recent.
    """

    version: Count
    lineage: Digest
    links: Links


class Entry(_Part, frozen=True):
    """One member of a roster: what it said in its ``Join``. Its index is its rank in succession."""

    peer: Peer
    incarnation: Count
    join: Count
    parent: Index
    """Which of the commit's parents this member stands on."""
    base_version: Count
    staleness: Count
    mark: Count
    steps: Count
    tokens: Count
    reachable: bool
    delegate: Index | None = None
    """The member of its site that carries its contribution (``averaging.rules.sites``)."""

    def __post_init__(self) -> None:
        check_incarnation(self.incarnation)


class Commit(_Part, frozen=True, kw_only=True):
    """The leader's word on who takes part in a round and how. Signed; never changes."""

    topic: Topic
    fragment: Index
    kind: Annotated[str, Meta(pattern="^(merge|mix|meld)$")]
    """``merge``: displacements. ``mix``: states. ``meld``: both (``averaging.rules.mixing``)."""
    leader: Peer
    leader_incarnation: Count
    nonce: Count
    """Makes each commit of a leader's life another round."""
    parents: Annotated[tuple[Link, ...], Meta(min_length=1, max_length=ROSTER_MAX)]
    """The states that members stand on, one per distinct lineage, heaviest first. A merge has one,
    but in a swarm of several groups: then everybody steps on its own."""
    ancestors: Annotated[tuple[Links, ...], Meta(max_length=ROSTER_MAX)] = ()
    """Mix and meld: each parent's thinned-out chain: everybody's will contain all of them."""
    mix_tokens: Annotated[tuple[Count, ...], Meta(max_length=ROSTER_MAX)] = ()
    """Mix only: each parent's weight, its tokens merged since the lineages parted."""
    mix_total: Count = 0
    """Mix only: the tokens that the new version's chain link shows."""
    carriers: Indices = ()
    """Mix only: for each parent the member who supplies its theta and momentum."""
    members: Annotated[tuple[Entry, ...], Meta(min_length=1, max_length=ROSTER_MAX)]
    reducers: Annotated[tuple[Peer, ...], Meta(min_length=1, max_length=ROSTER_MAX)]
    """Who reduces each slice. Reassigned while the round runs if one dies."""
    shares: Annotated[tuple[Count, ...], Meta(min_length=1, max_length=ROSTER_MAX)]
    """How the fragment is cut into slices, for ``averaging.numbers.layout``."""
    codec: Name
    merge: Name
    eta: float
    mu: float
    batch_tokens_max: Count
    """The largest batch of any member; more tokens than steps times this are not believed."""
    contributors_min: Count
    """A seal with fewer is void. Contributions that were refused as bad count as present."""
    upload_s: Seconds
    """All durations count from when a peer hears of the commit, on its own clock."""
    round_s: Seconds

    def __post_init__(self) -> None:
        check_incarnation(self.leader_incarnation, name="leader_incarnation")

    @property
    def version(self) -> int:
        """The version that this round makes."""
        return 1 + max(parent.version for parent in self.parents)

    def index(self, peer: PeerId) -> int | None:
        for index, entry in enumerate(self.members):
            if entry.peer == peer:
                return index
        return None

    @property
    def majority(self) -> int:
        return len(self.members) // 2 + 1


# Gathering


class Join(_Message, frozen=True):
    """Member to leader: take me into the next round. The answer is any of the next section."""

    topic: Topic
    incarnation: Count
    join: Count
    """Counts my attempts, so that an answer to an older one is recognised."""
    head: Head
    merged_tokens: Count
    base_version: Count
    staleness: Count
    mark: Count
    steps: Count
    tokens: Count
    batch_tokens_max: Count
    step_time_s: Seconds
    bytes_per_s: BytesPerSecond
    reachable: bool
    codecs: Annotated[tuple[Name, ...], Meta(max_length=CODECS_MAX)]
    failed: Annotated[tuple[Peer, ...], Meta(max_length=FAILED_MAX)] = ()
    """Higher-ranked leaders that did not answer me."""
    site: Name | None = None
    """Who says the same name is near: one of us may carry all our work over the slow link."""

    def __post_init__(self) -> None:
        check_incarnation(self.incarnation)


class Noted(_Message, frozen=True):
    """Leader to member: I have your ``Join``; you hear from me within ``wait_s``, or I am dead."""

    join: Count
    wait_s: Seconds


class Redirect(_Message, frozen=True):
    """To a member: I am not the leader, as far as I see it is ``leader``."""

    join: Count
    leader: Peer


class Call(_Message, frozen=True):
    """Leader to the live peers of its group: somebody is due, come if you have enough."""

    head: Head | None
    wait_s: Seconds


class Pass(_Message, frozen=True):
    """Answer to ``Call``: do not wait for me."""

    reason: Reason


class Withdraw(_Message, frozen=True):
    """Member to leader: forget my ``Join``. A commit that names it is declined, by this incarnation
    for ever: whoever has said this never was in such a round and never shall be."""

    join: Count
    incarnation: Count

    def __post_init__(self) -> None:
        check_incarnation(self.incarnation)


class NoQuorum(_Message, frozen=True):
    """Leader to member: there will be no round now; everything stays pending."""

    join: Count
    reason: Reason


class Refused(_Message, frozen=True):
    """Leader to member: your ``Join`` cannot be taken, and why."""

    join: Count
    reason: Reason


class Committed(_Message, frozen=True):
    """The signed commit, to every member and reducer."""

    commit: Annotated[bytes, Meta(max_length=MESSAGE_MAX_BYTES - 1024)]
    signature: Annotated[bytes, Meta(max_length=64)]


class Declined(_Message, frozen=True):
    """Member or reducer to leader: your commit does not hold for me."""

    round: Digest
    reason: Reason
    absent: bool
    """As the incarnation that the roster names I never was in this round and never shall be: I
    have accepted no seal of it."""


# Standing


class Behind(_Message, frozen=True):
    """To a peer whose lineage is in my chain: this is where we are; ``source`` has it all."""

    head: Head
    source: Peer


class Compare(_Message, frozen=True):
    """To a peer whose lineage I do not know: this is my chain, see whether mine is in yours."""

    head: Head


class Closed(_Message, frozen=True):
    """The roster is closed without you: re-anchor on it, keep your work, wait for ``Finished``."""

    version: Count
    round: Digest


class Finished(_Message, frozen=True):
    """A round is over and made this version."""

    round: Digest
    head: Head


class Void(_Message, frozen=True):
    """It is decided that this round makes no version; what was offered is pending again."""

    round: Digest
    reason: Reason
    forsworn: bool
    """It had a seal, and a majority gave it up afterwards: somebody may have finished it before."""


# Reducing


class Report(_Message, frozen=True):
    """Reducer to coordinator: whose uploads of a slice I have in full, and whose never will be."""

    round: Digest
    slice: Index
    complete: Indices
    refused: Annotated[tuple[tuple[Index, Reason], ...], Meta(max_length=ROSTER_MAX)] = ()


class Reassign(_Message, frozen=True):
    """Coordinator to all: this slice is now reduced by another; send it what you kept."""

    round: Digest
    ballot: Ballot
    slice: Index
    reducer: Peer


class Missing(_Message, frozen=True):
    """Member to coordinator: sealed, but the merged slice does not come."""

    round: Digest
    slice: Index


# Sealing: single-decree Paxos, the acceptors are the roster, an empty seal is "void"


class Prepare(_Message, frozen=True):
    round: Digest
    ballot: Ballot


class Promise(_Message, frozen=True):
    round: Digest
    ballot: Ballot
    accepted_ballot: Ballot | None
    accepted: Indices
    reports: Annotated[tuple[tuple[Index, Indices], ...], Meta(max_length=ROSTER_MAX)] = ()
    """The slices that I reduce, and whose uploads of them I have in full."""


class Outbid(_Message, frozen=True):
    """I promised somebody with a higher ballot not to listen to yours."""

    round: Digest
    ballot: Ballot
    promised: Ballot


class Propose(_Message, frozen=True):
    round: Digest
    ballot: Ballot
    seal: Indices


class Accepted(_Message, frozen=True):
    round: Digest
    ballot: Ballot


class Sealed(_Message, frozen=True):
    """A majority accepted this seal. Final."""

    round: Digest
    ballot: Ballot
    seal: Indices


class Forswear(_Message, frozen=True):
    """Coordinator to all: sealed, but a slice is lost; promise never to finish this round."""

    round: Digest
    ballot: Ballot


class Forsworn(_Message, frozen=True):
    """I have not finished this round and never will; I stand on ``head``."""

    round: Digest
    head: Head | None


class Ask(_Message, frozen=True):
    """How did this round end? Only who knows, or has given it up himself, answers."""

    round: Digest


class Bits(_Message, frozen=True):
    """Member to member, after some rounds: the digest of all that I hold of this state."""

    lineage: Digest
    digest: Digest


Message: TypeAlias = (
    Join
    | Noted
    | Redirect
    | Call
    | Pass
    | Withdraw
    | NoQuorum
    | Refused
    | Committed
    | Declined
    | Behind
    | Compare
    | Closed
    | Finished
    | Void
    | Report
    | Reassign
    | Missing
    | Prepare
    | Promise
    | Outbid
    | Propose
    | Accepted
    | Sealed
    | Forswear
    | Forsworn
    | Ask
    | Bits
)

OWN = "own"
MERGED = "merged"
NOTHING = "nothing"


class Opening(_Part, frozen=True, kw_only=True):
    """First frame of a bulk stream. ``what``: the sender's own slice, or the merged one."""

    fragment: Index
    round: Digest
    slice: Index
    what: Annotated[str, Meta(pattern="^(own|merged|nothing)$")] = OWN
    commit: Annotated[bytes, Meta(max_length=MESSAGE_MAX_BYTES - 1024)]
    signature: Annotated[bytes, Meta(max_length=64)]
    riders: Indices = ()
    """With ``own``: members of the sender's site whose contributions are in it as well."""


_T = TypeVar("_T")

_encoder = msgspec.msgpack.Encoder()
_messages: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
_commits = msgspec.msgpack.Decoder(Commit)
_openings = msgspec.msgpack.Decoder(Opening)


def encode(message: Message) -> bytes:
    """The message's bytes on the wire. Raises ``ValueError`` for one that nobody would take."""
    data = bytes([VERSION]) + _encoder.encode(message)
    if len(data) > MESSAGE_MAX_BYTES:
        raise ValueError(
            f"{type(message).__name__} has {len(data)} bytes; at most {MESSAGE_MAX_BYTES} are sent"
        )
    return data


def decode(data: bytes) -> Message:
    """The message in these bytes. Raises ``BadMessage``, whatever they are."""
    return _decode(data, _messages)


def encode_commit(commit: Commit) -> bytes:
    """What is signed, and what the round's name is the digest of."""
    return _encoder.encode(commit)


@lru_cache(maxsize=128)
def decode_commit(data: bytes) -> Commit:
    """The commit in these bytes, if it makes sense in itself. Raises ``BadMessage``."""
    try:
        commit = _commits.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadMessage(f"not a commit: {error}") from error
    problem = _problem(commit)
    if problem is not None:
        raise BadMessage(f"not a commit: {problem}")
    return commit


def digest(commit: bytes) -> bytes:
    """The name of the round that this commit makes."""
    return blake3.blake3(commit).digest()


def encode_opening(opening: Opening) -> bytes:
    return bytes([VERSION]) + _encoder.encode(opening)


def decode_opening(data: bytes) -> Opening:
    """The header of a bulk stream. Raises ``BadMessage``, whatever the bytes are."""
    return _decode(data, _openings)


def _decode(data: bytes, decoder: msgspec.msgpack.Decoder[_T]) -> _T:
    if len(data) > MESSAGE_MAX_BYTES:
        raise BadMessage(f"{len(data)} bytes; at most {MESSAGE_MAX_BYTES} are read")
    if not data or data[0] != VERSION:
        raise BadMessage(f"message version {data[0] if data else None}; this peer speaks {VERSION}")
    try:
        return decoder.decode(memoryview(data)[1:])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadMessage(str(error)) from error


def _problem(commit: Commit) -> str | None:
    members = len(commit.members)
    parents = len(commit.parents)
    if len({entry.peer for entry in commit.members}) != members:
        return "a member is named twice"
    if len(commit.shares) != len(commit.reducers):
        return f"{len(commit.shares)} shares for {len(commit.reducers)} reducers"
    if sum(commit.shares) < 1:
        return "no slice has a share"
    if any(entry.parent >= parents for entry in commit.members):
        return "a member stands on a parent that is not named"
    for entry in commit.members:
        if entry.delegate is None:
            continue
        if commit.kind == "mix":
            return "a mix has no delegates: carriers bring states, not contributions"
        if entry.delegate >= members or commit.members[entry.delegate].delegate is not None:
            return "a delegate is no member, or has one of its own"
    if not (_is_sane(commit.eta) and _is_sane(commit.mu)):
        return f"eta {commit.eta} or mu {commit.mu} is not a number between 0 and 10"
    if commit.kind == "merge":
        if commit.carriers or commit.mix_tokens or commit.ancestors:
            return "a merge has no carriers, weights or chains"
        return None
    if commit.kind == "meld":
        if commit.carriers or commit.mix_tokens or len(commit.ancestors) != parents:
            return "a meld has a chain for each parent and no carriers: everybody is one"
        return None
    if not len(commit.carriers) == len(commit.mix_tokens) == len(commit.ancestors) == parents:
        return "a mix names a carrier, a weight and a chain for each parent"
    if any(carrier >= members for carrier in commit.carriers):
        return "a carrier is no member"
    return None


def _is_sane(factor: float) -> bool:
    return 0.0 <= factor <= 10.0
