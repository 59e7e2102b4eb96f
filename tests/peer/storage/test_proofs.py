"""Proofs in a peer's folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from averaging.audit.proofs import check
from dht.identity import PeerId
from peer.storage import proofs
from peer.storage.proofs import FOLDER, keep_proof, kept_proofs
from tests.averaging.audit.audited_rounds import COURT, REDUCER, WHO, Round, commit_of

ACCUSED = WHO[REDUCER].peer_id


def test_a_proof_is_read_as_it_was_kept_and_still_convicts(tmp_path: Path) -> None:
    round_ = Round(commit_of())
    right = round_.right()
    false = right[:39] + bytes([right[39] ^ 1]) + right[40:]
    proof = round_.proof(round_.audit(false))

    assert kept_proofs(tmp_path) == []
    keep_proof(tmp_path, ACCUSED, proof)
    keep_proof(tmp_path, ACCUSED, proof)
    (kept,) = kept_proofs(tmp_path)
    assert kept.digest == proof.digest
    assert check(kept, COURT).peer == ACCUSED


def test_so_many_proofs_are_kept_and_the_newest_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proofs, "PROOFS_MAX", 2)
    round_ = Round(commit_of())
    proof = round_.proof(round_.audit(bytes(len(round_.right()))))
    for peer in ("c", "a", "b"):
        keep_proof(tmp_path, PeerId(peer), proof)
    assert {path.stem for path in (tmp_path / FOLDER).iterdir()} == {"a", "b"}


def test_files_that_are_damaged_convict_nobody(tmp_path: Path) -> None:
    folder = tmp_path / FOLDER
    folder.mkdir()
    for number, data in enumerate((b"", b"\0\0", b"\xff" * 4, b"\0\0\0\x02\x01\x90", bytes(99))):
        (folder / f"{number}.proof").write_bytes(data)

    assert kept_proofs(tmp_path) == []
