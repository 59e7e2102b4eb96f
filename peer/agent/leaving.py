"""Does what the end of a run asks of a peer with states (``peer.rules.ending``)."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any

from averaging import messages
from averaging.history.state import FragmentState, value_bytes
from averaging.live.averager import Averager
from averaging.rules.peer_view import PeerView
from dht.errors import DhtError
from dht.identity import PeerId
from peer.agent.peer import Peer
from peer.agent.saver import Saver
from peer.rules import ending as rules
from peer.rules.ending import Do, Effect, Heard, Input, Seen, State, Whom
from peer.rules.leaving import Departure

ASKED_LAST = 32
"""Number of peers that are asked at most before this peer goes."""


class Leaving:
    """One peer with states, as its ``Ending`` moves it."""

    def __init__(
        self,
        peer: Peer,
        averager: Averager,
        saver: Saver,
        *,
        begin: Callable[[str, Coroutine[Any, Any, None]], object],
        stop: Callable[[], Awaitable[None]],
    ) -> None:
        """``begin(name, work)`` begins other work of this peer, and ``stop()`` ends all of it."""
        self._peer = peer
        self._end = peer.end
        self._ending = peer.ending
        self._averager = averager
        self._saver = saver
        self._begin = begin
        self._stop = stop

    def __repr__(self) -> str:
        return f"Leaving({self._ending!r})"

    async def run(self) -> Departure:
        """Take part until this peer is gone. Returns why it went."""
        end, ending = self._end, self._ending
        looked_in: State | None = None
        while True:
            while end.todo:
                await self._do(*end.todo.popleft())
            if ending.state is State.GONE:
                assert ending.departure is not None
                return ending.departure
            if ending.state is looked_in and await end.happens(within_s=ending.look_every_s):
                continue
            looked_in = ending.state
            end.hear(rules.Look(self._seen()))

    def _seen(self) -> Seen:
        peer, averager, order = self._peer, self._averager, self._peer.owner.orders.end
        calm = self._ending.is_calm  # then a look costs little, whatever the run's size
        return Seen(
            versions=peer.versions(),
            model="" if calm else peer.model,
            final=averager.final_fragments,
            closed_ranks=averager.closed_ranks,
            in_flight=averager.in_flight,
            pending=0 if calm else peer.role.pending_tokens(),
            folds=averager.stats.folds,
            paused=peer.owner.paused is not None,
            learners=len(peer.others_who_train()),
            date_left_s=peer.seconds_left(),
            owner_set_version=order is not None and order.version is not None,
            owner_set_date=order is not None and order.at is not None,
            state_bytes=value_bytes(peer.run_file.outer.momentum) * peer.layout.size,
            round_bytes=averager.round_bytes(),
            bytes_per_s=averager.bytes_per_s,
        )

    async def _do(self, state: State, effect: Effect) -> None:
        here, averager = self._peer, self._averager
        match effect:
            case rules.Ask(whom):
                await self._wait_in(state, self._answers(whom))
            case rules.Drain(timeout_s):
                await self._wait_in(state, self._drained(timeout_s))
            case rules.Adopt(timeout_s):
                await self._wait_in(state, self._adopted(timeout_s))
            case rules.Show(peers):
                for peer in peers:
                    for standing in averager.states:
                        if standing is not None:
                            send_standing(averager, peer, standing)
            case rules.MakeDue(fragments):
                averager.make_due(fragments)
            case rules.Enter(phase, text, done):
                here.enter_phase(phase, text, done)
            case rules.Tell():
                here.event(effect.name, **effect.fields)
            case rules.Export(apart):
                await self._saver.export(apart=apart)
            case Do.HURRY:
                averager.hurry_to_the_end()
            case Do.GATHER:
                averager.gather_everybody()
            case Do.OFFER:
                self._end.hear(here.offer_before_leaving())
            case Do.END_MERGES:
                averager.end_merges()
            case Do.GREET:
                self._begin("greet keepers", here.network.greet_keepers())
            case Do.STOP:
                await self._stop()
            case Do.SAVE:
                await self._saver.save()
                self._end.hear(Heard.SAVED)
            case Do.GOODBYE:
                for service in here.services:
                    await service.save()
                with contextlib.suppress(DhtError):
                    await here.network.presence.leave()

    async def _wait_in(self, state: State, work: Coroutine[Any, Any, Input]) -> None:
        """Hear what ``work`` has found, unless this peer is in another state before."""
        outcome = await self._end.unless(lambda: self._ending.state is not state, work)
        if outcome is not None and self._ending.state is state:
            self._end.hear(outcome)

    async def _answers(self, whom: Whom) -> rules.Answers:
        here, network = self._peer, self._peer.network
        here.refresh_view()
        match whom:
            case Whom.LEARNERS:
                peers = here.others_who_train()
            case Whom.FOLLOWERS:
                peers = network.followers()
            case Whom.TAKERS:
                peers = takers(network.keepers(), network.followers(), here.view)
        answers = await here.ask_others(asked := peers[:ASKED_LAST])
        return rules.Answers(answers, len(asked), self._seen())

    async def _drained(self, timeout_s: float) -> rules.Drained:
        await self._averager.drain(timeout_s=timeout_s)
        return rules.Drained(self._seen())

    async def _adopted(self, timeout_s: float) -> Heard:
        await self._peer.role.until_adopted(timeout_s)
        return Heard.ADOPTED


def takers(
    keepers: Sequence[PeerId], followers: Sequence[PeerId], view: Mapping[PeerId, PeerView]
) -> list[PeerId]:
    """Keepers that take over a leaving peer's work, the one with the fastest line first.

    Where there is no keeper: the followers.
    """
    able = [keeper for keeper in keepers if keeper in view] or followers
    return sorted(able, key=lambda peer: -(view[peer].bytes_per_s or 0.0))


def send_standing(averager: Averager, peer: PeerId, state: FragmentState) -> None:
    """Send the standing of one fragment to ``peer``, for it to compare with its own."""
    compare = messages.Compare(state.fragment, averager.shown(state))
    averager.transport.send(peer, messages.encode(compare))
