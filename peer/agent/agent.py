"""The agent: the process beside a trainer that talks to the other peers. It does no torch work.

``python -m peer.agent LINE BELL MEMORY`` is started by ``peer.bridge.agent_process``, with three
descriptors.

One uvloop event loop owns everything. ``Agent`` is the trainer's side: line, doorbell, shared
memory, account, and the way into the run (``peer.agent.entrance``). What it has in common with a
keeper is in ``peer.agent.life``. It ends when the trainer asks for it, when the trainer is gone
(the line is closed: the agent saves, says goodbye and goes), or when the run is over.

If the agent is killed, only its connections are lost: the trainer continues and starts a new one.
That finds the trainer's marks in the shared memory, its own states in the last checkpoint, and
newer states at the other peers (``peer.agent.slots`` describes what happens to work in doubt).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias

import blake3
import msgspec
import uvloop

from averaging.live.averager import Averager
from averaging.live.slices.watch import Watch
from averaging.live.states.fetcher import FetchProgress
from averaging.numbers.codecs import codec_named
from dht.bounded_mapping import ALL, PROCESS_BYTES_MAX
from dht.errors import CallRefused, DhtError, HostClosed, PeerUnreachable, StreamBroken
from dht.identity import Identity, RunId
from dht.whole_files import append_whole
from peer import signals
from peer.agent.account import Account, fates
from peer.agent.entrance import Entrance
from peer.agent.figures import rows_of, status_of
from peer.agent.idleness import IdleTrainer, OwnersRest
from peer.agent.judging import TrainersTrials, open_gate
from peer.agent.life import live
from peer.agent.peer import Peer
from peer.agent.policies import fixes_its_data
from peer.agent.services import Fields, FirstStates, Role, Seat
from peer.agent.slots import Adopted, SlotPort
from peer.bridge.messages import (
    Batches,
    Begin,
    Due,
    FromTrainer,
    Happened,
    HasRead,
    Leave,
    Measure,
    Measured,
    Over,
    Phase,
    Progress,
    Report,
    Restore,
    Tried,
    Value,
)
from peer.bridge.shared_memory import SharedTensors
from peer.bridge.trainer_line import TrainerLine, hear_doorbell
from peer.description import layout_of
from peer.errors import REFUSALS, PeerError
from peer.guest.enforcement import Guest
from peer.quantities import peers_text
from peer.rules.ending import Heard, State
from peer.rules.leaving import Departure
from peer.rules.ledger import APART, GivenUpWork
from peer.run_file.reading import from_canonical
from peer.status import WORDS_MAX, HeldOut, PeerStatus, Training
from peer.storage.address import kept_link
from peer.storage.home import KEY

logger = logging.getLogger("peer.agent")

NICENESS = 5
"""Nice level of agent and daemon, above the trainer's: waking up, they do not preempt it."""

LAST_OFFERS_OF_MODEL = 4
"""Size of an exchange of everything: the encoded model is sent and received twice each at most."""

LOOK_EVERY_S = 0.25
OTHERS_MAX = 16
"""Number of other peers in a report, for the trainer's screen."""

LEAVE_WITHIN_S = 30.0
LEAVE_PATIENCE_S = 300.0
"""Longest time beyond ``LEAVE_WITHIN_S`` for work on a slow line."""
SIGNAL_WITHIN_S = 10.0
QUIT_WITHIN_S = 60.0
"""Time after which an agent without a trainer ends itself, wherever it hangs."""

PASSING = (CallRefused, HostClosed, PeerUnreachable, StreamBroken)
"""Network errors that another agent may not meet. They end the first start of an agent for good,
because a person waits for it, and are no reason to give up later."""


Watched: TypeAlias = Callable[[Identity], Watch]


class Agent(Role):
    """The role of a peer beside one trainer."""

    def __init__(
        self,
        begin: Begin,
        line: TrainerLine,
        memory: SharedTensors,
        *,
        bell: int,
        watched: Watched,
    ) -> None:
        run = from_canonical(begin.run, RunId(blake3.blake3(begin.run).hexdigest()))
        layout = layout_of(begin.tensors, run.outer.fragments)
        directory = Path(begin.directory)
        identity = Identity.load_or_create(directory / KEY)
        seat = Seat(
            run=run,
            identity=identity,
            watch=watched(identity),
            directory=directory,
            settings=begin.settings,
            role="learner",
            credential=begin.credential,
            frozen=begin.frozen,
        )
        codec = codec_named(run.outer.codecs[0])
        encoded = sum(codec.encoded_size(fragment.unit_sizes) for fragment in layout.fragments)
        guest = Guest(
            directory,
            last_offers_bytes=LAST_OFFERS_OF_MODEL * encoded,
            started_at=begin.started_at,
        )
        self.peer = peer = Peer(seat, layout, guest, self)
        if begin.restarts:
            peer.link_told = kept_link(directory)
        self.port = self.learner = SlotPort(
            memory,
            peer.me,
            self._adopted,
            on_not_finite=self._not_finite,
            statistics=frozenset(part.index for part in layout.fragments if part.has_statistics),
            closed=peer.ending.closed,
            empties=peer.state_files is not None,
        )
        self.incarnation = memory.incarnation
        self._begin = begin
        self._line = line
        self._memory = memory
        self._bell = bell
        self._sizes = [fragment.size for fragment in layout.fragments]
        self._account = Account(
            peer.me,
            memory,
            self._sizes,
            self.port.tokens_at,
            roots=lambda: peer.owner.root_links,
        )
        self._entrance = Entrance(peer, self.port, memory, self._account, begin)
        self._trainer = IdleTrainer(peer, memory, line)
        self._rest = OwnersRest(peer)
        self.judge = self._trials = TrainersTrials(
            line, peer.directory, same_data=fixes_its_data(run)
        )
        self.gate = open_gate(peer, self.port, line)
        self._fetched: dict[int, float] = {}
        """The fetched part of each fragment's state."""
        self._report_wanted = asyncio.Event()
        self._to_restore: set[int] = set()
        """Fragments that the trainer wants to be overwritten."""
        self._training = Training()
        self._given_up: GivenUpWork | None = None
        """Its account is not open yet while it is ``None``."""

    def __repr__(self) -> str:
        return f"Agent({self.peer!r})"

    # --- life -----------------------------------------------------------------------------------

    async def run(self, messages: AsyncIterator[FromTrainer]) -> None:
        """Serve the trainer from its first message to the agent's last one."""
        loop, peer = asyncio.get_running_loop(), self.peer
        for number in signals.asking():
            loop.add_signal_handler(number, self._leave, "asked to end", SIGNAL_WITHIN_S)
        with ExitStack() as stack:
            stack.callback(peer.guest.save)
            stack.callback(hear_doorbell(self._bell, self._rang))
            peer.event("agent_started", pid=os.getpid(), restarts=self._begin.restarts)
            await live(
                peer,
                self._line.beat(),
                self._listen(messages),
                peer.leave_when_asked(LEAVE_WITHIN_S, patience_s=LEAVE_PATIENCE_S),
            )

    async def first_states(self) -> FirstStates:
        return await self._entrance.first_states()

    def work(
        self, averager: Averager, first: FirstStates
    ) -> Mapping[str, Coroutine[Any, Any, None]]:
        own = {
            "report": self._report_always(),
            "go on": self._entrance.go_on_from_checkpoint(averager, first),
            "get in": self._entrance.give_up_when_nobody_is_left(),
            "arrive": self._entrance.arrive(),
        }
        return own if self.gate is None else {**own, "judge jumps": self.gate.run(averager)}

    def left(self, departure: Departure) -> None:
        self._tell_given_up(self._tell_report(), now=math.inf)
        reason, finished = departure.reason, departure.finished
        self.peer.event("agent_ended", reason=reason, finished=finished)
        self._line.say(Over(reason, departure.exit_code, finished))

    def _rang(self) -> None:
        """The trainer is at a safe point and has passed a slot on."""
        self.port.rang()
        if self.peer.averager is not None:
            self.peer.averager.look()

    def _leave(self, reason: str, timeout_s: float, patience_s: float = 0.0) -> None:
        self.peer.end.hear(
            Departure(reason, 0, finished=False, timeout_s=timeout_s, patience_s=patience_s)
        )

    async def _listen(self, messages: AsyncIterator[FromTrainer]) -> None:
        async for message in messages:
            match message:
                case Leave():
                    self._leave("its program stops", message.timeout_s, message.patience_s)
                case Due() if self.peer.averager is not None:
                    self.peer.averager.make_due([message.fragment])
                case Progress():
                    self._training = message.training
                case HasRead():
                    self._trials.heard_reading(message)
                case Tried():
                    self._line.answered(message.number, message)
                case Measured() if message.asked.gate:
                    self._line.answered(message.asked.gate, message)
                case Measured():
                    asked, me = message.asked, self.peer.me
                    measured = HeldOut(asked.version, message.loss, me, asked.tokens)
                    self.peer.take_held_out(measured)
                case Restore():
                    self._to_restore |= set(range(self._memory.fragments))
                    self._report_wanted.set()
                case Batches():
                    self.peer.batches = message.digest
                case Happened():
                    self.peer.log.write(message.name, message.fields)
        _quit_at_the_latest(QUIT_WITHIN_S)
        self.peer.end.hear(Heard.TRAINER_GONE)

    async def until_adopted(self, timeout_s: float) -> None:
        deadline = asyncio.get_running_loop().time() + timeout_s
        while asyncio.get_running_loop().time() < deadline:
            self.port.rang()
            if all(self.port.holds(index) for index in range(self._memory.fragments)):
                return
            await asyncio.sleep(0.01)

    def _tell_report(self) -> PeerStatus:
        """Tell the trainer the run as this peer sees it now. Returns this peer's status."""
        self.peer.tell_link()  # first: who waits for the report may tell it at once
        peer, status = self.peer, status_of(self.peer)
        own, *others = sorted(rows_of(peer, status), key=lambda row: not row.you)
        self._line.say(
            Report(
                status=status,
                rows=(own, *others[:OTHERS_MAX]),
                # Own work that is not merged yet is part of the run; of a lone peer it is all.
                scheduled_tokens=status.global_tokens + int(status.fates["pending"]),
                others_train=any(seen.trains for seen in peer.live_peers),
                amended=peer.owner.amended,
                gone_back=peer.owner.gone_back,
                limits=peer.guest.limits,
                inner_bytes=peer.guest.disk.inner,
            )
        )
        return status

    async def _report_always(self) -> None:
        """Report every second, and at once when this peer begins to train, or leaves.

        The others have to know of a newcomer before its first call: they would not follow it.
        """
        peer, turn = self.peer, 0
        while True:
            self.port.rang()
            self._restore()
            if self._rest.obey():
                self._report_wanted.set()
            if turn % 4 == 0:
                peer.refresh_view()
            if turn % 4 == 0 or self._report_wanted.is_set():
                self._report_wanted.clear()
                status = self._tell_report()
                self._tell_given_up(status, now=asyncio.get_running_loop().time())
                is_new = peer.ending.state is State.ARRIVING
                peer.update_record(
                    trains=peer.ending.offers_last(int(status.fates["pending"]))
                    or (peer.phase == "ready" and self._is_at_work()),
                    # Others count one that has made steps, and does not train, as resting.
                    step_time_s=None if is_new else status.step_time_s or None,
                    merged=status.fates["merged"],
                )
            turn += 1
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._report_wanted.wait(), LOOK_EVERY_S)

    @property
    def _why_no_steps(self) -> str | None:
        if not self.peer.ending.trains_on:
            return "this peer leaves"
        return self._rest.reason

    def _is_at_work(self) -> bool:
        """True if other peers should wait for this one's work, as it trains or offers the last."""
        works = self._rest.hands_over or not self._trainer.is_idle()
        return works and not self._rest.is_away()

    def _tell_given_up(self, status: PeerStatus, *, now: float) -> None:
        if self._given_up is None:
            if (opened := self._account.opened_with) is None:
                return
            self._given_up = GivenUpWork(opened.discarded.get(APART, 0.0))
        outer = self.peer.run_file.outer
        cycle_s = status.step_time_s * (outer.steps_per_cycle_max or outer.steps_per_cycle)
        tokens = status.fates.get(f"discarded.{APART}", 0.0)
        lost = self._given_up.look(tokens, now=now, cycle_s=cycle_s)
        if lost is not None:
            self.peer.event("given_up", tokens=lost)

    def _restore(self) -> None:
        """Overwrite the trainer's parameters of fragments that no round is using, if it asked."""
        for fragment, state in enumerate(self.peer.states):
            if fragment not in self._to_restore or state is None:
                continue
            if self.port.overwrite(fragment, state, reason="not finite"):
                self._to_restore.remove(fragment)

    # --- the trainer ----------------------------------------------------------------------------

    def _adopted(self, adopted: Adopted) -> None:
        peer = self.peer
        if adopted.lost_tokens:
            self._account.lost(adopted)
            lost = {"tokens": adopted.lost_tokens, "reason": adopted.reason}
            if adopted.reason == APART:  # ``given_up`` tells it once, for all fragments
                peer.log.write("work_lost", {"fragment": adopted.fragment, **lost})
            else:
                peer.event("work_lost", fragment=adopted.fragment, **lost)

    def _not_finite(self, fragment: int) -> None:
        self.peer.event("not_finite", fragment=fragment, reason="parameters of its trainer")

    def on_fetched(self, progress: FetchProgress) -> None:
        self._fetched[progress.fragment] = progress.verified_pieces / max(1, progress.pieces)
        if self.peer.phase == "fetching":
            sizes = self._sizes
            done = sum(sizes[index] * part for index, part in self._fetched.items()) / sum(sizes)
            text = f"downloading the state of the run from {peers_text(progress.sources)}"
            self._line.say(Phase(name="fetching", text=text, done=min(1.0, done)))

    # --- what the peer asks of its trainer ------------------------------------------------------

    def with_training(self, status: PeerStatus) -> PeerStatus:
        memory, rest = self._memory, self._why_no_steps
        held = [memory.base(index) for index in range(memory.fragments)]
        behind = [
            version - (0 if base is None else base.version)
            for version, base in zip(status.versions, held, strict=False)
        ]
        training = msgspec.structs.asdict(self._training) | {
            # As of the account: the trainer has told the others up to a second ago.
            "steps": memory.step,
            "tokens": memory.tokens,
            "step_time_s": memory.step_time_s,
        }
        return msgspec.structs.replace(
            status,
            **training,
            staleness=max([0, *behind]),
            fates=fates(self._account.update(self.peer.states)),
            # Further work could not be merged any more.
            rest=None if rest is None else rest[:WORDS_MAX],
        )

    def why_closed(self, protocol: str) -> str | None:
        return self._rest.why_closed(protocol)

    def pending_tokens(self) -> int:
        return int(self._account.update(self.peer.states).pending)

    def ledger(self) -> Mapping[str, Any]:
        self._account.update(self.peer.states)
        return self._account.plain()

    def note(self, name: str, fields: Fields) -> None:
        if name != "phase":
            values = {key: event_value(each) for key, each in fields.items()}
            self._line.say(Happened(name, values))
            return
        self._line.say(Phase(**fields))
        if fields["name"] in ("ready", "leaving"):
            self._report_wanted.set()  # from now on its steps are merged, or not any more

    def on_round(self, fields: Fields) -> None:
        peer = self.peer
        finished = fields["outcome"] == "finished"
        weights = dict(zip(fields["contributors"], fields["weights"], strict=False))
        summary = {
            "fragment": fields["fragment"],
            "version": fields["version"],
            "members": len(fields["members"]),
            "contributors": len(fields["contributors"]),
            "contributed": fields["contributed"],
            "reason": peer.board.names.within(fields["reason"]),
            "seconds": fields["seconds"],
            "weight": weights.get(peer.me),
            "left_out": peer.board.names.within(fields["left_out"].get(peer.me, "")),
        }
        self._line.say(Happened("round" if finished else "round_missed", summary))

    def on_turn_to_measure(self, version: int, tokens: int) -> None:
        self._line.say(Measure(version, tokens))


def event_value(value: Any) -> Value:
    """A field of an event, as a message can carry it."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, list | tuple) and all(isinstance(v, str | int | float) for v in value):
        return list(value)
    if isinstance(value, Mapping):
        return [f"{key}: {each}" for key, each in value.items()]
    return str(value)


def _quit_at_the_latest(seconds: float) -> None:
    """End this process after ``seconds``, wherever it hangs."""
    timer = threading.Timer(seconds, os._exit, (1,))
    timer.daemon = True
    timer.start()


# --- the process --------------------------------------------------------------------------------


async def serve(line_at: int, bell_at: int, memory_at: int, watched: Watched) -> int:
    """Be the agent of the trainer behind these descriptors. Returns the exit code."""
    line = await TrainerLine.open(line_at)
    messages = line.messages()
    try:
        try:
            begin = await anext(messages, None)
        except PeerError as error:
            return _fail(line, error, under_way=False)
        if not isinstance(begin, Begin):
            return 2
        os.nice(NICENESS)
        under_way = begin.restarts > 0
        try:
            agent = Agent(begin, line, SharedTensors(memory_at), bell=bell_at, watched=watched)
            try:
                await agent.run(messages)
            finally:
                under_way |= agent.peer.phase == "ready"
        except (PeerError, DhtError) as error:
            return _fail(line, error, under_way=under_way)
    finally:
        await line.close()
    return 0


def _fail(line: TrainerLine, error: BaseException, *, under_way: bool) -> int:
    """Send the last message. Without one the trainer starts another agent, and trains meanwhile."""
    logger.error("agent_cannot_go_on reason=%s", error)
    exit_code = getattr(error, "exit_code", 3)
    if not (under_way and isinstance(error, PASSING)):
        kind = type(error).__name__ if type(error) in REFUSALS else ""
        arguments = error.args if kind else ()
        line.say(Over(str(error), exit_code, finished=False, kind=kind, arguments=arguments))
    return int(exit_code)


class WholeLines(logging.Handler):
    """Writes to standard error, which is a file: on a full disk no line, or all of it."""

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):  # a checkpoint tells that the disk is full
            append_whole(sys.stderr.fileno(), f"{self.format(record)}\n".encode())


def main(arguments: Sequence[str], watched: Watched = lambda identity: Watch()) -> int:
    """``watched``: makes the watch of an agent with this identity."""
    form = "%(asctime)s %(levelname)s %(name)s %(message)s"
    logging.basicConfig(level=logging.INFO, format=form, handlers=[WholeLines()])
    if len(arguments) != 3 or not all(argument.isdigit() for argument in arguments):
        sys.stderr.write(
            "python -m peer.agent is started by a trainer; see peer.bridge.agent_process\n"
        )
        return 2
    ALL.bytes_max = PROCESS_BYTES_MAX
    line_at, bell_at, memory_at = map(int, arguments)
    return uvloop.run(serve(line_at, bell_at, memory_at, watched))
