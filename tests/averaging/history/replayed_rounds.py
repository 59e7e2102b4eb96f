"""Rounds of a small fragment, as a replay log holds them."""

from __future__ import annotations

import numpy as np

from averaging import messages
from averaging.history.replay import ReplayEntry, ReplayHead, ReplayLog, advance
from averaging.history.state import FragmentState, Pieces
from averaging.messages import Commit, Entry, Link
from averaging.numbers.chunks import digests_of_slices
from averaging.numbers.codec import Scratch
from averaging.numbers.codecs import codec_named
from averaging.numbers.layout import Layout, TensorSpec
from dht.identity import PeerId

LAYOUT = Layout.build(
    [TensorSpec("matrix", (300, 20)), TensorSpec("other", (100, 20)), TensorSpec("bias", (20,))], 1
)

FRAGMENT = LAYOUT.fragments[0]

SIZES = FRAGMENT.unit_sizes

PEERS = tuple(PeerId(name) for name in ("anna", "boris", "clara"))


MU = 0.5


def founded(mu: float = MU) -> FragmentState:
    theta = np.random.default_rng(0).standard_normal(FRAGMENT.size).astype(np.float32)
    return FragmentState.founded(LAYOUT.hash, 0, theta, Pieces.of(FRAGMENT, mu).momentum)


def commit_after(
    state: FragmentState, *, codec: str = "int8", melds: bool = False, nonce: int = 0
) -> Commit:
    """The commit of a round in the run whose state this is, with momentum or without."""
    parent = Link(state.version, state.lineage, state.merged.tokens)
    other = Link(state.version, bytes(32), state.merged.tokens)
    parents = (parent, other) if melds else (parent,)
    return Commit(
        topic=bytes(16),
        fragment=0,
        leader=PEERS[0],
        leader_incarnation=1,
        nonce=nonce,
        parents=parents,
        ancestors=tuple((link,) for link in parents) if melds else (),
        members=tuple(
            Entry(
                peer=peer,
                incarnation=1,
                join=1,
                parent=0,
                base_version=state.version,
                staleness=0,
                mark=24 * (state.version + 1),
                steps=24,
                tokens=1000 + index,
                reachable=True,
            )
            for index, peer in enumerate(PEERS)
        ),
        reducers=PEERS[:2],
        shares=(3, 1),
        codec=codec,
        merge="mean",
        eta=0.9 + 0.01 * (state.version % 5),
        mu=MU if state.momentum.size else 0.0,
        batch_tokens_max=1 << 20,
        contributors_min=2,
        upload_s=10.0,
        round_s=20.0,
    )


def round_after(
    state: FragmentState,
    *,
    codec: str = "int8",
    seal: tuple[int, ...] = (0, 2),
    melds: bool = False,
) -> ReplayEntry:
    """Return a round that merged random numbers seeded by its version."""
    commit = messages.encode_commit(commit_after(state, codec=codec, melds=melds))
    rng = np.random.default_rng(state.version + 1)
    delta = (0.01 * rng.standard_normal(FRAGMENT.size)).astype(np.float32)
    chosen = codec_named(codec)
    payload = bytearray(chosen.encoded_size(SIZES))
    chosen.encode(delta, SIZES, payload, Scratch())
    digests = digests_of_slices(memoryview(payload), SIZES, (3, 1), chosen)
    return ReplayEntry(ReplayHead(commit, seal, tuple(digests)), bytes(payload))


def lived(
    rounds: int, codec: str = "int8", mu: float = MU
) -> tuple[FragmentState, FragmentState, ReplayLog]:
    """Return the first state, the last one, and the log of a member of all rounds."""
    first = state = founded(mu)
    log = ReplayLog(bytes_max=1 << 30, lineage=state.lineage)
    for _ in range(rounds):
        entry = round_after(state, codec=codec)
        entry.check(SIZES, Scratch())
        state = advance(state, entry, SIZES, Scratch())
        log.append(entry, state.lineage)
    return first, state, log
