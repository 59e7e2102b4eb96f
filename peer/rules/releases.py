"""The comparison of this peer's release with those of the others. Pure.

The releases that peers state are shown to people; only protocol numbers decide anything.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from dht.protocol import NEWEST, RELEASE, UPGRADE
from dht.records import PeerRecord

Newness: TypeAlias = tuple[int, tuple[int, ...]]
"""Newest protocol number, and the numbers of the release."""

_NUMBER = re.compile(r"[0-9]{1,9}")


def newness(protocol: int, release: str) -> Newness:
    """A key that is greater for a later release."""
    return protocol, tuple(int(number) for number in _NUMBER.findall(release)[:4])


def outdated(
    others: Sequence[PeerRecord], *, protocol: int = NEWEST, release: str = RELEASE
) -> str | None:
    """A sentence with the command if most of these peers run a later release; else ``None``."""
    ours = newness(protocol, release)
    newer = [each for each in others if newness(each.protocol[1], each.release) > ours]
    if 2 * len(newer) <= len(others) + 1:
        return None
    said = _most_frequent(each.release for each in newer)
    number = max(each.protocol[1] for each in newer)
    theirs = f"release {said}" if said and said != release else f"protocol {number}"
    mine = release if said and said != release else str(protocol)
    return (
        f"{len(newer)} of {len(others)} other peers run {theirs}, this one {mine}: upgrade it "
        f"with {UPGRADE} and start it again, as the release after theirs may refuse it"
    )


def _most_frequent(releases: Iterable[str]) -> str:
    ((found, _),) = Counter(sorted(releases)).most_common(1)
    return found
