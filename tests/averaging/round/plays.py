"""Short plays of round machines: changes of phase that storms hardly ever meet.

``tests/averaging/virtual/test_storms.py`` compares what machines do in storms and in these plays
with the table in the machine's docstring.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from averaging import messages
from averaging.messages import Message
from averaging.round.gathering.catching_up import REFUSALS_MIN
from averaging.round.gathering.joining import LEADERS_TRIED_MAX
from averaging.round.interface.effects import Effect
from averaging.round.interface.inputs import (
    CaughtUp,
    Due,
    Folded,
    GiveWay,
    Input,
    Leave,
    LinkLost,
    MergedArrived,
    Offered,
    OrdersChanged,
    Progressed,
    Received,
    SliceMerged,
    StreamOpened,
    Tick,
)
from averaging.round.interface.phase import Phase
from averaging.round.machine import FragmentRounds
from averaging.rules.orders import RoundOrders
from dht.identity import PeerId
from tests.averaging.round import machines
from tests.averaging.round.machines import (
    ANNA,
    BORIS,
    ME,
    POLICY,
    asks,
    behind,
    certified,
    committed,
    leading,
    machine,
    offer,
    ranked,
    sign,
    standing,
)
from tests.averaging.round.phases import Entry, Observed

# Short plays: what storms hardly ever meet


def idle() -> FragmentRounds:
    return machine(reachable=False)


def wanted() -> FragmentRounds:
    rounds = idle()
    rounds.handle(Due(), 1.0)
    return rounds


def joining() -> FragmentRounds:
    rounds = wanted()
    rounds.handle(Offered(offer(standing("start"))), 1.0)
    return rounds


def promised() -> FragmentRounds:
    rounds = joining()
    leader, number = leader_of(rounds)
    rounds.handle(Received(leader, messages.Noted(0, number)), 1.0)
    return rounds


def left_by_all() -> FragmentRounds:
    """The leader of a round of three. The links of both others have broken, and one has
    withdrawn."""
    rounds = leading()
    rounds.handle(Due(), 1.0)
    rounds.handle(Offered(offer(standing("start"))), 1.0)
    for other in sorted(rounds.peers.view):
        rounds.handle(asks(other, standing("start")), 1.0)
    assert rounds.phase is Phase.ENTERED
    for other in sorted(rounds.peers.view):
        rounds.handle(LinkLost(other), 1.0)
    rounds.handle(one_withdraws(rounds), 1.5)
    return rounds


def leads_one() -> FragmentRounds:
    """The leader of a round of two."""
    names = (PeerId(f"a{count}") for count in range(100))
    head = standing("start").head()
    rounds = machine(others=(next(name for name in names if ranked((ME, name), head)[0] == ME),))
    rounds.handle(Due(), 1.0)
    rounds.handle(Offered(offer(standing("start"))), 1.0)
    rounds.handle(asks(max(rounds.peers.view), standing("start")), 1.0)
    assert rounds.phase is Phase.ENTERED
    return rounds


def that_one_declines(rounds: FragmentRounds) -> Input:
    assert rounds.own_round is not None
    declined = messages.Declined(0, rounds.own_round.id, "not in my rounds", absent=False)
    return Received(max(rounds.peers.view), declined)


def that_one_leads_a_later_attempt(rounds: FragmentRounds) -> Input:
    rounds.handle(Progressed(48, 1.0, waits=True), 1.9)
    later = rounds.pacemaker.attempt + 1
    return Received(max(rounds.peers.view), messages.Call(0, standing("start").head(), 9.0, later))


def one_withdraws(rounds: FragmentRounds) -> Input:
    assert rounds.own_round is not None
    member = min(rounds.peers.view)
    (entry,) = [each for each in rounds.own_round.commit.members if each.peer == member]
    return Received(member, messages.Withdraw(0, entry.join, entry.incarnation))


def one_joins_anew(rounds: FragmentRounds) -> Input:
    """A member that has given the round up."""
    return asks(max(rounds.peers.view), standing("start"), number=7)


def leads_one_and_is_due() -> FragmentRounds:
    """The leader of a round of two, which has made the steps of another cycle meanwhile."""
    rounds = leads_one()
    rounds.handle(Progressed(60, 1.0), 62.0)
    return rounds


def mutual(rounds: FragmentRounds) -> Input:
    """The leader joins the machine that it has noted."""
    return asks(leader_of(rounds)[0], standing("start"))


def promised_to_one_of_lower_rank() -> FragmentRounds:
    rounds = leading(reachable=False)
    rounds.handle(Due(), 1.0)
    rounds.handle(Offered(offer(standing("start"))), 1.0)
    leader, number = leader_of(rounds)
    rounds.handle(Received(leader, messages.Noted(0, number)), 1.0)
    return rounds


def after_many(rounds: FragmentRounds) -> FragmentRounds:
    """At the last of as many leaders as may be tried, which ranks second."""
    attempt, second = rounds.joining.attempt, other_than_leader(rounds)
    assert attempt is not None
    rounds.joining.attempt = msgspec.structs.replace(
        attempt, leader=second, leaders_tried=LEADERS_TRIED_MAX
    )
    return rounds


def promised_after_many() -> FragmentRounds:
    return after_many(promised())


def joining_after_many() -> FragmentRounds:
    return after_many(joining())


def joining_a_last_time() -> FragmentRounds:
    """The last leader that may be tried has got the join a second time."""
    rounds = joining_after_many()
    assert rounds.joining.attempt is not None
    rounds.joining.attempt = msgspec.structs.replace(rounds.joining.attempt, resent=True)
    return rounds


def call_of_the_first(rounds: FragmentRounds) -> Input:
    return Received(other_than_leader(rounds), messages.Call(0, standing("start").head(), 10.0))


def catching() -> FragmentRounds:
    rounds = idle()
    rounds.handle(Received(ANNA, messages.Compare(0, certified(standing("start", "one")))), 1.0)
    return rounds


def folding() -> FragmentRounds:
    rounds = machine(others=(), founder=True)
    rounds.handle(Due(), 1.0)
    rounds.handle(Offered(offer(standing("start"))), 1.0)
    return rounds


def leader_of(rounds: FragmentRounds) -> tuple[PeerId, int]:
    """The leader that a machine has joined, and the number of the join."""
    attempt = rounds.joining.attempt
    assert attempt is not None
    return attempt.leader, attempt.join.join


def other_than_leader(rounds: FragmentRounds) -> PeerId:
    (other,) = {ANNA, BORIS} - {leader_of(rounds)[0]}
    return other


def sent_to_the_other(rounds: FragmentRounds) -> Input:
    leader, number = leader_of(rounds)
    return Received(leader, messages.Redirect(0, number, other_than_leader(rounds)))


def called() -> FragmentRounds:
    rounds = wanted()
    rounds.handle(Received(ANNA, messages.Call(0, standing("start").head(), 10.0)), 1.0)
    return rounds


def a_commit_that_does_not_hold(rounds: FragmentRounds) -> Input:
    leader, _ = leader_of(rounds)
    return Received(leader, committed(rounds, leader, eta=2.0))


def from_leader(answer: Callable[[int], Message]) -> Callable[[FragmentRounds], Input]:
    def given(rounds: FragmentRounds) -> Input:
        leader, number = leader_of(rounds)
        return Received(leader, answer(number))

    return given


def stream_with_a_false_commit(rounds: FragmentRounds) -> Input:
    """The leader's commit comes with a stream, and does not hold: it has other settings."""
    leader, _ = leader_of(rounds)
    message = committed(rounds, leader, eta=0.123)
    opening = messages.Opening(
        fragment=0,
        round=messages.digest(message.commit),
        slice=0,
        commit=message.commit,
        signature=message.signature,
    )
    return StreamOpened(leader, opening)


def the_owner_pauses(rounds: FragmentRounds) -> Input:
    rounds.identity.book.orders = RoundOrders(paused="the owner has paused it")
    return OrdersChanged()


def entered_with_slices_of_others() -> FragmentRounds:
    """All merged slices are here; their makers claim other contributors than will be sealed."""
    rounds = promised()
    leader, _ = leader_of(rounds)
    rounds.handle(Received(leader, committed(rounds, leader)), 1.0)
    part = rounds.own_round
    assert part is not None
    for index in range(len(part.reducers)):
        rounds.handle(MergedArrived(part.id, index, bytes(32), (0,)), 1.5)
    return rounds


def sealed_before_my_slice_is_merged() -> FragmentRounds:
    """All merged slices of others are here, with other contributors than were sealed."""
    rounds = machine()
    rounds.handle(Due(), 1.0)
    rounds.handle(Offered(offer(standing("start"))), 1.0)
    leader, _ = leader_of(rounds)
    rounds.handle(Received(leader, committed(rounds, leader)), 1.0)
    part = rounds.own_round
    assert part is not None
    for index in set(range(len(part.reducers))) - set(part.reducer.slices):
        rounds.handle(MergedArrived(part.id, index, bytes(32), (0,)), 1.5)
    rounds.handle(sealed_by_all(rounds), 1.8)
    return rounds


def my_slice_is_merged(rounds: FragmentRounds) -> Input:
    part = rounds.own_round
    assert part is not None
    return SliceMerged(part.id, min(part.reducer.slices), bytes(32))


def sealed_before_a_slice_is_here() -> FragmentRounds:
    rounds = promised()
    leader, _ = leader_of(rounds)
    rounds.handle(Received(leader, committed(rounds, leader)), 1.0)
    rounds.handle(sealed_by_all(rounds), 1.8)
    return rounds


def a_slice_of_other_contributors(rounds: FragmentRounds) -> Input:
    part = rounds.own_round
    assert part is not None
    return MergedArrived(part.id, 0, bytes(32), (0,))


def entered_and_behind() -> FragmentRounds:
    """In a round, this peer has heard of a version that it lacks."""
    rounds = promised()
    leader, _ = leader_of(rounds)
    rounds.handle(Received(leader, committed(rounds, leader)), 1.0)
    rounds.handle(Received(ANNA, messages.Compare(0, certified(AHEAD))), 1.5)
    return rounds


def leads_unproven() -> FragmentRounds:
    """A leader whose state was refused again and again, as too few have signed it. A certified one
    joins."""
    where = standing("start", "mine", tokens=100)
    rounds = leading(where)
    one, two = sorted(rounds.peers.view)
    for _ in range(REFUSALS_MIN):
        rounds.handle(Received(one, messages.Refused(0, 0, messages.UNPROVEN)), 1.0)
    rounds.handle(Due(), 1.0)
    rounds.handle(Offered(offer(where)), 1.0)
    theirs = standing("start", "theirs", tokens=100)
    rounds.handle(asks(one, theirs, head=certified(theirs, (one, two))), 1.0)
    return rounds


def leads_and_holds() -> FragmentRounds:
    """A leader that catches up with a peer that has joined it. Another one is further ahead."""
    heads = [where.head() for where in (standing("start"), AHEAD, FURTHER)]
    pairs = ((PeerId(f"a{count}"), PeerId(f"b{count}")) for count in range(10_000))
    one, two = next(
        pair for pair in pairs if all(ranked((ME, *pair), head)[0] == ME for head in heads)
    )
    rounds = machine(others=(one, two))
    rounds.handle(asks(one, AHEAD, head=certified(AHEAD, (one, two))), 1.0)
    rounds.handle(asks(two, FURTHER, head=certified(FURTHER, (one, two))), 1.0)
    return rounds


def the_last_one_passes(rounds: FragmentRounds) -> Input:
    return Received(max(rounds.peers.view), messages.Pass(0, "I follow another leader"))


def void_by_its_leader(rounds: FragmentRounds) -> Input:
    part = rounds.own_round
    assert part is not None
    return Received(
        part.commit.leader, messages.Void(0, part.id, "too few uploads", forsworn=False)
    )


def sealed_by_all(rounds: FragmentRounds) -> Input:
    part, seal = rounds.own_round, (0, 1)
    assert part is not None
    vote = messages.vote(part.id, 0, seal)
    votes = tuple((index, sign(e.peer, vote)) for index, e in enumerate(part.commit.members))
    return Received(part.commit.leader, messages.Sealed(0, part.id, 0, seal, votes))


def in_doubt() -> FragmentRounds:
    """A machine that does not know how its last round ended."""
    message = of_another_machine()
    commit = messages.decode_commit(message.commit)
    (entry,) = [each for each in commit.members if each.peer == ME]
    rounds = idle()
    rounds.doubting.begin(
        messages.digest(message.commit), commit, entry.mark, 1.0, several_groups=False
    )
    return rounds


def of_another_machine() -> messages.Committed:
    rounds = promised()
    return committed(rounds, leader_of(rounds)[0])


def forsworn_by_one_ahead(rounds: FragmentRounds) -> Input:
    message = of_another_machine()
    answer = messages.Forsworn(0, messages.digest(message.commit), certified(AHEAD))
    return Received(messages.decode_commit(message.commit).leader, answer)


AHEAD, FURTHER = standing("start", "one"), standing("start", "one", "two")
FROM_AHEAD: tuple[Message, ...] = (
    behind(AHEAD),
    messages.Call(0, certified(AHEAD), 10.0),
    messages.Compare(0, certified(AHEAD)),
    messages.Finished(0, bytes(32), certified(AHEAD)),
)
BEFORE_A_COMMIT = (idle, wanted, joining, promised)
LATE = 1e4

PLAYS: list[tuple[Callable[[], FragmentRounds], Callable[[FragmentRounds], Input], float]] = [
    *(
        (play, lambda rounds, message=message: Received(ANNA, message), 2.0)
        for play in BEFORE_A_COMMIT
        for message in FROM_AHEAD
    ),
    *(
        (play, lambda rounds: asks(ANNA, AHEAD, head=certified(AHEAD)), 2.0)
        for play in BEFORE_A_COMMIT
    ),
    *(
        (play, lambda rounds, given=given: given, 2.0)
        for play in (wanted, joining, promised)
        for given in (Leave(), GiveWay("another goes first"))
    ),
    *(
        (play, from_leader(answer), 2.0)
        for play in (joining, promised)
        for answer in (
            lambda number: messages.Refused(0, number, "no"),
            lambda number: messages.Refused(0, number, "no", another_leads=True),
            lambda number: messages.Closed(0, 1, bytes(32)),
            lambda number: messages.Redirect(0, number, PeerId("clara")),
        )
    ),
    *((play, lambda rounds: Tick(), LATE) for play in (wanted, catching, folding)),
    *((play, the_owner_pauses, 2.0) for play in (wanted, joining, promised)),
    *((play, lambda rounds: CaughtUp(AHEAD), 2.0) for play in (wanted, joining, promised)),
    (left_by_all, one_withdraws, 1.5 + POLICY.margin_s),
    (left_by_all, lambda rounds: LinkLost(max(rounds.peers.view)), 1.5 + POLICY.margin_s),
    (left_by_all, one_joins_anew, 1.5 + POLICY.margin_s),
    (leads_one, that_one_declines, 2.0),
    (leads_one_and_is_due, one_joins_anew, 63.0),
    (leads_one, that_one_leads_a_later_attempt, 2.0),
    (promised_to_one_of_lower_rank, mutual, 2.0),
    (promised, stream_with_a_false_commit, 2.0),
    (entered_with_slices_of_others, sealed_by_all, 2.0),
    (sealed_before_my_slice_is_merged, my_slice_is_merged, 2.0),
    (sealed_before_a_slice_is_here, a_slice_of_other_contributors, 2.0),
    (entered_and_behind, void_by_its_leader, 2.0),
    (joining_after_many, call_of_the_first, 2.0),
    (promised_after_many, call_of_the_first, 2.0),
    (promised_after_many, lambda rounds: Tick(), LATE),
    (joining_a_last_time, lambda rounds: Tick(), LATE),
    (idle, lambda rounds: Due(), 2.0),
    (wanted, lambda rounds: Offered(None), 2.0),
    (joining_after_many, sent_to_the_other, 2.0),
    (promised_after_many, sent_to_the_other, 2.0),
    (joining, a_commit_that_does_not_hold, 2.0),
    (called, lambda rounds: Received(ANNA, messages.Closed(0, 1, bytes(32))), 2.0),
    (folding, lambda rounds: Folded(), 2.0),
    (catching, lambda rounds: CaughtUp(AHEAD), 2.0),
    (leads_and_holds, lambda rounds: CaughtUp(AHEAD), 2.0),
    (in_doubt, forsworn_by_one_ahead, 2.0),
    (leads_unproven, the_last_one_passes, 2.0),
    (leads_unproven, lambda rounds: LinkLost(max(rounds.peers.view)), 2.0),
    (leads_unproven, lambda rounds: Tick(), 10.0),
    (promised, a_commit_that_does_not_hold, 2.0),
]


def seen_in_plays(monkeypatch: pytest.MonkeyPatch) -> set[Entry]:
    monkeypatch.setattr(machines, "FragmentRounds", Observed)
    monkeypatch.setattr(Observed, "seen", set())
    for play, given, at in PLAYS:
        rounds = play()
        effects: list[Effect] = rounds.handle(given(rounds), at)
        assert isinstance(effects, list)
    return Observed.seen
