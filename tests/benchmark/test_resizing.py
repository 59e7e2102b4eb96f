"""A simulated swarm whose size changes: merges go on, and every token has a fate at any time.

``followed`` simulates a swarm that grows and shrinks by schedule, and looks at it in windows of
time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Literal, TypeAlias

import msgspec
import pytest

from averaging.rules.peer_view import SILENCE_MAX_S
from averaging.rules.policy import RoundPolicy
from averaging.virtual.membership import HEARTBEAT_S
from peer.rules.ledger import LEFT, Fate
from peer.simulate.outcome import RoundRecord
from peer.simulate.settings import End, Event, Swarm
from peer.simulate.simulation import SimulatedSwarm
from tests.swarms.sizes import Sizes, parse

pytestmark = pytest.mark.slow
"""Figures of swarms. That those left of a round merge on is in averaging/virtual/test_schedules.py,
and that a swarm may grow and shrink in the storms."""

EXPERIMENT = Swarm().with_settings(
    {
        "peers.step_jitter": 0.05,
        "problem.size": 4,
        "outer.fragments": 2,
        "rounds.group_size": 8,
    }
)
CYCLE_S = EXPERIMENT.cycle_s
MISSED_AFTER = (SILENCE_MAX_S + HEARTBEAT_S + 2 * RoundPolicy().margin_s) / CYCLE_S
"""Cycles until all have noticed that a peer is dead, and are out of their rounds with it."""

PAUSE_MAX = 1.0
"""Merges of a fragment come once in a cycle. A pause, in cycles, is what is longer than that."""


Ending: TypeAlias = Literal["crash", "leave"]
"""The end of a peer: without a word, or in order."""

TAIL_CYCLES = 4.0
"""The swarm goes on for so long at its last size."""
NO_END_TOKENS = 10**15
WINDOWS = 10


@dataclass(frozen=True, slots=True)
class Window:
    """Figures of the time between two moments."""

    until_s: float
    peers: int
    """Living peers at its end."""
    merges: float
    """Finished rounds of a fragment in a cycle: about as many as there are groups."""
    pause: float
    """Longest time without a merge of any fragment that ended in it, in cycles."""
    fragment_pause: float
    """The same for one fragment alone, whose merges come once in a cycle."""
    fate: Fate
    """Fate of all tokens that were processed until its end."""


@dataclass(frozen=True, slots=True)
class Resized:
    """A simulated swarm that followed a schedule of sizes."""

    windows: list[Window]
    group_max: int
    """Largest number of members of a round."""

    @property
    def pause(self) -> float:
        return max(window.pause for window in self.windows)

    @property
    def fragment_pause(self) -> float:
        return max(window.fragment_pause for window in self.windows)


def resized(experiment: Swarm, sizes: Sizes, ending: Ending) -> Swarm:
    """The experiment with this schedule in place of its number of peers, events and end."""
    events = []
    for change in sizes.changes:
        if change.starts:
            events.append(Event(kind="join", at_s=change.at_s, peers=list(change.starts)))
        if change.ends:
            events.append(Event(kind=ending, at_s=change.at_s, peers=list(change.ends)))
    time_s = sizes.over_s + TAIL_CYCLES * CYCLE_S
    replace = msgspec.structs.replace
    return replace(
        experiment,
        peers=replace(experiment.peers, count=sizes.count),
        event=events,
        end=End(tokens=NO_END_TOKENS, time_s=time_s),
    )


def _pause(times: Sequence[float], begin_s: float, end_s: float) -> float:
    """The longest time between two merges that ended between two moments, or had not ended then."""
    before = max((at_s for at_s in times if at_s <= begin_s), default=0.0)
    moments = [before, *sorted(at_s for at_s in times if begin_s < at_s <= end_s), end_s]
    return max(later - earlier for earlier, later in pairwise(moments)) / CYCLE_S


def _window(
    begin_s: float, end_s: float, look: tuple[int, Fate], rounds: Sequence[RoundRecord]
) -> Window:
    fragments = range(EXPERIMENT.outer.fragments)
    merges = sum(begin_s < record.time_s <= end_s for record in rounds)
    times = [[record.time_s for record in rounds if record.fragment == f] for f in fragments]
    return Window(
        until_s=end_s,
        peers=look[0],
        merges=merges * CYCLE_S / (end_s - begin_s) / len(fragments),
        pause=_pause([record.time_s for record in rounds], begin_s, end_s),
        fragment_pause=max(_pause(each, begin_s, end_s) for each in times),
        fate=look[1],
    )


def followed(
    text: str,
    ending: Ending,
    seed: int,
    *,
    over_s: float = 600.0,
    group_size: int = 8,
    silence_s: float = 10.0,
) -> Resized:
    sizes = parse(text, over_s=over_s)
    settings = {"rounds.group_size": group_size, "weather.silence_s": silence_s}
    experiment = resized(EXPERIMENT.with_settings(settings), sizes, ending)
    tenths = [over_s * number / WINDOWS for number in range(WINDOWS + 1)]
    looks: list[tuple[int, Fate]] = []
    with SimulatedSwarm(experiment, seed) as swarm:
        for end_s in tenths[1:]:
            swarm.lives.call_at(end_s, lambda: looks.append((len(swarm.alive), swarm.fate())))
        result = swarm.run()
        looks.append((len(swarm.alive), result.fate))
    spans = pairwise([*tenths, over_s + TAIL_CYCLES * CYCLE_S])
    found = Resized(
        [_window(*span, look, result.rounds) for span, look in zip(spans, looks, strict=True)],
        max((record.members for record in result.rounds), default=0),
    )
    for window in found.windows:
        fate = window.fate
        assert fate.excess == 0, f"seed {seed}, {window}"
        assert fate.processed == pytest.approx(fate.merged + fate.pending + fate.discarded_total)
    assert found.group_max <= group_size
    return found


def assert_groups_follow(found: Resized, group_size: int) -> None:
    """Several groups merge in each cycle while there are more peers than one holds."""
    for before, window in zip(found.windows, found.windows[1:], strict=False):
        if min(before.peers, window.peers) > 2 * group_size:
            assert window.merges > 1.5, window


SEEDS = pytest.mark.parametrize("seed", range(2))


@SEEDS
def test_a_swarm_that_grows_and_shrinks_in_order_merges_on_with_those_that_are_left(
    seed: int,
) -> None:
    """The last three of several groups may stand on versions that too few of those present have
    signed: they wait for a quorum up to three times. Seed 1 pauses for 5.1 cycles, seed 0 for 2.6.
    """
    found = followed("2,16,2", "leave", seed, over_s=300.0, group_size=4)

    assert found.pause < PAUSE_MAX + 0.25, f"seed {seed}"
    assert found.fragment_pause < 1.0 + 5 * PAUSE_MAX, f"seed {seed}"
    assert found.windows[-1].peers == 2
    assert_groups_follow(found, 4)


@SEEDS
def test_peers_that_leave_in_order_have_the_others_come_for_their_work(seed: int) -> None:
    fate = followed("6,6,2", "leave", seed, over_s=120.0).windows[-1].fate

    assert fate.discarded[LEFT] < 0.012 * fate.processed, "2.1% where they only answered calls"


@SEEDS
def test_a_flash_crowd_costs_no_merge(seed: int) -> None:
    found = followed("8,8/16,16", "crash", seed, over_s=240.0, group_size=4)

    assert found.fragment_pause < 1.25, f"seed {seed}"
    assert_groups_follow(found, 4)


@SEEDS
def test_those_left_of_a_swarm_that_lost_nine_tenths_merge_on_when_the_dead_are_missed(
    seed: int,
) -> None:
    found = followed("20,20/2,2", "crash", seed, over_s=240.0, group_size=4)

    assert found.fragment_pause < 1.0 + MISSED_AFTER, f"seed {seed}"
    assert found.windows[-1].merges > 0.7


@pytest.mark.parametrize("seed", range(3))
def test_two_to_forty_peers_and_back_in_ten_minutes(seed: int) -> None:
    found = followed("2,40,2", "leave", seed)

    assert max(window.peers for window in found.windows) >= 39
    assert found.fragment_pause < 1.0 + PAUSE_MAX, f"seed {seed}"
    assert_groups_follow(found, 8)
    assert found.windows[-1].fate.merged > 0.9 * found.windows[-1].fate.processed


@pytest.mark.parametrize("seed", range(3))
def test_processes_killed_one_by_one_cost_no_pause_of_a_cycle(seed: int) -> None:
    """The machine of a killed process closes its connections at once."""
    found = followed("2,40,2", "crash", seed, silence_s=0.5)

    assert found.pause < PAUSE_MAX, f"seed {seed}"
    assert found.fragment_pause < 1.0 + PAUSE_MAX, f"seed {seed}"


def test_machines_that_vanish_one_by_one_are_out_of_rounds_when_they_are_missed() -> None:
    """On average of three seeds: where two rounds in a row have dead members it takes longer."""
    pauses = [followed("2,40,2", "crash", seed).fragment_pause for seed in range(3)]

    assert fmean(pauses) < MISSED_AFTER + 0.25, pauses


@pytest.mark.parametrize("seed", range(3))
def test_forty_peers_that_become_four_at_once_soon_merge_again(seed: int) -> None:
    """Seed 2 stood still for 7.5 cycles: its last two were in a round with five dead."""
    found = followed("40,40/4,4", "crash", seed)

    assert found.fragment_pause < 1.0 + MISSED_AFTER, f"seed {seed}"


@pytest.mark.parametrize("seed", range(3))
def test_twenty_peers_that_become_forty_at_once_hardly_pause(seed: int) -> None:
    found = followed("20,20/40,40", "crash", seed)

    assert found.fragment_pause < 1.25, f"seed {seed}"
    assert_groups_follow(found, 8)
