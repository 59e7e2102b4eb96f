"""Trials of others' contributions by a trainer: what is read, measured, put back and answered."""

from __future__ import annotations

import time
from itertools import islice
from pathlib import Path
from threading import Event
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from averaging.history.readings import SEQUENCES_MAX, Reading
from dht.identity import PeerId
from peer.bridge.messages import HasRead, Tried, Try, decode_from_trainer
from peer.data.batches.sequences import Sequences
from peer.data.feed import Feed
from peer.run_file.sections import GptModel, Policy, PythonStdlibData, RunFile
from peer.trainer.trials import Trials
from tests.peer.trainer.learner_pair import Pair

AUTHOR = PeerId("boris")
FRAGMENT = 0
RUN = RunFile(
    model=GptModel(context=16),
    data=PythonStdlibData(sequence_length=16),
    policy=Policy(spot_checks=1.0),
)


@pytest.fixture(autouse=True)
def _home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path_factory.getbasetemp() / "trials-home"
    monkeypatch.setenv("XDG_DATA_HOME", str(home))


def feed(reader: str, run: RunFile = RUN) -> Feed:
    return Feed(run, PeerId(reader), data_dir=Path(), over=lambda: False)


def batches(reader: Feed, count: int, size: int = 3) -> list[Any]:
    return [batch.numpy() for batch in islice(reader.batches(None, size), count)]


class Bench:
    """A trainer with a small model, of another peer than the author, and its answers."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        self.pair = Pair(dtype=dtype)
        self.said: list[HasRead | Tried] = []
        self.trials = Trials(feed("anna"), self.pair.learner, self.said.append)
        self.states = [self.pair.now(FRAGMENT) + np.float32(k) for k in (1, 2)]
        self.path = folder / "states"
        self.path.write_bytes(np.concatenate(self.states).tobytes())
        self.measured: list[tuple[Any, np.ndarray]] = []

    def loss(self, sequences: Sequences) -> float:
        self.measured.append((sequences, self.pair.now(FRAGMENT)))
        return float(len(self.measured))

    def ask(self, reading: Reading, *, can: bool = True) -> Tried:
        asked = Try(
            number=7, path=str(self.path), fragment=FRAGMENT, author=AUTHOR, reading=reading
        )
        self.trials.begin(asked)
        deadline = time.monotonic() + 60.0
        while not self.said and time.monotonic() < deadline:
            self.trials.try_if_ready(self.loss if can else None)
            time.sleep(0.01)
        (answer,) = self.said
        assert isinstance(answer, Tried) and answer.number == 7
        return answer


def last_of_author(count: int = 3, size: int = 3) -> tuple[Reading, Any]:
    reader = feed(AUTHOR)
    read = batches(reader, count, size)
    assert reader.reading is not None
    return reader.reading, read[-1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_states_are_measured_on_the_authors_batch_and_the_own_one_is_put_back(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    bench = Bench(tmp_path, dtype)
    before = [p.detach().clone() for p in bench.pair.model.parameters()]
    reading, batch = last_of_author()
    answer = bench.ask(reading)
    assert answer.losses == (1.0, 2.0) and not answer.other_data
    for (sequences, held), state in zip(bench.measured, bench.states, strict=True):
        np.testing.assert_array_equal(sequences, batch)
        np.testing.assert_array_equal(held, torch.from_numpy(state).to(dtype).float().numpy())
    for now, then in zip(bench.pair.model.parameters(), before, strict=True):
        assert torch.equal(now, then)


def test_a_large_batch_is_measured_in_part(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    reading, batch = last_of_author(count=2, size=SEQUENCES_MAX + 5)
    assert reading.sequences == SEQUENCES_MAX, "no author makes others read more"
    assert bench.ask(reading).losses is not None
    np.testing.assert_array_equal(bench.measured[0][0], batch[:SEQUENCES_MAX])


def test_the_agent_understands_what_was_read_however_large_the_batches_are() -> None:
    reading, _ = last_of_author(count=1, size=5000)
    told = HasRead({1: reading})
    assert decode_from_trainer(msgspec.msgpack.encode(told)) == told


def test_parameters_are_put_back_and_training_goes_on_although_measuring_fails(
    tmp_path: Path,
) -> None:
    bench = Bench(tmp_path)
    before = bench.pair.now(FRAGMENT)

    def fails(sequences: Sequences) -> float:
        raise RuntimeError("out of memory")

    bench.trials.begin(
        Try(number=1, path=str(bench.path), fragment=0, author=AUTHOR, reading=last_of_author()[0])
    )
    deadline = time.monotonic() + 60.0
    while not bench.said and time.monotonic() < deadline:
        bench.trials.try_if_ready(fails)
    assert bench.said == [Tried(number=1)]
    np.testing.assert_array_equal(bench.pair.now(FRAGMENT), before)


def other(reading: Reading, **changes: Any) -> Reading:
    return msgspec.structs.replace(reading, **changes)


def test_a_batch_that_differs_from_the_authors_is_reported_and_not_measured(tmp_path: Path) -> None:
    reading, _ = last_of_author()
    for wrong in (
        other(reading, digest=bytes(32)),
        other(reading, position={**reading.position, "0/window": reading.position["0/window"] + 1}),
        other(reading, position={"elsewhere": 3}),
        other(reading, position={}),
    ):
        bench = Bench(tmp_path)
        assert bench.ask(wrong) == Tried(number=7, other_data=True)
        assert not bench.measured


def test_a_trainer_that_cannot_measure_says_so(tmp_path: Path) -> None:
    assert Bench(tmp_path).ask(last_of_author()[0], can=False) == Tried(number=7)


def test_while_one_batch_is_being_read_no_other_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, go_on = Bench(tmp_path), Event()
    reading, _ = last_of_author()
    read_as = Feed.read_as

    def slowly(self: Feed, *given: Any, **more: Any) -> Sequences:
        go_on.wait(60.0)
        return read_as(self, *given, **more)

    monkeypatch.setattr(Feed, "read_as", slowly)
    first, second = (
        Try(number=n, path=str(bench.path), fragment=0, author=AUTHOR, reading=reading)
        for n in (1, 2)
    )
    bench.trials.begin(first)
    bench.trials.try_if_ready(bench.loss)
    assert bench.said == []
    bench.trials.begin(second)
    assert bench.said == [Tried(number=2)]
    go_on.set()
    deadline = time.monotonic() + 60.0
    while len(bench.said) < 2 and time.monotonic() < deadline:
        bench.trials.try_if_ready(bench.loss)
    assert bench.said[1:] and isinstance(bench.said[1], Tried) and bench.said[1].number == 1


def test_states_that_are_gone_are_not_measured(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.path.unlink()
    assert bench.ask(last_of_author()[0]) == Tried(number=7)


@pytest.mark.parametrize("values", [1, 10])
def test_states_of_another_size_are_not_measured(tmp_path: Path, values: int) -> None:
    """The agent may be writing those of the next trial."""
    bench = Bench(tmp_path)
    before = bench.pair.now(FRAGMENT)
    bench.path.write_bytes(np.ones(values, np.float32).tobytes())
    assert bench.ask(last_of_author()[0]) == Tried(number=7)
    assert not bench.measured
    np.testing.assert_array_equal(bench.pair.now(FRAGMENT), before)


@pytest.mark.parametrize("error", [MemoryError(), OSError("disk full"), RuntimeError("of a codec")])
def test_no_error_of_reading_anothers_data_ends_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fails(self: Feed, *given: Any, **more: Any) -> Sequences:
        raise error

    reading, _ = last_of_author()
    monkeypatch.setattr(Feed, "read_as", fails)
    assert Bench(tmp_path).ask(reading) == Tried(number=7)


def test_the_agent_is_told_what_was_read_for_each_step(tmp_path: Path) -> None:
    pair = Pair()
    said: list[HasRead | Tried] = []
    reader = feed(AUTHOR)
    trials = Trials(reader, pair.learner, said.append)
    taken = reader.batches(None, 3)
    for step in range(1, 200):
        next(taken)
        trials.note(step, judges=True)
    told = {
        step: reading
        for message in said
        if isinstance(message, HasRead)
        for step, reading in message.steps.items()
    }
    assert sorted(told) == list(range(1, len(told) + 1)) and len(told) > 100
    assert len(said) < 10 and all(
        isinstance(message, HasRead) and message.judges for message in said
    )
    assert told[5] is not None and told[5].position["sequence"] == 12


def test_own_data_is_no_reading_and_without_checks_nothing_is_noted() -> None:
    reader = feed(AUTHOR)
    next(iter(reader.batches([1, 2, 3], None)))
    assert reader.reading is None
    plain = feed(AUTHOR, RunFile(model=GptModel(context=16), data=RUN.data))
    batches(plain, 2)
    assert plain.reading is None
