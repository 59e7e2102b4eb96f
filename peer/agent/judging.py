"""Judgements of an agent's trainer: states of others by its loss, and their contributions.

**The loss gate** asks for the held-out loss before and after a state that others made; what it
refuses is remembered in the peer's folder. **Spot checks** have the trainer try a contribution on
its author's own data. The two states of a trial are as large as two fragments, so they go by a file
in the peer's folder, which is removed when the answer is there or no longer waited for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path

import numpy as np

from averaging.guard.door import (
    BACK_MAX,
    GateSettings,
    Losses,
    LossGate,
    OtherData,
    Refusals,
    Trial,
)
from averaging.history.readings import Reading
from dht.bounded_mapping import BoundedMapping, by_age
from dht.membership.orders import Attested
from peer.agent.peer import Peer
from peer.agent.slots import SlotPort
from peer.bridge.messages import HasRead, Measure, Measured, Tried, Try
from peer.bridge.trainer_line import TrainerLine
from peer.storage.proofs import keep_refusals, kept_refusals

logger = logging.getLogger(__name__)

STATES = "trial.f32"

TRIED_WITHIN_S = 240.0
"""Time for the trainer to read another one's data and to come to a safe point."""
READ_WITHIN_S = 10.0
"""Time for the trainer to tell what it has read: it does so once a second."""
LOOK_S = 0.1


async def trainers_loss(line: TrainerLine) -> float | None:
    """The held-out loss at the trainer's next safe point; ``None`` if it cannot measure one."""
    measured: Measured = await line.ask(lambda number: Measure(0, gate=number))
    return measured.loss if measured.sequences else None


def open_gate(peer: Peer, port: SlotPort, line: TrainerLine) -> LossGate | None:
    """The gate of this peer; ``None`` where the run has none.

    A synchronous trainer waits for the very versions that would have to be judged.
    """
    rise_max = peer.run_file.evaluation.rise_max
    if rise_max == "off" or peer.run_file.synchronous:
        return None

    async def measure() -> float | None:
        # A trainer on its way into the run has no parameters to compare a loss with.
        return await trainers_loss(line) if peer.phase == "ready" else None

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
        measure=measure,
        holds=port.holds,
        refusals=kept_refusals(peer.directory),
        attested=attested,
        keep=keep,
        on_event=peer.averager_event,
    )


class TrainersTrials:
    """The ``Judge`` of an agent beside a trainer."""

    def __init__(self, line: TrainerLine, directory: Path, *, same_data: bool) -> None:
        self.same_data = same_data
        self.judges = False
        self._line = line
        self._path = directory / STATES
        with contextlib.suppress(OSError):  # an agent that was killed may have left it
            self._path.unlink(missing_ok=True)
        self._readings = BoundedMapping[int, Reading | None](
            "own readings", 4 * BACK_MAX, worth=by_age
        )

    def heard_reading(self, message: HasRead) -> None:
        self.judges = message.judges
        self._readings.update(sorted(message.steps.items()))

    async def reading_of(self, step: int) -> Reading | None:
        async with asyncio.timeout(READ_WITHIN_S):
            while step not in self._readings:
                if self._readings and step < next(iter(self._readings)):
                    return None
                await asyncio.sleep(LOOK_S)
        return self._readings[step]

    async def judge(self, trial: Trial) -> Losses | OtherData | None:

        def question(number: int) -> Try:
            return Try(
                number=number,
                path=str(self._path),
                fragment=trial.fragment,
                author=trial.author,
                reading=trial.reading,
            )

        try:
            await asyncio.to_thread(self._write, trial)
            tried: Tried = await self._line.ask(question, within_s=TRIED_WITHIN_S)
        except (OSError, TimeoutError) as error:
            logger.warning("trial_not_made fragment=%d reason=%s", trial.fragment, error)
            return None
        finally:
            with contextlib.suppress(OSError):
                await asyncio.to_thread(self._path.unlink, missing_ok=True)
        if tried.other_data:
            return OtherData()
        return None if tried.losses is None else Losses(*tried.losses, tried.seconds)

    def _write(self, trial: Trial) -> None:
        with self._path.open("wb") as file:
            for state in (trial.before, trial.after):
                file.write(np.ascontiguousarray(state, np.float32).data)
