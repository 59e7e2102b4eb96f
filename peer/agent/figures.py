"""The figures that a peer tells of itself, and the peers of the run in rows."""

from __future__ import annotations

import asyncio

import msgspec

from averaging.live.settings import AveragerStats
from averaging.round.interface.phase import Phase as RoundPhase
from dht.membership.admission import parts_told
from peer.agent.account import merged_of
from peer.agent.peer import JUMP_REFUSED, Peer
from peer.quantities import listed
from peer.status import BANNED_MAX, WORDS_MAX, PeerRow, PeerStatus, time_left_s
from peer.views import agent_page

WORK_IN_PROGRESS = {
    RoundPhase.WANTED: "being copied",
    RoundPhase.JOINING: "waiting for peers",
    RoundPhase.PROMISED: "waiting for peers",
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
    now, live = asyncio.get_running_loop().time(), peer.network.live_members()
    known = agent_page.KnownPeers(live, merged_of(peer.states), peer.offer_outcomes, now)
    return agent_page.peer_rows(status, known, peer.board.names)
