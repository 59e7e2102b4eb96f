"""Quantities as texts for people."""

from __future__ import annotations

from peer.quantities import bytes_text, count_text, duration_text


def test_quantities_are_short() -> None:
    assert [bytes_text(n) for n in (0, 999, 1_000, 1_234_567)] == [
        "0 B",
        "999 B",
        "1 kB",
        "1.23 MB",
    ]
    assert [duration_text(s) for s in (5, 65, 3_725)] == ["0:05", "1:05", "1:02:05"]
    assert [count_text(n) for n in (12, 1_500, 2_000_000)] == ["12", "1.5 k", "2 M"]
