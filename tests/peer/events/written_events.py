"""Peers and a round that tests of event logs write."""

from __future__ import annotations

from typing import Any

ANNA, BORIS, CLARA = (f"12D3KooW{name * 8}" for name in ("Anna1", "Boris", "Clara"))
ROUND = "ab" * 32


def a_round(**changes: Any) -> dict[str, Any]:
    fields = {
        "fragment": 2,
        "round": ROUND,
        "kind": "merge",
        "version": 7,
        "outcome": "finished",
        "reason": "all merged slices are here",
        "leader": BORIS,
        "members": [ANNA, BORIS, CLARA],
        "contributors": [ANNA, BORIS],
        "marks": {ANNA: [1, 40, 24, 1536], BORIS: [1, 30, 12, 768]},
        "weights": [0.75, 0.25],
        "left_out": {CLARA: "not in every slice by the deadline"},
        "codec": "int4",
        "seconds": 1.5,
        "sent_bytes": 22_100,
        "received_bytes": 22_100,
        "contributed": True,
    }
    return fields | changes
