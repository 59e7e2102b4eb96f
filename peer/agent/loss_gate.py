"""The loss gate of an agent: its trainer measures, its folder remembers (``averaging.live``)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from averaging.live.checks.loss_gate import GateSettings, LossGate
from averaging.rules.loss_gate import Refusals
from dht.membership.orders import Attested
from peer.agent.peer import Peer
from peer.agent.slots import SlotPort
from peer.bridge.messages import Measure, Measured
from peer.bridge.trainer_line import TrainerLine
from peer.storage.proofs import keep_refusals, kept_refusals

logger = logging.getLogger(__name__)


class TrainersLoss:
    """The held-out loss of the trainer's parameters, measured on request."""

    def __init__(self, line: TrainerLine, *, is_ready: Callable[[], bool]) -> None:
        """``is_ready()``: true while the trainer trains in the run."""
        self._line = line
        self._is_ready = is_ready

    async def measure(self) -> float | None:
        """The loss at the trainer's next safe point; ``None`` if it cannot measure one.

        A trainer that is not in the run yet has no parameters that a loss could be compared with.
        """
        if not self._is_ready():
            return None
        measured: Measured = await self._line.ask(lambda number: Measure(0, gate=number))
        return measured.loss if measured.sequences else None


def open_gate(peer: Peer, port: SlotPort, loss: TrainersLoss) -> LossGate | None:
    """The gate of this peer; ``None`` where the run has none.

    A synchronous trainer waits for the very versions that would have to be judged.
    """
    rise_max = peer.run_file.evaluation.rise_max
    if rise_max == "off" or peer.run_file.synchronous:
        return None

    def attested(fragment: int) -> Attested | None:
        known = peer.owner.orders.attested
        return known[fragment] if fragment < len(known) else None

    async def keep(refusals: Refusals) -> None:
        try:
            await asyncio.to_thread(keep_refusals, peer.directory, refusals)
        except OSError as error:
            logger.warning("refusals_not_kept reason=%s", error)

    return LossGate(
        GateSettings(rise_max=rise_max),
        measure=loss.measure,
        holds=port.holds,
        refusals=kept_refusals(peer.directory),
        attested=attested,
        keep=keep,
        on_event=peer.averager_event,
    )
