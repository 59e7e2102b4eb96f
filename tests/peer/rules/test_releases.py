"""A peer whose release is older than that of most others says so, with the command."""

from __future__ import annotations

from pathlib import Path

import pytest

from dht.protocol import RELEASE, UPGRADE
from dht.records import PeerRecord
from peer.rules.releases import newness, outdated

ROOT = Path(__file__).parents[3]


def peers(*releases: str, newest: int = 2) -> list[PeerRecord]:
    return [
        PeerRecord(protocol=(newest - 1, newest), role="learner", incarnation=1, release=release)
        for release in releases
    ]


def test_the_majority_counts_this_peer_as_well() -> None:
    for newer, older, is_behind in ((2, 1, False), (3, 1, True), (2, 0, True), (1, 0, False)):
        others = peers(*["0.2.0"] * newer, *["0.1.0"] * older)
        text = outdated(others, protocol=2, release="0.1.0")
        assert (text is not None) is is_behind, (newer, older)
        if text is not None:
            assert (
                f"{newer} of {newer + older} other peers run release 0.2.0, this one 0.1.0" in text
            )
            assert f"{UPGRADE}" in text


def test_a_newer_protocol_counts_whatever_release_its_peers_state() -> None:
    text = outdated(peers("", "", newest=3), protocol=2, release="0.1.0")
    assert text is not None and "2 of 2 other peers run protocol 3, this one 2" in text
    assert outdated(peers("9.9", "9.9", newest=1), protocol=2, release="0.1.0") is None


@pytest.mark.parametrize("release", ["", "none", "0.2.0\u202e", "9" * 24, "1.2.3.4.5.6.7"])
def test_anything_may_be_stated_as_a_release(release: str) -> None:
    assert len(newness(2, release)[1]) <= 4


def test_the_release_is_that_of_the_package() -> None:
    assert f'version = "{RELEASE}"\n' in (ROOT / "pyproject.toml").read_text()
