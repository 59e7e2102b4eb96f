"""Services that all fragments of a run share at one peer: links, threads, memory, audits, events.

``averaging.live.averager`` is made of them, and adds the parts that need the fragments: turns,
time, and the routing of messages. ``averaging.live.fragment`` and ``averaging.live.following`` see
no more of it than this class.
"""

from __future__ import annotations

import asyncio
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

from averaging.history.state import value_bytes
from averaging.live.learner_port import LearnerPort
from averaging.live.settings import (
    AveragerSettings,
    AveragerStats,
    Participant,
    RunTerms,
    Surroundings,
    topic_of,
)
from averaging.live.slices.evidence import Uploads
from averaging.live.slices.parts import Workshop
from averaging.live.states.fetcher import Fetcher
from averaging.live.streams.buffers import Arena
from averaging.live.streams.bulk import Bulk, Uplink
from averaging.live.streams.fair_shares import ByteBudget
from averaging.live.streams.links import Transport
from averaging.live.streams.threads import Threads
from averaging.messages import COUNT_MAX, MESSAGES_SINCE, Message, encode
from averaging.round.interface import inputs
from averaging.rules.due import Spacing
from averaging.rules.electors import RequiredWork
from averaging.rules.reputation import Deed, Ground
from dht.host import Messaging
from dht.identity import PeerId
from dht.protocol import OLDEST

logger = logging.getLogger(__name__)

OUTSIDE_BYTES_MAX = 1 << 30
"""Memory for uploads to rounds of which this peer is no member; at a peer with a learner, which is
hardly ever asked to, at most two fp32 copies of the largest fragment."""

CATCHING_MAX = 2
"""Fragments that are fetched at once."""

SHARE_BITS = 32
"""Bits of a random share."""

REQUIRED_FOR_S = 1.0
"""Time for which the work that establishes a peer counts once it is known: thousands of keys may be
in view, and it is asked of each of them, and of each of their streams."""


def rings_at(at: float, *, clock_s: float) -> float:
    """The time on the event loop at which a clock ``clock_s`` ahead of it has come to ``at``.

    Rounded down, a timer would ring when nothing is due yet, and be set again to the same moment.
    """
    when = at - clock_s
    return when if when + clock_s >= at else when + max(math.ulp(at), math.ulp(when))


class Services(ABC):
    """The part of an averager that its fragments know."""

    def __init__(
        self,
        host: Messaging,
        port: LearnerPort | None,
        *,
        me: Participant,
        terms: RunTerms,
        around: Surroundings,
        settings: AveragerSettings | None = None,
    ) -> None:
        if me.identity.peer_id != host.peer_id:
            raise ValueError(f"the identity is {me.identity.peer_id}, the host {host.peer_id}")
        if not 0 <= me.incarnation <= COUNT_MAX:  # all others would drop what it sends
            raise ValueError(f"incarnation is {me.incarnation}; it must be from 0 to {COUNT_MAX}")
        self.host = host
        self.port = port
        self.me = me
        self.terms = terms
        self.around = around
        self.settings = settings or AveragerSettings()
        self.life = me.life
        self.reachable = me.reachable
        self.stats = AveragerStats()
        self.topic = topic_of(terms.run, terms.layout, around.rollback)
        self.threads = Threads(self.settings.threads)
        # Enough for what one round of the largest fragment lets go: an old state, three payloads.
        largest = max(fragment.size for fragment in terms.layout.fragments)
        round_bytes = (2 + value_bytes(terms.policy.mu)) * largest
        self.arena = Arena(min(self.settings.spare_bytes_max, round_bytes))
        self.floats = (around.state_files or self.arena).floats
        """Gives the memory of states."""
        self.uplink = Uplink(self._slow_uplink_bytes_s)
        self.transport = self._new_transport()
        self.reputation = terms.policy.reputation()
        self.guard = around.guard(self)
        self.electors = self.guard.electors
        outside_bytes = OUTSIDE_BYTES_MAX if port is None else min(OUTSIDE_BYTES_MAX, 8 * largest)
        self.workshop = self._new_workshop(ByteBudget(outside_bytes))
        self.fetcher = Fetcher(
            host,
            terms.run,
            self.threads,
            on_progress=around.on_fetched,
            on_wrong_bits=self._wrong_bits,
            line=self.transport.down,
            floats=self.floats,
        )
        self.spacing = Spacing()
        self._catching = asyncio.Semaphore(CATCHING_MAX)
        self._fetching_slowly = asyncio.Lock()
        self._tasks: asyncio.TaskGroup | None = None
        self._ended = False
        """The tasks are being cancelled: callbacks scheduled before begin nothing any more."""
        self._changed = asyncio.Event()
        """Set and cleared at once: it wakes those that wait."""
        self._required = -math.inf, RequiredWork(0.0, 0.0)
        """The work that establishes a peer, and when that was found."""
        self._encoded: tuple[Message | None, int, bytes] = (None, OLDEST, b"")
        """The last message, and its bytes: most are said to many peers in turn."""

    def _new_transport(self) -> Transport:
        return Transport(
            self.host,
            run=self.terms.run,
            message=self._heard,
            lost=self._lost,
            bulk=self._serve,
            settings=self.settings.transport,
            prefers=self.is_established,
            uplink=self.uplink,
        )

    def _new_workshop(self, outside: ByteBudget) -> Workshop:
        return Workshop(
            me=self.host.peer_id,
            transport=self.transport,
            threads=self.threads,
            arena=self.arena,
            floats=self.floats,
            outside=outside,
            norm_ratio_max=self.settings.norm_ratio_max,
            sign=self.me.identity.sign,
            verify=self.around.verify,
            heard_claim=self.guard.saw_claim,
            refuses=self.guard.refuses,
            spawn=self.spawn,
            watch=self.around.watch,
        )

    def draw_share(self) -> float:
        """A number below 1 that others cannot foresee."""
        return self.around.draw_bits(SHARE_BITS) / (1 << SHARE_BITS)

    # Tasks and time

    def now(self) -> float:
        """The time on this peer's clock, on which its machines and its view of others are."""
        return asyncio.get_running_loop().time() + self.around.clock_s

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        assert self._tasks is not None
        return self._tasks.create_task(work, name=name)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that can only change where ``changed`` is called."""
        while not condition():
            await self._changed.wait()

    def changed(self) -> None:
        """Wake what waits in ``until``."""
        self._changed.set()
        self._changed.clear()

    # The line

    @property
    def bytes_per_s(self) -> float:
        """Speed of this peer's line in its slower direction; 0 when it is not known.

        A direction that is slow is told even while the other one is not known.
        """
        if self.around.line_bytes_s is not None:
            return min(self.around.line_bytes_s, self.around.line_max())
        measured = (self.transport.up.bytes_per_s, self.transport.down.bytes_per_s)
        known = [speed for speed in measured if speed is not None]
        slowest = min([*known, self.around.line_max()])
        return slowest if len(known) == 2 or slowest < self.terms.policy.slow_link_bytes_s else 0.0

    def _slow_uplink_bytes_s(self) -> float:
        """Speed of this peer's uplink if it is slow, else 0."""
        known = self.around.line_bytes_s or self.transport.up.bytes_per_s
        speed = min(known or math.inf, self.around.line_max())
        return speed if speed < self.terms.policy.slow_link_bytes_s else 0.0

    def tell_line_speed(self) -> None:
        """Tell the line speed to the machines, which state it when they join."""
        # The caller may be in the middle of a machine's effects.
        asyncio.get_running_loop().call_soon(self._tell, inputs.LineMeasured(self.bytes_per_s))

    def catching_up(self) -> AbstractAsyncContextManager[None]:
        """A turn to catch up with a fragment."""
        return self._catching

    def fetching_state(self) -> AbstractAsyncContextManager[None]:
        """A turn to fetch a whole state: on a slow line one is fetched after the other.

        Replays do not wait for each other. Those of homes come as slowly as the full uplinks of
        their sources send them, and one after the other each took a cycle: a home that had missed a
        round was behind again as soon as it had caught up.
        """
        is_slow = 0.0 < self.bytes_per_s < self.terms.policy.slow_link_bytes_s
        return self._fetching_slowly if is_slow else nullcontext()

    # Other peers

    @property
    def others(self) -> tuple[PeerId, ...]:
        """The live peers in view."""
        now, me = self.now(), self.life.peer
        live = (peer for peer, seen in self.around.view.items() if peer != me and seen.is_live(now))
        return tuple(sorted(live))

    def is_here(self, peer: PeerId) -> bool:
        """True if a peer is one of the others."""
        seen = self.around.view.get(peer)
        return seen is not None and peer != self.life.peer and seen.is_live(self.now())

    def is_established(self, peer: PeerId) -> bool:
        """True if a peer has been here for a while and counts."""
        seen = self.around.view.get(peer)
        return seen is not None and seen.is_established(self.now()) and self.counts(peer)

    def counts(self, peer: PeerId) -> bool:
        """True if what a peer says counts, however long it has been here."""
        now = self.now()
        if self.electors.counts_all_at(now):
            return True
        found_at, required = self._required
        if not found_at <= now < found_at + REQUIRED_FOR_S:
            live = [other for other, each in self.around.view.items() if each.is_live(now)]
            required = self.electors.required_work([self.life.peer, *live], now)
            self._required = now, required
        return self.electors.progress(peer, required, now) >= 1.0

    def worth(self, peer: PeerId) -> float:
        """How much a peer's work counts where there is no place for all."""
        return self.electors.worth(peer)

    def shows(self, asker: PeerId, uploads: Uploads) -> Uploads:
        return self.around.watch.shows(asker, uploads)

    def send(self, peer: PeerId, message: Message) -> None:
        """Send a message in the form that its receiver speaks; the oldest one to a stranger."""
        told = self.around.watch.sends(peer, message)
        if told is None:
            return
        message = told
        seen = self.around.view.get(peer)
        number = OLDEST if seen is None else min(seen.protocol, self.me.speaks[1])
        if MESSAGES_SINCE.get(type(message), OLDEST) > number:
            return
        said, in_number, data = self._encoded
        if said is not message or in_number != number:
            data = encode(message, number)
            self._encoded = message, number, data
        self.transport.send(peer, data)

    def _lost(self, peer: PeerId, reason: str) -> None:
        # It may be told from within ``send``, in the middle of somebody's effects.
        asyncio.get_running_loop().call_soon(self._tell_lost, peer, reason)

    def _tell_lost(self, peer: PeerId, reason: str) -> None:
        if self._ended:
            return
        self.event("link_lost", peer=peer, reason=reason)
        self._tell(inputs.LinkLost(peer))

    # Events, and who is to blame

    def event(self, event: str, **fields: Any) -> None:
        self.around.on_event(event, fields)

    def blame(self, peer: PeerId, kind: str, reason: str, **fields: Any) -> None:
        """Count and report what a peer should not have sent."""
        self.stats.refused[kind] += 1
        self.event("refused", peer=peer, kind=kind, reason=reason, **fields)

    def strike(self, peer: PeerId, deed: Deed, reason: str, *, fragment: int) -> None:
        """Hold against a peer what proves nothing to others."""
        if self.reputation.saw(peer, deed, self.now()):
            strikes = self.reputation.count(peer, Ground.CONDUCT, self.now())
            self.event("struck", peer=peer, reason=reason, fragment=fragment, strikes=strikes)

    def not_a_commit(self, peer: PeerId, reason: str, *, fragment: int) -> None:
        """A peer sent something that cannot be read as a commit: warn, once a day for each peer.

        The rounds that an established peer leads then come to nothing, which nobody else would
        say. Messages of strangers and newcomers are only counted.
        """
        is_known = self.is_established(peer)
        if not (is_known and self.reputation.saw(peer, Deed.IS_UNREADABLE, self.now())):
            return
        logger.warning("not_a_commit peer=%s fragment=%d reason=%s", peer, fragment, reason)
        self.event("not_a_commit", peer=peer, reason=reason, fragment=fragment)

    def moved(self, *, sent: int = 0, received: int = 0, since: float) -> None:
        """Count bytes of audits: rounds share the line with them."""
        for line, count in ((self.transport.up, sent), (self.transport.down, received)):
            if count:
                clock_s = self.around.clock_s
                line.carried(count, began=since - clock_s, ended=self.now() - clock_s)
        self.stats.sent_bytes += sent
        self.stats.received_bytes += received
        self.stats.audit_bytes += sent + received

    def _wrong_bits(self, peer: PeerId, fragment: int, reason: str) -> None:
        self.strike(peer, Deed.LIES, reason, fragment=fragment)

    def cut_off(self, peer: PeerId, reason: str) -> None:
        """A peer is as good as gone from now on."""
        self._lost(peer, reason)

    # Methods that need all fragments: the averager's

    @abstractmethod
    def _tell(self, given: inputs.Input) -> None:
        """Give an input to the machines of all fragments."""

    @abstractmethod
    def _heard(self, peer: PeerId, data: bytes) -> None: ...

    @abstractmethod
    async def _serve(self, bulk: Bulk, header: bytes) -> None: ...

    @abstractmethod
    def uploads_of(self, round_id: bytes) -> Uploads | None: ...

    @abstractmethod
    def set_timer(self) -> None: ...

    @abstractmethod
    def has_place(self) -> bool: ...

    @abstractmethod
    def has_its_turn_later(self, fragment: int) -> bool: ...

    @abstractmethod
    def turn_away(self, fragment: int) -> None: ...
