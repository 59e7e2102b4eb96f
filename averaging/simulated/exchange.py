"""One simulated peer's part in the bytes of one round: encode, send, reduce, bundle, answer.

It does the work of ``averaging.live.slices.exchange`` and of the parts of one: the routes, the
codecs and the merge are the same code, only the bytes travel over ``averaging.simulated.wires``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from averaging.errors import BadPayload
from averaging.history.parent_maps import ParentMap, parents_of, problem_of
from averaging.messages import MERGED, OWN, Opening
from averaging.numbers.arithmetic import MeldNumbers, Weighted, numbers_of
from averaging.numbers.arrays import Float64s
from averaging.numbers.codec import Scratch
from averaging.numbers.norm_bounds import norm_at_most
from averaging.round.contributing import Contribution
from averaging.round.interface import inputs
from averaging.round.interface.effects import Enter, Merge, Upload
from averaging.round.rests import Rests
from averaging.round.traffic import NOTHING_TO_GIVE, BundleRoster, Incoming, Route, Traffic
from averaging.rules.sites import SITE_SHARE, riders_of
from averaging.rules.usual_norms import UploadNorm, norm_objection
from averaging.rules.weights import weights_of
from averaging.simulated.wires import Part, WiredNode
from dht.identity import PeerId

_scratch = Scratch()


class Exchange:
    """The bytes of one participation. Made by ``Enter``, ended by ``close``."""

    def __init__(self, enter: Enter, node: WiredNode) -> None:
        self.round = enter.round
        self.commit = enter.commit
        self.numbers = numbers_of(enter.commit)
        self.cutting = node.wires.cutting(node.fragment, self.numbers, enter.commit)
        self.traffic = Traffic(enter, me=node.name)
        self.payload: bytes | None = None
        """The own contribution."""
        self.own_map: ParentMap | None = None
        self.rests: Rests | None = None
        """The loss of encoding slices that are merged here, with error feedback."""
        self.uploads: dict[tuple[int, int], Part] = {}
        """Uploads by slice and roster index; at a delegate also those of its riders."""
        self.merged: dict[int, Part] = {}
        self._node = node
        self._wires = node.wires
        self._waiters: dict[int, dict[PeerId, int]] = {}
        """Streams that wait for the merged slice, by slice and peer."""
        self._streams: dict[int, tuple[int, Route]] = {}
        """The newest stream that was opened for each slice, and its route."""
        self._held: dict[int, Route] = {}
        """Uploads that wait for the bundle."""
        self._bundle: list[Part] | None = None
        self._closed = False
        self._roster: BundleRoster | None = None
        """The members of the bundle, if this peer is a delegate."""
        riders = self.traffic.riders
        if enter.entry is not None and riders:
            self._roster = BundleRoster(
                enter.entry,
                riders,
                len(self.cutting.slices),
                norm_ratio_max=self._wires.norm_ratio_max,
            )
            wait_s = SITE_SHARE * enter.commit.upload_s
            self._wires.heap.call_in(wait_s, node.when_awake, self._make_bundle)

    def __repr__(self) -> str:
        return f"Exchange({self._node.name}, {self.traffic!r})"

    def close(self) -> None:
        """The round is forgotten."""
        self._closed = True

    # The own contribution

    def contribute(self, given: Contribution) -> None:
        if isinstance(self.numbers, MeldNumbers):
            assert given.carried is not None
            self.numbers.carry(*given.carried)
        self.traffic.gives = True
        self.own_map = given.own_map
        self.payload = self._encoded(given)
        if given.keeps_rests:
            self.rests = Rests(self.commit, self.traffic.entry, self.cutting)

    def _encoded(self, given: Contribution) -> bytes:
        numbers, cutting = self.numbers, self.cutting
        if self._wires.shortcuts and isinstance(numbers, MeldNumbers):
            assert self._node.state is not None
            codec = self.commit.codec
            out = bytearray(self._wires.carried(self._node.state, codec, numbers, cutting))
            encode = numbers.encode_moved
        else:
            out = bytearray(cutting.data_size)
            encode = numbers.encode
        view = memoryview(out)
        for chunk in cutting.all_chunks:
            data = view[chunk.data]
            encode(chunk, given, data, _scratch)
        return bytes(out)

    def own_part(self, index: int) -> Part:
        assert self.payload is not None
        maps, entry = None, self.traffic.entry
        if self.traffic.has_maps(index) and self.own_map is not None and entry is not None:
            maps = {self.commit.members[entry].parent: self.own_map}
        return Part(self.payload[self.cutting.data_of(index)], maps)

    # Sending

    def upload(self, upload: Upload) -> None:
        route = self.traffic.upload(upload.slice, upload.to, upload.what)
        if route is not None:
            self.go(route)

    def go(self, route: Route) -> None:
        """Open the stream of a route as soon as its content exists."""
        self._held.pop(route.slice, None)
        if route.to == self._node.name and route.what != OWN:
            self._streams.pop(route.slice, None)
            return
        part: Part | None = None
        if route.what == MERGED:
            part = self.merged[route.slice]
        elif route.what == OWN and self._roster is None:
            part = self.own_part(route.slice)
        elif route.what == OWN and self._bundle is None:
            self._held[route.slice] = route
            return
        elif route.what == OWN:
            assert self._bundle is not None
            part = self._bundle[route.slice]
        stream = self._node.next_stream()
        self._streams[route.slice] = stream, route
        opening = self.traffic.opening(route)
        self._wires.open_upload(self._node, route.to, opening, part, stream)

    def stream_broke(self, index: int, stream: int, reason: str) -> None:
        if index in self.merged:
            return
        newest, route = self._streams.get(index, (None, None))
        if newest != stream or route is None:
            return
        instead = self.traffic.broke(route)
        if instead is None:
            self._node.take(inputs.UploadFailed(self.round, index, reason))
            return
        for each in instead:
            self._go_later(each)

    def _go_later(self, route: Route) -> None:
        if not route.after_s:
            self.go(route)
            return
        del self._streams[route.slice]

        def again() -> None:
            if not self._closed and route.slice not in self._streams:
                self.go(route)

        self._wires.heap.call_in(route.after_s, self._node.when_awake, again)

    def lost_reducer(self, dead: PeerId) -> None:
        for index, (stream, route) in list(self._streams.items()):
            if route.to == dead:
                self.stream_broke(index, stream, "its host is gone")

    # A site's delegate

    def _make_bundle(self) -> None:
        """Decide who of the site is in the bundle, once; make it and send it."""
        if self._closed or self._bundle is not None:
            return
        roster, me = self._roster, self.traffic.entry
        assert roster is not None and me is not None
        slices = range(len(self.cutting.slices))
        own = [self.own_part(index) for index in slices]
        for index, part in enumerate(own):
            roster.measured(me, index, self._upload_norm(index, part))
        self.traffic.inside = roster.decide()
        inside = sorted([me, *self.traffic.inside])
        parts = {**self.uploads, **{(index, me): part for index, part in enumerate(own)}}
        if inside[1:]:
            weights = weights_of(self.commit, inside)
            own = [
                self._merged(
                    index, [parts[index, who] for who in inside], weights, inside, again=True
                )
                for index in slices
            ]
        self._bundle = own
        for _, route in sorted(self._held.items()):
            self.go(route)

    # What arrives

    def take_upload(self, sender: PeerId, opening: Opening, part: Part | None, stream: int) -> None:
        """A stream has opened and brought all that it brings."""
        traffic, index = self.traffic, opening.slice
        entry = self.commit.index(sender)
        assert entry is not None
        if sender == self._node.name:
            assert part is not None
            self._own_upload(index, entry, part, traffic.handed_over(index))
            return
        self._waiters.setdefault(index, {})[sender] = stream
        match traffic.arriving(opening, entry):
            case Incoming.MERGED:
                assert part is not None
                self.take_merged(index, part)
            case Incoming.RIDER | Incoming.EMPTY_RIDER as incoming:
                self._rider(index, entry, part if incoming is Incoming.RIDER else None)
            case Incoming.OWN:
                assert part is not None
                self._own_upload(index, entry, part, opening.riders)
            case Incoming.EMPTY:
                self._arrived(index, entry, NOTHING_TO_GIVE, riders_of(self.commit, entry))
        if traffic.may_answer(index, entry):
            self.answer_one(index, sender, stream)

    def _rider(self, index: int, entry: int, part: Part | None) -> None:
        roster = self._roster
        assert roster is not None
        if part is None:
            roster.leave_out(entry)
        elif roster.wants(entry, index):
            self.uploads[index, entry] = part
            roster.take(entry, index, self._upload_norm(index, part))
        if roster.is_settled:
            self._node.later(self._make_bundle)

    def _own_upload(self, index: int, entry: int, part: Part, riders: tuple[int, ...]) -> None:
        fault = self._wires.watch.fault_of(self._node, self.commit.members[entry].peer)
        fault = fault or self._malformed(index, part)
        if fault is None and part.maps is not None:
            fault = problem_of(part.maps, self.commit, [entry, *riders])
        norm: UploadNorm | None = None
        if fault is None:
            self.uploads[index, entry] = part
            self.traffic.took(index, entry, riders)
            norm = self._upload_norm(index, part)
        else:
            self.traffic.left_out(index, entry, fault)
        self._arrived(index, entry, fault, riders, norm)

    def _arrived(
        self,
        index: int,
        entry: int,
        problem: str | None,
        riders: tuple[int, ...],
        norm: UploadNorm | None = None,
    ) -> None:
        sender = self.commit.members[entry].peer
        self._node.take(inputs.UploadArrived(self.round, index, sender, problem, norm, riders))

    def _malformed(self, index: int, part: Part, *, merged: bool = False) -> str | None:
        """The reason why these bytes are no slice of this round; ``None``: they are."""
        if self._wires.shortcuts:
            return None
        pieces = self.cutting.pieces(index, merged=merged)
        size = pieces[-1][1].stop if pieces else 0
        if len(part.data) != size:
            return f"a slice of {len(part.data)} bytes; it has {size}"
        numbers = self.numbers.down if merged else self.numbers.up
        try:
            for chunk, place in pieces:
                numbers.check(chunk, memoryview(part.data)[place], _scratch)
        except BadPayload as error:
            return str(error)
        return None

    @property
    def _measures(self) -> bool:
        """True if somebody may be refused for the norm of a displacement."""
        return self.commit.kind != "mix" and not math.isinf(self._wires.norm_ratio_max)

    def _upload_norm(self, index: int, part: Part) -> UploadNorm | None:
        """The norm of a displacement, where somebody may be refused for it."""
        if not self._measures:
            return None
        cutting, data = self.cutting, memoryview(part.data)
        piece, state = cutting.slices[index], self._node.state
        squares = sum(
            float(self.numbers.up.squares(chunk, data[place]).sum())
            for chunk, place in cutting.pieces(index)
        )
        usual, harmless = self._node.usual.norm(piece.units), 0.0
        if usual is None and state is not None:
            sizes = cutting.fragment.unit_sizes[piece.units]
            harmless = norm_at_most(state.theta[piece.values], sizes)
        return UploadNorm(math.sqrt(squares), usual, harmless)

    # Reducing

    def merge(self, merge: Merge) -> None:
        taken = self.traffic.merge(merge.slice, merge.contributors, merge.weights)
        uploads = [self.uploads[merge.slice, carrier] for carrier in taken.carriers]
        merged = self._merged(
            merge.slice, uploads, taken.weights, merge.contributors, taken.members
        )
        self.merged[merge.slice] = merged
        self.traffic.merged.add(merge.slice)
        self._node.take(inputs.SliceMerged(self.round, merge.slice, merged.digest))

    def _merged(
        self,
        index: int,
        parts: Sequence[Part],
        weights: Sequence[float],
        inside: Sequence[int],
        members: Sequence[int] | None = None,
        *,
        again: bool = False,
    ) -> Part:
        """``inside``: the roster indices of all whose work is in the parts. ``again``: the result
        is a contribution, which other reducers merge.
        """
        given = self.cutting.pieces(index)
        made = given if again else self.cutting.pieces(index, merged=True)
        out = bytearray(made[-1][1].stop if made else 0)
        rest = None if self.rests is None else self.rests.room(index)
        for (chunk, piece), (_, place) in zip(given, made, strict=True):
            payloads = [memoryview(part.data)[piece] for part in parts]
            taken = Weighted(payloads, weights, members, again)
            lost = None if rest is None else rest.of(chunk)
            self.numbers.merge(chunk, taken, memoryview(out)[place], _scratch, rest=lost)
        if self.rests is not None and rest is not None:
            self.rests.keep(rest, inside)
        pieces = () if again else self.cutting.merged_pieces(index)
        if not self.traffic.has_maps(index):
            return Part(bytes(out), None, pieces)
        there = {parent: each for part in parts for parent, each in (part.maps or {}).items()}
        maps = {parent: there[parent] for parent in parents_of(self.commit, inside)}
        return Part(bytes(out), maps, pieces)

    def answer(self, index: int) -> None:
        """Give this merged slice to those who wait for it, and to those who will ask."""
        self.traffic.answerable.add(index)
        self._answer_waiters(index)

    def _answer_waiters(self, index: int) -> None:
        for peer, stream in sorted(self._waiters.get(index, {}).items()):
            if self.traffic.may_answer(index, self.commit.index(peer)):
                self.answer_one(index, peer, stream)

    def answer_one(self, index: int, peer: PeerId, stream: int) -> None:
        self._waiters.get(index, {}).pop(peer, None)
        self._wires.answer(self._node, peer, self.round, index, self.merged[index], stream)

    # Merged slices

    def take_merged(self, index: int, part: Part) -> None:
        problem = self._malformed(index, part, merged=True)
        if problem is None and part.maps is not None:
            problem = problem_of(part.maps, self.commit)
        problem = problem or self._norm_objection(index, part)
        if problem is not None:
            self._node.take(inputs.UploadFailed(self.round, index, problem))
        elif index not in self.merged:
            self.merged[index] = part
            self.traffic.merged.add(index)
            self._answer_waiters(index)
            self._node.take(
                inputs.MergedArrived(self.round, index, part.digest, part.parents, None)
            )

    def _norm_objection(self, index: int, part: Part) -> str | None:
        """The reason not to take a slice that another peer merged."""
        state, cutting = self._node.state, self.cutting
        if not self._measures or state is None:
            return None
        piece, data = cutting.slices[index], memoryview(part.data)
        squares = sum(
            float(self.numbers.down.squares(chunk, data[place]).sum())
            for chunk, place in cutting.pieces(index, merged=True)
        )
        usual = self._node.usual.norm(piece.units)
        own = 0.0
        if self.payload is not None:
            norm = self._upload_norm(index, self.own_part(index))
            own = 0.0 if norm is None else norm.value
        theta, sizes = state.theta, cutting.fragment.unit_sizes
        if usual is None:
            theta_norm = norm_at_most(theta, sizes)
        else:
            theta_norm = norm_at_most(theta[piece.values], sizes[piece.units])
        return norm_objection(
            math.sqrt(squares),
            usual=usual,
            own=own,
            theta=theta_norm,
            norm_ratio_max=self._wires.norm_ratio_max,
        )

    def merged_parts(self) -> list[Part]:
        """All merged slices, in order. Complete once the machine says ``Apply``."""
        return [self.merged[index] for index in range(len(self.cutting.slices))]

    def merged_squares(self, data: memoryview) -> Float64s | None:
        """The squared norm of the merged displacement of each unit, where it is measured."""
        if not self._measures:
            return None
        squares = np.zeros(len(self.cutting.fragment.units))
        for chunk in self.cutting.all_chunks:
            squares[chunk.first_unit : chunk.end_unit] = self.numbers.down.squares(
                chunk, data[chunk.merged]
            )
        return squares
