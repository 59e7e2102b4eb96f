"""The agent: the process beside a trainer that talks to the other peers. No torch work.

``python -m peer.agent LINE BELL MEMORY`` is what ``peer.agent_link`` starts, with three
descriptors.

One uvloop event loop owns everything: host, presence, averager, the agent's side of the
shared memory, checkpoints, the event log. It is built up in one place (``Agent.run``) and
taken down in reverse order. It ends when the trainer asks for it, when the trainer is gone (the
line is closed: it saves, says goodbye and goes), or when the run is over.

If it is killed, nothing is lost but its connections: the trainer steps on and starts a new
one, which finds the trainer's marks in the shared memory, its own states in the last
checkpoint, and newer ones at the other peers (``peer.slots`` says what happens to work in doubt).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import blake3
import uvloop
from multiaddr import Multiaddr

from averaging import messages as said
from averaging.arrays import Float32s, check_subnormals
from averaging.driver import Averager
from averaging.fetch import FetchProgress
from averaging.grouping import PeerView
from averaging.layout import Layout, TensorSpec
from averaging.standing import Standing
from averaging.state import FragmentState
from dht import addresses as address_rules
from dht.errors import DhtError
from dht.hivemind_daemon import DaemonSettings
from dht.hivemind_host import HivemindHost, HostSettings
from dht.identity import Identity, PeerId, RunId
from dht.presence import Presence, PresenceEvent
from dht.records import ContributionCounters
from peer import agent_page, status
from peer.account import Account, fates, global_tokens
from peer.agent_link import (
    Begin,
    Facts,
    FromTrainer,
    Happened,
    Leave,
    Measure,
    Measured,
    Over,
    Phase,
    TrainerLine,
    Value,
    hear_doorbell,
)
from peer.checkpoint import CheckpointFolder
from peer.errors import DiskFull, PeerError, RunRefused
from peer.held_out import HeldOutLoss
from peer.link import Link
from peer.outer_state import OuterState, export, load_outer, save_outer
from peer.pages import parse_page, serve_pages
from peer.policies import admitted_peers, averager_settings, presence_settings, round_policy
from peer.run_file import RunFile, from_canonical
from peer.shared_tensors import SharedTensors
from peer.slots import Adopted, SlotPort
from peer.telemetry import EventLog

logger = logging.getLogger("peer.agent")

SAVE_EVERY_S = 60.0
"""Between two checkpoints; more when saving takes long. Peers have the state as well."""

SAVE_FIRST_S = 2.0
ASK_EVERY_S = 10.0
ASKED_FIRST = 8
FOUNDER_PATIENCE_S = 60.0
"""A newcomer leaves founding to another one for so long."""
SETTLE_AFTER_S = 20.0
FRIENDS_WITHIN_S = 6.0
COMPARED_WITHIN_S = 5.0
DIALLED_WITHIN_S = 6.0
LAST_ROUND_S = 30.0
LINK_SEEDS_MAX = 8
RESTS_AFTER_S = 30.0
RESTS_AFTER_STEPS = 20
NICENESS = 5
"""Of agent and daemon, above the trainer's: woken by it, they do not take its processor at once."""

QUIT_WITHIN_S = 60.0
"""An agent whose trainer is gone and that does not come to its end by then ends itself."""

TOLD_EVENTS = frozenset(
    (
        "state_adopted",
        "state_fetched",
        "catch_up_failed",
        "fetch_failed",
        "discarded",
        "not_finite",
        "refused",
    )
)
"""What averaging tells that a trainer may want to hear, besides rounds."""

PhaseName = Literal["connecting", "fetching", "founding", "ready", "leaving"]


@dataclass(frozen=True, slots=True)
class _Ending:
    """Why the agent ends."""

    reason: str
    exit_code: int
    finished: bool
    timeout_s: float
    """For what is under way."""


class Agent:
    """One agent's life beside one trainer."""

    def __init__(
        self, begin: Begin, line: TrainerLine, memory: SharedTensors, *, bell: int
    ) -> None:
        self.run_id = RunId(blake3.blake3(begin.run).hexdigest())
        self.run_file: RunFile = from_canonical(begin.run, self.run_id)
        self.directory = Path(begin.directory)
        self.layout = Layout.build(
            [TensorSpec(t.name, tuple(t.shape), t.dtype) for t in begin.tensors],
            self.run_file.outer.fragments,
            embeddings=begin.embeddings,
            heads=begin.heads,
        )
        self.log = EventLog(self.directory / "events.jsonl")
        self._begin = begin
        self._line = line
        self._memory = memory
        self._bell = bell
        self._identity = Identity.load_or_create(Path(begin.identity))
        self.me = self._identity.peer_id
        outer = self.run_file.outer
        self.port = SlotPort(memory, self.me, outer.adoption, outer.blend_alpha, self._adopted)
        self._folder = CheckpointFolder(self.directory / "outer")
        self._sizes = [fragment.size for fragment in self.layout.fragments]
        self._account = Account(self.me, memory, self._sizes, self.port.tokens_at)
        self._held_out = HeldOutLoss(self.run_id, self.me, self.run_file.evaluation.every_versions)
        self._view: dict[PeerId, PeerView] = {}
        self._ending: asyncio.Future[_Ending] = asyncio.get_running_loop().create_future()
        self._began_at = asyncio.get_running_loop().time()
        self._phase: PhaseName = "connecting"
        self._rounds_missed = 0
        self._step_seen, self._stepped_at, self._rests = -1, self._began_at, False
        self._dialled = asyncio.Event()
        """Whether others can dial this peer is known."""
        self._fetched: dict[int, float] = {}
        self._from_checkpoint: tuple[FragmentState, ...] = ()
        # Set by run().
        self.host: HivemindHost
        self.presence: Presence
        self.averager: Averager

    def __repr__(self) -> str:
        return f"Agent({self.me}, run={self.run_id[:8]}, phase={self._phase})"

    # --- life -----------------------------------------------------------------------------------

    async def run(self, messages: AsyncIterator[FromTrainer]) -> None:
        """From the first message to the last word."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._end, "asked to end", 0, False, 10.0)
        async with AsyncExitStack() as stack:
            stack.callback(self.log.close)
            stack.callback(hear_doorbell(self._bell, self._rang))
            check_subnormals()
            self.event("agent_started", pid=os.getpid(), restarts=self._begin.restarts)
            async with asyncio.TaskGroup() as tasks:
                # From the first moment on, the trainer must be heard and must hear.
                helpers = [
                    tasks.create_task(self._line.beat(), name="beat"),
                    tasks.create_task(self._listen(messages), name="listen"),
                ]
                try:
                    ending = await self._take_part(stack, tasks, helpers)
                finally:
                    for helper in helpers:
                        helper.cancel()
            self.event("agent_ended", reason=ending.reason, finished=ending.finished)
            self._line.say(Over(ending.reason, ending.exit_code, ending.finished))

    async def _take_part(
        self,
        stack: AsyncExitStack,
        tasks: asyncio.TaskGroup,
        helpers: list[asyncio.Task[None]],
    ) -> _Ending:
        await self._go_online(stack)
        # Nothing here may hold on to the states: what they become replaces them, there.
        self.averager = self._averager_with(await self._first_states())
        averaging = tasks.create_task(self.averager.run(), name="averager")
        work = [
            averaging,
            tasks.create_task(self._tell_facts(), name="tell facts"),
            tasks.create_task(self._save_for_ever(), name="save"),
            tasks.create_task(self._ask_others(), name="ask others"),
            tasks.create_task(self._go_on_from_checkpoint(), name="go on"),
            tasks.create_task(self.presence.watch(), name="watch presence"),
        ]
        helpers += work
        ending = await self._ending
        self._tell_phase("leaving", ending.reason, 0.0)
        if ending.finished:
            await self._until_others_have_it(ending.timeout_s)
        if not await self.averager.drain(timeout_s=0.6 * ending.timeout_s):
            self.event("drain_cut_short", in_flight=self.averager.in_flight)
        if ending.timeout_s > 0:
            await self._until_taken_in(min(2.0, 0.2 * ending.timeout_s))
        for task in work:
            task.cancel()
        await asyncio.wait(work)
        await self._save()
        if ending.finished:
            await self._export()
        with contextlib.suppress(DhtError):
            await self.presence.leave()
        self._say_facts()
        return ending

    def _averager_with(self, states: Sequence[FragmentState]) -> Averager:
        return Averager(
            self.host,
            self.port,
            identity=self._identity,
            run=self.run_id,
            layout=self.layout,
            policy=round_policy(self.run_file, fragments=len(self.layout.fragments)),
            view=self._view,
            incarnation=self._memory.incarnation,
            states=states,
            founder=self._phase == "founding",
            reachable=self.presence.reachable is not False,
            settings=averager_settings(self.run_file, self.layout),
            on_event=self._averager_event,
            on_fetched=self._fetch_progress,
            addresses=self._addresses_of,
        )

    async def _go_online(self, stack: AsyncExitStack) -> None:
        begin = self._begin
        admitted = admitted_peers(self.run_file)
        if admitted is not None and self.me not in admitted:
            raise RunRefused("this peer", self.me, f"a list of {len(admitted)} peers without it")
        self._tell_phase("connecting", "starting the network daemon", 0.0)
        self.host = await HivemindHost.open(
            self._identity,
            HostSettings(
                daemon=DaemonSettings(
                    listen=tuple(Multiaddr(text) for text in begin.listen),
                    announce=tuple(Multiaddr(text) for text in begin.announce),
                )
            ),
        )
        stack.push_async_callback(self.host.close)
        self.presence = Presence(
            self.host,
            self._identity,
            self.run_id,
            presence_settings(self.run_file),
            name=begin.name,
            seeds=[Multiaddr(seed) for seed in begin.seeds],
            run_file=begin.run,
            cache_path=self.directory / "peers.json",
            on_event=self._presence_event,
            on_reachable=self._reachable_changed,
        )
        await self.host.serve_calls(status.PROTOCOL, self._answer_status, request_max_bytes=128)
        await self.presence.start()
        stack.push_async_callback(self.presence.close)
        if begin.page is not None:
            pages = serve_pages(
                parse_page(begin.page),
                checks=lambda: agent_page.checks(self._status()),
                metrics=lambda: agent_page.figures(self._status()),
            )
            await stack.enter_async_context(pages)
        self._tell_phase("connecting", "looking for peers", 0.5)

    def _rang(self) -> None:
        """The trainer is at a safe point, and something is new."""
        self.port.rang()
        if hasattr(self, "averager"):
            self.averager.look()

    def _end(self, reason: str, exit_code: int, finished: bool, timeout_s: float) -> None:
        if not self._ending.done():
            self._ending.set_result(_Ending(reason, exit_code, finished, timeout_s))

    async def _listen(self, messages: AsyncIterator[FromTrainer]) -> None:
        async for message in messages:
            if isinstance(message, Leave):
                self._end("the trainer leaves", 0, False, message.timeout_s)
            elif isinstance(message, Measured):
                self._publish_measurement(message)
        _quit_at_the_latest(QUIT_WITHIN_S)
        self._end("the trainer is gone", 0, False, 0.0)

    # --- getting in -----------------------------------------------------------------------------

    async def _first_states(self) -> list[FragmentState]:
        """What to begin with: a checkpoint, a founder's own parameters, or nothing yet."""
        outer = await asyncio.to_thread(self._load)
        self._account.open(
            None if outer is None else outer.ledger,
            earlier_tokens=self._begin.earlier_tokens,
            ended_cleanly=self._begin.ended_cleanly,
        )
        for fragment in range(self._memory.fragments):
            self.port.resume(fragment, self._known_base(outer, fragment))
        if outer is not None:
            self._tell_phase("fetching", "going on from the last checkpoint", 0.0)
            self._from_checkpoint = outer.states
            return list(outer.states)
        if await self._somebody_has_a_state():
            await self._until_dialled()
            self._tell_phase("fetching", "downloading the state of the run", 0.0)
            return []
        return await self._found()

    def _load(self) -> OuterState | None:
        return load_outer(self._folder, run_id=self.run_id, layout_hash=self.layout.hash)

    def _known_base(self, outer: OuterState | None, fragment: int) -> Float32s | None:
        held = self._memory.base(fragment)
        if outer is None or held is None or outer.states[fragment].lineage != held.lineage:
            return None
        return outer.states[fragment].theta

    async def _somebody_has_a_state(self) -> bool:
        """Look for peers that are in the run. ``False``: it is for this peer to found it."""
        loop = asyncio.get_running_loop()
        patience_s = self._begin.found_after_s
        found_at = None if patience_s is None else loop.time() + patience_s
        while not self._ending.done():
            live = [member.peer for member in self.presence.table.live(loop.time())]
            answers = await self._statuses(live[:ASKED_FIRST])
            if self._fits(answers):
                return True
            out_of_patience = found_at is not None and loop.time() >= found_at
            if patience_s != 0.0 and not live:
                self._check_who_answered(out_of_patience=out_of_patience)
            if out_of_patience:
                assert found_at is not None
                # Several newcomers and no state among them: the first of them founds the run.
                first = all(self.me < answer.peer for answer in answers)
                if first or loop.time() >= found_at + FOUNDER_PATIENCE_S:
                    return False
            await asyncio.sleep(0.2)
        return True

    def _fits(self, answers: Sequence[status.Status]) -> bool:
        """Whether somebody has a state that fits this model. Raises ``RunRefused`` when all that
        there are do not: founding the run once more would split it."""
        own = self.layout.hash.hex()
        layouts = [answer.layout for answer in answers if answer.versions]
        if layouts and own not in layouts:
            raise RunRefused("the layout of the model", own, layouts[0])
        return bool(layouts)

    def _check_who_answered(self, *, out_of_patience: bool) -> None:
        """Raise ``RunRefused`` if those whom this peer was sent to are in another run.

        Strangers of other runs are met in the directory as well; only seeds, and members of the
        run itself who speak another protocol, say something about where this peer wants to go.
        """
        misfits = self.presence.misfits
        speakers = [peer for peer, misfit in misfits.items() if misfit.what != "run"]
        seeds = {address_rules.peer_of(Multiaddr(seed)) for seed in self._begin.seeds}
        wrong = [peer for peer in seeds if peer is not None and peer in misfits]
        if (out_of_patience and (speakers or wrong)) or (wrong and len(wrong) == len(seeds)):
            peer = [*speakers, *wrong][0]
            misfit = misfits[peer]
            raise RunRefused(f"the {misfit.what} of peer {peer}", misfit.ours, misfit.theirs)

    async def _until_dialled(self) -> None:
        """Finding out whether this peer can be dialled may cut connections: bulk waits for it."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._dialled.wait(), DIALLED_WITHIN_S)

    async def _found(self) -> list[FragmentState]:
        """The trainer's own parameters are version 0 of the run."""
        self._tell_phase("founding", "nobody else is here: founding the run", 0.0)
        states = []
        for fragment in range(self._memory.fragments):
            values = None
            while values is None and not self._ending.done():
                values = await self.port.values(fragment, timeout_s=1.0)
            if values is None:
                return []
            state = FragmentState.founded(self.layout.hash, fragment, values.copy())
            states.append(state)
            self.port.adopt(fragment, state, contained=self._memory.offered(fragment)[0])
        self.event("founded", fragments=len(states))
        return states

    async def _go_on_from_checkpoint(self) -> None:
        """With its states: first ask the others how far they are, then take them in.

        A trainer may be further on than its new agent; what it has is not set back while there is
        hope to hear of newer states. What the averager fetches it hands over by itself.
        """
        states, self._from_checkpoint = self._from_checkpoint, ()
        waiting = {state.fragment: state for state in states}
        if any(self._memory.base(fragment) is not None for fragment in waiting):
            patience_s = SETTLE_AFTER_S
        else:
            has_friends = bool(self._begin.seeds) or (self.directory / "peers.json").exists()
            patience_s = FRIENDS_WITHIN_S if has_friends else 0.0
        asked = False
        deadline = asyncio.get_running_loop().time() + patience_s
        while waiting and asyncio.get_running_loop().time() < deadline:
            self._refresh_view()
            live = sorted(self._view)
            if live and not asked:
                asked = True
                await self._until_dialled()
                for index, state in enumerate(states):
                    compare = said.Compare(state.fragment, Standing.of(state).head())
                    self.averager.transport.send(live[index % len(live)], said.encode(compare))
                deadline = min(deadline, asyncio.get_running_loop().time() + COMPARED_WITHIN_S)
            for fragment, state in list(waiting.items()):
                held, current = self._memory.base(fragment), self.averager.states[fragment]
                if current is not state or (held is not None and held.lineage == state.lineage):
                    del waiting[fragment]
                    if current is state:
                        self.port.adopt_first(fragment, state)
            await asyncio.sleep(0.05)
        for fragment, state in waiting.items():
            if self._memory.base(fragment) is not None:
                self.event("base_lost", fragment=fragment, version=state.version)
            self.port.adopt_first(fragment, state)

    async def _until_taken_in(self, timeout_s: float) -> None:
        """Let the trainer take in what the last rounds brought."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while asyncio.get_running_loop().time() < deadline:
            self.port.rang()
            if all(self.port.holds(index) for index in range(self._memory.fragments)):
                return
            await asyncio.sleep(0.01)

    # --- what happens ---------------------------------------------------------------------------

    def event(self, name: str, /, **fields: Any) -> None:
        """To the log, and to the trainer for ``run.on``."""
        self.log.write(name, fields)
        self._line.say(Happened(name, {key: _value(each) for key, each in fields.items()}))

    def _tell_phase(self, phase: PhaseName, text: str, done: float) -> None:
        self._phase = phase
        self.log.write("phase", {"name": phase, "text": text})
        self._line.say(Phase(name=phase, text=text, done=done))

    def _presence_event(self, event: PresenceEvent) -> None:
        fields = dict(event.fields)
        peer = fields.get("peer")
        if isinstance(peer, str):
            member = self.presence.table.get(PeerId(peer))
            if member is not None:
                fields["name"] = member.record.name
        self.event(event.name, text=event.text, **fields)

    def _averager_event(self, name: str, fields: Mapping[str, Any]) -> None:
        if name == "round":
            self._round_ended(fields)
        elif name in TOLD_EVENTS:
            self.event(name, **fields)
        else:
            # What a machine notes at every turn is for whoever reads the whole log.
            self.log.write(name, fields)

    def _round_ended(self, fields: Mapping[str, Any]) -> None:
        contributed = self.me in fields["contributors"]
        finished = fields["outcome"] == "finished"
        if not contributed:
            self._rounds_missed += 1
        self.log.write("round", {**fields, "contributed": contributed})
        told = {
            "fragment": fields["fragment"],
            "version": fields["version"],
            "members": len(fields["members"]),
            "contributors": len(fields["contributors"]),
            "contributed": contributed,
            "reason": fields["reason"],
            "seconds": fields["seconds"],
        }
        self._line.say(Happened("round" if finished else "round_missed", told))
        if finished:
            self._check_the_end()  # at once: no version must follow the final one
        if finished and fields["fragment"] == 0:
            self._maybe_measure(fields["version"])

    def _adopted(self, adopted: Adopted) -> None:
        fragment = adopted.fragment
        if adopted.lost_tokens:
            self._account.lost(adopted)
            self.event(
                "work_lost",
                fragment=fragment,
                tokens=adopted.lost_tokens,
                reason=adopted.reason,
            )
        if self._phase != "ready" and self._phase != "leaving":
            held = sum(self.port.holds(index) for index in range(self._memory.fragments))
            if held == self._memory.fragments:
                self._tell_phase("ready", "in the run", 1.0)

    def _fetch_progress(self, progress: FetchProgress) -> None:
        self._fetched[progress.fragment] = progress.verified_pieces / max(1, progress.pieces)
        if self._phase == "fetching":
            sizes = self._sizes
            done = sum(sizes[index] * part for index, part in self._fetched.items()) / sum(sizes)
            text = f"downloading the state of the run from {progress.sources} peers"
            self._line.say(Phase(name="fetching", text=text, done=min(1.0, done)))

    async def _reachable_changed(self, reachable: bool) -> None:
        self._dialled.set()
        await self.host.set_reachable(reachable)
        if hasattr(self, "averager"):
            self.averager.set_reachable(reachable)

    def _addresses_of(self, peer: PeerId) -> Sequence[Multiaddr]:
        member = self.presence.table.get(peer)
        if member is None:
            return ()
        return [address_rules.with_peer(address, peer) for address in member.addresses]

    # --- what is known --------------------------------------------------------------------------

    def _refresh_view(self) -> None:
        """The peers as averaging wants to see them; the mapping stays the same object."""
        now = asyncio.get_running_loop().time()
        live = {}
        admitted = admitted_peers(self.run_file)
        for member in self.presence.table.live(now):
            record = member.record
            if admitted is not None and member.peer not in admitted:
                continue
            live[member.peer] = PeerView(
                first_seen=member.first_seen,
                heard_at=max(member.record_seen_at, member.heard_at or member.record_seen_at),
                failed_at=member.failed_at,
                reachable=record.reachable is not False,
                trains=record.trains,
                step_time_s=record.step_time_s,
                bytes_per_s=record.link_bytes_s,
            )
        for peer in self._view.keys() - live.keys():
            del self._view[peer]
        self._view.update(live)

    @property
    def _states(self) -> tuple[FragmentState | None, ...]:
        return self.averager.states if hasattr(self, "averager") else ()

    def _versions(self) -> tuple[int, ...]:
        states = [state for state in self._states if state is not None]
        return tuple(s.version for s in states) if len(states) == len(self._sizes) else ()

    def _facts(self) -> Facts:
        total = self._account.update(self._states)
        stats = self.averager.stats
        now = asyncio.get_running_loop().time()
        live = [seen for seen in self._view.values() if seen.is_live(now)]
        newest = self._held_out.newest
        return Facts(
            peer_id=self.me,
            link=str(self._link()),
            # Own work that is still on its way is part of where the run is: alone, it is all.
            global_tokens=global_tokens(self._states) + int(total.pending),
            versions=self._versions(),
            peers=1 + len(live),
            held_out_loss=None if newest is None else newest.loss,
            fates=fates(total),
            rounds=stats.rounds,
            rounds_missed=self._rounds_missed,
            bytes_sent=stats.sent_bytes,
            bytes_received=stats.received_bytes,
            synchronous=self._phase == "ready" and any(seen.trains for seen in live),
        )

    def _link(self) -> Link:
        own = [address_rules.with_peer(a, self.me) for a in self.presence.addresses[:2]]
        seeds = [Multiaddr(seed) for seed in self._begin.seeds]
        return Link(self.run_id, tuple(dict.fromkeys([*seeds, *own]))[:LINK_SEEDS_MAX])

    def _say_facts(self) -> Facts:
        facts = self._facts()
        self._line.say(facts)
        return facts

    async def _tell_facts(self) -> None:
        """Once a second: everybody who wants to know learns how it stands."""
        turn = 0
        while True:
            self.port.rang()
            if turn % 4 == 0:
                self._refresh_view()
                facts = self._say_facts()
                self._check_the_end()
                if turn % 8 == 0:
                    self._update_record(facts)
            turn += 1
            await asyncio.sleep(0.25)

    def _update_record(self, facts: Facts) -> None:
        step_time_s = self._memory.step_time_s
        self.presence.update(
            trains=self._phase == "ready" and not self._trainer_rests(),
            step_time_s=step_time_s if step_time_s > 0 else None,
            versions=facts.versions,
            counters=ContributionCounters(
                rounds=self.averager.stats.contributed,
                tokens=int(facts.fates["merged"]),
                bytes_sent=facts.bytes_sent,
            ),
        )

    def _trainer_rests(self) -> bool:
        """Whether the trainer has made no step for long: nobody should wait for its next one."""
        now = asyncio.get_running_loop().time()
        if self._memory.step != self._step_seen:
            self._step_seen, self._stepped_at = self._memory.step, now
        rests = now - self._stepped_at > max(
            RESTS_AFTER_S, RESTS_AFTER_STEPS * self._memory.step_time_s
        )
        if rests != self._rests:
            self._rests = rests
            silent_s = now - self._line.heard_at
            self.event("trainer_rests" if rests else "trainer_steps_again", silent_s=silent_s)
        return rests

    # --- status and held-out loss ---------------------------------------------------------------

    def _status(self) -> status.Status:
        memory, online = self._memory, hasattr(self, "averager")
        facts = self._facts() if online else None
        held = [memory.base(index) for index in range(memory.fragments)]
        behind = [
            version - (0 if base is None else base.version)
            for version, base in zip(facts.versions if facts else (), held, strict=False)
        ]
        return status.Status(
            peer=self.me,
            name=self._begin.name,
            role="learner",
            phase=self._phase,
            steps=memory.step,
            tokens=memory.tokens,
            step_time_s=memory.step_time_s,
            loss=memory.loss,
            held_out=self._held_out.newest,
            global_tokens=facts.global_tokens if facts else 0,
            versions=facts.versions if facts else (),
            staleness=max([0, *behind]),
            peers=facts.peers if facts else 1,
            fates=facts.fates if facts else {},
            rounds=facts.rounds if facts else 0,
            rounds_missed=self._rounds_missed,
            bytes_sent=facts.bytes_sent if facts else 0,
            bytes_received=facts.bytes_received if facts else 0,
            blocked_s=memory.blocked_s,
            up_s=asyncio.get_running_loop().time() - self._began_at,
            reachable=self.presence.reachable,
            layout=self.layout.hash.hex(),
        )

    async def _answer_status(self, peer: PeerId, request: bytes) -> bytes:
        if request != self.run_id.encode():
            raise ValueError(f"this peer is in run {self.run_id}, not {request[:64]!r}")
        return status.encode(self._status())

    async def _statuses(self, peers: Sequence[PeerId]) -> list[status.Status]:
        """Ask these peers how they are; whoever does not answer is left out."""

        async def ask(peer: PeerId) -> status.Status | None:
            try:
                await self.presence.connect(peer, timeout_s=5.0)
                return await status.ask(self.host, peer, self.run_id, timeout_s=5.0)
            except (DhtError, ValueError) as error:
                logger.info("status_not_had peer=%s reason=%s", peer, error)
                return None

        answers = await asyncio.gather(*(ask(peer) for peer in peers))
        return [answer for answer in answers if answer is not None]

    async def _ask_others(self) -> None:
        """A few peers, in turns: the newest held-out loss gets around."""
        turn = 0
        while True:
            await asyncio.sleep(ASK_EVERY_S)
            live = sorted(self._view)
            chosen = [live[(turn + index) % len(live)] for index in range(min(3, len(live)))]
            turn += len(chosen)
            for answer in await self._statuses(chosen):
                self._take_held_out(answer.held_out)

    def _maybe_measure(self, version: int) -> None:
        now = asyncio.get_running_loop().time()
        able = [peer for peer, seen in self._view.items() if seen.trains and seen.is_live(now)]
        if self._held_out.is_my_turn(version, able):
            self._line.say(Measure(version))

    def _publish_measurement(self, measured: Measured) -> None:
        self._take_held_out(status.HeldOut(measured.version, measured.loss, self.me))

    def _take_held_out(self, measured: status.HeldOut | None) -> None:
        if measured is not None and self._held_out.heard(measured):
            self.event("measured", version=measured.version, loss=measured.loss, peer=measured.peer)

    # --- keeping it -----------------------------------------------------------------------------

    async def _save_for_ever(self) -> None:
        pause_s = SAVE_FIRST_S
        while True:
            await asyncio.sleep(pause_s)
            began = time.monotonic()
            await self._save()
            pause_s = max(SAVE_EVERY_S, 20 * (time.monotonic() - began))

    async def _save(self) -> None:
        """Write a checkpoint, once there is a state of every fragment."""
        if not hasattr(self, "averager"):
            return
        self._account.update(self._states)
        ledger = self._account.plain()
        try:
            async with self.averager.pinned() as pinned:
                states = [state for state in pinned if state is not None]
                if len(states) < len(self._sizes):
                    return
                path = await asyncio.to_thread(
                    save_outer,
                    self._folder,
                    run=self.run_file,
                    layout=self.layout,
                    states=states,
                    ledger=ledger,
                )
        except DiskFull as error:
            self.event("disk_full", text=str(error), needed_bytes=error.needed_bytes)
        except OSError as error:
            self.event("checkpoint_failed", text=f"{self._folder.folder}: {error}")
        else:
            versions = [state.version for state in states]
            self.log.write("checkpoint", {"path": path, "versions": versions})

    async def _export(self) -> None:
        out = self.directory / "model.safetensors"
        try:
            await asyncio.to_thread(export, self._folder, out)
        except (PeerError, OSError) as error:
            self.event("export_failed", text=str(error))
        else:
            self.event("exported", path=str(out))

    # --- the end --------------------------------------------------------------------------------

    def _check_the_end(self) -> None:
        """A fragment is final at the first version that contains the run's tokens.

        That follows from its history alone, so whoever holds the final version holds the same
        bits. The run is over for a peer when all its fragments are final.
        """
        end = self.run_file.end
        if self._phase != "ready" or self._ending.done():
            return
        if end.date is not None and datetime.now(UTC) >= end.date:
            self._end("the run has reached its date", 0, True, LAST_ROUND_S)
        elif isinstance(end.tokens, int):
            for state in self._states:
                if state is not None and state.merged.tokens >= end.tokens:
                    self.port.closed.add(state.fragment)
            if len(self.port.closed) == len(self._sizes):
                self._end("the run has used its tokens", 0, True, LAST_ROUND_S)

    async def _until_others_have_it(self, timeout_s: float) -> None:
        """Stay while somebody may still need the final versions of this peer."""
        mine = self._versions()
        deadline = asyncio.get_running_loop().time() + timeout_s
        while asyncio.get_running_loop().time() < deadline:
            others = [peer for peer, seen in sorted(self._view.items()) if seen.trains]
            answers = await self._statuses(others[:ASKED_FIRST])
            if all(_has(answer.versions, mine) for answer in answers):
                return
            await asyncio.sleep(1.0)


def _has(theirs: Sequence[int], mine: Sequence[int]) -> bool:
    return len(theirs) == len(mine) and all(t >= m for t, m in zip(theirs, mine, strict=True))


def _value(value: Any) -> Value:
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, list | tuple) and all(isinstance(v, str | int | float) for v in value):
        return list(value)
    if isinstance(value, Mapping):
        return [f"{key}: {each}" for key, each in value.items()]
    return str(value)


def _quit_at_the_latest(seconds: float) -> None:
    """An agent without a trainer must not stay, whatever it hangs in."""
    timer = threading.Timer(seconds, os._exit, (1,))
    timer.daemon = True
    timer.start()


# --- the process --------------------------------------------------------------------------------


async def serve(line_at: int, bell_at: int, memory_at: int) -> int:
    """Be the agent of the trainer at the other end of these descriptors."""
    line = await TrainerLine.open(line_at)
    messages = line.messages()
    try:
        begin = await anext(messages, None)
        if not isinstance(begin, Begin):
            return 2
        os.nice(NICENESS)
        try:
            agent = Agent(begin, line, SharedTensors(memory_at), bell=bell_at)
            await agent.run(messages)
        except BaseExceptionGroup as group:
            # What a person can act on goes to the trainer, who says it; the rest is a bug.
            expected, bugs = group.split((PeerError, DhtError))
            if bugs is not None or expected is None:
                raise
            return _refuse(line, _first_of(expected))
        except (PeerError, DhtError) as error:
            return _refuse(line, error)
    finally:
        await line.close()
    return 0


def _refuse(line: TrainerLine, error: BaseException) -> int:
    logger.error("agent_cannot_go_on reason=%s", error)
    exit_code = getattr(error, "exit_code", 3)
    line.say(Over(str(error), exit_code, finished=False))
    return int(exit_code)


def _first_of(group: BaseExceptionGroup[BaseException]) -> BaseException:
    first = group.exceptions[0]
    return _first_of(first) if isinstance(first, BaseExceptionGroup) else first


def main(arguments: Sequence[str]) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    if len(arguments) != 3 or not all(argument.isdigit() for argument in arguments):
        sys.stderr.write("python -m peer.agent is started by a trainer; see peer.agent_link\n")
        return 2
    line_at, bell_at, memory_at = map(int, arguments)
    return uvloop.run(serve(line_at, bell_at, memory_at))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
