"""The states that a peer keeps in case the run's owner takes the run back."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from averaging.history.lineage import after_fold, bound
from averaging.history.manifest import rolled_back
from averaging.history.state import FragmentState
from averaging.messages import Link
from averaging.numbers.layout import Layout, TensorSpec
from dht.identity import PeerId
from dht.membership.orders import Attested, Orders, Rollback, Root
from peer.calls import Kept
from peer.storage.good_states import CHECKPOINTS, GoodStates
from peer.storage.home import folder_bytes

LAYOUT = Layout.build([TensorSpec(f"block.{n}.weight", (500, 500)) for n in range(2)], 2)


def state(fragment: int, version: int) -> FragmentState:
    """A state of a history in which every version was made by one peer."""
    size = LAYOUT.fragments[fragment].size
    made = FragmentState.founded(LAYOUT.hash, fragment, np.zeros(size, np.float32), size)
    for number in range(1, version + 1):
        merged = made.merged.with_work(PeerId("anna"), 1, 10 * number, 100)
        history = after_fold(made.lineage, PeerId("anna"), 1, number)
        lineage = bound(history, merged.digest())
        chain = made.chain.extended(Link(number, lineage, merged.tokens))
        theta = np.full(size, number, np.float32)
        made = FragmentState(
            fragment, number, lineage, chain, theta, np.float32(0.5) * theta, merged, history
        )
    return made


def good(folder: Path, allowed: Callable[[], float | None] = lambda: None) -> GoodStates:
    return GoodStates(folder, LAYOUT, 0.5, allowed_bytes=allowed)


def attested(kept: Kept) -> Attested:
    return Attested(kept.version, kept.lineage, kept.digest)


def at(store: GoodStates, version: int) -> tuple[Attested, ...]:
    found = {each.fragment: attested(each) for each in store.kept() if each.version == version}
    return tuple(found[fragment] for fragment in sorted(found))


def versions(store: GoodStates) -> list[tuple[int, int]]:
    return sorted((each.fragment, each.version) for each in store.kept())


def rollback(to: tuple[Attested, ...], number: int = 5) -> Orders:
    roots = tuple(
        Root(each.version + 1, rolled_back(state(fragment, each.version), number).lineage)
        for fragment, each in enumerate(to)
    )
    return Orders(attested=to, rollback=Rollback(number, roots))


def test_the_last_few_are_kept_and_the_attested_one_until_another_is(tmp_path: Path) -> None:
    store = good(tmp_path)
    for version in (8, 16):
        for fragment in (0, 1):
            store.keep(state(fragment, version))
    store.attested = at(store, 8)
    for version in (24, 32, 40):
        for fragment in (0, 1):
            store.keep(state(fragment, version))
    assert versions(store) == [(f, v) for f in (0, 1) for v in (8, 32, 40)]
    assert versions(good(tmp_path)) == versions(store), "also after a restart"
    store.attested = at(store, 32)
    for fragment in (0, 1):
        store.keep(state(fragment, 48))
    assert versions(store) == [(f, v) for f in (0, 1) for v in (32, 40, 48)]


def test_an_attested_state_that_a_peer_comes_to_later_is_kept_as_well(tmp_path: Path) -> None:
    """Earlier, a peer that was behind kept it no longer than any other version."""
    others = good(tmp_path / "others")
    for fragment in (0, 1):
        others.keep(state(fragment, 8))
    store = good(tmp_path / "own")
    store.attested = at(others, 8)
    for version in (8, 16, 24, 32):
        for fragment in (0, 1):
            store.keep(state(fragment, version))
    assert versions(store) == [(f, v) for f in (0, 1) for v in (8, 24, 32)]


def test_the_roots_of_a_rollback_are_made_of_the_attested_states(tmp_path: Path) -> None:
    store = good(tmp_path)
    for version in (8, 16):
        for fragment in (0, 1):
            store.keep(state(fragment, version))
    orders = rollback(at(store, 8))
    store.attested = orders.attested
    store.forget_recent()
    assert versions(store) == [(0, 8), (1, 8)]
    for fragment, root in enumerate(store.roots(orders)):
        assert root is not None
        expected = rolled_back(state(fragment, 8), 5)
        assert root.digest() == expected.digest()
        assert root.chain == expected.chain


def test_of_a_run_without_momentum_states_are_kept_without_and_others_are_no_roots(
    tmp_path: Path,
) -> None:
    store = GoodStates(tmp_path, LAYOUT, 0.0)
    for fragment in (0, 1):
        store.keep(replace(state(fragment, 8), momentum=np.zeros(0, np.float32)))
    orders = rollback(at(store, 8))
    roots = store.roots(orders)
    assert all(root is not None and root.momentum.size == 0 for root in roots)
    assert good(tmp_path).roots(orders) == [None, None], "a run with momentum takes none of them"


def test_a_root_is_missing_where_the_state_is_not_kept_is_damaged_or_another(
    tmp_path: Path,
) -> None:
    store = good(tmp_path)
    store.keep(state(0, 8))
    other = replace(state(1, 8), theta=state(1, 8).theta + 1)
    store.keep(other)
    to = tuple(attested(k) for k in store.kept())
    genuine = good(tmp_path / "genuine")
    genuine.keep(state(0, 8))
    genuine.keep(state(1, 8))
    orders = rollback(at(genuine, 8))
    found = store.roots(orders)
    assert found[0] is not None and found[1] is None, "other bits than those attested"
    assert to[1] != orders.attested[1]
    for path in tmp_path.glob("0000/*/tensors.safetensors"):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    assert store.roots(orders) == [None, None]
    wrong = replace_number(orders)
    assert genuine.roots(wrong) == [None, None], "the roots are of another directive"


def replace_number(orders: Orders) -> Orders:
    assert orders.rollback is not None
    return Orders(attested=orders.attested, rollback=Rollback(6, orders.rollback.roots))


def test_good_states_use_only_the_room_that_two_checkpoints_leave_of_the_disk_limit(
    tmp_path: Path,
) -> None:
    checkpoint = 8 * LAYOUT.size
    slack = 4 << 20
    store = good(tmp_path, lambda: CHECKPOINTS * checkpoint)
    for fragment in (0, 1):
        store.keep(state(fragment, 8))
    assert versions(store) == [], "there is no room"
    store = good(tmp_path, lambda: (CHECKPOINTS + 1.2) * checkpoint + slack)
    for version in (8, 16, 24):
        for fragment in (0, 1):
            store.keep(state(fragment, version))
    assert [v for f, v in versions(store) if f == 0] == [24]
    assert folder_bytes(tmp_path) <= 1.2 * checkpoint + slack


def test_a_disk_that_became_read_only_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier, the agent ended with the next state that was to be kept, attested or forgotten."""
    store = good(tmp_path)
    for fragment in (0, 1):
        store.keep(state(fragment, 8))

    def read_only(path: Path, *given: object, **settings: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    attested = at(store, 8)
    with monkeypatch.context() as failing:
        failing.setattr(Path, "rename", read_only)
        failing.setattr(Path, "mkdir", read_only)
        store.keep(state(0, 16))
        store.forget_recent()
    assert versions(store) == [(0, 8), (1, 8)]
    store.attested = attested
    store.forget_recent()
    assert at(store, 8) == attested


def test_states_make_room_at_once_when_the_disk_limit_falls(tmp_path: Path) -> None:
    """Earlier, attested ones kept the room of checkpoints, which could not be written any more."""
    checkpoint, slack = 8 * LAYOUT.size, 4 << 20
    allowed = [6.0 * checkpoint + slack]
    store = good(tmp_path, lambda: allowed[0])
    for version in (8, 16, 24):
        for fragment in (0, 1):
            store.keep(state(fragment, version))
        if version == 8:
            store.attested = at(store, 8)
    assert versions(store) == [(f, v) for f in (0, 1) for v in (8, 16, 24)]
    allowed[0] = (CHECKPOINTS + 1.2) * checkpoint
    store.prune()
    assert versions(store) == [(0, 8), (1, 8)], "the attested one is of more use"
    allowed[0] = CHECKPOINTS * checkpoint
    store.prune()
    assert versions(store) == []
