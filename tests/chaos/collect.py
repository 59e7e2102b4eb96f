"""Collects evidence from the files that the peers of a swarm have left in their folders."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from averaging.history.state import FragmentState
from peer.rules.ledger import Fate, Ledger
from peer.storage.checkpoint import CheckpointFolder
from peer.storage.home import OUTER
from peer.storage.outer_state import OuterState, load_outer
from peer.storage.progress import read_progress
from peer.views.event_log import read_events
from tests.chaos.composition import STEP_TOKENS
from tests.chaos.judging.evidence import (
    Blame,
    Evidence,
    FaultDone,
    FinalFragment,
    HostileUpload,
    LieTold,
    PeerEvidence,
    RoundReport,
)
from tests.chaos.judging.hostile import CONVICTED, STRIKE
from tests.chaos.judging.lies import Lie
from tests.chaos.members import Learner
from tests.chaos.process_swarm import ProcessSwarm

BAD_UPLOAD = ("payload in ", "its norm is ")
"""The beginnings of reasons for a refused upload, in ``averaging.errors.BadPayload`` and in
``averaging.round.slices``."""

_BLAMES = {"convicted": CONVICTED, "audit_refused": STRIKE, "struck": STRIKE, "refused": None}
"""Events that blame a peer, and their kinds; ``None``: the event names it."""

SLACK_S = 1.0
"""Time within which a process notices that its clock has jumped."""


def collect(
    swarm: ProcessSwarm,
    *,
    scenario: str,
    faults: Iterable[FaultDone],
    ready_s: float,
    quiet_s: float,
    ended_s: float,
) -> Evidence:
    """Collect what the swarm itself has left behind. To be called after ``swarm.end()``."""
    assert swarm.run is not None and swarm.leaks is not None, "call swarm.end() first"
    settings, rounds = swarm.settings, swarm.run.rounds
    uploads: list[HostileUpload] = []
    if swarm.mallory is not None:
        for record in read_events(swarm.mallory.lies_path):
            uploads.append(HostileUpload(round=record["round"], kind=record["kind"]))
    return Evidence(
        scenario=scenario,
        peers=tuple(_peer(swarm, learner) for learner in swarm.everybody),
        faults=tuple(sorted(faults, key=lambda fault: fault.at_s)),
        held_out=tuple(swarm.held_out),
        ready_s=ready_s,
        quiet_s=quiet_s,
        ended_s=ended_s,
        cycle_steps=settings.cycle_steps,
        step_tokens=STEP_TOKENS,
        pace_s=settings.pace_s,
        quorum_deadline_s=rounds.quorum_deadline_s,
        round_deadline_s=rounds.round_deadline_s,
        hostile_uploads=tuple(uploads),
        lies=tuple(sorted(_lies(swarm), key=lambda told: told.at_s)),
        bootstraps={each.name: tuple(each.samples) for each in swarm.bootstraps},
        leaks=swarm.leaks,
    )


def _lies(swarm: ProcessSwarm) -> Iterator[LieTold]:
    for liar in swarm.liars:
        for record in read_events(liar.lies_path):
            if record["what"] == "lied":
                yield LieTold(
                    at_s=record["at"] - swarm.workspace.began_at,
                    liar=liar.name,
                    lie=Lie(record["lie"]),
                    round=record["round"],
                )


def _peer(swarm: ProcessSwarm, learner: Learner) -> PeerEvidence:
    outer = load_outer(CheckpointFolder(learner.directory / OUTER))
    progress = read_progress(learner.directory / "progress")
    events = [
        (
            true_time_s(event["at"] - swarm.workspace.began_at, learner.clock, ended_s=swarm.now()),
            event,
        )
        for event in read_events(learner.events_path)
    ]
    return PeerEvidence(
        name=learner.name,
        peer_id=learner.peer_id,
        hostile=learner.hostile,
        lives=tuple(life.done() for life in learner.lives if life.ended_s is not None),
        rounds=tuple(
            _round(event, at_s=at_s) for at_s, event in events if event["event"] == "round"
        ),
        fragments=() if outer is None else tuple(_fragment(state) for state in outer.states),
        fates=() if outer is None else _fates(outer),
        processed_tokens=0 if progress is None else progress.total_tokens,
        samples=tuple(learner.samples),
        agents_in_s=tuple(
            at_s for at_s, event in events if event["event"] == "phase" and event["name"] == "ready"
        ),
        blames=tuple(
            _blame(event, at_s=at_s) for at_s, event in events if event["event"] in _BLAMES
        ),
        counts_s=next(
            (
                record["at"] - swarm.workspace.began_at
                for record in read_events(learner.lies_path)
                if record.get("what") == "counts"
            ),
            None,
        ),
    )


def _blame(event: Mapping[str, Any], *, at_s: float) -> Blame:
    kind = _BLAMES[event["event"]] or event["kind"]
    strikes = event.get("strikes", 0.0)
    return Blame(
        at_s=at_s, peer_id=event["peer"], kind=kind, reason=event["reason"], strikes=strikes
    )


def true_time_s(told_s: float, clock: Sequence[tuple[float, float]], *, ended_s: float) -> float:
    """Correct a time told by a wrong clock; ``clock`` lists its offsets and since when they hold.

    After a jump backwards some times occur twice: the later moment is taken.
    """
    ends = [*(since for since, _ in clock[1:]), ended_s]
    for (since_s, offset_s), end_s in reversed(list(zip(clock, ends, strict=True))):
        if since_s - SLACK_S <= told_s - offset_s <= end_s + SLACK_S:
            return told_s - offset_s
    return told_s - clock[-1][1]


def _round(event: Mapping[str, Any], *, at_s: float) -> RoundReport:
    return RoundReport(
        at_s=at_s,
        fragment=event["fragment"],
        round=event["round"],
        version=event["version"],
        lineage=event["lineage"] if event["outcome"] == "finished" else None,
        contributors=tuple(event["contributors"]),
        marks={peer: tuple(mark) for peer, mark in event["marks"].items()},
        contributed=event["contributed"],
        seconds=event["seconds"],
        kind=event["kind"],
        parents=tuple(event["parents"]),
        refused={
            peer: reason
            for peer, reason in event["left_out"].items()
            if reason.startswith(BAD_UPLOAD)
        },
    )


def _fragment(state: FragmentState) -> FinalFragment:
    return FinalFragment(
        fragment=state.fragment,
        size=int(state.theta.size),
        version=state.version,
        lineage=state.lineage.hex(),
        chain=frozenset((link.version, link.lineage.hex()) for link in state.chain),
        bits=state.digest().hex(),
        finite=bool(np.isfinite(state.theta).all() and np.isfinite(state.momentum).all()),
        merged={str(peer): mark.tokens for peer, mark in state.merged.items()},
    )


def _fates(outer: OuterState) -> tuple[Fate, ...]:
    if outer.ledger is None:
        return ()
    ledger = Ledger.from_plain(outer.ledger, [int(state.theta.size) for state in outer.states])
    return tuple(ledger.fate(index) for index in range(len(outer.states)))
