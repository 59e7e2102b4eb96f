"""A swarm that lasts for days on virtual time: live peers of an invited run, which come and go.

Each peer is what a live one is but for its trainer and its daemon: presence with a door, an
averager on the guarded host, an event log, checkpoints and the list of kept peers in a folder that
outlives it. ``Life`` hurts the swarm on a schedule drawn from a seed: peers crash and return from
their checkpoints, leave, are cut off from the others, have their clocks set, and are invited anew.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np

from averaging.history.adoption import OwnWork, Parting
from averaging.history.state import FragmentState
from averaging.live.averager import Averager
from averaging.live.learner_port import Progress, Snapshot
from averaging.live.settings import AveragerSettings, Participant, RunTerms, Surroundings
from averaging.live.streams.bulk import TransportSettings
from averaging.numbers.arrays import Float32s
from averaging.numbers.layout import Layout, TensorSpec
from averaging.rules.due import DuePolicy
from averaging.rules.peer_view import SILENCE_MAX_S, PeerView
from averaging.rules.policy import RoundPolicy
from averaging.rules.quorum import QuorumPolicy
from dht.forwarding_host import DiallingHost
from dht.guarded_host import GuardedHost
from dht.identity import Identity, PeerId
from dht.membership.table import MembershipSettings
from dht.memory.host import EPOCH, MemoryHost, MemoryNetwork, identity_of
from dht.memory.network import CALM
from dht.presence import door
from dht.presence.presence import Presence
from dht.presence.settings import PresenceSettings, Profile
from dht.presence.this_peer import Events, PresenceEvent
from peer.agent.network import peer_view
from peer.run_file.merging import Outer
from peer.run_file.sections import GptModel, PythonStdlibData, RunFile
from peer.storage.checkpoint import CheckpointFolder
from peer.storage.outer_state import load_outer, outer_content
from peer.views.event_log import EventLog
from tests.dht.membership.signers import DAY, RUN, admission, credential, invitation

FRAGMENTS = 1
LAYOUT = Layout.build([TensorSpec("a", (4, 8))], FRAGMENTS)
BATCH_TOKENS = 100
STEP_S = 30.0
HOUR_S = 3600.0
LOG_BYTES = 16 << 10
LOG_FILES = 3
CHECKPOINT_EVERY_S = 1800.0

POLICY = RoundPolicy(
    due=DuePolicy(cycle_steps=10, fragments=FRAGMENTS),
    quorum=QuorumPolicy(wait_s=10.0),
    slice_bytes_min=64,
    codec="int8",
)
"""A cycle takes five minutes."""

SETTINGS = AveragerSettings(
    progress_s=60.0,  # each step says so itself
    replay_bytes_max=8 << 10,
    threads=1,
    transport=TransportSettings(heartbeat_s=20.0, silence_max_s=45.0, idle_max_s=60.0),
)

HEARTBEAT_S = 100.0
"""Ten times as long as usual, and so is the interval at which directives are spread: they would
cost nine tenths of the processor time of a day."""

MEMBERSHIP = MembershipSettings(heartbeat_s=HEARTBEAT_S, expiry_s=3 * HEARTBEAT_S)

RUN_FILE = RunFile(
    name="lasting",
    model=GptModel(layers=1, width=8, heads=1, context=8),
    data=PythonStdlibData(sequence_length=8),
    outer=Outer(fragments=FRAGMENTS),
)
"""The run that a checkpoint names; the numbers are those of ``LAYOUT``."""


def founded() -> list[FragmentState]:
    rng = np.random.default_rng(0)
    return [
        FragmentState.founded(LAYOUT.hash, f.index, rng.standard_normal(f.size, dtype=np.float32))
        for f in LAYOUT.fragments
    ]


class LastingLearner:
    """A ``LearnerPort`` that keeps nothing of the past: a step moves its values towards a goal."""

    def __init__(self, states: list[FragmentState], goals: list[Float32s]) -> None:
        self.step = 0
        self._goals = goals
        self._values: dict[int, Float32s] = {}
        self.work: dict[int, OwnWork] = {}
        self.written_off: Counter[int] = Counter()
        self._stepped = asyncio.Event()
        for state in states:
            self._begin(state)

    def _begin(self, state: FragmentState) -> None:
        self._values[state.fragment] = state.theta.copy()
        self.work[state.fragment] = OwnWork(state, step=self.step)

    def train(self) -> None:
        self.step += 1
        for fragment, values in self._values.items():
            values += np.float32(0.05) * (self._goals[fragment] - values)
        self._stepped.set()
        self._stepped = asyncio.Event()

    def processed(self) -> int:
        return self.step * BATCH_TOKENS

    def pending(self, fragment: int) -> int:
        return (self.step - self.work[fragment].merged_step) * BATCH_TOKENS

    def discarded(self, fragment: int) -> int:
        lost = self.work[fragment].discarded_steps * BATCH_TOKENS
        return lost + self.written_off[fragment]

    # LearnerPort

    def progress(self) -> Progress:
        return Progress(self.step, self.processed(), STEP_S, BATCH_TOKENS)

    async def snapshot(self, fragment: int, *, timeout_s: float) -> Snapshot | None:
        work = self.work.get(fragment)
        if work is None:
            return None
        try:
            async with asyncio.timeout(timeout_s):
                await self._stepped.wait()
        except TimeoutError:
            return None
        values = self._values[fragment].copy()
        work.offer(values, step=self.step)
        return Snapshot(
            base=work.base,
            values=values,
            base_version=work.base_version,
            base_lineage=work.base_lineage,
            mark=self.step,
            steps=self.step - work.merged_step,
            tokens=self.pending(fragment),
        )

    def adopt(self, fragment: int, state: FragmentState, *, contained: int | None) -> None:
        if fragment not in self.work:
            self._begin(state)
            return
        change = self.work[fragment].adopt(state, contained, step=self.step)
        change.apply(self._values[fragment])

    def rebase(self, fragment: int, state: FragmentState, parting: Parting) -> int | None:
        rebased = self.work[fragment].rebase(state, parting, step=self.step)
        if rebased is None:
            return None
        rebased.adopted.apply(self._values[fragment])
        return rebased.again_steps * BATCH_TOKENS

    def discard(self, fragment: int, state: FragmentState, *, reason: str) -> None:
        self.work[fragment].discard(state, step=self.step).apply(self._values[fragment])

    def passed(self, fragment: int, state: FragmentState) -> None:
        return

    def moved(self, fragment: int, before: FragmentState, after: FragmentState) -> None:
        return

    def misses_base(self, fragment: int) -> bool:
        return False

    def release(self, fragment: int) -> None:
        self.work[fragment].release()


@dataclass(eq=False)
class LastingPeer:
    """One life of one peer."""

    name: str
    identity: Identity
    host: MemoryHost
    presence: Presence
    averager: Averager
    learner: LastingLearner
    log: EventLog
    folder: CheckpointFolder
    view: dict[PeerId, PeerView]
    incarnation: int
    began_at: float
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    @property
    def id(self) -> PeerId:
        return self.identity.peer_id

    def refresh_view(self) -> None:
        now, live = self.averager.now(), {}
        for member in self.presence.table.live(now):
            seen = peer_view(member)
            # Rounds take a peer for dead after a silence of three heartbeats as usual.
            silent_s = (now - seen.heard_at) * SILENCE_MAX_S / MEMBERSHIP.expiry_s
            live[member.peer] = msgspec.structs.replace(seen, heard_at=now - silent_s)
        for peer in self.view.keys() - live.keys():
            del self.view[peer]
        self.view.update(live)

    async def watch(self) -> None:
        """Keep the view and the own record up to date, as an agent does."""
        while True:
            self.refresh_view()
            self.presence.update(trains=True, step_time_s=STEP_S, versions=self.versions())
            await asyncio.sleep(HEARTBEAT_S / 5)

    async def train(self) -> None:
        while True:
            await asyncio.sleep(STEP_S)
            self.learner.train()
            self.averager.look()

    async def save_for_ever(self) -> None:
        while True:
            await asyncio.sleep(CHECKPOINT_EVERY_S)
            self.save()

    def save(self) -> None:
        states = [state for state in self.averager.states if state is not None]
        if len(states) == FRAGMENTS:
            content = outer_content(run=RUN_FILE, layout=LAYOUT, states=states)
            self.folder.save(*content)

    def versions(self) -> tuple[int, ...]:
        states = self.averager.states
        return tuple(state.version for state in states if state) if all(states) else ()

    def check_ledger(self) -> int:
        """Every token of this life is merged, pending or discarded, and none is merged twice.

        Where groups mix, the larger of two counts stands, so that some work counts as merged and
        as discarded. Returns the number of fragments that were looked at.
        """
        looked = 0
        for work in self.averager._works:
            state, machine = work.state, work.machine
            if state is None or machine is None or machine.standing is None:
                continue
            if state.lineage != machine.standing.lineage or work.is_busy or machine.doubt:
                continue
            looked += 1
            mark = state.merged.get(self.id)
            is_mine = mark is not None and mark.incarnation == self.incarnation
            merged = mark.tokens - work.earlier_tokens if is_mine and mark is not None else 0
            processed = self.learner.processed()
            pending = self.learner.pending(work.index)
            lost = self.learner.discarded(work.index)
            account = f"{self.name}: {processed=} {merged=} {pending=} {lost=}"
            assert merged + pending <= processed, f"merged twice: {account}"
            assert processed <= merged + pending + lost, f"lost silently: {account}"
        return looked


class LastingSwarm:
    """The peers of an invited run on one network, by their names. Belongs to a virtual loop."""

    def __init__(self, folder: Path, *, seed: int) -> None:
        self.network = MemoryNetwork(CALM, seed=seed)
        self.folder = folder
        self.seed = seed
        self.peers: dict[str, LastingPeer] = {}
        self.lives: Counter[str] = Counter()
        self.told: Counter[str] = Counter()
        """Events of all peers by their names."""
        self.invited_until: dict[str, float] = {}
        """Virtual time at which the invite of each peer ends."""
        self.clocks: dict[str, float] = {}
        """By how much each peer's clock is wrong."""
        self.seeds: list[str] = []
        self.ledgers_checked = 0
        """Fragments whose account was looked at; those in the middle of a round are left out."""

    @property
    def now(self) -> float:
        return self.network.heap.now

    @staticmethod
    @contextmanager
    def slowed() -> Iterator[None]:
        """Let directives be spread as seldom as heartbeats are sent."""
        with patch.object(door, "SPREAD_EVERY_S", HEARTBEAT_S):
            yield

    async def start(self, name: str) -> LastingPeer:
        """Start a peer from its last checkpoint, or else from the run's first states."""
        identity = identity_of(name)
        self.lives[name] += 1
        home = self.folder / name
        home.mkdir(exist_ok=True)
        host = self.network.host(identity, wall_offset_s=self.clocks.get(name, 0.0))
        incarnation = max(int(host.wall_time()), int(EPOCH) + self.lives[name])
        folder = CheckpointFolder(home / "outer")
        outer = load_outer(folder)
        states = founded() if outer is None else list(outer.states)
        rng = np.random.default_rng([self.seed, *name.encode()])
        goals = [rng.standard_normal(f.size, dtype=np.float32) for f in LAYOUT.fragments]
        learner = LastingLearner(states, goals)
        log = EventLog(
            home / "events.jsonl",
            owner={"peer": identity.peer_id, "name": name},
            max_bytes=LOG_BYTES,
            files_kept=LOG_FILES,
            wall_time=host.wall_time,
        )

        def on_event(event: str, fields: Mapping[str, Any]) -> None:
            self.told[event] += 1
            log.write(event, fields)
            if event == "written_off":
                learner.written_off[fields["fragment"]] += fields["tokens"]

        def on_presence(event: PresenceEvent) -> None:
            on_event(event.name, {"text": event.text, **event.fields})

        until = self.invited_until.setdefault(name, 30 * DAY)
        by = invitation(f"{name} until {until:g}"[:32], days=until / DAY)
        presence = Presence(
            host,
            identity,
            Profile(RUN, name=name, credential=credential(identity.peer_id, by)),
            PresenceSettings(
                membership=MEMBERSHIP,
                cache_path=home / "peers",
                directives_path=home / "directives",
                cache_every_s=600.0,
            ),
            seeds=[
                address
                for seed in self.seeds
                if seed in self.peers and seed != name
                for address in await self.peers[seed].host.addresses()
            ],
            rng=np.random.default_rng([self.seed, self.lives[name], *name.encode()]),
            events=Events(on_presence),
            admission=admission(),
        )
        host.directory.keeper.judge = presence.door.judge
        view: dict[PeerId, PeerView] = {}
        averager = Averager(
            DiallingHost(GuardedHost(host, presence.door.refusal), presence.addresses_to_dial),
            learner,
            me=Participant(identity=identity, incarnation=incarnation),
            terms=RunTerms(RUN, LAYOUT, POLICY),
            around=Surroundings(
                view=view,
                draw_bits=random.Random(f"{name} {incarnation}").getrandbits,
                on_event=on_event,
            ),
            states=[replace(state, momentum=state.momentum.copy()) for state in states],
            settings=SETTINGS,
        )
        await presence.start()
        peer = LastingPeer(
            name, identity, host, presence, averager, learner, log, folder, view, incarnation,
            self.now,
        )  # fmt: skip
        create = asyncio.get_running_loop().create_task
        peer.tasks = [
            create(work, name=f"{what} of {name}")
            for what, work in (
                ("averaging", averager.run()),
                ("view", peer.watch()),
                ("training", peer.train()),
                ("saving", peer.save_for_ever()),
            )
        ]
        self.peers[name] = peer
        return peer

    async def stop(self, name: str, *, leave: bool) -> None:
        """End a peer: with a goodbye and a last checkpoint, or as when its machine is cut off."""
        peer = self.peers.pop(name)
        if leave:
            await peer.averager.drain(timeout_s=30.0)
            peer.save()
        else:
            self.network.crash(peer.id)
        for task in peer.tasks:
            task.cancel()
        await asyncio.wait(peer.tasks)
        for task in peer.tasks:
            if not task.cancelled():
                task.result()
        if leave:
            await peer.presence.leave()
        await peer.presence.close()
        if leave:
            await peer.host.close()
        peer.log.close()

    async def stop_all(self) -> None:
        for name in list(self.peers):
            await self.stop(name, leave=False)

    def set_clock(self, name: str, wrong_by_s: float) -> None:
        self.clocks[name] = wrong_by_s
        if name in self.peers:
            self.peers[name].host.wall_offset_s = wrong_by_s

    def check(self) -> None:
        """Raise what any peer ended with, and check the ledgers and what lies on the disk."""
        for peer in self.peers.values():
            for task in peer.tasks:
                if task.done():
                    task.result()
        self.ledgers_checked += sum(peer.check_ledger() for peer in self.peers.values())
        bits: dict[bytes, bytes] = {}
        for peer in self.peers.values():
            for state in peer.averager.states:
                assert state is not None
                digest = bits.setdefault(state.lineage, state.digest())
                assert digest == state.digest(), f"{peer.name}: one lineage has two states"
        for home in self.folder.iterdir():
            logs = list(home.glob("events.jsonl*"))
            assert sum(log.stat().st_size for log in logs) <= LOG_FILES * LOG_BYTES, home
            assert len(list((home / "outer").glob("*"))) <= 3, home


@dataclass(frozen=True, slots=True, kw_only=True)
class Churn:
    """The rates of what hurts a swarm, on average."""

    settled: int
    """Peers that stay for the whole time."""
    accident_every_s: float
    """Time between two crashes or departures of others."""
    away_s: tuple[float, float] = (60.0, 3600.0)
    partition_every_s: float = 3 * HOUR_S
    partition_s: tuple[float, float] = (120.0, 1200.0)
    clock_every_s: float = 2 * HOUR_S
    clock_wrong_s: tuple[float, float] = (60.0, 1800.0)
    clock_steps_s: tuple[float, ...] = (-86400.0, -3600.0, -60.0, 60.0, 3600.0, 86400.0)
    invite_s: tuple[float, float] = (4 * HOUR_S, 10 * HOUR_S)
    newcomer_every_s: float = 4 * HOUR_S
    """Time between two peers with new identities."""


class Life:
    """The events of a swarm in the course of days."""

    def __init__(self, swarm: LastingSwarm, names: list[str], churn: Churn) -> None:
        self._swarm = swarm
        self._churn = churn
        self._rng = random.Random(swarm.seed)
        self.settled = names[: churn.settled]
        self._others = names[churn.settled :]
        self.happened: Counter[str] = Counter()
        self._newcomers = 0
        self._running: list[asyncio.Task[None]] = []
        for name in self._others:
            swarm.invited_until[name] = self._rng.uniform(*churn.invite_s)

    def begin(self, tasks: asyncio.TaskGroup) -> None:
        """Let things happen until ``end``."""
        for happens, every_s in (
            (self._accident, self._churn.accident_every_s),
            (self._partition, self._churn.partition_every_s),
            (self._set_a_clock, self._churn.clock_every_s),
            (self._newcomer, self._churn.newcomer_every_s),
        ):
            self._begin(tasks, self._now_and_then(tasks, happens, every_s))
        self._begin(tasks, self._renew_invites())

    def end(self) -> None:
        for task in self._running:
            task.cancel()

    def _begin(self, tasks: asyncio.TaskGroup, work: Coroutine[Any, Any, None]) -> None:
        self._running = [task for task in self._running if not task.done()]
        self._running.append(tasks.create_task(work))

    async def _now_and_then(
        self,
        tasks: asyncio.TaskGroup,
        happens: Callable[[], Coroutine[Any, Any, None]],
        every_s: float,
    ) -> None:
        while True:
            await asyncio.sleep(every_s * self._rng.uniform(0.5, 1.5))
            self._begin(tasks, happens())

    async def _accident(self) -> None:
        there = [name for name in self._others if name in self._swarm.peers]
        if not there:
            return
        name = self._rng.choice(there)
        leave = self._rng.random() < 0.3
        self.happened["departure" if leave else "crash"] += 1
        await self._swarm.stop(name, leave=leave)
        await asyncio.sleep(self._rng.uniform(*self._churn.away_s))
        await self._swarm.start(name)

    async def _partition(self) -> None:
        ids = sorted(peer.id for peer in self._swarm.peers.values())
        apart = self._rng.sample(ids, max(1, len(ids) // 4))
        self.happened["partition"] += 1
        self._swarm.network.partition([apart, [each for each in ids if each not in apart]])
        await asyncio.sleep(self._rng.uniform(*self._churn.partition_s))
        self._swarm.network.heal()

    async def _set_a_clock(self) -> None:
        name = self._rng.choice(sorted(self._swarm.peers))
        self.happened["clock set"] += 1
        self._swarm.set_clock(name, self._rng.choice(self._churn.clock_steps_s))
        await asyncio.sleep(self._rng.uniform(*self._churn.clock_wrong_s))
        self._swarm.set_clock(name, 0.0)

    async def _newcomer(self) -> None:
        self._newcomers += 1
        name = f"newcomer {self._newcomers}"
        self.happened["newcomer"] += 1
        self._swarm.invited_until[name] = self._swarm.now + self._rng.uniform(*self._churn.invite_s)
        self._others.append(name)
        await self._swarm.start(name)

    async def _renew_invites(self) -> None:
        """Invite each of the others anew, some time after its invite has ended."""
        swarm = self._swarm
        while True:
            await asyncio.sleep(300.0)
            for name in [name for name in self._others if name in swarm.peers]:
                if swarm.now < swarm.invited_until[name] + 600.0:
                    continue
                self.happened["invite renewed"] += 1
                await swarm.stop(name, leave=True)
                swarm.invited_until[name] = swarm.now + self._rng.uniform(*self._churn.invite_s)
                await swarm.start(name)
