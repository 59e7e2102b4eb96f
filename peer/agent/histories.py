"""Replaces the states of a peer by those of another history of the run.

That is a heavier one, founded apart from its own, or where the run's owner takes the run back to.
"""

from __future__ import annotations

import asyncio
import time

from averaging.errors import AveragingError
from averaging.live.averager import Averager
from dht.identity import PeerId
from peer.agent.peer import Peer
from peer.agent.saver import Saver
from peer.rules.ledger import APART, ROLLED_BACK
from peer.rules.others import Founding, founding_of
from peer.status import PeerStatus
from peer.storage.outer_state import founding_name, global_tokens

LOOK_EVERY_S = 0.25
SETTLE_EVERY_S = 5.0
"""Time between two questions to a peer on another founding of the run."""


class Histories:
    """The history that a peer with states is on."""

    def __init__(self, peer: Peer, averager: Averager, saver: Saver) -> None:
        self._peer = peer
        self._averager = averager
        self._saver = saver

    async def settle_foundings(self) -> None:
        """Go over to a heavier history of the run that was founded apart from the own one.

        The peers on the other one stay where they are, and read about it as well.
        """
        here = self._peer
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            for peer in list(here.apart):
                (*answers,) = await here.network.statuses([peer])
                same = any(each.founding == here.founding.name for each in answers)
                if same or peer not in here.view:
                    del here.apart[peer]
                elif any(here.founding.gives_way_to(founding_of(each)) for each in answers):
                    await self._go_over(peer, answers[0])
            if here.apart:
                await asyncio.sleep(SETTLE_EVERY_S)

    async def _go_over(self, peer: PeerId, answer: PeerStatus) -> None:
        """Replace all states by those of a peer on another founding."""
        here = self._peer
        lighter = here.founding
        try:
            states = await self._averager.states_of(peer)
        except AveragingError as error:
            here.log.write("give_way_failed", {"reason": str(error)})
            return
        await self._averager.before_jumps(states)
        # The fetched state is weighed: an answer may say anything.
        theirs = Founding(global_tokens(states), founding_name(states))
        if theirs.name != answer.founding or not here.founding.gives_way_to(theirs):
            return  # it went over itself meanwhile, or was overtaken
        await self._saver.save()  # the last checkpoint of what is given up
        await self._averager.replace_states(states, reason=APART)
        here.apart.pop(peer, None)
        name = here.board.names.within(peer)
        here.event(
            "went_over",
            peer=peer,
            name=name,
            tokens=lighter.tokens,
            theirs=global_tokens(here.states),
        )
        await self._saver.save()

    async def follow_orders(self) -> None:
        """Go back where the run's owner takes the run."""
        owner = self._peer.owner
        while self._peer.good is not None:
            is_after = self._averager.is_after(owner.rollback)
            if owner.takes_back(self._averager.states, if_unknown=not is_after):
                await self._go_back()
            elif not is_after:
                # A newcomer, which has heard of the rollback only now: it has no state, or one of
                # after the rollback, and took no signature for genuine.
                await self._averager.begin_again(
                    self._averager.states, rollback=owner.rollback, reason=ROLLED_BACK
                )
            await asyncio.sleep(LOOK_EVERY_S)

    async def _go_back(self) -> None:
        """Go on from the states that the run's owner has taken the run back to."""
        here, began = self._peer, time.monotonic()
        number = here.owner.rollback
        assert here.good is not None
        roots = await asyncio.to_thread(here.owner.roots)
        await self._averager.begin_again(roots, rollback=number, reason=ROLLED_BACK)
        await asyncio.to_thread(here.good.forget_recent)
        here.note_rollback()
        here.event(
            "rolled_back",
            number=number,
            versions=[0 if root is None else root.version for root in roots],
            missing=sum(root is None for root in roots),
            seconds=time.monotonic() - began,
        )
        await self._saver.save()
