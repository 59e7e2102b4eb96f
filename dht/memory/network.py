"""A simulated network: decides when a message of a given size arrives, if it does.

It knows nothing of asyncio, of hosts or of training: ``dht.memory.host`` builds hosts on it. Its
clock is a ``dht.memory.event_heap``.

The same seed gives the same events in the same order, to the last bit, on any machine: ties are
broken by the order of scheduling, and nothing depends on ``hash``, ``id`` or the order of a set.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TypeAlias

from dht.identity import PeerId
from dht.memory.event_heap import EventHeap, Timer

REPEATED_WITHIN_S = 1.0
"""Limit of the delay of a message that arrives a second time."""

SMALL_MESSAGE_BYTES = 16 * 1024
"""Messages up to this size do not queue behind bulk transfers, as on links that share fairly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weather:
    """Quality of the network. Probabilities are per message."""

    latency_s: tuple[float, float] = (0.01, 0.05)
    """One-way latency. Each pair of peers has its own, drawn once from this range."""

    jitter_s: float = 0.0
    """Limit of a random extra delay per message, so that messages overtake each other."""

    bandwidth_bytes_s: float = 125e6
    """Bandwidth of each peer's uplink and downlink, unless ``set_link`` changes it."""

    connection_loss: float = 0.0
    """The connection breaks at this message, which may have arrived or not."""

    duplicate: float = 0.0
    """The message arrives a second time, later."""

    calls_lost: float = 0.0
    """The request or reply of a unary call is lost without an error."""

    silence_s: float = 10.0
    """Time without an answer from the other machine after which a connection is given up."""


CALM = Weather()


@dataclass(slots=True, eq=False)
class _Line:
    """A line on which bytes queue: a machine's own, or the one that a site's machines share."""

    up_bytes_s: float
    down_bytes_s: float
    up_free_at: float = 0.0
    down_free_at: float = 0.0
    arriving: dict[_Parcel, Timer] = field(default_factory=dict)
    """Large messages of which the line carries a part, or will, and when the last byte comes."""


@dataclass(slots=True, eq=False)
class _Site:
    """Machines at one place, which share one line to all other machines."""

    line: _Line
    latency_s: float
    """Latency between two of these machines."""


@dataclass(slots=True, eq=False)
class _Peer(_Line):
    """State of one machine."""

    sent_bytes: int = 0
    received_bytes: int = 0
    latency_extra_s: float = 0.0
    site: _Site | None = None
    incarnation: int = 0
    alive: bool = True
    died_at: float = 0.0
    paused: bool = False
    group: int = 0
    dial_out_only: bool = False
    waiting: list[tuple[Callable[..., object], _Parcel]] = field(default_factory=list)
    """Actions to take when the pause is over."""


@dataclass(slots=True, eq=False)
class _Parcel:
    sender: PeerId
    receiver: PeerId
    size_bytes: int
    deliver: Callable[[], object]
    lost: Callable[[], object]
    channel: OrderedChannel | None
    delay_s: float
    origin: _Peer
    target: _Peer
    sender_incarnation: int
    receiver_incarnation: int
    left_at: float = 0.0
    arrived: bool = False
    given_up: Timer | None = None


OrderedChannel: TypeAlias = deque[_Parcel]
"""Keeps messages from one peer to another in order, as inside one connection: they arrive in the
order in which they were sent, once, or not at all."""


class SimulatedNetwork:
    """Schedules the arrival of messages. A peer exists once it is named."""

    def __init__(self, heap: EventHeap, weather: Weather = CALM, seed: int = 0) -> None:
        self.heap = heap
        self.weather = weather
        self.rng = random.Random(seed)
        self.bytes_sent = 0
        self._seed = seed
        self._peers: dict[PeerId, _Peer] = {}
        self._latency_s: dict[tuple[PeerId, PeerId], float] = {}
        self._held: dict[int, _Parcel] = {}
        self._held_order = 0

    # --- control of the simulation ---------------------------------------------------------

    def partition(self, groups: Sequence[Iterable[PeerId]]) -> None:
        """Cut every path between the groups. Peers that are not named form one more group.

        Connections across the cut hang, and are given up after ``Weather.silence_s``; if the
        partition heals before, their messages are delivered late.
        """
        for peer in self._peers.values():
            peer.group = 0
        for number, group in enumerate(groups, start=1):
            for name in group:
                self._peer(name).group = number
        self._release()

    def heal(self) -> None:
        """End the partition."""
        self.partition(())

    def connected(self, one: PeerId, other: PeerId) -> bool:
        """Say whether no partition separates two peers."""
        return self._peer(one).group == self._peer(other).group

    def pause(self, peer: PeerId) -> None:
        """Suspend a machine, like a laptop whose lid is closed: it neither sends nor receives."""
        self._peer(peer).paused = True

    def resume(self, peer: PeerId) -> None:
        """Resume a machine: messages that arrived meanwhile are now delivered, in order."""
        state = self._peer(peer)
        state.paused = False
        waiting, state.waiting = state.waiting, []
        for action, parcel in waiting:
            self.heap.call_in(0.0, action, parcel)

    def crash(self, peer: PeerId) -> None:
        """Switch a machine off without a goodbye: unsent messages are lost."""
        state = self._peer(peer)
        if not state.alive:
            return
        state.alive = False
        state.died_at = self.heap.now
        state.incarnation += 1
        state.paused = False
        state.up_free_at = state.down_free_at = 0.0
        # Messages that have arrived but were not delivered yet are lost with it.
        unheard = [parcel for action, parcel in state.waiting if action == self._arrive]
        state.waiting = []
        for parcel in unheard:
            if parcel.receiver == peer:
                self._hold(parcel)

    def restart(self, peer: PeerId) -> None:
        """Switch a machine on again. It has no connections, and the old ones fail when used."""
        state = self._peer(peer)
        if state.alive:
            return
        state.alive = True
        self._release()

    def is_up(self, peer: PeerId) -> bool:
        return self._peer(peer).alive

    def is_paused(self, peer: PeerId) -> bool:
        return self._peer(peer).paused

    def set_link(
        self,
        peer: PeerId,
        *,
        up_bytes_s: float | None = None,
        down_bytes_s: float | None = None,
        latency_extra_s: float | None = None,
    ) -> None:
        """Set the line of one peer, in place of the weather's values.

        Transfers that are arriving go on at the new speed. Those that are being sent end at the old
        one.
        """
        state = self._peer(peer)
        if up_bytes_s is not None:
            state.up_bytes_s = up_bytes_s
        if down_bytes_s is not None:
            self._change_pace(state, state.down_bytes_s / down_bytes_s)
            state.down_bytes_s = down_bytes_s
        if latency_extra_s is not None:
            state.latency_extra_s = latency_extra_s

    def _change_pace(self, line: _Line, factor: float) -> None:
        """The rest of each transfer that arrives on a line takes so many times as long."""
        now = self.heap.now
        line.down_free_at = now + factor * max(0.0, line.down_free_at - now)
        for parcel, timer in list(line.arriving.items()):
            timer.cancel()
            sent_at = parcel.left_at + self.latency_s(parcel.sender, parcel.receiver)
            last_byte = max(now + factor * (timer.when() - now), sent_at)
            line.arriving[parcel] = self.heap.call_at(last_byte, self._arrive, parcel)

    def share_line(
        self, peers: Iterable[PeerId], *, up_bytes_s: float, down_bytes_s: float, latency_s: float
    ) -> None:
        """Put machines at one place, where they share one line to all other machines.

        Among themselves they use their own lines, with ``latency_s``.
        """
        site = _Site(_Line(up_bytes_s, down_bytes_s), latency_s)
        for peer in peers:
            self._peer(peer).site = site

    def dial_out_only(self, *peers: PeerId, only: bool = True) -> None:
        """Let no other peer open a connection to these peers; they can still open their own."""
        for peer in peers:
            self._peer(peer).dial_out_only = only

    def put_beside(self, peer: PeerId, other: PeerId) -> None:
        """Put a peer that only dials out on the side of a partition on which another one is."""
        state = self._peer(peer)
        state.group, state.dial_out_only = self._peer(other).group, True

    def is_dial_out_only(self, peer: PeerId) -> bool:
        return self._peer(peer).dial_out_only

    def traffic(self, peer: PeerId) -> tuple[int, int]:
        """Number of bytes that a peer has sent and received so far."""
        state = self._peer(peer)
        return state.sent_bytes, state.received_bytes

    # --- use by peers ----------------------------------------------------------------------

    def latency_s(self, one: PeerId, other: PeerId) -> float:
        """One-way latency without jitter, the same in both directions."""
        return self._latency_s_of(one, self._peer(one), other, self._peer(other))

    def _latency_s_of(self, one: PeerId, here: _Peer, other: PeerId, there: _Peer) -> float:
        if here.site is not None and here.site is there.site:
            return here.site.latency_s
        pair = _pair(one, other)
        latency_s = self._latency_s.get(pair)
        if latency_s is None:
            low, high = self.weather.latency_s
            text = f"{self._seed} {pair[0]} {pair[1]}".encode()
            share = int.from_bytes(blake2b(text, digest_size=6).digest(), "big") / 2**48
            latency_s = self._latency_s[pair] = low + share * (high - low)
        return latency_s + here.latency_extra_s + there.latency_extra_s

    def chance(self, probability: float) -> bool:
        """Draw whether an event of this probability happens."""
        return probability > 0 and self.rng.random() < probability

    def send(
        self,
        sender: PeerId,
        receiver: PeerId,
        size_bytes: int,
        deliver: Callable[[], object],
        lost: Callable[[], object] = lambda: None,
        *,
        channel: OrderedChannel | None = None,
        delay_s: float = 0.0,
    ) -> None:
        """Send a message. Partitions, crashes and silence can lose it, and nothing else.

        ``lost`` is called, at most once, when the sender notices that it did not arrive; not at a
        sender that has crashed since.
        """
        origin, target = self._peer(sender), self._peer(receiver)
        if not origin.alive:
            return
        parcel = _Parcel(
            sender,
            receiver,
            size_bytes,
            deliver,
            lost,
            channel,
            delay_s,
            origin,
            target,
            origin.incarnation,
            target.incarnation,
        )
        self.bytes_sent += size_bytes
        origin.sent_bytes += size_bytes
        if channel is not None:
            channel.append(parcel)
        if origin.paused:
            origin.waiting.append((self._depart, parcel))
        else:
            self._depart(parcel)

    # --- transmission ----------------------------------------------------------------------

    def _peer(self, name: PeerId) -> _Peer:
        peer = self._peers.get(name)
        if peer is None:
            speed = self.weather.bandwidth_bytes_s
            peer = self._peers[name] = _Peer(up_bytes_s=speed, down_bytes_s=speed)
        return peer

    def _depart(self, parcel: _Parcel) -> None:
        origin, target = parcel.origin, parcel.target
        if origin.incarnation != parcel.sender_incarnation:
            return
        if origin.paused:  # again
            origin.waiting.append((self._depart, parcel))
            return
        now = self.heap.now
        latency_s = self._latency_s_of(parcel.sender, origin, parcel.receiver, target)
        latency_s += parcel.delay_s
        if self.weather.jitter_s:
            latency_s += self.rng.random() * self.weather.jitter_s
        line = _line(origin, target)
        sending_s = parcel.size_bytes / line.up_bytes_s
        if parcel.size_bytes <= SMALL_MESSAGE_BYTES:
            parcel.left_at = now + sending_s
            slower_s = parcel.size_bytes / _line(target, origin).down_bytes_s
            self.heap.call_at(now + latency_s + max(sending_s, slower_s), self._arrive, parcel)
            return
        start = max(now, line.up_free_at)
        line.up_free_at = parcel.left_at = start + sending_s
        self.heap.call_at(start + latency_s, self._first_byte, parcel, latency_s)

    def _first_byte(self, parcel: _Parcel, latency_s: float) -> None:
        """Occupy the receiver's line from the arrival of the first byte."""
        line = _line(parcel.target, parcel.origin)
        start = max(self.heap.now, line.down_free_at)
        line.down_free_at = start + parcel.size_bytes / line.down_bytes_s
        last_byte = max(line.down_free_at, parcel.left_at + latency_s)
        line.arriving[parcel] = self.heap.call_at(last_byte, self._arrive, parcel)

    def _arrive(self, parcel: _Parcel) -> None:
        origin, target = parcel.origin, parcel.target
        _line(target, origin).arriving.pop(parcel, None)
        if origin.incarnation != parcel.sender_incarnation and origin.died_at < parcel.left_at:
            return  # the sender died before the last byte had left
        if _obstructed(parcel):
            self._hold(parcel)
            return
        if target.incarnation != parcel.receiver_incarnation:
            back_s = self.latency_s(parcel.sender, parcel.receiver)
            self.heap.call_in(back_s, self._fail, parcel)
        elif target.paused:
            target.waiting.append((self._arrive, parcel))
        else:
            target.received_bytes += parcel.size_bytes
            if parcel.channel is None:
                parcel.deliver()
            else:
                self._arrive_in_order(parcel, parcel.channel)

    def _arrive_in_order(self, parcel: _Parcel, channel: OrderedChannel) -> None:
        parcel.arrived = True
        while channel and channel[0].arrived:
            channel.popleft().deliver()

    def _hold(self, parcel: _Parcel) -> None:
        """Hold a message that cannot pass: the sender repeats it, and gives up after a while."""
        if parcel.given_up is None:
            self._held_order += 1
            number = self._held_order
            silence_s = self.weather.silence_s
            parcel.given_up = self.heap.call_in(silence_s, self._give_up, number, parcel)
            self._held[number] = parcel

    def _give_up(self, number: int, parcel: _Parcel) -> None:
        del self._held[number]
        self._fail(parcel)

    def _release(self) -> None:
        """Deliver the held messages that can pass after a change."""
        for number, parcel in list(self._held.items()):
            if not _obstructed(parcel):
                del self._held[number]
                if parcel.given_up is not None:
                    parcel.given_up.cancel()
                    parcel.given_up = None
                self.heap.call_in(0.0, self._arrive, parcel)

    def _fail(self, parcel: _Parcel) -> None:
        origin = parcel.origin
        if origin.incarnation != parcel.sender_incarnation:
            return
        if origin.paused:
            origin.waiting.append((self._fail, parcel))
        else:
            parcel.lost()


def _pair(one: PeerId, other: PeerId) -> tuple[PeerId, PeerId]:
    return (one, other) if one <= other else (other, one)


def _line(mine: _Peer, other: _Peer) -> _Line:
    """The line over which one peer communicates with another."""
    if mine.site is None or mine.site is other.site:
        return mine
    return mine.site.line


def _obstructed(parcel: _Parcel) -> bool:
    target = parcel.target
    return not target.alive or parcel.origin.group != target.group
