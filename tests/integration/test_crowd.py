"""24 real peers in several groups, with a fault every twenty seconds, agree at the end of the run.

Each peer is a trainer, an agent and a daemon, slow enough for two cores. Groups have 8 peers, and
``kill -9`` hits one peer after another. At the run's date all peers merge once more.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest

from peer.run_file.sections import End, Membership, RunFile
from tests.chaos.collect import collect
from tests.chaos.composition import STEP_TOKENS, SwarmSettings, run_file
from tests.chaos.judging.evidence import Evidence, FaultDone
from tests.chaos.judging.oracle import judge
from tests.chaos.judging.schedule import FaultKind
from tests.chaos.judging.tokens import judge_ledger, tokens
from tests.chaos.judging.verdict import Promise
from tests.chaos.process_swarm import ProcessSwarm
from tests.swarms.commands import tell

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PEERS = 24
GROUP_SIZE = 8
STARTS_S = 110.0
"""Time for the start of all peers on two cores; the date of the run is later by this."""
LASTS_S = 180.0
KILL_EVERY_S = 20.0
AWAY_S = 2.0
QUIET_S = 35.0
"""Time before the date without kills, so that restarted peers can take part in the end."""
ENDS_WITHIN_S = 150.0
LAST_STEPS_MAX = 5
"""Maximum number of steps that a trainer makes until its agent has reported the end of the run."""


class Crowd(ProcessSwarm):
    """A swarm of several groups that ends at a date."""

    ends_at: datetime

    def compose(self, seeds: Sequence[str]) -> RunFile:
        self.ends_at = datetime.now(UTC) + timedelta(seconds=STARTS_S + LASTS_S)
        run, replace = run_file(self.settings, seeds), msgspec.structs.replace
        return replace(
            run,
            outer=replace(run.outer, fragments=2),
            rounds=replace(run.rounds, group_size=GROUP_SIZE, round_deadline_s=40.0),
            membership=Membership(heartbeat_s=5.0, expiry_s=20.0),
            evaluation=replace(run.evaluation, sequences=8, every_versions=8),
            end=End(tokens="unlimited", date=self.ends_at),
        )

    def left_s(self) -> float:
        return (self.ends_at - datetime.now(UTC)).total_seconds()


def lived(directory: Path) -> tuple[Evidence, float]:
    """Run the swarm from start to end; returns the evidence and the processor time."""
    settings = SwarmSettings(directory=directory, peers=PEERS, pace_s=1.0, expiry_s=20.0)
    rng = np.random.default_rng(4)
    faults: list[FaultDone] = []
    away: list[tuple[float, int]] = []
    swarm = Crowd(settings)
    with swarm:
        swarm.start()
        ready_s = swarm.now()
        tell(f"all peers are in the run after {ready_s:.0f} s")
        psutil.cpu_percent()  # from here on
        next_kill_s = ready_s + 10.0
        while swarm.left_s() > 0:
            now = swarm.now()
            if now >= next_kill_s and swarm.left_s() > QUIET_S:
                next_kill_s += KILL_EVERY_S
                whole = [learner for learner in swarm.learners if learner.whole]
                victim = whole[int(rng.integers(len(whole)))]
                victim.kill()
                away.append((now + AWAY_S, victim.index))
                faults.append(
                    FaultDone(
                        kind=FaultKind.KILL, at_s=now, until_s=now + AWAY_S, victim=victim.name
                    )
                )
            while away and away[0][0] <= now:
                swarm.learners[away.pop(0)[1]].come_back()
            swarm.turn()
            time.sleep(0.25)
        ended_s = swarm.now()
        share = psutil.cpu_percent() / 100
        deadline = ended_s + ENDS_WITHIN_S
        while any(learner.up for learner in swarm.learners) and swarm.now() < deadline:
            swarm.turn()
            time.sleep(0.25)
        tell(f"all peers have ended {swarm.now() - ended_s:.0f} s after the date")
        swarm.end()
        evidence = collect(
            swarm,
            scenario="crowd",
            faults=faults,
            ready_s=ready_s,
            quiet_s=ended_s - QUIET_S,
            ended_s=ended_s,
        )
    return evidence, share


def test_a_crowd_in_changing_groups_ends_in_agreement_despite_kills(tmp_path: Path) -> None:
    evidence, busy_share = lived(tmp_path / "crowd")
    verdicts = {verdict.promise: verdict for verdict in judge(evidence)}
    for verdict in verdicts.values():
        tell(f"{verdict.promise}: {verdict.kept}: {verdict.reason}")
    finished = [(peer, told) for peer in evidence.peers for told in peer.rounds if told.finished]
    kinds = Counter(told.kind for _, told in finished)
    tell(f"{len(evidence.faults)} kills, rounds finished at some peer: {dict(kinds)}")
    tell(f"tokens: {tokens(evidence)}; processors busy: {busy_share:.0%}")

    assert len(evidence.faults) >= 6, "starting took too long: STARTS_S"
    for promise in (Promise.IDENTICAL, Promise.ONCE, Promise.CLEAN):
        assert verdicts[promise].kept, f"{promise}: {verdicts[promise].reason}"
    ledger = judge_ledger(evidence, late_max=LAST_STEPS_MAX * STEP_TOKENS)
    assert ledger.kept, ledger.reason
    assert len(evidence.peers) == PEERS
    final = {(part.fragment, part.lineage) for p in evidence.peers for part in p.fragments}
    assert sorted(index for index, _ in final) == [0, 1], "each fragment has one lineage"
    before = [told for _, told in finished if told.at_s < evidence.ended_s - 5.0]
    assert max(len(told.contributors) for told in before) <= GROUP_SIZE
    assert kinds["meld"] > 0
    merged = tokens(evidence)
    assert merged["merged"] > 0.5 * merged["processed"]
