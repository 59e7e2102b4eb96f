"""States of fragments to fetch, and a library that serves one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from averaging.history.lineage import Lineage
from averaging.history.manifest import PIECE_BYTES
from averaging.history.replay import ReplayEntry
from averaging.history.state import FragmentState

VALUES = 5 * PIECE_BYTES // 4 + 123


def state_of(seed: int, values: int = VALUES) -> FragmentState:
    rng = np.random.default_rng(seed)
    theta = rng.standard_normal(values, dtype=np.float32)
    state = FragmentState.founded(bytes(32), 0, theta)
    return replace(state, momentum=rng.standard_normal(values, dtype=np.float32))


@dataclass(eq=False)
class Shelf:
    """A library with one state."""

    held: FragmentState | None

    def state(self, fragment: int) -> FragmentState | None:
        return self.held if self.held and self.held.fragment == fragment else None

    def replay(self, fragment: int, version: int, lineage: Lineage) -> Sequence[ReplayEntry] | None:
        return None


def same(one: FragmentState, other: FragmentState) -> bool:
    return one.digest() == other.digest() and one.chain == other.chain
