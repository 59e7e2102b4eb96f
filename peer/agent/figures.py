"""The figures that a peer tells of itself, and the peers of the run in rows; its local page."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

import msgspec

from averaging.live.averager import Averager
from averaging.live.settings import AveragerStats
from averaging.round.interface.phase import Phase as RoundPhase
from dht.membership.admission import parts_told
from peer.agent.peer import JUMP_REFUSED, Peer
from peer.agent.services import Service
from peer.quantities import listed
from peer.status import BANNED_MAX, WORDS_MAX, PeerRow, PeerStatus, time_left_s
from peer.storage.outer_state import merged_of
from peer.views import agent_page
from peer.views.page_address import PageError, parse_page
from peer.views.pages import Content, serve_pages

WORK_IN_PROGRESS = {
    RoundPhase.WANTED: "being copied",
    RoundPhase.JOINING: "waiting for peers",
    RoundPhase.ENTERED: "exchanging",
    RoundPhase.CATCHING: "catching up",
    RoundPhase.FOLDING: "folding",
}
"""Descriptions for people of what averaging does about a fragment."""

FRAGMENTS_NAMED = 6
"""Largest number of fragments at the same work that are named; the rest are counted."""


def work_in_progress(peer: Peer) -> tuple[str, ...]:
    """The work in progress, in words: ``fragments 0 and 2 exchanging``."""
    fragments: dict[str, list[str]] = {}
    phases = () if peer.averager is None else peer.averager.phases
    for index, phase in enumerate(phases):
        if phase in WORK_IN_PROGRESS:
            fragments.setdefault(WORK_IN_PROGRESS[phase], []).append(str(index))
    return tuple(
        f"fragment{'s' * (len(each) > 1)} {listed(each, most=FRAGMENTS_NAMED)} {words}"
        for words, each in fragments.items()
    )


def status_of(peer: Peer) -> PeerStatus:
    """All figures of a peer, of which its role gives those of its training."""
    guest, network, averager = peer.guest, peer.network, peer.averager
    stats, lane = AveragerStats() if averager is None else averager.stats, network.host.lane
    directive, goal = peer.owner.directive, peer.owner.run_now.end.tokens
    level = None if averager is None else averager.level()
    status = PeerStatus(
        peer=peer.me,
        name=peer.seat.name,
        role=peer.seat.role,
        phase=peer.phase,
        held_out=peer.held_out.newest,
        global_tokens=peer.merged_tokens(),
        tokens_goal=goal if isinstance(goal, int) else None,
        versions=peer.versions(),
        peers=1 + len(peer.live_peers),
        rounds=stats.rounds,
        rounds_missed=peer.rounds_missed,
        bytes_sent=guest.sent_bytes,
        bytes_received=guest.received_bytes,
        up_s=asyncio.get_running_loop().time() - peer.began_at,
        reachable=network.presence.reachable,
        layout=peer.layout.hash.hex(),
        frozen=peer.description.frozen_hash,
        directive=0 if directive is None else directive.number,
        orders=() if directive is None else tuple(parts_told(directive)),
        merging="" if level is None else f"{level[0]}: {level[1].reason}"[:WORDS_MAX],
        cycle_steps=0 if level is None else level[0].cycle_steps,
        model=peer.model,
        founding=peer.founding.name,
        ended_at=peer.ending.ended_at,
        limits=tuple(words[:WORDS_MAX] for words in guest.words()),
        paths=lane.paths_by_name() if lane is not None else {},
        relayed_bytes=lane.relay.counters["bytes"] if lane is not None else 0,
        alone_until=peer.alone_until,
        jumps_judged=peer.jumps.total(),
        jumps_refused=peer.jumps[JUMP_REFUSED],
        batches=peer.batches,
        banned=tuple(sorted(network.presence.door.admission.convicted)[:BANNED_MAX]),
        link=network.link(),
        in_flight=work_in_progress(peer),
        processor_share=guest.processor_share,
    )
    status = peer.role.with_training(status)
    return msgspec.structs.replace(status, time_left_s=_time_left_s(peer, status))


def _time_left_s(peer: Peer, status: PeerStatus) -> float | None:
    """Time until the run ends at the present speed of all peers; ``None`` if it has no end."""
    goal = status.tokens_goal
    times = [member.record.step_time_s for member in peer.network.live_members()]
    return time_left_s(
        tokens_left=None if goal is None else goal - status.global_tokens,
        step_tokens=status.tokens / status.steps if status.steps else 0.0,
        step_times_s=[status.step_time_s, *(each for each in times if each is not None)],
        date_left_s=peer.seconds_left(),
    )


def rows_of(peer: Peer, status: PeerStatus) -> list[PeerRow]:
    """All peers of the run in rows for people, the largest contributors first."""
    now, network = asyncio.get_running_loop().time(), peer.network
    told = {peer: (each.steps, each.loss) for peer, each in network.told.items()}
    rows = [agent_page.row_of(each, told.get(each.peer), now) for each in network.live_members()]
    merged = merged_of(peer.states)
    return agent_page.peer_rows(status, rows, merged, peer.offer_outcomes, peer.board.names)


SAMPLE_EVERY_S = 1.0
FIGURES_KEPT_EVERY = 10
"""Samples between two times that the figures are written into the folder of the peer."""


class LocalPage(Service):
    """The page of one peer, at this machine, and the figures in its folder for ``shoal status``."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    async def open(self, stack: AsyncExitStack) -> None:
        """Serve the page. Raises ``PageError`` where this very address was asked for."""
        peer = self._peer
        assert peer.seat.settings.page is not None
        address = parse_page(peer.seat.settings.page)
        pages = serve_pages(
            address,
            checks=lambda: agent_page.checks(status_of(peer)),
            metrics=lambda: agent_page.metrics(status_of(peer)),
            content=Content(
                state=self.state,
                events=peer.board.search,
                token_file=peer.directory / "page.token",
            ),
        )
        try:
            url = await stack.enter_async_context(pages)
        except PageError as error:
            if address.tries == 1:
                raise
            peer.event("page_not_served", text=str(error))
        else:
            peer.tell("page", {"url": url})  # not to the log: the address has the token in it

    def state(self) -> Mapping[str, Any]:
        """The content of ``/state.json``."""
        peer, status = self._peer, status_of(self._peer)
        return agent_page.content(
            status,
            peer.board,
            rows_of(peer, status),
            run_id=peer.run_id,
            run_name=peer.run_file.name,
            wall_time=time.time(),
        )

    async def run(self, averager: Averager) -> None:
        """Add points to the page's curve, and keep the figures in the folder, for ever."""
        turn = 0
        while True:
            status = status_of(self._peer)
            self._peer.board.sample(tokens=status.global_tokens, loss=status.loss)
            if turn % FIGURES_KEPT_EVERY == 0:
                await self._peer.keep_figures(status.figures())
            turn += 1
            await asyncio.sleep(SAMPLE_EVERY_S)
