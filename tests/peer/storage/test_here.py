"""Peers of one run on one machine: whoever starts later joins those that are there."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from multiaddr import Multiaddr

from dht.identity import RunId
from peer.joining.link import Link
from peer.run_file.sections import RunFile
from peer.storage import here
from peer.storage.address import keep_link
from peer.storage.here import met_here, peers_here, with_own_peers
from peer.storage.home import occupied

SEED = Multiaddr("/ip4/127.0.0.1/tcp/9/p2p/12D3KooWGVBEgkHzjFQg5VNNCdTSh3MPQbYUsFKVpLLUwz3kk2fu")


@pytest.fixture(autouse=True)
def _own_data_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))


def link_of(run: RunFile) -> str:
    return str(Link(run.run_id, (SEED,)))


def test_the_later_of_two_in_one_run_joins_the_first_wherever_its_folder_is(tmp_path: Path) -> None:
    run, other = RunFile(name="one"), RunFile(name="other")
    first, second, third = (tmp_path / name for name in ("z first", "a second", "third"))
    with (
        occupied(first, run, "learner"),
        occupied(second, run, "learner"),
        occupied(third, other, "learner"),
    ):
        keep_link(first, link_of(run))
        assert met_here(run.run_id, first, stopped=lambda: False) == []
        assert met_here(run.run_id, second, stopped=lambda: False) == [first]
        assert met_here(other.run_id, third, stopped=lambda: False) == []
        assert set(peers_here(run.run_id)) == {first, second}
        assert with_own_peers(run.run_id, ()) == with_own_peers(run.run_id, (SEED,)) == (SEED,)
        assert with_own_peers(RunId(other.run_id), ()) == ()
    assert peers_here(run.run_id) == {}


def test_one_that_starts_a_moment_later_waits_for_the_link_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It saw nobody to ask, and founded the run again."""
    run, looked = RunFile(name="one"), threading.Event()
    first, second = tmp_path / "first", tmp_path / "second"
    monkeypatch.setattr(here, "LOOK_EVERY_S", 0.001)
    monkeypatch.setattr(here, "LINK_WITHIN_S", 1e6)

    def stopped() -> bool:
        looked.set()
        return False

    with (
        occupied(first, run, "learner"),
        occupied(second, run, "learner"),
        ThreadPoolExecutor(1) as others,
    ):
        met = others.submit(met_here, run.run_id, second, stopped=stopped)
        assert looked.wait(60)
        assert not met.done()
        keep_link(first, link_of(run))
        assert met.result(60) == [first]


def test_the_link_of_an_earlier_life_is_not_waited_for_longer_than_a_start_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, first, second = RunFile(name="one"), tmp_path / "first", tmp_path / "second"
    monkeypatch.setattr(here, "LINK_WITHIN_S", 0.0)
    with occupied(first, run, "learner"), occupied(second, run, "learner"):
        assert met_here(run.run_id, second, stopped=lambda: False) == [first]


def test_one_that_is_asked_to_stop_waits_for_nobody(tmp_path: Path) -> None:
    run, first, second = RunFile(name="one"), tmp_path / "first", tmp_path / "second"
    with occupied(first, run, "learner"), occupied(second, run, "learner"):
        assert met_here(run.run_id, second, stopped=lambda: True) == [first]
