"""The way from node to node: one simulated network, and the results that nodes share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from averaging import messages as said
from averaging.history.lineage import Lineage
from averaging.history.merged_map import MergedMap
from averaging.history.parent_maps import ParentMap, encode_maps, united
from averaging.history.replay import ReplayEntry, ReplayLog
from averaging.history.standing import merged_after
from averaging.history.state import FragmentState
from averaging.messages import Commit, Head, Message, Opening, Signatures
from averaging.numbers.arithmetic import MeldNumbers, Numbers, cutting_of
from averaging.numbers.arrays import Float32s
from averaging.numbers.chunks import Cutting
from averaging.numbers.codec import Scratch
from averaging.numbers.layout import Fragment
from averaging.numbers.piece_digests import digest_of, digests_of, root_of
from averaging.round.interface import inputs
from averaging.round.interface.effects import CatchUp, Rebase
from averaging.round.machine import FragmentRounds
from averaging.rules.usual_norms import UsualNorms
from dht.bounded_mapping import BoundedMapping, by_age
from dht.identity import PeerId
from dht.memory.event_heap import EventHeap
from dht.memory.network import SimulatedNetwork
from dht.protocol import NEWEST

STREAM_OVERHEAD_BYTES = 1000
"""Size of an opening with its commit, roughly."""
MARK_BYTES = 48
"""Size of one peer's entry of a merged map on the wire, roughly."""
MORE_MARK_BYTES = 6
"""The same in each map after the first."""
RESULTS_KEPT = 256

_scratch = Scratch()
_kept = partial(BoundedMapping[Any, Any], "simulated results", RESULTS_KEPT, worth=by_age)


AnyWatch = TypeVar("AnyWatch", covariant=True)


class WiredNode(Protocol):
    """One fragment at one peer, as the network, its rounds and its fetches see it."""

    name: PeerId
    fragment: Fragment
    state: FragmentState | None
    replay: ReplayLog | None
    usual: UsualNorms
    fetched_bytes: int

    @property
    def wires(self) -> Wires[Any]: ...

    @property
    def machine(self) -> FragmentRounds: ...

    @property
    def is_alive(self) -> bool: ...

    def hear(self, sender: PeerId, message: Message) -> None: ...

    def lost(self, peer: PeerId) -> None: ...

    def take_upload(
        self, sender: PeerId, opening: Opening, part: Part | None, stream: int
    ) -> None: ...

    def take_merged(self, round_id: bytes, index: int, part: Part) -> None: ...

    def stream_broke(self, round_id: bytes, index: int, stream: int, reason: str) -> None: ...

    def lost_reducer(self, dead: PeerId) -> None: ...

    def served(self, to: PeerId) -> FragmentState | None:
        """The state that another node gets that asks for this one's."""
        ...

    def served_rounds(self, to: PeerId, version: int, lineage: Lineage) -> tuple[ReplayEntry, ...]:
        """The rounds since a version that another node gets."""
        ...

    def shown(self, state: FragmentState) -> Head:
        """The head of a state as other peers are shown it: with the signatures under it."""
        ...

    # What its rounds and its fetches ask for

    def now(self) -> float: ...

    def when_awake(self, action: Callable[[], None]) -> None: ...

    def later(self, action: Callable[[], None]) -> None:
        """Act once the time of a merge has passed."""
        ...

    def take(self, given: inputs.Input) -> None: ...

    def next_stream(self) -> int:
        """A number for a stream that this node opens."""
        ...

    def replayed(self, before: FragmentState, entries: tuple[ReplayEntry, ...]) -> None: ...

    def fetched(
        self, state: FragmentState, signatures: Signatures, effect: CatchUp | Rebase
    ) -> None: ...

    def fetch_failed(self) -> None: ...


@dataclass(frozen=True)
class Part:
    """A slice as it travels."""

    data: bytes
    maps: dict[int, ParentMap] | None
    """The merged maps, by parent, that travel with slice 0 where states do."""
    pieces: Sequence[slice] = ()
    """The places of the pieces of a merged slice."""

    @property
    def size_bytes(self) -> int:
        if not self.maps:
            return len(self.data)
        marks = max(len(each.merged) for each in self.maps.values())
        return len(self.data) + (MARK_BYTES + MORE_MARK_BYTES * (len(self.maps) - 1)) * marks

    @property
    def parents(self) -> tuple[int, ...] | None:
        return None if self.maps is None else tuple(sorted(self.maps))

    @cached_property
    def digest(self) -> bytes:
        """The digest by which live peers know the slice: every reader of the object shares it."""
        leaves = digests_of(memoryview(self.data), self.pieces)
        if self.maps is not None:
            leaves.append(digest_of(encode_maps(self.maps)))
        return root_of(leaves)


@dataclass(frozen=True, slots=True, eq=False)
class Stepped:
    """The result of a meld for all of its members. Nobody writes to it."""

    data: memoryview
    mean: Float32s
    """Theta before the step."""
    norm: float
    """Squared norm of ``mean``."""
    theta: Float32s
    momentum: Float32s


@dataclass(frozen=True, slots=True, eq=False)
class Carried:
    """A meld's payload of a state, without the displacement: the same for all who stand on it."""

    codec: str
    theta: Float32s
    momentum: Float32s
    payload: bytes
    """The encoded bytes, with room for the displacement."""


@dataclass(slots=True)
class Wires(Generic[AnyWatch]):
    """The way from node to node: one network for all, and everybody's nodes by name."""

    heap: EventHeap
    network: SimulatedNetwork
    watch: AnyWatch
    merge_s: float = 0.05
    """Time that merging a slice takes, and the outer step."""
    bulk_factor: float = 1.0
    """Slices, replays and states travel as if they were so many times as large."""
    shortcuts: bool = False
    """Compute equal results of several nodes once: messages are not encoded and decoded, a meld's
    step is taken for all of its members, and a state is encoded for all who stand on it."""
    norm_ratio_max: float = math.inf
    """An upload so many times longer than usual is left out. Measuring takes time: not at all where
    this is infinite."""
    nodes: dict[tuple[PeerId, int], WiredNode] = field(default_factory=dict)
    _melded: BoundedMapping[bytes, tuple[Part, MergedMap]] = field(default_factory=_kept)
    _stepped: BoundedMapping[bytes, Stepped] = field(default_factory=_kept)
    _carried: BoundedMapping[bytes, Carried] = field(default_factory=_kept)
    """Keys are the lineages of the states."""
    _cuttings: BoundedMapping[tuple[int, str, tuple[str, str], tuple[int, ...], int], Cutting] = (
        field(default_factory=_kept)
    )
    _said: tuple[Message, int, Message] | None = None
    """The last message, its size and decoded form: many go to all of a roster."""

    def node(self, peer: PeerId, fragment: int) -> WiredNode | None:
        """The node, if its peer is alive."""
        node = self.nodes.get((peer, fragment))
        return node if node is not None and node.is_alive else None

    def merged_after(
        self, round_id: bytes, part: Part, commit: Commit, seal: tuple[int, ...]
    ) -> MergedMap:
        """The merged map after a mix or a meld, computed once for all members."""
        known = self._melded.get(round_id)
        if known is None or known[0] is not part:
            assert part.maps is not None
            merged = merged_after(united(part.maps), commit, seal)
            known = self._melded[round_id] = (part, merged)
        return known[1]

    def stepped(
        self, round_id: bytes, data: memoryview, numbers: MeldNumbers, cutting: Cutting
    ) -> Stepped:
        """Theta and momentum after a meld, computed once for all members."""
        known = self._stepped.get(round_id)
        if known is None or known.data != data:
            theta = np.empty(cutting.fragment.size, np.float32)
            momentum = np.empty_like(theta)
            chunks = cutting.all_chunks
            for chunk in chunks:
                numbers.decode(chunk, data[chunk.merged], theta, momentum, _scratch)
                numbers.measure_mean(chunk, theta)
            mean = theta.copy()
            for chunk in chunks:
                numbers.move(chunk, data[chunk.merged], theta, momentum, _scratch)
            known = Stepped(data, mean, numbers.norm, theta, momentum)
            self._stepped[round_id] = known
        return known

    def carried(
        self, state: FragmentState, codec: str, numbers: MeldNumbers, cutting: Cutting
    ) -> bytes:
        """The bytes of a state in a meld's payload, computed once for all who stand on it."""
        known = self._carried.get(state.lineage)
        if (
            known is None
            or known.theta is not state.theta
            or known.momentum is not state.momentum
            or known.codec != codec
        ):
            out = bytearray(cutting.data_size)
            view = memoryview(out)
            for chunk in cutting.all_chunks:
                numbers.encode_own(chunk, view[chunk.data], _scratch)
            known = Carried(codec, state.theta, state.momentum, bytes(out))
            self._carried[state.lineage] = known
        return known.payload

    def cutting(self, fragment: Fragment, numbers: Numbers, commit: Commit) -> Cutting:
        """The cutting of the fragment in a round: most rounds cut it alike."""
        alike = fragment.index, commit.kind, commit.codecs, commit.shares, commit.protocol
        known = self._cuttings.get(alike)
        if known is None:
            known = self._cuttings[alike] = cutting_of(commit, fragment, numbers)
        return known

    def send(self, sender: WiredNode, to: PeerId, message: Message) -> None:
        if self._said is None or self._said[0] is not message:
            data = said.encode(message, NEWEST)
            self._said = message, len(data), message if self.shortcuts else said.decode(data)
        _, size, heard = self._said
        fragment = sender.fragment.index

        def deliver() -> None:
            node = self.node(to, fragment)
            if node is not None:
                node.hear(sender.name, heard)

        self.network.transfer(sender.name, to, size, deliver, lambda: sender.lost(to))

    def open_upload(
        self, sender: WiredNode, to: PeerId, opening: Opening, part: Part | None, stream: int
    ) -> None:
        fragment = sender.fragment.index

        def deliver() -> None:
            node = self.node(to, fragment)
            if node is not None:
                node.take_upload(sender.name, opening, part, stream)

        def broke() -> None:
            sender.stream_broke(opening.round, opening.slice, stream, "the stream broke")

        if to == sender.name:
            self.heap.call_in(0.0, deliver)
            return
        size = STREAM_OVERHEAD_BYTES + (self.bulk(part.size_bytes) if part is not None else 0)
        self.network.transfer(sender.name, to, size, deliver, broke)

    def refuse_upload(
        self, at: WiredNode, sender: PeerId, opening: Opening, stream: int, reason: str
    ) -> None:
        node = self.nodes.get((sender, at.fragment.index))
        if node is None:
            return
        self.network.transfer(
            at.name,
            sender,
            100,
            lambda: node.stream_broke(opening.round, opening.slice, stream, reason),
            lambda: None,
        )

    def answer(
        self, at: WiredNode, to: PeerId, round_id: bytes, index: int, part: Part, stream: int
    ) -> None:
        fragment = at.fragment.index

        def deliver() -> None:
            node = self.node(to, fragment)
            if node is not None:
                node.take_merged(round_id, index, part)

        def broke() -> None:
            # An answer was lost on its way: the member's side of the stream notices.
            node = self.node(to, fragment)
            if node is not None:
                node.stream_broke(round_id, index, stream, "the stream broke")

        self.network.transfer(at.name, to, self.bulk(part.size_bytes) + 100, deliver, broke)

    def bulk(self, size_bytes: int) -> int:
        """Bytes on the wire for this many bytes of merged data."""
        return int(self.bulk_factor * size_bytes)

    def streams_to(self, dead: PeerId) -> None:
        """Have every node with a stream to a dead peer notice now."""
        for node in list(self.nodes.values()):
            if node.is_alive and node.name != dead:
                node.lost_reducer(dead)
