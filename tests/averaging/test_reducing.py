"""What a reducer without a contribution of its own makes of uploads that are out of proportion."""

from __future__ import annotations

import itertools
import math

from averaging.reducing import Reducer

RATIO = 1000.0


def outlying(norms: dict[int, float], order: tuple[int, ...] | None = None) -> dict[int, str]:
    reducer = Reducer([0], norm_ratio_max=RATIO)
    for sender in order or tuple(norms):
        assert reducer.arrived(0, sender, None, norms[sender])
    return reducer.outlying(0)


def test_an_upload_far_longer_than_the_others_is_outlying_in_whatever_order_they_come() -> None:
    norms = {0: 1.0, 1: 1e9, 2: 3.0, 3: 0.5}

    for order in itertools.permutations(norms):
        found = outlying(norms, order)
        assert found.keys() == {1}
        assert found[1] == "its norm is 1e+09 times the others' median; at most 1000"


def test_a_thousand_times_is_not_too_much_and_more_is() -> None:
    assert not outlying({0: 1.0, 1: 1000.0, 2: 1.0})
    assert outlying({0: 1.0, 1: 1001.0, 2: 1.0}).keys() == {1}


def test_of_two_the_longer_one_is_left_out_and_a_lone_one_is_taken() -> None:
    assert outlying({0: 1.0, 1: 1e6}).keys() == {1}
    assert not outlying({1: 1e6})


def test_a_minority_cannot_make_the_others_look_absurd() -> None:
    assert outlying({0: 1.0, 1: 2.0, 2: 1.0, 3: 1e12, 4: 1e13}).keys() == {3, 4}
    assert not outlying({0: 1.0, 1: 2.0, 2: 1.0, 3: 1e-15, 4: 0.0})


def test_who_has_no_bound_or_nobody_to_compare_with_has_no_opinion() -> None:
    reducer = Reducer([0], norm_ratio_max=math.inf)
    for sender, norm in enumerate((1.0, 1e30)):
        reducer.arrived(0, sender, None, norm)

    assert not reducer.outlying(0)
    assert not outlying({0: 0.0, 1: 0.0, 2: 5.0}), "of nothing, anything is a multiple"


def test_a_refused_upload_is_compared_with_nothing() -> None:
    reducer = Reducer([0], norm_ratio_max=RATIO)
    reducer.arrived(0, 0, "its upload broke off", 1e30)
    reducer.arrived(0, 1, None, 1.0)
    reducer.arrived(0, 2, None, 1.0)

    assert not reducer.outlying(0)
    assert reducer.slices[0].refused == {0: "its upload broke off"}
