"""Verdicts outlive proofs, and proofs take a bounded number of bytes, whatever convicts itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest

from averaging.guard import kept_proofs
from averaging.guard.kept_proofs import PROOFS_MAX, KeptProofs, Verdict
from averaging.guard.rules.proofs import FalseMerge, Guilty, Proof
from dht.identity import Identity, PeerId, RunId
from dht.memory.host import identity_of
from peer.storage.proofs import ProofFolder
from tests.averaging.guard.rules.audited_rounds import heads_of_proofs, two_votes

LIAR = identity_of("liar")
RUN = RunId("run")


class Folder:
    """A peer that keeps what it learns in a folder, and may begin again from it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.shelf = ProofFolder(path, RUN)
        self.worth = Counter({LIAR.peer_id: 5})
        self.failed: list[tuple[PeerId, str]] = []
        self._work: list[Coroutine[Any, Any, None]] = []

    def kept(self) -> KeptProofs:
        return KeptProofs(self.worth.__getitem__, self.shelf, self._spawn, self._not_written)

    def _spawn(self, work: Coroutine[Any, Any, None], _: str) -> None:
        self._work.append(work)

    def _not_written(self, peer: PeerId, reason: str) -> None:
        self.failed.append((peer, reason))

    async def written(self) -> None:
        while self._work:
            await self._work.pop()

    @property
    def proof_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.path.rglob("*.proof"))


def convicted(key: Identity, data: bytes = b"") -> tuple[Guilty, Proof]:
    """Any key can sign what convicts it."""
    guilty = Guilty(key.peer_id, "signed two seals in ballot 0")
    return guilty, Proof(two_votes((0,), key), data)


def cheap(number: int) -> Identity:
    return Identity.from_seed(number.to_bytes(4, "big") + b"y" * 28)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


async def test_keys_that_convict_themselves_do_not_have_a_liar_forgotten(folder: Folder) -> None:
    """256 of them had its proof removed from the folder, and after a restart it was a member."""
    kept = folder.kept()
    kept.keep(*convicted(LIAR))
    for number in range(PROOFS_MAX + 20):
        kept.keep(*convicted(cheap(number)))
    await folder.written()
    assert len(kept.proofs) <= PROOFS_MAX

    again = folder.kept()
    assert again.verdicts[LIAR.peer_id].what == "signed two seals in ballot 0"
    proof = await again.read(again.verdicts[LIAR.peer_id].proof)
    assert proof is not None and proof.digest == convicted(LIAR)[1].digest


async def test_a_verdict_about_a_peer_that_counted_stays_when_all_is_full(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_proofs, "VERDICTS_MAX", 20)
    kept = folder.kept()
    kept.keep(*convicted(LIAR))
    await folder.written()
    folder.worth.clear()  # a peer that begins again has seen nobody's work
    again = folder.kept()
    for number in range(40):
        again.keep(*convicted(cheap(number)))
    await folder.written()
    assert LIAR.peer_id in folder.kept().verdicts
    assert 10 < len(folder.kept().verdicts) <= 20


async def test_large_proofs_take_64_mb_in_memory_and_in_the_folder_together(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four keys took 285 MB of each, and once more after a restart."""
    monkeypatch.setattr(kept_proofs, "PROOFS_BYTES_MAX", budget := 64 << 10)
    kept = folder.kept()
    kept.keep(*convicted(LIAR, bytes(30 << 10)))
    for number in range(4):
        kept.keep(*convicted(cheap(number), bytes(30 << 10)))
        await folder.written()
        assert folder.proof_bytes <= budget
        assert all(each.proof is None for each in kept.proofs.values())
    kept.keep(*convicted(cheap(9), bytes(budget)))
    await folder.written()
    assert kept.proofs.bytes_held <= budget and folder.proof_bytes <= budget
    again = folder.kept()
    assert len(again.verdicts) == 6
    assert LIAR.peer_id in {each.about for each in again.proofs.values()}


async def test_a_proof_that_cannot_be_shown_is_not_named(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each peer that asked for it held its size against who had convicted rightly."""
    monkeypatch.setattr(kept_proofs, "PROOFS_BYTES_MAX", budget := 64 << 10)
    head = next(head for head in heads_of_proofs() if isinstance(head, FalseMerge))
    large = Proof(head, bytes(budget))
    kept = folder.kept()
    kept.keep(Guilty(LIAR.peer_id, "merged slice 0 falsely"), large)
    await folder.written()
    assert not kept.proofs and LIAR.peer_id in folder.kept().verdicts


def _flip(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize("damage", [_flip, lambda data: data[:20], lambda data: b""])
async def test_a_damaged_proof_is_not_shown_and_the_verdict_stands(
    folder: Folder, damage: Callable[[bytes], bytes]
) -> None:
    kept = folder.kept()
    kept.keep(*convicted(LIAR, b"data"))
    await folder.written()
    (path,) = folder.path.rglob("*.proof")
    path.write_bytes(damage(path.read_bytes()))
    again = folder.kept()
    name = again.verdicts[LIAR.peer_id].proof
    assert await again.read(name) is None and not again.proofs
    assert again.has_convicted_by(name)


async def test_what_cannot_be_written_stays_in_memory_and_is_written_with_the_next(
    folder: Folder,
) -> None:
    blocked = folder.path / "proofs"
    blocked.touch()
    kept = folder.kept()
    kept.keep(*convicted(LIAR))
    await folder.written()
    assert [peer for peer, _ in folder.failed] == [LIAR.peer_id]
    assert await kept.read(convicted(LIAR)[1].digest) is not None
    blocked.unlink()
    kept.keep(*convicted(cheap(1)))
    await folder.written()
    assert folder.kept().verdicts.keys() == kept.verdicts.keys()
    assert len(folder.kept().proofs) == 2


async def test_verdicts_of_another_run_or_of_a_damaged_file_are_none(folder: Folder) -> None:
    kept = folder.kept()
    kept.keep(*convicted(LIAR))
    await folder.written()
    assert ProofFolder(folder.path, RunId("another")).verdicts() == []
    (folder.path / "proofs" / "verdicts").write_bytes(b"\x92\xa3run")
    assert folder.shelf.verdicts() == []


def test_a_verdict_takes_some_hundred_bytes() -> None:
    verdict = Verdict(LIAR.peer_id, "merged slice 0 falsely", bytes(32), 5.0)
    assert len(msgspec.msgpack.encode(verdict)) < 150
