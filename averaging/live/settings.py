"""The values that an averager is made of: who it is, its run, its limits, its surroundings."""

from __future__ import annotations

import math
import os
import secrets
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import blake3

from averaging.history.state import FragmentState, Pieces
from averaging.live.guard import Guard
from averaging.live.slices.watch import Watch
from averaging.live.states.fetcher import FetchProgress
from averaging.live.states.state_files import StateFiles
from averaging.live.streams.bulk import TransportSettings
from averaging.live.streams.threads import threads_for
from averaging.numbers.codecs import codec_names
from averaging.numbers.layout import Layout
from averaging.round.fetched_states import Life
from averaging.rules.orders import OrderBook
from averaging.rules.peer_view import PeerView
from averaging.rules.policy import RoundPolicy
from dht.identity import PeerId, RunId, Signer, verify
from dht.protocol import SPOKEN, Range


@dataclass(frozen=True, slots=True, kw_only=True)
class AveragerSettings:
    """Limits that one peer sets itself. None of them has to agree with other peers'."""

    in_flight_max: int = 64
    """Fragments of which a snapshot or a round may be under way at once, as memory allows. Most of
    them only wait for others: that costs nothing."""
    exchanges_max: int = 4
    """While so many rounds exchange at once, no new one is begun. With one at a time a slow line
    stands idle while a round gathers, seals and reports, and the peer misses the rounds of other
    fragments meanwhile; with many they share it, and all end late. Three homes at 1 Mbit/s used 65%
    of their uplinks with one, 80% with two and 87% with three or four, and took part in 73, 87 and
    99% of the rounds. Where their cycles ask for all that the lines carry they missed 7% with
    three, which left the fourth fragment's rounds without them and the line to replays, and 2.5%
    with four."""
    threads: int = field(default_factory=lambda: threads_for(os.cpu_count() or 1))
    replay_bytes_max: int = 256 << 20
    """Merged payloads kept for those who are behind, of all fragments together."""
    spare_bytes_max: int = 1 << 30
    """Memory of past rounds that is kept for the next one, at most 10 bytes for each value of the
    largest fragment."""
    uploads_bytes_max: int = 256 << 20
    """Memory of uploads that are kept for auditors."""
    progress_s: float = 0.25
    """Interval at which the learner's step counter is read."""
    norm_ratio_max: float = 50.0
    """Norm of a contribution, relative to the usual one, above which a reducer refuses it."""
    audit_versions: int = 32
    """After every so many versions members compare the digests of what they hold."""
    look_round_s: float = 30.0
    """Interval at which a keeper compares a fragment's standing with another peer's."""
    transport: TransportSettings = field(default_factory=TransportSettings)


def topic_of(run: RunId, layout: Layout, rollback: int = 0) -> bytes:
    """The name under which peers of one run and layout find their groups and know their rounds.

    After a rollback it is another one, so that nothing from before counts: no join, no commit and
    no signature. ``rollback``: the number of the directive that ordered it.
    """
    name = run.encode() + b"\0" + layout.hash
    if rollback:
        name += b"\0" + rollback.to_bytes(8, "big")
    return blake3.blake3(name).digest(length=16)


@dataclass(slots=True)
class AveragerStats:
    """Counted since the start."""

    rounds: int = 0
    """Finished here."""
    contributed: int = 0
    """Rounds of those that contain own work."""
    folds: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    audit_bytes: int = 0
    """The bytes of both that moved for audits."""
    refused: Counter[str] = field(default_factory=Counter)
    """Number of wrong messages and streams, by kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Participant:
    """The role of one peer in a run."""

    identity: Signer
    incarnation: int
    founder: bool = False
    """True if nobody else has worked in the run so far."""
    reachable: bool = True
    """True if others can dial it, as far as is known at the start."""
    site: str | None = None
    """Label of its site, a secret of the peers there (``averaging.rules.sites``)."""
    speaks: Range = SPOKEN
    """Oldest and newest protocol number that it speaks."""
    codecs: tuple[str, ...] = field(default_factory=codec_names)
    """Names of the codecs that it reads."""

    @property
    def life(self) -> Life:
        return Life(self.identity.peer_id, self.incarnation)


@dataclass(frozen=True, slots=True)
class RunTerms:
    """The terms that all peers of a run share."""

    run: RunId
    layout: Layout
    policy: RoundPolicy
    book: OrderBook = field(default_factory=OrderBook)
    """Orders of the run's owner; ``Averager.follow`` puts newer ones there."""

    def pieces(self, fragment: int) -> Pieces:
        """Those of a fragment's state."""
        return Pieces.of(self.layout.fragments[fragment], self.policy.mu)


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """The owner of an averager: what it knows, and what it wants to hear."""

    view: Mapping[PeerId, PeerView]
    """Kept up to date by the owner."""
    guard: Callable[[Any], Guard]
    """Makes the defences of an averager against members that lie. ``unguarded`` makes none; it
    is no default, as who forgets the defences would never hear of it."""
    absent: Mapping[PeerId, float | None] = field(default_factory=dict)
    """Peers that are not live (``Circumstances``). Kept up to date by the owner."""
    line_max: Callable[[], float] = lambda: math.inf
    """Bytes a second that the owner of the line allows now."""
    may_train: Callable[[PeerId], bool] = lambda peer: True
    """True if the run admits a peer as a learner (``dht.membership.admission``); the joins of other
    peers are refused."""
    begins_from: Callable[[PeerId], bool] = lambda peer: True
    """True if the first state of a fragment may come from a peer. All fragments of a newcomer must
    be of one founding of the run."""
    rollback: int = 0
    """The directive that took the run back to the states it goes on from; 0: none."""
    take_directive: Callable[[bytes], bool] = lambda directive: True
    """Take a directive of the run's owner that another peer sent. ``False``: it is an older one
    than this peer follows."""
    state_files: StateFiles | None = None
    """Files of the states; ``None``: they are in memory."""
    keep_state: Callable[[FragmentState], None] | None = None
    """Keep a state that the run's owner may attest; called in a thread. ``None``: none is kept."""
    draw_bits: Callable[[int], int] = secrets.randbits
    """Draws a number of so many bits that this peer has not drawn in an earlier life."""
    on_event: Callable[[str, Mapping[str, Any]], None] = lambda event, fields: None
    """Hears every transition that a person or a log may want; must not raise and must not wait."""
    on_fetched: Callable[[FetchProgress], None] = lambda progress: None
    watch: Watch = field(default_factory=Watch)
    """Sees what the averager does, and may change it: for simulations and tests."""
    clock_s: float = 0.0
    """Seconds by which the peer's clock is ahead of its event loop's. Peers of a simulation share
    one loop, and no two machines have the same clock."""
    line_bytes_s: float | None = None
    """Speed of the line in its slower direction, where a simulation says it; ``None``: the peer
    measures it."""
    verify: Callable[[PeerId, bytes, bytes], bool] = verify
    """True if a peer signed these bytes: ``verify(peer, bytes, signature)``. A simulation may have
    signatures that cost less."""
