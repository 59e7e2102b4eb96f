from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peer.rules.ledger import (
    APART,
    CRASH,
    CYCLES,
    LEFT,
    LOST,
    QUIET_S,
    ROLLED_BACK,
    STALE,
    Fate,
    GivenUpWork,
    Ledger,
)


def begun(*sizes: int) -> Ledger:
    ledger = Ledger(sizes or (10,))
    ledger.begin(earlier_tokens=0, clean=True)
    return ledger


def test_stale_work_is_discarded_with_its_reason() -> None:
    ledger = begun()
    ledger.process(100)
    ledger.discard(0, 30, STALE)
    assert ledger.fate(0) == Fate(100, 0, 70, {STALE: 30})
    with pytest.raises(ValueError, match="70 are pending"):
        ledger.discard(0, 71, STALE)


def test_tokens_merged_or_pending_when_the_run_is_rolled_back_are_discarded_for_that() -> None:
    ledger = begun()
    ledger.process(100)
    ledger.observe(0, merged_tokens=80, settled_tokens=80)
    ledger.discard(0, 20, ROLLED_BACK)  # the parameters become those of the attested state
    ledger.observe(0, merged_tokens=30, settled_tokens=100, given_up=ROLLED_BACK)
    assert ledger.fate(0) == Fate(100, 30, 0, {ROLLED_BACK: 70})
    ledger.process(130)
    ledger.observe(0, merged_tokens=60, settled_tokens=130)
    assert ledger.fate(0) == Fate(130, 60, 0, {ROLLED_BACK: 70})
    assert ledger.total().imbalance == 0


def test_work_merged_on_a_side_that_was_given_up_is_discarded() -> None:
    ledger = begun()
    ledger.process(100)
    ledger.observe(0, merged_tokens=90, settled_tokens=90)
    ledger.observe(0, merged_tokens=40, settled_tokens=90)
    assert ledger.fate(0) == Fate(100, 40, 10, {APART: 50})


def test_a_double_merge_shows_as_excess() -> None:
    ledger = begun()
    ledger.process(100)
    ledger.observe(0, merged_tokens=50, settled_tokens=50)
    ledger.observe(0, merged_tokens=100, settled_tokens=50)
    fate = ledger.fate(0)
    assert fate.excess == 50
    assert fate.imbalance == 0


def test_a_lost_progress_file_does_not_make_processed_less_than_merged() -> None:
    ledger = begun()
    ledger.process(100)
    ledger.observe(0, merged_tokens=90, settled_tokens=90)
    ledger.begin(earlier_tokens=0, clean=False)
    assert ledger.fate(0) == Fate(100, 90, 0, {CRASH: 10})


def test_tokens_merged_after_the_checkpoint_of_a_lost_progress_file_are_recalled() -> None:
    """Earlier, they counted as merged twice: a peer had 42 k tokens trained, and 51 k of them
    merged."""
    ledger = begun()
    ledger.process(100)
    ledger.observe(0, merged_tokens=90, settled_tokens=90)
    ledger.begin(earlier_tokens=0, clean=False)
    ledger.process(20)
    ledger.observe(0, merged_tokens=150, settled_tokens=0)
    assert ledger.fate(0) == Fate(170, 150, 20, {})
    ledger.observe(0, merged_tokens=180, settled_tokens=20)
    assert ledger.fate(0).excess == 10  # later states do not explain themselves


def test_the_total_is_weighted_by_size() -> None:
    ledger = begun(30, 10)
    ledger.process(100)
    ledger.observe(0, merged_tokens=100, settled_tokens=100)
    ledger.discard(1, 20, LOST)
    assert ledger.total() == Fate(100, 75, 20, {LOST: 5})


@pytest.mark.parametrize(
    "plain",
    [
        {},
        {"accounts": 3, "earlier": 0, "current": 0},
        {"accounts": [], "earlier": 0, "current": 0},
        {"accounts": [{}], "earlier": 0, "current": 0},
        {"accounts": [], "earlier": -1, "current": 0},
        {"accounts": [], "earlier": True, "current": 0},
    ],
)
def test_an_invalid_ledger_is_refused(plain: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        Ledger.from_plain(plain, (10,))


# --- random histories against an oracle that follows every single chunk of work ------------------


@dataclass
class Chunk:
    tokens: int
    incarnation: int
    state: str = "pending"


@dataclass
class Oracle:
    """A peer and its fragments; every chunk of work has a state in each fragment."""

    sizes: tuple[int, ...]
    ledger: Ledger
    work: list[list[Chunk]] = field(init=False)
    offered: list[int | None] = field(init=False)
    in_doubt: list[list[Chunk]] = field(init=False)
    incarnation: int = 0

    def __post_init__(self) -> None:
        self.work = [[] for _ in self.sizes]
        self.offered = [None for _ in self.sizes]
        self.in_doubt = [[] for _ in self.sizes]
        self.ledger.begin(earlier_tokens=0, clean=True)

    def current(self, fragment: int) -> list[Chunk]:
        return [c for c in self.work[fragment] if c.incarnation == self.incarnation]

    def count(self, fragment: int) -> Counter[str]:
        counts: Counter[str] = Counter()
        for chunk in self.work[fragment]:
            counts[chunk.state] += chunk.tokens
        return +counts

    def tell(self, fragment: int) -> None:
        """Pass a state of this peer to the ledger."""
        mine = self.current(fragment)
        settled = sum(c.tokens for c in mine if c.state != "pending")
        self.ledger.observe(
            fragment, merged_tokens=self.count(fragment)["merged"], settled_tokens=settled
        )

    # what can happen

    def step(self, tokens: int) -> None:
        for chunks in self.work:
            chunks.append(Chunk(tokens, self.incarnation))
        self.ledger.process(sum(c.tokens for c in self.current(0)))

    def offer(self, fragment: int) -> None:
        self.offered[fragment] = len(self.work[fragment])

    def merge(self, fragment: int) -> None:
        mark = self.offered[fragment]
        if mark is not None:
            for chunk in self.work[fragment][:mark]:
                if chunk.incarnation == self.incarnation and chunk.state == "pending":
                    chunk.state = "merged"
            self.offered[fragment] = None
        self.tell(fragment)

    def void(self, fragment: int) -> None:
        self.offered[fragment] = None

    def stale(self, fragment: int) -> None:
        pending = [c for c in self.current(fragment) if c.state == "pending"]
        given_up = pending[: len(pending) // 2]
        for chunk in given_up:
            chunk.state = STALE
        self.offered[fragment] = None
        self.ledger.discard(fragment, sum(c.tokens for c in given_up), STALE)

    def restart(self, clean: bool) -> None:
        for fragment, chunks in enumerate(self.work):
            mark = self.offered[fragment]
            for index, chunk in enumerate(chunks):
                if chunk.state == "pending":
                    chunk.state = LEFT if clean else CRASH
                    if mark is not None and index < mark:
                        self.in_doubt[fragment].append(chunk)
            self.offered[fragment] = None
        self.incarnation += 1
        self.ledger.begin(
            earlier_tokens=sum(c.tokens for c in self.work[0] if c.incarnation < self.incarnation),
            clean=clean,
        )

    def merged_after_all(self, fragment: int) -> None:
        for chunk in self.in_doubt[fragment]:
            if chunk.state in (CRASH, LEFT):
                chunk.state = "merged"
        self.in_doubt[fragment] = []
        self.tell(fragment)

    def rebase(self, fragment: int) -> None:
        """The state of another side, without the later half of this incarnation's merged work."""
        merged = [c for c in self.current(fragment) if c.state == "merged"]
        settled_later = [c for c in self.current(fragment) if c.state == STALE]
        if settled_later:
            return  # what was given up in between cannot become pending again
        for chunk in merged[len(merged) // 2 :]:
            chunk.state = "pending"
        self.offered[fragment] = None
        self.tell(fragment)

    def save_and_load(self) -> None:
        text = json.dumps(self.ledger.plain())
        self.ledger = Ledger.from_plain(json.loads(text), self.sizes)


ACTIONS = st.one_of(
    st.tuples(st.just("step"), st.integers(0, 50)),
    st.tuples(st.sampled_from(["offer", "merge", "void", "stale", "rebase"]), st.integers(0, 2)),
    st.tuples(st.just("merged_after_all"), st.integers(0, 2)),
    st.tuples(st.just("restart"), st.booleans()),
    st.tuples(st.just("save_and_load")),
)


@settings(max_examples=400)
@given(st.lists(ACTIONS, max_size=60))
def test_the_ledger_agrees_with_an_oracle_after_any_history(
    actions: list[tuple[object, ...]],
) -> None:
    oracle = Oracle((5, 3, 2), Ledger((5, 3, 2)))
    for name, *arguments in actions:
        getattr(oracle, str(name))(*arguments)
        for fragment in range(3):
            fate, counts = oracle.ledger.fate(fragment), oracle.count(fragment)
            assert fate.merged == counts.pop("merged", 0)
            assert fate.pending == counts.pop("pending", 0)
            crashed = {r: n for r, n in fate.discarded.items() if r not in (CRASH, LEFT)}
            assert crashed == {r: n for r, n in counts.items() if r not in (CRASH, LEFT)}
            # A late merge tells how much of what was in doubt is in, not of which incarnation.
            assert fate.discarded_total == counts.total()
            assert fate.excess == 0
            assert fate.imbalance == 0
        assert oracle.ledger.total().imbalance == pytest.approx(0, abs=1e-6)


@given(st.lists(ACTIONS, max_size=30), st.lists(ACTIONS, max_size=30))
def test_a_ledger_saved_long_before_a_crash_still_adds_up(
    before: list[tuple[object, ...]], after: list[tuple[object, ...]]
) -> None:
    oracle = Oracle((5, 3, 2), Ledger((5, 3, 2)))
    for name, *arguments in before:
        getattr(oracle, str(name))(*arguments)
    saved = oracle.ledger.plain()
    for name, *arguments in after:
        getattr(oracle, str(name))(*arguments)
    oracle.ledger = Ledger.from_plain(saved, oracle.sizes)
    oracle.restart(False)
    for fragment in range(3):
        oracle.tell(fragment)
        fate, counts = oracle.ledger.fate(fragment), oracle.count(fragment)
        assert fate.imbalance == 0
        assert fate.excess == 0
        assert fate.processed == counts.total()
        assert fate.merged == counts["merged"]
        assert fate.pending == 0


def look(work: GivenUpWork, tokens: float, *, now: float) -> int | None:
    """A look of a peer whose cycle is short."""
    return work.look(tokens, now=now, cycle_s=1.0)


def test_work_that_fragments_give_up_in_a_long_cycle_is_told_once() -> None:
    """It was told in two parts: the second fragment was due three minutes after the first one."""
    work, cycle_s = GivenUpWork(0.0), 200.0
    assert work.look(50.0, now=0.0, cycle_s=cycle_s) is None
    assert work.look(50.0, now=180.0, cycle_s=cycle_s) is None
    assert work.look(90.0, now=190.0, cycle_s=cycle_s) is None
    assert work.look(90.0, now=189.0 + CYCLES * cycle_s, cycle_s=cycle_s) is None
    assert work.look(90.0, now=190.0 + CYCLES * cycle_s, cycle_s=cycle_s) == 90


def test_work_that_is_given_up_shortly_before_the_end_is_told_at_the_end() -> None:
    """The next life of the peer counts it as told."""
    work = GivenUpWork(0.0)
    assert look(work, 50.0, now=5.0) is None
    assert look(work, 50.0, now=math.inf) == 50
    assert look(GivenUpWork(50.0), 50.0, now=math.inf) is None
    assert look(GivenUpWork(0.0), 50.0, now=math.inf) == 50


def test_work_that_fragments_give_up_one_by_one_is_told_once() -> None:
    work = GivenUpWork(100.0)
    assert look(work, 100.0, now=0.0) is None
    assert look(work, 130.0, now=50.0) is None
    assert look(work, 160.0, now=55.0) is None, "the next fragment follows"
    assert look(work, 160.0, now=55.0 + QUIET_S - 0.1) is None
    assert look(work, 160.0, now=55.0 + QUIET_S) == 60
    assert look(work, 160.0, now=200.0) is None
    assert look(work, 161.0, now=201.0) is None
    assert look(work, 161.0, now=201.0 + QUIET_S) == 1


def test_work_that_is_lost_again_is_told_again() -> None:
    work = GivenUpWork(0.0)
    look(work, 50.0, now=0.0)
    assert look(work, 50.0, now=QUIET_S) == 50
    assert look(work, 20.0, now=100.0) is None
    look(work, 45.0, now=110.0)
    assert look(work, 45.0, now=110.0 + QUIET_S) == 25


def test_losses_of_less_than_a_token_are_not_told() -> None:
    work = GivenUpWork(0.0)
    look(work, 0.4, now=0.0)
    assert look(work, 0.4, now=QUIET_S) is None
