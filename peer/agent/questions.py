"""The questions that the peers of a run ask each other, asked and answered by one of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from contextlib import AsyncExitStack

from blake3 import blake3

from averaging.live.averager import Averager
from dht.errors import DhtError
from dht.identity import PeerId, RunId, parse_peer_id
from peer import description, status
from peer.agent.figures import status_of
from peer.agent.network import STATUS_WITHIN_S, Network
from peer.agent.peer import Peer
from peer.agent.services import Service
from peer.bridge.messages import BATCH, SEED
from peer.calls import ATTESTABLE, STATES_MAX
from peer.description import Description, Difference
from peer.errors import ModelMismatch
from peer.status import PeerStatus

logger = logging.getLogger(__name__)

ASK_EVERY_S = 10.0
ASKED_AT_ONCE = 3
SAME_BATCHES = {
    BATCH: "the first batch is the same",
    SEED: "the random seed is the same; it is no matter where the program divides its data itself",
}

ASKED_FOR_OTHERS_S = 2.0
ASKED_FOR_OTHERS_MAX = 16
"""Limit of members that are asked for their status at once, on behalf of other peers."""


class Questions(Service):
    """Answers about this peer, and asks a few others after each other for their status."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._asking_for_others = 0
        self._told_frozen = False
        """A peer with other frozen parameters was reported."""
        self._told_batches = False
        """A peer with the same random seed was reported."""

    # --- answers --------------------------------------------------------------------------------

    async def open(self, stack: AsyncExitStack) -> None:
        host, run_id = self._peer.network.guarded, self._peer.run_id
        await status.CALL.serve(host, run_id, self.answer_status)
        await description.CALL.serve(host, run_id, self._answer_description)
        if self._peer.good is not None:
            await ATTESTABLE.serve(host, run_id, self._answer_attestable)

    async def answer_status(self, peer: PeerId, asked: str) -> bytes:
        """Answer another peer's call of ``peer.status``, perhaps about a third peer."""
        about = parse_peer_id(asked) if asked else None
        if about is None or about == self._peer.me:
            return status.CALL.encode(status_of(self._peer).for_others())
        return status.CALL.encode(await self._status_for_another(about))

    async def _status_for_another(self, about: PeerId) -> PeerStatus:
        """Ask a member for its status on behalf of a peer that cannot reach it."""
        here, presence = self._peer, self._peer.network.presence
        if presence.table.get(about) is None:
            raise ValueError(f"this peer knows no member {about}")
        if self._asking_for_others >= ASKED_FOR_OTHERS_MAX:
            raise ValueError("this peer asks for too many others at the moment; ask again")
        self._asking_for_others += 1
        try:
            await presence.connect(about, timeout_s=ASKED_FOR_OTHERS_S)
            return await status.ask(
                here.network.host, about, here.run_id, timeout_s=ASKED_FOR_OTHERS_S
            )
        finally:
            self._asking_for_others -= 1

    async def _answer_description(self, peer: PeerId, asked: int) -> bytes:
        return description.page(self._peer.description, asked)

    async def _answer_attestable(self, peer: PeerId, asked: str) -> bytes:
        assert self._peer.good is not None
        kept = await asyncio.to_thread(self._peer.good.kept)
        return ATTESTABLE.encode(tuple(kept)[-STATES_MAX:])

    # --- questions ------------------------------------------------------------------------------

    async def run(self, averager: Averager) -> None:
        """Ask a few peers after the other, for ever, so that the newest held-out loss spreads."""
        here, turn = self._peer, 0
        while True:
            await asyncio.sleep(ASK_EVERY_S)
            chosen = to_ask(here.me, here.view, turn)
            turn += 1
            for answer in await here.ask_others(chosen):
                await self._tell_frozen_difference(answer)
                self._tell_same_batches(answer)

    async def _tell_frozen_difference(self, answer: PeerStatus) -> None:
        """Report the first peer whose frozen parameters are not this peer's."""
        here, ours = self._peer, self._peer.description.frozen_hash
        if self._told_frozen or not ours or answer.frozen in ("", ours):
            return
        self._told_frozen = True
        differing = await differences(
            here.network, here.run_id, here.description, PeerId(answer.peer)
        )
        names = [name for name, _, _ in differing[: ModelMismatch.SHOWN]]
        here.event(
            "frozen_differs", peer=answer.peer, name=answer.name, parameters=", ".join(names)
        )

    def _tell_same_batches(self, answer: PeerStatus) -> None:
        """Report the first peer whose program trains on the same batches."""
        ours = self._peer.batches
        if self._told_batches or not ours or answer.batches != ours:
            return
        self._told_batches = True
        how = SAME_BATCHES.get(ours.partition(" ")[0], "")
        self._peer.event("same_batches", peer=answer.peer, name=answer.name, how=how)


async def differences(
    network: Network, run: RunId, ours: Description, peer: PeerId
) -> tuple[Difference, ...]:
    """The tensors that differ here and at ``peer``; empty if it does not say."""
    try:
        theirs = await description.ask(network.host, peer, run, timeout_s=STATUS_WITHIN_S)
    except (DhtError, ValueError) as error:
        logger.info("description_not_had peer=%s reason=%s", peer, error)
        return ()
    return ours.differences(theirs)


def to_ask(me: PeerId, live: Iterable[PeerId], turn: int) -> list[PeerId]:
    """The peers that a peer asks in its turn: others each time, and not those that others ask.

    In a small swarm these are a quarter of them, as all soon have heard what there is to hear.
    """
    ranked = sorted(live, key=lambda peer: blake3(f"{turn} {me} {peer}".encode()).digest())
    return ranked[: min(ASKED_AT_ONCE, -(-len(ranked) // 4))]
