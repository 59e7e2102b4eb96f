from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from dht.identity import PeerId
from peer.run_file.schedule import learning_rate
from peer.run_file.sections import (
    AdamwInner,
    End,
    Evaluation,
    GptModel,
    PythonStdlibData,
    RunFile,
    Schedule,
    SgdInner,
)
from peer.trainer.solo import SoloResult, train_alone

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


def train(cache: Path, run: RunFile = RUN, **settings: object) -> SoloResult:
    return train_alone(run, cache_dir=cache, data_dir=cache, **settings)  # type: ignore[arg-type]


def test_a_lone_learner_learns(cache: Path) -> None:
    result = train(cache, steps=40, measure_every=15)
    assert [m.step for m in result.measured] == [0, 15, 30, 40]
    assert [m.tokens for m in result.measured] == [0, 3840, 7680, 10240]
    assert result.loss_start == pytest.approx(np.log(256), abs=0.1)
    assert result.loss_end < 0.75 * result.loss_start


def test_the_same_run_gives_the_same_result(cache: Path) -> None:
    assert train(cache, steps=3).loss_end == pytest.approx(train(cache, steps=3).loss_end)


def test_another_shard_is_other_data(cache: Path) -> None:
    one = train(cache, steps=3, learners=[PeerId("a")])
    other = train(cache, steps=3, learners=[PeerId("b")])
    assert one.loss_end != other.loss_end


def test_learners_with_the_same_shard_are_one_learner(cache: Path) -> None:
    """The mean of equal gradients is the gradient: exactly one learner's step."""
    run = RunFile(
        model=RUN.model,
        data=RUN.data,
        inner=SgdInner(learning_rate=0.1, batch_size=8, clip_norm="off"),
        schedule=Schedule(shape="constant", warmup_tokens=0),
    )
    same = [PeerId("a")]
    alone = train(cache, run, steps=3, learners=same)
    four = train(cache, run, steps=3, learners=same * 4)
    for (name, p), q in zip(alone.model.named_parameters(), four.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, msg=name)
    assert [m.tokens for m in four.measured] == [4 * m.tokens for m in alone.measured]


@pytest.mark.parametrize(
    ("learners", "schedule_learners", "tokens"),
    [(1, None, [0, 256, 512]), (2, None, [0, 512, 1024]), (1, 4, [0, 1024, 2048])],
)
def test_the_rate_follows_the_tokens_of_the_given_number_of_learners(
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    learners: int,
    schedule_learners: int | None,
    tokens: list[int],
) -> None:
    asked: list[int] = []

    def rate(run: RunFile, global_tokens: int) -> float:
        asked.append(global_tokens)
        return learning_rate(run, global_tokens)

    monkeypatch.setattr("peer.trainer.solo.learning_rate", rate)
    train(cache, steps=3, learners=learners, schedule_learners=schedule_learners)
    assert asked == tokens


def test_numbers_below_one_are_refused(cache: Path) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        train(cache, steps=0)
    with pytest.raises(ValueError, match="at least 1"):
        train(cache, steps=1, learners=0)
