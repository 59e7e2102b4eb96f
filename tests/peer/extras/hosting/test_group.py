"""The commands of the parts of a hosted run."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from peer.extras.hosting.group import GroupSettings
from peer.views.page_address import PageAddress

PEER = "12D3KooWGRUQsHYtNEX1WXEHXFZf3tJ6yJ5oJ9ER2rJkwMqKqXzP"
SEEDS = tuple(f"{host}/tcp/7700/p2p/{PEER}" for host in ("/ip4/203.0.113.7", "/ip6/2001:db8::7"))


def group(domain: str | None) -> GroupSettings:
    return GroupSettings(
        run="my.run.toml",
        data_directory=Path("/data"),
        domain=domain,
        port=7700,
        relay_rate="2M",
        run_page=PageAddress("127.0.0.1", 7780),
        page=PageAddress("127.0.0.1", 9100),
    )


def values(arguments: Sequence[str], option: str) -> list[str]:
    return [value for name, value in pairwise(arguments) if name == option]


def test_without_a_domain_the_keeper_announces_all_that_it_knows_of_itself() -> None:
    keeper = group(None).keeper(SEEDS)
    assert values(keeper, "--announce") == []
    assert values(keeper, "--seed") == list(SEEDS)


def test_with_a_domain_the_keeper_announces_it_with_its_own_port() -> None:
    keeper = group("run.example.org").keeper([f"/dns4/run.example.org/tcp/7700/p2p/{PEER}"])
    assert values(keeper, "--announce") == ["/dns4/run.example.org/tcp/7702"]


@pytest.mark.parametrize("domain", [None, "run.example.org"])
def test_the_keeper_listens_on_every_network_that_the_bootstrap_peer_does(
    domain: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.socket.bind", lambda self, address: None)
    listen = values(group(domain).keeper(SEEDS), "--listen")
    assert listen == ["/ip4/0.0.0.0/tcp/7702", "/ip6/::/tcp/7702"]
