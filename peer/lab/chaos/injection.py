"""Carries out a schedule's faults on a swarm, and takes them back when their time is over."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np
import psutil

from peer.lab.chaos.judging.evidence import FaultDone
from peer.lab.chaos.judging.schedule import ABSENT, STRANGERS, Fault, FaultKind
from peer.lab.chaos.proxy import CLEAR, RULES
from peer.lab.chaos.swarm import Learner, Swarm, end_softly
from peer.lab.processes import new_records
from peer.storage.checkpoint import CheckpointFolder

CRAWL_PERIOD_S = 0.5
CRAWL_SHARE = 0.1
AMBUSH_MAX_S = 15.0
"""A leader that does not come to the phase meant by then is killed as it is."""

AMBUSH_LOOK_S = 0.002

STRANGER_START_S = 8.0
"""Its own time begins when it has started, which a busy machine makes long."""

_PHASE_EVENTS = {
    "joining": ("gathering",),
    "committed": ("closed",),
    "exchanging": ("entered",),
    "recovering": ("took_over",),
}
"""What a leader notes when it comes to a phase; ``recovering`` is its successor."""


Undo: TypeAlias = Callable[[], Mapping[str, int] | None]
"""Ends a fault; returns what was done meanwhile, where that counts."""


@dataclass(slots=True, eq=False)
class _Ongoing:
    """A fault that is not over."""

    done: FaultDone
    over_s: float
    undo: Undo


class Hurting:
    """What is done to one swarm. ``turn`` is called often; it starts and ends what is due."""

    def __init__(
        self,
        swarm: Swarm,
        faults: Sequence[Fault],
        *,
        began_s: float,
        quiet_s: float,
        whole_min: int,
        tell: Callable[[str], None],
        rng: np.random.Generator,
    ) -> None:
        self._swarm = swarm
        self._waiting = list(faults)
        self._began_s = began_s
        self._quiet_s = quiet_s
        self._whole_min = whole_min
        self._tell = tell
        self._rng = rng
        self._ongoing: list[_Ongoing] = []
        self._crawling: dict[Learner, bool] = {}
        self._strangers = 0
        self.done: list[FaultDone] = []

    @property
    def over(self) -> bool:
        return not (self._waiting or self._ongoing)

    def turn(self) -> None:
        """Do what is due. Nothing begins any more once the quiet end has."""
        now = self._swarm.now()
        self._end_those_over()
        while self._waiting and self._began_s + self._waiting[0].at_s <= now:
            fault = self._waiting.pop(0)
            if now < self._quiet_s - 1.0:
                self._begin(fault)
        phase = (now % CRAWL_PERIOD_S) / CRAWL_PERIOD_S
        for learner, stopped in list(self._crawling.items()):
            wanted = phase >= CRAWL_SHARE
            if wanted != stopped and learner.up:
                learner.signal(signal.SIGSTOP if wanted else signal.SIGCONT)
                self._crawling[learner] = wanted

    def _end_those_over(self) -> None:
        now = self._swarm.now()
        for ongoing in [each for each in self._ongoing if each.over_s <= now]:
            self._end(ongoing)

    def heal(self) -> None:
        """End whatever is still going on."""
        self._waiting.clear()
        for ongoing in list(self._ongoing):
            self._end(ongoing)

    def _end(self, ongoing: _Ongoing) -> None:
        self._ongoing.remove(ongoing)
        did = ongoing.undo() or {}
        self.done.append(replace(ongoing.done, until_s=self._swarm.now(), did=did))

    def _begin(self, fault: Fault) -> None:
        swarm = self._swarm
        victim = None
        # On a busy machine a start may take longer than the schedule allows for.
        whole = sum(learner.whole for learner in swarm.learners)
        if fault.kind in ABSENT and whole <= self._whole_min:
            return
        if fault.victim is not None:
            victim = self._whole_one(fault.victim)
            if victim is None:
                return
        began = swarm.now()
        if fault.kind is FaultKind.LEADER:
            # While it lies in wait, nothing else of the schedule is due: that comes later.
            victim, told = self._ambush(fault.detail)
            if victim is None:
                return
            began = swarm.now()
            fault = replace(fault, detail=told)
        undo = self._do(fault, victim)
        if undo is None:
            return
        name = None if victim is None else victim.name
        self._tell(f"{fault.kind}: {name or 'swarm'} {fault.detail}".rstrip())
        done = FaultDone(
            kind=fault.kind, at_s=began, until_s=began, victim=name, detail=fault.detail
        )
        start_s = STRANGER_START_S if fault.kind in STRANGERS else 0.0
        self._ongoing.append(_Ongoing(done, swarm.now() + start_s + fault.lasts_s, undo))

    def _whole_one(self, index: int) -> Learner | None:
        """The learner that was meant, or the next one if that is down for a reason of its own."""
        learners = self._swarm.learners
        hurt = {ongoing.done.victim for ongoing in self._ongoing}
        for learner in (*learners[index:], *learners[:index]):
            if learner.whole and learner.name not in hurt:
                return learner
        return None

    def _do(self, fault: Fault, victim: Learner | None) -> Undo | None:
        """Start it; returns what ends it, or ``None`` when it could not be done."""
        swarm = self._swarm
        match fault.kind:
            case FaultKind.KILL:
                assert victim is not None
                victim.kill()
                return victim.come_back
            case FaultKind.LEADER:
                assert victim is not None
                return victim.come_back
            case FaultKind.DAMAGE:
                assert victim is not None
                victim.kill()
                return self._damage(victim)
            case FaultKind.SEEDS:
                for bootstrap in swarm.bootstraps:
                    bootstrap.kill()
                return self._seeds_return
            case FaultKind.FREEZE:
                assert victim is not None
                victim.signal(signal.SIGSTOP)
                return lambda: victim.signal(signal.SIGCONT)
            case FaultKind.CRAWL:
                assert victim is not None
                self._crawling[victim] = False
                return lambda: self._stop_crawling(victim)
            case FaultKind.AGENT | FaultKind.DAEMON:
                assert victim is not None
                return self._kill_part(victim, fault.kind)
            case FaultKind.LINK:
                assert victim is not None and swarm.proxies is not None
                proxies, name = swarm.proxies, victim.name
                proxies.set_rule(name, RULES[fault.detail])
                return lambda: proxies.set_rule(name, CLEAR)
            case FaultKind.PARTITION:
                return self._partition()
            case FaultKind.FULL:
                assert victim is not None
                return self._fill(victim)
            case FaultKind.UNWRITABLE:
                assert victim is not None
                return _make_unwritable(victim.directory / "outer")
            case FaultKind.CLOCK:
                assert victim is not None
                victim.set_clock(victim.clock[-1][1] + fault.amount)
                return lambda: None
            case FaultKind.GARBAGE | FaultKind.FLOOD:
                return self._stranger(fault)

    # --- the ways that take more than a line ------------------------------------------------------

    def _seeds_return(self) -> None:
        for bootstrap in self._swarm.bootstraps:
            bootstrap.launch()

    def _kill_part(self, victim: Learner, kind: FaultKind) -> Callable[[], None] | None:
        word = "peer.agent" if kind is FaultKind.AGENT else "p2pd"
        found = victim.members(word)
        if not found:
            return None
        self._swarm.note_processes()
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.kill()
        return lambda: None

    def _stop_crawling(self, victim: Learner) -> None:
        del self._crawling[victim]
        if victim.up:
            victim.signal(signal.SIGCONT)

    def _damage(self, victim: Learner) -> Callable[[], None]:
        """Flip bytes in the middle of the newest checkpoint of the agent."""
        folder = CheckpointFolder(victim.directory / "outer")
        numbers = folder.numbers()
        if numbers:
            path = folder.folder / f"{numbers[-1]:012d}" / "tensors.safetensors"
            with path.open("r+b") as file:
                file.seek(path.stat().st_size // 2)
                file.write(self._rng.bytes(64))
        return victim.come_back

    def _fill(self, victim: Learner) -> Callable[[], None]:
        """No file of the agent may grow beyond a few bytes: as a disk that is full."""
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

    def _partition(self) -> Callable[[], None]:
        proxies = self._swarm.proxies
        assert proxies is not None
        names = [x.name for x in self._swarm.everybody] + [b.name for b in self._swarm.bootstraps]
        order = self._rng.permutation(len(names))
        sides = {names[index]: place % 2 for place, index in enumerate(order)}
        proxies.cut(sides)
        return proxies.heal

    def _stranger(self, fault: Fault) -> Undo:
        swarm = self._swarm
        assert swarm.run is not None
        addresses = []
        for learner in swarm.learners:
            link = learner.life.link if learner.lives else None
            addresses += _own_addresses(link or "", learner.peer_id)
        arguments = [
            *("--what", str(fault.kind), "--run", swarm.run.run_id),
            *("--seed", str(int(self._rng.integers(1 << 30)))),
            *("--seconds", str(fault.lasts_s)),
            *addresses,
        ]
        self._strangers += 1
        process, log = swarm.helper(
            "peer.lab.chaos.stranger", arguments, f"stranger-{self._strangers}.out"
        )

        def undo() -> Mapping[str, int]:
            end_softly(process, within_s=10.0)
            said = [record for record in new_records(log, 0)[0] if record["event"] == "did"]
            return (
                {name: count for name, count in said[-1].items() if name != "event"} if said else {}
            )

        return undo

    # --- lying in wait for a leader ---------------------------------------------------------------

    def _ambush(self, phase: str) -> tuple[Learner | None, str]:
        """Kill whoever leads a round when it comes to this phase; returns whom, and what it was."""
        swarm = self._swarm
        whole = [x for x in swarm.learners if x.whole]
        if len(whole) <= self._whole_min:
            return None, phase
        watched: list[tuple[Learner, int, list[int]]] = []
        for learner in whole:
            with contextlib.suppress(OSError):
                descriptor = os.open(learner.events_path, os.O_RDONLY)
                os.lseek(descriptor, 0, os.SEEK_END)
                pids = [process.pid for process in learner.members("peer.agent")]
                watched.append((learner, descriptor, pids))
        wanted = _PHASE_EVENTS[phase]
        first: Learner | None = None
        if phase == "recovering" and len(whole) <= self._whole_min + 1:
            phase, wanted = "exchanging", _PHASE_EVENTS["exchanging"]
        if phase == "recovering":
            # Its leader has to go first; then whoever takes over is the one that is meant.
            wanted = _PHASE_EVENTS["exchanging"]
        found: Learner | None = None
        patience_s = min(AMBUSH_MAX_S, self._quiet_s - swarm.now())
        deadline = time.monotonic() + patience_s
        leading: dict[Learner, bool] = {}
        try:
            turn_at = time.monotonic()
            while found is None and time.monotonic() < deadline:
                for learner, descriptor, pids in watched:
                    if learner is first:
                        continue
                    for event in _events(descriptor):
                        name = event.get("event")
                        if name == "gathering":
                            leading[learner] = True
                        elif name == "round":
                            leading[learner] = False
                        hit = name in wanted and (name != "entered" or leading.get(learner, False))
                        if not hit or found is not None:
                            continue
                        _kill_at_once(pids)
                        if phase == "recovering" and first is None:
                            first = learner
                            wanted = _PHASE_EVENTS["recovering"]
                        else:
                            found = learner
                time.sleep(AMBUSH_LOOK_S)
                if time.monotonic() - turn_at > 0.5:
                    turn_at = time.monotonic()
                    swarm.turn()
                    self._end_those_over()
        finally:
            for _, descriptor, _ in watched:
                os.close(descriptor)
        told = phase
        if first is not None and found is None:
            found, told = first, "exchanging"  # nobody had to take over
        elif first is not None:
            at_s = swarm.now()
            first.kill()
            first.come_back()
            self.done.append(
                FaultDone(
                    kind=FaultKind.LEADER,
                    at_s=at_s,
                    until_s=swarm.now(),
                    victim=first.name,
                    detail="exchanging",
                )
            )
        if found is None:
            return None, phase
        found.kill()
        return found, told


def _kill_at_once(pids: Sequence[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _events(descriptor: int) -> list[dict[str, object]]:
    """What was appended to an event log since the last look."""
    found = []
    for line in os.read(descriptor, 1 << 20).splitlines():
        with contextlib.suppress(ValueError):
            event = json.loads(line)
            if isinstance(event, dict):
                found.append(event)
    return found


def _own_addresses(link: str, peer_id: str) -> list[str]:
    """Those of a link that are the peer's own."""
    seeds = [part.removeprefix("seed=") for part in link.partition("?")[2].split("&")]
    return [seed for seed in seeds if peer_id and seed.endswith(peer_id)]


def _make_unwritable(folder: Path) -> Callable[[], None]:
    """Put a file in a folder's place: that stops a superuser as well, whom no mode bit stops."""
    away = folder.with_name(f"{folder.name}.away")
    folder.rename(away)
    folder.write_bytes(b"")

    def undo() -> None:
        folder.unlink(missing_ok=True)
        away.rename(folder)

    return undo
