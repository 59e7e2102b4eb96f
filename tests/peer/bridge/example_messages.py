"""The first message of a trainer, for tests of both ends of the line."""

from __future__ import annotations

from peer.bridge.messages import Begin, Tensor

BEGIN = Begin(
    run=b"{}",
    seeds=("/ip4/127.0.0.1/tcp/1",),
    directory="/somewhere",
    identity="/somewhere/key",
    name="calm-otter",
    tensors=(Tensor("w", (2, 3), "float32"),),
    embeddings=(),
    heads=(),
    listen=(),
    announce=(),
    found_after_s=None,
    page=None,
    started_at=0.0,
    earlier_tokens=0,
    ended_cleanly=True,
)
