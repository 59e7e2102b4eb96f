"""Parts of the agent that need no network: account, held-out loss, status, policies, logs."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from averaging.guard.loss_gate import REFUSED
from averaging.history.chain import Chain
from averaging.history.merged_map import MergedMap
from averaging.history.state import FragmentState
from averaging.messages import Link
from averaging.numbers.layout import Layout, TensorSpec
from dht.identity import RunId
from dht.membership.orders import Root
from dht.records import PeerRecord
from peer.agent import agent
from peer.agent.account import Account, fates
from peer.agent.network import peer_view
from peer.agent.policies import averager_settings, presence_settings, round_policy
from peer.agent.slots import Adopted
from peer.bridge.messages import Phase
from peer.bridge.shared_memory import Adoption, AdoptionOrder, SharedTensors
from peer.rules.ending import Ending, Heard, Merged
from peer.rules.others import HeldOutLoss
from peer.run_file.reading import parse
from peer.status import HeldOut
from peer.storage.outer_state import global_tokens
from peer.views import agent_page
from peer.views.event_log import EventLog, read_events
from tests.peer.agent.example_peers import member
from tests.peer.statuses import BORIS, CLARA, ME, a_status

RUN = RunId("ab" * 32)
INCARNATION = 100


def memory() -> SharedTensors:
    return SharedTensors.create([3, 6], layout=bytes(32), incarnation=INCARNATION, coarse=False)


def processed(made: SharedTensors, tokens: int) -> None:
    made.report(step=tokens // 10, tokens=tokens, step_time_s=0.1, batch_tokens_max=10)


def state(fragment: int, merged: MergedMap) -> FragmentState:
    size = (3, 6)[fragment]
    founded = FragmentState.founded(bytes(32), fragment, np.zeros(size, np.float32), 0)
    return FragmentState(
        fragment, 1, b"l" * 32, founded.chain, founded.theta, founded.momentum, merged
    )


def account(made: SharedTensors, marks: dict[tuple[int, int], int] | None = None) -> Account:
    known = marks or {}
    made_account = Account(ME, made, [3, 6], lambda fragment, step: known.get((fragment, step)))
    made_account.open(None, earlier_tokens=0, ended_cleanly=True)
    return made_account


def test_tokens_are_merged_in_one_fragment_and_pending_in_the_other() -> None:
    made = memory()
    kept = account(made, {(0, 4): 40})
    processed(made, 90)
    merged = MergedMap().with_work(ME, INCARNATION, 4, 40)
    total = kept.update([state(0, merged), state(1, MergedMap())])

    assert kept.ledger.fate(0).merged == 40
    assert kept.ledger.fate(0).pending == 50
    assert kept.ledger.fate(1).pending == 90
    assert total.imbalance == pytest.approx(0)
    flat = fates(total)
    assert flat["processed"] == pytest.approx(sum(flat.values()) - flat["processed"])


def test_work_that_was_overwritten_stays_discarded() -> None:
    made = memory()
    kept = account(made)
    processed(made, 90)
    made.note_adoption(0, AdoptionOrder(Adoption.SET, 1, b"l" * 32, None, 0), step=9, tokens=90)
    kept.lost(Adopted(0, 1, 90, "overwritten"))
    for _ in range(3):  # asking again changes nothing
        kept.update([state(0, MergedMap()), state(1, MergedMap())])

    assert kept.ledger.fate(0).discarded == {"lost": 90}
    assert kept.ledger.fate(0).pending == 0
    assert kept.ledger.fate(1).pending == 90


def test_work_that_is_lost_with_what_the_owner_takes_back_is_counted_as_that_once() -> None:
    made = memory()
    kept = account(made, {(0, 4): 40, (0, 12): 120})
    processed(made, 90)
    kept.update([state(0, MergedMap().with_work(ME, INCARNATION, 4, 40)), None])
    root = Root(3, b"r" * 32)
    kept.roots = lambda: [root]

    def after(lineage: bytes, version: int, merged: MergedMap) -> FragmentState:
        links = {Link(3, root.lineage, 0), Link(version, lineage, merged.tokens)}
        return replace(state(0, merged), version=version, lineage=lineage, chain=Chain(links))

    made.note_adoption(0, AdoptionOrder(Adoption.SET, 3, root.lineage, None, 0), step=9, tokens=90)
    kept.lost(Adopted(0, 3, 50, "rolled back"))
    kept.update([after(root.lineage, 3, MergedMap()), None])
    assert kept.ledger.fate(0).discarded == {"rolled back": 90}

    processed(made, 150)
    made.note_adoption(0, AdoptionOrder(Adoption.ADD, 4, b"a" * 32, 12, 120), step=15, tokens=150)
    kept.update([after(b"a" * 32, 4, MergedMap().with_work(ME, INCARNATION, 12, 30)), None])
    assert kept.ledger.fate(0).merged == 30
    made.note_adoption(0, AdoptionOrder(Adoption.ADD, 5, b"b" * 32, None, 120), step=15, tokens=150)
    kept.update([after(b"b" * 32, 5, MergedMap()), None])  # the heavier side of a later fork
    assert kept.ledger.fate(0).discarded == {"rolled back": 90, "apart": 30}


def test_nothing_counts_as_given_up_while_a_new_agent_is_behind_its_trainer() -> None:
    made = memory()
    kept = account(made, {(0, 4): 40})
    made.note_adoption(0, AdoptionOrder(Adoption.ADD, 2, b"m" * 32, 4, 40), step=5, tokens=50)
    processed(made, 90)
    for _ in range(2):
        kept.update([state(0, MergedMap()), state(1, MergedMap())])
    assert kept.ledger.fate(0).discarded == {}
    assert kept.ledger.fate(0).pending == 90

    merged = state(0, MergedMap().with_work(ME, INCARNATION, 4, 40))
    kept.update([dataclasses.replace(merged, version=2, lineage=b"m" * 32), None])
    assert kept.ledger.fate(0).merged == 40
    assert kept.ledger.fate(0).pending == 50
    assert kept.ledger.total().imbalance == pytest.approx(0)


def test_work_that_an_agent_had_merged_before_it_died_is_not_counted_twice() -> None:
    """The agent's successor knows neither how many tokens that was, nor that the rest is
    overwritten."""
    made = memory()
    kept = account(made)
    kept.update([state(0, MergedMap()), None])
    processed(made, 90)
    later = state(0, MergedMap().with_work(ME, INCARNATION, 6, 60))
    kept.update([later, None])  # the agent has it, the trainer not yet
    made.note_adoption(0, AdoptionOrder(Adoption.SET, 1, b"l" * 32, None, 0), step=9, tokens=90)
    kept.lost(Adopted(0, 1, 90, "overwritten"))
    kept.update([later, None])

    assert kept.ledger.fate(0).excess == 0
    assert kept.ledger.fate(0).merged == 60
    assert kept.ledger.fate(0).discarded == {"lost": 30}


@pytest.mark.parametrize(
    ("told", "reason"), [("stale: began 9 versions ago", "stale"), (REFUSED, "refused")]
)
def test_work_that_is_given_up_is_discarded_with_its_reason(told: str, reason: str) -> None:
    made = memory()
    kept = account(made)
    processed(made, 50)
    made.note_adoption(0, AdoptionOrder(Adoption.SET, 1, b"l" * 32, None, 0), step=5, tokens=50)
    kept.lost(Adopted(0, 1, 50, told))
    assert kept.ledger.fate(0).discarded == {reason: 50}


def test_a_new_trainer_inherits_what_the_one_before_it_lost() -> None:
    made = memory()
    kept = account(made)
    processed(made, 90)
    kept.update([None, None])
    saved = json.loads(json.dumps(kept.plain()))

    same = Account(ME, made, [3, 6], lambda fragment, step: None)
    assert same.opened_with is None
    same.open(saved, earlier_tokens=0, ended_cleanly=True)
    assert same.ledger.fate(0).pending == 90  # only the agent was started anew
    assert same.opened_with == same.ledger.total()

    later = SharedTensors.create(
        [3, 6], layout=bytes(32), incarnation=INCARNATION + 1, coarse=False
    )
    after = Account(ME, later, [3, 6], lambda fragment, step: None)
    after.open(saved, earlier_tokens=90, ended_cleanly=False)
    assert after.ledger.fate(0).discarded == {"crash": 90}
    assert after.opened_with is not None and after.opened_with.discarded == {"crash": 90.0}
    assert after.ledger.total().processed == 90


def test_work_of_this_trainer_is_not_that_of_an_earlier_one_too() -> None:
    """Of an agent that was started anew before the first checkpoint, while the trainer goes on."""
    made = memory()
    processed(made, 90)
    kept = Account(ME, made, [3, 6], lambda fragment, step: None)
    kept.update([None, None])  # somebody asks for the account before it is open
    kept.open(None, earlier_tokens=0, ended_cleanly=True)

    kept.update([None, None])
    assert kept.ledger.total().processed == 90
    assert kept.ledger.fate(0).discarded == {}


def test_global_tokens_count_every_peer_once() -> None:
    first = MergedMap().with_work(ME, 1, 4, 40).with_work(BORIS, 1, 2, 20)
    second = MergedMap().with_work(ME, 1, 6, 60)
    assert global_tokens([state(0, first), None, state(1, second)]) == 80


@pytest.mark.parametrize("version", range(1, 40))
def test_exactly_one_peer_measures_a_version(version: int) -> None:
    everybody = [ME, BORIS, CLARA]
    turns = [
        HeldOutLoss(RUN, me, 1).is_my_turn(version, [p for p in everybody if p != me])
        for me in everybody
    ]
    assert sum(turns) == 1


def test_a_version_is_measured_once_and_only_as_often_as_the_run_wants() -> None:
    loss = HeldOutLoss(RUN, ME, 3)
    assert [v for v in (1, 2, 3, 3, 4, 6, 3) if loss.is_my_turn(v, [])] == [3, 6]


def test_only_a_newer_measurement_is_news() -> None:
    loss = HeldOutLoss(RUN, ME, 1)
    assert loss.heard(HeldOut(3, 2.5, BORIS, 300))
    assert not loss.heard(HeldOut(3, 2.4, CLARA, 300))
    assert loss.heard(HeldOut(4, 2.3, CLARA, 400))
    assert loss.newest == HeldOut(4, 2.3, CLARA, 400)


def test_the_loss_of_a_lighter_history_does_not_stand_for_its_larger_version() -> None:
    """A peer that had trained alone for long went over to others, and showed its own old loss."""
    loss = HeldOutLoss(RUN, ME, 1)
    assert loss.heard(HeldOut(200, 2.5, ME, 300))
    assert loss.heard(HeldOut(50, 1.5, BORIS, 400))


def test_policies_are_the_run_files() -> None:
    run = parse(
        """
        [outer]
        steps_per_cycle = 7
        overlap_steps = 0
        learning_rate = 0.7
        momentum = 0.9
        codec = "int8"
        merge = "rda"
        [rounds]
        quorum = "all"
        grace = 0.25
        quorum_deadline_s = 12.0
        round_deadline_s = 40.0
        group_size = 5
        stale_max = 3
        alone_s = 77.0
        [membership]
        heartbeat_s = 2.0
        expiry_s = 9.0
        """
    )
    policy = round_policy(run, fragments=6)
    assert (policy.due.cycle_steps, policy.due.fragments) == (7, 6)
    assert (policy.eta, policy.mu, policy.codec, policy.merge) == (0.7, 0.9, "int8", "rda")
    assert (policy.quorum.required, policy.quorum.tau, policy.quorum.gamma) == ("all", 0.0, 0.25)
    assert (policy.quorum.wait_s, policy.round_s, policy.group_size) == (12.0, 40.0, 5)
    assert (policy.stale_max, policy.alone_s) == (3, 77.0)
    assert presence_settings(run).membership.heartbeat_s == 2.0
    assert presence_settings(run).membership.expiry_s == 9.0


@pytest.mark.parametrize(
    ("quorum", "required"), [('"majority"', None), ("3", 3), ("0.5", 0.5), ('"all"', "all")]
)
def test_every_way_to_say_a_quorum_is_understood(quorum: str, required: object) -> None:
    run = parse(f"[rounds]\nquorum = {quorum}\n")
    assert round_policy(run, fragments=8).quorum.required == required


def test_only_synchronous_peers_make_equally_many_steps_between_two_merges() -> None:
    together = parse('[rounds]\nquorum = "all"\n[outer]\noverlap_steps = 0\n')
    assert not round_policy(together, fragments=8).due.scale_by_speed
    assert round_policy(parse(""), fragments=8).due.scale_by_speed


@pytest.mark.parametrize("deadline", [1.0, 5.0, 30.0, 86400.0])
def test_every_deadline_that_a_run_file_allows_makes_a_policy(deadline: float) -> None:
    text = f"[rounds]\nround_deadline_s = {deadline}\nquorum_deadline_s = {min(30.0, deadline)}\n"
    assert round_policy(parse(text), fragments=8).round_s == deadline


@pytest.mark.parametrize(("known", "leads"), [(True, True), (False, False), (None, False)])
def test_only_a_peer_that_is_known_to_be_reachable_counts_as_such(
    known: bool | None, leads: bool
) -> None:
    assert peer_view(member(reachable=known)).reachable is leads


def test_a_learner_that_does_not_train_yet_is_on_its_way_in() -> None:
    assert peer_view(member(trains=False)).arrives
    assert not peer_view(member(trains=True)).arrives
    assert not peer_view(replace(member(), record=keeper_record())).arrives


def test_a_learner_that_rests_after_training_is_not_on_its_way_in() -> None:
    """Earlier, nobody could join a run whose only learner was paused: its signatures did not
    count."""
    resting = peer_view(member(trains=False, step_time_s=0.5))
    assert not resting.arrives
    assert not resting.trains


def keeper_record() -> PeerRecord:
    return PeerRecord(protocol=(1, 1), role="keeper", incarnation=1)


def fragments(count: int, values: int) -> Layout:
    return Layout.build([TensorSpec(f"t{i}", (values, 1), "float32") for i in range(count)], count)


@pytest.mark.parametrize("codec", ["int4", "f16", "f32"])
@pytest.mark.parametrize(("count", "values"), [(3, 1 << 24), (24, 1 << 21), (4, 1 << 18)])
def test_buffers_kept_after_rounds_are_in_proportion_to_the_model(
    codec: str, count: int, values: int
) -> None:
    run = parse(f'[outer]\ncodec = "{codec}"\n')
    settings = averager_settings(run, fragments(count, values))
    model_bytes = 4 * count * values
    assert settings.replay_bytes_max <= max(model_bytes / 2, 16 << 20)
    assert settings.spare_bytes_max <= max(model_bytes / 4, 16 << 20)


def test_large_fragments_are_merged_one_at_a_time_and_small_ones_as_they_come() -> None:
    exact, coarse = (parse(f'[outer]\ncodec = "{codec}"\n') for codec in ("f32", "int4"))
    assert averager_settings(exact, fragments(3, 1 << 24)).in_flight_max == 1
    assert averager_settings(coarse, fragments(3, 1 << 24)).in_flight_max == 2
    assert averager_settings(exact, fragments(24, 1 << 21)).in_flight_max == 6
    assert averager_settings(exact, fragments(3, 1000)).in_flight_max == 3  # who would mind


def test_the_event_log_keeps_every_line_whole(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "events.jsonl"
    log = EventLog(path, wall_time=lambda: 5.0)
    log.write("round", {"weights": [0.5, float("nan")], "left_out": {BORIS: "late"}, "id": b"\1"})
    log.close()
    with path.open("ab") as file:
        file.write(b'{"event": "cut o')  # a kill -9
    log = EventLog(path, wall_time=lambda: 6.0)
    log.write("next", {"path": tmp_path})
    log.close()

    first, second = read_events(path)
    assert first == {
        "at": 5.0,
        "event": "round",
        "weights": [0.5, None],
        "left_out": {BORIS: "late"},
        "id": "01",
    }
    assert (second["event"], second["path"]) == ("next", str(tmp_path))


def test_the_page_shows_figures_that_prometheus_reads() -> None:
    class Figures:
        def collect(self) -> object:
            return agent_page.metrics(a_status())

    registry = CollectorRegistry()
    registry.register(Figures())  # type: ignore[arg-type]
    text = generate_latest(registry).decode()
    assert "shoal_loss 2.5" in text
    assert 'shoal_version{fragment="1"} 4.0' in text
    assert 'shoal_tokens{fate="pending"} 10.0' in text
    assert all(check.ok for check in agent_page.checks(a_status()))
    assert not all(check.ok for check in agent_page.checks(a_status(phase="fetching")))


def test_the_agent_refuses_to_be_started_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    assert agent.main([]) == 2
    assert "started by a trainer" in capsys.readouterr().err


def test_a_trainer_is_told_at_once_to_make_no_steps_when_its_peer_begins_to_leave() -> None:
    """It trained on until the agent had saved and exported, and those steps were in no version."""
    wanted = asyncio.Event()
    told: list[Phase] = []
    here = SimpleNamespace(_line=SimpleNamespace(say=told.append), _report_wanted=wanted)
    for name in ("fetching", "leaving"):
        assert not wanted.is_set()
        fields = {"name": name, "text": "the run has used its tokens", "done": 0.0}
        agent.Agent.note(here, "phase", fields)  # type: ignore[arg-type]
    assert wanted.is_set() and [each.name for each in told] == ["fetching", "leaving"]
    ending = Ending(fragments=1, learns=True)
    resting = SimpleNamespace(
        peer=SimpleNamespace(ending=ending), _rest=SimpleNamespace(reason=None)
    )
    for heard, reason in ((Heard.ARRIVED, None), (Merged({0}, False), "this peer leaves")):
        ending.hear(heard, now=0.0, wall_time=0.0)
        assert agent.Agent._why_no_steps.fget(resting) == reason  # type: ignore[attr-defined]
