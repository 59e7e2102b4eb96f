from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peer.run_file.reading import with_settings
from peer.run_file.schedule import Rates, learning_rate
from peer.run_file.sections import AdamwInner, End, RunFile, Schedule


def run(shape: str, *, end: int = 1000, warmup: int = 100, final: float = 0.1) -> RunFile:
    return RunFile(
        inner=AdamwInner(learning_rate=2.0),
        schedule=Schedule(shape=shape, warmup_tokens=warmup, final_fraction=final),  # type: ignore[arg-type]
        end=End(tokens=end),
    )


@pytest.mark.parametrize(
    ("shape", "tokens", "rate"),
    [
        ("cosine", 0, 0.02),
        ("cosine", 1, 0.02),
        ("cosine", 50, 1.0),
        ("cosine", 99, 1.98),
        ("cosine", 100, 2.0),
        ("cosine", 550, 1.1),
        ("cosine", 1000, 0.2),
        ("cosine", 5000, 0.2),
        ("linear", 100, 2.0),
        ("linear", 325, 1.55),
        ("linear", 1000, 0.2),
        ("linear", 1001, 0.2),
        ("constant", 99, 1.98),
        ("constant", 100, 2.0),
        ("constant", 10**12, 2.0),
    ],
)
def test_the_rate_follows_its_shape(shape: str, tokens: int, rate: float) -> None:
    assert learning_rate(run(shape), tokens) == pytest.approx(rate)


def test_without_a_warm_up_the_rate_starts_at_the_peak() -> None:
    assert learning_rate(run("cosine", warmup=0), 0) == 2.0


@given(st.sampled_from(["cosine", "linear"]), st.integers(0, 2000), st.integers(0, 2000))
def test_after_the_warm_up_the_rate_never_rises(shape: str, one: int, other: int) -> None:
    early, late = sorted((one + 100, other + 100))
    assert learning_rate(run(shape), early) >= learning_rate(run(shape), late)


@given(st.sampled_from(["cosine", "linear", "constant"]), st.integers(0, 1 << 62))
def test_the_rate_is_always_positive_and_at_most_the_peak(shape: str, tokens: int) -> None:
    assert 0 < learning_rate(run(shape), tokens) <= 2.0


def test_an_amended_run_sets_the_rates_of_its_optimizers_from_then_on() -> None:
    optimizer = SimpleNamespace(param_groups=[{"lr": 1.0}, {"lr": 0.5}])
    rates = Rates(run("constant"))
    rates.follow(optimizer)
    rates.set(500)
    assert [group["lr"] for group in optimizer.param_groups] == [2.0, 1.0]
    rates.run_now = with_settings(run("constant"), {"inner.learning_rate": 0.5})
    rates.set(500)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.25]
    rates.set(500, rate=0.1)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.05]


def test_a_group_that_is_added_later_keeps_its_proportion() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    rates = Rates(run("constant"))
    rates.follow(optimizer)
    rates.set(500)
    optimizer.add_param_group({"params": [torch.zeros(2)], "lr": 0.25})
    for tokens, first in ((500, 2.0), (50, 1.0)):
        rates.set(tokens)
        assert [group["lr"] for group in optimizer.param_groups] == [first, 0.25 * first]


def test_a_negative_count_is_refused() -> None:
    with pytest.raises(ValueError, match="-1"):
        learning_rate(run("cosine"), -1)
