"""One round machine without an owner, and what it takes and returns, made short for tests."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Set
from dataclasses import replace
from typing import TypeVar

import msgspec

from averaging.guard.rules.probation import Probation
from averaging.history.chain import Chain
from averaging.history.merged_map import MergedMap
from averaging.history.standing import Standing
from averaging.messages import (
    Behind,
    Commit,
    Committed,
    Head,
    Join,
    Link,
    Message,
    ParentCertificate,
    claim_of,
    encode_commit,
    link_claim,
    short_name,
)
from averaging.round.gathering.roster import Leader, compose
from averaging.round.interface.effects import Effect, Send
from averaging.round.interface.identity import Circumstances, Identity, SignedCommit
from averaging.round.interface.inputs import Due, Offer, Offered, Received
from averaging.round.interface.phase import Phase
from averaging.round.machine import FragmentRounds
from averaging.round.opinions.certificates import link_of
from averaging.round.opinions.fragment import Fragment
from averaging.round.opinions.neighbourhood import Neighbourhood
from averaging.round.sealing.paxos import Acceptor, Coordinator
from averaging.round.sealing.seals import owner_of
from averaging.rules.orders import RoundOrders
from averaging.rules.peer_view import PeerView
from averaging.rules.policy import RoundPolicy
from averaging.rules.succession import succession
from dht.identity import PeerId
from dht.protocol import SPOKEN, Range

Kind = TypeVar("Kind", bound=Effect)

TOPIC = bytes(range(16))
POLICY = RoundPolicy()
ME, ANNA, BORIS = PeerId("me"), PeerId("anna"), PeerId("boris")
SEEN_LONG = PeerView(first_seen=-1e3, heard_at=0.0, step_time_s=1.0)


def lineage(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def standing(*names: str, tokens: int = 100) -> Standing:
    links = [Link(i, lineage(name), i * tokens) for i, name in enumerate(names)]
    return Standing(len(names) - 1, links[-1].lineage, Chain(links), MergedMap())


def sign(peer: PeerId, data: bytes) -> bytes:
    return hashlib.sha256(peer.encode() + data).digest()


def identity(
    me: PeerId, policy: RoundPolicy = POLICY, *, fragment: int = 0, founder: bool = False
) -> Identity:
    return Identity(
        me=me,
        incarnation=7,
        fragment=fragment,
        topic=TOPIC,
        policy=policy,
        codecs=("f32", "int4"),
        encoded_bytes=lambda codec: 1 << 20,
        sign=lambda data: sign(me, data),
        verify=lambda peer, data, signature: sign(peer, data) == signature,
        founder=founder,
    )


def lost(peer: PeerId, peers: Neighbourhood) -> None:
    """A peer has failed, and was not heard for long."""
    peers.mark_failed(peer, -math.inf)


class Alone(Fragment):
    """What a part of a machine stands on, without the machine: it keeps what the part wants."""

    def __init__(
        self,
        who: Identity,
        others: tuple[PeerId, ...] = (),
        *,
        peers: Neighbourhood | None = None,
        effects: list[Effect] | None = None,
    ) -> None:
        super().__init__(
            who,
            Circumstances(),
            view=dict.fromkeys(others, SEEN_LONG),
            standing=standing("start"),
            electors=None,
            step=0,
            now=0.0,
        )
        self.peers = peers or self.peers
        self.effects = self.effects if effects is None else effects

    def send(self, to: PeerId, message: Message) -> None:
        """As it is, and to itself like to anybody."""
        self.effects.append(Send(to, message))

    under_way = None

    def stand(self, standing: Standing, *, fresh: bool) -> None: ...

    def attempt_failed(self) -> None: ...

    def leave_own_roster(self) -> None: ...

    def enter_own_round(self, signed: SignedCommit) -> None: ...

    def round_ended(
        self, round_id: bytes, reason: str, *, in_doubt: bool, may_be_finished: bool
    ) -> None: ...


def coordinator_of(
    commit: Commit,
    ballot: int,
    effects: list[Effect],
    *,
    acceptor: Acceptor | None = None,
    peers: Neighbourhood | None = None,
    refused: Set[PeerId] = frozenset(),
) -> Coordinator:
    """The coordinator of a ballot. It proposes to merge nothing of those that are ``refused``."""
    me = replace(
        identity(owner_of(ballot, commit)),
        refuses=lambda peer: "I do not like it" if peer in refused else None,
    )
    signed = SignedCommit(bytes(32), commit, b"", b"")
    alone = Alone(me, peers=peers, effects=effects)
    return Coordinator(alone, signed, ballot, list(commit.reducers), acceptor, now=0.0)


def neighbourhood() -> Neighbourhood:
    """A neighbourhood in which nobody has failed."""
    return Neighbourhood(identity(ME), Circumstances(), {}, now=0.0)


def machine(
    where: Standing | None = None,
    others: tuple[PeerId, ...] = (ANNA, BORIS),
    policy: RoundPolicy = POLICY,
    *,
    me: PeerId = ME,
    fragment: int = 0,
    founder: bool = False,
    absent: Mapping[PeerId, float | None] | None = None,
    reachable: bool = True,
    trains: bool = True,
    orders: RoundOrders | None = None,
    speaks: Range = SPOKEN,
) -> FragmentRounds:
    """A machine that has been here for long, beside live peers that train.

    ``orders``: of the run's owner, as this peer knew them from the start.
    """
    view = dict.fromkeys(others, SEEN_LONG)
    who = replace(identity(me, policy, fragment=fragment, founder=founder), speaks=speaks)
    who.book.orders = orders or RoundOrders()
    return FragmentRounds(
        who,
        Circumstances(reachable=reachable, trains=trains, absent=absent or {}),
        view=view,
        standing=where or standing("start"),
        electors=Probation(policy.probation, reputation=policy.reputation()),
        now=0.0,
    )


def certified(where: Standing, by: tuple[PeerId, ...] = (ANNA, BORIS)) -> Head:
    """The head of a standing, signed by these peers."""
    claim = link_claim(TOPIC, 0, link_of(where.head()))
    signatures = tuple((peer, sign(peer, claim)) for peer in by)
    return msgspec.structs.replace(where.head(), signatures=signatures)


def behind(where: Standing, *, found: str = "start") -> Behind:
    """The notice of a peer that stands further on; its head is certified."""
    return Behind(0, certified(where), lineage(found))


def offer(where: Standing, *, mark: int = 24, steps: int = 24) -> Offer:
    return Offer(mark, steps, steps * 100, where.version, where.lineage, 100)


def join(where: Standing, number: int = 1, **changes: object) -> Join:
    plain = Join(
        fragment=0,
        topic=TOPIC,
        incarnation=3,
        join=number,
        head=where.head(),
        base_version=where.version,
        staleness=0,
        mark=24,
        steps=24,
        tokens=2400,
        batch_tokens_max=100,
        bytes_per_s=1e6,
        reachable=True,
        codecs=("f32", "int4"),
    )
    return msgspec.structs.replace(plain, **changes)


def asks(sender: PeerId, where: Standing, number: int = 1, **changes: object) -> Received:
    """A signed join of this peer to ``ME``."""
    return Received(sender, signed(sender, join(where, number, **changes), leader=ME))


def signed(sender: PeerId, plain: Join, *, leader: PeerId) -> Join:
    return msgspec.structs.replace(plain, signatures=((1, sign(sender, claim_of(plain, leader))),))


def sent(effects: list[Effect], to: PeerId | None = None) -> list[Message]:
    return [e.message for e in effects if isinstance(e, Send) and to in (None, e.to)]


def of(effects: list[Effect], kind: type[Kind]) -> list[Kind]:
    return [effect for effect in effects if isinstance(effect, kind)]


def ranked(peers: tuple[PeerId, ...], head: Head) -> tuple[PeerId, ...]:
    """The order in which these peers lead those that stand on this head."""
    return succession(peers, topic=TOPIC, fragment=0, version=head.version, lineage=head.lineage)


def leading(
    where: Standing | None = None,
    *,
    reachable: bool = True,
    speaks: Range = SPOKEN,
    peers: int = 2,
) -> FragmentRounds:
    """A machine that is first in rank among its peers, who are so many."""
    for count in range(1, 200):
        others = tuple(PeerId(f"{letter}{count}") for letter in "abcd"[:peers])
        start = (where or standing("start")).head()
        if ranked((ME, *others), start)[0] == ME:
            return machine(where, others, reachable=reachable, speaks=speaks)
    raise AssertionError("no names found")


def phase(rounds: FragmentRounds) -> Phase:
    return rounds.phase


def joined(rounds: FragmentRounds, now: float = 1.0) -> PeerId:
    """Bring a machine to the point where it has sent its join; returns to whom."""
    rounds.handle(Due(), now)
    assert rounds.standing is not None
    effects = rounds.handle(Offered(offer(rounds.standing)), now)
    (message,) = [m for m in sent(effects) if isinstance(m, Join)]
    return next(e.to for e in effects if isinstance(e, Send) and e.message == message)


def seen_again(rounds: FragmentRounds, peer: PeerId, *, at: float) -> None:
    """The table of members has a peer again, after a call to it had failed."""
    view = rounds.peers.view
    assert isinstance(view, dict)
    seen = msgspec.structs.replace(view[peer], first_seen=at, heard_at=at)
    view[peer] = seen


def committed(
    rounds: FragmentRounds, leader: PeerId, *, signer: PeerId | None = None, **changes: object
) -> Committed:
    """A commit of this leader that names the machine as it has joined, with changes."""
    attempt = rounds.joining.attempt
    assert attempt is not None
    commit = compose(
        Leader(peer=leader, incarnation=1, topic=TOPIC, fragment=0, nonce=1),
        [
            (leader, signed(leader, join(standing("start")), leader=leader)),
            (ME, signed(ME, attempt.join, leader=leader)),
        ],
        POLICY,
        encoded_bytes=lambda codec: 1 << 20,
    )
    encoded = encode_commit(msgspec.structs.replace(commit, **changes))
    return Committed(0, encoded, sign(signer or leader, encoded))


def beside(where: Standing, place: int, *signers: PeerId) -> ParentCertificate:
    claim = link_claim(TOPIC, 0, link_of(where.head()))
    return ParentCertificate(
        place, tuple((short_name(peer), sign(peer, claim)) for peer in signers)
    )


def committed_with(
    rounds: FragmentRounds, leader: PeerId, where: Standing, *certificates: ParentCertificate
) -> Committed:
    """A commit with the machine's join, and with its leader's, which stands elsewhere."""
    attempt = rounds.joining.attempt
    assert attempt is not None
    commit = compose(
        Leader(peer=leader, incarnation=1, topic=TOPIC, fragment=0, nonce=1),
        [
            (leader, signed(leader, join(where), leader=leader)),
            (ME, signed(ME, attempt.join, leader=leader)),
        ],
        rounds.policy,
        encoded_bytes=lambda codec: 1 << 20,
    )
    place = [parent.lineage for parent in commit.parents].index(where.lineage)
    shown = tuple(msgspec.structs.replace(each, parent=place) for each in certificates)
    encoded = encode_commit(commit)
    return Committed(0, encoded, sign(leader, encoded), shown)


def fails(rounds: FragmentRounds, now: float) -> None:
    """An attempt of a machine to get into a round comes to nothing."""
    rounds.handle(Due(), now)
    rounds.handle(Offered(None), now)
