"""The weight of a contribution, and the cap on shares."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from averaging.rules.weights import Contribution, clamped, shares_of, uploaded_share


def work(tokens: int, steps: int = 10, staleness: int = 0) -> Contribution:
    return Contribution(tokens=tokens, steps=steps, staleness=staleness)


some_work = st.builds(
    Contribution,
    tokens=st.integers(0, 10**12),
    steps=st.integers(0, 10**6),
    staleness=st.integers(0, 30),
)


def test_equal_work_weighs_the_same() -> None:
    assert shares_of([work(100)] * 4) == (0.25, 0.25, 0.25, 0.25)


def test_weight_is_quantity_times_quality() -> None:
    # 100 tokens in 10 steps: 1000; 200 in 10: 4000; 200 in 40: 1000.
    assert shares_of([work(100), work(200), work(200, 40), work(200), work(200)]) == pytest.approx(
        [1 / 14, 4 / 14, 1 / 14, 4 / 14, 4 / 14]
    )


def test_staleness_damps() -> None:
    fresh, stale = shares_of([work(100), work(100, staleness=4)])

    assert fresh == pytest.approx(2 / 3)
    assert stale == pytest.approx(1 / 3)


def test_tokens_beyond_the_largest_batch_are_not_believed() -> None:
    assert clamped(10**9, steps=10, batch_tokens_max=64) == 640
    assert clamped(639, steps=10, batch_tokens_max=64) == 639
    assert clamped(-5, steps=10, batch_tokens_max=64) == 0
    liar, honest = shares_of([work(10**9), work(640)], batch_tokens_max=64)
    assert liar == honest == 0.5


def test_nobody_weighs_more_than_twice_an_equal_share_or_a_third() -> None:
    assert shares_of([work(1000), work(1)]) == pytest.approx([1, 0], abs=1e-5)
    assert shares_of([work(10**6), work(10), work(10), work(10)])[0] == 0.5
    assert shares_of([work(10**6), *[work(10)] * 7])[0] == 1 / 3
    assert shares_of([work(10**6), *[work(10)] * 15])[0] == 1 / 3


def test_two_fast_members_among_many_slow_ones_keep_the_weight_of_their_work() -> None:
    shares = shares_of([*[work(1000, 10)] * 2, *[work(100, 1)] * 10])
    assert shares == pytest.approx([1 / 3] * 2 + [1 / 30] * 10)


def test_the_excess_over_the_cap_goes_to_the_rest_in_proportion() -> None:
    # The first is cut to 1/3; that would lift the second above, so it is cut too.
    first, second, *others = shares_of([work(1000, 1), work(100, 1), *[work(10, 1)] * 14])

    assert (first, second) == (1 / 3, 1 / 3)
    assert others == pytest.approx([1 / 3 / 14] * 14)


def test_a_contribution_without_work_weighs_nothing() -> None:
    assert shares_of([work(100), work(0), work(100), Contribution(tokens=5, steps=0)]) == (
        0.5,
        0.0,
        0.5,
        0.0,
    )


def test_without_any_work_all_weigh_the_same() -> None:
    assert shares_of([work(0), work(0)]) == (0.5, 0.5)
    assert shares_of([]) == ()


def test_few_workers_among_many_idle_ones_still_make_a_whole() -> None:
    shares = shares_of([work(100), work(100), *[work(0)] * 14])
    assert shares[:2] == (0.5, 0.5)


@given(st.lists(some_work, min_size=1, max_size=20))
def test_shares_sum_to_one_and_respect_the_cap(claims: list[Contribution]) -> None:
    shares = shares_of(claims)
    working = sum(1 for c in claims if c.tokens and c.steps) or len(claims)

    assert sum(shares) == pytest.approx(1)
    assert min(shares) >= 0
    assert max(shares) <= max(2 / working, 1 / 3) * (1 + 1e-12)


@given(st.lists(some_work, min_size=1, max_size=12), st.randoms())
def test_a_share_depends_on_the_work_and_not_on_the_place(claims, rng) -> None:  # type: ignore[no-untyped-def]
    order = list(range(len(claims)))
    rng.shuffle(order)
    shares = shares_of(claims)

    assert shares_of([claims[i] for i in order]) == tuple(shares[i] for i in order)


def test_work_of_several_cycles_is_uploaded_as_their_mean() -> None:
    assert [uploaded_share("per_cycle", staleness=versions) for versions in (0, 1, 3)] == [
        1.0,
        1 / 2,
        1 / 4,
    ]


def test_whole_work_is_uploaded_as_it_is() -> None:
    assert [uploaded_share("whole", staleness=versions) for versions in (0, 1, 3)] == [1.0] * 3
