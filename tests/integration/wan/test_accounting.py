"""Counting the bytes and the processor time of a trial."""

from __future__ import annotations

from tests.integration.wan.accounting import Used, counted_bytes, counting_rules


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
