"""The messages of a round of one fragment, and their encoding.

A message is one byte, the protocol number of its form (``dht.protocol``), and one msgpack array
that starts with the message's name. The types bound every size, so a decoded message is small;
bytes that do not decode raise ``BadMessage``, which the receiver counts. Nothing here decides
anything, and no message holds numbers of a model: slices travel on bulk streams, which begin with
an ``Opening``.

A **round** is named by the blake3 digest of its commit (``Digest``), or, before there is a commit,
by the fragment alone: a peer is in at most one round of a fragment.

To add a message, add a class with a bounded type for each field, and add it to ``Message``.
``tests/averaging/message_examples.py`` then needs an example of it.
"""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache
from typing import Annotated, Any, Final, TypeAlias, TypeVar

import blake3
import msgspec
from msgspec import Meta, Struct

from dht import protocol
from dht.decoding import UNDECODABLE, decoded
from dht.identity import PeerId

MESSAGE_MAX_BYTES = 64 << 10
"""Largest control message. A commit of 64 members with their chains is half of it."""

ROSTER_MAX = 64
LINKS_MAX = 32
CODECS_MAX = 16

DIRECTIVE_MAX_BYTES = 8 << 10
"""Largest directive of the run's owner that a message carries."""

Digest: TypeAlias = Annotated[bytes, Meta(min_length=32, max_length=32)]
Topic: TypeAlias = Annotated[bytes, Meta(min_length=16, max_length=16)]
Peer: TypeAlias = Annotated[PeerId, Meta(min_length=1, max_length=64)]
COUNT_MAX = 2**53 - 1
"""Largest count: a double represents every integer up to it exactly."""

Count: TypeAlias = Annotated[int, Meta(ge=0, le=COUNT_MAX)]
Index: TypeAlias = Annotated[int, Meta(ge=0, lt=2**16)]
Reason: TypeAlias = Annotated[str, Meta(max_length=300)]
Name: TypeAlias = Annotated[str, Meta(min_length=1, max_length=40)]
SitePass: TypeAlias = Annotated[str, Meta(min_length=1, max_length=160)]
"""Public key and signature (``averaging.rules.sites``)."""
Seconds: TypeAlias = Annotated[float, Meta(ge=0.0, le=1e7)]
BytesPerSecond: TypeAlias = Annotated[float, Meta(ge=0.0, le=1e15)]
Signature: TypeAlias = Annotated[bytes, Meta(max_length=64)]
Indices: TypeAlias = Annotated[tuple[Index, ...], Meta(max_length=ROSTER_MAX)]
Ballot: TypeAlias = Count
Protocol: TypeAlias = Annotated[int, Meta(ge=1, le=2**16)]
"""A protocol number (``dht.protocol``)."""
Votes: TypeAlias = Annotated[tuple[tuple[Index, Signature], ...], Meta(max_length=ROSTER_MAX)]
"""Signatures of members under the same ``vote``, with their indices in the roster."""
Signatures: TypeAlias = Annotated[tuple[tuple[Peer, Signature], ...], Meta(max_length=ROSTER_MAX)]
"""Signatures of peers under the same ``link_claim``."""
ShortName: TypeAlias = Annotated[bytes, Meta(min_length=8, max_length=8)]
"""A peer that the receiver knows, by ``short_name``: a seventh of the bytes of its name."""


class BadMessage(ValueError):
    """Bytes from a peer that are not a valid message."""


class _Part(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A part of a message."""


class _Message(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    fragment: Index


class _OfRound(_Message, frozen=True):
    """A message about one round."""

    round: Digest


class _OfBallot(_OfRound, frozen=True):
    """A message about one ballot of a round's coordinator."""

    ballot: Ballot


# Parts


class Link(_Part, frozen=True, order=True, gc=False):
    """One version of a chain, and the tokens of all peers that were merged up to it."""

    version: Count
    lineage: Digest
    tokens: Count


Links: TypeAlias = Annotated[tuple[Link, ...], Meta(max_length=LINKS_MAX)]


class Head(_Part, frozen=True):
    """A peer's version and lineage, with a thinned-out chain, newest first.

    It is enough to find a common ancestor, which is exact when it is recent.
    """

    version: Count
    lineage: Digest
    links: Links
    signatures: Signatures = ()
    """Signatures of peers that have stood on the newest link; enough of them certify it."""


class Stamp(_Part, frozen=True):
    """The directive of the run's owner that a leader follows: its number, and its digest."""

    number: Annotated[int, Meta(ge=1, le=2**32)]
    digest: Topic


class Entry(_Part, frozen=True):
    """One member of a roster, as its ``Join`` described it. Its index is its rank."""

    peer: Peer
    incarnation: Count
    join: Count
    parent: Index
    """Index of the commit's parent that this member stands on."""
    base_version: Count
    staleness: Count
    mark: Count
    steps: Count
    tokens: Count
    """Tokens that count (``averaging.rules.weights.credited``)."""
    reachable: bool
    delegate: Index | None = None
    """Index of the member of its site that carries its contribution (``averaging.rules.sites``)."""
    claimed_tokens: Count | None = None
    """The tokens in the ``Join``, if not all of them count."""
    batch_tokens_max: Count = 0
    bytes_per_s: BytesPerSecond = 0.0
    site: SitePass | None = None
    signature: Signature = b""
    """The member's, under ``claim_in`` the commit."""
    level: Index = 0


class Commit(_Part, frozen=True, kw_only=True):
    """The members of a round and how it merges, as its leader decided. Signed; never changes."""

    topic: Topic
    fragment: Index
    leader: Peer
    leader_incarnation: Count
    nonce: Count
    """Distinguishes the commits of one incarnation of a leader."""
    parents: Annotated[tuple[Link, ...], Meta(min_length=1, max_length=ROSTER_MAX)]
    """The states that members stand on, one per distinct lineage, heaviest first."""
    ancestors: Annotated[tuple[Links, ...], Meta(max_length=ROSTER_MAX)] = ()
    """Each parent's thinned-out chain, if there are several. The new chain contains all of them."""
    members: Annotated[tuple[Entry, ...], Meta(min_length=1, max_length=ROSTER_MAX)]
    reducers: Annotated[tuple[Peer, ...], Meta(min_length=1, max_length=ROSTER_MAX)]
    """The reducer of each slice. Slices of a reducer that dies are reassigned during the round."""
    shares: Annotated[tuple[Count, ...], Meta(min_length=1, max_length=ROSTER_MAX)]
    """Sizes of the slices in proportion to each other, for ``averaging.numbers.layout``."""
    codec: Name
    merge: Name
    eta: float
    mu: float
    batch_tokens_max: Count
    """The largest batch of any member; tokens beyond steps times this do not count."""
    contributors_min: Count
    """A seal with fewer is void. Contributions that were refused as bad count as present."""
    upload_s: Seconds
    """Both durations count from when a peer receives the commit, on its own clock."""
    round_s: Seconds
    on_probation: Indices = ()
    """Members that do not count for the leader (``averaging.rules.electors``), ascending: their
    share is bounded, and they neither reduce nor vote. Members check it by their own views. Left
    out of the bytes if there are none.
    """
    codec_down: Name | None = None
    """Codec of merged displacements, if it is not that of uploads. Left out of the bytes, too."""
    level: Index = 0
    """Number of its level among the run's (``averaging.rules.line_levels``): its codecs, and the
    cycle after it. Left out of the bytes if it is the first."""
    directive: Stamp | None = None
    """The owner's directive that all members follow (``averaging.rules.orders``); left out, too."""
    protocol: Protocol = 1
    """The number of the form in which everything of this round is signed and hashed: all members
    have signed their joins for it. Left out if it is 1."""

    @property
    def melds(self) -> bool:
        """True if states travel besides displacements (``averaging.rules.mixing``): the members
        stand on several."""
        return len(self.parents) > 1

    @property
    def kind(self) -> str:
        """The name of the round for people."""
        return "meld" if self.melds else "merge"

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
    def displacement_codec(self) -> str:
        """The codec of uploaded displacements, without those of a meld's states."""
        return self.codec.partition("/")[0]

    @property
    def codecs(self) -> tuple[str, str]:
        """The codecs of uploads and of merged slices. In a meld each names those of states, too."""
        if self.codec_down is None:
            return self.codec, self.codec
        _, slash, states = self.codec.partition("/")
        return self.codec, self.codec_down + slash + states

    @property
    def voters(self) -> tuple[int, ...]:
        """Indices of the members whose votes count, ascending: the acceptors of its seal."""
        everybody = range(len(self.members))
        if not self.on_probation:
            return tuple(everybody)
        return tuple(index for index in everybody if index not in self.on_probation)

    @property
    def majority(self) -> int:
        """Number of voters that must agree."""
        return len(self.voters) // 2 + 1


# Gathering


class Join(_Message, frozen=True):
    """Member to leader: request to be in the next round. Answered by one of the messages below."""

    topic: Topic
    incarnation: Count
    join: Count
    """Number of the member's attempt, to recognise an answer to an earlier one."""
    head: Head
    base_version: Count
    staleness: Count
    mark: Count
    steps: Count
    tokens: Count
    batch_tokens_max: Count
    bytes_per_s: BytesPerSecond
    reachable: bool
    codecs: Annotated[tuple[Name, ...], Meta(max_length=CODECS_MAX)]
    level: Index = 0
    """Number of the first of the run's levels that the member's line carries."""
    attempt: Count = 0
    """The attempt at the version that the member is at."""
    site: SitePass | None = None
    """Peers that prove the same site are near: one may carry the work of all over the slow link."""
    signatures: Annotated[tuple[tuple[Protocol, Signature], ...], Meta(max_length=2)] = ()
    """The sender's, under ``claim_of``: all that a commit says of a member, for one leader, once
    for each protocol number. A commit is of a number that all members have signed."""
    leaves: bool = False
    """The member is about to leave: work that is not merged now is lost with it."""

    def signed_for(self, number: int) -> bytes:
        """The signature under the claim of this protocol number; empty if there is none."""
        return dict(self.signatures).get(number, b"")

    @property
    def protocols(self) -> frozenset[int]:
        """The protocol numbers of the rounds that the sender can be in."""
        return frozenset(number for number, _ in self.signatures)


class Noted(_Message, frozen=True):
    """Leader to member: the ``Join`` is noted. The roster closes within the quorum's time."""

    join: Count


class Redirect(_Message, frozen=True):
    """Answer to ``Join``: the sender is not the leader; as far as it knows, ``leader`` is, of this
    attempt."""

    join: Count
    leader: Peer
    attempt: Count = 0


class Call(_Message, frozen=True):
    """Leader to the live peers of its group: a peer is due; join if you have enough work."""

    head: Head
    wait_s: Seconds
    attempt: Count = 0
    """The attempt at the next version that it leads."""
    leaves: bool = False
    """A member is about to leave: little work is enough."""


class Coming(_Message, frozen=True):
    """Answer to ``Call``, each time: the sender joins when its snapshot is taken."""


class Pass(_Message, frozen=True):
    """Answer to ``Call``: the sender will not join."""

    reason: Reason


class Withdraw(_Message, frozen=True):
    """Member to leader: the ``Join`` is withdrawn.

    This incarnation declines every commit that names it: it never was in such a round and never
    will be.
    """

    join: Count
    incarnation: Count


UNPROVEN = "too few that count for me have signed the version that you stand on"
"""The reason of a leader to which a joiner's state is not certified: the joiner may give it up."""


class Refused(_Message, frozen=True):
    """Leader to member: the ``Join`` comes to nothing, and the reason; everything stays pending."""

    join: Count
    reason: Reason
    another_leads: bool = False
    """True if another leader may take the join: the sender leaves, or does not know the member's
    version. The member goes to that one at once."""


class ParentCertificate(_Part, frozen=True):
    """Signatures under a parent of a commit (``link_claim``) by peers that stand on it."""

    parent: Index
    signatures: Annotated[tuple[tuple[ShortName, Signature], ...], Meta(max_length=ROSTER_MAX)]


class Committed(_Message, frozen=True):
    """The signed commit, to every member and reducer."""

    commit: Annotated[bytes, Meta(max_length=MESSAGE_MAX_BYTES - 1024)]
    signature: Signature
    certificates: Annotated[tuple[ParentCertificate, ...], Meta(max_length=ROSTER_MAX)] = ()
    """Certificates of the parents that the receiver does not stand on
    (``averaging.round.gathering.objections``)."""


class Declined(_OfRound, frozen=True):
    """Member or reducer to leader: the sender does not take part in this commit."""

    reason: Reason
    absent: bool
    """True if the sender made the join in the roster, never was in this round and never will be: it
    has accepted no seal of it. (An agent that was restarted has not made the join.)
    """


# Standing


class Behind(_Message, frozen=True):
    """Notice to a peer whose lineage is in the sender's chain."""

    head: Head
    found: Digest
    """The receiver's lineage; the receiver may stand elsewhere when the message arrives."""


class Compare(_Message, frozen=True):
    """Notice to a peer whose lineage is unknown: find your lineage in this chain."""

    head: Head


class Closed(_Message, frozen=True):
    """The roster closed without the receiver: count from now, wait for ``Finished``."""

    version: Count
    round: Digest
    level: Index = 0
    """Level of the round: the next one is a cycle of that level away."""


class Finished(_OfRound, frozen=True):
    """A round is over and made this version."""

    head: Head


class Void(_OfRound, frozen=True):
    """A round makes no version, as is decided; offered work is pending again."""

    reason: Reason
    forsworn: bool
    """True if a majority gave up a seal: a member may have finished the round before."""
    ballot: Ballot = 0
    """The ballot of the coordinator that found it void."""
    votes: Votes = ()
    """Votes of a majority for the empty seal, or its vows if ``forsworn``; none if too few members
    were in the round."""


# Reducing


class Report(_OfRound, frozen=True):
    """Reducer to coordinator: whose uploads of a slice are complete, and whose are refused."""

    slice: Index
    complete: Indices
    refused: Annotated[tuple[tuple[Index, Reason], ...], Meta(max_length=ROSTER_MAX)] = ()


class Reassign(_OfBallot, frozen=True):
    """Coordinator to all: another peer reduces this slice; send it the upload that you kept."""

    slice: Index
    reducer: Peer


class Missing(_OfRound, frozen=True):
    """Member to coordinator: the round is sealed, but this merged slice does not arrive."""

    slice: Index


# Sealing: single-decree Paxos, the acceptors are the roster, an empty seal is "void"


class Prepare(_OfBallot, frozen=True):
    """Coordinator to acceptors: the first phase of Paxos."""


class Promise(_OfBallot, frozen=True):
    """Acceptor to coordinator: no lower ballot will be accepted; the last accepted seal is
    named."""

    accepted_ballot: Ballot | None
    accepted: Indices
    signature: Signature = b""
    """Under ``promise_text``: a voter that denies a vote convicts itself."""


class Propose(_OfBallot, frozen=True):
    """Coordinator to acceptors: the second phase of Paxos. An empty seal makes the round void."""

    seal: Indices
    signature: Signature = b""
    """Under ``vote``: a coordinator that proposes two seals in one ballot convicts itself."""


class Accepted(_OfBallot, frozen=True):
    """Acceptor to coordinator: it accepted the proposal of this ballot."""

    signature: Signature = b""
    """Under ``vote``: others are shown it."""


class Sealed(_OfBallot, frozen=True):
    """A majority accepted this seal. Final. A peer that passes it on shows the votes."""

    seal: Indices
    votes: Votes = ()


class Forswear(_OfBallot, frozen=True):
    """Coordinator to all: a slice of a sealed round is lost; vow never to finish the round."""


class Forsworn(_OfRound, frozen=True):
    """Answer to ``Forswear``: the sender has not finished this round and never will."""

    head: Head | None
    signature: Signature = b""
    """Under ``vow``: others are shown it."""


class Ask(_OfRound, frozen=True):
    """Question how a round ended. Only peers that know, or have given the round up, answer."""


class Bits(_Message, frozen=True):
    """Member to member, after some rounds: the digest of the sender's whole state."""

    lineage: Digest
    digest: Digest


class Accused(_Message, frozen=True):
    """Notice that the sender has a proof against a peer, by which it has banned it. A peer that
    lacks the proof asks for it (``averaging.guard.auditing``). The fragment means nothing."""

    proof: Digest
    peer: Peer


class Directed(_Message, frozen=True):
    """The newest directive of the run's owner that the sender knows."""

    directive: Annotated[bytes, Meta(max_length=DIRECTIVE_MAX_BYTES)]


class Suspected(_Message, frozen=True):
    """Notice that the sender's spot checks of a peer have failed. It proves nothing: a peer that
    checks contributions, too, looks at that peer's next. The fragment means nothing."""

    peer: Peer


Message: TypeAlias = (
    Join | Noted | Redirect | Call | Coming | Pass | Withdraw | Refused
    | Committed | Declined | Behind | Compare | Closed | Finished | Void
    | Report | Reassign | Missing
    | Prepare | Promise | Propose | Accepted | Sealed | Forswear | Forsworn | Ask
    | Bits | Accused | Directed | Suspected
)  # fmt: skip


class Opening(_Part, frozen=True, kw_only=True):
    """First frame of a bulk stream, on which the merged slice comes back."""

    fragment: Index
    round: Digest
    slice: Index
    gives: bool = True
    """False: the sender has nothing to give, and waits."""
    commit: Annotated[bytes, Meta(max_length=MESSAGE_MAX_BYTES - 1024)]
    signature: Signature
    riders: Indices = ()
    """Members of the sender's site whose contributions are in what it gives as well."""


_T = TypeVar("_T")

FIELDS_SINCE: Final[dict[type[Any], tuple[tuple[str, int], ...]]] = {}
"""Fields that are newer than the oldest protocol spoken, each with the number that brought it. They
are the last of their class, in this order. In the form of an older number they are left out."""

MESSAGES_SINCE: Final[dict[type[Any], int]] = {}
"""Messages that are newer than the oldest protocol spoken: peers of an older one are sent none."""

_encoder = msgspec.msgpack.Encoder()
_messages: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
_commits = msgspec.msgpack.Decoder(Commit)
_openings = msgspec.msgpack.Decoder(Opening)
_fields: msgspec.msgpack.Decoder[list[Any]] = msgspec.msgpack.Decoder(list[Any])
_signatures: msgspec.msgpack.Decoder[Signatures] = msgspec.msgpack.Decoder(Signatures)


def encode(message: Message, number: int = protocol.OLDEST) -> bytes:
    """Return the message's bytes in the form of this protocol number; all read the oldest one.

    Raises ``ValueError`` if they are too many to be read.
    """
    newest = FIELDS_SINCE.get(type(message), ())
    left_out = sum(since > number for _, since in newest)
    if left_out:
        fields = [type(message).__name__, *msgspec.structs.astuple(message)]
        body = _encoder.encode(fields[:-left_out])
    else:
        body = _encoder.encode(message)
    data = bytes([number]) + body
    if len(data) > MESSAGE_MAX_BYTES:
        raise ValueError(
            f"{type(message).__name__} has {len(data)} bytes; at most {MESSAGE_MAX_BYTES} are sent"
        )
    return data


def decode(data: bytes, spoken: protocol.Range = protocol.SPOKEN) -> Message:
    """Decode a message. Raises ``BadMessage``, whatever the bytes are."""
    return _decode(data, _messages, spoken)


def encode_commit(commit: Commit) -> bytes:
    """Return the bytes that are signed, and whose digest names the round."""
    fields = list(msgspec.structs.astuple(commit))
    for missing in (1, None, 0, None, ()):  # what most commits have nothing to say of
        if fields[-1] != missing:
            break
        del fields[-1]
    return _encoder.encode(fields)


def unpacked(
    data: bytes | memoryview,
    decoder: msgspec.msgpack.Decoder[_T],
    what: str,
    *,
    max_bytes: int | None = None,
) -> _T:
    """Decode bytes of another peer, whatever they are. Raises ``BadMessage``: they are not that."""
    try:
        return decoded(data, decoder.decode, what, max_bytes=max_bytes)
    except ValueError as error:
        raise BadMessage(str(error)) from error


@lru_cache(maxsize=128)
def decode_commit(data: bytes) -> Commit:
    """Decode a commit and check that it is consistent. Raises ``BadMessage``."""
    try:
        commit = _commits.decode(data)
    except UNDECODABLE as error:
        newer = _newer_protocol(data)
        reason = str(error) if newer is None else protocol.not_spoken(newer)
        raise BadMessage(f"not a commit: {reason}") from error
    problem = _problem(commit)
    if problem is not None:
        raise BadMessage(f"not a commit: {problem}")
    return commit


def digest(commit: bytes) -> bytes:
    """Return the name of the round that this commit makes."""
    return blake3.blake3(commit).digest()


def claim_of(join: Join, leader: PeerId, number: int = 1) -> bytes:
    """Return what a member signs with its join to this leader, for a round of this protocol.

    With the links of the parents, the claims of its members are all that a commit follows from.
    """
    return _claim(number, (join.topic, join.fragment, leader), join, join.head.lineage, join.tokens)


def claim_in(commit: Commit, entry: Entry) -> bytes:
    """Return what a member signed with its join, if its entry in the commit is true."""
    about = commit.topic, commit.fragment, commit.leader
    lineage = commit.parents[entry.parent].lineage
    tokens = entry.tokens if entry.claimed_tokens is None else entry.claimed_tokens
    return _claim(commit.protocol, about, entry, lineage, tokens)


def _claim(
    number: int, about: tuple[bytes, int, PeerId], said: Join | Entry, lineage: bytes, tokens: int
) -> bytes:
    # A member that signs it for a number agrees to a round whose commit, votes and claims are of
    # that form.
    started = said.base_version, said.staleness, said.mark, said.steps, tokens
    means = said.batch_tokens_max, said.bytes_per_s, said.reachable, said.site, said.level
    claim = (*about, said.incarnation, said.join, lineage, *started, *means)
    return b"shoal join %d " % number + _encoder.encode(claim)


def vote(round_id: bytes, ballot: int, seal: tuple[int, ...]) -> bytes:
    """Return what a member signs when it accepts this seal under this ballot."""
    return b"shoal vote 1 " + _encoder.encode((round_id, ballot, seal))


def promise_text(
    round_id: bytes, ballot: int, accepted_ballot: int | None, accepted: tuple[int, ...]
) -> bytes:
    """Return what a voter signs when it promises to ignore lower ballots than this one, and says
    what it has accepted last."""
    said = (round_id, ballot, accepted_ballot, accepted)
    return b"shoal promise 1 " + _encoder.encode(said)


def vow(round_id: bytes) -> bytes:
    """Return what a member signs when it vows never to finish this round."""
    return b"shoal vow 1 " + round_id


def link_claim(topic: bytes, fragment: int, link: Link) -> bytes:
    """Return what a peer that stands on this version of a fragment signs."""
    said = (topic, fragment, link.version, link.lineage, link.tokens)
    return b"shoal link 1 " + _encoder.encode(said)


@lru_cache(maxsize=1 << 14)
def short_name(peer: PeerId) -> bytes:
    """Return the first bytes of the hash of a peer's name. Nobody can make a name that has those
    of another peer; a peer with two names of its own that are alike only hides one of them."""
    return blake3.blake3(peer.encode()).digest(length=8)


def encode_signatures(signatures: Signatures) -> bytes:
    return _encoder.encode(signatures)


def decode_signatures(data: bytes) -> Signatures:
    """Decode signatures under a ``link_claim``. Raises ``BadMessage``, whatever the bytes are."""
    return unpacked(data, _signatures, "signatures")


def encode_opening(opening: Opening) -> bytes:
    """Return the header's bytes, in the form that all read: no number has changed it."""
    return bytes([protocol.OLDEST]) + _encoder.encode(opening)


def decode_opening(data: bytes) -> Opening:
    """Decode the header of a bulk stream. Raises ``BadMessage``, whatever the bytes are."""
    return _decode(data, _openings, protocol.SPOKEN)


def _decode(data: bytes, decoder: msgspec.msgpack.Decoder[_T], spoken: protocol.Range) -> _T:
    if len(data) > MESSAGE_MAX_BYTES:
        raise BadMessage(f"{len(data)} bytes; at most {MESSAGE_MAX_BYTES} are read")
    if not data:
        raise BadMessage("no bytes at all")
    oldest, newest = spoken
    if not oldest <= data[0] <= newest:
        raise BadMessage(protocol.not_spoken(data[0], spoken))
    try:
        message = decoder.decode(memoryview(data)[1:])
    except UNDECODABLE as error:
        raise BadMessage(str(error)) from error
    if MESSAGES_SINCE.get(type(message), oldest) > data[0]:
        raise BadMessage(f"a message of protocol {data[0]} that came with a later one")
    for field, since in FIELDS_SINCE.get(type(message), ()):
        if since > data[0] and getattr(message, field):
            raise BadMessage(f"{field} is of protocol {since}, the message of {data[0]}")
    return message


def _newer_protocol(commit: bytes) -> int | None:
    """The protocol number that bytes name which cannot be read as a commit, if it is too new.

    It has its place for ever, whatever fields follow it.
    """
    with suppress(*UNDECODABLE, IndexError):
        number = _fields.decode(commit)[Commit.__struct_fields__.index("protocol")]
        if isinstance(number, int) and number > protocol.NEWEST:
            return number
    return None


def _problem(commit: Commit) -> str | None:
    if not protocol.OLDEST <= commit.protocol <= protocol.NEWEST:
        return protocol.not_spoken(commit.protocol)
    members = len(commit.members)
    parents = len(commit.parents)
    if len({entry.peer for entry in commit.members}) != members:
        return "a member is named twice"
    if len(commit.shares) != len(commit.reducers):
        return f"{len(commit.shares)} shares for {len(commit.reducers)} reducers"
    if sum(commit.shares) < 1:
        return "no slice has a share"
    if any(entry.parent >= parents for entry in commit.members):
        return "a member stands on a parent that is not listed"
    for entry in commit.members:
        if entry.delegate is None:
            continue
        if entry.delegate >= members or commit.members[entry.delegate].delegate is not None:
            return "a delegate is not a member, or has a delegate of its own"
    if commit.on_probation:
        if list(commit.on_probation) != sorted(set(commit.on_probation)):
            return "its members on probation are not in order"
        if commit.on_probation[-1] >= members or not commit.voters:
            return "a member on probation is not a member, or all are"
    if not (_is_sane(commit.eta) and _is_sane(commit.mu)):
        return f"eta {commit.eta} or mu {commit.mu} is not a number between 0 and 10"
    if len(commit.ancestors) != (parents if commit.melds else 0):
        return "it has no chain for each of its parents, or one for a single parent"
    return None


def _is_sane(factor: float) -> bool:
    return 0.0 <= factor <= 10.0
