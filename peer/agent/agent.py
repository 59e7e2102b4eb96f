"""The agent: the process beside a trainer that talks to the other peers. No torch work.

``python -m peer.agent LINE BELL MEMORY`` is what ``peer.bridge.agent_link`` starts, with three
descriptors.

One uvloop event loop owns everything. Being on line is ``peer.agent.station``'s business, getting
into the run ``peer.agent.entrance``'s; here are the trainer's side of it (line, doorbell, shared
memory, its account) and the process. It is built up in one place (``Agent.run``) and taken down in
reverse order. It ends when the trainer asks for it, when the trainer is gone (the line is closed:
it saves, says goodbye and goes), or when the run is over.

If it is killed, nothing is lost but its connections: the trainer steps on and starts a new one,
which finds the trainer's marks in the shared memory, its own states in the last checkpoint, and
newer ones at the other peers (``peer.agent.slots`` says what happens to work in doubt).
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import blake3
import uvloop

from averaging.history.state import FragmentState
from averaging.live.averager import Averager
from averaging.live.fetcher import FetchProgress
from averaging.live.links import control_protocol
from averaging.live.settings import Participant, RunTerms, Surroundings
from averaging.numbers.arrays import check_subnormals
from averaging.numbers.codec import codec_named
from averaging.numbers.layout import Layout, TensorSpec
from dht.errors import CallRefused, DhtError, HostClosed, PeerUnreachable, StreamBroken
from dht.identity import Identity, RunId
from dht.throttled_host import ThrottledHost
from peer import signals
from peer.agent.account import Account, fates, global_tokens
from peer.agent.entrance import Entrance
from peer.agent.policies import averager_settings, round_policy
from peer.agent.slots import Adopted, SlotPort
from peer.agent.station import (
    Fields,
    Owner,
    PhaseName,
    Station,
    StationSettings,
    TrainerPart,
)
from peer.bridge.agent_link import (
    Begin,
    Due,
    Facts,
    FromTrainer,
    Happened,
    Leave,
    Measure,
    Measured,
    Other,
    Over,
    Phase,
    TrainerLine,
    Value,
    hear_doorbell,
)
from peer.bridge.shared_memory import SharedTensors
from peer.errors import PeerError
from peer.guest.enforcement import Guest
from peer.rules.ending import Ending
from peer.rules.limits import Rest
from peer.run_file.run_file import from_canonical
from peer.status import HeldOut

logger = logging.getLogger("peer.agent")

RESTS_AFTER_S = 30.0
RESTS_AFTER_STEPS = 20
NICENESS = 5
"""Of agent and daemon, above the trainer's: woken by it, they do not take its processor at once."""

OFFERED_WITHIN_S = 20.0
"""Who is told to rest offers what it has, and counts as training for so long, or until it has."""

LAST_OFFERS_OF_MODEL = 4
"""An exchange of everything sends and receives the encoded model twice each, at most."""

LEAVE_WITHIN_S = 30.0
OTHERS_TOLD_MAX = 16
"""Peers that the trainer hears of, for its screen."""

QUIT_WITHIN_S = 60.0
"""An agent whose trainer is gone and that does not come to its end by then ends itself."""

PASSING = (CallRefused, HostClosed, PeerUnreachable, StreamBroken)
"""What a network does and another agent may not meet: under way it is no reason to give up. Who
starts a peer wants to hear of it at once."""


class Agent(Owner):
    """One agent's life beside one trainer."""

    def __init__(
        self, begin: Begin, line: TrainerLine, memory: SharedTensors, *, bell: int
    ) -> None:
        run = from_canonical(begin.run, RunId(blake3.blake3(begin.run).hexdigest()))
        identity = Identity.load_or_create(Path(begin.identity))
        layout = Layout.build(
            [TensorSpec(t.name, tuple(t.shape), t.dtype) for t in begin.tensors],
            run.outer.fragments,
            embeddings=begin.embeddings,
            heads=begin.heads,
        )
        settings = StationSettings(
            run=run,
            identity=identity,
            directory=Path(begin.directory),
            name=begin.name,
            site=begin.site,
            role="learner",
            seeds=begin.seeds,
            listen=begin.listen,
            announce=begin.announce,
            lane=begin.lane,
            page=begin.page,
        )
        codec = codec_named(run.outer.codec)
        encoded = sum(codec.encoded_size(fragment.unit_sizes) for fragment in layout.fragments)
        guest = Guest(
            settings.directory,
            last_offers_bytes=LAST_OFFERS_OF_MODEL * encoded,
            started_at=begin.started_at,
        )
        self.station = Station(settings, layout, self, guest)
        outer = run.outer
        self.port = SlotPort(
            memory,
            self.station.me,
            outer.adoption,
            outer.blend_alpha,
            self._adopted,
            closed=self.station.closed,
        )
        self._begin = begin
        self._line = line
        self._memory = memory
        self._bell = bell
        self._sizes = [fragment.size for fragment in layout.fragments]
        self._account = Account(self.station.me, memory, self._sizes, self.port.tokens_at)
        self._entrance = Entrance(self.station, self.port, memory, self._account, begin)
        self._step_seen, self._rests = -1, False
        self._stepped_at = asyncio.get_running_loop().time()
        self._fetched: dict[int, float] = {}
        self._resting: str | None = None
        self._rests_since = 0.0

    def __repr__(self) -> str:
        return f"Agent({self.station!r})"

    # --- life -----------------------------------------------------------------------------------

    async def run(self, messages: AsyncIterator[FromTrainer]) -> None:
        """From the first message to the last word."""
        loop, station = asyncio.get_running_loop(), self.station
        for number in signals.asking():
            loop.add_signal_handler(number, self._end, "asked to end", 10.0)
        async with AsyncExitStack() as stack:
            stack.callback(station.log.close)
            stack.callback(station.guest.save)
            stack.callback(hear_doorbell(self._bell, self._rang))
            check_subnormals()
            station.event("agent_started", pid=os.getpid(), restarts=self._begin.restarts)
            async with asyncio.TaskGroup() as tasks:
                # From the first moment on, trainer and owner must be heard, and the one must hear.
                helpers = [
                    tasks.create_task(self._line.beat(), name="beat"),
                    tasks.create_task(self._listen(messages), name="listen"),
                    tasks.create_task(station.leave_when_asked(LEAVE_WITHIN_S), name="leave"),
                ]
                try:
                    ending = await self._take_part(stack, tasks)
                finally:
                    for helper in helpers:
                        helper.cancel()
            station.event("agent_ended", reason=ending.reason, finished=ending.finished)
            self._line.say(Over(ending.reason, ending.exit_code, ending.finished))

    async def _take_part(self, stack: AsyncExitStack, tasks: asyncio.TaskGroup) -> Ending:
        await self.station.open(stack)
        states = await self.station.unless_ending(self._entrance.first_states())
        if states is None:
            return self.station.ending.result()  # it has nothing to save, and nobody waits for it
        ending = await self.station.take_part(
            self._averager_with(states),
            tasks,
            {
                "tell facts": self._tell_facts(),
                "go on": self._entrance.go_on_from_checkpoint(),
                "get in": self._entrance.give_up_when_nobody_is_left(),
                "watch machine": self.station.guest.watch_machine(),
            },
            until_taken_in=self._until_taken_in,
        )
        self._say_facts()
        return ending

    def _averager_with(self, states: Sequence[FragmentState]) -> Averager:
        station = self.station
        return Averager(
            ThrottledHost(
                station.host,
                up=station.guest.up,
                down=station.guest.down,
                closed=self._why_closed,
            ),
            self.port,
            me=Participant(
                identity=station.settings.identity,
                incarnation=self._memory.incarnation,
                founder=self._entrance.founded,
                reachable=station.presence.reachable is True,
                site=station.settings.site,
            ),
            terms=RunTerms(
                station.run_id,
                station.layout,
                round_policy(station.run_file, fragments=len(self._sizes)),
            ),
            around=Surroundings(
                view=station.view,
                addresses=station.addresses_of,
                line_max=station.guest.line_max,
                on_event=station.averager_event,
                on_fetched=self._fetch_progress,
            ),
            states=states,
            settings=averager_settings(station.run_file, station.layout),
        )

    def _rang(self) -> None:
        """The trainer is at a safe point, and something is new."""
        self.port.rang()
        if hasattr(self.station, "averager"):
            self.station.averager.look()

    def _end(self, reason: str, timeout_s: float) -> None:
        self.station.end(reason, 0, finished=False, timeout_s=timeout_s)

    async def _listen(self, messages: AsyncIterator[FromTrainer]) -> None:
        async for message in messages:
            if isinstance(message, Leave):
                self._end("the trainer leaves", message.timeout_s)
            elif isinstance(message, Due):
                if hasattr(self.station, "averager"):
                    self.station.averager.make_due([message.fragment])
            elif isinstance(message, Measured):
                measured = HeldOut(message.version, message.loss, self.station.me)
                self.station.take_held_out(measured)
        _quit_at_the_latest(QUIT_WITHIN_S)
        self._end("the trainer is gone", 0.0)

    async def _until_taken_in(self, timeout_s: float) -> None:
        """Let the trainer take in what the last rounds brought."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while asyncio.get_running_loop().time() < deadline:
            self.port.rang()
            if all(self.port.holds(index) for index in range(self._memory.fragments)):
                return
            await asyncio.sleep(0.01)

    # --- what happens ---------------------------------------------------------------------------

    def told(self, name: str, fields: Fields) -> None:
        self._line.say(Happened(name, {key: _value(each) for key, each in fields.items()}))

    def told_phase(self, name: PhaseName, text: str, done: float) -> None:
        self._line.say(Phase(name=name, text=text, done=done))

    def round_ended(self, fields: Fields) -> None:
        finished = fields["outcome"] == "finished"
        told = {
            "fragment": fields["fragment"],
            "version": fields["version"],
            "members": len(fields["members"]),
            "contributors": len(fields["contributors"]),
            "contributed": fields["contributed"],
            "reason": self.station.board.names.within(fields["reason"]),
            "seconds": fields["seconds"],
            "weight": self._weight(fields),
            "left_out": self.station.board.names.within(
                fields["left_out"].get(self.station.me, "")
            ),
        }
        self._line.say(Happened("round" if finished else "round_missed", told))
        if finished and fields["fragment"] == 0:
            version = fields["version"]
            if self.station.held_out.is_my_turn(version, self.station.others_who_train()):
                self._line.say(Measure(version))

    def _weight(self, fields: Fields) -> float | None:
        """What part of the merge its own work was."""
        shares = zip(fields["contributors"], fields["weights"], strict=False)
        return dict(shares).get(self.station.me)

    def _adopted(self, adopted: Adopted) -> None:
        station = self.station
        if adopted.lost_tokens:
            self._account.lost(adopted)
            station.event(
                "work_lost",
                fragment=adopted.fragment,
                tokens=adopted.lost_tokens,
                reason=adopted.reason,
            )
        if station.phase not in ("ready", "leaving"):
            held = sum(self.port.holds(index) for index in range(self._memory.fragments))
            if held == self._memory.fragments:
                station.tell_phase("ready", "in the run", 1.0)
                if hasattr(station, "averager"):  # or it says so as soon as there is one
                    self._say_facts()

    def _fetch_progress(self, progress: FetchProgress) -> None:
        self._fetched[progress.fragment] = progress.verified_pieces / max(1, progress.pieces)
        if self.station.phase == "fetching":
            sizes = self._sizes
            done = sum(sizes[index] * part for index, part in self._fetched.items()) / sum(sizes)
            text = f"downloading the state of the run from {progress.sources} peers"
            self._line.say(Phase(name="fetching", text=text, done=min(1.0, done)))

    # --- what is known --------------------------------------------------------------------------

    def trainer_part(self) -> TrainerPart:
        memory, station = self._memory, self.station
        total = self._account.update(station.states)
        held = [memory.base(index) for index in range(memory.fragments)]
        behind = [
            version - (0 if base is None else base.version)
            for version, base in zip(station.versions(), held, strict=False)
        ]
        return TrainerPart(
            steps=memory.step,
            tokens=memory.tokens,
            step_time_s=memory.step_time_s,
            loss=memory.loss,
            blocked_s=memory.blocked_s,
            staleness=max([0, *behind]),
            # Own work that is still on its way is part of where the run is: alone, it is all.
            pending_tokens=int(total.pending),
            fates=fates(total),
            rest=self._resting,
        )

    def ledger(self) -> Mapping[str, Any]:
        self._account.update(self.station.states)
        return self._account.plain()

    def _facts(self) -> Facts:
        station = self.station
        part, stats = self.trainer_part(), station.averager.stats
        newest = station.held_out.newest
        live = station.live_peers
        merged_tokens = global_tokens(station.states)
        return Facts(
            peer_id=station.me,
            link=str(station.link()),
            merged_tokens=merged_tokens,
            global_tokens=merged_tokens + part.pending_tokens,
            versions=station.versions(),
            peers=1 + len(live),
            held_out_loss=None if newest is None else newest.loss,
            fates=dict(part.fates),
            rounds=stats.rounds,
            rounds_missed=station.rounds_missed,
            bytes_sent=stats.sent_bytes,
            bytes_received=stats.received_bytes,
            synchronous=station.phase == "ready" and any(seen.trains for seen in live),
            rest=self._resting,
            cpu_share=station.guest.limits.share(accelerated=False),
            accelerator_share=station.guest.limits.share(accelerated=True),
            threads=station.guest.limits.threads,
            inner_bytes=station.guest.disk.inner,
            limits=station.guest.words(),
            others=tuple(
                Other(
                    name=row["name"],
                    state=row["state"],
                    step_time_s=row.get("step_time_s"),
                    version=row.get("version"),
                    share=row["share"],
                    behind=row["behind"],
                    last=row["last"] or "",
                )
                for row in station.others()[:OTHERS_TOLD_MAX]
            ),
            in_flight=station.in_flight(),
            staleness=part.staleness,
            last=station.last_offers.get(station.me, ""),
        )

    def _say_facts(self) -> Facts:
        facts = self._facts()
        self._line.say(facts)
        return facts

    async def _tell_facts(self) -> None:
        """Once a second: everybody who wants to know learns how it stands."""
        turn = 0
        while True:
            self.port.rang()
            self._obey()
            if turn % 4 == 0:
                self.station.refresh_view()
                facts = self._say_facts()
                if turn % 8 == 0:
                    self._update_record(facts)
            turn += 1
            await asyncio.sleep(0.25)

    def _obey(self) -> None:
        """Keep to what the owner of this machine allows, as of now."""
        verdict = self.station.guest.look()
        reason = verdict.reason if isinstance(verdict, Rest) else None
        if reason == self._resting:
            return
        if self._resting is None:
            self.station.event("paused", reason=reason)
            self._rests_since = asyncio.get_running_loop().time()
            # Nothing is left lying: what it has is offered now, and nobody waits for it later.
            self.station.averager.make_due(range(self._memory.fragments))
        elif reason is None:
            self.station.event("resumed")
        self._resting = reason
        self._say_facts()

    def _is_away(self) -> bool:
        """Whether others should do without it: it rests, and has offered what it had."""
        if self._resting is None:
            return False
        rested_s = asyncio.get_running_loop().time() - self._rests_since
        busy = rested_s < 1.0 or bool(self.station.averager.in_flight)
        return not busy or rested_s > OFFERED_WITHIN_S

    def _why_closed(self, protocol: str) -> str | None:
        """Whether only small messages may travel: the month's volume is used, and all offered."""
        if not (self.station.guest.is_used_up and self._is_away()):
            return None
        if protocol == control_protocol(self.station.run_id):
            return None
        return "the volume that is allowed this month is used"

    def _update_record(self, facts: Facts) -> None:
        step_time_s = self._memory.step_time_s
        self.station.update_record(
            trains=self.station.phase == "ready"
            and not self._trainer_rests()
            and not self._is_away(),
            step_time_s=step_time_s if step_time_s > 0 else None,
            merged=facts.fates["merged"],
        )

    def _trainer_rests(self) -> bool:
        """Whether the trainer has made no step for long: nobody should wait for its next one."""
        now = asyncio.get_running_loop().time()
        if self._memory.step != self._step_seen:
            self._step_seen, self._stepped_at = self._memory.step, now
        rules = self.station.run_file
        rests = now - self._stepped_at > max(
            RESTS_AFTER_S,
            RESTS_AFTER_STEPS * self._memory.step_time_s,
            # Waiting for a round is what a synchronous trainer does.
            2 * rules.rounds.round_deadline_s if rules.synchronous else 0.0,
        )
        if rests != self._rests:
            self._rests = rests
            silent_s = now - self._line.heard_at
            self.station.event(
                "trainer_rests" if rests else "trainer_steps_again", silent_s=silent_s
            )
        return rests


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
        under_way = begin.restarts > 0
        try:
            agent = Agent(begin, line, SharedTensors(memory_at), bell=bell_at)
            try:
                await agent.run(messages)
            finally:
                under_way |= agent.station.phase == "ready"
        except BaseExceptionGroup as group:
            # What a person can act on goes to the trainer, who says it; the rest is a bug.
            expected, bugs = group.split((PeerError, DhtError))
            if bugs is not None or expected is None:
                raise
            return _fail(line, _first_of(expected), under_way=under_way)
        except (PeerError, DhtError) as error:
            return _fail(line, error, under_way=under_way)
    finally:
        await line.close()
    return 0


def _fail(line: TrainerLine, error: BaseException, *, under_way: bool) -> int:
    """The last word: without one the trainer starts another agent, and trains meanwhile."""
    logger.error("agent_cannot_go_on reason=%s", error)
    exit_code = getattr(error, "exit_code", 3)
    if not (under_way and isinstance(error, PASSING)):
        line.say(Over(str(error), exit_code, finished=False))
    return int(exit_code)


def _first_of(group: BaseExceptionGroup[BaseException]) -> BaseException:
    first = group.exceptions[0]
    return _first_of(first) if isinstance(first, BaseExceptionGroup) else first


def main(arguments: Sequence[str]) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    if len(arguments) != 3 or not all(argument.isdigit() for argument in arguments):
        sys.stderr.write(
            "python -m peer.agent is started by a trainer; see peer.bridge.agent_link\n"
        )
        return 2
    line_at, bell_at, memory_at = map(int, arguments)
    return uvloop.run(serve(line_at, bell_at, memory_at))
