"""A swarm of whole averagers in the storms of the simulator, watched by the same ``Truth``.

``LiveSwarm`` can be made by ``tests.averaging.simulated.swarm.cause_storm`` in place of a simulated
one: the same seed gives the same peers, the same weather and the same accidents. Everything below
the accidents is the shipped code: ``Averager``, its streams and threads, on the in-memory network
and virtual time. A paused peer hears and trains nothing, but its timers run on.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np

from averaging.history.adoption import Parting
from averaging.history.standing import sealed_parents
from averaging.history.state import FragmentState
from averaging.live.averager import Averager
from averaging.live.fragment import FragmentWork
from averaging.live.learner_port import Progress, Snapshot
from averaging.live.settings import (
    AveragerSettings,
    Participant,
    RunTerms,
    Surroundings,
    topic_of,
)
from averaging.live.slices.exchange import Exchange
from averaging.live.slices.parts import Parts
from averaging.round.fetched_states import Life
from averaging.round.interface.effects import Apply, Effect, Fold, GiveUp, Note
from averaging.round.interface.phase import Phase
from averaging.round.machine import FragmentRounds
from averaging.rules.peer_view import PeerView
from averaging.rules.policy import RoundPolicy
from dht.forwarding_host import DiallingHost
from dht.identity import PeerId, RunId
from dht.memory.host import MemoryNetwork, identity_of
from dht.memory.network import Weather
from tests.averaging.simulated.swarm import POLICY, PeerPlan, Storm, has_recovered, not_recovered
from tests.averaging.virtual.truth import FRAGMENT, LAYOUT, Broken, Learner, Truth, Work

RUN = RunId("stormy")


class Port:
    """A ``Learner`` of the storms as an averager sees it: one fragment, a safe point per step."""

    def __init__(self, node: LiveNode, learner: Learner) -> None:
        self.learner = learner
        self._node = node
        self._stepped = asyncio.Event()

    def stepped(self) -> None:
        self._stepped.set()
        self._stepped = asyncio.Event()

    def progress(self) -> Progress:
        learner = self.learner
        return Progress(
            step=learner.step,
            tokens=learner.step * learner.tokens_per_step,
            step_time_s=self._node.plan.step_time_s,
            batch_tokens_max=learner.tokens_per_step,
        )

    async def snapshot(self, fragment: int, *, timeout_s: float) -> Snapshot | None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._stepped.wait()
        except TimeoutError:
            return None
        learner = self.learner
        offer = learner.offer()
        assert learner.snapshot is not None
        self._node.offered(
            Work(
                self._node.name,
                self._node.life.incarnation,
                offer.mark - offer.steps,
                offer.mark,
                offer.tokens,
            )
        )
        return Snapshot(
            base=learner.base,
            values=learner.snapshot,
            base_version=offer.base_version,
            base_lineage=offer.base_lineage,
            mark=offer.mark,
            steps=offer.steps,
            tokens=offer.tokens,
        )

    def adopt(self, fragment: int, state: FragmentState, *, contained: int | None) -> None:
        self.learner.adopt(state, contained=contained)

    def rebase(self, fragment: int, state: FragmentState, parting: Parting) -> int | None:
        return self.learner.rebase(state, parting)

    def discard(self, fragment: int, state: FragmentState, *, reason: str) -> None:
        self._node.swarm.truth.coverage["discarded"] += 1
        self.learner.discard(state)

    def passed(self, fragment: int, state: FragmentState) -> None:
        return

    def moved(self, fragment: int, before: FragmentState, after: FragmentState) -> None:
        return

    def misses_base(self, fragment: int) -> bool:
        return False

    def release(self, fragment: int) -> None:
        self.learner.release()


class LiveNode:
    """One incarnation of one peer."""

    def __init__(self, swarm: LiveSwarm, name: PeerId, plan: PeerPlan, incarnation: int) -> None:
        self.swarm = swarm
        self.name = name
        self.plan = plan
        self.life = Life(name, incarnation)
        self.alive = True
        self.view: dict[PeerId, PeerView] = {}
        state = swarm.disk.get(name, swarm.origin) if plan.trains else None
        self.learner: Learner | None = None
        self.port: Port | None = None
        if state is not None:
            # The outer step moves momentum in place: each life has its own.
            state = replace(state, momentum=state.momentum.copy())
            self.learner = Learner(state, swarm.goal(name), plan.tokens_per_step)
            self.port = Port(self, self.learner)
        self._made: dict[bytes, tuple[Sequence[bytes], list[Work], bool]] = {}
        self._seen = state
        self.averager = Averager(
            DiallingHost(swarm.memory.host(swarm.identities[name]), swarm.addresses),
            self.port,
            me=Participant(
                identity=swarm.identities[name],
                incarnation=incarnation,
                founder=plan.founder,
                keeps=plan.trains,
                reachable=not plan.dial_out_only,
                site=plan.site,
            ),
            terms=RunTerms(RUN, LAYOUT, swarm.policy),
            around=Surroundings(
                view=self.view,
                line_max=lambda: 0.0,
                on_event=self._hear,
                draw_bits=random.Random(f"{swarm.seed} {name} {incarnation}").getrandbits,
            ),
            states=[] if state is None else [state],
            settings=AveragerSettings(progress_s=1e6),
        )
        self.task: asyncio.Task[None] | None = None

    def _hear(self, event: str, fields: Mapping[str, Any]) -> None:
        if event == "written_off" and self.learner is not None:
            self.learner.write_off(fields["tokens"])

    def __repr__(self) -> str:
        return f"LiveNode({self.name}, {self.life.incarnation})"

    @property
    def work(self) -> FragmentWork:
        return self.averager._works[0]

    @property
    def machine(self) -> FragmentRounds:
        return self.work.machine

    @property
    def state(self) -> FragmentState | None:
        return self.work.state

    def start(self) -> None:
        self.task = asyncio.get_running_loop().create_task(self.averager.run())
        if self.learner is not None:
            self.swarm.heap.call_in(self.plan.step_time_s, self._step)

    def started(self) -> None:
        """The machine is there."""
        if not self.swarm.young and self.plan.starts_at == 0.0 and self.life.incarnation == 1:
            self.machine.peers.started_at = self.averager.now() - 1e6

    def _step(self) -> None:
        if not self.alive:
            return
        if not self.swarm.memory.simulated.is_paused(self.name):
            assert self.learner is not None and self.port is not None
            self.learner.train()
            self.port.stepped()
            self.averager.look()
        self.swarm.heap.call_in(self.plan.step_time_s, self._step)

    # Watching

    def offered(self, work: Work) -> None:
        self.swarm.truth.offered(work)

    def does(self, effect: Effect) -> None:
        """Before an effect is carried out."""
        truth = self.swarm.truth
        if self.swarm.on_effect is not None:
            self.swarm.on_effect(self, effect)
        match effect:
            case Note():
                truth.note(effect)
                if self.swarm.on_note is not None:
                    self.swarm.on_note(self, effect)
            case GiveUp(round_id, _, _) if round_id is not None:
                truth.vowed(self.life, round_id)
            case Apply():
                self._applies(effect)
            case Fold():
                assert self.state is not None
                work = truth.offers[self.name, self.life.incarnation, effect.contained]
                self._made[effect.standing.lineage] = ([self.state.lineage], [work], False)
            case _:
                pass

    def _applies(self, apply: Apply) -> None:
        truth, commit = self.swarm.truth, apply.commit
        parts = self.work.exchanges[apply.round].parts
        truth.applies(self.life, apply, bytes(parts.merged_bytes), parts.maps or None)
        entries = [commit.members[index] for index in apply.seal]
        works = [truth.offers[each.peer, each.incarnation, each.mark] for each in entries]
        parents: Sequence[bytes] = sealed_parents(commit, apply.seal)
        if commit.kind == "merge":
            assert self.state is not None
            parents = (self.state.lineage,)
        mixes = commit.kind != "merge"
        works = [] if commit.kind == "mix" else works
        after = self.work.exchanges[apply.round].completed(apply.standing, apply.seal)
        self._made[after.lineage] = (parents, works, mixes)

    def did(self) -> None:
        """After an input of the machine, when its effects are under way."""
        state, truth = self.state, self.swarm.truth
        if state is not None and state is not self._seen:
            self._seen = state
            if (made := self._made.pop(state.lineage, None)) is not None:
                truth.made(state, *made)
            truth.stands(self.name, state)
            if self.swarm.on_stands is not None:
                self.swarm.on_stands(self, state)
            self.swarm.save(self.name, state)
        machine, now = self.machine, self.averager.now()
        if (
            machine.phase is not Phase.IDLE
            or machine.rounds
            or machine.open_roster
            or machine.doubt
        ):
            deadline = machine.deadline
            if deadline is None or deadline > now + 2 * self.swarm.policy.round_s:
                raise Broken(f"{self} waits without a deadline")
        standing, learner = machine.standing, self.learner
        if learner is None or standing is None or state is None:
            return
        if state.lineage == standing.lineage:  # not between applying and saying so
            dealt = len(self.swarm.plans) > self.swarm.policy.group_size
            former = self.swarm.crashed.get(self.name, {})
            forked = dealt or bool(self.swarm.let_go[self.name])
            truth.check_fate(self.life, standing, learner, former, forked=forked)


class _Network:
    """The network as accidents know it."""

    def __init__(self, memory: MemoryNetwork) -> None:
        self._memory = memory
        self.heal = memory.heal
        self.set_link = memory.simulated.set_link

    def partition(self, groups: Sequence[Iterable[PeerId]]) -> None:
        self._memory.partition(groups)

    @property
    def weather(self) -> Weather:
        return self._memory.simulated.weather

    @weather.setter
    def weather(self, weather: Weather) -> None:
        self._memory.simulated.weather = weather


class LiveSwarm:
    """Averagers, their network, and the truth about them. Belongs to a running virtual loop."""

    def __init__(
        self,
        seed: int,
        plans: Sequence[PeerPlan],
        *,
        weather: Weather,
        policy: RoundPolicy = POLICY,
        slices: int = 3,
        young: bool = False,
    ) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        encoded = sum(4 * size for size in FRAGMENT.unit_sizes)
        self.policy = replace(policy, slice_bytes_min=max(1, encoded // (4 * slices)))
        self.young = young
        self.memory = MemoryNetwork(weather, seed=seed)
        self.heap = self.memory.heap
        self.network = _Network(self.memory)
        self.truth = Truth()
        self.nodes: dict[PeerId, LiveNode] = {}
        self.disk: dict[PeerId, FragmentState] = {}
        self.lives: Counter[PeerId] = Counter()
        self.crashed: dict[PeerId, dict[int, tuple[int, int]]] = {}
        self.let_go: Counter[PeerId] = Counter()
        self.faulty: dict[PeerId, str] = {}
        self.gives_way: Callable[[LiveNode], bool] = lambda node: False
        self.on_note: Callable[[LiveNode, Note], None] | None = None
        self.on_effect: Callable[[LiveNode, Effect], None] | None = None
        self.on_stands: Callable[[LiveNode, FragmentState], None] | None = None
        theta = np.linspace(-1, 1, FRAGMENT.size, dtype=np.float32)
        self.origin = FragmentState.founded(LAYOUT.hash, 0, theta)
        self.truth.founded(self.origin)
        made = [identity_of(f"stormy {number}") for number in range(len(plans))]
        self.identities = {identity.peer_id: identity for identity in made}
        self.plans = dict(zip(self.identities, plans, strict=True))
        self._goals: dict[PeerId, Any] = {}
        self._ended: list[asyncio.Task[None]] = []
        for name, plan in self.plans.items():
            if plan.dial_out_only:
                self.memory.dial_out_only(name)
            self.heap.call_at(plan.starts_at, self.start, name)
        self.heap.call_in(0.0, self._heartbeat)

    @staticmethod
    def topic() -> bytes:
        """The topic of its machines, for a simulated swarm that is to decide alike."""
        return topic_of(RUN, LAYOUT)

    @property
    def names(self) -> list[PeerId]:
        return list(self.plans)

    def goal(self, name: PeerId) -> Any:
        if name not in self._goals:
            rng = np.random.default_rng([self.seed, len(self._goals)])
            self._goals[name] = rng.normal(size=FRAGMENT.size).astype(np.float32)
        return self._goals[name]

    def addresses(self, peer: PeerId) -> Sequence[Any]:
        known = self.memory._full_address_of.get(peer)
        return () if known is None or self.plans[peer].dial_out_only else (known,)

    # What happens to peers

    def start(self, name: PeerId) -> None:
        self.lives[name] += 1
        node = self.nodes[name] = LiveNode(self, name, self.plans[name], self.lives[name])
        since = -1e6 if not self.young and node.plan.starts_at == 0.0 else 0.0
        for other in self.nodes.values():
            if other is not node and other.alive:
                self._sees(node, other, since)
                self._sees(other, node, since)
        node.start()

    def crash(self, name: PeerId) -> None:
        node = self.nodes[name]
        if not node.alive:
            return
        node.alive = False
        self.memory.crash(name)
        assert node.task is not None
        node.task.cancel()
        self._ended.append(node.task)
        if node.learner is not None:
            steps = node.learner.step, node.learner.tokens_per_step
            self.crashed.setdefault(name, {})[node.life.incarnation] = steps
            self.let_go[name] += node.learner.discarded

    def restart(self, name: PeerId) -> None:
        if not self.nodes[name].alive:
            self.start(name)

    def pause(self, name: PeerId) -> None:
        self.memory.pause(name)

    def resume(self, name: PeerId) -> None:
        self.memory.resume(name)

    def save(self, name: PeerId, state: FragmentState) -> None:
        """A checkpoint, not of every version: a restart may come back with an older one."""
        if name not in self.disk or self.rng.random() < 0.7:
            self.disk[name] = replace(state, momentum=state.momentum.copy())

    def _sees(self, node: LiveNode, other: LiveNode, since: float = 0.0) -> None:
        now = self.heap.now
        known = node.view.get(other.name)
        node.view[other.name] = PeerView(
            first_seen=known.first_seen if known else now + since,
            heard_at=now,
            failed_at=None,
            reachable=not other.plan.dial_out_only,
            trains=other.plan.trains,
            step_time_s=other.plan.step_time_s,
        )

    def heard(self, node: LiveNode, sender: PeerId) -> None:
        seen = node.view.get(sender)
        if seen is not None:
            node.view[sender] = msgspec.structs.replace(seen, heard_at=self.heap.now)

    def _heartbeat(self) -> None:
        simulated = self.memory.simulated
        up = [node for node in self.alive if not simulated.is_paused(node.name)]
        for node in up:
            for other in up:
                if other is not node and simulated.connected(node.name, other.name):
                    self._sees(node, other)
        self.heap.call_in(4.0, self._heartbeat)

    # Looking at it

    @property
    def alive(self) -> list[LiveNode]:
        return [node for node in self.nodes.values() if node.alive]

    def trainers(self) -> list[LiveNode]:
        return [node for node in self.alive if node.learner is not None]

    def lineages(self) -> set[bytes]:
        return {node.state.lineage for node in self.trainers() if node.state is not None}

    def versions(self) -> list[int]:
        return [node.state.version for node in self.trainers() if node.state is not None]

    async def run(self, until: float) -> None:
        """Let time pass. Raises what a peer ended with."""
        while self.heap.now < until:
            await asyncio.sleep(min(5.0, until - self.heap.now))
            for node in self.alive:
                if node.task is not None and node.task.done():
                    node.task.result()

    async def close(self) -> None:
        for name in self.names:
            if name in self.nodes:
                self.crash(name)
        if self._ended:
            for outcome in await asyncio.gather(*self._ended, return_exceptions=True):
                if isinstance(outcome, Exception):
                    raise outcome

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Have every averager tell its node what it does."""

        def node_of(work: FragmentWork) -> LiveNode | None:
            return next((n for n in self.alive if n.averager is work.averager), None)

        start, do, carry_out = FragmentWork.start, FragmentWork.do, FragmentWork._do
        heard, encode = Averager._heard, Exchange._encode
        arrived = Parts.tell_upload

        def started(work: FragmentWork) -> None:
            start(work)
            if (node := node_of(work)) is not None:
                node.started()

        def does(work: FragmentWork, effect: Effect) -> None:
            if (node := node_of(work)) is not None:
                node.does(effect)
            carry_out(work, effect)

        def did(work: FragmentWork, effects: list[Effect]) -> None:
            do(work, effects)
            if (node := node_of(work)) is not None:
                node.did()

        def hears(averager: Averager, peer: PeerId, data: bytes) -> None:
            node = self.nodes.get(averager.host.peer_id)
            if node is not None:
                self.heard(node, peer)
            heard(averager, peer, data)

        async def encodes(exchange: Exchange, given: Any, into: Any, own: Any) -> None:
            await encode(exchange, given, into, own)
            if all(growing.complete for growing in into) and exchange.parts.entry is not None:
                payload = b"".join(bytes(growing.data) for growing in into)
                self.truth.uploaded(exchange.round, exchange.parts.entry, payload)

        def arrives(
            parts: Parts,
            index: int,
            sender: PeerId,
            problem: str | None,
            norm: Any = None,
            **rest: Any,
        ) -> None:
            problem = self.faulty.get(sender, problem)
            arrived(parts, index, sender, problem, None if problem else norm, **rest)

        with (
            patch.object(FragmentWork, "start", started),
            patch.object(FragmentWork, "do", did),
            patch.object(FragmentWork, "_do", does),
            patch.object(Averager, "_heard", hears),
            patch.object(Exchange, "_encode", encodes),
            patch.object(Parts, "tell_upload", arrives),
        ):
            yield


async def weather_out(swarm: LiveSwarm, how: Storm) -> None:
    """Run through the storm, then until everybody agrees, on more than there was before."""
    with swarm.watched():
        try:
            await swarm.run(how.rough_s)
            before = max(swarm.versions(), default=0)
            while swarm.heap.now < how.rough_s + how.calm_s:
                await swarm.run(swarm.heap.now + 1.0)
                if has_recovered(swarm, how, before):
                    return
            raise not_recovered(swarm, how, before)
        finally:
            await swarm.close()
