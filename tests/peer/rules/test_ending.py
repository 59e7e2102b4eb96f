"""The end of a run, and when a peer may leave."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import msgspec
import pytest

from dht.identity import PeerId
from dht.membership.hello import ClockEstimate
from peer.rules import ending
from peer.rules.ending import (
    ENDED_BY_OWNER,
    FASTEST_SHARE,
    HAND_OVER_SHARE,
    Adopt,
    Answers,
    Ask,
    Do,
    Drain,
    Drained,
    Ending,
    Enter,
    Heard,
    LastRounds,
    Look,
    MakeDue,
    Merged,
    Seen,
    Show,
    State,
    Tell,
    Whom,
    ended,
    seconds_left,
    who_differs,
)
from peer.rules.leaving import Departure, LastOffers
from peer.run_file.sections import End
from peer.status import PeerStatus
from tests.peer.statuses import a_status

NOON = datetime(2027, 3, 31, 12, tzinfo=UTC)
BY_DATE = End(tokens="unlimited", date=NOON)


def test_the_date_follows_the_own_clock_until_another_peer_is_asked() -> None:
    assert seconds_left(BY_DATE, None, now=NOON - timedelta(seconds=8)) == 8
    assert seconds_left(End(tokens=5), None, now=NOON) is None


def test_two_peers_whose_clocks_differ_agree_on_the_mean() -> None:
    behind = ClockEstimate(offset_s=10.0, error_s=0.0, peers=1)
    ahead = ClockEstimate(offset_s=-10.0, error_s=0.0, peers=1)
    now = NOON - timedelta(seconds=20)
    assert seconds_left(BY_DATE, behind, now=now) == 15
    assert seconds_left(BY_DATE, ahead, now=now + timedelta(seconds=10)) == 15


def test_a_peer_with_a_wrong_clock_follows_the_others() -> None:
    estimate = ClockEstimate(offset_s=-3600.0, error_s=0.0, peers=9)
    left = seconds_left(BY_DATE, estimate, now=NOON + timedelta(hours=1))
    assert left is not None
    assert left == pytest.approx(-360.0)


def test_the_last_rounds_are_over_when_each_fragment_has_a_version_or_a_void_round() -> None:
    rounds = LastRounds((4, 7, 7))
    assert rounds.missing((4, 7, 7)) == (0, 1, 2)
    rounds.came_to_nothing(1)
    assert rounds.missing((5, 7, 7)) == (2,)
    assert rounds.missing((5, 7, 8)) == ()


def seen(versions: tuple[int, ...], phase: str = "leaving") -> PeerStatus:
    return a_status(name="boris", versions=versions, phase=phase)


@pytest.mark.parametrize("by_date", [True, False])
def test_a_peer_leaves_when_the_others_have_its_versions(by_date: bool) -> None:
    assert who_differs((3, 4), [seen((3, 4)), seen((3, 4))], by_date=by_date) == []
    assert who_differs((3, 4), [], by_date=by_date) == []


@pytest.mark.parametrize("by_date", [True, False])
@pytest.mark.parametrize("versions", [(), (3, 3)])
def test_a_peer_stays_for_a_peer_that_is_behind(by_date: bool, versions: tuple[int, ...]) -> None:
    assert len(who_differs((3, 4), [seen(versions)], by_date=by_date)) == 1


def test_by_date_a_peer_also_stays_for_versions_it_lacks() -> None:
    assert who_differs((3, 4), [seen((3, 5))], by_date=True)
    assert who_differs((3, 4), [seen((3, 4), "ready")], by_date=True)
    assert who_differs((3, 4), [seen((3, 5), "ready")], by_date=False) == []


@pytest.mark.parametrize("by_date", [True, False])
def test_equal_versions_on_two_sides_of_a_fork_differ(by_date: bool) -> None:
    def other(model: str) -> PeerStatus:
        return a_status(name="boris", versions=(3, 4), phase="leaving", model=model)

    assert who_differs((3, 4), [other("ab")], by_date=by_date, model="ab") == []
    assert who_differs((3, 4), [other("cd")], by_date=by_date, model="ab") == [
        "boris: at these versions with other parameters"
    ]
    assert who_differs((3, 4), [other("")], by_date=by_date, model="ab") == []


GOAL = End(tokens=1000)


def test_a_run_has_ended_when_all_who_have_its_state_say_so_and_its_tokens_bear_it_out() -> None:
    now = datetime(2026, 11, 22, tzinfo=UTC)
    over = a_status(ended_at=7.0, global_tokens=1000)
    later = a_status(ended_at=9.0, global_tokens=1001)
    assert ended(GOAL, [over, later, a_status(versions=())], now=now) == (7.0, 1001)
    assert ended(GOAL, [over, a_status(global_tokens=1000)], now=now) is None
    assert ended(GOAL, [a_status(ended_at=7.0, global_tokens=999)], now=now) is None
    assert ended(GOAL, [], now=now) is None


def test_a_run_with_a_date_has_not_ended_before_it_whoever_says_so() -> None:
    date = datetime(2026, 11, 22, 12, tzinfo=UTC)
    over = [a_status(ended_at=7.0, global_tokens=5)]
    assert ended(End(tokens="unlimited", date=date), over, now=date - timedelta(seconds=1)) is None
    assert ended(End(tokens="unlimited", date=date), over, now=date) == (7.0, 5)


def test_nobody_waits_for_a_keeper_that_stays_after_the_end() -> None:
    keeper = a_status(name="keeper", role="keeper", phase="ready", versions=(3, 4))
    assert who_differs((3, 4), [keeper], by_date=True) == ["keeper: still ready"]
    stays = msgspec.structs.replace(keeper, ended_at=7.0)
    assert who_differs((3, 4), [stays], by_date=True) == []


ASKED = Departure("asked", 0, finished=False, timeout_s=30.0, patience_s=300.0)
HERE = Seen(versions=(4, 4))


def hear(machine: Ending, heard: ending.Input, *, now: float = 0.0) -> list[ending.Effect]:
    return machine.hear(heard, now=now, wall_time=1000.0 + now)


def in_the_run(*, learns: bool = True, stays: bool = False) -> Ending:
    machine = Ending(fragments=2, learns=learns, stays=stays, last_round_s=20.0)
    hear(machine, Heard.ARRIVED)
    return machine


@pytest.mark.parametrize("heard", [Heard.ARRIVED, ASKED])
def test_a_peer_offers_nothing_before_it_is_in_the_run(heard: ending.Input) -> None:
    """Its trainer may train already: that work is offered as it leaves, too."""
    machine = Ending(fragments=2, learns=True)
    assert machine.closed == {0, 1}
    hear(machine, Look(HERE))
    assert machine.closed == {0, 1}
    hear(machine, heard)
    assert not machine.closed


@pytest.mark.parametrize("by_owner", [True, False])
def test_a_run_is_over_at_once_when_its_last_fragment_is_final(by_owner: bool) -> None:
    machine = in_the_run()
    assert hear(machine, Merged({1}, by_owner)) == []
    assert machine.closed == {1} and machine.trains_on
    reason = ENDED_BY_OWNER if by_owner else "the run has used its tokens"
    assert hear(machine, Merged({0, 1}, by_owner), now=7.0) == [Enter("leaving", reason)]
    assert machine.ended_at == 1007.0 and machine.departure == Departure(reason, 0, True, 30.0)
    assert hear(machine, ASKED) == [], "the first reason counts"


def test_the_date_that_an_owner_names_is_told_as_the_owners() -> None:
    machine = in_the_run(learns=False)
    over = Seen(versions=(4, 4), date_left_s=-2.0, owner_set_date=True)
    assert hear(machine, Look(over)) == [
        Do.GATHER,
        Tell("last_round", {"versions": [4, 4], "peers": 0}),
    ]
    assert hear(machine, Look(over)) == [Ask(Whom.LEARNERS)]
    assert hear(machine, Answers([], 0, over)) == [Drain(20.0)]
    assert machine.closed == {0, 1}, "no round that is called now makes a version after the end"
    assert hear(machine, Drained(over)) == [Do.END_MERGES, Enter("leaving", ENDED_BY_OWNER)]


def test_a_keeper_stays_open_after_the_date_until_all_have_made_their_last_rounds() -> None:
    """It closed at the date, and refused the last round of a learner that can only dial out."""
    boris = a_status(name="boris", phase="ready")
    over = Seen(versions=(4, 4), date_left_s=-2.0, learners=1)
    for answers in ([boris], []):  # one that does not answer may be busy, and counts as live
        keeper = in_the_run(learns=False, stays=True)
        hear(keeper, Look(over))
        assert hear(keeper, Answers(answers, 1, over), now=10.0) == [] and not keeper.closed
        gone = [a_status(name="boris", phase="leaving", ended_at=2.0)]
        assert hear(keeper, Answers(gone, 1, over), now=11.0)[0] is Do.END_MERGES
        assert keeper.closed == {0, 1} and keeper.departure is None
    late = in_the_run(learns=False)
    hear(late, Look(over))
    assert hear(late, Look(over), now=20.0) == [Drain(1.0)], "boris never ends"


def test_a_learner_makes_its_last_rounds_with_one_that_is_silent_while_it_counts_as_live() -> None:
    """The only partner of a learner had died half a minute before. The learner took it for one that
    had made its last rounds, but not for gone, and its own work was lost."""
    machine = in_the_run()
    over = Seen(versions=(4, 4), date_left_s=-2.0, learners=1, pending=7)
    hear(machine, Look(over))
    assert hear(machine, Answers([], 1, over), now=10.0) == [MakeDue((0, 1))]
    alone = Seen(versions=(4, 4), date_left_s=-12.0, pending=7)
    assert hear(machine, Answers([], 0, alone), now=11.0) == [Do.OFFER]
    assert machine.offers_last(7) and not machine.closed


def test_a_learner_that_has_had_its_last_rounds_folds_nothing_when_others_end_before_it() -> None:
    """It took itself for the only one, and folded eleven steps: three peers left at two models."""
    machine = in_the_run()
    hear(machine, Look(Seen(versions=(4, 4), date_left_s=-2.0, learners=2)))
    made = Seen(versions=(5, 5), date_left_s=-2.5, pending=7)
    assert hear(machine, Answers([], 0, made), now=1.0) == [Drain(19.0)]
    alone = in_the_run()
    hear(alone, Look(Seen(versions=(4, 4), date_left_s=-2.0)))
    assert hear(alone, Answers([], 0, made), now=1.0) == [Do.OFFER], "it had folded twice"


def test_a_peer_that_leaves_counts_as_one_that_trains_only_while_it_has_work_to_be_merged() -> None:
    """Of three that left together the last waited for two that had nothing to offer any more. They
    went meanwhile, and kept another model than it."""
    machine = in_the_run()
    hear(machine, ASKED)
    assert machine.offers_last(7), "at once, before it has looked"
    hear(machine, Look(Seen(versions=(4, 4), pending=7)))
    assert machine.offers_last(7) and not machine.offers_last(0)
    hear(machine, Look(HERE))
    assert machine.state is State.TOGETHER and not machine.offers_last(0)


@pytest.mark.parametrize("is_paused", [False, True])
def test_a_leaving_peer_waits_for_merges_unless_the_owner_has_paused_the_run(
    is_paused: bool,
) -> None:
    machine = in_the_run()
    assert hear(machine, ASKED) == [Enter("leaving", "asked"), Do.GREET]
    seen = Seen(versions=(4, 4), pending=7, paused=is_paused)
    (effect,) = hear(machine, Look(seen))
    assert (effect is Do.OFFER) is not is_paused


def test_a_peer_that_leaves_is_done_step_by_step_and_tells_what_it_hands_over() -> None:
    machine = in_the_run()
    hear(machine, ASKED)
    hear(machine, Look(Seen(versions=(4, 4), pending=7)))
    told, progress = hear(machine, LastOffers(encoded_bytes=100, bytes_per_s=10.0))
    assert told == Tell("handing_over", {"tokens": 7, "seconds": 12.5})
    assert progress == Enter("leaving", "handing over 7 tokens, about 12 s", 0.0)
    (told,) = hear(machine, Look(HERE), now=9.0)
    fields = {"merged": True, "alone": False, "tokens": 0, "seconds": 9.0}
    assert told == Tell("last_offers", fields)
    assert hear(machine, Look(HERE), now=9.0) == [Ask(Whom.FOLLOWERS)]
    assert hear(machine, Answers([], 0, HERE), now=9.0) == [Drain(12.0)]
    assert hear(machine, Drained(HERE), now=9.0) == []
    assert hear(machine, Look(HERE), now=9.0) == [Ask(Whom.TAKERS)]
    assert hear(machine, Answers([], 0, HERE), now=9.0) == [Adopt(2.0)]
    assert hear(machine, Heard.ADOPTED) == [Do.STOP, Do.SAVE]
    assert hear(machine, Heard.SAVED) == [Do.GOODBYE] and machine.state is State.GONE


def test_work_is_handed_over_to_the_fastest_peer_alone_for_half_of_the_time() -> None:
    """Several at once would share the line of the one that leaves, and it waits for the first."""
    machine = in_the_run()
    hear(machine, ASKED)
    hear(machine, Look(HERE))
    hear(machine, Answers([], 0, HERE))
    hear(machine, Drained(HERE))
    assert machine.state is State.HANDING_OVER
    fast, slow = (msgspec.structs.replace(seen((4, 3)), peer=name) for name in ("fast", "slow"))
    half = FASTEST_SHARE * HAND_OVER_SHARE * ASKED.timeout_s
    assert hear(machine, Answers([fast, slow], 2, HERE), now=half - 0.1) == [
        Show((PeerId("fast"),))
    ]
    both = Show((PeerId("fast"), PeerId("slow")))
    assert hear(machine, Answers([fast, slow], 2, HERE), now=half) == [both]


@pytest.mark.parametrize("by_date", [True, False])
def test_a_peer_stays_after_the_end_until_the_others_have_its_versions(by_date: bool) -> None:
    """By date it must see them there twice: one that answers may just be making another."""
    machine = in_the_run()
    over = Seen(versions=(4, 4), date_left_s=-2.0)
    if by_date:
        hear(machine, Look(over))
        hear(machine, Answers([], 0, over))
        hear(machine, Drained(over))
    else:
        hear(machine, Merged({0, 1}, owner_set_version=False))
    behind, there = seen((4, 3)), seen((4, 4))
    shown = Show((PeerId(behind.peer),))
    assert hear(machine, Answers([behind], 1, over)) == [shown]
    if by_date:
        assert hear(machine, Answers([there], 1, over)) == [shown]
        assert hear(machine, Answers([behind], 1, over)) == [shown]
        assert hear(machine, Answers([there], 1, over)) == [shown]
    assert hear(machine, Answers([there], 1, over)) == [Drain(12.0)]


def test_a_peer_that_leaves_stays_until_one_other_has_its_versions() -> None:
    machine = in_the_run()
    hear(machine, ASKED)
    hear(machine, Look(HERE))
    hear(machine, Answers([], 0, HERE))
    hear(machine, Drained(HERE))
    behind, there = seen((4, 3), "ready"), seen((4, 4), "ready")
    assert hear(machine, Answers([behind, behind], 2, HERE)) == [Show((PeerId(behind.peer),))]
    assert hear(machine, Answers([behind, there], 2, HERE)) == [Adopt(2.0)]


def test_a_trainer_that_is_gone_ends_every_wait_of_a_peer_that_leaves() -> None:
    """systemd signals trainer and agent: the agent is asked twice, which is one request."""
    machine = in_the_run()
    hear(machine, ASKED)
    assert hear(machine, Departure("again", 0, finished=False, timeout_s=10.0)) == []
    assert hear(machine, Heard.TRAINER_GONE) == [Drain(0.0)] and machine.departure == ASKED
    assert hear(machine, Drained(HERE)) == [Do.STOP, Do.SAVE]


def test_a_run_that_is_taken_back_while_a_peer_leaves_it_as_over_goes_on() -> None:
    machine = in_the_run()
    hear(machine, Merged({0, 1}, owner_set_version=False))
    assert hear(machine, Heard.TAKEN_BACK) == [Enter("ready", "in the run", 1.0)]
    assert machine.trains_on and machine.departure is machine.ended_at is None
    assert not machine.closed


def test_a_peer_that_no_longer_can_stay_exports_nothing_of_what_was_taken_back() -> None:
    machine = in_the_run()
    hear(machine, Merged({0, 1}, owner_set_version=False))
    hear(machine, Answers([], 0, HERE))
    assert hear(machine, Heard.TAKEN_BACK) == [] and machine.state is State.DRAINING
    hear(machine, Heard.TRAINER_GONE)
    hear(machine, Drained(HERE))
    assert hear(machine, Heard.SAVED) == [Do.GOODBYE]
