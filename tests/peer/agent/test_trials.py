"""The agent's side of spot checks: its trainer is asked, and answers for itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from averaging.audit.readings import Reading
from averaging.live.checks.spot_checking import Losses, OtherData, Trial
from dht.identity import PeerId
from dht.memory.virtual_loop import run as virtual
from peer.agent.trials import READ_WITHIN_S, STATES, TRIED_WITHIN_S, TrainersTrials
from peer.bridge.messages import FromAgent, HasRead, Tried, Try
from peer.bridge.trainer_line import TrainerLine

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
