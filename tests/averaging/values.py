"""The vocabulary of tests: peers, histories and commits, each with what a test does not care about
filled in."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from averaging.history.chain import Chain
from averaging.history.merged_map import MergedMap
from averaging.history.standing import Standing
from averaging.messages import Commit, Entry, Link
from averaging.rules.peer_view import PeerView
from dht.identity import PeerId
from tests.averaging.message_examples import COMMIT

NOW = 1000.0


def peers(count: int) -> tuple[PeerId, ...]:
    return tuple(sorted(PeerId(f"peer-{index:03}") for index in range(count)))


def seen(
    *, ago: float = 0.0, since: float = NOW, failed: float | None = None, **facts: Any
) -> PeerView:
    """What is known at ``NOW`` of a peer that was first seen and last heard so long ago."""
    return PeerView(first_seen=NOW - since, heard_at=NOW - ago, failed_at=failed, **facts)


def lineage(name: str) -> bytes:
    return name.encode().ljust(32, b".")


def chain(*names: str, tokens: int = 100) -> Chain:
    """Versions 0, 1, ... on lineages of these names, each with so many tokens more."""
    return Chain(
        Link(version, lineage(name), tokens * version) for version, name in enumerate(names)
    )


def standing(*names: str, tokens: int = 1000, merged: MergedMap | None = None) -> Standing:
    links = chain(*names, tokens=tokens)
    return Standing(links.tip.version, links.tip.lineage, links, merged or MergedMap())


def entry(peer: PeerId, *, tokens: int = 1000, delegate: int | None = None) -> Entry:
    return Entry(peer, 1, 1, 0, 7, 0, 10, 10, tokens, True, delegate)


def commit_of(members: Iterable[PeerId | Entry], **changes: Any) -> Commit:
    """A commit of these members, of which the first leads."""
    entries = tuple(each if isinstance(each, Entry) else entry(each) for each in members)
    return msgspec.structs.replace(COMMIT, leader=entries[0].peer, members=entries, **changes)
