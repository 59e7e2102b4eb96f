"""Issue C, 2: whoever is killed, at whatever moment: the others train on as if nothing had been.

For three minutes, every few seconds, ``kill -9`` hits a learner, whoever led the last round, or
the bootstrap peer, with agent and daemon; it is started again a little later. The control is an
equal swarm in which nobody is hurt, while an unrelated learner is killed and started at the same
moments: so it has the same work to do for starting processes.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from peer.telemetry import read_events
from tests.integration.swarm_processes import (
    Command,
    Learner,
    Record,
    Swarm,
    address_of,
    load,
    run_text,
    sums_up,
    tell,
)
from tests.processes import Processes

SECONDS = float(os.environ.get("MUST_HOLD_SECONDS", "180"))
"""How long they are hurt. Shorter for a first look."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(4 * SECONDS + 600)]

PACE_S = 0.25
CYCLE = 24
EVERY_S = (10.0, 18.0)
DOWN_S = 3.0
SETTLE_S = 20.0
P99_STEPS = 100
"""The p99 of fewer steps is their maximum, and says more about the machine than about us."""
LEARNERS = ("anna", "boris", "clara", "dora")


@dataclass
class Figures:
    """What the trainers of one swarm felt."""

    step_times_s: list[float] = field(default_factory=list)
    blocked_p99_ms: list[float] = field(default_factory=list)
    fates: list[dict[str, float]] = field(default_factory=list)
    back_after_steps: list[int] = field(default_factory=list)
    never_back: list[str] = field(default_factory=list)
    kills: dict[str, int] = field(default_factory=dict)
    loads: list[float] = field(default_factory=list)

    @property
    def median_step_s(self) -> float:
        return statistics.median(self.step_times_s)


class Watched:
    """A learner whose lives are told one by one."""

    def __init__(self, learner: Learner, figures: Figures) -> None:
        self.learner = learner
        self.figures = figures
        self.down_until: float | None = None

    def life_over(self, *, returned: bool, old_enough: bool) -> None:
        """Take down what this life was like, before its output is replaced by the next one's."""
        records = self.learner.records()
        reports = [r for r in records if r.get("event") in ("progress", "done")]
        # The median of a life's first steps is that of its start.
        settled = [r for r in reports if r["steps"] > 31]
        self.figures.step_times_s += [r["step_time_s"] for r in settled]
        if reports and reports[-1]["steps"] >= P99_STEPS:
            self.figures.blocked_p99_ms.append(reports[-1]["blocked_p99_ms"])
        if returned and old_enough:
            steps = steps_until_merged(records)
            if steps is None:
                self.figures.never_back.append(self.learner.name)
            else:
                self.figures.back_after_steps.append(steps)


def steps_until_merged(records: list[Record]) -> int | None:
    """Steps of this life when its work was in a round for the first time, to the second."""
    steps = 0
    for record in records:
        if record.get("event") == "progress":
            steps = record["steps"]
        elif record.get("event") == "round" and record["contributed"]:
            return steps
    return None


def leader_of(watched: list[Watched]) -> Watched | None:
    """Who led the last round that somebody tells of."""
    peers = {w.learner.progress().get("peer"): w for w in watched}
    newest: tuple[float, object] = (0.0, None)
    for one in watched:
        path = one.learner.directory / "events.jsonl"
        if not path.exists():
            continue
        for event in list(read_events(path))[-50:]:
            if event["event"] == "round" and event.get("leader"):
                newest = max(newest, (float(event["at"]), event["leader"]), key=lambda x: x[0])
    return peers.get(newest[1])


def moments(rng: np.random.Generator) -> Iterator[tuple[float, str]]:
    at = 0.0
    while True:
        at += float(rng.uniform(*EVERY_S))
        if at > SECONDS - 8.0:
            return
        yield at, str(rng.choice(["learner", "leader", "bootstrap"], p=[0.4, 0.4, 0.2]))


def live(processes: Processes, directory: Path, *, hurt: bool, seed: int = 0) -> Figures:
    """One swarm's three minutes."""
    directory.mkdir()
    figures = Figures()
    swarm = Swarm(processes, directory)
    bootstrap = swarm.bootstrap()
    address = address_of(bootstrap)
    listen = address.partition("/p2p/")[0]
    text = run_text(address, cycle=CYCLE)
    founder = swarm.start("anna", text, pace_s=PACE_S)
    link = founder.link()
    for name in LEARNERS[1:]:
        swarm.join(name, link, pace_s=PACE_S)
    for learner in swarm.learners:
        learner.ready()
    watched = [Watched(learner, figures) for learner in swarm.learners]
    unrelated: Learner | None = None
    if not hurt:
        other = Swarm(processes, directory / "other")
        other.directory.mkdir()
        unrelated = other.start("unrelated", run_text(name="unrelated"), pace_s=PACE_S)
        unrelated.ready()
    time.sleep(SETTLE_S)
    began = time.monotonic()
    planned = list(moments(np.random.default_rng(seed)))
    bootstrap_back: float | None = None
    unrelated_back: float | None = None
    while (now := time.monotonic() - began) < SECONDS:
        if planned and now >= planned[0][0]:
            _, kind = planned.pop(0)
            figures.kills[kind] = figures.kills.get(kind, 0) + 1
            if unrelated is not None:
                if unrelated.process.poll() is None:
                    unrelated.kill()
                unrelated_back = now + DOWN_S
            elif kind == "bootstrap":
                if bootstrap.process.poll() is None:
                    bootstrap.kill()
                bootstrap_back = now + DOWN_S
            else:
                running = [w for w in watched if w.down_until is None]
                victim = leader_of(running) if kind == "leader" else None
                victim = (
                    victim
                    or running[int(np.random.default_rng(len(planned)).integers(len(running)))]
                )
                old = victim.learner.lives > 1
                steps = victim.learner.progress().get("steps", 0)
                victim.life_over(returned=old, old_enough=steps >= 2 * CYCLE)
                victim.learner.kill()
                victim.down_until = now + DOWN_S
        if bootstrap_back is not None and now >= bootstrap_back:
            bootstrap_back = None
            again_at(bootstrap, listen, directory)
        if unrelated_back is not None and now >= unrelated_back:
            unrelated_back = None
            assert unrelated is not None
            unrelated.again()
        for one in watched:
            if one.down_until is not None and now >= one.down_until:
                one.down_until = None
                one.learner.come_back(link)
            elif one.down_until is None:
                code = one.learner.process.poll()
                assert code is None, (
                    f"{one.learner.name} ended with {code}:\n{one.learner.output[-3000:]}"
                )
        figures.loads.append(os.getloadavg()[0])
        time.sleep(0.5)
    deadline = time.monotonic() + 60  # whoever came back last has its two cycles, too
    while time.monotonic() < deadline and any(
        (w.learner.progress().get("steps") or 0) < 2 * CYCLE + 4 for w in watched
    ):
        time.sleep(1.0)
    for one in watched:
        one.learner.stop()
    for one in watched:
        figures.fates.append(one.learner.end()["fates"])
        one.life_over(returned=one.learner.lives > 1, old_enough=True)
    if unrelated is not None and unrelated.process.poll() is None:
        unrelated.kill()
    if bootstrap.process.poll() is None:
        bootstrap.kill()
    return figures


def again_at(bootstrap: Command, listen: str, directory: Path) -> None:
    """The bootstrap peer returns where it was: its key and its port are the same."""
    where = directory / "bootstrap"
    bootstrap.again(
        *("bootstrap", "--listen", listen, "--json", "--data-dir", str(where), "--page", "off")
    )


def test_kills_do_not_slow_the_others_down_and_nothing_is_lost(
    processes: Processes, tmp_path: Path
) -> None:
    control = live(processes, tmp_path / "control", hurt=False)
    hurt = live(processes, tmp_path / "hurt", hurt=True)
    for name, figures in (("control", control), ("hurt", hurt)):
        tell(
            f"{name}: median step {1e3 * figures.median_step_s:.1f} ms (pace {1e3 * PACE_S:.0f}), "
            f"p99 blocked {max(figures.blocked_p99_ms):.2f} ms at most, "
            f"{statistics.median(figures.blocked_p99_ms):.2f} in the median life; "
            f"kills {figures.kills}; back in a merge after steps {figures.back_after_steps}; "
            f"never {figures.never_back}; "
            f"load {statistics.mean(figures.loads):.1f}, now {load()}"
        )
    assert sum(hurt.kills.values()) >= SECONDS / 30
    assert hurt.median_step_s <= 1.1 * control.median_step_s
    assert not hurt.never_back
    assert all(steps <= 2 * CYCLE for steps in hurt.back_after_steps), hurt.back_after_steps
    assert all(sums_up(fates) for fates in hurt.fates), hurt.fates
    assert max(hurt.blocked_p99_ms) < 5.0
