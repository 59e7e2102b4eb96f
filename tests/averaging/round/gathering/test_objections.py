"""Rounds of several lineages continue certified states only, whoever joins on another."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from averaging import messages as said
from averaging.messages import Committed, Head, Opening, ParentCertificate
from averaging.round.gathering.catching_up import REFUSALS_MIN
from averaging.round.gathering.leading import CATCHES_UP
from averaging.round.gathering.roster import Leader, compose
from averaging.round.interface.effects import Rebase, RefuseStream
from averaging.round.interface.inputs import Due, Offered, Received, StreamOpened
from averaging.round.interface.phase import Phase
from averaging.round.machine import FragmentRounds
from averaging.round.opinions.certificates import link_of
from averaging.rules.peer_view import PeerView
from averaging.rules.policy import RoundPolicy
from dht.identity import PeerId
from tests.averaging.round.machines import (
    ANNA,
    BORIS,
    ME,
    POLICY,
    TOPIC,
    beside,
    certified,
    committed_with,
    join,
    machine,
    of,
    offer,
    sent,
    sign,
    signed,
    standing,
)

CLARA, DORA, EVE = PeerId("clara"), PeerId("dora"), PeerId("eve")
FIVE = (ANNA, BORIS, CLARA, DORA, EVE)
GROUPS = replace(POLICY, group_size=4)
"""Six peers are two groups: a link has the signatures of two at least."""
MINE, THEIRS = standing("start", "mine"), standing("start", "theirs")
EARLIER = standing("start")


def joins(rounds: FragmentRounds, sender: PeerId, head: Head) -> tuple[said.Message, ...]:
    """The answer to a peer that joins on this head."""
    plain = msgspec.structs.replace(join(THEIRS), head=head)
    effects = rounds.handle(Received(sender, signed(sender, plain, leader=ME)), 1.0)
    return tuple(sent(effects, sender))


def is_refused(answers: tuple[said.Message, ...]) -> bool:
    return any(
        isinstance(answer, said.Refused) and "too few that count" in answer.reason
        for answer in answers
    )


def waiting(policy: RoundPolicy = GROUPS) -> tuple[FragmentRounds, PeerId]:
    for count in range(200):
        others = tuple(PeerId(f"{peer}{count}") for peer in FIVE)
        rounds = machine(MINE, others, policy)
        rounds.handle(Due(), 1.0)
        rounds.handle(Offered(offer(MINE)), 1.0)
        attempt = rounds.joining.attempt
        if attempt is not None and attempt.leader != ME:
            return rounds, attempt.leader
    raise AssertionError("no names found")


@pytest.mark.parametrize("policy", [GROUPS, POLICY], ids=["several groups", "a healed fork"])
def test_a_leader_refuses_an_established_member_that_joins_on_an_invented_lineage(
    policy: RoundPolicy,
) -> None:
    rounds = machine(MINE, FIVE, policy)

    assert is_refused(joins(rounds, ANNA, certified(THEIRS, (ANNA,))))
    assert rounds.open_roster is None or ANNA not in rounds.open_roster.joins


@pytest.mark.parametrize("policy", [GROUPS, POLICY], ids=["several groups", "a healed fork"])
def test_a_leader_admits_a_join_on_a_lineage_that_enough_have_signed(policy: RoundPolicy) -> None:
    rounds = machine(MINE, FIVE, policy)

    assert not is_refused(joins(rounds, ANNA, certified(THEIRS, (ANNA, BORIS, CLARA))))


def test_a_leader_admits_a_join_on_a_version_that_it_went_through_itself() -> None:
    """A peer that is left behind cannot show enough signatures where too few that count stand with
    it."""
    rounds = machine(MINE, FIVE, GROUPS)

    answers = joins(rounds, ANNA, certified(EARLIER, (ANNA,)))

    assert not is_refused(answers)
    assert not any(isinstance(answer, said.Behind) for answer in answers)


def test_a_member_enters_a_commit_with_a_version_that_it_went_through_itself() -> None:
    rounds, leader = waiting()
    message = committed_with(rounds, leader, EARLIER, beside(EARLIER, 1, leader))

    rounds.handle(Received(leader, message), 2.0)

    assert rounds.phase is Phase.ENTERED


def test_signatures_of_joins_on_one_lineage_add_up() -> None:
    rounds = machine(MINE, FIVE, GROUPS)

    assert is_refused(joins(rounds, ANNA, certified(THEIRS, (ANNA,))))
    assert not is_refused(joins(rounds, BORIS, certified(THEIRS, (BORIS,))))


@pytest.mark.parametrize("policy", [GROUPS, POLICY], ids=["several groups", "a healed fork"])
def test_a_member_declines_a_commit_with_a_lineage_that_its_leader_invented(
    policy: RoundPolicy,
) -> None:
    rounds, leader = waiting(policy)
    message = committed_with(rounds, leader, THEIRS, beside(THEIRS, 1, leader))

    answers = sent(rounds.handle(Received(leader, message), 2.0), leader)

    declined = [answer for answer in answers if isinstance(answer, said.Declined)]
    assert declined and "have signed version 1" in declined[0].reason
    assert rounds.own_round is None


def test_a_member_enters_a_commit_beside_which_the_certificates_come() -> None:
    rounds, leader = waiting()
    others = tuple(rounds.peers.view)
    message = committed_with(rounds, leader, THEIRS, beside(THEIRS, 1, leader, *others))

    rounds.handle(Received(leader, message), 2.0)

    assert rounds.phase is Phase.ENTERED


def test_false_signatures_and_those_of_strangers_are_no_certificate() -> None:
    rounds, leader = waiting()
    first, second, *_ = rounds.peers.view
    strangers = beside(THEIRS, 1, PeerId("sybil 1"), PeerId("sybil 2"))
    forged = ParentCertificate(
        1, ((said.short_name(first), bytes(32)), (said.short_name(second), bytes(32)))
    )
    message = committed_with(rounds, leader, THEIRS, strangers, forged)

    rounds.handle(Received(leader, message), 2.0)

    assert rounds.own_round is None


def opened_by(leader: PeerId, message: Committed) -> StreamOpened:
    round_id = said.digest(message.commit)
    opening = Opening(
        fragment=0,
        round=round_id,
        slice=0,
        commit=message.commit,
        signature=message.signature,
    )
    return StreamOpened(leader, opening)


def test_a_commit_that_a_stream_brings_first_is_waited_for_and_not_declined() -> None:
    rounds, leader = waiting()
    others = tuple(rounds.peers.view)
    message = committed_with(rounds, leader, THEIRS, beside(THEIRS, 1, leader, *others))

    effects = rounds.handle(opened_by(leader, message), 2.0)
    assert of(effects, RefuseStream) and not sent(effects, leader)

    rounds.handle(Received(leader, message), 3.0)
    assert rounds.phase is Phase.ENTERED


def test_a_leader_shows_each_member_the_certificates_of_the_states_of_others() -> None:
    rounds = machine(MINE, FIVE, GROUPS)
    link = link_of(THEIRS.head())
    claim = said.link_claim(TOPIC, 0, link)
    rounds.certificates.hear(link, tuple((p, sign(p, claim)) for p in (ANNA, BORIS, CLARA)), 1.0)
    commit = compose(
        Leader(peer=ME, incarnation=7, topic=TOPIC, fragment=0, nonce=1),
        [(who, join(where)) for who, where in ((ANNA, THEIRS), (DORA, MINE), (ME, MINE))],
        GROUPS,
        encoded_bytes=lambda codec: 1 << 20,
    )
    bare = Committed(0, said.encode_commit(commit), b"")
    place = [parent.lineage for parent in commit.parents].index(THEIRS.lineage)

    (shown,) = rounds.certificates.beside(bare, DORA, 1.0).certificates
    assert shown.parent == place and len(shown.signatures) >= 2
    theirs = rounds.certificates.beside(bare, ANNA, 1.0).certificates
    assert [each.parent for each in theirs] == [1 - place]


def test_a_leader_signs_its_own_state_for_the_others_though_it_has_shown_it_to_nobody() -> None:
    """Else they decline its commits: one that others join may not have sent its standing before."""
    rounds = machine(MINE, (ANNA,))
    commit = compose(
        Leader(peer=ME, incarnation=7, topic=TOPIC, fragment=0, nonce=1),
        [(ANNA, join(THEIRS)), (ME, join(MINE))],
        POLICY,
        encoded_bytes=lambda codec: 1 << 20,
    )

    bare = Committed(0, said.encode_commit(commit), b"")
    (shown,) = rounds.certificates.beside(bare, ANNA, 1.0).certificates

    assert [name for name, _ in shown.signatures] == [said.short_name(ME)]


def test_certificates_of_a_meld_have_spare_signatures() -> None:
    """Members that did not count one of two signers declined the melds that end a large run."""
    others = tuple(PeerId(f"peer-{number:02}") for number in range(15))
    rounds = machine(MINE, others, GROUPS)
    joins_ = []
    for number, peer in enumerate(others):
        where = standing("start", f"of {number}")
        claim = said.link_claim(TOPIC, 0, link_of(where.head()))
        signatures = tuple((each, sign(each, claim)) for each in others)
        rounds.certificates.hear(link_of(where.head()), signatures, 1.0)
        joins_.append((peer, join(where)))
    commit = compose(
        Leader(peer=ME, incarnation=7, topic=TOPIC, fragment=0, nonce=1),
        joins_,
        GROUPS,
        encoded_bytes=lambda codec: 1 << 20,
    )

    bare = Committed(0, said.encode_commit(commit), b"")
    shown = rounds.certificates.beside(bare, others[0], 1.0).certificates

    needed = rounds.certificates.parent_needed(1.0)
    assert {len(each.signatures) for each in shown} == {needed + 2}


def test_certificates_of_many_lineages_fit_a_message() -> None:
    policy = replace(POLICY, group_size=64)
    others = tuple(PeerId(f"peer-{number:03}" + "x" * 44) for number in range(63))
    rounds = machine(MINE, others, policy)
    heads = []
    for number, peer in enumerate(others):
        head = standing("start", f"of {number}").head()
        claim = said.link_claim(TOPIC, 0, link_of(head))
        rounds.certificates.hear(
            link_of(head), tuple((each, sign(each, claim)) for each in others), 1.0
        )
        heads.append((peer, join(standing("start", f"of {number}"))))
    commit = compose(
        Leader(peer=ME, incarnation=7, topic=TOPIC, fragment=0, nonce=1),
        sorted(heads),
        policy,
        encoded_bytes=lambda codec: 1 << 20,
    )
    bare = Committed(0, said.encode_commit(commit), bytes(64))

    said.encode(rounds.certificates.beside(bare, others[0], 1.0))  # no error


def refused(
    rounds: FragmentRounds, by: PeerId, now: float, *, reason: str = said.UNPROVEN
) -> list[said.Message]:
    attempt = rounds.joining.attempt
    number = attempt.join.join if attempt is not None else 1
    return sent(rounds.handle(Received(by, said.Refused(0, number, reason)), now))


def test_a_refused_peer_asks_those_that_finished_with_it_for_signatures() -> None:
    rounds = machine(MINE, FIVE, GROUPS)
    rounds.catching_up.fellows = (ANNA, BORIS, ME)

    asked = refused(rounds, CLARA, 1.0)
    assert [type(message) for message in asked] == [said.Compare, said.Compare]

    claim = said.link_claim(TOPIC, 0, link_of(MINE.head()))
    answer = said.Compare(
        0, msgspec.structs.replace(MINE.head(), signatures=((BORIS, sign(BORIS, claim)),))
    )
    rounds.handle(Received(BORIS, answer), 2.0)
    assert rounds.certificates.is_proven(2.0)
    assert not refused(rounds, CLARA, 3.0), "there is nothing to ask for"


def test_a_peer_signs_for_another_on_the_same_link_once() -> None:
    rounds = machine(MINE, FIVE, GROUPS)
    claim = said.link_claim(TOPIC, 0, link_of(MINE.head()))
    theirs = msgspec.structs.replace(MINE.head(), signatures=((ANNA, sign(ANNA, claim)),))

    (answer,) = sent(rounds.handle(Received(ANNA, said.Compare(0, theirs)), 1.0), ANNA)
    assert isinstance(answer, said.Compare)
    assert {peer for peer, _ in answer.head.signatures} == {ME, ANNA}
    assert not sent(rounds.handle(Received(ANNA, said.Compare(0, answer.head)), 1.0))


def test_a_peer_does_not_answer_itself() -> None:
    """Seed 9 of the storms with liars, who send under any name."""
    rounds = machine(MINE, FIVE, GROUPS)

    assert not sent(rounds.handle(Received(ME, said.Compare(0, MINE.head())), 1.0))


@pytest.mark.parametrize("policy", [GROUPS, POLICY], ids=["several groups", "a healed fork"])
def test_a_peer_refused_in_vain_takes_a_certified_state_however_light(
    policy: RoundPolicy,
) -> None:
    heavy = standing("start", "mine", tokens=150)
    rounds = machine(heavy, FIVE, policy)
    head = certified(THEIRS, (ANNA, BORIS, CLARA))

    def rebases() -> bool:
        effects = rounds.handle(Received(ANNA, said.Compare(0, head)), 1.0)
        return bool([e for e in of(effects, Rebase) if isinstance(e, Rebase) and e.gives_way])

    for _ in range(REFUSALS_MIN):
        assert not rebases()
        refused(rounds, ANNA, 1.0)
    assert rebases()


def test_a_peer_that_is_ahead_alone_goes_back_after_the_time_of_a_round() -> None:
    """The others gave up the round that it has finished. With a quorum of all nobody could go on
    (seed 10 of the storms with probation)."""
    rounds = machine(standing("start", "one", "mine"), FIVE)
    behind = certified(standing("start", "one"), (ANNA, BORIS, CLARA))

    def goes_back(now: float) -> bool:
        effects = rounds.handle(Received(ANNA, said.Compare(0, behind)), now)
        return bool([e for e in of(effects, Rebase) if isinstance(e, Rebase) and e.gives_way])

    for _ in range(REFUSALS_MIN):
        refused(rounds, ANNA, 1.0)
    late = 1.0 + POLICY.round_s
    assert isinstance(rounds.peers.view, dict)
    for peer in FIVE:
        rounds.peers.view[peer] = PeerView(first_seen=-1e3, heard_at=late)
    assert not goes_back(late - 0.1)
    assert goes_back(late)


@pytest.mark.parametrize(
    ("all_have", "reason"),
    [(True, said.UNPROVEN), (False, said.UNPROVEN), (True, CATCHES_UP)],
    ids=["all have signed", "one has not", "others come to it"],
)
def test_a_peer_goes_back_at_once_from_a_version_that_all_its_members_have_signed(
    all_have: bool, reason: str
) -> None:
    """A partition ended while two pairs had a round each. Nobody else would come to either version,
    and the six were stuck in that fragment for the time of a round (spacing_experiment, seed 1).

    Refusals of leaders that were on their way to its version counted as well: a peer wrote its work
    off, came back to the version that had it, and called it lost (soak storm 17)."""
    mine = standing("start", "one", "mine")
    rounds = machine(mine, FIVE)
    rounds.catching_up.fellows = (ME, ANNA)
    if all_have:
        signed = certified(mine, (ANNA,))
        rounds.certificates.hear(link_of(signed), signed.signatures, 1.0)
    for _ in range(REFUSALS_MIN):
        refused(rounds, BORIS, 1.0, reason=reason)

    behind = certified(standing("start", "one"), (BORIS, CLARA, DORA))
    effects = rounds.handle(Received(BORIS, said.Compare(0, behind)), 2.0)

    assert bool(of(effects, Rebase)) == (all_have and reason == said.UNPROVEN)


def test_a_peer_that_is_ahead_alone_is_shown_the_certificate_to_go_back_to() -> None:
    """Earlier, the peer had to wait until it met the peers that had signed one by one (live storm
    65)."""
    rounds = machine(standing("start", "one"), FIVE)
    rounds.handle(
        Received(BORIS, said.Compare(0, certified(standing("start", "one"), (BORIS,)))), 1.0
    )

    answers = joins(rounds, ANNA, certified(standing("start", "one", "mine"), (ANNA,)))

    shown, refusal = answers
    assert isinstance(refusal, said.Refused) and refusal.another_leads
    assert isinstance(shown, said.Compare)
    assert {peer for peer, _ in shown.head.signatures} == {ME, BORIS}


def test_a_peer_that_can_prove_its_state_keeps_it() -> None:
    rounds = machine(MINE, FIVE, GROUPS)
    rounds.handle(Received(BORIS, said.Compare(0, certified(MINE, (BORIS,)))), 1.0)
    for _ in range(2 * REFUSALS_MIN):
        refused(rounds, ANNA, 1.0)

    head = certified(THEIRS, (ANNA, BORIS, CLARA))
    assert not of(rounds.handle(Received(ANNA, said.Compare(0, head)), 1.0), Rebase)


def test_a_stuck_peer_takes_the_word_of_one() -> None:
    rounds = machine(MINE, FIVE, GROUPS)
    link = THEIRS.chain.tip
    late = 1.0 + POLICY.doubt_s
    assert isinstance(rounds.peers.view, dict)
    assert is_refused(joins(rounds, ANNA, certified(THEIRS, (ANNA,))))
    for peer in FIVE:
        rounds.peers.view[peer] = PeerView(first_seen=-1e3, heard_at=late)
    for _ in range(3):
        assert not rounds.parents.may_join(link, late)
        rounds.catching_up.attempt_failed()
    rounds.certificates.input_taken()
    assert rounds.parents.may_join(link, late)
