from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dht.identity import PeerId, RunId
from peer.data.batches.sequences import Shard, evenly_spaced

ANNA, BORIS = PeerId("anna"), PeerId("boris")
RUN = RunId("a-run")


def shard(size: int = 1000, length: int = 10, peer: PeerId = ANNA) -> Shard:
    tokens = np.arange(size, dtype=np.uint16)
    return Shard(tokens, sequence_length=length, run_id=RUN, peer_id=peer)


def test_a_sequence_is_consecutive_tokens_with_one_more_as_target() -> None:
    batch = shard().next(7)
    assert batch.shape == (7, 11)
    assert batch.dtype == np.int64
    assert (np.diff(batch, axis=1) == 1).all()


def test_an_epoch_covers_the_array_without_overlap() -> None:
    stream = shard(1000, 10)
    windows = stream.next(99)
    inputs = Counter(windows[:, :-1].ravel().tolist())
    assert set(inputs.values()) == {1}
    assert len(inputs) == 990
    assert stream.epoch == 1.0


def test_the_next_epoch_cuts_elsewhere() -> None:
    stream = shard(1000, 10)
    phases = {int(stream.next(99)[0, 0]) % 10 for _ in range(12)}
    assert len(phases) > 3


@given(st.integers(20, 400), st.integers(1, 10), st.integers(0, 300), st.integers(1, 60))
def test_a_shard_never_reads_outside_and_resumes_exactly(
    size: int, length: int, before: int, number: int
) -> None:
    stream = shard(size, length)
    stream.next(before)
    state = stream.state()
    expected = stream.next(number)
    other = shard(size, length)
    other.restore(state)
    assert (other.next(number) == expected).all()
    assert (np.diff(expected, axis=1) == 1).all()
    assert state == {"position": before}


def test_two_peers_read_in_different_orders() -> None:
    assert not (shard().next(20) == shard(peer=BORIS).next(20)).all()


def test_held_out_sequences_do_not_overlap_and_span_the_array() -> None:
    tokens = np.arange(1001)
    chosen = evenly_spaced(tokens, 10, sequence_length=10)
    assert chosen[:, 0].tolist() == list(range(0, 1000, 100))
    assert evenly_spaced(tokens, 10_000, sequence_length=10).shape == (100, 11)
