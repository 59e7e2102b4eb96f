"""This peer with its first states: it averages, until ``peer.agent.leaving`` has ended its part."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from averaging.errors import AveragingError
from averaging.history.state import FragmentState
from averaging.live.averager import Averager
from averaging.live.checks.loss_gate import LossGate
from averaging.live.checks.spot_checking import Judge
from averaging.live.learner_port import LearnerPort
from averaging.live.settings import Participant, RunTerms, Surroundings
from averaging.live.states.fetcher import FetchProgress
from averaging.rules.orders import OrderBook
from dht.forwarding_host import DiallingHost
from dht.identity import PeerId
from dht.throttled_host import ThrottledHost
from peer.agent.account import global_tokens
from peer.agent.leaving import Leaving
from peer.agent.online_peer import OnlinePeer
from peer.agent.policies import averager_settings, round_policy
from peer.agent.saver import Saver
from peer.rules.foundings import Founding, founding_of
from peer.rules.leaving import Departure
from peer.rules.ledger import APART, ROLLED_BACK
from peer.status import PeerStatus
from peer.storage.outer_state import founding_name

LOOK_EVERY_S = 0.25
SETTLE_EVERY_S = 5.0
"""Time between two questions to a peer on another founding of the run."""


class ActivePeer:
    """One peer that takes part in averaging, from its first states to its goodbye."""

    def __init__(self, online: OnlinePeer, averager: Averager) -> None:
        self._online = online
        self._local = online.local
        self._averager = averager
        self._saver = Saver(online, averager)
        self._local.averaging = averager

    def __repr__(self) -> str:
        return f"ActivePeer({self._local!r})"

    async def run(
        self,
        tasks: asyncio.TaskGroup,
        also: Mapping[str, Coroutine[Any, Any, None]],
        *,
        until_adopted: Callable[[float], Awaitable[None]] | None = None,
    ) -> Departure:
        """Take part until the end. ``also``: the delegate's own tasks, which end at the same time.

        ``until_adopted(timeout_s)`` waits until the trainer has adopted the last versions.
        """
        local, averager = self._local, self._averager
        # The verdict may have come before there was an averager to hear of it.
        averager.set_reachable(self._online.can_serve)
        self._online.presence.go_by_clocks_of(averager.is_established)
        self._online.host.prefers = averager.worth
        coroutines: dict[str, Coroutine[Any, Any, None]] = {
            "averager": averager.run(),
            "save": self._saver.run(),
            "ask others": self._online.ask_others(),
            "meet": self._online.meet_for_ever(),
            "turn out": self._online.turn_out_for_ever(),
            "watch presence": self._online.presence.watch(),
            "settle foundings": self._settle_foundings(),
            "follow orders": self._follow_orders(),
            "keep house": self._saver.keep_house(),
            **{each.name: each.run(averager) for each in self._online.services},
            **also,
        }
        if local.seat.settings.page is not None:
            coroutines["sample"] = self._online.sample()
        work = [tasks.create_task(each, name=name) for name, each in coroutines.items()]

        def begin(name: str, coroutine: Coroutine[Any, Any, None]) -> None:
            work.append(tasks.create_task(coroutine, name=name))

        async def stop() -> None:
            for task in work:
                task.cancel()
            await asyncio.wait(work)

        try:
            return await Leaving(
                self._online,
                averager,
                self._saver,
                begin=begin,
                stop=stop,
                until_adopted=until_adopted,
            ).run()
        finally:
            for task in work:
                task.cancel()

    async def _settle_foundings(self) -> None:
        """Go over to a heavier history of the run that was founded apart from the own one.

        The peers on the other one stay where they are, and read about it as well.
        """
        local = self._local
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            for peer in list(local.apart):
                (*answers,) = await self._online.statuses([peer])
                same = any(each.founding == local.founding.name for each in answers)
                if same or peer not in local.view:
                    del local.apart[peer]
                elif any(local.founding.gives_way_to(founding_of(each)) for each in answers):
                    await self._go_over(peer, answers[0])
            if local.apart:
                await asyncio.sleep(SETTLE_EVERY_S)

    async def _go_over(self, peer: PeerId, answer: PeerStatus) -> None:
        """Replace all states by those of a peer on another founding."""
        local = self._local
        lighter = local.founding
        try:
            states = await self._averager.states_of(peer)
        except AveragingError as error:
            local.log.write("give_way_failed", {"reason": str(error)})
            return
        await self._averager.before_jumps(states)
        # The fetched state is weighed: an answer may say anything.
        theirs = Founding(global_tokens(states), founding_name(states))
        if theirs.name != answer.founding or not local.founding.gives_way_to(theirs):
            return  # it went over itself meanwhile, or was overtaken
        await self._saver.save()  # the last checkpoint of what is given up
        await self._averager.replace_states(states, reason=APART)
        local.apart.pop(peer, None)
        name = local.board.names.within(peer)
        local.event(
            "went_over",
            peer=peer,
            name=name,
            tokens=lighter.tokens,
            theirs=global_tokens(local.states),
        )
        await self._saver.save()

    async def _follow_orders(self) -> None:
        """Keep what the run's owner attests, and go back where it takes the run."""
        local, good = self._local, self._local.good
        followed = None
        while good is not None:
            if local.directive != followed:
                followed = local.directive
                await asyncio.to_thread(good.pin, local.orders.attested)
            is_after = self._averager.is_after(local.rollback)
            if local.are_taken_back(self._averager.states, if_unknown=not is_after):
                await self._go_back()
            elif not is_after:
                # A newcomer, which has heard of the rollback only now: it has no state, or one of
                # after the rollback, and took no signature for genuine.
                await self._averager.begin_again(
                    self._averager.states, rollback=local.rollback, reason=ROLLED_BACK
                )
            await asyncio.sleep(LOOK_EVERY_S)

    async def _go_back(self) -> None:
        """Go on from the states that the run's owner has taken the run back to."""
        local, began = self._local, time.monotonic()
        number = local.rollback
        assert local.good is not None
        roots = await asyncio.to_thread(local.roots)
        await self._averager.begin_again(roots, rollback=number, reason=ROLLED_BACK)
        await asyncio.to_thread(local.good.forget_recent)
        local.came_back()
        local.event(
            "rolled_back",
            number=number,
            versions=[0 if root is None else root.version for root in roots],
            missing=sum(root is None for root in roots),
            seconds=time.monotonic() - began,
        )
        await self._saver.save()


@dataclass(frozen=True, slots=True)
class TrainerSide:
    """The trainer of a peer, as an averager asks it."""

    port: LearnerPort
    gate: LossGate | None
    """Measures the loss before and after a state that others made."""
    judge: Judge
    """Judges the contributions of others."""


def make_averager(
    online: OnlinePeer,
    trainer: TrainerSide | None,
    *,
    incarnation: int,
    states: Sequence[FragmentState],
    founder: bool = False,
    closed: Callable[[str], str | None] = lambda protocol: None,
    on_fetched: Callable[[FetchProgress], None] = lambda progress: None,
) -> Averager:
    """The averager of this peer. ``closed(protocol)``: a reason to refuse streams now.

    ``on_fetched`` hears of downloads.
    """
    local = online.local
    run, guest = local.run_file, local.guest
    book = OrderBook()
    book.orders = local.round_orders()
    throttled = ThrottledHost(online.guarded, up=guest.up, down=guest.down, closed=closed)
    return Averager(
        DiallingHost(throttled, online.presence.addresses_to_dial),
        None if trainer is None else trainer.port,
        me=Participant(
            identity=local.seat.identity,
            incarnation=incarnation,
            founder=founder,
            site=local.seat.settings.site,
        ),
        terms=RunTerms(
            local.run_id,
            local.layout,
            round_policy(run, fragments=len(local.layout.fragments)),
            book,
        ),
        around=Surroundings(
            view=local.view,
            absent=local.absent,
            line_max=guest.line_max,
            may_train=online.may_train,
            trusted=online.is_vouched_for,
            begins_from=local.is_followed,
            rollback=local.rollback,
            gate=None if trainer is None else trainer.gate,
            judge=None if trainer is None else trainer.judge,
            take_directive=online.take_directive,
            state_files=local.state_files,
            keep_state=None if local.good is None else local.good.keep,
            on_event=local.averager_event,
            on_fetched=on_fetched,
            shelf=online.proofs,
            on_convicted=online.ban,
            watch=local.seat.watch,
        ),
        states=states,
        settings=averager_settings(run, local.layout),
    )
