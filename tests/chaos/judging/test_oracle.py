"""Verdicts on every promise, for evidence that keeps it and evidence that breaks it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.chaos.judging.evidence import Evidence, Leaks, Life, RoundReport, Sample
from tests.chaos.judging.figures import (
    in_the_run,
    largest_rise,
    losses,
    step_times_s,
    versions_per_minute,
)
from tests.chaos.judging.oracle import judge
from tests.chaos.judging.schedule import FaultKind
from tests.chaos.judging.tokens import goodput, judge_ledger, tokens
from tests.chaos.judging.verdict import Promise, Verdict
from tests.chaos.stories import (
    CYCLE,
    IDS,
    NAMES,
    STEP_TOKENS,
    evidence,
    fault,
    life,
    loss_curve,
    peer,
    rounds,
)

FATE = peer("anna").fates[0]
PART = peer("anna").fragments[0]


def verdict(promise: Promise, given: Evidence, control: Evidence | None = None) -> Verdict:
    (found,) = [each for each in judge(given, control) if each.promise is promise]
    return found


def anna(*, faults: Any = (), **changes: Any) -> Evidence:
    """A healthy swarm but for anna, and for faults."""
    return evidence(peer("anna", **changes), peer("boris"), faults=faults)


def both(**changes: Any) -> Evidence:
    return evidence(*(peer(name, **changes) for name in NAMES))


def changed(number: int, **changes: Any) -> tuple[RoundReport, ...]:
    """All rounds, one of them changed."""
    told = list(rounds())
    told[number] = replace(told[number], **changes)
    return tuple(told)


def without(begin_s: float, end_s: float) -> tuple[RoundReport, ...]:
    return tuple(told for told in rounds() if not begin_s < told.at_s < end_s)


def visited(**did: int) -> Evidence:
    """Beside strangers, who counted these things."""
    visit = replace(fault(FaultKind.CROWD, None, 20.0, 30.0), did=did)
    return evidence(faults=(visit,))


def returned(steps: int | None, *faults: Any, **changes: Any) -> Evidence:
    """Anna was killed, came back at 25 s, and merged after so many steps."""
    lives = (life(ended_s=20.0, killed=True), life(began_s=25.0, merged_after_steps=steps))
    return replace(anna(lives=lives, faults=faults), **changes)


def counting(most_peers: int) -> Life:
    lived = life()
    return replace(
        lived, reports=(*lived.reports[:-1], replace(lived.reports[-1], peers=most_peers))
    )


def grown(*bytes_at: tuple[float, float], role: str = "agent") -> tuple[Sample, ...]:
    return tuple(
        Sample(at_s=at_s, pid=7, role=role, descriptors=20, memory_bytes=int(memory))
        for at_s, memory in bytes_at
    )


def flooded(more_bytes: float, *, ready_s: float | None = 1.0) -> Evidence:
    samples = grown((18.0, 1e8), (24.0, 1e8 + more_bytes), (40.0, 1e9))
    lives = (replace(life(0.0 if ready_s == 1.0 else 8.0), ready_s=ready_s),)
    return anna(samples=samples, lives=lives, faults=(fault(FaultKind.FLOOD, None, 20.0, 30.0),))


def hosted(more_bytes: float) -> Evidence:
    samples = grown((18.0, 1e8), (24.0, 1e8 + more_bytes), role="bootstrap")
    return replace(flooded(0.0), bootstraps={"bootstrap-0": samples})


STARTING = replace(life(began_s=95.0, exit_code=-15), ready_s=None, reports=())
PAUSED = without(30.0, 60.0)
FROZEN = (fault(FaultKind.FREEZE, "anna", 31.0, 59.0),)
AGENT = (fault(FaultKind.AGENT, "anna", 31.0, 31.0),)
KILLED = (life(ended_s=50.0, killed=True),)
LEFT = Leaks(files=("/tmp/shoal-p2p-a", "/tmp/shoal-p2p-b"))


def behind(lineage: str) -> Any:
    lighter = {IDS[name]: 10 for name in NAMES}
    return replace(PART, version=40, lineage=lineage, bits="bits-40", merged=lighter)


def merging(number: int, mark: tuple[int, int, int]) -> tuple[RoundReport, ...]:
    """Rounds of which one merges this of anna: incarnation, last step and number of steps."""
    marks = rounds()[number].marks
    return changed(number, marks={**marks, IDS["anna"]: (*mark, mark[2] * STEP_TOKENS)})


def forked(*, again: tuple[int, int] | None = None, parents: tuple[str, ...] = ("line-19",)) -> Any:
    """Beside versions 20 to 22 another side merges the same steps of anna; 23 melds both.

    ``again``: last step and number of steps of anna that version 24 merges, instead of the next.
    """
    marks = {IDS["anna"]: (7, 225, 35, 35 * STEP_TOKENS)}
    side = replace(rounds()[20], lineage="side-21", round="side", marks=marks, parents=parents)
    mix = replace(rounds()[22], kind="meld", marks={}, parents=("line-22", "side-21"))
    after = [replace(each, marks={}) for each in rounds()[23:]]
    if again is not None:
        end, steps = again
        after[0] = replace(after[0], marks={IDS["anna"]: (7, end, steps, steps * STEP_TOKENS)})
    part = replace(PART, chain=PART.chain | {(21, "side-21")})
    return both(rounds=(*rounds()[:22], side, mix, *after), fragments=(part,))


def moved(**by: int) -> Any:
    """Anna's fate with some counts changed by so much."""
    return replace(FATE, **{name: getattr(FATE, name) + count for name, count in by.items()})


STORIES: dict[str, tuple[Promise, Callable[[], Evidence], bool | None, str]] = {
    "a round with two outcomes": (
        Promise.IDENTICAL, lambda: anna(rounds=changed(0, lineage="elsewhere")), False,
        "ended differently at anna and boris",
    ),
    "equal lineages, other bits": (
        Promise.IDENTICAL, lambda: anna(fragments=(replace(PART, bits="other"),)), False,
        "other bits",
    ),
    "a final state that is behind": (
        Promise.IDENTICAL, lambda: anna(fragments=(behind("line-40"),)), True, "",
    ),
    "a final state beside the history": (
        Promise.IDENTICAL, lambda: anna(fragments=(behind("line-40-elsewhere"),)), False,
        "version 40 (of no round) and version 49 (of anna, boris)",
    ),
    "steps in two versions": (
        Promise.ONCE, lambda: both(rounds=merging(20, (7, 210, 20))), False,
        "steps 190 to 210 of anna, of which 200",
    ),
    "a new incarnation": (
        Promise.ONCE, lambda: both(rounds=merging(48, (8, 10, 10))), True, "",
    ),
    "more merged than processed": (
        Promise.ONCE, lambda: anna(processed_tokens=100), False, "which processed 100",
    ),
    "an excess in a ledger": (
        Promise.ONCE, lambda: anna(fates=(replace(FATE, excess=5),)), False,
        "5 tokens merged twice",
    ),
    "steps of both sides of a mix": (Promise.ONCE, forked, True, ""),
    "next steps after a mix": (Promise.ONCE, lambda: forked(again=(235, 10)), True, ""),
    "steps of one side after a mix": (
        Promise.ONCE, lambda: forked(again=(234, 10)), False,
        "steps 224 to 234 of anna, of which 225",
    ),
    "a side of which no parent is known": (
        Promise.ONCE, lambda: forked(parents=("made alone",)), False,
        "steps 190 to 225 of anna, of which 210",
    ),
    "honest work refused": (
        Promise.ONCE, lambda: anna(rounds=changed(5, refused={IDS["boris"]: "its norm"})), False,
        "anna refused boris's honest work",
    ),
    "hostile work refused": (
        Promise.ONCE, lambda: anna(rounds=changed(5, refused={IDS["mallory"]: "x"})), True, "",
    ),
    "numbers that are not finite": (
        Promise.ONCE, lambda: anna(fragments=(replace(PART, finite=False),)), False, "not finite",
    ),
    "a stranger in a merge": (
        Promise.ONCE, lambda: both(rounds=changed(5, contributors=(*IDS.values(), "nobody"))),
        False, "nobody, an unknown peer",
    ),
    "strangers without effect": (Promise.ONCE, lambda: visited(frames=700), True, ""),
    "a stranger that was believed": (
        Promise.ONCE, lambda: visited(believed=2), False, "believed: 2",
    ),
    "a stranger with a state": (Promise.ONCE, lambda: visited(states_served=1), False, "served"),
    "a stranger counted as a member": (
        Promise.ONCE, lambda: anna(lives=(counting(3),)), False, "counted 3 peers",
    ),
    "tokens that are not accounted for": (
        Promise.LEDGER, lambda: anna(fates=(replace(FATE, pending=0),)), False, "accounts for",
    ),
    "another count of the trainer": (
        Promise.LEDGER, lambda: anna(fates=(moved(processed=5, pending=5),)), False, "own",
    ),
    "another count of the state": (
        Promise.LEDGER, lambda: anna(fates=(moved(merged=-5, pending=5),)), False, "the state",
    ),
    "no ledger": (Promise.LEDGER, lambda: anna(fates=()), False, "anna saved no ledger"),
    "a ledger of a learner killed for good": (
        Promise.LEDGER, lambda: anna(lives=KILLED, fates=(moved(processed=-1),)), True, "",
    ),
    "a ledger of a learner that starts": (
        Promise.LEDGER, lambda: anna(lives=(*KILLED, STARTING), fates=(moved(processed=-1),)),
        True, "",
    ),
    "a pause": (
        Promise.GOES_ON, lambda: both(rounds=PAUSED), False, "no merge for 30 s from 30 s on",
    ),
    "a pause while one alone was there": (
        Promise.GOES_ON,
        lambda: evidence(
            peer("anna", rounds=PAUSED, lives=(life(ended_s=31.0, killed=True), life(59.0))),
            peer("boris", rounds=PAUSED),
        ),
        True, "",
    ),
    "a pause while one was frozen": (
        Promise.GOES_ON, lambda: replace(both(rounds=PAUSED), faults=FROZEN), True, "",
    ),
    "a pause without an agent": (
        Promise.GOES_ON,
        lambda: replace(both(rounds=PAUSED, agents_in_s=(1.0, 59.0)), faults=AGENT), True, "",
    ),
    "a pause long after an agent": (
        Promise.GOES_ON,
        lambda: replace(both(rounds=PAUSED, agents_in_s=(1.0, 32.0)), faults=AGENT), False, "",
    ),
    "nothing merged in the quiet end": (
        Promise.GOES_ON, lambda: anna(rounds=without(78.0, 101.0)), False, "anna merged nothing",
    ),
    "too few steps in the quiet end": (
        Promise.GOES_ON, lambda: anna(rounds=without(78.0, 101.0), lives=(life(step_s=0.5),)),
        True, "",
    ),
    "a long round": (
        Promise.GOES_ON, lambda: anna(rounds=changed(20, seconds=30.0)), False, "a round took 30",
    ),
    "a long round of a frozen learner": (
        Promise.GOES_ON,
        lambda: anna(
            rounds=changed(20, seconds=30.0), faults=(fault(FaultKind.FREEZE, "anna", 15, 40),)
        ),
        True, "",
    ),
    "a slow departure": (
        Promise.GOES_ON, lambda: anna(lives=(life(ended_s=160.0),)), False, "60 s to leave",
    ),
    "an end by itself": (
        Promise.GOES_ON, lambda: anna(lives=(life(ended_s=50.0, exit_code=1), life(55.0))), False,
        "exit code 1",
    ),
    "a kill": (Promise.GOES_ON, lambda: anna(lives=(*KILLED, life(55.0))), True, ""),
    "an end that nobody asked for": (
        Promise.GOES_ON, lambda: anna(lives=(life(ended_s=50.0),)), False, "without being asked",
    ),
    "an end as asked": (
        Promise.GOES_ON, lambda: anna(lives=(replace(life(ended_s=50.0), asked_s=45.0),)), True,
        "",
    ),
    "a start at the end": (
        Promise.GOES_ON,
        lambda: anna(lives=(life(ended_s=90.0, killed=True), STARTING), rounds=without(78, 101)),
        True, "",
    ),
    "a start that failed": (
        Promise.GOES_ON, lambda: anna(lives=(replace(STARTING, ended_s=99.0),)), False, "",
    ),
    "a return in time": (Promise.RETURNS, lambda: returned(2 * CYCLE), True, ""),
    "a return too late": (Promise.RETURNS, lambda: returned(2 * CYCLE + 1), False, ""),
    "no merge after a return": (Promise.RETURNS, lambda: returned(None), False, "merged never"),
    "a late return on a busy machine": (
        Promise.RETURNS, lambda: returned(2 * CYCLE + 1, others_share=0.5), None, "50%",
    ),
    "a return with another fault": (
        Promise.RETURNS, lambda: returned(None, fault(FaultKind.AGENT, "anna", 28, 28)), None, "",
    ),
    "a return beside a kill": (
        Promise.RETURNS, lambda: returned(None, fault(FaultKind.KILL, "boris", 28, 30)), False,
        "",
    ),
    "a return beside a silent peer": (
        Promise.RETURNS, lambda: returned(None, fault(FaultKind.FREEZE, "boris", 28, 30)), None,
        "",
    ),
    "leftovers": (
        Promise.CLEAN, lambda: evidence(leaks=Leaks(processes=("77: p2pd",))), False, "77: p2pd",
    ),
    "a folder of a daemon killed for good": (
        Promise.CLEAN,
        lambda: replace(anna(lives=KILLED), leaks=replace(LEFT, files=LEFT.files[:1])), True, "",
    ),
    "one more folder": (
        Promise.CLEAN, lambda: replace(anna(lives=KILLED), leaks=LEFT), False, "shoal-p2p-b",
    ),
    "a short flood": (Promise.FLAT, lambda: flooded(150e6), None, "took 150 MB"),
    "a flood of memory": (Promise.FLAT, lambda: flooded(450e6), False, "450 MB larger"),
    "a flood at a start": (Promise.FLAT, lambda: flooded(450e6, ready_s=19.0), None, ""),
    "a flood before a start": (Promise.FLAT, lambda: flooded(450e6, ready_s=None), None, ""),
    "a full directory": (Promise.FLAT, lambda: hosted(300e6), None, "300 MB"),
    "more than a directory": (Promise.FLAT, lambda: hosted(350e6), False, "bootstrap-0 350 MB"),
}  # fmt: skip


@pytest.mark.parametrize("story", STORIES)
def test_a_story_has_its_verdict(story: str) -> None:
    promise, tells, kept, words = STORIES[story]
    found = verdict(promise, tells())
    assert found.kept is kept and words in found.reason, found


def test_a_healthy_swarm_breaks_no_promise() -> None:
    found = judge(evidence(), evidence())
    assert [each.promise for each in found] == list(Promise)
    unknown = {each.promise for each in found if each.kept is None}
    assert all(each.kept is not False for each in found), found
    assert unknown == {Promise.RETURNS, Promise.FLAT}


@pytest.mark.parametrize(
    ("growth_bytes_s", "descriptors_s", "kept"),
    [(1e3, 0.0, True), (1e5, 0.0, False), (0, 1.0, False)],
)
def test_memory_and_descriptors_that_grow_are_found(
    growth_bytes_s: float, descriptors_s: float, kept: bool
) -> None:
    samples = tuple(
        replace(sample, descriptors=int(20 + descriptors_s * sample.at_s))
        for sample in grown(*((float(s), 1e8 + growth_bytes_s * s) for s in range(0, 400, 2)))
    )
    beside, short = anna(samples=samples), anna(samples=samples[:100])
    assert verdict(Promise.FLAT, beside).kept is kept
    assert verdict(Promise.FLAT, short).kept is None
    assert verdict(Promise.FLAT, short, beside).kept is kept, "where nobody is killed they grow old"
    flood = replace(beside, faults=(fault(FaultKind.FLOOD, "anna", 100.0, 108.0),))
    assert verdict(Promise.FLAT, flood).kept is (descriptors_s == 0.0), "memory has a bound there"


def test_a_trainer_may_process_some_tokens_while_its_agent_ends() -> None:
    late = anna(processed_tokens=FATE.processed + 5)
    assert [judge_ledger(late, late_max=most).kept for most in (4, 5)] == [False, True]
    early = anna(processed_tokens=FATE.processed - 1)
    assert judge_ledger(early, late_max=5).kept is False


def test_tokens_are_means_over_fragments_by_size_and_goodput_their_merged_share() -> None:
    first = peer("anna")
    small = replace(PART, fragment=1, size=3000)
    lost = replace(FATE, merged=0, discarded={"crash": 62720})
    found = tokens(evidence(replace(first, fragments=(PART, small), fates=(FATE, lost))))
    assert found["processed"] == 500 * STEP_TOKENS
    assert found["merged"] == pytest.approx(490 * STEP_TOKENS / 4)
    assert found["discarded"] == found["discarded.crash"] == pytest.approx(62720 * 3 / 4)
    # 99 s at 5 steps a second are 495 steps; 490 of each learner were merged.
    assert goodput(evidence()) == pytest.approx(490 / 495)


def test_figures_are_those_of_the_same_tokens_times_and_learners() -> None:
    worse, usual = losses(evidence(held_out=loss_curve(last=2.6)), evidence())
    assert worse / usual == pytest.approx(2.7 / 2.1, rel=0.1)
    spiked = list(loss_curve())
    spiked[10] = replace(spiked[10], loss=spiked[9].loss + 1.0)
    assert largest_rise(loss_curve()) == 0.0 and largest_rise(spiked) == pytest.approx(1.0)
    slow = anna(lives=(life(step_s=0.3),), faults=(fault(FaultKind.FREEZE, "anna", 0.0, 99.0),))
    assert step_times_s(slow) == pytest.approx([0.2] * len(step_times_s(slow))), (
        "a frozen learner tells nothing"
    )
    assert in_the_run(evidence()) == pytest.approx(1.0)
    assert in_the_run(anna(lives=KILLED)) == pytest.approx((99 + 49) / (2 * 99))
    crowd = replace(visited(), faults=(fault(FaultKind.CROWD, None, 40.0, 60.0),))
    beside, alone = versions_per_minute(replace(crowd, peers=both(rounds=without(40, 50)).peers))
    assert (beside, alone) == (pytest.approx(18.0), pytest.approx(30.0, rel=0.05))
