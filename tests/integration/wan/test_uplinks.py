"""The times that count as an upload, and the share of the line that it used."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import pytest

from tests.integration.wan.uplinks import EVERY_S, Uploading

LINE = 1000.0


def counts(*shares: float) -> Sequence[tuple[float, int]]:
    """Counters of a line of which these shares were used, one after the other."""
    sums = accumulate((share * LINE * EVERY_S for share in shares), initial=0.0)
    return [(index * EVERY_S, round(total)) for index, total in enumerate(sums)]


def test_the_time_between_two_exchanges_does_not_count() -> None:
    found = Uploading.of(counts(0.0, 0.8, 1.0, 0.02, 0.02, 0.02, 0.6, 0.0), LINE)
    assert found.time_share == pytest.approx(3 / 8)
    assert found.line_share == pytest.approx(0.8, abs=0.01)


def test_a_short_pause_within_an_upload_counts() -> None:
    found = Uploading.of(counts(0.0, 0.8, 1.0, 0.0, 0.0, 1.0, 0.0), LINE)
    assert found.time_share == pytest.approx(5 / 7)
    assert found.line_share == pytest.approx(2.8 / 5, abs=0.01)


def test_a_line_without_uploads_was_never_used() -> None:
    assert Uploading.of(counts(0.0, 0.05, 0.0), LINE) == Uploading(0.0, 0.0)
    assert Uploading.of([], LINE) == Uploading(0.0, 0.0)
