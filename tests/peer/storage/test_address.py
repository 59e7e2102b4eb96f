"""The port and the link that a peer keeps in its folder."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from multiaddr import Multiaddr

from dht.identity import Identity, RunId
from peer import cli
from peer.joining.link import Link
from peer.run_file.sections import RunFile
from peer.storage import address
from peer.storage.address import (
    PORT_FILE,
    keep_link,
    keep_port,
    kept_link,
    kept_port,
    listen_briefly,
    met_here,
    peers_here,
    with_own_peers,
    with_port,
)
from peer.storage.home import occupied

LINK = (
    f"shoal://{'ab' * 32}?seed=/ip4/192.168.1.5/tcp/7700/p2p/"
    f"{Identity.from_seed(bytes(32)).peer_id}"
)


def test_a_port_is_kept_and_a_damaged_file_is_no_port(tmp_path: Path) -> None:
    assert kept_port(tmp_path) is None
    keep_port(tmp_path, 41234)
    assert kept_port(tmp_path) == 41234
    for text in ("", "0", "99999", "x"):
        (tmp_path / PORT_FILE).write_text(text)
        assert kept_port(tmp_path) is None


@pytest.mark.parametrize(
    ("listen", "expected"),
    [
        (("/ip4/0.0.0.0/tcp/0",), ("/ip4/0.0.0.0/tcp/41234",)),
        (("/ip4/0.0.0.0/tcp/7700",), ("/ip4/0.0.0.0/tcp/7700",)),  # chosen by the user
        (("/ip4/0.0.0.0/tcp/0", "/ip6/::/tcp/0"), ("/ip4/0.0.0.0/tcp/0", "/ip6/::/tcp/0")),
        ((), ()),
    ],
)
def test_a_kept_port_replaces_the_choice_of_any_port(
    listen: tuple[str, ...], expected: tuple[str, ...]
) -> None:
    found = with_port(tuple(map(Multiaddr, listen)), 41234)
    assert tuple(map(str, found)) == expected


def test_a_port_in_use_cannot_be_listened_at() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = Multiaddr(f"/ip4/127.0.0.1/tcp/{server.getsockname()[1]}")
        with pytest.raises(OSError):
            listen_briefly(address)
    listen_briefly(address)


def test_a_link_is_printed_again_from_the_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["status", str(tmp_path)]) == 2
    assert "there is no peer in the folder" in capsys.readouterr().err
    assert kept_link(tmp_path) is None
    with occupied(tmp_path, RunFile(name="one"), "keeper"):
        keep_link(tmp_path, LINK)
    assert cli.run(["status", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert f"  {LINK}\n" in printed
    assert "it does not run now" in printed


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
    monkeypatch.setattr(address, "LOOK_EVERY_S", 0.001)
    monkeypatch.setattr(address, "LINK_WITHIN_S", 1e6)

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
    monkeypatch.setattr(address, "LINK_WITHIN_S", 0.0)
    with occupied(first, run, "learner"), occupied(second, run, "learner"):
        assert met_here(run.run_id, second, stopped=lambda: False) == [first]


def test_one_that_is_asked_to_stop_waits_for_nobody(tmp_path: Path) -> None:
    run, first, second = RunFile(name="one"), tmp_path / "first", tmp_path / "second"
    with occupied(first, run, "learner"), occupied(second, run, "learner"):
        assert met_here(run.run_id, second, stopped=lambda: True) == [first]
