"""An agent without a network, for tests of the trainer: it founds the run and averages alone.

Everything but the network is real: the line, the doorbell, the shared memory and its protocol. The
outer step is theta' = theta + 0.5 * (values - theta), so that a merge can be told from none.

More than a hundred tests start one. So it imports what judges states, and what writes files, where
it is asked to: that is half of the processor time that it takes to start.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from averaging.history.state import FragmentState
from averaging.messages import Link
from averaging.numbers.layout import Layout
from dht.identity import Identity
from peer.agent.slots import Adopted, SlotPort
from peer.bridge.messages import (
    Batches,
    Begin,
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
from peer.status import PeerRow, PeerStatus

if TYPE_CHECKING:
    from averaging.guard.loss_gate import LossGate
    from peer.agent.judging import TrainersTrials

LINK = (
    f"shoal://{'ab' * 32}?seed=/ip4/203.0.113.7/tcp/7700/p2p/"
    f"{Identity.from_seed(bytes(32)).peer_id}"
)
OWN_PENDING = 1000
"""Tokens that are never merged."""


POISON = np.float32(100)
MEASURE_S = 20.0


class Alone:
    """This agent, as its loss gate sees it: no round is ever under way."""

    phases = ()

    def __init__(self, port: SlotPort, states: list[FragmentState]) -> None:
        self._port = port
        self._states = states
        self.went_back = asyncio.Event()

    @property
    def states(self) -> tuple[FragmentState, ...]:
        return tuple(self._states)

    async def replace_states(self, states: Sequence[FragmentState], *, reason: str) -> None:
        for state in states:
            self._port.discard(state.fragment, state, reason=reason)
            self._states[state.fragment] = state
        self.went_back.set()


def report(
    me: str, states: list[FragmentState], rounds: int, tokens: int, rest: str | None = None
) -> Report:
    budget = os.environ.get("LONE_AGENT_BUDGET")
    return Report(
        status=PeerStatus(
            peer=me,
            role="learner",
            phase="ready",
            link=LINK,
            global_tokens=max(0, tokens - OWN_PENDING),
            tokens_goal=int(budget) if budget else None,
            versions=tuple(state.version for state in states),
            rounds=rounds,
            rest=rest,
        ),
        rows=(PeerRow(peer=me, name="lone", you=True, state="resting" if rest else "training"),),
        scheduled_tokens=tokens,
        others_train=bool(os.environ.get("LONE_AGENT_SYNCHRONOUS")),
        amended={"end.tokens": int(budget)} if budget else {},
    )


def write_final(begin: Begin, layout: Layout, states: list[FragmentState]) -> str:
    from peer.storage.outer_state import named_tensors
    from peer.storage.tensor_file import write_safetensors

    path = Path(begin.directory) / "model.safetensors"
    with path.open("wb") as file:
        write_safetensors(file, named_tensors(layout, states))
    return str(path)


def a_gate(line: TrainerLine, port: SlotPort) -> LossGate:
    """The loss gate, which takes no state of others unjudged."""
    from averaging.guard.loss_gate import GateSettings, LossGate
    from peer.agent.judging import trainers_loss

    return LossGate(
        GateSettings(rise_max=0.25, measure_s=MEASURE_S, quiet_s=0.1, open_s=20.0, look_s=0.01),
        measure=partial(trainers_loss, line),
        holds=port.holds,
        on_event=lambda name, fields: line.say(Happened(name, dict(fields))),
    )


def some_trials(line: TrainerLine, begin: Begin) -> TrainersTrials:
    from peer.agent.judging import TrainersTrials

    return TrainersTrials(line, Path(begin.directory), same_data=True)


async def main(line_at: int, bell_at: int, memory_at: int) -> None:
    line = await TrainerLine.open(line_at)
    memory = SharedTensors(memory_at)
    try:
        await live(line, bell_at, memory)
    finally:
        await line.close()
        memory.close()


async def live(line: TrainerLine, bell_at: int, memory: SharedTensors) -> None:
    messages = line.messages()
    begin = await anext(messages)
    assert isinstance(begin, Begin)
    last_round = int(os.environ.get("LONE_AGENT_ROUNDS", "-1"))
    the_end = Over("the run has ended", 0, finished=True)
    if (code := os.environ.get("LONE_AGENT_ENDS_WITH")) is not None:
        reason = "it does not like you" if int(code) else "its owner asked it to leave"
        the_end = Over(reason, int(code), finished=False)
        if last_round < 0:
            line.say(the_end)
            os.close(bell_at)
            return
    me = Identity.load_or_create(Path(begin.directory, "identity.key")).peer_id
    run = msgspec.json.decode(begin.run)
    layout = layout_of(begin.tensors, run["outer"]["fragments"])
    assert layout.hash == memory.layout

    def adopted(what: Adopted) -> None:
        line.say(Happened("lost", {"fragment": what.fragment, "tokens": what.lost_tokens}))

    def not_finite(fragment: int) -> None:
        line.say(Happened("not_finite", {"fragment": fragment}))

    port = SlotPort(
        *(memory, me, adopted, not_finite),
        statistics=frozenset(part.index for part in layout.fragments if part.has_statistics),
    )
    stop_bell = hear_doorbell(bell_at, port.rang)
    line.say(Phase(name="founding", text="founding", done=0.0))
    states: list[FragmentState] = []
    to_restore: set[int] = set()
    poisoned, tries = (os.environ.get(f"LONE_AGENT_{what}") for what in ("POISONED", "TRIES"))
    gate = a_gate(line, port) if poisoned else None
    trials = some_trials(line, begin) if tries else None
    rounds = 0

    async def play() -> None:
        nonlocal rounds
        for fragment in range(memory.fragments):
            if memory.base(fragment) is None:
                values = await port.values(fragment, timeout_s=30)
                assert values is not None
                state = FragmentState.founded(layout.hash, fragment, values.copy(), 0)
                port.adopt(fragment, state, contained=memory.offered(fragment)[0])
            else:
                held = memory.base(fragment)
                assert held is not None
                port.resume(fragment, None)
                size = layout.fragments[fragment].size
                state = FragmentState.founded(layout.hash, fragment, np.zeros(size, np.float32), 0)
                port.adopt_first(fragment, state)
            states.append(state)
        tokens = int(os.environ.get("LONE_AGENT_TOKENS", "0"))
        if tokens:  # as an agent that has only just fetched the run's states
            line.say(report(me, [], 0, 0))
            await asyncio.sleep(0.3)
        line.say(Happened("link", {"link": LINK, "limit": None, "by_program": True}))
        line.say(report(me, states, 0, tokens))
        line.say(Phase(name="ready", text="ready", done=1.0))
        due = int(os.environ.get("LONE_AGENT_EVERY", "5"))
        last = 0
        while True:
            await asyncio.sleep(0.002)
            for fragment in sorted(to_restore):
                if port.overwrite(fragment, states[fragment], reason="not finite"):
                    to_restore.remove(fragment)
            if memory.step < last + due:
                continue
            last = memory.step
            for fragment, state in enumerate(states):
                snapshot = await port.snapshot(fragment, timeout_s=30)
                if snapshot is None:
                    continue
                theta = state.theta + np.float32(0.5) * (snapshot.values - snapshot.base)
                version = state.version + 1
                lineage = bytes([version % 256]) * 32
                after = FragmentState(
                    fragment,
                    version,
                    lineage,
                    state.chain.extended(Link(version, lineage, 0)),
                    theta.astype(np.float32),
                    state.momentum,
                    state.merged.with_work(me, memory.incarnation, snapshot.mark, snapshot.tokens),
                )
                port.adopt(fragment, after, contained=snapshot.mark)
                states[fragment] = after
            rounds += 1
            rest_s = float(os.environ.get("LONE_AGENT_RESTS_S", "0"))
            if rest_s and rounds == 2:
                line.say(report(me, states, rounds, memory.tokens, rest="its owner wants it"))
                await asyncio.sleep(rest_s)
            line.say(report(me, states, rounds, memory.tokens))
            if rounds == last_round:
                if the_end.finished:
                    line.say(Happened("exported", {"path": write_final(begin, layout, states)}))
                line.say(the_end)
            line.say(Measure(rounds))
            if trials is not None and rounds == 2:
                await try_own(trials, memory.step)
            if gate is not None and rounds == 2:
                await take_poison(gate)

    async def try_own(trials: TrainersTrials, step: int) -> None:
        """Have a contribution tried that the trainer itself might have made, and one of poison."""
        from averaging.guard.spot_checking import Losses, Trial

        reading = await trials.reading_of(step)
        assert reading is not None
        theta = states[0].theta
        for after in (theta, theta + POISON):
            found = await trials.judge(Trial(0, me, reading, theta, after))
            assert isinstance(found, Losses)
            losses = {"before": found.before, "after": found.after}
            line.say(Happened("tried", {**losses, "seconds": found.seconds}))

    async def take_poison(gate: LossGate) -> None:
        """Take states over that nobody merged, as if other peers had certified them."""
        from averaging.history.standing import Standing

        for fragment, before in enumerate(states):
            lineage = bytes([255]) * 32
            chain = before.chain.extended(Link(before.version + 1, lineage, 0))
            standing = Standing(before.version + 1, lineage, chain, before.merged)
            await gate.before_jump(before, standing)
            states[fragment] = standing.state(fragment, before.theta + POISON, before.momentum)
            port.adopt(fragment, states[fragment], contained=None)
        await alone.went_back.wait()

    alone = Alone(port, states)
    tasks = [asyncio.create_task(play()), asyncio.create_task(line.beat(0.05))]
    if gate is not None:
        tasks.append(asyncio.create_task(gate.run(alone)))
    async for message in messages:
        if isinstance(message, Leave):
            await asyncio.sleep(0.05)
            if not 0 < last_round <= rounds:  # else it has said its last word
                line.say(Over("left", 0, finished=False))
            break
        if isinstance(message, Progress) and message.training.device_bytes is not None:
            line.say(Happened("device", {"bytes": message.training.device_bytes}))
        if isinstance(message, Happened):
            line.say(Happened("recorded", {"name": message.name, **message.fields}))
        if isinstance(message, Batches):
            line.say(Happened("batches", {"digest": message.digest}))
            if message.digest and os.environ.get("LONE_AGENT_HAS_A_TWIN"):
                twin: dict[str, Value] = {"peer": "12D3KooTwin", "name": "boris", "how": "same"}
                line.say(Happened("same_batches", twin))
        if isinstance(message, Restore):
            to_restore |= set(range(memory.fragments))
        if isinstance(message, HasRead) and trials is not None:
            trials.heard_reading(message)
        if isinstance(message, Tried) and trials is not None:
            line.answered(message.number, message)
        if isinstance(message, Measured) and message.asked.gate:
            line.answered(message.asked.gate, message)
        elif isinstance(message, Measured):
            line.say(Happened("measured", {"loss": message.loss}))
    for task in tasks:
        task.cancel()
    stop_bell()


if __name__ == "__main__":
    if os.environ.get("LONE_AGENT_HANGS"):
        signal.pause()
    asyncio.run(main(*(int(argument) for argument in sys.argv[1:4])))
