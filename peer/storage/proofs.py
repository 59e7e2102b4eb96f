"""Proofs against other peers, kept in the own peer's folder so that they outlive a restart.

Each proof of a lie is a file named after the peer that it convicts. It is checked again when it is
read, so a damaged file convicts nobody. The histories that this peer has gone back from
(``averaging.rules.loss_gate``) are one file. A damaged one is as good as none: then the loss is
measured once more.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from averaging.audit.proofs import HEAD_MAX_BYTES, Proof, decode_head
from averaging.messages import BadMessage
from averaging.rules.loss_gate import Refusals, Refused
from dht.identity import PeerId
from dht.whole_files import read_json, write_whole

FOLDER = "proofs"
PROOFS_MAX = 256
REFUSED_FILE = "refused.json"
_SIZE_BYTES = 4


def keep_proof(folder: Path, peer: PeerId, proof: Proof) -> None:
    """Write the proof that convicts ``peer``, in place of the oldest one of too many.

    Raises ``OSError``.
    """
    head = proof.encode_head()
    path = folder / FOLDER
    path.mkdir(parents=True, exist_ok=True)
    size = len(head).to_bytes(_SIZE_BYTES, "big")
    write_whole(path / f"{peer}.proof", b"".join((size, head, proof.data)))
    there = sorted(path.glob("*.proof"), key=lambda file: file.stat().st_mtime_ns)
    for oldest in there[:-PROOFS_MAX]:
        oldest.unlink(missing_ok=True)


def kept_proofs(folder: Path) -> list[Proof]:
    """Read the proofs that were kept; files that cannot be read are left out."""
    found = []
    for path in sorted((folder / FOLDER).glob("*.proof"))[:PROOFS_MAX]:
        try:
            data = path.read_bytes()
            end = _SIZE_BYTES + int.from_bytes(data[:_SIZE_BYTES], "big")
            if not _SIZE_BYTES < end <= min(len(data), _SIZE_BYTES + HEAD_MAX_BYTES):
                continue
            found.append(Proof(decode_head(data[_SIZE_BYTES:end]), data[end:]))
        except (OSError, BadMessage):
            continue
    return found


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
