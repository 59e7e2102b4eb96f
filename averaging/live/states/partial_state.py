"""A state that ``averaging.live.states.fetcher`` fetches, in pieces from several peers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import blake3

from averaging.history.manifest import Manifest, Pieces, as_bytes
from averaging.history.state import FragmentState
from averaging.numbers.arrays import Float32s


@dataclass(slots=True, eq=False)
class Partial:
    """A state on its way: verified pieces stay, whoever they came from."""

    manifest: Manifest
    theta: Float32s
    momentum: Float32s
    count: int
    """Number of pieces that are wanted."""
    missing: list[int]
    """Pieces that nobody is fetching, in descending order."""
    here: set[int] = field(default_factory=set)
    """Pieces that are verified and in their place."""

    @classmethod
    def begin(
        cls,
        manifest: Manifest,
        values: int,
        floats: Callable[[int], Float32s],
        *,
        has_momentum: bool = True,
    ) -> Partial:
        """``floats(count)``: memory for so many values."""
        pieces = Pieces(values)
        count = pieces.count if has_momentum else pieces.of_theta
        return cls(
            manifest,
            floats(values),
            floats(values if has_momentum else 0),
            count,
            list(range(count))[::-1],
        )

    @property
    def done(self) -> bool:
        return len(self.here) == self.count

    def take(self, most: int) -> list[int]:
        """A run of consecutive missing pieces, for one request."""
        taken: list[int] = []
        while self.missing and len(taken) < most:
            if taken and self.missing[-1] != taken[-1] + 1:
                break
            piece = self.missing.pop()
            if piece not in self.here:  # it was asked for twice, and one who failed had it, too
                taken.append(piece)
        return taken

    def put_back(self, indices: Iterable[int]) -> None:
        self.missing = sorted({*self.missing, *indices} - self.here, reverse=True)

    def place(self, index: int, data: bytes | memoryview) -> str | None:
        """Verify a piece and put it where it belongs; returns what is wrong with it, if so."""
        pieces = Pieces(self.theta.size)
        target = pieces.view(index, as_bytes(self.theta), as_bytes(self.momentum))
        if len(data) != len(target):
            return f"piece {index} has {len(data)} bytes, not {len(target)}"
        if blake3.blake3(data).digest() != self.manifest.piece_digest(index):
            return f"piece {index} has other bits than its manifest says"
        target[:] = data
        return None

    def state(self) -> FragmentState:
        assert self.done
        manifest = self.manifest
        return FragmentState(
            manifest.fragment,
            manifest.version,
            manifest.lineage,
            manifest.chain(),
            self.theta,
            self.momentum,
            manifest.merged(),
            manifest.history,
        )
