"""One peer reads joins and commits of another protocol number."""

from __future__ import annotations

import msgspec
import pytest

from averaging.messages import (
    Committed,
    Declined,
    Join,
    Refused,
    claim_of,
    decode_commit,
    encode_commit,
)
from averaging.round.gathering.roster import Leader, compose
from averaging.round.interface.inputs import Received
from averaging.round.interface.phase import Phase
from averaging.round.machine import FragmentRounds
from dht.identity import PeerId
from tests.averaging.next_protocol import SPOKEN, next_protocol  # noqa: F401
from tests.averaging.round.machines import (
    ME,
    POLICY,
    TOPIC,
    asks,
    join,
    joined,
    leading,
    machine,
    phase,
    sent,
    sign,
    standing,
)

pytestmark = pytest.mark.usefixtures("next_protocol")


def signed_for(sender: PeerId, plain: Join, leader: PeerId, *numbers: int) -> Join:
    """The join with its sender's signatures for these numbers."""
    made = tuple((number, sign(sender, claim_of(plain, leader, number))) for number in numbers)
    return msgspec.structs.replace(plain, signatures=made)


def waiting() -> tuple[FragmentRounds, PeerId]:
    """A machine that has sent its join, and to whom."""
    for count in range(50):
        rounds = machine(None, (PeerId(f"a{count}"), PeerId(f"b{count}")), speaks=SPOKEN)
        leader = joined(rounds)
        if leader != ME:
            return rounds, leader
    raise AssertionError("no names found")


def commit_of(rounds: FragmentRounds, leader: PeerId, number: int, *signs: int) -> Committed:
    """A commit of this number, for which its leader has signed its own join for ``signs``."""
    attempt = rounds.joining.attempt
    assert attempt is not None
    leaders = signed_for(leader, join(standing("start")), leader, *signs)
    commit = compose(
        Leader(peer=leader, incarnation=1, topic=TOPIC, fragment=0, nonce=1, protocol=number),
        [(leader, leaders), (ME, attempt.join)],
        POLICY,
        encoded_bytes=lambda codec: 1 << 20,
    )
    encoded = encode_commit(commit)
    return Committed(0, encoded, sign(leader, encoded))


@pytest.mark.parametrize("number", [1, 2])
def test_a_commit_of_either_number_is_entered_if_all_have_signed_for_it(number: int) -> None:
    rounds, leader = waiting()
    rounds.handle(Received(leader, commit_of(rounds, leader, number, 1, 2)), 2.0)
    assert phase(rounds) is Phase.ENTERED


@pytest.mark.parametrize(("number", "signed"), [(1, 2), (2, 1)])
def test_a_commit_of_a_number_that_a_member_has_not_signed_for_is_declined(
    number: int, signed: int
) -> None:
    """A leader cannot raise the number above what a member speaks, nor make up its consent."""
    rounds, leader = waiting()
    made = commit_of(rounds, leader, number, signed)
    stolen = signed_for(leader, join(standing("start")), leader, signed)
    commit = decode_commit(made.commit)
    members = tuple(
        msgspec.structs.replace(entry, signature=stolen.signed_for(signed))
        if entry.peer == leader
        else entry
        for entry in commit.members
    )
    encoded = encode_commit(msgspec.structs.replace(commit, members=members))
    forged = Committed(0, encoded, sign(leader, encoded))
    (answer,) = sent(rounds.handle(Received(leader, forged), 2.0), leader)
    assert isinstance(answer, Declined)
    assert answer.reason == f"{leader} did not sign what it says of it"


def test_a_join_has_a_signature_for_each_number_that_its_sender_speaks() -> None:
    rounds, leader = waiting()
    attempt = rounds.joining.attempt
    assert attempt is not None
    assert attempt.join == signed_for(ME, attempt.join, leader, 1, 2)
    assert attempt.join.signed_for(1) != attempt.join.signed_for(2)


def test_a_join_is_refused_unless_all_of_its_signatures_are_good_that_a_commit_may_show() -> None:
    for numbers, good in (((1,), True), ((2,), True), ((1, 2), True), ((2, 3), True)):
        rounds = leading(speaks=SPOKEN)
        sender = sorted(rounds.peers.view)[0]
        whole = signed_for(sender, join(standing("start")), ME, *numbers)
        effects = rounds.handle(Received(sender, whole), 1.0)
        assert (rounds.open_roster is not None) is good, (numbers, sent(effects, sender))
    for signatures, why in (
        (((1, b"x" * 32),), "its signature is not yours"),
        (((2, b"x" * 32),), "its signature is not yours"),
        ((), "you have signed it for no protocol that I speak"),
        (((3, b"x" * 32),), "for no protocol that I speak"),
    ):
        rounds = leading(speaks=SPOKEN)
        sender = sorted(rounds.peers.view)[0]
        plain = asks(sender, standing("start")).message
        assert isinstance(plain, Join)
        forged = msgspec.structs.replace(plain, signatures=signatures)
        (answer,) = sent(rounds.handle(Received(sender, forged), 1.0), sender)
        assert isinstance(answer, Refused) and why in answer.reason, answer
