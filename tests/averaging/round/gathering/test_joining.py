"""A machine that wants to be led, or is alone: when it offers, and when it does not."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import msgspec
import pytest

from averaging import messages as said
from averaging.history.merged_map import Mark, MergedMap
from averaging.history.standing import Standing
from averaging.messages import Join
from averaging.round.interface.effects import Effect, Fold, GiveUp, Send, TakeSnapshot
from averaging.round.interface.inputs import (
    CaughtUp,
    Due,
    Leave,
    MergeBeforeLeaving,
    Offered,
    Progressed,
    Received,
    Tick,
)
from averaging.round.interface.phase import Phase
from averaging.round.machine import FragmentRounds
from averaging.round.opinions.fragment import OpenRoster
from averaging.rules.peer_view import SILENCE_MAX_S, PeerView
from averaging.rules.policy import ProbationPolicy
from dht.identity import PeerId
from tests.averaging.round.machines import (
    ANNA,
    BORIS,
    ME,
    POLICY,
    asks,
    behind,
    certified,
    joined,
    leading,
    lineage,
    machine,
    offer,
    phase,
    ranked,
    seen_again,
    sent,
    standing,
)


def wanted(effects: list[Effect]) -> bool:
    return any(isinstance(effect, TakeSnapshot) for effect in effects)


def when_due(rounds: FragmentRounds, now: float) -> str | None:
    """What a due peer does with its work; ``None``: nothing now."""
    if not wanted(rounds.handle(Due(), now)):
        return None
    assert rounds.standing is not None
    effects = rounds.handle(Offered(offer(rounds.standing)), now)
    if any(isinstance(effect, Fold) for effect in effects):
        return "folds"
    (leader,) = [e.to for e in effects if isinstance(e, Send) and isinstance(e.message, Join)]
    return f"joins {leader}"


def founder_beside(anna: PeerView) -> FragmentRounds:
    rounds = machine(others=(), founder=True)
    rounds.peers.view = {ANNA: anna}
    return rounds


ARRIVING = PeerView(first_seen=0.0, heard_at=0.0, trains=False, arrives=True)


def test_a_founder_keeps_the_state_that_a_newcomer_is_fetching() -> None:
    assert when_due(founder_beside(ARRIVING), 1.0) is None


@pytest.mark.parametrize("at", [31.0, 1000.0])
def test_a_founder_folds_again_when_the_newcomer_is_not_heard_any_more(at: float) -> None:
    assert when_due(founder_beside(ARRIVING), at) == "folds"


def test_a_keeper_leads_the_round_of_one_that_leaves() -> None:
    keeper = PeerView(first_seen=-1e3, heard_at=0.0, trains=False, keeps=True)
    rounds = machine(others=(), reachable=False)
    rounds.peers.view = {ANNA: keeper}
    rounds.handle(MergeBeforeLeaving(), 1.0)
    assert when_due(rounds, 1.0) == f"joins {ANNA}"


def test_a_keeper_beside_a_founder_changes_nothing() -> None:
    keeper = msgspec.structs.replace(ARRIVING, arrives=False)
    assert when_due(founder_beside(keeper), 1.0) == "folds"


def test_a_newcomer_that_never_trains_does_not_stop_a_founder_for_good() -> None:
    rounds = founder_beside(ARRIVING)
    rounds.handle(Due(), 1.0)
    late = 1.0 + POLICY.alone_s
    rounds.peers.view = {ANNA: msgspec.structs.replace(ARRIVING, heard_at=late)}
    assert when_due(rounds, late) == "folds"


def test_a_peer_beside_one_whose_trainer_stands_still_does_not_fold_at_once() -> None:
    """Two founders whose machine was busy each folded while the other one stood still for a second,
    and led two histories for half a minute."""
    still = PeerView(first_seen=-100.0, heard_at=0.0, trains=False, worked_at=0.0)
    rounds = founder_beside(still)
    assert when_due(rounds, 1.0) is None
    assert rounds.alone_until(1.0) == SILENCE_MAX_S
    rounds.peers.view = {ANNA: msgspec.structs.replace(still, heard_at=SILENCE_MAX_S)}
    assert when_due(rounds, SILENCE_MAX_S) == "folds"


def beside_nobody(absent: dict[PeerId, float | None], *, workers: tuple[PeerId, ...]) -> Wanted:
    """What a peer wants that is due beside nobody, and until when it waits for those it has lost.

    ``workers``: others whose work is in its state.
    """
    merged = MergedMap({peer: Mark(1, 24, 100) for peer in workers})
    rounds = machine(replace(standing("start"), merged=merged), others=(), absent=absent)
    return rounds.alone_until(1.0), when_due(rounds, 1.0)


Wanted: TypeAlias = tuple[float | None, str | None]
FOLDS: Wanted = None, "folds"


def waits(since: float) -> Wanted:
    return since + POLICY.alone_s, None


def test_a_peer_whose_partners_have_all_said_goodbye_folds_at_once() -> None:
    """Earlier nothing was merged for ten minutes, whatever the run's owner had ordered."""
    assert beside_nobody({ANNA: None, BORIS: None}, workers=(ANNA, BORIS, ME)) == FOLDS


def test_a_peer_that_has_lost_sight_of_one_that_trained_waits_for_it() -> None:
    assert beside_nobody({ANNA: None, BORIS: -20.0}, workers=(ANNA,)) == waits(since=-20.0)
    assert beside_nobody({ANNA: None, BORIS: -POLICY.alone_s}, workers=(ANNA,)) == FOLDS


def test_a_peer_that_comes_back_waits_for_those_that_worked_before() -> None:
    assert beside_nobody({}, workers=(ME, ANNA)) == waits(since=0.0)
    assert beside_nobody({BORIS: None}, workers=(ME, ANNA)) == waits(since=0.0)
    assert beside_nobody({}, workers=()) == waits(since=0.0), "it has met nobody yet"


def test_a_leader_that_falls_behind_keeps_no_empty_roster_open() -> None:
    """Earlier, the leader joined itself there again and again, and passed when called: its work was
    never merged."""
    rounds = leading()
    caller = next(iter(rounds.peers.view))
    rounds.handle(Due(), 1.0)
    rounds.handle(Offered(offer(standing("start"))), 1.0)
    assert rounds.open_roster is not None

    ahead = standing("start", "one")
    rounds.handle(
        Received(
            caller,
            said.Behind(0, certified(ahead, tuple(rounds.peers.view)), lineage("start")),
        ),
        1.1,
    )
    assert rounds.open_roster is None
    rounds.handle(CaughtUp(ahead), 1.2)

    rounds.handle(Progressed(100, 1.0, waits=True), 1.5)
    assert wanted(rounds.handle(Received(caller, said.Call(0, ahead.head(), 10.0)), 2.0))
    effects = rounds.handle(Offered(offer(ahead, mark=100)), 2.1)
    assert [type(message) for message in sent(effects, caller)] == [Join]


@pytest.mark.parametrize("joins", [False, True])
def test_a_state_that_comes_when_the_next_round_is_wanted_is_where_the_peer_stands(
    joins: bool,
) -> None:
    """The owner had taken it and the machine had not: all later work had a base that was not in its
    chain, and nobody had a newer state. A run of several groups never ended for such a peer."""
    rounds, ahead = machine(reachable=False), standing("start", "one")
    rounds.handle(Received(ANNA, behind(ahead)), 1.0)
    assert rounds.phase is Phase.CATCHING
    assert rounds.deadline is not None
    now = rounds.deadline
    for peer in (ANNA, BORIS):
        seen_again(rounds, peer, at=now)
    rounds.handle(Tick(), now)
    rounds.handle(Due(), now)
    if joins:
        rounds.handle(Offered(offer(standing("start"))), now)
    assert rounds.phase is (Phase.JOINING if joins else Phase.WANTED)

    rounds.handle(CaughtUp(ahead), now + 1.0)

    assert rounds.standing is ahead and phase(rounds) is Phase.IDLE


def test_an_abandoned_offer_leaves_no_empty_roster_open() -> None:
    rounds = leading()
    rounds.handle(Due(), 1.0)
    rounds.handle(Offered(offer(standing("start"))), 1.0)

    rounds.handle(Leave(), 2.0)

    assert rounds.open_roster is None


def test_a_leader_that_is_no_member_of_its_round_opens_no_second_one() -> None:
    """The other one would make another version of the same: a fork, where two are a quorum."""
    rounds = leading()
    start = standing("start")
    for other in rounds.peers.view:
        rounds.handle(asks(other, start), 1.0)
    rounds.handle(Tick(), 1.0 + POLICY.quorum.wait_s)
    assert [part.entry for part in rounds.rounds.values()] == [None]
    assert rounds.open_roster is None

    rounds.handle(Progressed(100, 1.0, waits=True), 1.5)
    rounds.handle(Due(), 20.0)
    effects = rounds.handle(Offered(offer(start, mark=100)), 20.0)

    assert rounds.open_roster is None
    assert sent(effects) == []
    assert [effect.reason for effect in effects if isinstance(effect, GiveUp)] == [
        "the roster that I closed is without me"
    ]


# A call, and the snapshot that is taken for it

CALL = said.Call(0, standing("start").head(), 10.0)
FIRST = ranked((ANNA, BORIS), standing("start").head())[0]
"""The leader of the two, for one that can only dial out."""


def called(rounds: FragmentRounds, *, step: int = 12, now: float = 1.0) -> list[Effect]:
    rounds.handle(Progressed(step, 1.0, waits=True), now)
    return rounds.handle(Received(FIRST, CALL), now)


def test_a_peer_that_waits_for_its_snapshot_says_at_each_call_that_it_comes() -> None:
    rounds = machine(reachable=False)
    rounds.handle(Due(), 1.0)
    for now in (3.0, 5.0):
        assert sent(rounds.handle(Received(FIRST, CALL), now), FIRST) == [said.Coming(0)]


@pytest.mark.parametrize("snapshot", [None, Tick()], ids=["taken for nobody", "not taken"])
def test_a_peer_that_said_it_comes_and_does_not_passes_when_it_is_called_again(
    snapshot: Tick | None,
) -> None:
    rounds = machine(reachable=False)
    called(rounds)
    rounds.handle(Leave() if snapshot is None else snapshot, 500.0)
    rounds.peers.trains = False
    (answer,) = sent(rounds.handle(Received(FIRST, CALL), 500.0), FIRST)
    assert isinstance(answer, said.Pass)


def test_a_leader_waits_for_a_snapshot_that_a_peer_has_announced() -> None:
    rounds = leading()
    rounds.handle(Progressed(24, 1.0, waits=True), 1.0)
    others = sorted(rounds.peers.view)
    rounds.handle(asks(others[0], standing("start")), 1.0)
    rounds.handle(Received(others[1], said.Coming(0)), 1.1)
    rounds.handle(Offered(offer(standing("start"))), 1.2)
    rounds.handle(Tick(), 4.9)
    assert rounds.open_roster is not None and len(rounds.open_roster.joins) == 2

    rounds.handle(asks(others[1], standing("start")), 5.0)

    assert rounds.own_round is not None and len(rounds.own_round.commit.members) == 3


def waits_for_one_that_comes() -> tuple[FragmentRounds, PeerId, PeerId]:
    """A leader with one of two peers in its roster, and the other one, which says that it comes."""
    rounds = leading()
    rounds.handle(Progressed(24, 1.0, waits=True), 1.0)
    one, other = sorted(rounds.peers.view)
    rounds.handle(asks(one, standing("start")), 1.0)
    rounds.handle(Received(other, said.Coming(0)), 1.1)
    rounds.handle(Offered(offer(standing("start"))), 1.2)
    return rounds, one, other


@pytest.mark.parametrize("says_so_again", [False, True])
def test_a_peer_that_did_not_come_is_not_waited_for_again_until_it_joins(
    says_so_again: bool,
) -> None:
    rounds, one, other = waits_for_one_that_comes()
    late = 1.1 + POLICY.answer_s
    if says_so_again:
        late = 1.0 + POLICY.quorum.wait_s
        for now in range(2, int(late)):
            rounds.handle(Received(other, said.Coming(0)), float(now))
    rounds.handle(Tick(), late - 0.1)
    assert rounds.own_round is None
    rounds.handle(Tick(), late)
    assert rounds.own_round is not None and len(rounds.own_round.commit.members) == 2

    now = late + 30.0
    rounds.open_roster = open_roster = OpenRoster(
        (one, other), decide_at=math.inf, search_at=math.inf, now=now
    )
    open_roster.called = {one: now, other: now}
    rounds.handle(Received(other, said.Coming(0)), now)
    assert other not in open_roster.coming


@pytest.mark.parametrize("closed", [False, True])
def test_a_peer_that_passed_comes_when_it_has_made_the_steps_if_the_leader_waits(
    closed: bool,
) -> None:
    """Else the first attempts of two peers came to nothing, each after the time for a quorum: the
    one that had just come passed, and was due half a minute later."""
    rounds = machine(reachable=False)
    assert sent(called(rounds, step=2), FIRST) == [said.Pass(0, "not enough steps")]
    if closed:
        rounds.handle(Received(FIRST, said.Closed(0, 1, bytes(32))), 1.5)

    effects = rounds.handle(Progressed(3, 1.0, waits=False), 2.0)

    assert wanted(effects) != closed
    if not closed:
        assert sent(effects, FIRST) == [said.Coming(0)]


def test_a_peer_that_passed_does_not_come_when_the_leader_has_waited_long_enough() -> None:
    rounds = machine(reachable=False)
    called(rounds, step=2)

    assert not wanted(rounds.handle(Progressed(3, 1.0, waits=False), 1.0 + CALL.wait_s + 0.1))


def test_a_leader_that_had_too_few_steps_joins_its_own_roster_when_it_has_made_them() -> None:
    rounds = leading()
    one = min(rounds.peers.view)
    rounds.handle(asks(one, standing("start")), 1.0)

    assert wanted(rounds.handle(Progressed(3, 1.0, waits=False), 2.0))
    rounds.handle(Offered(offer(standing("start"), mark=3, steps=3)), 2.1)

    assert rounds.open_roster is not None and set(rounds.open_roster.joins) == {ME, one}


@pytest.mark.parametrize("came", [True, False])
def test_a_peer_that_was_left_out_counts_its_cycle_from_the_closing(came: bool) -> None:
    rounds = machine(reachable=False)
    called(rounds, step=12 if came else 5)
    rounds.handle(Progressed(14, 1.0, waits=True), 2.0)

    rounds.handle(Received(FIRST, said.Closed(0, 1, bytes(32))), 2.0)

    assert rounds.phase is Phase.IDLE
    assert rounds.pace.due_time.due_step == 14 + POLICY.due.cycle_steps


def test_a_closing_is_counted_once_and_not_of_any_version() -> None:
    rounds = machine(reachable=False)
    called(rounds, step=5)
    for version in (1, 1, 10_000):
        rounds.handle(Received(FIRST, said.Closed(0, version, bytes(32))), 2.0)
        rounds.handle(Progressed(9, 1.0, waits=True), 3.0)

    assert rounds.pace.due_time.due_step == 5 + POLICY.due.cycle_steps


# Peers that leave


def joins_within(rounds: FragmentRounds, begins: float, seconds: float) -> list[float]:
    """The times at which a peer that leaves joins, if every roster has closed without it."""
    times = []
    for turn in range(int(4 * seconds)):
        now = begins + turn / 4
        if not wanted(rounds.handle(Due(), now)):
            continue
        assert rounds.standing is not None
        effects = rounds.handle(Offered(offer(rounds.standing)), now)
        (leader,) = [e.to for e in effects if isinstance(e, Send) and isinstance(e.message, Join)]
        times.append(now - begins)
        rounds.handle(Received(leader, said.Closed(0, 1, bytes(32))), now)
    return times


def test_a_peer_that_leaves_does_not_join_again_and_again_while_the_others_make_a_round() -> None:
    rounds = machine(reachable=False)
    rounds.handle(MergeBeforeLeaving(), 1.0)
    assert joins_within(rounds, 1.0, 9.0) == [0.0, 2.0, 4.0, 6.0, 8.0]


def test_a_peer_that_leaves_joins_at_once_from_the_version_that_the_others_made() -> None:
    rounds = machine(reachable=False)
    rounds.handle(MergeBeforeLeaving(), 1.0)
    joins_within(rounds, 1.0, 4.0)
    made = standing("start", "made")
    rounds.handle(Received(ANNA, behind(made)), 5.0)
    rounds.handle(CaughtUp(made), 5.0)
    assert joins_within(rounds, 5.0, 0.5) == [0.0]


def test_a_peer_that_leaves_comes_at_once_when_it_is_called() -> None:
    rounds = machine(reachable=False)
    rounds.handle(MergeBeforeLeaving(), 1.0)
    joins_within(rounds, 1.0, 4.0)
    assert wanted(called(rounds, step=1, now=5.0))


# Leaders that are behind


def test_a_leader_that_is_behind_is_passed_over_at_once_with_the_same_offer() -> None:
    rounds = machine(reachable=False)
    first = joined(rounds)
    other = BORIS if first == ANNA else ANNA

    effects = rounds.handle(
        Received(first, said.Refused(0, 1, "I am behind", another_leads=True)), 2.0
    )

    (again,) = sent(effects, other)
    assert isinstance(again, Join) and again.attempt >= 1 and again.mark == 24
    assert not [effect for effect in effects if isinstance(effect, GiveUp)]


def test_a_leader_that_leaves_is_passed_over_at_once_with_the_same_offer() -> None:
    """A peer that left as well joined it again, and waited for its answer for a quarter of the time
    that it had."""
    rounds = machine(reachable=False)
    first = joined(rounds)
    other = BORIS if first == ANNA else ANNA

    effects = rounds.handle(Received(first, said.Refused(0, 1, "leaving", another_leads=True)), 2.0)

    (again,) = sent(effects, other)
    assert isinstance(again, Join) and again.attempt >= 1 and again.mark == 24
    assert not [effect for effect in effects if isinstance(effect, GiveUp)]


@pytest.mark.parametrize("where", ["start", "elsewhere"])
def test_a_leader_that_was_behind_and_calls_is_called_to_the_later_attempt(where: str) -> None:
    """The last two of a swarm gathered apart until the deadline, each called by the other."""
    head = standing("start").head()
    first = next(peer for peer in (ANNA, BORIS) if ranked((ME, peer), head)[0] == peer)
    rounds = machine(others=(first,))
    assert joined(rounds) == first
    rounds.handle(Received(first, said.Refused(0, 1, "I am behind", another_leads=True)), 2.0)
    assert rounds.open_roster is not None

    answer = sent(rounds.handle(Received(first, said.Call(0, standing(where).head(), 10.0)), 9.0))

    assert rounds.open_roster is not None
    (call,) = [message for message in answer if not isinstance(message, said.Compare)]
    assert isinstance(call, said.Call) and call.attempt >= 1


def test_a_leader_that_has_wasted_joins_is_not_followed_again_for_a_call() -> None:
    rounds = machine(reachable=False)
    rounds.pacemaker.failed(FIRST, rounds.now)

    (answer,) = sent(called(rounds), FIRST)

    assert answer == said.Pass(0, "I do not follow you")


def test_a_peer_sent_to_a_leader_on_probation_goes_to_another_attempt_with_its_offer() -> None:
    dora = PeerId("dora")
    policy = replace(POLICY, probation=ProbationPolicy(rounds=8, seconds=40.0))
    rounds = machine(policy=policy, reachable=False)
    for _ in range(10):
        rounds.peers.saw_merged([ME, ANNA, BORIS], 0.0)
    assert isinstance(rounds.peers.view, dict)
    rounds.peers.view[dora] = rounds.peers.view[ANNA]
    first = joined(rounds)

    effects = rounds.handle(Received(first, said.Redirect(0, 1, dora)), 2.0)
    (again,) = [message for message in sent(effects) if isinstance(message, Join)]
    assert again.mark == 24 and again.attempt >= 1
    assert sent(effects, dora) == []
    assert not [effect for effect in effects if isinstance(effect, GiveUp)]


def test_a_leader_that_has_to_catch_up_sends_its_members_on_at_once() -> None:
    """Earlier, a leader that stays behind, by its own judgement, stopped all others for as long as
    it did."""
    rounds = leading()
    one, two = sorted(rounds.peers.view)
    rounds.handle(asks(one, standing("start")), 1.0)
    assert rounds.open_roster is not None and set(rounds.open_roster.joins) == {one}
    ahead = led_by_me(one, two, lambda name: standing("start", name))

    effects = rounds.handle(Received(two, said.Compare(0, certified(ahead, (one, two)))), 1.5)

    assert rounds.phase is Phase.CATCHING and rounds.open_roster is None
    assert [message.another_leads for message in refusals(effects)] == [True]


def test_a_leader_that_does_not_take_the_state_of_a_heavier_side_keeps_no_join_from_there() -> None:
    rounds = leading(standing("start", "mine", tokens=10))
    one, two = sorted(rounds.peers.view)
    apart = led_by_me(one, two, lambda name: standing("start", "theirs", name, tokens=1000))
    head = certified(apart, (one, two))
    rounds.handle(asks(one, apart, head=head), 1.0)
    assert phase(rounds) is Phase.CATCHING
    rounds.handle(CaughtUp(None), 1.5)  # it asks this source no more for a while

    refused = refusals(rounds.handle(asks(one, apart, 2, head=head), 2.0))

    assert [message.another_leads for message in refused] == [True]
    assert rounds.open_roster is None


def led_by_me(one: PeerId, two: PeerId, where: Callable[[str], Standing]) -> Standing:
    """The first of these standings at which this peer leads."""
    return next(
        each
        for each in (where(str(name)) for name in range(100))
        if ranked((ME, one, two), each.head())[0] == ME
    )


def refusals(effects: list[Effect]) -> list[said.Refused]:
    return [message for message in sent(effects) if isinstance(message, said.Refused)]
