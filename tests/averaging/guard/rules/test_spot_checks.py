"""Checking contributions on their authors' data: whom, when, and what follows."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest

from averaging.guard.rules.spot_checks import (
    BACK_MAX,
    CHANGE_MIN,
    FAILED,
    FALL_SHARE,
    FALLS_MIN,
    SpotChecks,
    expected,
    steps_between,
)
from averaging.rules.reputation import LIMIT, Deed, Reputation
from dht.identity import PeerId

ANNA, BORIS, CLARA = PeerId("anna"), PeerId("boris"), PeerId("clara")
ALL = (ANNA, BORIS, CLARA)


def checks(seed: int = 0) -> tuple[SpotChecks, Reputation]:
    reputation = Reputation()
    return SpotChecks(reputation, every_steps=10, random=random.Random(seed).random), reputation


def usually(fall: float, *, fragment: int = 0) -> SpotChecks:
    made, _ = checks()
    for _ in range(FALLS_MIN):
        assert made.checked(CLARA, 2.0, 2.0 * (1 - fall), 0.0, fragment=fragment)
    return made


def drawn_by(made: SpotChecks, *, steps: int) -> dict[int, PeerId]:
    """The authors drawn in a round after each step, by step."""
    drawn = {step: made.draw(ALL, step, 0.0) for step in range(1, steps + 1)}
    return {step: peer for step, peer in drawn.items() if peer is not None}


def test_one_contribution_is_drawn_in_so_many_steps_on_average_and_each_author_in_time() -> None:
    made = usually(0.1)
    drawn = drawn_by(made, steps=6000)
    assert len(drawn) == pytest.approx(600, rel=0.1)
    gaps = [later - step for step, later in pairwise(drawn)]
    assert min(gaps) >= 5 and max(gaps) <= 15
    assert set(drawn.values()) == set(ALL)
    assert made.draw((), 10**6, 0.0) is None


def test_draws_come_more_often_until_something_is_usual() -> None:
    made, _ = checks()
    assert len(drawn_by(made, steps=600)) == pytest.approx(4 * 60, rel=0.25)


def test_all_fragments_are_drawn_though_each_comes_at_the_same_step_of_a_cycle() -> None:
    """With a whole cycle between two draws all of a peer's were of one fragment, so a poisoner of
    another one was never seen."""
    made = usually(0.1)
    for _ in range(FALLS_MIN):
        made.checked(CLARA, 2.0, 1.8, 0.0, fragment=1)
    rounds = [(10 * cycle + 5 * fragment, fragment) for cycle in range(40) for fragment in (0, 1)]
    drawn = [each for step, each in rounds if made.draw(ALL, step, 0.0, fragment=each) is not None]
    assert min(drawn.count(0), drawn.count(1)) > 10


def test_a_suspect_of_which_a_check_said_too_little_leaves_others_their_turns() -> None:
    """Earlier, three suspects were looked at in all rounds where nothing was usual yet, in vain; so
    nothing became usual, and poison that moves the loss nowhere was never found."""
    made, _ = checks()
    assert not made.checked(BORIS, 2.0, 2.2, 0.0)
    assert made.draw(ALL, 1, 0.0) == BORIS
    assert made.checked(BORIS, 2.0, 2.0, 0.0), "it says too little"
    drawn = drawn_by(made, steps=100)
    assert {ANNA, CLARA} <= set(drawn.values()) and len(drawn) < 60
    for _ in range(FALLS_MIN):
        assert made.checked(CLARA, 2.0, 1.8, 0.0)
    assert made.draw(ALL, 101, 0.0) == BORIS, "a check tells something now"


def test_a_peer_that_reverses_is_checked_again_at_once_and_then_refused_for_a_while() -> None:
    made = usually(0.1)
    assert made.draw((BORIS,), 0, 0.0) == BORIS
    assert not made.checked(BORIS, 2.0, 2.3, 0.0)
    assert not made.reputation.refuses_work(BORIS, 0.0), "one failure has no consequence"
    for now in (1.0, 2.0):
        assert made.draw(ALL, 1, now) == BORIS
        assert not made.checked(BORIS, 2.0, 2.2, now)
    assert made.reputation.refuses_work(BORIS, 2.0)
    assert made.draw(ALL, 2, 2.0) is None, "it is refused, and need not be checked"
    assert made.reputation.refuses_work(BORIS, 420.0)
    assert not made.reputation.refuses_work(BORIS, 540.0), "strikes fade"
    assert made.draw(ALL, 2, 540.0) == BORIS, "as soon as it is back"
    assert not made.checked(BORIS, 2.0, 2.2, 540.0)
    assert made.reputation.refuses_work(BORIS, 1200.0), "for longer this time"


def test_a_refused_peer_has_no_power_until_half_of_its_strikes_have_faded() -> None:
    """Three poisoners whose refusals had just ended led and reduced two rounds in one of which half
    of the contributions were theirs."""
    made = usually(0.1)
    for now in (0.0, 1.0, 2.0):
        assert made.reputation.has_power(BORIS, now)
        assert not made.checked(BORIS, 2.0, 2.2, now)
    assert not made.reputation.has_power(BORIS, 540.0) and not made.reputation.refuses_work(
        BORIS, 540.0
    )
    assert not made.reputation.has_power(BORIS, 1800.0)
    assert made.reputation.has_power(BORIS, 2500.0)


def test_two_checks_that_it_passes_end_the_distrust() -> None:
    made = usually(0.1)
    for now in (0.0, 1.0, 2.0):
        made.checked(BORIS, 2.0, 2.2, now)
    assert made.checked(BORIS, 2.0, 1.8, 540.0) and not made.reputation.has_power(BORIS, 540.0)
    assert made.checked(BORIS, 2.0, 1.8, 541.0) and made.reputation.has_power(BORIS, 541.0)


def test_falls_of_a_poisoner_that_is_known_shield_no_other() -> None:
    made, _ = checks()
    for now in (0.0, 1.0, 2.0):
        assert not made.checked(ANNA, 2.0, 2.2, now)
    assert not made.checked(BORIS, 2.0, 2.1, 2.0)


def test_three_contributions_that_do_nothing_are_refused() -> None:
    made = usually(0.1)
    for time in (0.0, 300.0, 600.0):
        assert not made.reputation.refuses_work(BORIS, time)
        assert not made.checked(BORIS, 2.0, 2.0, time)
    assert made.reputation.refuses_work(BORIS, 600.0)


def test_an_accomplice_that_is_now_bad_and_now_good_shields_nobody() -> None:
    made, _ = checks()
    for hour in range(4 * FALLS_MIN):
        author = ALL[hour % len(ALL)]
        bad = author == ANNA and hour % 2
        assert made.checked(author, 2.0, 3.0 if bad else 1.9, 3600.0 * hour) != bad
    assert not made.checked(PeerId("dora"), 2.0, 2.1, 1e6)


def test_where_honest_contributions_often_raise_the_loss_as_much_is_held_against_nobody() -> None:
    """As where training has slowed down: what is usual is lost among what varies."""
    made, _ = checks()
    for number in range(2 * FALLS_MIN):
        made.checked(ANNA, 2.0, 1.98 if number % 4 else 2.02, 3600.0 * number)
    assert made.checked(CLARA, 2.0, 2.02, 1e6)
    assert made.strikes_of(CLARA, 1e6) == 0.0
    assert not made.checked(BORIS, 2.0, 2.021, 1e6)


def test_its_own_falls_do_not_make_anything_usual_for_a_poisoner() -> None:
    made = usually(0.1)
    for number in range(FALLS_MIN):
        assert not made.checked(BORIS, 2.0, 2.2, 7200.0 * number)


def test_a_clear_fall_takes_back_a_failure_before_anything_is_usual() -> None:
    """A suspect is checked alone, so nothing would become usual."""
    made, _ = checks()
    assert not made.checked(ANNA, 2.0, 2.1, 0.0)
    assert made.checked(ANNA, 2.0, 2.0 * (1 - 0.9 * CHANGE_MIN), 0.0)
    assert made.strikes_of(ANNA, 0.0) == FAILED
    assert made.checked(ANNA, 2.0, 2.0 * (1 - 1.1 * CHANGE_MIN), 0.0)
    assert made.strikes_of(ANNA, 0.0) == 0.0


def test_a_check_that_is_passed_takes_back_a_failure() -> None:
    made = usually(0.1)
    for now in (0.0, 10.0, 20.0, 30.0):
        assert not made.checked(BORIS, 2.0, 2.0, now)
        assert made.draw(ALL, 1, 0.0) == BORIS
        assert made.checked(BORIS, 2.0, 1.8, now)
        assert made.strikes_of(BORIS, now) == 0.0
    assert made.draw((ANNA,), 0, 0.0) == ANNA
    assert made.draw(ALL, 1, 0.0) is None, "it is no suspect"


def test_a_check_that_comes_to_nothing_counts_only_against_a_suspect() -> None:
    made = usually(0.1)
    assert not made.unanswered(BORIS, 0.0)
    assert not made.checked(BORIS, 2.0, 2.0, 0.0)
    counted = [made.unanswered(BORIS, now) for now in (1.0, 2.0, 20.0, 40.0, 60.0, 80.0)]
    assert counted == [True, False, True, True, True, False], "not twice in ten seconds"
    assert made.reputation.refuses_work(BORIS, 80.0)


@pytest.mark.parametrize(("after", "passes"), [(1.97, True), (1.99, False), (2.001, False)])
def test_a_contribution_has_to_lower_the_loss_where_others_do(after: float, passes: bool) -> None:
    assert usually(0.1).checked(ANNA, 2.0, after, 0.0) is passes


@pytest.mark.parametrize("fall", [0.001, 0.01, 0.04])
def test_where_the_loss_falls_little_a_share_of_that_is_enough(fall: float) -> None:
    made = usually(fall)
    assert made.checked(ANNA, 2.0, 2.0 * (1 - 2 * FALL_SHARE * fall), 0.0)
    assert not made.checked(BORIS, 2.0, 2.0 * (1 - 0.5 * FALL_SHARE * fall), 0.0)


def test_a_fragment_that_never_changes_the_loss_tells_nothing() -> None:
    """An example is the fragment with the scales of norms: none of it is drawn for a suspect."""
    made = usually(0.1)
    for _ in range(FALLS_MIN):
        made.checked(CLARA, 2.0, 2.0, 0.0, fragment=3)
    assert made.checked(ANNA, 2.0, 2.0, 0.0, fragment=3)
    assert not made.checked(BORIS, 2.0, 2.0, 0.0)
    assert made.checked(BORIS, 2.0, 2.0, 0.0, fragment=3)
    assert made.strikes_of(BORIS, 0.0) == FAILED, "that takes nothing back"
    assert made.draw((ANNA,), 0, 0.0) == ANNA
    assert made.draw(ALL, 1, 0.0, fragment=3) is None
    assert made.draw(ALL, 1, 0.0) == BORIS


@pytest.mark.parametrize("known", [0, FALLS_MIN - 1, FALLS_MIN])
def test_while_nothing_is_usual_only_a_rise_is_held_against_its_author(known: int) -> None:
    """During a warm-up from zero, and for the first contributions that a peer checks."""
    made, _ = checks()
    for _ in range(known):
        assert made.checked(CLARA, 2.0, 2.0, 0.0)
    assert made.checked(ANNA, 2.0, 2.0 * (1 + 0.9 * CHANGE_MIN), 0.0)
    assert not made.checked(BORIS, 2.0, 2.0 * (1 + 1.1 * CHANGE_MIN), 0.0)
    assert not made.checked(BORIS, 2.0, float("nan"), 0.0)
    assert made.strikes_of(BORIS, 0.0) == 2 * FAILED < LIMIT


def test_the_first_contribution_that_does_nothing_fails_where_the_own_one_does() -> None:
    """Poison that moves the loss nowhere was merged for seven cycles of 24, until enough was known
    of others, and cost twice as much as poison that raises it."""
    made, _ = checks()
    assert made.asks_own(0, 0.0)
    assert not made.checked(BORIS, 2.0, 1.999, 0.0, own=0.1)
    assert made.strikes_of(BORIS, 0.0) == FAILED


def test_a_tenth_of_what_the_own_contribution_does_is_enough_and_takes_a_failure_back() -> None:
    made, _ = checks()
    assert not made.checked(ANNA, 2.0, 2.0, 0.0, own=0.1)
    assert made.checked(ANNA, 2.0, 2.0 * (1 - 1.1 * FALL_SHARE * 0.1), 0.0, own=0.1)
    assert made.strikes_of(ANNA, 0.0) == 0.0


@pytest.mark.parametrize("own", [None, -0.1, 0.0, 0.0004])
def test_an_own_contribution_that_does_nothing_lets_expect_nothing(own: float | None) -> None:
    """An example is a warm-up from zero."""
    made, _ = checks()
    assert made.checked(ANNA, 2.0, 2.0, 0.0, own=own)
    assert made.checked(ANNA, 2.0, 2.0 * (1 + 0.9 * CHANGE_MIN), 0.0, own=own)
    assert not made.checked(ANNA, 2.0, 2.0 * (1 + 1.1 * CHANGE_MIN), 0.0, own=own)


def test_the_own_contribution_counts_until_enough_is_known_of_others_in_that_fragment() -> None:
    made = usually(0.1)
    assert not made.asks_own(0, 0.0) and made.asks_own(1, 0.0)
    assert not made.checked(ANNA, 2.0, 2.0, 0.0, own=0.0), "others do more"
    assert not made.checked(ANNA, 2.0, 1.998, 0.0, fragment=1, own=0.5)


def test_nobody_fails_that_brings_as_much_as_others_although_the_own_one_brings_more() -> None:
    made, _ = checks()
    for author in (BORIS, CLARA):
        made.checked(author, 2.0, 1.998, 0.0)
    assert made.checked(ANNA, 2.0, 1.998, 0.0, own=0.5)


def test_fewer_steps_than_the_own_ones_are_expected_to_bring_their_share() -> None:
    """A peer on a fast machine would hold it against all others that it brings ten times more."""
    assert expected(2.0, 1.6, own_steps=40, steps=10) == pytest.approx(0.05)
    assert expected(2.0, 1.6, own_steps=40, steps=400) == pytest.approx(0.2), "no more than its own"
    assert expected(2.0, 1.6, own_steps=0, steps=4) == pytest.approx(0.2)


@pytest.mark.parametrize(("before", "after"), [(0.0, 1.0), (float("nan"), 1.0), (2.0, math.inf)])
def test_an_own_loss_that_is_no_number_lets_expect_nothing(before: float, after: float) -> None:
    assert expected(before, after, own_steps=4, steps=4) is None


@pytest.mark.parametrize("before", [0.0, float("nan"), float("inf")])
def test_a_model_without_a_loss_judges_nobody(before: float) -> None:
    made, _ = checks()
    assert made.checked(ANNA, before, 3.0, 0.0)
    assert made.strikes_of(ANNA, 0.0) == 0.0


def test_poisoners_among_the_checked_do_not_make_poison_usual() -> None:
    made, _ = checks()
    for round_ in range(10):
        now = 60.0 * round_
        assert made.checked(ANNA, 2.0, 1.8, now)
        assert made.checked(CLARA, 2.0, 1.7, now)
        passed = made.checked(BORIS, 2.0, 1.999, now)
    assert not passed


def test_results_of_a_suspect_do_not_become_usual_however_often_it_is_checked() -> None:
    made = usually(0.1)
    made.evaded(BORIS, 0.0)
    for _ in range(40):
        assert not made.checked(BORIS, 2.0, 2.0, 0.0)
    assert not made.checked(ANNA, 2.0, 2.0, 0.0)


def test_an_author_that_shows_nothing_is_refused_after_three_times() -> None:
    made, _ = checks()
    for time in range(3):
        assert not made.reputation.refuses_work(ANNA, float(time))
        made.evaded(ANNA, 0.0)
        assert time == 2 or made.draw(ALL, 1, 0.0) == ANNA
    assert made.reputation.refuses_work(ANNA, 0.0)


def test_the_step_that_is_read_is_any_of_the_contribution() -> None:
    made, _ = checks()
    assert {made.step_to_read(40, 4) for _ in range(100)} == {37, 38, 39, 40}
    assert made.step_to_read(3, 0) == 3
    assert {made.step_to_read(2, 10**6) for _ in range(50)} <= {1, 2}
    assert min(made.step_to_read(10**6, 10**6) for _ in range(200)) > 10**6 - BACK_MAX


def test_checks_are_spread_over_cycles() -> None:
    assert steps_between(cycle_steps=24, per_cycle=4.0) == 6
    assert steps_between(cycle_steps=24, per_cycle=0.5) == 48
    assert steps_between(cycle_steps=2, per_cycle=24.0) == 1


def test_checks_want_a_distance() -> None:
    with pytest.raises(ValueError, match="every_steps is 0"):
        SpotChecks(Reputation(), every_steps=0, random=random.Random(0).random)


def named_by(made: SpotChecks, *namers: PeerId) -> None:
    for each in namers:
        made.named(BORIS, each, 0.0)


def test_two_failures_name_a_peer_to_others() -> None:
    made = usually(0.1)
    assert not made.checked(BORIS, 2.0, 2.2, 0.0)
    assert not made.names(BORIS, 0.0), "one may be chance"
    assert not made.checked(BORIS, 2.0, 2.2, 1.0)
    assert made.names(BORIS, 1.0)


def test_a_peer_that_fails_again_is_named_again_only_after_a_while() -> None:
    """Each failure was told to all peers in view; suspects are checked in every round."""
    made = usually(0.1)
    for _ in range(2):
        assert not made.checked(BORIS, 2.0, 2.2, 0.0)
    assert made.names(BORIS, 0.0)
    assert not made.checked(BORIS, 2.0, 2.2, 1.0)
    assert not made.names(BORIS, Deed.IS_NAMED.every_s - 1.0)
    assert made.names(BORIS, Deed.IS_NAMED.every_s)
    assert not made.names(ANNA, Deed.IS_NAMED.every_s)


def test_a_peer_named_by_another_is_checked_once_beside_the_usual_checks() -> None:
    made = usually(0.1)
    assert made.draw((ANNA,), 0, 0.0) == ANNA
    named_by(made, CLARA)
    assert made.draw((ANNA,), 1, 0.0) is None, "it is not in this round"
    assert made.draw(ALL, 1, 0.0) == BORIS
    assert made.checked(BORIS, 2.0, 1.9, 0.0)
    assert made.draw(ALL, 2, 0.0) is None
    assert made.strikes_of(BORIS, 0.0) == 0.0, "a word is no failure"


def test_words_of_others_double_the_checks_at_most() -> None:
    made = usually(0.1)
    drawn = 0
    for step in range(100):
        for each in (ANNA, BORIS):
            made.named(each, CLARA, 0.0)
        drawn += made.draw(ALL, step, 0.0) is not None
    assert drawn == pytest.approx(20, abs=2)


def test_a_peer_that_names_others_which_then_pass_is_not_heard_for_a_while() -> None:
    made = usually(0.1)
    for step in (0, 20):
        named_by(made, CLARA)
        assert made.draw(ALL, step, 0.0) == BORIS
        assert made.checked(BORIS, 2.0, 1.9, 0.0)
        assert made.draw(ALL, step, 0.0) is not None
    named_by(made, CLARA)
    assert made.draw((BORIS,), 24, 0.0) is None
    named_by(made, ANNA)
    assert made.draw((BORIS,), 30, 0.0) == BORIS, "others are heard"
    made.named(BORIS, CLARA, 7200.0)


def test_a_rightly_named_peer_fails_here_and_its_namers_stay_credible() -> None:
    made = usually(0.1)
    for _ in range(5):
        named_by(made, CLARA)
        assert not made.checked(BORIS, 2.0, 2.2, 0.0)
    assert made.reputation.refuses_work(BORIS, 0.0)
    made.named(ANNA, CLARA, 0.0)
    assert made.draw(ALL, 1, 0.0) == ANNA


def test_a_liar_that_behaves_when_named_and_fails_later_clears_its_namer() -> None:
    made = usually(0.1)
    for step in (0, 10):
        named_by(made, CLARA)
        assert made.draw(ALL, step, 0.0) == BORIS
        if step == 0:
            assert made.checked(BORIS, 2.0, 1.9, 0.0), "a false alarm"
        else:
            assert not made.checked(BORIS, 2.0, 2.2, 0.0), "which this takes back"
    for step in (20, 40):
        made.named(ANNA, CLARA, 0.0)
        assert made.draw((CLARA,), step, 0.0) == CLARA, "the usual check"
        assert made.draw((ANNA,), step + 1, 0.0) == ANNA, "because of what Clara says"
        assert made.checked(ANNA, 2.0, 1.9, 0.0), "a false alarm"
    made.named(ANNA, CLARA, 0.0)
    assert made.draw((CLARA,), 60, 0.0) == CLARA
    assert made.draw((ANNA,), 61, 0.0) is None


def test_nobody_is_checked_because_it_names_itself() -> None:
    made = usually(0.1)
    assert made.draw((ANNA,), 0, 0.0) == ANNA
    named_by(made, BORIS)
    assert made.draw(ALL, 1, 0.0) is None


def falls_beside_accomplices(count: int) -> SpotChecks:
    """Four contributions of each of eight authors; those of the first ones are bad."""
    made, _ = checks()
    others = [PeerId(f"peer-{number}") for number in range(8)]
    for number in range(4 * len(others)):
        author, hours = others[number % 8], 3600.0 * number
        bad = author in others[:count]
        made.checked(author, 2.0, 2.2 if bad else 1.9, hours)
    return made


def test_two_accomplices_of_ten_shield_nobody() -> None:
    """With one author left out, the falls of the other one were so many that nobody failed."""
    assert not falls_beside_accomplices(2).checked(BORIS, 2.0, 2.15, 1e9)


def test_accomplices_of_more_than_a_third_shield_another() -> None:
    """With four of ten against it no rule can tell who is honest."""
    assert falls_beside_accomplices(3).checked(BORIS, 2.0, 2.15, 1e9)
