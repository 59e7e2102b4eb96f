"""Rank 0 of an island: its commands to the other ranks, as a ``Run`` and its learner need them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from averaging.numbers.layout import Layout
from dht.identity import PeerId
from peer.island.channel import Channel, Command, IslandBroken
from peer.island.units import SharedUnit, agree_on_units
from peer.run_file.sections import RunFile
from peer.trainer.rank import Agreed


class Lead(Channel):
    """Rank 0's way to the other ranks: the ``peer.trainer.rank.OtherRanks`` of its run."""

    def begin(
        self,
        run: RunFile,
        peer_id: PeerId,
        layout: Layout,
        parameters: Mapping[str, torch.Tensor],
        *,
        data_dir: Path,
    ) -> Sequence[Sequence[SharedUnit]]:
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
        self.command(Command.WAIT)

    def go(self, agreed: Agreed) -> None:
        self.command(
            *(Command.GO, agreed.over, agreed.finished, agreed.global_tokens, agreed.peers),
            agreed.measure,
            float("nan") if agreed.rate is None else agreed.rate,
        )

    def end(self, failure: str | None) -> None:
        if not self.is_open:
            return
        self.is_open = False
        if failure is None:
            self.command(Command.END)
        else:
            self.tell(Command.FAILED, failure)
        self.close()

    def abandon(self) -> None:
        self.is_open = False
