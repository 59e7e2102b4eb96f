"""Choice of the peers to greet, to stay connected with, and to look for. Pure.

``dht.presence.greeting`` asks at each heartbeat, and sends the hellos.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from dht.identity import PeerId
from dht.membership.table import Member, PeerTable

LOOK_FOR_S = 120.0
"""Time for which a lost peer is looked for at every heartbeat; after that ever less often."""

LOOK_FOR_CHANCE_MIN = 0.1


HELLOS_PER_BEAT = 4
PEERS_MIN = 3
"""Number of connections to members of the run to keep open, so that no seed is needed."""

PEERS_MAX = 16
"""Number of connections above which a peer does not open another one just for a hello."""


def peers_to_greet(
    table: PeerTable,
    connected: Collection[PeerId],
    strangers: Sequence[PeerId],
    *,
    spared: Collection[PeerId] = (),
    now: float,
    rng: np.random.Generator,
) -> list[PeerId]:
    """Choose a few members, unheard ones first, one stranger, and sometimes a lost peer.

    Half of the hellos are for members that were heard: anybody can sign records of thousands of
    keys at which nobody answers.

    ``spared``: members that need no hello now.

    A stranger is connected and not known as a member: a bootstrap peer, or a member of the other
    half of a split swarm. At a bootstrap peer, which is in no run, there are only strangers.
    """
    chosen: list[PeerId] = []
    if table.run is not None:
        live = _shuffled(table.live(now), rng)
        contacts = sum(member.peer in connected for member in live)
        if contacts >= PEERS_MAX:  # news spread without a full mesh
            live = [member for member in live if member.peer in connected]
        able = [m for m in live if m.peer not in spared and _can_greet(m, connected)]
        unheard = [member.peer for member in able if member.heard_at is None]
        heard = [member.peer for member in able if member.heard_at is not None]
        most = HELLOS_PER_BEAT
        chosen = [*unheard[: max(most - len(heard), (most + 1) // 2)], *heard][:most]
    if strangers:
        chosen.append(strangers[int(rng.integers(len(strangers)))])
    if table.run is not None:
        chosen += _lost_peer_to_find(table, now=now, rng=rng)
    return chosen


def _lost_peer_to_find(table: PeerTable, *, now: float, rng: np.random.Generator) -> list[PeerId]:
    """Sometimes one of the lost peers, in case a partition has healed."""
    gone = [member for member in table.gone(now) if member.addresses]
    if not gone:
        return []
    member = gone[int(rng.integers(len(gone)))]
    silent_s = max(1.0, now - member.last_sign_at)
    chance = max(LOOK_FOR_CHANCE_MIN, LOOK_FOR_S / silent_s)  # the longer gone, the less likely
    return [member.peer] if rng.random() < chance else []


def contacts_to_make(
    table: PeerTable,
    connected: Collection[PeerId],
    *,
    now: float,
    rng: np.random.Generator,
) -> list[PeerId]:
    """Choose members to connect to, established ones first, if too few are connected.

    Other peers can reach a peer that can only dial out through these connections.
    """
    if table.run is None:
        return []
    live = table.live(now)
    missing = PEERS_MIN - sum(member.peer in connected for member in live)
    able = [m for m in live if m.peer not in connected and _can_greet(m, connected)]
    established = {member.peer for member in table.established(now)}
    best_first = sorted(_shuffled(able, rng), key=lambda m: m.peer not in established)
    return [member.peer for member in best_first[: max(0, missing)]]


def is_lonely(table: PeerTable, connected: Collection[PeerId], *, now: float) -> bool:
    """Say whether too few members are connected, so that seeds have to be dialled."""
    if table.run is None:
        return not connected
    live = table.live(now)
    contacts = sum(member.peer in connected for member in live)
    return not live or contacts < min(PEERS_MIN, len(live))


def _shuffled(members: Sequence[Member], rng: np.random.Generator) -> list[Member]:
    return [members[int(i)] for i in rng.permutation(len(members))]


def _can_greet(member: Member, connected: Collection[PeerId]) -> bool:
    if member.peer in connected:
        return True
    return member.reachable is not False and bool(member.addresses)
