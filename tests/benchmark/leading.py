"""How well a swarm agrees on leaders: versions, forks, lost rounds and double leads, over seeds.

    python -m tests.benchmark.leading --seeds 20 --failing 0,0.3
    python -m tests.benchmark.leading --against main~1      # the same seeds on that commit, too

Each swarm runs for ``SECONDS_RUN`` of virtual time. Where some are ``failing``, each peer is down
for that share of the time, and links between two peers break for two seconds. The figures:

    versions      the newest version, on the average
    forks         versions that were made a second time, on another lineage
    void          rounds that ended without a version, and gatherings without a quorum
    missed        member-rounds without a live trainer, of all member-rounds
    two led       moments at which two peers, whose link was there, led one version; the longest
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import asdict, dataclass, fields
from itertools import combinations
from pathlib import Path

from averaging.round.interface.effects import Note
from averaging.virtual.peer import Peer, PeerPlan
from dht.identity import PeerId
from tests.averaging.virtual.broken_links import BreakableHost, BreakableSwarm
from tests.averaging.virtual.swarm import POLICY
from tests.averaging.virtual.truth import Broken

SECONDS_RUN = 240.0
SIZES = (2, 3, 4, 6, 9)
DOWN_S = (1.0, 5.0, 20.0)
LINK_BREAKS_EVERY_S, LINK_DOWN_S = 12.0, 2.0
LOOK_S = 0.05
LEADER_DIES = 0.1
"""Chance that a leader dies as it begins to gather, where peers fail."""
TREE = Path(__file__).parents[2]


@dataclass(slots=True)
class Figures:
    """What came of some swarms."""

    swarms: int = 0
    versions: int = 0
    forks: int = 0
    void: int = 0
    missed: int = 0
    member_rounds: int = 0
    two_led: int = 0
    two_led_longest_s: float = 0.0

    def add(self, other: Figures) -> None:
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            both = max(mine, theirs) if field.name.endswith("_s") else mine + theirs
            setattr(self, field.name, both)


class Watching:
    """A swarm, what is done to it, and what is counted."""

    def __init__(self, seed: int, failing: float) -> None:
        self.rng = rng = random.Random(seed)
        plans = [
            PeerPlan(step_time_s=rng.uniform(0.9, 1.3), founder=not number)
            for number in range(SIZES[seed % len(SIZES)])
        ]
        self.swarm = BreakableSwarm(seed, plans, policy=POLICY)
        self.swarm.on_note = self._note
        self.swarm.call_in(LOOK_S, self._look)
        self.failing = failing
        self.figures = Figures(swarms=1)
        self._made: dict[int, set[bytes]] = defaultdict(set)
        self._down_until: dict[frozenset[PeerId], float] = defaultdict(float)
        self._led_since: dict[frozenset[PeerId], float] = {}

    def run(self) -> Figures:
        swarm, figures, failing = self.swarm, self.figures, self.failing
        if failing:
            for name in swarm.names:
                swarm.call_in(self._next_failure_s(), self._fail, name)
        while swarm.now < SECONDS_RUN:
            swarm.run(swarm.now + LINK_BREAKS_EVERY_S * self.rng.uniform(0.2, 1.8))
            if failing:
                self._break_link()
        happened = swarm.truth.coverage
        figures.versions = max(self._made, default=0)
        figures.forks = sum(len(lineages) - 1 for lineages in self._made.values())
        figures.void = happened["no_quorum"] + happened["void"] + happened["forsworn_void"]
        swarm.failed(Broken("it is over"))
        swarm.close()
        return figures

    def _note(self, peer: Peer, note: Note) -> None:
        swarm, figures = self.swarm, self.figures
        if note.event == "closed":
            live = len(swarm.trainers())
            figures.member_rounds += live
            figures.missed += max(0, live - int(str(note.fields["members"])))
        elif note.event == "finished":
            standing = peer.machine.standing
            assert standing is not None
            self._made[standing.version].add(standing.lineage)
        elif note.event == "gathering" and self.failing and self.rng.random() < LEADER_DIES:
            swarm.call_in(0.05, self._take_down, peer.name)

    def _next_failure_s(self) -> float:
        mean_s = sum(DOWN_S) / len(DOWN_S)
        return self.rng.expovariate(self.failing / (1.0 - self.failing) / mean_s)

    def _fail(self, name: PeerId) -> None:
        lasts_s = self._take_down(name)
        self.swarm.call_in(lasts_s + self._next_failure_s(), self._fail, name)

    def _take_down(self, name: PeerId) -> float:
        lasts_s = self.rng.choice(DOWN_S)
        if self.swarm.nodes[name].alive:
            self.swarm.crash(name)
            self.swarm.call_in(lasts_s, self.swarm.restart, name)
        return lasts_s

    def _break_link(self) -> None:
        swarm = self.swarm
        one, other = self.rng.sample(swarm.names, 2)
        until = self._down_until[frozenset((one, other))] = swarm.now + LINK_DOWN_S
        for here, there in ((one, other), (other, one)):
            peer = swarm.nodes[here]
            host = peer.averager.host
            assert isinstance(host, BreakableHost)
            if peer.alive:
                host.down_until[there] = until
                swarm.await_(host.disconnect(there))

    def _look(self) -> None:
        now, figures = self.swarm.now, self.figures
        self.swarm.call_in(LOOK_S, self._look)
        leaders = [
            (peer.name, peer.machine.standing.version)
            for peer in self.swarm.alive
            if peer.machine.open_roster is not None and peer.machine.standing is not None
        ]
        pairs = {
            frozenset((one, other))
            for (one, version), (other, same) in combinations(leaders, 2)
            if version == same
        }
        before, self._led_since = self._led_since, {}
        for pair in pairs:
            figures.two_led += pair not in before
            since = max(before.get(pair, now), min(now, self._down_until[pair]))
            self._led_since[pair] = since
            figures.two_led_longest_s = round(max(figures.two_led_longest_s, now - since), 2)


def measure(seeds: int, shares: list[float]) -> dict[str, Figures]:
    measured = {}
    for share in shares:
        figures = measured[f"{share:g}"] = Figures()
        for seed in range(seeds):
            figures.add(Watching(seed, share).run())
    return measured


def measured_at(commit: str, seeds: int, failing: str) -> dict[str, Figures]:
    """The figures of another commit, by this very program."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        subprocess.run(["git", "worktree", "add", "--detach", tree, commit], cwd=TREE, check=True)
        try:
            shutil.copy(__file__, tree / Path(__file__).relative_to(TREE))
            module = ["-m", "tests.benchmark.leading", "--json"]
            asked = [f"--seeds={seeds}", f"--failing={failing}"]
            command = [sys.executable, *module, *asked]
            done = subprocess.run(command, cwd=tree, check=True, stdout=subprocess.PIPE)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=TREE, check=True)
    return {share: Figures(**figures) for share, figures in json.loads(done.stdout).items()}


def table(measured: dict[str, dict[str, Figures]]) -> str:
    """``measured``: figures by share that fails, by commit."""
    lines = [
        f"{'failing':>8} {'commit':>12} {'versions':>9} {'forks':>6} {'void':>6} {'missed':>8} "
        f"{'two led':>8} {'longest':>8}"
    ]
    for commit, by_share in measured.items():
        for share, each in by_share.items():
            missed = each.missed / max(1, each.member_rounds)
            lines.append(
                f"{share:>8} {commit:>12} {each.versions / each.swarms:9.1f} {each.forks:6} "
                f"{each.void:6} {missed:8.1%} {each.two_led:8} {each.two_led_longest_s:7.2f}s"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--failing", default="0,0.3", help="shares of the time that peers are down")
    parser.add_argument("--against", help="commit to compare with")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    given = parser.parse_args()
    measured = {"here": measure(given.seeds, [float(each) for each in given.failing.split(",")])}
    if given.json:
        found = {share: asdict(figures) for share, figures in measured["here"].items()}
        print(json.dumps(found))
        return
    if given.against:
        measured[given.against] = measured_at(given.against, given.seeds, given.failing)
    print(table(measured))


if __name__ == "__main__":
    main()
