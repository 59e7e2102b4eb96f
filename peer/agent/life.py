"""The life of one peer: it goes on line, gets in, takes part in averaging, and leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from contextlib import AsyncExitStack
from typing import Any

from averaging.guard.door import Defences
from averaging.live.averager import Averager
from averaging.live.settings import Participant, RunTerms, Surroundings
from averaging.numbers.arrays import check_subnormals
from averaging.rules.orders import OrderBook
from dht.errors import DhtError
from dht.wrapped_host import DiallingHost, ThrottledHost
from peer.agent.figures import LocalPage
from peer.agent.histories import Histories
from peer.agent.leaving import Leaving
from peer.agent.network import Network, open_host
from peer.agent.peer import Peer
from peer.agent.policies import averager_settings, round_policy
from peer.agent.questions import Questions
from peer.agent.saver import Saver
from peer.agent.services import Begin, FirstStates, of_every_peer
from peer.errors import PeerError
from peer.installed import extras
from peer.rules.leaving import Departure
from peer.storage.credentials import check_admitted


async def live(peer: Peer, *also: Coroutine[Any, Any, None]) -> Departure:
    """Take part in the run, from the first moment to the goodbye. Returns why the peer left.

    ``also``: what its role does from the first moment on, such as hearing whether it is to leave.
    Raises ``PeerError`` or ``DhtError``.
    """
    async with AsyncExitStack() as stack:
        stack.callback(peer.log.close)
        check_subnormals()
        peer.tell_place_of_state()
        compiling = [
            part.compile_codecs(peer.layout.size, peer.event) for part in extras("compiled.loading")
        ]
        first = (*also, *compiling, peer.guest.watch_machine())
        try:
            async with asyncio.TaskGroup() as tasks:
                helpers = [tasks.create_task(work) for work in first]
                try:
                    await go_online(peer, stack)
                    left = await _take_part(peer, tasks)
                finally:
                    for helper in helpers:
                        helper.cancel()
        except BaseExceptionGroup as group:
            # Errors that a person can act on are told as such; all others are bugs.
            expected, bugs = group.split((PeerError, DhtError))
            if bugs is not None or expected is None:
                raise
            raise _first_of(expected) from group
        peer.role.left(left)
        return left


def _first_of(group: BaseExceptionGroup[BaseException]) -> BaseException:
    first = group.exceptions[0]
    return _first_of(first) if isinstance(first, BaseExceptionGroup) else first


async def go_online(peer: Peer, stack: AsyncExitStack) -> None:
    """Take a peer on line until ``stack`` is closed. Raises ``NotAdmitted``."""
    seat = peer.seat
    admission = check_admitted(seat.run, seat.me, seat.credential, seat.role)
    peer.enter_phase("connecting", "starting the network daemon", 0.0)
    host = await open_host(seat, stack, tell_taken=lambda port: peer.event("port_taken", port=port))
    peer.network = network = Network(
        seat,
        host,
        admission,
        peer.guest,
        view=peer.view,
        absent=peer.absent,
        on_event=peer.hear_presence,
    )
    questions = Questions(peer)
    await questions.open(stack)  # before anybody can hear of this peer, and ask
    await network.presence.start()
    stack.push_async_callback(network.presence.close)
    own: list[Begin] = [] if seat.settings.page is None else [LocalPage]
    peer.services = [begin(peer) for begin in (*own, *of_every_peer(), *seat.services)]
    for service in peer.services:
        await service.open(stack)
    peer.services.append(questions)
    peer.enter_phase("connecting", "looking for peers", 0.5)


async def _take_part(peer: Peer, tasks: asyncio.TaskGroup) -> Departure:
    """Average from the first states on, until the peer is gone."""
    first = await peer.end.unless_leaving(peer.role.first_states())
    if first is None:
        assert peer.ending.departure is not None
        return peer.ending.departure  # it has nothing to save, and nobody waits for it
    averager = make_averager(peer, first)
    own = peer.role.work(averager, first)
    del first  # its states would take the memory of a model until the end of the run
    return await take_part(peer, averager, tasks, own)


def make_averager(peer: Peer, first: FirstStates) -> Averager:
    """The averager of a peer, with the states that it has got in with."""
    run, guest, network, role = peer.run_file, peer.guest, peer.network, peer.role
    book = OrderBook()
    book.orders = peer.owner.of_rounds()
    throttled = ThrottledHost(network.guarded, up=guest.up, down=guest.down, closed=role.why_closed)
    return Averager(
        DiallingHost(throttled, network.presence.addresses_to_dial, dials=network.host),
        role.learner,
        me=Participant(
            identity=peer.seat.identity,
            incarnation=role.incarnation,
            founder=role.learner is not None and first.are_own(peer.me),
            site=peer.seat.settings.site,
        ),
        terms=RunTerms(
            peer.run_id,
            peer.layout,
            round_policy(run, fragments=len(peer.layout.fragments)),
            book,
        ),
        around=Surroundings(
            view=peer.view,
            absent=peer.absent,
            line_max=guest.line_max,
            may_train=network.may_train,
            begins_from=network.is_followed,
            rollback=peer.owner.rollback,
            take_directive=network.take_directive,
            state_files=peer.state_files,
            keep_state=None if peer.good is None else peer.good.keep,
            on_event=peer.averager_event,
            on_fetched=role.on_fetched,
            guard=Defences(
                trusted=network.is_vouched_for,
                gate=role.gate,
                judge=role.judge,
                shelf=network.proofs,
                on_convicted=peer.ban,
            ),
            watch=peer.seat.watch,
        ),
        states=first.states,
        settings=averager_settings(run, peer.layout),
    )


async def take_part(
    peer: Peer,
    averager: Averager,
    tasks: asyncio.TaskGroup,
    own: Mapping[str, Coroutine[Any, Any, None]],
) -> Departure:
    """Average, and do all other work of a peer with states, until it is gone.

    ``own``: the work of its role.
    """
    network, saver = peer.network, Saver(peer, averager)
    histories = Histories(peer, averager, saver)
    peer.averager = averager
    # The verdict may have come before there was an averager to hear of it.
    averager.set_reachable(network.can_serve)
    network.on_serves = averager.set_reachable
    network.presence.go_by_clocks_of(averager.is_established)
    network.counts = averager.is_established
    network.host.prefers = averager.worth
    coroutines = [
        ("averager", averager.run()),
        ("save", saver.run()),
        ("tidy folder", saver.tidy_folder()),
        ("settle foundings", histories.settle_foundings()),
        ("follow orders", histories.follow_orders()),
        ("meet", network.meet()),
        ("drop banned", network.drop_banned()),
        ("watch presence", network.presence.watch()),
        *((service.name, service.run(averager)) for service in peer.services),
        *own.items(),
    ]
    work = [tasks.create_task(each, name=name) for name, each in coroutines]

    def begin(name: str, coroutine: Coroutine[Any, Any, None]) -> None:
        work.append(tasks.create_task(coroutine, name=name))

    async def stop() -> None:
        for task in work:
            task.cancel()
        await asyncio.wait(work)

    try:
        return await Leaving(peer, averager, saver, begin=begin, stop=stop).run()
    finally:
        for task in work:
            task.cancel()
