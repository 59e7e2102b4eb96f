"""The port and the link that a peer keeps in its folder."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from multiaddr import Multiaddr

from dht.identity import Identity
from peer import cli
from peer.storage.address import (
    PORT_FILE,
    keep_link,
    keep_port,
    kept_link,
    kept_port,
    listen_briefly,
    with_port,
)

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
    assert cli.run(["link", str(tmp_path)]) == 2
    assert "there is no link of a peer in" in capsys.readouterr().err
    assert kept_link(tmp_path) is None
    keep_link(tmp_path, LINK)
    assert cli.run(["link", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{LINK}\n"
    assert "does not run now" in printed.err
