"""A group of peers computes what one central syncer would, to the last bit.

No network here: layout, slices, codec, merge, weights and outer step are put together as members
and reducers use them, with uploads in any order. ``tests.averaging.numbers.reference`` is the
yardstick.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from averaging import messages
from averaging.history.replay import ReplayEntry, ReplayHead, advance
from averaging.history.state import FragmentState, Pieces
from averaging.messages import Commit, Entry, Link
from averaging.numbers.arrays import Float32s
from averaging.numbers.chunks import digests_of_slices
from averaging.numbers.codec import Addends, Codec, Scratch
from averaging.numbers.codecs import codec_named
from averaging.numbers.layout import Fragment, Slice
from averaging.numbers.merge import Units, merge_encoded, rule_named
from averaging.rules.weights import Contribution, shares_of
from dht.identity import PeerId
from tests.averaging.numbers import reference
from tests.averaging.numbers.exact_work import (
    ETA,
    FRAGMENT,
    LAYOUT,
    MEMBERS,
    MU,
    ROUNDS,
    Done,
    trained,
    work,
)


class Group:
    """Members and reducers of one fragment. Each member keeps a state of its own."""

    def __init__(self, codec: str, rule: str, shares: tuple[int, ...], seed: int) -> None:
        self.codec: Codec = codec_named(codec)
        self.rule = rule
        self.shares = shares
        self.rng = np.random.default_rng(seed)
        self.slices = FRAGMENT.slices(shares)
        start = trained(np.zeros(FRAGMENT.size, np.float32), 99, 0)
        first = FragmentState.founded(LAYOUT.hash, 0, start, Pieces.of(FRAGMENT, MU).momentum)
        self.states = [first for _ in range(MEMBERS)]
        self.learners = [start.copy() for _ in range(MEMBERS)]

    def round(self, index: int) -> None:
        done = work(index)
        self.learners = [
            trained(state.theta, member, index) for member, state in enumerate(self.states)
        ]
        encoded = messages.encode_commit(self.commit(done))
        weights = shares_of([Contribution(tokens=d.tokens, steps=d.steps) for d in done])
        merged = [self.reduce(piece, weights) for piece in self.slices]
        payload = b"".join(merged)
        shares, codec = self.commit(done).shares, codec_named(self.commit(done).codec)
        digests = tuple(digests_of_slices(memoryview(payload), FRAGMENT.unit_sizes, shares, codec))
        entry = ReplayEntry(ReplayHead(encoded, tuple(range(MEMBERS)), digests), payload)
        for member, state in enumerate(self.states):
            scratch = Scratch()
            entry.check(FRAGMENT.unit_sizes, scratch)
            self.states[member] = advance(state, entry, FRAGMENT.unit_sizes, scratch)

    def reduce(self, piece: Slice, weights: tuple[float, ...]) -> bytes:
        """Merge a slice as its reducer does: uploads arrive in any order, the roster's counts."""
        uploads: dict[int, bytes] = {}
        for member in self.rng.permutation(MEMBERS):
            uploads[int(member)] = self.upload(int(member), piece)
        sizes = FRAGMENT.unit_sizes[piece.units]
        out = bytearray(self.codec.encoded_size(sizes))
        given = Addends([uploads[member] for member in range(MEMBERS)], weights)
        units = Units(sizes, FRAGMENT.kinds[piece.units])
        merge_encoded(rule_named(self.rule), self.codec, given, units, out, Scratch())
        return bytes(out)

    def upload(self, member: int, piece: Slice) -> bytes:
        sizes = FRAGMENT.unit_sizes[piece.units]
        out = bytearray(self.codec.encoded_size(sizes))
        base, values = self.states[member].theta, self.learners[member]
        before, after = base[piece.values], values[piece.values]
        self.codec.encode(after, sizes, out, Scratch(), base=before)
        self.codec.check(out, sizes, Scratch())
        return bytes(out)

    def commit(self, done: list[Done]) -> Commit:
        state = self.states[0]
        return Commit(
            topic=bytes(16),
            fragment=0,
            leader=PeerId("member 0"),
            leader_incarnation=1,
            nonce=state.version,
            parents=(Link(state.version, state.lineage, state.merged.tokens),),
            members=tuple(
                Entry(
                    peer=PeerId(f"member {member}"),
                    incarnation=1,
                    join=state.version,
                    parent=0,
                    base_version=state.version,
                    staleness=0,
                    mark=24 * (state.version + 1),
                    steps=d.steps,
                    tokens=d.tokens,
                    reachable=True,
                )
                for member, d in enumerate(done)
            ),
            reducers=tuple(PeerId(f"member {index}") for index in range(len(self.shares))),
            shares=self.shares,
            codec=self.codec.name,
            merge=self.rule,
            eta=ETA,
            mu=MU,
            batch_tokens_max=1 << 20,
            contributors_min=MEMBERS,
            upload_s=10.0,
            round_s=20.0,
        )


def through(codec: str) -> reference.Through:
    """Encode and decode a whole fragment."""
    chosen = codec_named(codec)
    sizes = FRAGMENT.unit_sizes

    def cross(vector: Float32s) -> Float32s:
        data = bytearray(chosen.encoded_size(sizes))
        chosen.encode(vector, sizes, data, Scratch())
        result = np.empty_like(vector)
        chosen.decode(data, sizes, result, Scratch())
        return result

    return cross


def central(codec: str = "f32") -> Iterator[reference.Syncer]:
    """The syncer after each round."""
    syncer = reference.Syncer(trained(np.zeros(FRAGMENT.size, np.float32), 99, 0), eta=ETA, mu=MU)
    for index in range(ROUNDS):
        syncer.merge(
            [
                reference.Work(trained(syncer.theta, member, index), done.tokens, done.steps)
                for member, done in enumerate(work(index))
            ],
            through=through(codec),
        )
        yield syncer


@pytest.mark.parametrize(
    ("shares", "seed"), [((1,), 0), ((1, 1, 1), 1), ((5, 1, 2, 2, 9, 1, 1, 3), 2)]
)
def test_fifty_rounds_have_the_bits_of_the_central_syncer(
    shares: tuple[int, ...], seed: int
) -> None:
    group = Group("f32", "mean", shares, seed)
    for index, syncer in enumerate(central()):
        group.round(index)
        for state in group.states:
            assert np.array_equal(state.theta, syncer.theta), f"round {index}"
            assert np.array_equal(state.momentum, syncer.momentum), f"round {index}"
    assert group.states[0].version == ROUNDS


@pytest.mark.parametrize("codec", ["f32", "f16", "int8", "int4", "int2"])
@pytest.mark.parametrize("rule", ["mean", "rda", "centered_clip"])
def test_neither_slices_nor_arrival_change_a_bit(codec: str, rule: str) -> None:
    groups = [
        Group(codec, rule, shares, seed)
        for seed, shares in enumerate([(1,), (3, 1, 1, 2, 7), (1,) * 8])
    ]
    for index in range(3):
        for group in groups:
            group.round(index)
    first = groups[0].states[0]
    for group in groups:
        for state in group.states:
            assert np.array_equal(state.theta, first.theta)
            assert np.array_equal(state.momentum, first.momentum)
            assert state.merged == first.merged
        assert len({state.digest() for state in group.states}) == 1


@pytest.mark.parametrize("codec", ["f16", "int8", "int4"])
def test_a_lossy_wire_leads_to_the_same_decisions(codec: str) -> None:
    """Contributors, weights and marks, and so versions and tokens, are as with f32.

    The numbers follow the syncer whose wire loses as much; they may not be the same
    bits, because a reducer multiplies a block's scale by the weight and not each value.
    """
    exact, lossy = Group("f32", "mean", (1, 2), 0), Group(codec, "mean", (1, 2), 0)
    syncer = None
    for index, latest in enumerate(central(codec)):
        syncer = latest
        exact.round(index)
        lossy.round(index)
        here, there = lossy.states[0], exact.states[0]
        assert (here.version, here.merged) == (there.version, there.merged)
        assert [link.tokens for link in here.chain] == [link.tokens for link in there.chain]
        assert len({state.digest() for state in lossy.states}) == 1

    assert syncer is not None
    lost = float(np.abs(syncer.theta - exact.states[0].theta).max())
    assert lost > 0
    assert float(np.abs(lossy.states[0].theta - syncer.theta).max()) < lost / 2


def test_the_fragment_has_units_enough_to_be_cut() -> None:
    assert len(FRAGMENT.units) == 5
    assert isinstance(FRAGMENT, Fragment)
    assert sum(piece.size > 0 for piece in FRAGMENT.slices((1, 1, 1))) >= 2
