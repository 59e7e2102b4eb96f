"""One learner without a run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from peer.demo.report import train_alone
from peer.run_file.schedule import learning_rate
from peer.run_file.sections import (
    AdamwInner,
    End,
    Evaluation,
    GptModel,
    PythonStdlibData,
    RunFile,
    Schedule,
)

RUN = RunFile(
    model=GptModel(layers=1, width=32, heads=2, context=32),
    data=PythonStdlibData(sequence_length=32),
    inner=AdamwInner(learning_rate=1e-2, batch_size=8),
    schedule=Schedule(warmup_tokens=1000),
    evaluation=Evaluation(sequences=64),
    end=End(tokens=40 * 8 * 32),
)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


def test_a_lone_learner_learns(cache: Path) -> None:
    before, after = train_alone(RUN, steps=40, cache_dir=cache, data_dir=cache)
    assert before == pytest.approx(np.log(256), abs=0.1)
    assert after < 0.75 * before


def test_the_same_run_gives_the_same_result(cache: Path) -> None:
    one, other = (train_alone(RUN, steps=3, cache_dir=cache, data_dir=cache) for _ in range(2))
    assert one == pytest.approx(other)


@pytest.mark.parametrize(("learners", "tokens"), [(1, [0, 256, 512]), (4, [0, 1024, 2048])])
def test_the_rate_follows_the_tokens_of_the_given_number_of_learners(
    cache: Path, monkeypatch: pytest.MonkeyPatch, learners: int, tokens: list[int]
) -> None:
    asked: list[int] = []

    def rate(run: RunFile, global_tokens: int) -> float:
        asked.append(global_tokens)
        return learning_rate(run, global_tokens)

    monkeypatch.setattr("peer.demo.report.learning_rate", rate)
    train_alone(RUN, steps=3, learners=learners, cache_dir=cache, data_dir=cache)
    assert asked == tokens
