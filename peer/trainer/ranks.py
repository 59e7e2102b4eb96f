"""What a run needs of the other processes of a learner that has several (``peer.island``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch.nn import Parameter

from averaging.numbers.layout import Layout
from dht.identity import PeerId
from peer.run_file.run_file import RunFile
from peer.trainer.device_copies import Piece


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """What all processes of one learner assume until their next safe point."""

    over: bool = False
    finished: bool = False
    global_tokens: int = 0
    peers: int = 1
    measure: bool = False
    """Whether to measure the held-out loss now."""


class OtherRanks(Protocol):
    """The other processes of this learner, as rank 0 addresses them."""

    def begin(
        self,
        run: RunFile,
        peer_id: PeerId,
        layout: Layout,
        parameters: Mapping[str, Parameter],
        *,
        data_dir: Path,
    ) -> Sequence[Sequence[Piece]]:
        """Tell them what run this is. Returns the units of each fragment, wherever they are."""
        ...

    def total(self, tokens: int) -> int:
        """At the beginning of a safe point: ``tokens`` plus those of the others."""
        ...

    def wait(self) -> None:
        """Announce that the safe point takes longer. To be repeated at least once a minute."""
        ...

    def go(self, agreed: Agreed) -> None:
        """End the safe point."""
        ...

    def end(self, failure: str | None) -> None:
        """Announce that no further safe point follows, and the failure that caused it, if any."""
        ...

    def abandon(self) -> None:
        """Send them nothing more and wait for nothing: they may be at any step."""
        ...
