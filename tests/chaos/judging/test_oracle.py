"""Verdicts on every promise, for evidence that keeps it and evidence that breaks it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.chaos.judging.evidence import Evidence, HostileUpload, Leaks, RoundReport, Sample
from tests.chaos.judging.oracle import judge
from tests.chaos.judging.schedule import FaultKind
from tests.chaos.judging.tokens import goodput, tokens
from tests.chaos.judging.verdict import Promise, Verdict
from tests.chaos.stories import (
    CYCLE,
    IDS,
    STEP_TOKENS,
    evidence,
    fault,
    life,
    loss_curve,
    peer,
    rounds,
)


def verdict(promise: Promise, given: Evidence, control: Evidence | None = None) -> Verdict:
    (found,) = [each for each in judge(given, control) if each.promise is promise]
    return found


def test_a_healthy_swarm_breaks_no_promise() -> None:
    found = judge(evidence(), evidence())
    assert [each.promise for each in found] == list(Promise)
    assert all(each.kept is not False for each in found), found
    unknown = {each.promise for each in found if each.kept is None}
    assert unknown == {Promise.RETURNS, Promise.RESIZES, Promise.FLAT}


# --- one history


def test_a_round_with_two_outcomes_is_found() -> None:
    other = tuple(replace(told, lineage="elsewhere") for told in rounds()[:1]) + rounds()[1:]
    found = verdict(Promise.IDENTICAL, evidence(peer("anna"), peer("boris", rounds=other)))
    assert found.kept is False and "ended differently at anna and boris" in found.reason


def test_equal_lineages_with_other_bits_are_found() -> None:
    part = replace(peer("boris").fragments[0], bits="flipped")
    found = verdict(Promise.IDENTICAL, evidence(peer("anna"), peer("boris", fragments=(part,))))
    assert found.kept is False and "other bits" in found.reason


def test_a_final_state_may_be_behind_in_the_history_but_not_outside_of_it() -> None:
    part = peer("boris").fragments[0]
    lighter = {IDS["anna"]: 10, IDS["boris"]: 10}
    behind = replace(part, version=40, lineage="line-40", bits="bits-40", merged=lighter)
    apart = replace(behind, lineage="line-40-elsewhere")
    for fragment, kept in ((behind, True), (apart, False)):
        found = verdict(
            Promise.IDENTICAL, evidence(peer("anna"), peer("boris", fragments=(fragment,)))
        )
        assert found.kept is kept, found
    assert "version 40 (of no round) and version 49 (of anna, boris)" in found.reason


# --- nothing twice


def test_steps_that_two_versions_have_are_merged_twice() -> None:
    again = rounds()[20]
    marks = {**again.marks, IDS["anna"]: (7, 210, 20, 20 * STEP_TOKENS)}
    told = (*rounds()[:20], replace(again, marks=marks), *rounds()[21:])
    found = verdict(Promise.ONCE, evidence(peer("anna", rounds=told), peer("boris", rounds=told)))
    assert found.kept is False and "steps 190 to 210 of anna, of which 200" in found.reason


def forked(*, again: tuple[int, int] | None = None) -> Evidence:
    """Beside versions 20 to 22 another side merges the same steps of anna; 23 mixes both.

    ``again``: last step and number of steps of anna that version 24 merges, instead of the next.
    """
    marks = {IDS["anna"]: (7, 225, 35, 35 * STEP_TOKENS)}
    side = replace(rounds()[20], lineage="side-21", round="side", marks=marks, parents=("line-19",))
    mix = replace(rounds()[22], kind="mix", marks={}, parents=("line-22", "side-21"))
    after = [replace(each, marks={}) for each in rounds()[23:]]
    if again is not None:
        end, steps = again
        after[0] = replace(after[0], marks={IDS["anna"]: (7, end, steps, steps * STEP_TOKENS)})
    told = (*rounds()[:22], side, mix, *after)
    part = peer("anna").fragments[0]
    parts = (replace(part, chain=part.chain | {(21, "side-21")}),)
    return evidence(*(peer(name, rounds=told, fragments=parts) for name in ("anna", "boris")))


def test_steps_that_both_sides_of_a_mix_have_count_once() -> None:
    found = verdict(Promise.ONCE, forked())
    assert found.kept is True, found


@pytest.mark.parametrize(("end", "kept"), [(235, True), (234, False)])
def test_steps_that_either_side_of_a_mix_has_must_not_be_merged_after_it(
    end: int, kept: bool
) -> None:
    found = verdict(Promise.ONCE, forked(again=(end, 10)))
    assert found.kept is kept, found
    assert kept or "steps 224 to 234 of anna, of which 225" in found.reason


def test_where_a_parent_is_not_known_no_step_may_be_in_two_versions() -> None:
    given = forked()
    unknown = [
        replace(
            each,
            rounds=tuple(
                replace(told, parents=("made alone",)) if told.round == "side" else told
                for told in each.rounds
            ),
        )
        for each in given.peers
    ]
    found = verdict(Promise.ONCE, evidence(*unknown))
    assert found.kept is False and "steps 190 to 225 of anna, of which 210" in found.reason


def test_a_new_incarnation_counts_its_steps_from_nothing() -> None:
    told = tuple(
        replace(each, marks={IDS["anna"]: (8, 10 * (n - 20), 10, 10 * STEP_TOKENS)})
        if (n := each.version) > 20
        else each
        for each in rounds()
    )
    found = verdict(Promise.ONCE, evidence(peer("anna", rounds=told), peer("boris", rounds=told)))
    assert found.kept is True, found


def test_more_merged_than_processed_tokens_are_found_as_is_an_excess() -> None:
    found = verdict(Promise.ONCE, evidence(peer("anna", processed_tokens=100), peer("boris")))
    assert found.kept is False and "which processed 100" in found.reason
    fate = replace(peer("boris").fates[0], excess=5, merged=490 * STEP_TOKENS + 5)
    found = verdict(Promise.ONCE, evidence(peer("anna"), peer("boris", fates=(fate,))))
    assert found.kept is False and "5 tokens merged twice" in found.reason


# --- going on


def test_a_round_beyond_its_deadline_is_found_unless_its_peer_was_frozen_meanwhile() -> None:
    told = (*rounds()[:20], replace(rounds()[20], seconds=30.0), *rounds()[21:])
    slow = evidence(peer("anna", rounds=told), peer("boris"))
    assert verdict(Promise.BOUNDED, slow).kept is False
    frozen = replace(slow, faults=(fault(FaultKind.FREEZE, "anna", 15.0, 40.0),))
    assert verdict(Promise.BOUNDED, frozen).kept is True


def test_a_learner_that_does_not_leave_when_asked_is_found() -> None:
    late = peer("anna", lives=(life(ended_s=160.0),))
    found = verdict(Promise.BOUNDED, evidence(late, peer("boris")))
    assert found.kept is False and "anna took 60 s to leave" in found.reason


def test_a_learner_that_ends_by_itself_is_found_and_a_killed_one_is_not() -> None:
    back = life(began_s=55.0)
    died = peer("anna", lives=(life(ended_s=50.0, exit_code=1), back))
    found = verdict(Promise.GOES_ON, evidence(died, peer("boris")))
    assert found.kept is False and "exit code 1" in found.reason
    killed = peer("anna", lives=(life(ended_s=50.0, killed=True), back))
    assert verdict(Promise.GOES_ON, evidence(killed, peer("boris"))).kept is True


def test_a_learner_that_was_still_starting_at_the_end_is_not_judged() -> None:
    starting = replace(life(began_s=95.0, exit_code=-15), ready_s=None, reports=())
    told = tuple(each for each in rounds() if each.at_s < 78)
    fate = replace(peer("anna").fates[0], processed=1)
    lives = (life(ended_s=90.0, killed=True), starting)
    late = peer("anna", lives=lives, rounds=told, fates=(fate,))
    assert verdict(Promise.GOES_ON, evidence(late, peer("boris"))).kept is True
    assert verdict(Promise.LEDGER, evidence(late, peer("boris"))).kept is True
    early = peer("anna", lives=(replace(starting, ended_s=99.0),))
    assert verdict(Promise.GOES_ON, evidence(early, peer("boris"))).kept is False


def test_a_long_time_without_a_merge_is_found() -> None:
    told = tuple(each for each in rounds() if not 30 < each.at_s < 60)
    found = verdict(
        Promise.GOES_ON, evidence(peer("anna", rounds=told), peer("boris", rounds=told))
    )
    assert found.kept is False and "no merge for 30 s from 30 s on" in found.reason


def test_only_time_with_two_able_learners_counts_as_a_gap() -> None:
    told = tuple(each for each in rounds() if not 30 < each.at_s < 60)
    away = peer("anna", rounds=told, lives=(life(ended_s=31.0, killed=True), life(began_s=59.0)))
    assert verdict(Promise.GOES_ON, evidence(away, peer("boris", rounds=told))).kept is True
    both = peer("anna", rounds=told)
    frozen = (fault(FaultKind.FREEZE, "anna", 31.0, 59.0),)
    swarm = evidence(both, peer("boris", rounds=told), faults=frozen)
    assert verdict(Promise.GOES_ON, swarm).kept is True
    killed = (fault(FaultKind.AGENT, "anna", 31.0, 31.0),)
    for in_s, kept in ((59.0, True), (32.0, False)):
        without_agent = replace(both, agents_in_s=(1.0, in_s))
        swarm = evidence(without_agent, peer("boris", rounds=told), faults=killed)
        assert verdict(Promise.GOES_ON, swarm).kept is kept


def test_a_learner_that_merges_nothing_in_the_quiet_end_is_found() -> None:
    told = tuple(each for each in rounds() if each.at_s < 78)
    found = verdict(Promise.GOES_ON, evidence(peer("anna", rounds=told), peer("boris")))
    assert found.kept is False and "anna merged nothing" in found.reason
    slow = peer("anna", rounds=told, lives=(life(step_s=0.5),))  # fewer steps than four cycles
    assert verdict(Promise.GOES_ON, evidence(slow, peer("boris"))).kept is True


@pytest.mark.parametrize(("step_s", "kept"), [(0.2, True), (0.215, True), (0.25, False)])
def test_a_step_may_take_a_tenth_longer_and_no_more(step_s: float, kept: bool) -> None:
    slow = tuple(peer(name, lives=(life(step_s=step_s),)) for name in ("anna", "boris"))
    assert verdict(Promise.SPEED, evidence(*slow), evidence()).kept is kept
    assert verdict(Promise.SPEED, evidence(*slow)).kept is kept  # against its pace


@pytest.mark.parametrize(("others_share", "kept"), [(0.1, False), (0.5, None)])
def test_slow_steps_on_a_busy_machine_are_not_judged(
    others_share: float, kept: bool | None
) -> None:
    slow = tuple(peer(name, lives=(life(step_s=0.3),)) for name in ("anna", "boris"))
    found = verdict(Promise.SPEED, evidence(*slow, others_share=others_share), evidence())
    assert found.kept is kept, found
    assert verdict(Promise.SPEED, evidence(others_share=others_share), evidence()).kept is True


def test_the_steps_of_a_frozen_learner_are_not_judged() -> None:
    frozen = peer("anna", lives=(life(step_s=5.0),))
    boris = peer("boris")
    faults = (fault(FaultKind.FREEZE, "anna", 0.0, 99.0),)
    assert verdict(Promise.SPEED, evidence(frozen, boris, faults=faults)).kept is True


# --- fates


def test_unaccounted_tokens_and_differing_ledgers_are_found() -> None:
    fate = peer("anna").fates[0]
    for wrong, words in (
        (replace(fate, pending=0), "but accounts for"),
        (replace(fate, processed=fate.processed + 5, pending=fate.pending + 5), "own"),
        (replace(fate, merged=fate.merged - 5, pending=fate.pending + 5), "the state"),
    ):
        found = verdict(Promise.LEDGER, evidence(peer("anna", fates=(wrong,)), peer("boris")))
        assert found.kept is False and words in found.reason, found
    nobody = verdict(Promise.LEDGER, evidence(peer("anna", fates=()), peer("boris")))
    assert nobody.kept is False and "anna saved no ledger" in nobody.reason


def test_a_state_that_a_leaving_hostile_learner_merged_alone_is_not_the_swarms() -> None:
    part = peer("anna").fragments[0]
    alone = replace(part, lineage="alone", merged={IDS["anna"]: 1, IDS["mallory"]: 10**9})
    mallory = peer("mallory", hostile=True, fragments=(alone,))
    found = verdict(Promise.LEDGER, evidence(peer("anna"), peer("boris"), mallory))
    assert found.kept is True, found


def test_the_ledger_of_a_learner_that_was_killed_for_good_is_not_judged() -> None:
    fate = replace(peer("anna").fates[0], processed=400 * STEP_TOKENS)
    for killed, kept in ((True, True), (False, False)):
        gone = peer("anna", lives=(life(ended_s=90.0, killed=killed),), fates=(fate,))
        assert verdict(Promise.LEDGER, evidence(gone, peer("boris"))).kept is kept


def test_the_swarms_tokens_are_means_over_fragments_by_size() -> None:
    first = peer("anna")
    small = replace(first.fragments[0], fragment=1, size=3000)
    fate = replace(first.fates[0], merged=0, discarded={"crash": 62720})
    both = replace(
        first,
        fragments=(*first.fragments, small),
        fates=(*first.fates, fate),
    )
    found = tokens(evidence(both))
    assert found["processed"] == 500 * STEP_TOKENS
    assert found["merged"] == pytest.approx(490 * STEP_TOKENS / 4)
    assert found["discarded"] == found["discarded.crash"] == pytest.approx(62720 * 3 / 4)


def test_goodput_is_the_merged_share_of_the_possible_tokens() -> None:
    # 99 s at 5 steps a second are 495 steps; 490 of each learner were merged.
    assert goodput(evidence()) == pytest.approx(490 / 495)


# --- coming back


def returned(steps: int | None, *, reached: float = 100.0) -> Evidence:
    lives = (life(ended_s=20.0, killed=True), life(began_s=25.0, merged_after_steps=steps))
    return evidence(peer("anna", lives=lives), peer("boris"))


@pytest.mark.parametrize(
    ("steps", "kept"), [(2 * CYCLE, True), (2 * CYCLE + 1, False), (None, False)]
)
def test_a_learner_that_returns_contributes_within_two_cycles(
    steps: int | None, kept: bool
) -> None:
    found = verdict(Promise.RETURNS, returned(steps))
    assert found.kept is kept, found


def test_a_late_return_on_a_busy_machine_is_not_judged() -> None:
    late = returned(2 * CYCLE + 1)
    assert verdict(Promise.RETURNS, replace(late, others_share=0.5)).kept is None
    assert verdict(Promise.RETURNS, replace(late, others_share=0.1)).kept is False
    assert verdict(Promise.RETURNS, replace(returned(9), others_share=0.5)).kept is True


def test_a_return_with_another_fault_is_not_judged() -> None:
    hurt = replace(returned(None), faults=(fault(FaultKind.AGENT, "anna", 28.0, 28.0),))
    assert verdict(Promise.RETURNS, hurt).kept is None
    for kind, kept in ((FaultKind.AGENT, False), (FaultKind.KILL, False), (FaultKind.FREEZE, None)):
        others = replace(returned(None), faults=(fault(kind, "boris", 28.0, 30.0),))
        assert verdict(Promise.RETURNS, others).kept is kept


# --- loss, poison, leftovers


def test_a_worse_loss_than_the_controls_and_a_spike_are_found() -> None:
    control = evidence()
    assert verdict(Promise.LOSS, evidence(), control).kept is True
    assert verdict(Promise.LOSS, evidence()).kept is None
    assert verdict(Promise.LOSS, evidence(held_out=loss_curve(last=2.6)), control).kept is False
    points = list(loss_curve())
    points[10] = replace(points[10], loss=points[10].loss + 1.0)
    assert verdict(Promise.LOSS, evidence(held_out=tuple(points)), control).kept is False


def test_a_merged_spoilt_upload_is_found_except_flipped_signs() -> None:
    def poisoned(kind: str, *, merged: bool) -> Verdict:
        told = rounds()
        if merged:
            contributors = (*told[5].contributors, IDS["mallory"])
            told = (*told[:5], replace(told[5], contributors=contributors), *told[6:])
        return verdict(
            Promise.HYGIENE,
            evidence(
                peer("anna", rounds=told),
                peer("boris", rounds=told),
                peer("mallory", hostile=True),
                hostile_uploads=(HostileUpload(round="round-6", kind=kind),),
            ),
        )

    assert poisoned("nan", merged=True).kept is False
    assert poisoned("nan", merged=False).kept is True
    assert poisoned("flip", merged=True).kept is None  # there was no upload to refuse


def test_a_refusal_of_honest_work_is_found() -> None:
    told = list(rounds())
    told[5] = replace(told[5], refused={IDS["boris"]: "payload in int8 refused: its norm is 1e4"})
    found = verdict(Promise.HYGIENE, evidence(peer("anna", rounds=tuple(told)), peer("boris")))
    assert found.kept is False and "anna refused boris's honest work" in found.reason
    told[5] = replace(told[5], refused={IDS["mallory"]: "payload in int8 refused: its norm is 1e4"})
    found = verdict(Promise.HYGIENE, evidence(peer("anna", rounds=tuple(told)), peer("boris")))
    assert found.kept is True


def test_numbers_that_are_not_finite_are_found() -> None:
    part = replace(peer("anna").fragments[0], finite=False)
    ill = evidence(peer("anna", fragments=(part,)), peer("boris"))
    assert verdict(Promise.HYGIENE, ill).kept is False


def visited(**did: int) -> Evidence:
    visit = replace(fault(FaultKind.FLOOD, None, 20.0, 30.0), did=did)
    return evidence(peer("anna"), peer("boris"), faults=(visit,))


def test_a_stranger_that_got_no_frame_through_is_no_evidence() -> None:
    assert verdict(Promise.HYGIENE, visited(dials_failed=9)).kept is None
    hurt = visited(dials_failed=9)
    more = replace(hurt, faults=(*hurt.faults, fault(FaultKind.KILL, "anna", 20.0, 25.0)))
    assert verdict(Promise.HYGIENE, more).kept is True  # another fault provides evidence
    found = verdict(Promise.HYGIENE, visited(streams=300, frames=700))
    assert found.kept is True and "700 frames of strangers had no effect" in found.reason


def test_a_stranger_in_a_merge_is_found() -> None:
    told = list(rounds())
    told[5] = replace(told[5], contributors=(*told[5].contributors, "id-of-nobody"))
    found = verdict(Promise.HYGIENE, evidence(peer("anna", rounds=tuple(told)), peer("boris")))
    assert found.kept is False and "id-of-nobody, an unknown peer" in found.reason


@pytest.mark.parametrize(("most_bytes", "kept"), [(150e6, True), (450e6, False)])
def test_memory_growth_in_a_flood_is_bounded(most_bytes: float, kept: bool) -> None:
    samples = tuple(
        Sample(at_s=at_s, pid=7, role="agent", descriptors=20, memory_bytes=int(memory))
        for at_s, memory in ((10.0, 9e8), (18.0, 1e8), (24.0, 1e8 + most_bytes), (40.0, 1e9))
    )
    given = replace(visited(frames=1), peers=(peer("anna", samples=samples), peer("boris")))
    found = verdict(Promise.BOUNDED, given)
    assert found.kept is kept and f"{most_bytes / 1e6:.0f} MB" in found.reason


@pytest.mark.parametrize(("ready_s", "kept"), [(10.0, False), (19.0, True), (None, True)])
def test_a_learner_that_starts_in_a_flood_grows_by_itself(
    ready_s: float | None, kept: bool
) -> None:
    samples = tuple(
        Sample(at_s=at_s, pid=7, role="trainer", descriptors=20, memory_bytes=int(memory))
        for at_s, memory in ((18.0, 5e7), (24.0, 3e8))
    )
    lives = (replace(life(8.0), ready_s=ready_s),)
    given = replace(
        visited(frames=1), peers=(peer("anna", samples=samples, lives=lives), peer("boris"))
    )
    assert verdict(Promise.BOUNDED, given).kept is kept


def among_strangers(*, made_every_s: float, **did: int) -> Evidence:
    """Strangers from 100 to 160 s of 300, beside whom a version is made at this interval."""
    crowd = replace(fault(FaultKind.CROWD, None, 100.0, 160.0), did={"frames": 1, **did})
    times, at_s = [], 0.0
    while at_s < 300.0:
        at_s += made_every_s if 100.0 <= at_s < 160.0 else 1.0
        times.append(at_s)
    told = tuple(
        replace(rounds()[0], at_s=at_s, round=f"round-{number}", version=number)
        for number, at_s in enumerate(times)
    )
    lives = (life(ended_s=301.0),)
    both = [peer(name, rounds=told, lives=lives) for name in ("anna", "boris")]
    given = evidence(*both, faults=(crowd,))
    return replace(given, ready_s=0.0, quiet_s=160.0, ended_s=300.0)


def test_versions_that_come_more_slowly_beside_strangers_are_found() -> None:
    slow = verdict(Promise.GOES_ON, among_strangers(made_every_s=1.5))
    assert slow.kept is False and "versions a minute beside strangers, 60 (" in slow.reason
    as_fast = verdict(Promise.GOES_ON, among_strangers(made_every_s=1.0))
    assert as_fast.kept is True and "60 versions a minute beside strangers, 60 (" in as_fast.reason
    busy = verdict(Promise.GOES_ON, replace(among_strangers(made_every_s=1.5), others_share=0.5))
    assert busy.kept is True and "beside strangers" in busy.reason
    assert "beside strangers" not in verdict(Promise.GOES_ON, evidence()).reason


@pytest.mark.parametrize("word", ["believed", "states_served"])
def test_a_stranger_that_was_believed_or_got_a_state_is_found(word: str) -> None:
    assert verdict(Promise.HYGIENE, among_strangers(made_every_s=1.0)).kept is True
    found = verdict(Promise.HYGIENE, among_strangers(made_every_s=1.0, **{word: 2}))
    assert found.kept is False and f"{word}: 2" in found.reason


def test_a_peer_that_counts_a_stranger_as_a_member_is_found() -> None:
    lived = life()
    reports = (*lived.reports[:-1], replace(lived.reports[-1], peers=3))
    given = evidence(peer("anna", lives=(replace(lived, reports=reports),)), peer("boris"))
    found = verdict(Promise.HYGIENE, given)
    assert found.kept is False and "counted 3 peers in the run; it has 2" in found.reason


@pytest.mark.parametrize(("most_bytes", "kept"), [(300e6, True), (350e6, False)])
def test_a_bootstrap_peer_may_keep_as_much_as_a_full_directory(
    most_bytes: float, kept: bool
) -> None:
    samples = tuple(
        Sample(at_s=at_s, pid=7, role="bootstrap", descriptors=20, memory_bytes=int(memory))
        for at_s, memory in ((18.0, 1e8), (24.0, 1e8 + most_bytes))
    )
    given = replace(visited(frames=1), bootstraps={"bootstrap-0": samples})
    found = verdict(Promise.BOUNDED, given)
    assert found.kept is kept, found.reason


def test_folders_of_daemons_that_were_killed_for_good_are_no_leftovers() -> None:
    left = Leaks(files=("/tmp/shoal-p2p-a", "/tmp/shoal-p2p-b"))
    killed = peer("anna", lives=(life(ended_s=50.0, killed=True),))
    found = verdict(Promise.CLEAN, evidence(killed, peer("boris"), leaks=left))
    assert found.kept is False and "/tmp/shoal-p2p-b" in found.reason
    one = Leaks(files=left.files[:1])
    assert verdict(Promise.CLEAN, evidence(killed, peer("boris"), leaks=one)).kept is True


def test_leftovers_are_named() -> None:
    left = Leaks(processes=("77: p2pd",), files=("/tmp/x",))
    found = verdict(Promise.CLEAN, evidence(leaks=left))
    assert found.kept is False and "77: p2pd" in found.reason and "/tmp/x" in found.reason


@pytest.mark.parametrize(
    ("growth_bytes_s", "descriptors_s", "kept"),
    [(1e3, 0.0, True), (1e5, 0.0, False), (0, 1.0, False)],
)
def test_memory_and_descriptors_that_grow_are_found(
    growth_bytes_s: float, descriptors_s: float, kept: bool
) -> None:
    samples = tuple(
        Sample(
            at_s=float(second),
            pid=7,
            role="agent",
            descriptors=int(20 + descriptors_s * second),
            memory_bytes=int(1e8 + growth_bytes_s * second),
        )
        for second in range(0, 400, 2)
    )
    found = verdict(Promise.FLAT, evidence(peer("anna", samples=samples), peer("boris")))
    assert found.kept is kept, found
    short = evidence(peer("anna", samples=samples[:100]), peer("boris"))
    assert verdict(Promise.FLAT, short).kept is None
    beside = evidence(peer("anna", samples=samples), peer("boris"))
    assert verdict(Promise.FLAT, short, beside).kept is kept, "where nobody is killed they grow old"

    flooded = replace(beside, faults=(fault(FaultKind.FLOOD, "anna", 100.0, 108.0),))
    keeps_descriptors = descriptors_s == 0.0
    assert verdict(Promise.FLAT, flooded).kept is keeps_descriptors, "a flood's memory has a bound"
    assert verdict(Promise.FLAT, flooded, beside).kept is kept


# --- sizes


SIZES = ((1.0, 2), (30.0, 3), (60.0, 2))


def test_a_swarm_that_merges_on_while_it_is_resized_keeps_its_promise() -> None:
    found = verdict(Promise.RESIZES, evidence(sizes=SIZES))
    assert found.kept is True
    assert "2 to 3 learners" in found.reason and "0.62 cycles" in found.reason


def without_rounds(begin_s: float, end_s: float) -> tuple[RoundReport, ...]:
    return tuple(told for told in rounds() if not begin_s < told.at_s < end_s)


def test_a_pause_of_more_than_a_cycle_is_found_while_the_swarm_is_resized() -> None:
    """Merges that are due every 3.2 s may be 6.4 s apart."""
    for until_s, kept in ((33.0, True), (35.0, False)):
        told = without_rounds(29.0, until_s)
        peers = [peer("anna", rounds=told), peer("boris", rounds=told)]
        assert verdict(Promise.RESIZES, evidence(*peers, sizes=SIZES)).kept is kept


def test_a_pause_until_the_round_of_killed_learners_is_over_is_allowed() -> None:
    told = without_rounds(60.0, 76.0)
    killed = life(ended_s=61.0, killed=True)
    sizes = ((1.0, 3), (61.0, 2))
    for lives, kept in (((killed,), True), ((replace(killed, killed=False),), False)):
        third = peer("mallory", rounds=told, lives=lives)
        given = evidence(peer("anna", rounds=told), peer("boris", rounds=told), third, sizes=sizes)
        assert verdict(Promise.RESIZES, given).kept is kept


def test_a_step_in_the_loss_is_found_while_the_swarm_is_resized() -> None:
    curve = list(loss_curve())
    curve[10] = replace(curve[10], loss=curve[9].loss + 0.3)
    found = verdict(Promise.RESIZES, evidence(sizes=SIZES, held_out=tuple(curve)))
    assert found.kept is False and "rose by" in found.reason


def test_a_peer_that_was_asked_to_leave_has_not_ended_by_itself() -> None:
    early = replace(life(ended_s=50.0), asked_s=45.0)
    asked = evidence(peer("anna", lives=(early,)), peer("boris"))
    assert verdict(Promise.GOES_ON, asked).kept is True
    by_itself = evidence(peer("anna", lives=(replace(early, asked_s=None),)), peer("boris"))
    assert verdict(Promise.GOES_ON, by_itself).kept is False
