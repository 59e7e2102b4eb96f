"""The agent's side of the loss gate: questions to the trainer, and runs without a gate."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from peer.agent.loss_gate import TrainersLoss, open_gate
from peer.bridge.messages import Measure, Measured
from peer.bridge.trainer_line import TrainerLine
from peer.run_file.sections import Evaluation, Outer, RunFile


class Line:
    def __init__(self) -> None:
        self.said: list[Measure] = []

    def say(self, message: Measure) -> None:
        self.said.append(message)


def answer(gate: int, *, sequences: int = 7, loss: float = 2.5) -> Measured:
    return Measured(version=0, loss=loss, sequences=sequences, gate=gate)


def asked(*answers: Measured, ready: bool = True) -> tuple[Any, list[Measure]]:
    line = Line()
    loss = TrainersLoss(cast(TrainerLine, line), is_ready=lambda: ready)

    async def main() -> Any:
        waiting = asyncio.ensure_future(loss.measure())
        await asyncio.sleep(0)
        for each in answers:
            loss.heard(each)
        return await asyncio.wait_for(waiting, 1.0)

    return asyncio.run(main()), line.said


def test_the_trainer_is_asked_and_its_answer_is_the_loss() -> None:
    assert asked(answer(1)) == (2.5, [Measure(0, gate=1)])


def test_a_trainer_that_cannot_measure_has_no_loss() -> None:
    assert asked(answer(1, sequences=0))[0] is None


def test_an_answer_to_an_earlier_question_is_dropped() -> None:
    assert asked(answer(0, loss=9.0), answer(1), answer(1, loss=8.0))[0] == 2.5


def test_a_trainer_on_its_way_into_the_run_is_not_asked() -> None:
    assert asked(ready=False) == (None, [])


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
