"""States of fragments to fetch, and a library that serves one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from averaging.history.lineage import Lineage
from averaging.history.manifest import Manifest
from averaging.history.replay import ReplayEntry
from averaging.history.state import PIECE_BYTES, FragmentState
from averaging.live.streams.questions import STALL_MAX_S
from averaging.messages import Signatures
from dht.host import Stream
from dht.identity import PeerId

VALUES = 5 * PIECE_BYTES // 4 + 123


def state_of(seed: int, values: int = VALUES) -> FragmentState:
    rng = np.random.default_rng(seed)
    theta = rng.standard_normal(values, dtype=np.float32)
    state = FragmentState.founded(bytes(32), 0, theta, 0)
    return replace(state, momentum=rng.standard_normal(values, dtype=np.float32))


@dataclass(eq=False)
class Shelf:
    """A library with one state."""

    held: FragmentState | None

    def state(self, fragment: int) -> FragmentState | None:
        return self.held if self.held and self.held.fragment == fragment else None

    def signatures(self, state: FragmentState) -> Signatures:
        return ()

    def replay(self, fragment: int, version: int, lineage: Lineage) -> Sequence[ReplayEntry] | None:
        return None


class Everybody:
    """A reader that believes every source."""

    def holders_min(self, manifest: Manifest) -> int:
        return 1

    def counts(self, peer: PeerId) -> bool:
        return True

    def hear(self, manifest: Manifest, signatures: Signatures) -> None:
        return

    def problem(self, manifest: Manifest) -> str | None:
        return None

    def signers(self, manifest: Manifest) -> Sequence[PeerId]:
        return ()


EVERYBODY = Everybody()


def same(one: FragmentState, other: FragmentState) -> bool:
    return one.digest() == other.digest() and one.chain == other.chain


class Dripping:
    """A stream on which each frame comes just before it would be too late."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def send(self, *parts: bytes | bytearray | memoryview, timeout_s: float) -> None:
        await asyncio.sleep(0.9 * STALL_MAX_S)
        await self._stream.send(*parts, timeout_s=timeout_s)
