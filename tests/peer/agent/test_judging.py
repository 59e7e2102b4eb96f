"""The agent's side of loss gate and spot checks: questions to the trainer, and its answers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import pytest

from averaging.guard.spot_checking import Losses, OtherData, Trial
from averaging.history.readings import Reading
from averaging.history.standing import Standing
from averaging.history.state import FragmentState
from averaging.messages import Link
from averaging.round.interface.phase import Phase
from dht.identity import PeerId
from dht.memory.virtual_loop import run as virtual
from peer.agent.judging import (
    READ_WITHIN_S,
    STATES,
    TRIED_WITHIN_S,
    TrainersTrials,
    open_gate,
    trainers_loss,
)
from peer.agent.services import Fields, Role
from peer.agent.slots import SlotPort
from peer.bridge.messages import FromAgent, HasRead, Measure, Measured, Tried, Try
from peer.bridge.trainer_line import TrainerLine
from peer.run_file.merging import Outer
from peer.run_file.sections import Evaluation, RunFile
from peer.views.event_log import read_events
from tests.peer.agent.example_peers import peer_in

READING = Reading({"position": 12}, 4, bytes(32))
BEFORE, AFTER = (np.arange(5, dtype=np.float32) + k for k in (0, 100))


class Trainer(TrainerLine):
    """The line to a trainer that answers in its own way."""

    def __init__(self, answers: Callable[[Try], Tried | None]) -> None:
        super().__init__(cast(Any, None), cast(Any, None))
        self._answers = answers
        self.saw: list[np.ndarray] = []

    def say(self, message: FromAgent) -> None:
        assert isinstance(message, Try)
        self.saw.append(np.fromfile(message.path, np.float32))
        answer = self._answers(message)
        if answer is not None:
            self.answered(answer.number, answer)


def judged(folder: Path, answers: Callable[[Try], Tried | None]) -> Any:
    async def main() -> tuple[Any, list[np.ndarray]]:
        line = Trainer(answers)
        trials = TrainersTrials(line, folder, same_data=True)
        trial = Trial(2, PeerId("boris"), READING, BEFORE, AFTER)
        return await trials.judge(trial), line.saw

    found, saw = virtual(main())
    assert not list(folder.iterdir()), "the states are removed"
    assert np.array_equal(saw[0], np.concatenate([BEFORE, AFTER]))
    return found


@pytest.fixture(autouse=True)
def _files_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Virtual time knows no threads."""

    async def at_once(work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return work(*args, **kwargs)

    monkeypatch.setattr(asyncio, "to_thread", at_once)


def test_the_trainer_compares_both_states_and_its_losses_are_the_verdict(tmp_path: Path) -> None:
    def answers(asked: Try) -> Tried:
        assert (asked.fragment, asked.author, asked.reading) == (2, "boris", READING)
        return Tried(number=asked.number, losses=(2.5, 2.25))

    found = judged(tmp_path, answers)
    assert (found.before, found.after) == (2.5, 2.25) and isinstance(found, Losses)


def test_other_data_and_a_trainer_that_cannot_tell_are_two_things(tmp_path: Path) -> None:
    other = judged(tmp_path, lambda asked: Tried(number=asked.number, other_data=True))
    assert isinstance(other, OtherData)
    assert judged(tmp_path, lambda asked: Tried(number=asked.number)) is None


def test_a_trainer_that_never_answers_or_answers_another_question_is_given_up(
    tmp_path: Path,
) -> None:
    assert judged(tmp_path, lambda asked: None) is None
    late = judged(tmp_path, lambda asked: Tried(number=asked.number - 1, losses=(1.0, 1.0)))
    assert late is None
    assert TRIED_WITHIN_S > 0


def test_states_that_a_killed_agent_has_left_are_removed(tmp_path: Path) -> None:
    (tmp_path / STATES).write_bytes(bytes(8))
    TrainersTrials(cast(TrainerLine, None), tmp_path, same_data=True)
    assert not list(tmp_path.iterdir())


async def test_a_step_is_waited_for_until_the_trainer_tells_of_it() -> None:
    trials = TrainersTrials(cast(TrainerLine, None), Path(), same_data=True)
    trials.heard_reading(HasRead({5: READING, 6: None}))
    assert await trials.reading_of(5) == READING
    assert not trials.judges
    assert await trials.reading_of(6) is None
    assert await trials.reading_of(2) is None, "too long ago"
    loop = asyncio.get_running_loop()
    loop.call_later(1.0, trials.heard_reading, HasRead({7: READING}, judges=True))
    assert await trials.reading_of(7) == READING
    assert trials.judges
    began = loop.time()
    with pytest.raises(TimeoutError):
        await trials.reading_of(8)
    assert loop.time() - began == pytest.approx(READ_WITHIN_S)


class Line(TrainerLine):
    """A line to a trainer that is not there."""

    def __init__(self) -> None:
        super().__init__(cast(Any, None), cast(Any, None))
        self.said: list[FromAgent] = []

    def say(self, message: FromAgent) -> None:
        self.said.append(message)


def answer(gate: int, *, sequences: int = 7, loss: float = 2.5) -> Measured:
    return Measured(asked=Measure(0, gate=gate), loss=loss, sequences=sequences)


def asked(*answers: Measured) -> tuple[Any, list[FromAgent]]:
    async def main() -> tuple[Any, list[FromAgent]]:
        line = Line()
        waiting = asyncio.ensure_future(trainers_loss(line))
        await asyncio.sleep(0)
        for measured in answers:
            line.answered(measured.asked.gate, measured)
        return await asyncio.wait_for(waiting, 1.0), line.said

    return asyncio.run(main())


def test_the_trainer_is_asked_and_its_answer_is_the_loss() -> None:
    assert asked(answer(1)) == (2.5, [Measure(0, gate=1)])


def test_a_trainer_that_cannot_measure_has_no_loss() -> None:
    assert asked(answer(1, sequences=0))[0] is None


def test_an_answer_to_an_earlier_question_is_dropped() -> None:
    assert asked(answer(0, loss=9.0), answer(1), answer(1, loss=8.0))[0] == 2.5


def test_the_gate_of_a_peer_remembers_what_it_refused_before(tmp_path: Path) -> None:
    before = FragmentState.founded(bytes(32), 0, np.zeros(16, np.float32), 0)
    chain = before.chain.extended(Link(1, bytes([1]) * 32, 5))
    after = Standing(1, bytes([1]) * 32, chain, before.merged)
    losses = [2.0, 3.0]
    heard: list[str] = []

    class Still:
        states: tuple[FragmentState | None, ...] = (after.state(0, before.theta, before.momentum),)
        phases: tuple[Phase, ...] = (Phase.IDLE,)
        replaced: ClassVar[list[FragmentState]] = []

        async def replace_states(self, states: Sequence[FragmentState], *, reason: str) -> None:
            self.replaced.extend(states)

    class Trainer:
        async def ask(self, question: Callable[[int], Measure]) -> Measured:
            return answer(question(1).gate, loss=losses.pop(0))

        def holds(self, fragment: int) -> bool:
            return True

    class Hearing(Role):
        def note(self, name: str, fields: Fields) -> None:
            heard.append(name)

    async def live(*, jumps: bool) -> str | None:
        peer = peer_in(tmp_path, Hearing())
        gate = open_gate(peer, cast(SlotPort, Trainer()), cast(TrainerLine, Trainer()))
        assert gate is not None
        assert await gate.measure() is None, "a trainer that is not in the run yet is not asked"
        peer.phase = "ready"
        if jumps:
            await gate.before_jump(before, after)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(gate.run(Still()), 30.0)
        peer.log.close()
        return gate.refuses(0, chain)

    assert virtual(live(jumps=True)) is not None
    assert heard == ["jump_refused"] and Still.replaced == [before]
    assert virtual(live(jumps=False)) is not None
    assert [e["event"] for e in read_events(tmp_path / "events.jsonl") if "back_to" in e] == heard


@pytest.mark.parametrize(
    "run",
    [
        RunFile(evaluation=Evaluation(rise_max="off")),
        RunFile(outer=Outer(overlap_steps=0)),
    ],
    ids=["off", "synchronous"],
)
def test_a_run_may_have_no_gate(run: RunFile) -> None:
    class Local:
        run_file = run

    assert open_gate(cast(Any, Local()), cast(Any, None), cast(Any, None)) is None
