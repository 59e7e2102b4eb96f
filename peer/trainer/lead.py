"""Rank 0 of an island: its commands to the other ranks, as a ``Run`` and its learner need them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from averaging.numbers.layout import Layout
from dht.identity import PeerId
from peer.run_file.sections import RunFile
from peer.trainer.channel import Agreed, Channel, Command, IslandBroken
from peer.trainer.units import SharedUnit, agree_on_units


class Lead(Channel):
    """The other processes of a learner, as rank 0 addresses them."""

    def begin(
        self,
        run: RunFile,
        peer_id: PeerId,
        layout: Layout,
        parameters: Mapping[str, torch.Tensor],
        *,
        data_dir: Path,
    ) -> Sequence[Sequence[SharedUnit]]:
        """Tell them what run this is. Returns the units of each fragment, wherever they are."""
        beginning = {
            "run_id": run.run_id,
            "run": run.canonical(),
            "peer_id": peer_id,
            "layout": layout.hash.hex(),
            "data_dir": str(data_dir.resolve()),
        }
        self.tell(Command.BEGIN, beginning)
        try:
            return agree_on_units(self, layout, parameters, fits=True)
        except IslandBroken:
            self.is_open = False  # the other ranks fail as well, and listen no more
            raise

    def wait(self) -> None:
        """Announce that the safe point takes longer. To be repeated at least once a minute."""
        self.command(Command.WAIT)

    def go(self, agreed: Agreed) -> None:
        """End the safe point."""
        self.command(Command.GO, *agreed)

    def end(self, failure: str | None) -> None:
        """Announce that no further safe point follows, and the failure that caused it, if any."""
        if not self.is_open:
            return
        self.is_open = False
        if failure is None:
            self.command(Command.END)
        else:
            self.tell(Command.FAILED, failure)
        self.close()

    def abandon(self) -> None:
        """Send them nothing more and wait for nothing: they may be at any step."""
        self.is_open = False
