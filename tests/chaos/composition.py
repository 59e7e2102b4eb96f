"""Size and shape of a swarm under test, and the run that it trains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dht.identity import PeerId
from peer.run_file.merging import Outer, Rounds
from peer.run_file.sections import (
    AdamwInner,
    End,
    Evaluation,
    GptModel,
    Membership,
    Policy,
    PythonStdlibData,
    RunFile,
    Schedule,
)
from tests.chaos.judging.scenarios import QUIET, Scenario

SEQUENCE_LENGTH = 32
BATCH_SIZE = 4
STEP_TOKENS = SEQUENCE_LENGTH * BATCH_SIZE


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmSettings:
    """Size and shape of one swarm of processes."""

    directory: Path
    peers: int = 4
    pace_s: float = 0.2
    """Least time per step. It leaves idle time, as if every learner had a machine of its own."""
    cycle_steps: int = 16
    expiry_s: float = 6.0
    scenario: Scenario = QUIET


def run_file(
    settings: SwarmSettings, seeds: Sequence[str], listed: Sequence[PeerId] = ()
) -> RunFile:
    """The run of a swarm: a tiny byte-level transformer with many short rounds.

    ``listed``: the peers that it admits; all, if there are none.
    """
    return RunFile(
        name="chaos",
        description="A swarm with injected faults.",
        seeds=list(seeds),
        model=GptModel(layers=1, width=32, heads=4, context=64),
        data=PythonStdlibData(sequence_length=SEQUENCE_LENGTH),
        inner=AdamwInner(learning_rate=3e-3, batch_size=BATCH_SIZE),
        # With a constant rate, losses after equally many tokens compare, however long a run is.
        schedule=Schedule(shape="constant", warmup_tokens=0),
        outer=Outer(
            fragments=4,
            steps_per_cycle=settings.cycle_steps,
            overlap_steps=2,
            codec="int8",
        ),
        rounds=Rounds(
            quorum="majority",
            quorum_deadline_s=8.0,
            round_deadline_s=16.0,
            # Longer than any partition, so that peers that are cut off keep their work.
            alone_s=600.0,
        ),
        membership=Membership(
            heartbeat_s=min(2.0, settings.expiry_s / 3), expiry_s=settings.expiry_s
        ),
        evaluation=Evaluation(sequences=64),
        policy=_policy(settings, listed),
        end=End(tokens="unlimited"),
    )


def _policy(settings: SwarmSettings, listed: Sequence[PeerId]) -> Policy:
    rate = settings.scenario.audit_rate
    if listed:
        return Policy(admission="listed", peers=list(listed), audit_rate=rate)
    return Policy(audit_rate=rate)
