"""Proofs against other peers, kept in the own peer's folder so that they outlive a restart.

One file has the verdicts. Each proof that can still be shown is a file of its own, which begins
with its digest: a damaged one is as good as none, and the verdict stands without it. The histories
that this peer has gone back from (``averaging.guard.rules.loss_gate``) are one file. A damaged one
is as good as none: then the loss is measured once more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from pathlib import Path
from typing import Annotated

import blake3
import msgspec
from msgspec import Meta

from averaging.guard.door import VERDICTS_MAX, Proof, Refusals, Refused, Verdict, decode_head
from averaging.messages import BadMessage
from dht.decoding import UNDECODABLE
from dht.identity import RunId
from dht.whole_files import read_json, write_whole

FOLDER = "proofs"
VERDICTS_FILE = "verdicts"
REFUSED_FILE = "refused.json"
_DIGEST_BYTES = 32
_SIZE_BYTES = 4


class _Verdicts(msgspec.Struct, frozen=True, array_like=True):
    run: str
    all: Annotated[tuple[Verdict, ...], Meta(max_length=VERDICTS_MAX)]


_decoder = msgspec.msgpack.Decoder(_Verdicts)


class ProofFolder:
    """The proofs and verdicts of one run in a peer's folder: an
    ``averaging.guard.kept_proofs.ProofShelf``."""

    def __init__(self, folder: Path, run: RunId) -> None:
        self._folder = folder / FOLDER
        self._run = run

    def __repr__(self) -> str:
        return f"ProofFolder({self._folder})"

    def verdicts(self) -> list[Verdict]:
        try:
            verdicts = _decoder.decode((self._folder / VERDICTS_FILE).read_bytes())
        except (OSError, *UNDECODABLE):
            return []
        return list(verdicts.all) if verdicts.run == self._run else []

    def sizes(self) -> dict[bytes, int]:
        """The size of each proof that is there, by name."""
        sizes = {}
        for path in self._folder.glob("*.proof"):
            try:
                sizes[bytes.fromhex(path.stem)] = path.stat().st_size
            except (OSError, ValueError):
                continue
        return sizes

    def write(
        self, verdicts: Iterable[Verdict], kept: Set[bytes], new: Mapping[bytes, Proof]
    ) -> None:
        """Remove all proofs but ``kept``, add the new ones, and write the verdicts. Raises
        ``OSError``."""
        all_ = msgspec.msgpack.encode(_Verdicts(self._run, tuple(verdicts)))
        write_whole(self._folder / VERDICTS_FILE, all_)
        kept_files = {self._file(name) for name in kept}
        for path in self._folder.glob("*.proof"):
            if path not in kept_files:
                path.unlink(missing_ok=True)
        for name, proof in new.items():
            head = proof.encode_head()
            data = b"".join((len(head).to_bytes(_SIZE_BYTES, "big"), head, proof.data))
            write_whole(self._file(name), blake3.blake3(data).digest() + data)

    def read(self, name: bytes) -> Proof | None:
        """A proof that was written; ``None`` if it cannot be read as it was."""
        try:
            whole = memoryview(self._file(name).read_bytes())
            data = whole[_DIGEST_BYTES:]
            if blake3.blake3(data).digest() != whole[:_DIGEST_BYTES]:
                return None
            end = _SIZE_BYTES + int.from_bytes(data[:_SIZE_BYTES], "big")
            proof = Proof(decode_head(bytes(data[_SIZE_BYTES:end])), data[end:])
        except (OSError, BadMessage):
            return None
        return proof if proof.digest == name else None

    def _file(self, name: bytes) -> Path:
        return self._folder / f"{name.hex()}.proof"


class _Kept(msgspec.Struct, frozen=True, kw_only=True):
    in_a_row: dict[int, int]
    refused: tuple[Refused, ...]


def keep_refusals(folder: Path, refusals: Refusals) -> None:
    """Write the refusals. Raises ``OSError``."""
    kept = _Kept(in_a_row=refusals.in_a_row, refused=refusals.all)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / REFUSED_FILE, msgspec.json.encode(kept))


def kept_refusals(folder: Path) -> Refusals:
    """Read the refusals; none if there is no file that can be read."""
    kept = read_json(folder / REFUSED_FILE, _Kept)
    return Refusals() if kept is None else Refusals(kept.refused, in_a_row=kept.in_a_row)
