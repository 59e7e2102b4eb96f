"""Due times, counted in own steps."""

import pytest

from averaging.rules.due import DuePolicy, DueTime

POLICY = DuePolicy(cycle_steps=24, fragments=4)


def test_first_due_times_are_staggered_over_a_cycle() -> None:
    due = [DueTime(POLICY, fragment=p, step=100).due_step for p in range(4)]

    assert due == [124, 118, 112, 106]


def test_more_fragments_than_steps_are_all_due_within_a_cycle() -> None:
    policy = DuePolicy(cycle_steps=3, fragments=24)

    due = {DueTime(policy, fragment=p, step=0).due_step for p in range(24)}

    assert due == {1, 2, 3}


def test_asks_one_step_ahead_because_the_snapshot_comes_at_the_next_safe_point() -> None:
    time = DueTime(POLICY, fragment=0, step=0)

    assert not time.is_due(22)
    assert time.is_due(23)


def test_a_closing_re_anchors_every_peer_that_hears_of_it() -> None:
    time = DueTime(POLICY, fragment=0, step=0)

    time.closed(10, 24)

    assert time.due_step == 34


def test_slow_peers_take_fewer_steps_between_merges() -> None:
    time = DueTime(POLICY, fragment=0, step=0)

    assert time.interval(own_s=1.0, median_s=1.0) == 24
    assert time.interval(own_s=2.0, median_s=1.0) == 12
    assert time.interval(own_s=0.5, median_s=1.0) == 48
    assert time.interval(own_s=1000.0, median_s=1.0) == 1
    assert time.interval(own_s=None, median_s=1.0) == 24


def test_a_flat_cycle_ignores_speed() -> None:
    policy = DuePolicy(cycle_steps=24, fragments=1, scale_by_speed=False)

    assert DueTime(policy, fragment=0, step=0).interval(own_s=4.0, median_s=1.0) == 24


def test_at_the_end_a_called_peer_joins_with_any_work() -> None:
    time = DueTime(POLICY, fragment=0, step=100)
    time.eager = True

    assert time.answers_call(101, 24)
    assert not time.answers_call(100, 24)


def test_a_called_peer_joins_with_half_a_cycle_of_steps() -> None:
    time = DueTime(POLICY, fragment=0, step=100)
    time.took_part(1, 100)

    assert not time.answers_call(111, 24)
    assert time.answers_call(112, 24)
    assert not time.answers_call(100, 1), "a call without a single new step is not answered"


def test_a_called_peer_that_was_in_no_round_yet_joins_with_an_eighth_of_a_cycle() -> None:
    """One that was killed and came back made half a cycle of steps before it was in a round."""
    time = DueTime(POLICY, fragment=0, step=100)

    assert not time.answers_call(102, 24)
    assert time.answers_call(103, 24)


def test_a_peer_that_is_called_for_one_that_leaves_joins_with_an_eighth_of_its_steps() -> None:
    time = DueTime(POLICY, fragment=0, step=100)
    time.took_part(1, 100)

    assert not time.answers_call(102, 24, hurried=True)
    assert time.answers_call(103, 24, hurried=True)
    assert not time.answers_call(100, 1, hurried=True)
    time.every = 4
    assert not time.answers_call(111, 24, hurried=True), "its line carries every fourth version"
    assert time.answers_call(112, 24, hurried=True)


@pytest.mark.parametrize("every", [1, 4])
def test_one_that_says_for_ever_that_it_leaves_has_the_others_exchange_no_more(every: int) -> None:
    time = DueTime(POLICY, fragment=0, step=0)
    time.every = every
    cycle = every * 24
    for version in range(8):
        time.took_part(version, (version - 7) * cycle)  # one in each cycle, as usual

    rounds: list[int] = []
    for step in range(1, 100 * cycle):
        if time.answers_call(step, 24, hurried=True):
            time.took_part(8 + len(rounds), step)
            rounds.append(step)
    assert rounds[:4] == [every * step for step in (3, 6, 9, 12)], "four that leave in one cycle"
    assert len(rounds) <= 2 * 100 + 4, "two in a cycle, as whoever calls can have"


def test_a_called_peer_that_missed_the_last_closings_joins_at_once() -> None:
    time = DueTime(POLICY, fragment=0, step=0)
    time.took_part(version=4, step=20)
    time.closed(20, 24)
    time.closed(44, 24)  # without it

    assert time.answers_call(46, 24), "it has 26 steps for a round"
    time.took_part(version=6, step=46)
    assert not time.answers_call(57, 24)
    assert time.answers_call(58, 24)


def test_a_failed_attempt_is_retried_a_quarter_cycle_later() -> None:
    time = DueTime(POLICY, fragment=0, step=0)

    time.attempt_failed(30, 24)

    assert time.due_step == 36


def test_a_peer_that_takes_part_in_every_third_version_sits_two_out() -> None:
    time = DueTime(POLICY, fragment=0, step=0)
    time.every = 3
    assert not time.sits_out(7, 30, 24), "it has not been in any yet"
    time.took_part(7, 30)

    assert [time.sits_out(version, 60, 24) for version in (8, 9, 10, 11)] == [
        True,
        True,
        False,
        False,
    ]


def test_where_no_roster_closes_without_it_a_peer_takes_part_after_as_many_cycles() -> None:
    time = DueTime(POLICY, fragment=0, step=0)
    time.every = 3
    time.took_part(7, 30)

    assert time.sits_out(8, 30 + 71, 24)
    assert not time.sits_out(8, 30 + 72, 24)


def test_a_peer_that_sits_versions_out_comes_half_a_cycle_earlier_when_it_is_called() -> None:
    time = DueTime(POLICY, fragment=0, step=0)
    time.every = 2
    time.took_part(7, 30)

    assert time.sits_out(8, 30 + 35, 24, called=True)
    assert not time.sits_out(8, 30 + 36, 24, called=True)
    assert time.sits_out(8, 30 + 47, 24)


def test_at_the_end_nobody_sits_a_version_out() -> None:
    time = DueTime(POLICY, fragment=0, step=0)
    time.every = 3
    time.took_part(7, 30)
    time.eager = True

    assert not time.sits_out(8, 31, 24)
