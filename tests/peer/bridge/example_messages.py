"""The first message of a trainer, for tests of both ends of the line."""

from __future__ import annotations

from dht.identity import Identity
from peer.bridge.messages import Begin
from peer.bridge.settings import PeerSettings
from peer.description import Described

SEED = f"/ip4/127.0.0.1/tcp/1/p2p/{Identity.from_seed(bytes(32)).peer_id}"

BEGIN = Begin(
    run=b"{}",
    directory="/somewhere",
    settings=PeerSettings(name="calm-otter", seeds=(SEED,), page=None),
    tensors=(Described("w", (2, 3)),),
    found_after_s=None,
    started_at=0.0,
    earlier_tokens=0,
    ended_cleanly=True,
)
