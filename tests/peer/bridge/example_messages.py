"""The first message of a trainer, for tests of both ends of the line."""

from __future__ import annotations

from dht.identity import Identity
from peer.bridge.messages import Begin, ExchangedTensor
from peer.bridge.settings import PeerSettings

SEED = f"/ip4/127.0.0.1/tcp/1/p2p/{Identity.from_seed(bytes(32)).peer_id}"

BEGIN = Begin(
    run=b"{}",
    directory="/somewhere",
    settings=PeerSettings(name="calm-otter", seeds=(SEED,), page=None),
    tensors=(ExchangedTensor("w", (2, 3), "float32"),),
    embeddings=(),
    heads=(),
    found_after_s=None,
    started_at=0.0,
    earlier_tokens=0,
    ended_cleanly=True,
)
