"""Who coordinates a round, and when another voter may: no voter alone takes a round from others."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from averaging import messages as said
from averaging.history.standing import Standing
from averaging.messages import Message, encode_commit
from averaging.round.gathering.roster import Leader, compose
from averaging.round.interface.effects import Effect, Strike
from averaging.round.interface.identity import SignedCommit
from averaging.round.interface.inputs import LinkLost, Received, Tick
from averaging.round.opinions.certificates import link_of
from averaging.round.participation import Participation
from averaging.round.sealing.paxos import Coordinator
from averaging.round.sealing.seals import VOID, ballot_of
from averaging.round.sealing.takeover import WAITS_MAX
from dht.identity import PeerId
from tests.averaging.round.machines import (
    ME,
    POLICY,
    TOPIC,
    Alone,
    certified,
    coordinator_of,
    identity,
    join,
    sent,
    sign,
    signed,
    standing,
)

LEADER, USURPER, DORA = PeerId("leader"), PeerId("usurper"), PeerId("dora")
PEERS = (LEADER, ME, USURPER, DORA)
BEGAN = 2.0


def commit_of_four() -> SignedCommit:
    where = standing("start")
    commit = compose(
        Leader(peer=LEADER, incarnation=1, topic=TOPIC, fragment=0, nonce=1),
        [(peer, signed(peer, join(where), leader=LEADER)) for peer in PEERS],
        POLICY,
        encoded_bytes=lambda codec: 1 << 20,
    )
    encoded = encode_commit(commit)
    return SignedCommit(said.digest(encoded), commit, encoded, sign(LEADER, encoded))


class Part(Participation):
    """One member's part in a round of four, without a machine."""

    def __init__(self, me: PeerId) -> None:
        """It sees all four."""
        self.alone = Alone(identity(me), tuple(peer for peer in PEERS if peer != me))
        super().__init__(self.alone, commit_of_four(), now=BEGAN)
        self.begin(BEGAN, is_leader=me == LEADER)


def entered(me: PeerId = ME) -> Part:
    return Part(me)


def ballot_of_peer(part: Participation, peer: PeerId) -> int:
    voters = part.commit.voters
    place = voters.index(part.commit.index(peer) or 0)
    return ballot_of(place, voters=len(voters), above=0)


def hears(part: Part, sender: PeerId, message: Message, now: float) -> list[Message]:
    part.alone.effects.clear()
    part.handle(Received(sender, message), now)
    return sent(part.alone.effects)


def prepare(part: Participation, ballot: int) -> Message:
    return said.Prepare(0, part.id, ballot)


def propose_void(part: Participation, ballot: int) -> Message:
    return said.Propose(0, part.id, ballot, VOID, sign(USURPER, said.vote(part.id, ballot, VOID)))


def reassign(part: Participation, ballot: int) -> Message:
    other = next(peer for peer in PEERS if peer != part.reducers[0])
    return said.Reassign(0, part.id, ballot, 0, other)


def forswear(part: Participation, ballot: int) -> Message:
    return said.Forswear(0, part.id, ballot)


def usual_wait_s(part: Participation) -> float:
    return part.commit.upload_s + 2 * POLICY.margin_s


@pytest.mark.parametrize("me", [ME, LEADER])
@pytest.mark.parametrize("begins", [prepare, propose_void, reassign, forswear])
def test_no_later_ballot_is_followed_before_the_coordinator_has_had_its_time(
    begins: Callable[[Participation, int], Message], me: PeerId
) -> None:
    """One voter that proposed the empty seal in every round left a fragment without versions."""
    part = entered(me)
    ballot, reducers = ballot_of_peer(part, USURPER), list(part.reducers)

    answers = hears(part, USURPER, begins(part, ballot), BEGAN + usual_wait_s(part) - 0.1)

    assert part.is_open and part.reducers == reducers
    assert part.coordinating_peer == LEADER and part.acceptor.promised == 0
    assert part.coordinates == (me == LEADER)
    assert not any(isinstance(each, said.Accepted | said.Forsworn) for each in answers)

    hears(part, USURPER, begins(part, ballot), BEGAN + usual_wait_s(part))
    assert part.coordinating_peer == USURPER or not part.is_open


def test_a_coordinator_that_is_heard_is_followed_for_longer() -> None:
    part = entered()
    late = BEGAN + usual_wait_s(part) - 0.1
    part.heard(LEADER, late)
    ballot = ballot_of_peer(part, DORA)
    assert not hears(part, DORA, prepare(part, ballot), late + POLICY.margin_s - 0.1)
    promised, *_ = hears(part, DORA, prepare(part, ballot), late + POLICY.margin_s)
    assert isinstance(promised, said.Promise)


def test_a_coordinator_that_only_shows_that_it_lives_is_replaced_in_the_end() -> None:
    """It kept all others in the round until the deadline."""
    part = entered()
    ballot, second = ballot_of_peer(part, DORA), 0
    answers: list[Message] = []
    while not any(isinstance(each, said.Promise) for each in answers):
        second += 1
        part.heard(LEADER, BEGAN + second)
        answers = hears(part, DORA, prepare(part, ballot), BEGAN + second)
        assert second < part.commit.round_s
    assert second <= WAITS_MAX * usual_wait_s(part) + POLICY.margin_s


@pytest.mark.parametrize("gone", ["its link broke", "it is out of the round"])
def test_a_coordinator_that_is_gone_is_replaced_at_once(gone: str) -> None:
    part = entered()
    if gone == "its link broke":
        part.handle(LinkLost(LEADER), BEGAN)
    else:
        vow = said.Forsworn(0, part.id, None, sign(LEADER, said.vow(part.id)))
        hears(part, LEADER, vow, BEGAN)
    later = BEGAN + POLICY.suspect_s
    promised, *_ = hears(part, DORA, prepare(part, ballot_of_peer(part, DORA)), later)
    assert isinstance(promised, said.Promise)


def test_a_coordinator_gets_no_more_time_by_another_ballot_of_its_own() -> None:
    """A leader that began one after the other kept all in its rounds until the deadline."""
    part = entered()
    ballot = ballot_of_peer(part, LEADER)
    assert not hears(part, LEADER, prepare(part, ballot), BEGAN + 1.0)


def test_no_third_voter_interrupts_the_ballot_of_a_successor() -> None:
    part = entered()
    now = BEGAN + usual_wait_s(part)
    hears(part, DORA, prepare(part, ballot_of_peer(part, DORA)), now)
    above = part.takeover.ballot
    voters = part.commit.voters
    place = voters.index(part.commit.index(USURPER) or 0)
    higher = ballot_of(place, voters=len(voters), above=above)
    assert not hears(part, USURPER, prepare(part, higher), now + 0.1)


@pytest.mark.parametrize("by", [(USURPER,), (USURPER, DORA), (LEADER,)])
def test_a_round_is_left_as_finished_without_this_peer_on_the_word_of_its_leader_or_of_several(
    by: tuple[PeerId, ...],
) -> None:
    """One that said so at once had all others leave a round whose uploads took longer."""
    part = entered()
    made = certified(standing("start", "next"), by=(LEADER, USURPER, DORA))
    part.alone.certificates.hear(link_of(made), made.signatures, BEGAN)
    for peer in by:
        hears(part, peer, said.Finished(0, part.id, made), BEGAN)
    part.handle(Tick(), BEGAN + POLICY.margin_s + POLICY.resend_s)
    assert part.is_open == (by == (USURPER,))


def later_coordinator(effects: list[Effect]) -> Coordinator:
    return coordinator_of(
        commit_of_four().commit, ballot_of(1, voters=len(PEERS), above=0), effects
    )


def test_a_successor_whom_most_do_not_follow_yet_reports_to_the_coordinator_before_it() -> None:
    """The others heard that one. Without its reports, those of a reducer whose link had broken for
    a moment, it sealed nothing."""
    part = entered()
    part.handle(LinkLost(LEADER), BEGAN)
    part.handle(Tick(), part.takeover.at)
    assert part.coordinator is not None and part.coordinates
    ballot = part.coordinator.ballot
    assert ballot and part.coordinating_peer == LEADER and not part.acceptor.promised

    part.handle(Tick(), part.takeover.at)
    assert part.coordinates and part.coordinator.ballot > ballot, "it tries again"


def test_a_successor_follows_its_own_ballot_when_its_promise_completes_a_majority() -> None:
    part = entered()
    part.handle(LinkLost(LEADER), BEGAN)
    part.handle(Tick(), part.takeover.at)
    assert part.coordinator is not None
    ballot = part.coordinator.ballot
    text = said.promise_text(part.id, ballot, None, ())
    promises = [
        hears(part, peer, said.Promise(0, part.id, ballot, None, (), sign(peer, text)), BEGAN + 4.0)
        for peer in (DORA, USURPER)
    ]
    assert promises == [[], [prepare(part, ballot)]] and part.coordinating_peer == LEADER
    hears(part, ME, prepare(part, ballot), BEGAN + 4.0)
    assert part.coordinating_peer == ME and part.acceptor.promised == ballot


def test_a_successor_whom_most_do_not_follow_yet_votes_for_the_coordinator_before_it() -> None:
    """Of two voters one had lost the leader for a moment. A promise to itself kept it from every
    vote for the leader, and both stood still for 46 s."""
    part = entered()
    part.handle(LinkLost(LEADER), BEGAN)
    part.handle(Tick(), part.takeover.at)
    assert part.coordinator is not None
    seal = tuple(range(len(PEERS)))
    signature = sign(LEADER, said.vote(part.id, 0, seal))
    (answer,) = hears(part, LEADER, said.Propose(0, part.id, 0, seal, signature), BEGAN + 4.1)
    assert isinstance(answer, said.Accepted)


@pytest.mark.parametrize("promises", [True, False])
def test_a_voter_is_named_for_silence_only_when_none_can_follow_the_coordinator_before(
    promises: bool,
) -> None:
    """Until then it may hear that one, and follows no later ballot."""
    part = entered()
    named: set[PeerId] = set()
    while not named:
        at, ballot = part.takeover.at, 0 if part.coordinator is None else part.coordinator.ballot
        part.alone.effects.clear()
        part.handle(Tick(), at)
        assert part.coordinates and part.coordinator is not None
        assert part.coordinator.ballot > ballot, "it tries again"
        named = {effect.peer for effect in part.alone.effects if isinstance(effect, Strike)}
        if promises:
            text = said.promise_text(part.id, part.coordinator.ballot, None, ())
            promise = said.Promise(0, part.id, part.coordinator.ballot, None, (), sign(DORA, text))
            hears(part, DORA, promise, at + 1.0)
    assert at >= BEGAN + WAITS_MAX * usual_wait_s(part)
    assert named == {LEADER, USURPER, *(() if promises else (DORA,))}


def test_a_coordinator_that_nobody_votes_for_begins_another_ballot() -> None:
    """They have promised a higher one to a peer that is gone."""
    part = entered(LEADER)
    assert part.coordinator is not None
    for index, reducer in enumerate(part.reducers):
        part.coordinator.reported(reducer, index, tuple(range(len(PEERS))), (), BEGAN)
    assert part.coordinator.value is not None
    part.handle(Tick(), part.takeover.at)
    assert part.coordinates and part.coordinator.ballot > 0


@pytest.mark.parametrize("leads_later", [False, True])
def test_a_member_that_has_gone_on_to_another_round_is_not_waited_for_in_this_one(
    leads_later: bool,
) -> None:
    """Its word that it has given this one up was lost. The leader waited for its upload until the
    deadline, and both stood still for 36 s."""
    part = entered(LEADER)
    assert part.coordinator is not None
    where, attempt = standing("start"), part.alone.pacemaker.attempt
    entry = next(each for each in part.commit.members if each.peer == DORA)
    life = {"incarnation": entry.incarnation}

    def again(number: int, *, where: Standing = where) -> Message:
        if leads_later:
            return said.Call(0, where.head(), 9.0, attempt + number - entry.join)
        return join(where, number, **life)

    for same in (again(entry.join), again(entry.join + 1, where=standing("start", "next"))):
        hears(part, DORA, same, BEGAN + 1.0)
        assert not part.coordinator.declined_indices(), "it is in this round, or has finished it"
    hears(part, DORA, again(entry.join + 1), BEGAN + 1.0)
    assert part.coordinator.declined_indices() == {part.commit.index(DORA)}
