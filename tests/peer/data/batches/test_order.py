from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dht.identity import PeerId, RunId
from peer.data.batches.order import Order

ANNA, BORIS = PeerId("anna"), PeerId("boris")
RUN = RunId("a-run")


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
