"""This peer with its first states: it averages, and finds out when to end."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from averaging import messages
from averaging.errors import AveragingError
from averaging.history.state import FragmentState
from averaging.live.averager import Averager
from averaging.live.checks.loss_gate import LossGate
from averaging.live.checks.spot_checking import Judge
from averaging.live.learner_port import LearnerPort
from averaging.live.settings import Participant, RunTerms, Surroundings
from averaging.live.states.fetcher import FetchProgress
from averaging.rules.orders import OrderBook
from dht.errors import DhtError
from dht.forwarding_host import DiallingHost
from dht.identity import PeerId
from dht.throttled_host import ThrottledHost
from peer.agent.account import global_tokens
from peer.agent.local_peer import LAST_ROUND_S
from peer.agent.online_peer import OnlinePeer
from peer.agent.policies import averager_settings, round_policy
from peer.agent.saver import Saver
from peer.events import sentences
from peer.rules.ending import Ending, LastOffers, LastRounds, who_differs, who_leaves_too
from peer.rules.foundings import Founding, founding_of
from peer.rules.ledger import APART, ROLLED_BACK
from peer.status import PeerStatus
from peer.storage.outer_state import founding_name

ASKED_LAST = 32
"""Number of peers that are asked at most before this peer goes."""

PENDING_SHARE = 0.4
"""Least share of the time to leave for a leaving peer to have merged what is pending."""

LOOK_AT_END_EVERY_S = 0.25
HAND_OVER_SHARE = 0.2
"""Least share of the time to leave for another peer to take over this one's versions."""

OFFER_EVERY_S = 0.25

TOGETHER_S = 10.0
"""Time after which a peer goes though others that leave at the same moment stand elsewhere."""

TOGETHER_LEAST_S = 3.0
"""The same, after the own work was merged for longer than that."""

HAND_OVER_LOOK_S = 0.25
SETTLE_EVERY_S = 5.0
"""Time between two questions to a peer on another founding of the run."""

CLOCKS_DIFFER_S = 1.0
"""Uncertainty of the swarm's clock: a peer answers calls so long before the run's date, and begins
its own last rounds so long after it."""

AGREED_TIMES = 2
"""Number of times in a row that a peer must see the others at its own versions before it goes."""


class ActivePeer:
    """One peer that takes part in averaging, from its first states to its goodbye."""

    def __init__(self, online: OnlinePeer, averager: Averager) -> None:
        self._online = online
        self._local = online.local
        self._averager = averager
        self._saver = Saver(online, averager)
        self._apart = ""
        """Peers that ended the run elsewhere, and how."""
        self._folds_before = averager.stats.folds
        """Folds before this peer began to leave."""
        self._made_last_rounds = False
        self._exported = ""
        """The name of the model that was exported."""
        self._local.averaging = averager

    def __repr__(self) -> str:
        return f"ActivePeer({self._local!r})"

    async def run(
        self,
        tasks: asyncio.TaskGroup,
        also: Mapping[str, Coroutine[Any, Any, None]],
        *,
        until_adopted: Callable[[float], Awaitable[None]] | None = None,
    ) -> Ending:
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
            "look at the end": self._look_at_the_end(),
            "settle foundings": self._settle_foundings(),
            "follow orders": self._follow_orders(),
            "keep house": self._saver.keep_house(),
            **{each.name: each.run(averager) for each in self._online.services},
            **also,
        }
        if local.seat.settings.page is not None:
            coroutines["sample"] = self._online.sample()
        work = [tasks.create_task(each, name=name) for name, each in coroutines.items()]
        try:
            ending = await local.ending
            began = time.monotonic()
            local.enter_phase("leaving", ending.reason, 0.0)
            if ending.finished:
                await self._until_others_agree(ending.timeout_s)
            elif ending.timeout_s > 0:
                greeting = self._online.greet_keepers()
                work.append(tasks.create_task(greeting, name="greet keepers"))
                await local.unless_hurried(self._merge_pending(ending))
                share_s = TOGETHER_S - (time.monotonic() - began)
                together = self._leave_together(max(TOGETHER_LEAST_S, share_s))
                await local.unless_hurried(together)
            if not await local.unless_hurried(averager.drain(timeout_s=0.4 * ending.timeout_s)):
                local.event("drain_cut_short", in_flight=averager.in_flight)
            if ending.timeout_s > 0:
                left_s = ending.patience_left_s(time.monotonic() - began)
                await local.unless_hurried(self._hand_over(ending.timeout_s, patience_s=left_s))
            if ending.timeout_s > 0 and until_adopted is not None and not local.hurried.done():
                await until_adopted(min(2.0, 0.2 * ending.timeout_s))
        finally:
            for task in work:
                task.cancel()
        await asyncio.wait(work)
        await self._saver.save()
        for service in self._online.services:
            await service.save()
        if ending.finished:
            await self._saver.export(apart=self._apart)
        with contextlib.suppress(DhtError):
            await self._online.presence.leave()
        return ending

    async def _merge_pending(self, ending: Ending) -> None:
        """Wait for one more round of each fragment, so that no work is lost with this peer."""
        local, began = self._local, time.monotonic()
        self._folds_before = self._averager.stats.folds
        least_s, bytes_at_first, told, spent_s = PENDING_SHARE * ending.timeout_s, 0, 0, 0.0
        while pending := local.delegate.pending_tokens():
            if local.paused is not None:
                break  # nothing is merged until the run's owner resumes it
            left = local.offer_before_leaving()
            bytes_at_first = bytes_at_first or left.encoded_bytes
            if pending != told:
                if not told:
                    local.event("handing_over", tokens=pending, seconds=left.expected_s)
                told = pending
                share = left.encoded_bytes / max(1, bytes_at_first)
                text = f"{ending.reason}: {sentences.tokens_left(pending, left.expected_s)}"
                local.enter_phase("leaving", text, 1.0 - share)
            whole = replace(left, encoded_bytes=bytes_at_first)
            spent_s = time.monotonic() - began
            if spent_s >= whole.patience_s(least_s=least_s, most_s=ending.patience_s):
                break
            await asyncio.sleep(OFFER_EVERY_S)
        if told or pending:
            local.event(
                "last_offers",
                merged=not pending,
                alone=self._has_folded,
                tokens=pending,
                seconds=spent_s,
            )

    async def _leave_together(self, timeout_s: float) -> None:
        """Stay a member while others leave as well, until all have merged and have one model."""
        loop, local, online = asyncio.get_running_loop(), self._local, self._online
        deadline = loop.time() + timeout_s
        while local.versions() and local.paused is None and loop.time() < deadline:
            online.refresh_view()
            answers = await online.statuses(online.followers()[:ASKED_LAST])
            waiting = who_leaves_too(local.versions(), answers, model=local.model)
            if not waiting and not self._averager.in_flight:
                return
            if not answers:
                return
            local.offer_before_leaving()
            self._show_standing(PeerId(answer.peer) for answer in answers)
            await asyncio.sleep(OFFER_EVERY_S)

    @property
    def _has_folded(self) -> bool:
        """True if the pending work became this peer's own state, as nobody else trained."""
        return self._averager.stats.folds > self._folds_before

    # --- the end --------------------------------------------------------------------------------

    async def _look_at_the_end(self) -> None:
        """End the run by tokens or by its date."""
        local = self._local
        while not local.ending.done():
            local.check_the_end()
            self._averager.hurry_to_the_end()
            left_s = self._online.seconds_left()
            if left_s is not None and local.phase == "ready":
                if left_s <= CLOCKS_DIFFER_S and local.last_rounds is None:
                    local.last_rounds = LastRounds(local.versions())
                    self._averager.gather_everybody()
                is_over = left_s <= -CLOCKS_DIFFER_S and not self._made_last_rounds
                if is_over and local.last_rounds is not None:
                    self._made_last_rounds = True
                    await self._make_last_rounds(local.last_rounds)
                    local.finish_by_date()
            if local.ended_at is not None and local.seat.stays:
                await self._keep_the_end()
            await asyncio.sleep(LOOK_AT_END_EVERY_S)

    async def _keep_the_end(self) -> None:
        """Save and export the run's final state; again if it turns out to be another one."""
        local = self._local
        if local.phase == "ready" and local.model != self._exported:
            self._exported = local.model
            await self._until_others_agree(LAST_ROUND_S)
            await self._saver.save()
            await self._saver.export(apart=self._apart)

    async def _settle_foundings(self) -> None:
        """Go over to a heavier history of the run that was founded apart from the own one.

        The peers on the other one stay where they are, and read about it as well.
        """
        local = self._local
        while True:
            await asyncio.sleep(LOOK_AT_END_EVERY_S)
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
            await asyncio.sleep(LOOK_AT_END_EVERY_S)

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

    async def _make_last_rounds(self, rounds: LastRounds) -> None:
        """Average every fragment once more with all live peers, and offer nothing after that.

        The only learner does as one that leaves: its work goes to a keeper, or is folded.
        """
        loop, local, averager = asyncio.get_running_loop(), self._local, self._averager
        rules = local.run_file.rounds
        deadline = loop.time() + min(rules.round_deadline_s, rules.quorum_deadline_s + LAST_ROUND_S)
        local.event(
            "last_round", versions=list(rounds.versions), peers=len(local.others_who_train())
        )
        while loop.time() < deadline and await self._has_company():
            # A keeper stays open as long: homes that only dial out meet at it, and the only learner
            # leaves it its work.
            if averager.port is not None:
                missing = rounds.missing(local.versions())
                if not missing:
                    break
                averager.make_due(missing)
            await asyncio.sleep(0.5)
        if averager.port is not None and not local.others_who_train():
            left_s = deadline - loop.time()
            alone = Ending("the run ends", 0, True, timeout_s=left_s, patience_s=left_s)
            local.ends_alone = True
            await local.unless_ending(self._merge_pending(alone))
        local.closed |= set(range(len(local.layout.fragments)))
        # A round that was called just before must not make another version after the others have
        # gone: a peer that hears of this one's end relies on the versions of that moment.
        if not local.seat.stays:
            await averager.drain(timeout_s=max(1.0, deadline - loop.time()))
        averager.end_merges()

    async def _has_company(self) -> bool:
        """True if another learner has not made its last rounds yet, as far as is known.

        One that does not answer may be dead, and counts as live for a while. Without it this peer
        may be the only learner, and has work that is merged with nobody.
        """
        asked = self._local.others_who_train()[:ASKED_LAST]
        answers = await self._online.statuses(asked)
        trains = any(
            each.phase in ("ready", "leaving") and each.ended_at is None for each in answers
        )
        return trains or len(answers) < len(asked)

    async def _until_others_agree(self, timeout_s: float) -> None:
        """Stay while another peer may still need versions of this one, or this one theirs."""
        loop, local, online = asyncio.get_running_loop(), self._local, self._online
        deadline = loop.time() + timeout_s
        by_date = local.last_rounds is not None or self._averager.closed_ranks
        agreed = 0
        waiting: list[str] = []
        while agreed < AGREED_TIMES and loop.time() < deadline:
            online.refresh_view()
            answers = await online.statuses(online.followers()[:ASKED_LAST])
            waiting = who_differs(local.versions(), answers, by_date=by_date, model=local.model)
            if self._averager.in_flight:
                waiting.append("a round is under way")
            agreed = 0 if waiting else agreed + 1
            if not answers or (agreed and not by_date):
                return
            self._show_standing(PeerId(answer.peer) for answer in answers)
            await asyncio.sleep(1.0)
        if waiting:
            self._apart = "; ".join(waiting)
            local.event(
                "left_apart", text=self._apart, versions=list(local.versions()), model=local.model
            )

    async def _hand_over(self, timeout_s: float, *, patience_s: float) -> None:
        """Stay until a keeper, or without one another learner, has every version of this peer."""
        loop, local, online = asyncio.get_running_loop(), self._local, self._online
        averager, began = self._averager, loop.time()
        # A fold is fetched as a state of 8 bytes for each value, a round by its payload.
        size = 8 * local.layout.size if self._has_folded else averager.round_bytes()
        left = LastOffers(encoded_bytes=size, bytes_per_s=averager.bytes_per_s)
        stays_s = left.patience_s(least_s=HAND_OVER_SHARE * timeout_s, most_s=patience_s)
        while local.versions() and loop.time() < began + stays_s:
            online.refresh_view()
            keepers = [m.peer for m in online.live_members() if m.record.role == "keeper"]
            takers = [peer for peer in keepers if peer in local.view] or online.followers()
            answers = await online.statuses(takers[:ASKED_LAST])
            lacking = [each for each in answers if lacks(each.versions, local.versions())]
            if len(lacking) < len(answers) or not answers:
                return
            self._show_standing(PeerId(each.peer) for each in lacking)
            await asyncio.sleep(HAND_OVER_LOOK_S)

    def _show_standing(self, peers: Iterable[PeerId]) -> None:
        """Send this peer's standing: a peer behind it catches up, a peer ahead of it answers."""
        for peer in peers:
            for state in self._averager.states:
                if state is not None:
                    send_standing(self._averager, peer, state)


def lacks(theirs: Sequence[int], mine: Sequence[int]) -> bool:
    """True if a peer at these versions does not have all that this one has."""
    return len(theirs) != len(mine) or any(t < m for t, m in zip(theirs, mine, strict=True))


def send_standing(averager: Averager, peer: PeerId, state: FragmentState) -> None:
    """Send the standing of one fragment to ``peer``, for it to compare with its own."""
    compare = messages.Compare(state.fragment, averager.shown(state))
    averager.transport.send(peer, messages.encode(compare))


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
