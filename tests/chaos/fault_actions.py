"""Actions of the faults: each is applied to a running swarm and returns how to undo it."""

from __future__ import annotations

import contextlib
import resource
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

import numpy as np
import psutil

from peer.demo.processes import Output
from peer.storage.checkpoint import CheckpointFolder
from peer.storage.home import OUTER
from tests.chaos.judging.schedule import Fault, FaultKind
from tests.chaos.members import Learner
from tests.chaos.process_swarm import ProcessSwarm
from tests.chaos.proxy import CLEAR, RULES
from tests.processes import end_softly

CRAWL_PERIOD_S = 0.5
CRAWL_SHARE = 0.1

Undo: TypeAlias = Callable[[], Mapping[str, int] | None]
"""Ends a fault; returns the counters of what it did, if it has any."""


class FaultActions:
    """Applies faults to one swarm."""

    def __init__(self, swarm: ProcessSwarm, rng: np.random.Generator) -> None:
        self._swarm = swarm
        self._rng = rng
        self._crawling: dict[Learner, bool] = {}
        """Slowed learners, and whether each is stopped at the moment."""
        self._strangers = 0

    def apply(self, fault: Fault, victim: Learner | None) -> Undo | None:
        """Begin a fault; ``None`` when it could not be done.

        The leader of ``FaultKind.LEADER`` has been killed already (``tests.chaos.ambush``).
        """
        match fault.kind:
            case FaultKind.SEEDS:
                return self._kill_bootstraps()
            case FaultKind.PARTITION:
                return self._partition()
            case FaultKind.GARBAGE | FaultKind.FLOOD | FaultKind.CROWD:
                return self._stranger(fault)
        assert victim is not None, f"{fault.kind} needs a victim"
        match fault.kind:
            case FaultKind.KILL:
                victim.kill()
                return victim.come_back
            case FaultKind.LEADER:
                return victim.come_back
            case FaultKind.DAMAGE:
                victim.kill()
                self._damage_checkpoint(victim)
                return victim.come_back
            case FaultKind.FREEZE:
                victim.signal(signal.SIGSTOP)
                return lambda: victim.signal(signal.SIGCONT)
            case FaultKind.CRAWL:
                self._crawling[victim] = False
                return lambda: self._stop_crawling(victim)
            case FaultKind.AGENT:
                return self._kill_members(victim, "peer.agent")
            case FaultKind.DAEMON:
                return self._kill_members(victim, "p2pd")
            case FaultKind.LINK:
                return self._impair_links(victim, fault.detail)
            case FaultKind.FULL:
                return _limit_files(victim)
            case FaultKind.UNWRITABLE:
                return make_unwritable(victim.directory / OUTER)
            case FaultKind.CLOCK:
                victim.set_clock(victim.clock[-1][1] + fault.amount)
                return lambda: None

    def turn(self) -> None:
        """Stop and resume the slowed learners. To be called several times per crawl period."""
        phase = (self._swarm.now() % CRAWL_PERIOD_S) / CRAWL_PERIOD_S
        for learner, stopped in list(self._crawling.items()):
            wanted = phase >= CRAWL_SHARE
            if wanted != stopped and learner.up:
                learner.signal(signal.SIGSTOP if wanted else signal.SIGCONT)
                self._crawling[learner] = wanted

    def _stop_crawling(self, victim: Learner) -> None:
        del self._crawling[victim]
        if victim.up:
            victim.signal(signal.SIGCONT)

    def _kill_bootstraps(self) -> Undo:
        bootstraps = self._swarm.bootstraps
        for bootstrap in bootstraps:
            bootstrap.kill()

        def undo() -> None:
            for bootstrap in bootstraps:
                bootstrap.launch()

        return undo

    def _kill_members(self, victim: Learner, word: str) -> Undo | None:
        found = victim.members(word)
        if not found:
            return None
        self._swarm.note_processes()
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.kill()
        return lambda: None

    def _damage_checkpoint(self, victim: Learner) -> None:
        """Overwrite bytes in the middle of the agent's newest checkpoint."""
        folder = CheckpointFolder(victim.directory / OUTER)
        numbers = folder.numbers()
        if numbers:
            path = folder.folder / f"{numbers[-1]:012d}" / "tensors.safetensors"
            with path.open("r+b") as file:
                file.seek(path.stat().st_size // 2)
                file.write(self._rng.bytes(64))

    def _impair_links(self, victim: Learner, how: str) -> Undo:
        proxies = self._swarm.workspace.proxies
        assert proxies is not None
        proxies.set_rule(victim.name, RULES[how])
        return lambda: proxies.set_rule(victim.name, CLEAR)

    def _partition(self) -> Undo:
        proxies = self._swarm.workspace.proxies
        assert proxies is not None
        names = [x.name for x in self._swarm.everybody] + [b.name for b in self._swarm.bootstraps]
        order = self._rng.permutation(len(names))
        proxies.cut({names[index]: place % 2 for place, index in enumerate(order)})
        return proxies.heal

    def _stranger(self, fault: Fault) -> Undo:
        swarm = self._swarm
        assert swarm.run is not None
        addresses = []
        for learner in swarm.learners:
            link = learner.life.link if learner.lives else None
            addresses += _own_addresses(link or "", learner.peer_id)
        arguments = [
            *("--what", str(fault.kind)),
            *("--run", swarm.run.run_id),
            *("--seed", str(int(self._rng.integers(1 << 30)))),
            *("--seconds", str(fault.lasts_s)),
        ]
        if fault.kind is FaultKind.CROWD:
            addresses += [bootstrap.address for bootstrap in swarm.bootstraps]
            for port in self._ports():
                arguments += ["--knock", str(port)]
        self._strangers += 1
        log = swarm.workspace.directory / f"stranger-{self._strangers}.out"
        process = swarm.visit([*arguments, *addresses], log)

        def undo() -> Mapping[str, int]:
            end_softly(process, within_s=10.0)
            counters = [record for record in Output(log).news() if record["event"] == "did"]
            if not counters:
                return {}
            return {name: count for name, count in counters[-1].items() if name != "event"}

        return undo

    def _ports(self) -> list[int]:
        """The ports at which agents listen themselves: those of the lanes."""
        ports = []
        for learner in self._swarm.learners:
            for process in learner.members("peer.agent") if learner.up else ():
                with contextlib.suppress(psutil.Error):
                    found = process.net_connections(kind="tcp")
                    ports += [each.laddr.port for each in found if each.status == "LISTEN"]
        return sorted(set(ports))


def _limit_files(victim: Learner) -> Undo:
    """Keep the agent's files from growing beyond a few bytes, as on a full disk."""
    limited: list[tuple[psutil.Process, tuple[int, int]]] = []
    for process in victim.members("peer.agent"):
        with contextlib.suppress(psutil.Error):
            before = process.rlimit(resource.RLIMIT_FSIZE)
            process.rlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
            limited.append((process, before))

    def undo() -> None:
        for process, before in limited:
            with contextlib.suppress(psutil.Error):
                process.rlimit(resource.RLIMIT_FSIZE, before)

    return undo


def make_unwritable(folder: Path) -> Undo:
    """Replace a folder with a file, which also keeps the superuser from writing into it."""
    away = folder.with_name(f"{folder.name}.away")
    folder.rename(away)
    folder.write_bytes(b"")

    def undo() -> None:
        folder.unlink(missing_ok=True)
        away.rename(folder)

    return undo


def _own_addresses(link: str, peer_id: str) -> list[str]:
    """The addresses in a link that are the peer's own."""
    seeds = [part.removeprefix("seed=") for part in link.partition("?")[2].split("&")]
    return [seed for seed in seeds if peer_id and seed.endswith(peer_id)]
