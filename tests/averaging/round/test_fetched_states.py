"""The fetched states that are taken, and the fate of the own work."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from averaging.history.chain import Chain
from averaging.history.merged_map import Mark, MergedMap
from averaging.history.replay import ReplayLog
from averaging.history.standing import Standing
from averaging.history.state import FragmentState
from averaging.messages import Link
from averaging.numbers.codec import Scratch
from averaging.round.fetched_states import (
    Life,
    fork_of,
    is_newer,
    prefers_replay,
)
from averaging.round.interface.effects import CatchUp, Rebase
from averaging.rules.mixing import Goal, RunsEnd
from dht.identity import PeerId

ANNA, BORIS = PeerId("anna"), PeerId("boris")
LIFE = Life(ANNA, 2)
THETA = np.zeros(4, np.float32)


def link(version: int, name: str, tokens: int) -> Link:
    return Link(version, name.encode().ljust(32, b"\0"), tokens)


def state(*links: Link, merged: dict[PeerId, Mark] | None = None) -> FragmentState:
    tip = links[-1]
    marks = {BORIS: Mark(1, 1, tip.tokens)} if merged is None else merged
    chain = Chain(links)
    return FragmentState(0, tip.version, tip.lineage, chain, THETA, THETA, MergedMap(marks))


ROOT, SHARED = link(0, "root", 0), link(1, "shared", 100)
EARLIER = state(ROOT, SHARED)
MINE = state(ROOT, SHARED, link(2, "mine", 150))
AHEAD = state(ROOT, SHARED, link(2, "mine", 150), link(3, "later", 160))
HEAVY = state(ROOT, SHARED, link(2, "theirs", 900))
LIGHT = state(ROOT, SHARED, link(2, "light", 120))


def newer(mine: FragmentState, theirs: FragmentState, *, end: RunsEnd | None = None) -> bool:
    return is_newer(Standing.of(mine), Standing.of(theirs), end=end)


def test_a_state_is_taken_that_continues_mine_or_is_heavier_and_no_other() -> None:
    assert is_newer(None, Standing.of(MINE), end=None)
    assert newer(MINE, AHEAD)
    assert newer(MINE, HEAVY)
    assert not newer(MINE, MINE)
    assert not newer(MINE, LIGHT)
    assert not newer(AHEAD, MINE)


def test_at_the_end_of_a_run_a_final_state_is_taken_however_light() -> None:
    final = state(ROOT, link(1, "had all", 200), link(2, "final", 210))
    assert newer(HEAVY, final, end=RunsEnd(Goal(200), melds=True))
    assert not newer(final, HEAVY, end=RunsEnd(Goal(200), melds=True))


def test_at_the_end_of_a_run_the_lighter_of_two_that_are_not_final_still_rebases() -> None:
    """The machine asks for it; an averager that refused fetched the same state for ever."""
    assert newer(MINE, HEAVY, end=RunsEnd(Goal(200), melds=True))
    assert not newer(HEAVY, MINE, end=RunsEnd(Goal(200), melds=True))


def test_rounds_are_replayed_while_that_is_no_larger_than_the_state() -> None:
    effect = CatchUp(BORIS, 4, b"")
    assert prefers_replay(effect, MINE, payload_bytes=16, needs_way=False)
    assert not prefers_replay(effect, MINE, payload_bytes=17, needs_way=False)
    assert prefers_replay(effect, MINE, payload_bytes=17, needs_way=True)
    assert not prefers_replay(effect, None, payload_bytes=1, needs_way=True)
    rebase = Rebase(BORIS, 4, b"")
    assert not prefers_replay(rebase, MINE, payload_bytes=1, needs_way=True)


def test_work_since_the_parting_is_offered_again_unless_others_go_on_with_it() -> None:
    rebase = Rebase(BORIS, 2, HEAVY.lineage)
    kept = ReplayLog(bytes_max=0, lineage=SHARED.lineage)
    fork = fork_of(rebase, MINE, HEAVY, LIFE, kept, stale_max=4)
    assert fork is not None and fork.shared == SHARED
    assert fork_of(rebase, MINE, HEAVY, LIFE, kept, stale_max=0) is None
    assert fork_of(rebase, MINE, HEAVY, LIFE, None, stale_max=4) is None
    later = ReplayLog(bytes_max=0, lineage=MINE.lineage)
    assert fork_of(rebase, MINE, HEAVY, LIFE, later, stale_max=4) is None
    assert fork_of(rebase, None, HEAVY, LIFE, kept, stale_max=4) is None
    catch_up = CatchUp(BORIS, 2, HEAVY.lineage)
    assert fork_of(catch_up, MINE, HEAVY, LIFE, kept, stale_max=4) is None
    followed = msgspec.structs.replace(rebase, others_follow=True)
    assert fork_of(followed, MINE, HEAVY, LIFE, kept, stale_max=4) is None
    folded = ReplayLog(bytes_max=0, lineage=SHARED.lineage)
    folded.fold(EARLIER, MINE, versions_max=4)
    fork = fork_of(rebase, MINE, HEAVY, LIFE, folded, stale_max=4)
    assert fork is not None and fork.theta is EARLIER.theta
    parting = fork.parting((), Scratch())
    assert parting is not None and parting.theta is EARLIER.theta
    has_mine = replace(HEAVY, merged=MergedMap({ANNA: Mark(2, 7, 900)}))
    assert fork_of(rebase, MINE, has_mine, LIFE, kept, stale_max=4) is None


@pytest.mark.parametrize(
    ("before", "after", "contained"),
    [
        (None, Mark(2, 5, 10), 5),
        (Mark(2, 5, 10), Mark(2, 8, 20), 8),
        (Mark(2, 8, 20), Mark(2, 8, 20), None),
        (Mark(1, 9, 20), Mark(2, 3, 30), 3),
        (None, Mark(1, 9, 20), None),
    ],
)
def test_only_marks_of_this_life_that_are_new_count_as_contained(
    before: Mark | None, after: Mark, contained: int | None
) -> None:
    known = MergedMap({} if before is None else {ANNA: before})
    assert LIFE.newly_contained(MergedMap({ANNA: after}), known) == contained


def test_work_in_doubt_that_counts_as_merged_elsewhere_is_not_offered_again() -> None:
    merged = MergedMap({ANNA: Mark(2, 5, 10)})
    for presumed, contained in ((4, 5), (6, 6), (None, 5)):
        assert LIFE.newly_contained(merged, None, presumed=presumed) == contained
    assert LIFE.newly_contained(merged, merged, presumed=4) == 4


def test_a_peer_that_gives_way_takes_any_other_state() -> None:
    gives_way = Rebase(BORIS, 2, LIGHT.lineage, gives_way=True)
    for theirs in (LIGHT, HEAVY, state(ROOT, SHARED)):
        mine, other = Standing.of(AHEAD), Standing.of(theirs)
        assert is_newer(mine, other, end=None, effect=gives_way)
    same = Standing.of(AHEAD)
    assert not is_newer(same, same, end=None, effect=gives_way)


@pytest.mark.parametrize(
    ("there", "lost"), [(Mark(1, 9, 30), 70), (Mark(1, 9, 300), 70), (Mark(2, 3, 90), 10)]
)
def test_work_of_earlier_lives_on_the_new_side_does_not_make_up_for_lost_work_of_this_life(
    there: Mark, lost: int
) -> None:
    """A peer came back with an old state, folded alone, and rebases on what it had left behind."""
    mine = MergedMap({ANNA: Mark(2, 5, 100)})
    assert LIFE.lost_tokens(mine, MergedMap({ANNA: there}), earlier=30) == lost


def test_merged_work_that_the_new_side_lacks_is_lost() -> None:
    mine = MergedMap({ANNA: Mark(2, 5, 70)})
    assert LIFE.lost_tokens(mine, HEAVY.merged, earlier=0) == 70
    assert LIFE.lost_tokens(HEAVY.merged, mine, earlier=0) == -70


def test_tokens_of_earlier_lives_are_those_of_the_last_state_without_work_of_this_one() -> None:
    assert LIFE.earlier_tokens(MergedMap({BORIS: Mark(1, 1, 9)}), 4) == 0
    assert LIFE.earlier_tokens(MergedMap({ANNA: Mark(1, 9, 30)}), 4) == 30
    assert LIFE.earlier_tokens(MergedMap({ANNA: Mark(2, 1, 100)}), 30) == 30
