"""The share of the displacement of late work that is uploaded."""

from __future__ import annotations

from averaging.rules.weights import uploaded_share


def test_work_of_several_cycles_is_uploaded_as_their_mean() -> None:
    assert [uploaded_share("per_cycle", staleness=versions) for versions in (0, 1, 3)] == [
        1.0,
        1 / 2,
        1 / 4,
    ]


def test_whole_work_is_uploaded_as_it_is() -> None:
    assert [uploaded_share("whole", staleness=versions) for versions in (0, 1, 3)] == [1.0] * 3
