"""The file of refused histories."""

from __future__ import annotations

from pathlib import Path

import pytest

from averaging.guard.rules.loss_gate import Refusals
from peer.storage.proofs import REFUSED_FILE, keep_refusals, kept_refusals


def test_refusals_outlive_a_restart(tmp_path: Path) -> None:
    refusals = Refusals()
    refusals.refuse([(0, 20, bytes(32)), (3, 21, bytes([1] * 32))])
    refusals.refuse([(0, 40, bytes([2] * 32))])
    keep_refusals(tmp_path / "peer", refusals)

    kept = kept_refusals(tmp_path / "peer")
    assert kept.all == refusals.all and len(kept) == 3
    assert kept.in_a_row == {0: 2, 3: 1}


@pytest.mark.parametrize("data", [None, b"", b"{", b'{"in_a_row": 1}', b"[]", b"\xff"])
def test_a_missing_or_damaged_file_refuses_nothing(tmp_path: Path, data: bytes | None) -> None:
    if data is not None:
        (tmp_path / REFUSED_FILE).write_bytes(data)
    assert len(kept_refusals(tmp_path)) == 0
