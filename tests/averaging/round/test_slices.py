"""A reducer and uploads whose norm is out of proportion."""

from __future__ import annotations

import itertools
import math

import numpy as np

from averaging.numbers.arrays import Float64s
from averaging.round.slices import Reducer
from averaging.rules.usual_norms import (
    MERGED_SLACK,
    MERGES_KEPT,
    MERGES_MIN,
    UploadNorm,
    UsualNorms,
    norm_objection,
)

RATIO = 50.0


def outlying(
    norms: dict[int, float],
    order: tuple[int, ...] | None = None,
    *,
    usual: float | None = None,
    harmless: float = 0.0,
) -> dict[int, str]:
    reducer = Reducer([0], norm_ratio_max=RATIO)
    for sender in order or tuple(norms):
        assert reducer.arrived(0, sender, None, UploadNorm(norms[sender], usual, harmless))
    return reducer.outlying(0)


def test_the_riders_of_an_upload_are_those_of_the_stream_that_brought_it() -> None:
    """A second stream of the same member named others: the merge then left these out, and its
    reducer, which had signed that they were in it, was convicted of a false merge."""
    reducer = Reducer([0])
    assert reducer.arrived(0, 1, None)
    assert not reducer.arrived(0, 1, None, riders=(2, 3))
    assert not reducer.slices[0].bundles


def test_an_upload_far_longer_than_the_others_is_outlying_in_any_order_of_arrival() -> None:
    norms = {0: 1.0, 1: 1e9, 2: 3.0, 3: 0.5}

    for order in itertools.permutations(norms):
        found = outlying(norms, order)
        assert found.keys() == {1}
        assert found[1] == "its norm is 1e+09 times what is usual; at most 50"


def test_fifty_times_the_usual_norm_is_taken_and_more_is_not() -> None:
    assert not outlying({0: 1.0, 1: 50.0, 2: 1.0})
    assert outlying({0: 1.0, 1: 51.0, 2: 1.0}).keys() == {1}


def test_of_two_uploads_the_longer_one_is_left_out_and_a_single_one_is_taken() -> None:
    assert outlying({0: 1.0, 1: 1e6}).keys() == {1}
    assert not outlying({1: 1e6})


def test_a_minority_cannot_make_the_others_outlying() -> None:
    assert outlying({0: 1.0, 1: 2.0, 2: 1.0, 3: 1e12, 4: 1e13}).keys() == {3, 4}
    assert not outlying({0: 1.0, 1: 2.0, 2: 1.0, 3: 1e-15, 4: 0.0})


def test_without_a_bound_or_a_usual_norm_no_upload_is_outlying() -> None:
    reducer = Reducer([0], norm_ratio_max=math.inf)
    for sender, norm in enumerate((1.0, 1e30)):
        reducer.arrived(0, sender, None, UploadNorm(norm))

    assert not reducer.outlying(0)
    assert not outlying({0: 0.0, 1: 0.0, 2: 5.0}), "of nothing, anything is a multiple"


def test_a_refused_upload_is_compared_with_nothing() -> None:
    reducer = Reducer([0], norm_ratio_max=RATIO)
    reducer.arrived(0, 0, "its upload broke off", UploadNorm(1e30))
    reducer.arrived(0, 1, None, UploadNorm(1.0))
    reducer.arrived(0, 2, None, UploadNorm(1.0))

    assert not reducer.outlying(0)
    assert reducer.slices[0].refused == {0: "its upload broke off"}


def test_in_a_pair_the_peer_at_work_is_compared_with_recent_merges_not_with_a_newcomer() -> None:
    assert outlying({0: 0.01, 1: 3.0}).keys() == {1}, "of which nothing but the newcomer is known"
    assert not outlying({0: 0.01, 1: 3.0}, usual=1.0)
    assert outlying({0: 0.01, 1: 51.0}, usual=1.0).keys() == {1}


def test_among_a_majority_of_newcomers_the_peer_at_work_is_not_outlying() -> None:
    assert not outlying({0: 0.01, 1: 0.02, 2: 3.0}, usual=1.0)


def test_during_a_warm_up_from_zero_an_honest_peer_that_is_further_is_taken() -> None:
    # A swarm's first round: two have made their first steps at a rate near zero, one is 346 times
    # further, and theta is much longer than all of that.
    assert not outlying({0: 1e-4, 1: 1e-4, 2: 0.0346}, harmless=1.0)
    assert not outlying({0: 1e-4, 1: 0.0346}, harmless=1.0)


def test_before_a_norm_is_usual_no_upload_may_be_longer_than_theta() -> None:
    # A poison a thousand times longer than honest work, which is a hundredth of theta or so.
    assert outlying({0: 0.01, 1: 0.01, 2: 10.0}, harmless=1.0).keys() == {2}
    assert outlying({0: 0.01, 1: 10.0}, harmless=1.0).keys() == {1}


def test_a_thousandfold_poison_of_a_peer_that_did_little_is_refused() -> None:
    # Half of it passed when the bound was a thousand times the reducer's own displacement.
    for done in (1.0, 0.5, 0.1):
        assert outlying({0: 1.0, 1: 2.0, 2: 1000 * done}, usual=0.7).keys() == {2}
        assert outlying({0: 1.0, 1: 1000 * done}, usual=0.7).keys() == {1}


# What is usual


def units(*norms: float) -> Float64s:
    return np.square(np.array(norms))


def test_the_usual_norm_is_known_after_a_few_merges_and_for_any_range_of_units() -> None:
    usual = UsualNorms()
    for _ in range(MERGES_MIN):
        assert usual.norm(slice(0, 2)) is None
        usual.merged(units(3.0, 4.0, 12.0))

    assert usual.norm(slice(0, 2)) == 5.0
    assert usual.norm(slice(0, 3)) == 13.0
    assert usual.norm(slice(2, 2)) == 0.0


def test_a_few_odd_merges_do_not_change_the_usual_norm_and_many_do() -> None:
    usual = UsualNorms()
    for _ in range(MERGES_KEPT):
        usual.merged(units(1.0))
    for _ in range(MERGES_KEPT // 2):
        usual.merged(units(1000.0))
    assert usual.norm(slice(0, 1)) == 1.0

    usual.merged(units(1000.0))
    assert usual.norm(slice(0, 1)) == 1000.0


def test_a_merged_slice_is_held_to_the_bound_of_uploads_with_some_slack() -> None:
    allowed = MERGED_SLACK * RATIO * 3.0

    assert norm_objection(allowed, usual=3.0, own=0.0, theta=0.0, norm_ratio_max=RATIO) is None
    assert norm_objection(1.01 * allowed, usual=3.0, own=0.0, theta=0.0, norm_ratio_max=RATIO) == (
        "the merged slice has a norm of 303; at most 300 is plausible"
    )
    assert norm_objection(1e30, usual=0.0, own=0.0, theta=5.0, norm_ratio_max=RATIO)


def test_a_merged_slice_no_longer_than_theta_or_of_which_nothing_is_known_is_taken() -> None:
    assert norm_objection(5.0, usual=1e-3, own=0.0, theta=5.0, norm_ratio_max=RATIO) is None
    assert norm_objection(1e30, usual=0.0, own=0.0, theta=0.0, norm_ratio_max=RATIO) is None


def test_until_something_is_usual_a_merged_slice_may_be_a_multiple_of_theta() -> None:
    allowed = RATIO * 5.0

    assert norm_objection(allowed, usual=None, own=0.0, theta=5.0, norm_ratio_max=RATIO) is None
    assert norm_objection(1.01 * allowed, usual=None, own=0.0, theta=5.0, norm_ratio_max=RATIO)
    assert (
        norm_objection(1.01 * allowed, usual=None, own=3.0, theta=5.0, norm_ratio_max=RATIO) is None
    )
