from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dht.identity import PeerId, RunId
from peer.data.batches.sequences import Order, Shuffled, evenly_spaced

ANNA, BORIS = PeerId("anna"), PeerId("boris")
RUN = RunId("a-run")


def shuffled(
    size: int = 1000, length: int = 10, peer: PeerId = ANNA, *, in_examples: bool = False
) -> Shuffled:
    tokens = np.arange(size, dtype=np.uint16)
    return Shuffled(
        tokens, sequence_length=length, in_examples=in_examples, run_id=RUN, peer_id=peer
    )


def test_a_sequence_is_consecutive_tokens_with_one_more_as_target() -> None:
    batch = shuffled().at(0, 7)
    assert batch.shape == (7, 11)
    assert batch.dtype == np.int64
    assert (np.diff(batch, axis=1) == 1).all()


def test_an_array_of_text_is_covered_without_overlap() -> None:
    sequences = shuffled(1000, 10)
    inputs = Counter(sequences.at(0, sequences.count)[:, :-1].ravel().tolist())
    assert set(inputs.values()) == {1}
    assert len(inputs) == 990


def test_sequences_of_examples_share_no_token() -> None:
    sequences = shuffled(99, 10, in_examples=True)
    assert sequences.count == 9
    assert sorted(sequences.at(0, 9).ravel().tolist()) == list(range(99))


def test_text_is_cut_elsewhere_for_each_reader() -> None:
    phases = {int(shuffled(peer=PeerId(f"peer-{n}")).at(0, 1)[0, 0]) % 10 for n in range(12)}
    assert len(phases) > 3


@given(st.integers(0, 400), st.integers(1, 10), st.booleans(), st.data())
def test_sequences_are_within_the_array_whatever_part_is_read(
    size: int, length: int, in_examples: bool, data: st.DataObject
) -> None:
    sequences = shuffled(size, length, in_examples=in_examples)
    assert sequences.count == (size // (length + 1) if in_examples else max(0, size // length - 1))
    start = data.draw(st.integers(0, sequences.count))
    number = data.draw(st.integers(0, sequences.count - start))
    if sequences.count:
        whole = shuffled(size, length, in_examples=in_examples).at(0, sequences.count)
        assert (sequences.at(start, number) == whole[start : start + number]).all()
        assert (np.diff(whole, axis=1) == 1).all()


def test_two_peers_read_in_different_orders() -> None:
    assert not (shuffled().at(0, 20) == shuffled(peer=BORIS).at(0, 20)).all()


def test_held_out_sequences_do_not_overlap_and_span_the_array() -> None:
    tokens = np.arange(1001)
    chosen = evenly_spaced(tokens, 10, sequence_length=10, in_examples=False)
    assert chosen[:, 0].tolist() == list(range(0, 1000, 100))
    most = evenly_spaced(tokens, 10_000, sequence_length=10, in_examples=False)
    assert most.shape == (100, 11)


def test_held_out_examples_are_whole() -> None:
    chosen = evenly_spaced(np.arange(99), 3, sequence_length=10, in_examples=True)
    assert chosen[:, 0].tolist() == [0, 33, 66]


def order(count: int, peer: PeerId = ANNA, run: RunId = RUN) -> Order:
    return Order(count, run_id=run, peer_id=peer)


@given(st.integers(1, 2000), st.integers(0, 3))
def test_an_epoch_visits_everything_exactly_once(count: int, epoch: int) -> None:
    things = order(count).at(epoch * count, count)
    assert sorted(things.tolist()) == list(range(count))


@given(st.integers(1, 50), st.integers(0, 200), st.integers(0, 60), st.integers(0, 60))
def test_an_order_does_not_depend_on_the_size_of_reads(
    count: int, start: int, first: int, second: int
) -> None:
    whole = order(count).at(start, first + second).tolist()
    parts = [
        *order(count).at(start, first).tolist(),
        *order(count).at(start + first, second).tolist(),
    ]
    assert whole == parts


def test_orders_differ_between_peers_runs_and_epochs() -> None:
    base = order(1000).at(0, 1000)
    for other in (
        order(1000, BORIS).at(0, 1000),
        order(1000, run=RunId("other")).at(0, 1000),
        order(1000).at(1000, 1000),
    ):
        same = int((base == other).sum())
        assert same < 10  # two random permutations agree at one place on average


def test_an_order_is_the_same_on_every_machine() -> None:
    assert order(1000).at(995, 10).tolist() == [269, 487, 894, 973, 568, 538, 516, 539, 120, 774]


def test_neighbours_are_not_read_together() -> None:
    things = order(10_000).at(0, 2000)
    assert int((np.abs(np.diff(things)) == 1).sum()) < 10
