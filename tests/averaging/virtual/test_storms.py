"""Whole swarms in bad weather, from seeds: no promise is broken, and every state is reached.

``tests.averaging.virtual.soak`` goes on with storms of all kinds from where these stop, and prints
seeds that fail.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from unittest.mock import patch

import pytest

from averaging.history.adoption import OwnWork
from averaging.history.standing import Standing
from averaging.history.state import FragmentState
from averaging.live import fragment
from averaging.live.guard import Gate, Guard
from averaging.live.slices import exchange
from averaging.rules.line_levels import Level
from tests.averaging.round.phases import TABLE, Observed
from tests.averaging.round.plays import seen_in_plays
from tests.averaging.virtual import breakages, truth
from tests.averaging.virtual.swarm import SEVERAL_GROUPS, Storm, Swarm, storm, weather_out
from tests.averaging.virtual.truth import Broken
from tests.seeds import seeds

QUICK, SOAK_SEEDS, CHUNK = 16, 6000, 8

RARE = {
    18: "caught up, and already further behind",
    19: "found",
    23: "a later ballot that gathers reports",
    24: "a join as a round is entered",
    27: "redirect",
    56: "a fetch that fails, and a ballot that finds nothing accepted",
    61: "closed meld",
    78: "a member that joins anew has given the round up",
    274: "what a peer offers is too old to be merged",
}
"""Storms that reach what the first ones do not."""

SOAK = Storm(peers=(2, 12), accidents=(2, 14), rough_s=200.0)

REACHED = frozenset(
    [
        "alone",
        "folded",
        "joining",
        "gathering",
        "redirect",
        "redirected",
        "leader_silent",
        "next_leader",
        "changed_leader",
        "passed_over",
        "handed_over",
        "came_when_called",
        "found",
        "withdrawn",
        "no_quorum",
        "turned_away",
        "told_closed",
        "too_late",
        "entered",
        "declined",
        "declined_by",
        "upload_failed",
        "upload_refused",
        "reassigned",
        "took_slice",
        "sealed",
        "sealed_void",
        "learned_seal",
        "applying",
        "finished",
        "took_over",
        "ballot_started",
        "ballot_continues_seal",
        "ballot_gathers",
        "ballot_without_majority",
        "outbid",
        "follows",
        "forswearing",
        "forsworn_void",
        "void",
        "gave_up",
        "in_doubt",
        "settled",
        "doubt_told",
        "behind",
        "told_behind",
        "caught_up",
        "catch_up_failed",
        "rebase",
        "stale",
    ]
)
"""Events that the storms must meet, each a state or transition of a round."""

REACHED_MESSAGES = frozenset(
    [
        "Join",
        "Noted",
        "Redirect",
        "Call",
        "Coming",
        "Pass",
        "Withdraw",
        "Refused",
        "Committed",
        "Declined",
        "Behind",
        "Compare",
        "Closed",
        "Finished",
        "Void",
        "Report",
        "Reassign",
        "Missing",
        "Prepare",
        "Promise",
        "Propose",
        "Accepted",
        "Sealed",
        "Forswear",
        "Forsworn",
        "Ask",
    ]
)


@cache
def outcome(seed: int) -> tuple[str, int, Counter[str]]:
    """Trace, versions made and coverage of one storm. Raises ``Broken``.

    All changes of phase in it are in the table of the machine's docstring.
    """
    swarm = storm(seed)
    try:
        with patch.object(fragment, "FragmentRounds", Observed):
            weather_out(swarm)
        assert not Observed.seen - TABLE, "the table of phases lacks these"
    except Exception as error:
        error.add_note(f"seed {seed}, at {swarm.now:.3f} s")
        raise
    trace = swarm.trace.hexdigest()
    swarm.close()
    return trace, swarm.truth.versions_made, swarm.truth.coverage


@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", seeds(QUICK, soak=SOAK_SEEDS, step=CHUNK))
def test_no_storm_breaks_a_promise(first: int) -> None:
    made = [outcome(seed)[1] for seed in range(first, first + CHUNK)]

    assert sum(made) > 5 * CHUNK, "these swarms hardly merged anything"


@pytest.mark.parametrize("first", seeds(3, soak=99, step=3))
def test_no_storm_loses_tokens_of_statistics_which_are_set(
    monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    monkeypatch.setattr(truth, "OwnWork", partial(OwnWork, statistics=True))
    for seed in range(first, first + 3):
        weather_out(storm(seed))


@pytest.mark.timeout(600)
def test_the_weather_reaches_every_state_and_transition() -> None:
    coverage: Counter[str] = Counter()
    for seed in (*range(QUICK), *RARE):
        coverage += outcome(seed)[2]
    for event, times in sorted(coverage.items()):
        print(f"{times:>8}  {event}")  # noqa: T201

    wanted = {*REACHED, *(f"heard {name}" for name in REACHED_MESSAGES)}
    missing = [event for event in sorted(wanted) if not coverage[event]]
    assert not missing, f"never reached: {missing}"


def test_the_same_seed_gives_the_same_storm_to_the_last_bit() -> None:
    for seed in (3,):
        again = storm(seed)
        weather_out(again)
        assert again.trace.hexdigest() == outcome(seed)[0], f"seed {seed}"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("breakage", breakages.IN_STORMS, ids=lambda bug: bug.__name__)
def test_a_planted_bug_breaks_a_promise(
    breakage: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    breakage(monkeypatch)

    def broken(seed: int) -> bool:
        swarm: Swarm = storm(seed)
        try:
            weather_out(swarm)
        except (AssertionError, KeyError):  # Broken, or the executor lacks what it is asked for
            return True
        finally:
            swarm.failed(Broken("it is over"))
            swarm.close()
        return False

    assert any(broken(seed) for seed in range(40))


@cache
def of_groups(seed: int) -> Counter[str]:
    """Coverage of one storm over several groups. Raises ``Broken``."""
    how = SEVERAL_GROUPS[seed % len(SEVERAL_GROUPS)]
    swarm = storm(seed, how)
    with patch.object(fragment, "FragmentRounds", Observed):
        weather_out(swarm, how)
    swarm.close()
    return swarm.truth.coverage


@pytest.mark.parametrize("seed", seeds(3, soak=300))
def test_no_storm_breaks_a_promise_to_a_swarm_of_several_groups(seed: int) -> None:
    happened = of_groups(seed)

    assert happened["finished meld"], "nothing was melded"


@pytest.mark.timeout(600)
def test_the_table_of_phases_is_what_machines_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither can become wrong unnoticed: the docstring's table, or the machine."""
    for seed in (*range(QUICK), *RARE):
        outcome(seed)
    for seed in range(3):
        of_groups(seed)
    seen = set(Observed.seen) | seen_in_plays(monkeypatch)

    assert len(TABLE) > 60
    assert not sorted(seen - TABLE), "the table lacks these"
    assert not sorted(TABLE - seen), "the table has these, and no machine did them"


@pytest.mark.parametrize("several_groups", [False, True])
@pytest.mark.parametrize("first", seeds(4, soak=300, step=4))
def test_no_storm_breaks_a_promise_where_nobody_has_a_guard(
    first: int, several_groups: bool
) -> None:
    """No promise rests on the defences against liars where nobody lies."""
    for seed in range(first, first + 4):
        how = replace(SEVERAL_GROUPS[seed % 2] if several_groups else Storm(), guarded=False)
        swarm = storm(seed, how)
        weather_out(swarm, how)
        assert not any(peer.averager.counters()["audits"] for peer in swarm.alive)
        assert {type(peer.averager.guard) for peer in swarm.alive} == {Guard}


class OpenGate(Gate):
    """A gate that notes where it is told that fragments go, and lets them."""

    measures = True

    def __init__(self) -> None:
        self.told: list[Standing] = []

    async def before_jump(self, before: FragmentState, after: Standing) -> None:
        self.told.append(after)


def test_a_gate_is_told_the_versions_that_melds_make(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was told a lineage that no state ever had, and judged no meld."""
    monkeypatch.setattr(exchange, "is_unusual", lambda moved, *, usual: True)
    how, gate = SEVERAL_GROUPS[0], OpenGate()
    swarm = storm(0, how)
    swarm.on_start = lambda peer: setattr(peer.averager.guard, "gate", gate)
    for peer in swarm.alive:
        swarm.on_start(peer)
    weather_out(swarm, how)

    assert swarm.truth.coverage["finished meld"] and gate.told
    assert all(after.lineage in swarm.truth.covered for after in gate.told)


@pytest.mark.parametrize("seed", seeds(2, soak=300))
def test_no_storm_breaks_a_promise_where_other_fragments_go_first(seed: int) -> None:
    how = Storm(gives_way=0.15)
    weather_out(storm(seed, how), how)


LEVELS = (
    Level(codec="int4", codec_down="int4", cycle_steps=10),
    Level(codec="int2", codec_down="int4", cycle_steps=10),
    Level(codec="int2", codec_down="int2", cycle_steps=25),
)


@pytest.mark.parametrize("several_groups", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_no_storm_breaks_a_promise_where_codecs_and_cycles_follow_the_lines(
    several_groups: bool,
) -> None:
    how = replace(SEVERAL_GROUPS[0] if several_groups else Storm(), smaller_levels=LEVELS)
    coverage: Counter[str] = Counter()
    for seed in (0, 1) if several_groups else (3, 5):
        swarm = storm(seed, how)
        weather_out(swarm, how)
        coverage += swarm.truth.coverage
    assert coverage["level"] and coverage["takes_part"], coverage


SOAKS = (
    SOAK,
    replace(SOAK, peers=(9, 14), group_size=4),
    SOAK,
    replace(SOAK, peers=(6, 14), group_size=3),
    Storm(peers=(2, 4), accidents=(4, 10), rough_s=200.0),
    replace(SOAK, peers=(6, 14), group_size=5),
    replace(SOAK, sites=2),
    Storm(peers=(6, 10), accidents=(8, 20), group_size=3, sites=3),
    replace(SOAK, gives_way=0.15),
    replace(SOAK, peers=(6, 14), group_size=4, gives_way=0.1),
    replace(SOAK, smaller_levels=LEVELS),
)
"""One for each seed, in turn."""


def test_a_life_does_not_go_on_in_the_phase_in_which_the_one_before_it_crashed() -> None:
    """A peer was down for three minutes, and the judge took it for one that waited."""
    how = SOAKS[5415 % len(SOAKS)]
    weather_out(storm(5415, how), how)
