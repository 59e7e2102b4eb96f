"""Evidence of a small healthy swarm, which the tests change to break promises."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from peer.rules.ledger import Fate
from tests.chaos.judging.evidence import (
    Evidence,
    FaultDone,
    FinalFragment,
    HeldOutPoint,
    Life,
    PeerEvidence,
    Report,
    RoundReport,
)
from tests.chaos.judging.schedule import FaultKind

CYCLE = 16
PACE_S = 0.2
STEP_TOKENS = 128
NAMES = ("anna", "boris")
IDS = {"anna": "id-a", "boris": "id-b", "mallory": "id-m"}


def life(
    began_s: float = 0.0,
    ended_s: float = 101.0,
    *,
    killed: bool = False,
    step_s: float = PACE_S,
    merged_after_steps: int | None = 10,
    exit_code: int | None = 130,
) -> Life:
    count = int(min(ended_s, 100.0) - began_s)
    return Life(
        began_s=began_s,
        ready_s=began_s + 1.0,
        ended_s=ended_s,
        killed=killed,
        exit_code=-9 if killed else exit_code,
        reports=tuple(
            Report(
                at_s=began_s + second,
                steps=int(second / step_s),
                trained_s=int(second / step_s) * step_s,
                merged_tokens=0.0,
                global_tokens=int(1000 * second),
                loss=2.0,
                blocked_p99_ms=1.0,
            )
            for second in range(1, count)
        ),
        merged_after_steps=merged_after_steps,
    )


def rounds() -> tuple[RoundReport, ...]:
    """Rounds every two seconds that merge the last ten steps of all peers."""
    told = []
    for number in range(1, 50):
        marks = {IDS[name]: (7, 10 * number, 10, 10 * STEP_TOKENS) for name in NAMES}
        told.append(
            RoundReport(
                at_s=2.0 * number,
                fragment=0,
                round=f"round-{number}",
                version=number,
                lineage=f"line-{number}",
                contributors=tuple(IDS[name] for name in NAMES),
                marks=marks,
                contributed=True,
                seconds=0.5,
                kind="merge",
                parents=(f"line-{number - 1}",),
            )
        )
    return tuple(told)


def peer(name: str, **changes: Any) -> PeerEvidence:
    merged = {IDS[each]: 490 * STEP_TOKENS for each in NAMES}
    fragment = FinalFragment(
        fragment=0,
        size=1000,
        version=49,
        lineage="line-49",
        chain=frozenset((number, f"line-{number}") for number in range(50)),
        bits="bits-49",
        finite=True,
        merged=merged,
    )
    fate = Fate(
        processed=500 * STEP_TOKENS,
        merged=490 * STEP_TOKENS,
        pending=10 * STEP_TOKENS,
        discarded={},
        excess=0,
    )
    made = PeerEvidence(
        name=name,
        peer_id=IDS[name],
        hostile=False,
        lives=(life(),),
        rounds=rounds(),
        fragments=(fragment,),
        fates=(fate,),
        processed_tokens=500 * STEP_TOKENS,
    )
    return replace(made, **changes)


def loss_curve(*, last: float = 2.0) -> tuple[HeldOutPoint, ...]:
    return tuple(
        HeldOutPoint(at_s=5.0 * i, global_tokens=5000 * i, loss=5.0 + (last - 5.0) * i / 19)
        for i in range(20)
    )


def evidence(*peers: PeerEvidence, **changes: Any) -> Evidence:
    made = Evidence(
        scenario="kill",
        peers=peers or tuple(peer(name) for name in NAMES),
        faults=(),
        held_out=loss_curve(),
        ready_s=1.0,
        quiet_s=80.0,
        ended_s=100.0,
        cycle_steps=CYCLE,
        step_tokens=STEP_TOKENS,
        pace_s=PACE_S,
        quorum_deadline_s=8.0,
        round_deadline_s=16.0,
    )
    return replace(made, **changes)


def fault(kind: FaultKind, victim: str | None, at_s: float, until_s: float) -> FaultDone:
    return FaultDone(kind=kind, at_s=at_s, until_s=until_s, victim=victim)
