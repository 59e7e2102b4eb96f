"""Proofs against peers that lied, kept in the peer's folder: a ban outlives a restart.

Each proof is a file named after the peer that it convicts. It is checked again when it is read, so
a damaged file convicts nobody.
"""

from __future__ import annotations

from pathlib import Path

from averaging.audit.proofs import HEAD_MAX_BYTES, Proof, decode_head
from averaging.messages import BadMessage
from dht.identity import PeerId
from dht.whole_files import write_whole

FOLDER = "proofs"
PROOFS_MAX = 256
_SIZE_BYTES = 4


def keep_proof(folder: Path, peer: PeerId, proof: Proof) -> None:
    """Write the proof that convicts ``peer``. Raises ``OSError``."""
    head = proof.encode_head()
    path = folder / FOLDER
    path.mkdir(parents=True, exist_ok=True)
    size = len(head).to_bytes(_SIZE_BYTES, "big")
    write_whole(path / f"{peer}.proof", b"".join((size, head, proof.data)))


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
