"""Events and the end of a peer, without a network."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from averaging.history.manifest import rolled_back
from averaging.history.merged_map import MergedMap
from averaging.history.state import FragmentState, Pieces
from averaging.round.interface.phase import Phase as RoundPhase
from averaging.rules.peer_view import PeerView
from dht.identity import Identity, PeerId
from dht.membership.credentials import Directive, Signer, encode
from dht.membership.orders import Attested, Orders, Rollback, Root
from peer.agent.figures import work_in_progress
from peer.agent.idleness import OwnersRest
from peer.agent.peer import LINES_PER_MINUTE, PAUSE_MAX_S, SENTENCES_MAX, Peer, Repeats
from peer.agent.services import Fields, Role
from peer.guest.enforcement import write_limits
from peer.rules.ending import Heard
from peer.rules.leaving import Departure
from peer.rules.limits import Limits
from peer.run_file.reading import parse
from peer.status import HeldOut
from peer.storage.address import kept_link
from peer.storage.earlier import load_state
from peer.storage.outer_state import OuterState
from peer.views.event_log import read_events
from tests.peer.agent import example_peers
from tests.peer.statuses import a_status
from tests.peer.trainer.learner_pair import moved
from tests.swarms import learner_process

BORIS, CLARA = PeerId("12D3KooWBoris"), PeerId("12D3KooWClara")


class Hearing(Role):
    def __init__(self) -> None:
        self.heard: list[tuple[str, dict[str, Any]]] = []
        self.phases: list[tuple[str, str, float]] = []
        self.to_measure: list[tuple[int, int]] = []
        self.pending = 0

    def on_turn_to_measure(self, version: int, tokens: int) -> None:
        self.to_measure.append((version, tokens))

    def note(self, name: str, fields: Fields) -> None:
        if name == "phase":
            self.phases.append((fields["name"], fields["text"], fields["done"]))
        else:
            self.heard.append((name, dict(fields)))

    def pending_tokens(self) -> int:
        return self.pending


class Offering:
    """An averager that counts the offers before a rest."""

    states = ()
    in_flight = 0
    bytes_per_s = 1000.0
    offers = 0
    stays = 0

    def make_due(self, fragments: Iterable[int]) -> None: ...

    def company_s(self) -> float:
        return 0.0

    def offer_before_leaving(self) -> int:
        self.offers += 1
        return 20_000

    def stay(self) -> None:
        self.stays += 1


async def a_peer(directory: Path, run: str) -> tuple[Peer, Hearing]:
    delegate = Hearing()
    return example_peers.peer_in(directory, delegate, parse(run)), delegate


@pytest.fixture
def made(tmp_path: Path) -> Iterator[tuple[Peer, Hearing]]:
    peer, delegate = asyncio.run(a_peer(tmp_path, learner_process.text()))
    yield peer, delegate
    peer.log.close()


def training(at: float) -> PeerView:
    return PeerView(
        first_seen=at,
        heard_at=at,
        failed_at=None,
        reachable=True,
        trains=True,
        arrives=False,
        step_time_s=1.0,
        bytes_per_s=None,
    )


def test_keys_that_do_not_count_do_not_push_all_else_out_of_the_event_log(
    made: tuple[Peer, Hearing],
) -> None:
    """One key that sent rubbish had the log of months be one of rubbish within ten minutes."""
    peer, _ = made
    peer.averager = SimpleNamespace(is_established=BORIS.__eq__)  # type: ignore[assignment]
    for number in range(1000):
        rubbish = {"kind": "message", "reason": "not msgpack"}
        peer.averager_event("refused", {"peer": PeerId(f"cheap {number}"), **rubbish})
    peer.averager_event("refused", {"peer": BORIS, "kind": "message", "reason": "not msgpack"})
    peer.averager_event("convicted", {"peer": CLARA, "reason": "lied", "proof": "ab"})
    told = [
        each for each in read_events(peer.log.path) if each["event"] in ("refused", "convicted")
    ]
    assert LINES_PER_MINUTE < len(told) < 2 * LINES_PER_MINUTE
    assert [event["peer"] for event in told[-2:]] == [BORIS, CLARA]


def test_being_alone_is_reported_once_until_somebody_else_trains(
    made: tuple[Peer, Hearing],
) -> None:
    peer, delegate = made

    async def live() -> None:
        now = asyncio.get_running_loop().time()
        for _ in range(3):
            for fragment in range(4):
                peer.averager_event("alone", {"fragment": fragment})
            peer.notice_company(reachable=None)
        assert [name for name, _ in delegate.heard] == ["alone"]
        peer.view[BORIS] = training(now)
        peer.notice_company(reachable=None)
        del peer.view[BORIS]
        peer.averager_event("alone", {"fragment": 2})

    asyncio.run(live())
    logged = [e for e in read_events(peer.log.path) if e["event"] == "alone"]
    assert len(logged) == len(delegate.heard) == 2
    assert "nobody else trains" in logged[0]["text"]


def test_verdicts_of_the_loss_gate_are_counted(made: tuple[Peer, Hearing]) -> None:
    peer, _ = made
    told = {"before": 2.0, "after": 6.0, "reason": "it rose", "fragments": [0], "versions": [7]}
    peer.averager_event("jump_measured", told)
    peer.averager_event("jump_refused", {**told, "back_to": [6]})
    assert (peer.jumps.total(), peer.jumps["jump_refused"]) == (2, 1)


async def test_a_founder_is_not_called_alone_while_another_peer_arrives(
    made: tuple[Peer, Hearing],
) -> None:
    peer, delegate = made

    arriving = msgspec.structs.replace(
        training(asyncio.get_running_loop().time()), trains=False, arrives=True
    )
    peer.view[BORIS] = arriving
    peer.averager_event("alone", {"fragment": 0})
    assert delegate.heard == []
    del peer.view[BORIS]
    peer.averager_event("alone", {"fragment": 1})
    assert [name for name, _ in delegate.heard] == ["alone"]


def test_people_hear_of_peers_by_name_and_the_log_has_their_ids(
    made: tuple[Peer, Hearing],
) -> None:
    peer, delegate = made
    boris = Identity.from_seed(bytes([2]) * 32).peer_id
    peer.board.names.learn(boris, "boris")
    peer.event("fetch_failed", fragment=1, reason=f"{boris}: the stream broke")
    ((_, heard),) = delegate.heard
    assert heard == {"fragment": 1, "reason": "boris: the stream broke"}
    (logged,) = [e for e in read_events(peer.log.path) if e["event"] == "fetch_failed"]
    assert logged["reason"] == f"{boris}: the stream broke"


def test_a_failure_of_every_fragment_is_told_once_and_logged_each_time(
    made: tuple[Peer, Hearing],
) -> None:
    """A peer that could not fetch the state printed a line for each fragment, again and again."""
    peer, delegate = made
    for why in ("the stream broke", "the stream broke", "nobody to ask"):
        for fragment in range(8):
            reason = f"fragment {fragment} could not be fetched: {why}"
            peer.averager_event("fetch_failed", {"fragment": fragment, "reason": reason})
    assert [heard["reason"] for _, heard in delegate.heard] == [
        "fragment 0 could not be fetched: the stream broke",
        "fragment 0 could not be fetched: nobody to ask",
    ]
    assert sum(e["event"] == "fetch_failed" for e in read_events(peer.log.path)) == 24


def test_a_newcomer_says_why_it_takes_no_state_in_what_it_does(
    made: tuple[Peer, Hearing],
) -> None:
    """Of a state with NaN in it only the event log told, and the newcomer seemed to do nothing."""
    peer, delegate = made
    why = f"fragment 0 could not be fetched: {BORIS}: version 0 has values that are not finite"
    peer.enter_phase("fetching", "downloading the state of the run", 0.0)
    peer.averager_event("fetch_failed", {"fragment": 0, "reason": why})
    peer.averager_event("fetch_failed", {"fragment": 1, "reason": why})
    texts = [text for _, text, _ in delegate.phases]
    assert len(texts) == 2 and "values that are not finite; trying again" in texts[1]
    peer.phase = "ready"
    peer.averager_event("fetch_failed", {"fragment": 0, "reason": "nobody to ask"})
    assert len(delegate.phases) == 2


def test_a_ready_peer_says_that_nobody_reduces_among_peers_that_only_dial_out(
    made: tuple[Peer, Hearing], monkeypatch: pytest.MonkeyPatch
) -> None:
    peer, delegate = made
    monkeypatch.setattr("peer.rules.others.STUCK_AFTER_S", 0.0)

    async def live() -> None:
        now = asyncio.get_running_loop().time()
        peer.view[BORIS] = msgspec.structs.replace(training(now), reachable=False)
        peer.notice_company(reachable=False)
        assert not delegate.heard, "it has just come on line"
        peer.phase = "ready"
        peer.view[CLARA] = training(now)
        peer.notice_company(reachable=False)
        assert not delegate.heard, "one of them can be dialled"
        del peer.view[CLARA]
        peer.notice_company(reachable=False)
        peer.notice_company(reachable=False)

    asyncio.run(live())
    ((name, fields),) = delegate.heard
    assert name == "nobody_reduces" and fields["peers"] == 2 and "forward" in fields["text"]


async def test_a_request_to_leave_is_obeyed_at_any_time(made: tuple[Peer, Hearing]) -> None:
    peer, _ = made

    write_limits(peer.directory, Limits(leave_at=time.time() + 60.0))
    leaving = asyncio.create_task(peer.leave_when_asked(12.0))
    async with asyncio.timeout(60.0):
        assert await peer.end.unless_leaving(asyncio.sleep(3600.0, "slept")) is None
    await leaving
    asked = Departure("its owner asked it to leave", 0, finished=False, timeout_s=12.0)
    assert peer.ending.departure == asked


def a_round(**changes: Any) -> dict[str, Any]:
    return {
        "fragment": 2,
        "version": 7,
        "outcome": "finished",
        "reason": "finished",
        "members": [BORIS, CLARA],
        "contributors": [BORIS],
        "weights": [1.0],
        "left_out": {CLARA: "too long"},
        "seconds": 1.0,
        **changes,
    }


async def test_the_outcome_of_each_peers_last_offer_is_remembered(
    made: tuple[Peer, Hearing],
) -> None:
    peer, _ = made

    peer.averager_event("round", a_round())
    assert peer.offer_outcomes == {
        BORIS: "merged, fragment 2",
        CLARA: "left out, fragment 2: too long",
    }
    peer.averager_event("round", a_round(outcome="given up", version=8))
    assert peer.offer_outcomes[BORIS] == "merged, fragment 2"
    peer.averager_event("round", a_round(contributors=[CLARA], left_out={}, version=9))
    assert peer.offer_outcomes[CLARA] == "merged, fragment 2"
    for number in range(2000):
        peer.averager_event("round", a_round(contributors=[PeerId(f"12D3{number}")]))
    assert len(peer.offer_outcomes) == 1024


def test_the_work_in_progress_is_in_words_with_few_of_many_fragments(
    made: tuple[Peer, Hearing],
) -> None:
    """It was "fragments 1 and 2 and 3 and 5 exchanging"."""
    peer, _ = made
    assert work_in_progress(peer) == ()
    phases = [RoundPhase.CATCHING, *[RoundPhase.ENTERED] * 3, RoundPhase.IDLE, RoundPhase.ENTERED]
    averager: Any = SimpleNamespace(phases=[*phases, *[RoundPhase.JOINING] * 12])
    peer.averager = averager
    assert work_in_progress(peer) == (
        "fragment 0 catching up",
        "fragments 1, 2, 3 and 5 exchanging",
        "fragments 6, 7, 8, 9, 10 and 7 more waiting for peers",
    )


async def test_a_round_without_this_peers_work_is_counted_however_it_is_heard_of(
    made: tuple[Peer, Hearing],
) -> None:
    peer, _ = made
    adopted = {"fragment": 2, "version": 9, "how": "replay", "from_version": 7}

    peer.averager_event("round", a_round(contributors=[BORIS, peer.me]))
    assert peer.rounds_missed == 0
    peer.averager_event("round", a_round())
    assert peer.rounds_missed == 1
    peer.averager_event("round", a_round(outcome="given up", contributors=[]))
    assert peer.rounds_missed == 1, "it may be void; if not, its state is adopted"
    peer.averager_event("state_adopted", {**adopted, "missed": 2})
    assert peer.rounds_missed == 3


def test_an_offer_that_failed_before_a_round_is_reported_with_its_reason(
    made: tuple[Peer, Hearing],
) -> None:
    peer, delegate = made

    async def live() -> None:
        peer.averager_event("too_late", {"fragment": 1, "leader": BORIS})
        peer.averager_event("joining", {"fragment": 1, "leader": BORIS})

    asyncio.run(live())
    assert [(name, fields["fragment"]) for name, fields in delegate.heard] == [("not_merged", 1)]
    assert "closed the roster" in delegate.heard[0][1]["reason"]


def test_the_tokens_that_people_see_do_not_fall_when_a_fork_is_given_up(
    made: tuple[Peer, Hearing],
) -> None:
    local, _ = made
    first = FragmentState.founded(local.layout.hash, 0, np.zeros(16, np.float32), 0)
    shown = []
    for tokens in (100, 60, 130):
        state = moved(first, 1.0, MergedMap().with_work(BORIS, 1, 5, tokens))
        averager: Any = SimpleNamespace(states=(state,))
        local.averager = averager
        shown.append(local.merged_tokens())
    assert shown == [100, 100, 130]


def test_a_peer_that_trains_alone_measures_each_version_that_it_makes(
    made: tuple[Peer, Hearing], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only rounds with others were measured: a lone learner had no held-out loss, and one whose
    partners had left showed theirs as the current one."""
    peer, delegate = made
    monkeypatch.setattr(Peer, "merged_tokens", lambda local: 900)

    async def live() -> None:
        for version in (1, 2):
            for fragment in range(4):
                peer.averager_event("folded", {"fragment": fragment, "version": version})

    asyncio.run(live())
    assert delegate.to_measure == [(1, 900), (2, 900)]


def test_keys_that_never_worked_have_no_turn_to_measure_the_held_out_loss(
    made: tuple[Peer, Hearing], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred keys had 24 turns of 25, and the run had no held-out loss."""
    peer, delegate = made
    monkeypatch.setattr(Peer, "merged_tokens", lambda local: 900)

    async def live() -> None:
        peer.averager = SimpleNamespace(is_established=lambda other: False)  # type: ignore[assignment]
        now = asyncio.get_running_loop().time()
        for number in range(100):
            peer.view[PeerId(f"cheap {number}")] = training(now)
        for version in range(1, 11):
            peer.averager_event("folded", {"fragment": 0, "version": version})

    asyncio.run(live())
    assert [version for version, _ in delegate.to_measure] == list(range(1, 11))


async def test_the_held_out_loss_is_measured_and_told_anew_after_a_rollback(
    made: tuple[Peer, Hearing],
) -> None:
    """Earlier, the loss of a version that was taken back stood until the run had come as far
    again."""
    local, _ = made
    assert local.held_out.is_my_turn(60, [])
    local.take_held_out(HeldOut(60, 1.5, BORIS, 6000))
    local.note_rollback()
    assert local.held_out.newest is None
    assert local.held_out.is_my_turn(40, [])
    local.take_held_out(HeldOut(40, 1.75, BORIS, 4000))
    assert local.held_out.newest == HeldOut(40, 1.75, BORIS, 4000)


def test_a_peer_is_not_taken_back_again_when_its_chain_has_dropped_the_rollback(
    made: tuple[Peer, Hearing], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All peers of a swarm of sixty groups went back once more, 170 versions after a rollback."""
    monkeypatch.setattr("averaging.history.chain.CHAIN_MAX_LINKS", 12)
    local, _ = made
    state = moved(FragmentState.founded(local.layout.hash, 0, np.zeros(16, np.float32), 0), 1.0)
    root = rolled_back(state, 7)
    rollback = Rollback(7, (Root(root.version, root.lineage),))
    local.owner.directive = Directive(number=7, bans=(), orders=Orders(rollback=rollback))
    assert local.owner.takes_back([moved(state, 1.0)])
    for _ in range(20):
        root = moved(root, 1.0)
        assert not local.owner.takes_back([root])
    assert local.owner.takes_back([root], if_unknown=True), "it hears of the rollback only now"


def test_a_checkpoint_of_before_a_rollback_to_a_far_older_state_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer that had heard of the rollback before it read its checkpoint stayed on the history
    that was taken back, as its chain did not reach back so far."""
    monkeypatch.setattr("averaging.history.chain.CHAIN_MAX_LINKS", 12)
    owner = Identity.from_seed(bytes([9]) * 32)
    run = learner_process.text() + f'\n[policy]\nowner = "{owner.peer_id}"\n'
    local, _ = asyncio.run(a_peer(tmp_path, run))
    state = moved(FragmentState.founded(local.layout.hash, 0, np.zeros(16, np.float32), 0), 1.0)
    root = rolled_back(state, 7)
    rollback = Rollback(7, (Root(root.version, root.lineage),))
    attested = (Attested(state.version, state.lineage, bytes(32)),)
    issuer = Signer(owner, local.run_id)
    before = encode(issuer.directive(6, frozenset(), Orders(attested=attested)))
    orders = Orders(attested=attested, rollback=rollback, paused=True)
    amended = issuer.directive(8, frozenset(), orders)
    local.owner.directive = amended
    for _ in range(20):
        state, root = moved(state, 1.0), moved(root, 1.0)

    def saved(state: FragmentState, *directives: bytes) -> OuterState:
        return OuterState(local.run_file, local.layout, (state,), None, tmp_path, directives)

    assert local.owner.takes_back_checkpoint(saved(state))
    assert local.owner.takes_back_checkpoint(saved(state, before))
    assert not local.owner.takes_back_checkpoint(saved(root, before, encode(amended)))
    local.log.close()


def test_a_peer_that_goes_back_when_it_starts_keeps_nothing_of_what_was_taken_back(
    tmp_path: Path,
) -> None:
    """Earlier, the owner's next word of a good state could be for one of those."""
    owner = Identity.from_seed(bytes([9]) * 32).peer_id
    run = learner_process.text() + f'\n[policy]\nowner = "{owner}"\n'
    local, _ = asyncio.run(a_peer(tmp_path, run))
    assert local.good is not None
    theta, mu = np.zeros(16, np.float32), local.run_file.outer.momentum
    momentum = Pieces.of(local.layout.fragments[0], mu).momentum
    state = FragmentState.founded(local.layout.hash, 0, theta, momentum)
    root = rolled_back(state, 7)
    local.good.keep(state)
    (kept,) = local.good.kept()
    later = moved(state, 1.0)
    local.good.keep(dataclasses.replace(later, history=later.lineage))
    orders = Orders(
        attested=(Attested(state.version, state.lineage, kept.digest),),
        rollback=Rollback(7, (Root(root.version, root.lineage),)),
    )
    local.owner.follow(Directive(number=7, bans=(), orders=orders))
    for _ in range(2):  # it may be started again before it has saved where it has gone to
        (found,) = local.owner.roots()
        assert found is not None and found.lineage == root.lineage
        assert local.good.kept() == (kept,)
    local.log.close()


def test_a_held_out_loss_of_the_far_future_is_believed_of_nobody(
    made: tuple[Peer, Hearing], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stood for ever, here and at everybody who asked: no honest one was newer."""
    local, hearing = made
    local.hear_status(a_status(held_out=HeldOut(0, 0.1, BORIS, 0)))
    monkeypatch.setattr(Peer, "versions", lambda local: (60, 61))
    monkeypatch.setattr(Peer, "merged_tokens", lambda local: 6000)
    local.hear_status(a_status(held_out=HeldOut(2**61, 0.1, BORIS, 2**61)))
    assert local.held_out.newest is None and not hearing.heard
    local.hear_status(a_status(held_out=HeldOut(60, 1.5, CLARA, 6000)))
    assert local.held_out.newest == HeldOut(60, 1.5, CLARA, 6000)


async def test_what_a_peer_waits_for_ends_when_it_is_void(
    made: tuple[Peer, Hearing],
) -> None:
    peer, _ = made
    end, loop = peer.end, asyncio.get_running_loop()
    assert await end.unless_leaving(asyncio.sleep(0.0, "done")) == "done"
    loop.call_later(0.01, end.hear, Heard.TRAINER_GONE)
    async with asyncio.timeout(60.0):
        assert await end.unless_leaving(asyncio.sleep(3600.0, "late")) is None
    assert not await end.happens(within_s=0.01)


@pytest.mark.parametrize("is_merged", [False, True])
async def test_a_peer_that_begins_to_rest_offers_its_work_until_it_is_merged_or_patience_ends(
    made: tuple[Peer, Hearing], is_merged: bool
) -> None:
    local, trainer = made

    offering: Any = Offering()
    local.averager = offering
    trainer.pending, rest, looks = 7, OwnersRest(local), 0
    assert not rest.obey() and not rest.hands_over
    write_limits(local.directory, Limits(paused=True))
    await asyncio.sleep(2.0)
    assert rest.obey()
    # 20 kB at 1 kB/s take 25 s there and back, and patience is three times that.
    while not rest.is_away():
        await asyncio.sleep(1.0)
        rest.obey()
        looks += 1
        if is_merged and looks == 30:
            trainer.pending = 0
    assert looks == (30 if is_merged else 75)
    assert looks - 1 <= offering.offers <= looks
    write_limits(local.directory, Limits())
    await asyncio.sleep(2.0)
    assert rest.obey() and offering.stays == 1


@pytest.mark.parametrize("why", ["volume", "orders"])
async def test_a_peer_at_rest_for_a_used_volume_or_a_paused_run_offers_nothing_again(
    made: tuple[Peer, Hearing], why: str
) -> None:
    """Nor when the rest is over: it would fold its work, as no other trains yet."""
    local, trainer = made

    def shown() -> str:
        state = load_state(local.directory)
        assert state is not None
        return state.text

    offering: Any = Offering()
    local.averager = offering
    trainer.pending, rest = 7, OwnersRest(local)
    local.enter_phase("ready", "in the run", 1.0)
    assert not rest.obey()
    if why == "orders":
        local.owner.paused = "its owner has paused it"
    else:
        write_limits(local.directory, Limits(month_bytes=1_000_000))
        await local.guest.up.pass_through(1_000_000)
    assert rest.obey() and not rest.hands_over
    assert shown().startswith("resting: "), "`shoal status` says so, too"
    await asyncio.sleep(2.0)
    assert rest.is_away()
    local.owner.paused = None
    write_limits(local.directory, Limits())
    await asyncio.sleep(2.0)
    assert rest.obey() and shown() == "in the run"
    assert not offering.offers


async def test_the_figures_in_the_folder_stay_when_the_peer_enters_another_phase(
    made: tuple[Peer, Hearing],
) -> None:
    local, _ = made
    local.enter_phase("ready", "in the run", 1.0)
    await local.keep_figures({"steps": 7})
    local.enter_phase("leaving", "its owner asked it to leave", 0.0)
    state = load_state(local.directory)
    assert state is not None
    assert (state.name, state.figures) == ("leaving", {"steps": 7})


def test_a_sentence_is_told_again_after_pauses_that_grow() -> None:
    repeats = Repeats()
    told = [now for now in range(0, 20_000, 10) if repeats.is_due("it broke", now=float(now))]
    pauses = [later - before for before, later in pairwise(told)]
    assert pauses == [60, 120, 240, 480, 960, 1920, *[PAUSE_MAX_S] * 4]


def test_another_sentence_is_told_at_once_and_few_are_remembered() -> None:
    repeats = Repeats()
    assert repeats.is_due("it broke", now=0.0)
    assert all(repeats.is_due(f"reason {n}", now=1.0) for n in range(2 * SENTENCES_MAX))
    assert len(repeats._told) <= SENTENCES_MAX


@pytest.mark.parametrize("told_before", [False, True])
def test_a_link_is_told_when_the_one_before_leads_nowhere_and_kept_each_time(
    made: tuple[Peer, Hearing], told_before: bool
) -> None:
    peer, hearing = made
    me = peer.me
    addresses = [f"/ip4/203.0.113.{host}/tcp/7700/p2p/{me}" for host in (7, 7, 8)]
    links = ["", *(f"shoal://{peer.run_id}?seed={address}" for address in addresses)]
    peer.link_told = links[1] if told_before else None  # by an agent that has died
    for link in links:
        peer.network = cast(Any, SimpleNamespace(link=lambda link=link: link))
        peer.tell_link()
        assert kept_link(peer.directory) == (link or None)
    told = [fields["link"] for name, fields in hearing.heard if name == "link"]
    assert told == [*([] if told_before else links[1:2]), links[3]]
