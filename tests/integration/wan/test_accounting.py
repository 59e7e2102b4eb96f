"""Counting the bytes, the processor time and the use of the uplinks of a trial."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import pytest

from tests.integration.wan.accounting import (
    EVERY_S,
    Uploading,
    Used,
    counted_bytes,
    counting_rules,
)

LINE = 1000.0


def test_processor_time_is_told_by_kind_of_process() -> None:
    before = Used(10.0, 5.0, {"agents": 1.0, "others": 2.0})
    after = Used(20.0, 15.0, {"agents": 6.0, "daemons": 2.5, "others": 2.0})

    assert after.since(before).startswith("1.00 of ")
    assert after.since(before).endswith(" cores: daemons 0.25, agents 0.50")
    assert Used.now().busy_s > 0


def test_counters_are_read_from_the_output_of_nftables() -> None:
    listed = '{"nftables": [{"metainfo": {}}, {"counter": {"name": "lane", "bytes": 7}}]}'

    assert counted_bytes(listed) == {"lane": 7}
    assert "tcp dport 7700 counter name daemon return" in counting_rules(7700)


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
