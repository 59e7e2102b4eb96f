"""Rounds whose uploads and merged slices have different codecs, and error feedback."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from averaging.errors import NotFinite
from averaging.history.adoption import OwnWork, Parting
from averaging.history.state import FragmentState
from averaging.numbers.arithmetic import (
    Moved,
    Numbers,
    Weighted,
    squares_at_most,
)
from averaging.numbers.arrays import Float32s, uninitialised
from averaging.numbers.chunks import Chunk, Cutting
from averaging.numbers.codec import Addends, Scratch
from averaging.numbers.codecs import codec_named, codec_names
from averaging.numbers.layout import Layout, TensorSpec
from averaging.numbers.merge import Units, merge_encoded, rule_named, rule_names
from averaging.numbers.outer import Step

LAYOUT = Layout.build([TensorSpec("block.weight", (70, 50)), TensorSpec("block.bias", (50,))], 1)
FRAGMENT = LAYOUT.fragments[0]
SIZES, KINDS = FRAGMENT.unit_sizes, FRAGMENT.kinds
SIZE = FRAGMENT.size


def all_of(numbers: Numbers) -> Chunk:
    """The whole fragment as one chunk."""
    return Cutting(FRAGMENT, numbers.up, numbers.down, (1,))._chunk(0, len(FRAGMENT.units))


def draw(seed: int, scale: float = 0.01) -> Float32s:
    values: Float32s = np.random.default_rng(seed).standard_normal(SIZE, np.float32)
    return values * np.float32(scale)


def decoded(codec: str, data: bytes | bytearray | memoryview) -> Float32s:
    out = np.empty(SIZE, np.float32)
    codec_named(codec).decode(data, SIZES, out, Scratch())
    return out


@pytest.mark.parametrize("rule", rule_names())
@pytest.mark.parametrize(("up", "down"), [("int2", "int4"), ("int4", "f32"), ("f32", "int2")])
def test_a_merge_into_another_codec_loses_only_what_that_codec_loses(
    rule: str, up: str, down: str
) -> None:
    scratch, weights = Scratch(), (0.5, 0.3, 0.2)
    payloads = []
    for seed in range(3):
        payloads.append(bytearray(codec_named(up).encoded_size(SIZES)))
        codec_named(up).encode(draw(seed), SIZES, payloads[-1], scratch)

    def merged(into: str) -> bytearray:
        out = bytearray(codec_named(into).encoded_size(SIZES))
        given, units = Addends(payloads, weights), Units(SIZES, KINDS)
        above, below = codec_named(up), codec_named(into)
        merge_encoded(rule_named(rule), above, given, units, out, scratch, into=below)
        return out

    again = bytearray(codec_named(down).encoded_size(SIZES))
    codec_named(down).encode(decoded("f32", merged("f32")), SIZES, again, scratch)
    assert merged(down) == again


@pytest.mark.parametrize("rule", rule_names())
@pytest.mark.parametrize("melds", [False, True])
@pytest.mark.parametrize(("up", "down"), [("int2", "int2"), ("int2", "int4"), ("int4", "f16")])
def test_the_rest_of_a_merge_is_what_its_encoding_loses(
    rule: str, melds: bool, up: str, down: str
) -> None:
    scratch, zeros = Scratch(), np.zeros(SIZE, np.float32)

    def numbers(down: str) -> Numbers:
        if not melds:
            return Numbers(codec=up, codec_down=down, merge=rule, eta=1.0, mu=0.0)
        codec = f"{up}/f32"
        return Numbers(codec=codec, codec_down=down, merge=rule, eta=1.0, mu=0.0)

    payloads = []
    chunk = all_of(numbers(down))
    for seed in range(3):
        payloads.append(memoryview(bytearray(numbers(down).up.encoded_size(SIZES))))
        numbers(down).encode(
            chunk,
            Moved(zeros, draw(seed), carried=(zeros,) if melds else ()),
            payloads[-1],
            scratch,
        )

    def merged(down: str, rest: Float32s | None) -> memoryview:
        out = memoryview(bytearray(numbers(down).down.encoded_size(SIZES)))
        given = Weighted(payloads, (0.5, 0.3, 0.2))
        numbers(down).merge(chunk, given, out, scratch, rest=rest)
        return out

    def displacement(down: str, data: memoryview) -> Float32s:
        theta = zeros.copy()
        numbers(down).step(chunk, data, Step(zeros, theta, zeros.copy()), scratch)
        return -theta

    rest = np.full(SIZE, np.nan, np.float32)
    data = merged(down, rest)
    assert data == merged(down, None), "it does not change what is sent"
    exact = displacement("f32", merged("f32", None))
    assert np.linalg.norm(rest) > 1e-5 * np.linalg.norm(exact)
    np.testing.assert_allclose(displacement(down, data) + rest, exact, rtol=0, atol=1e-8)


def test_slices_of_both_ways_lie_where_their_codecs_put_them() -> None:
    numbers = Numbers(codec="int2", codec_down="int4", merge="mean", eta=1.0, mu=0.0)
    cutting = Cutting(FRAGMENT, numbers.up, numbers.down, (1, 2))

    assert cutting.data_size == codec_named("int2").encoded_size(SIZES)
    assert cutting.merged_size == codec_named("int4").encoded_size(SIZES)
    for index in range(2):
        sizes = SIZES[cutting.slices[index].units]
        assert cutting.upload_size(index) == codec_named("int2").encoded_size(sizes)
        place = cutting.merged_of(index)
        assert place.stop - place.start == codec_named("int4").encoded_size(sizes)


@pytest.mark.parametrize("share", [1.0, 0.5, 0.25])
@pytest.mark.parametrize("codec", ["int2", "int4"])
@pytest.mark.parametrize("melds", [False, True])
def test_the_sent_part_and_the_part_left_are_the_displacement(
    codec: str, melds: bool, share: float
) -> None:
    base, values, scratch = draw(0, 1.0), draw(1, 1.0), Scratch()
    numbers: Numbers
    numbers = Numbers(codec=codec, merge="mean", eta=1.0, mu=0.0)
    if melds:
        numbers = Numbers(codec=f"{codec}/f32/f16", merge="mean", eta=1.0, mu=0.5)
    moved = Moved(base, values, carried=(base, np.zeros_like(base)) if melds else ())
    chunk = all_of(numbers)
    data = memoryview(bytearray(numbers.up.encoded_size(SIZES)))
    first = values.copy()
    numbers.encode(chunk, replace(moved, share=share, feedback=True), data, scratch)
    sent = np.empty(SIZE, np.float32)
    shortened = np.float32(share) * (base - first)
    codec_named(codec).encode(
        shortened, SIZES, plain := bytearray(codec_named(codec).encoded_size(SIZES)), scratch
    )
    codec_named(codec).decode(plain, SIZES, sent, scratch)

    rounding = 0.0 if share == 1.0 else 1e-5
    np.testing.assert_allclose(values, base - sent / np.float32(share), rtol=0, atol=rounding)


@pytest.mark.parametrize("melds", [False, True])
def test_a_share_of_a_displacement_is_sent_and_the_offered_values_stay(melds: bool) -> None:
    base, values, scratch = draw(0), draw(1), Scratch()
    numbers: Numbers = Numbers(codec="f32", merge="mean", eta=1.0, mu=0.0)
    if melds:
        numbers = Numbers(codec="f32/f32/f16", merge="mean", eta=1.0, mu=0.5)
    moved = Moved(base, values, carried=(base, np.zeros_like(base)) if melds else ())
    chunk = all_of(numbers)
    data, before = memoryview(bytearray(numbers.up.encoded_size(SIZES))), values.copy()
    numbers.encode(chunk, replace(moved, share=0.5), data, scratch)

    after = np.zeros(SIZE, np.float32)
    numbers.up.subtract(chunk, data, base, after, scratch)

    np.testing.assert_allclose(base - after, 0.5 * (base - values), rtol=0, atol=1e-8)
    assert np.array_equal(values, before)


def alone(feedback: bool, rounds: int = 40) -> tuple[float, float]:
    """Train alone through int2. Every third round comes to nothing.

    Returns how far theta and the parameters are from where all steps together lead, in sizes of
    one round's steps.
    """
    scratch, start = Scratch(), np.zeros(SIZE, np.float32)
    numbers = Numbers(codec="int2", merge="mean", eta=1.0, mu=0.0)
    chunk = all_of(numbers)
    state = FragmentState.founded(LAYOUT.hash, 0, start, 0)
    own, parameters, steps = OwnWork(state, step=0), start.copy(), draw(7)
    for number in range(1, rounds + 1):
        parameters -= steps
        own.offer(parameters.copy(), step=number)
        snapshot = own.snapshot
        assert snapshot is not None
        data = memoryview(bytearray(numbers.up.encoded_size(SIZES)))
        numbers.encode(chunk, Moved(own.base, snapshot, feedback=feedback), data, scratch)
        if number % 3 == 0:
            own.release()
            continue
        theta, momentum = state.theta.copy(), state.momentum.copy()
        numbers.step(chunk, data, Step(state.theta, theta, momentum), scratch)
        state = FragmentState.founded(LAYOUT.hash, 0, theta, 0)
        own.adopt(state, number, step=number).apply(parameters)
    size = float(np.linalg.norm(steps))
    goal = start - rounds * steps
    return (
        float(np.linalg.norm(state.theta - goal)) / size,
        float(np.linalg.norm(parameters - goal)) / size,
    )


def test_error_feedback_keeps_all_steps_in_theta_or_in_the_parameters() -> None:
    theta_off, parameters_off = alone(feedback=True)
    assert parameters_off < 1e-3, "the parameters hold every step exactly once"
    assert theta_off < 3, "a few rounds' rests, however many rounds there were"

    theta_off, parameters_off = alone(feedback=False)
    assert parameters_off > 3 and theta_off > 3


class FedBack:
    """A peer with error feedback, which knows where all of its and others' steps lead."""

    def __init__(self) -> None:
        start = np.zeros(SIZE, np.float32)
        self.state = FragmentState.founded(LAYOUT.hash, 0, start, 0)
        self.own = OwnWork(self.state, step=0)
        self.parameters, self.goal = start.copy(), start.astype(np.float64)
        self.step = 0

    def train(self) -> None:
        steps = draw(100 + self.step)
        self.parameters -= steps
        self.goal -= steps
        self.step += 1

    def encode(self, codec: str = "int2") -> tuple[Numbers, memoryview]:
        """Train, and encode an offer. What encoding loses is left in the parameters."""
        self.train()
        self.own.offer(self.parameters.copy(), step=self.step)
        snapshot, scratch = self.own.snapshot, Scratch()
        assert snapshot is not None
        numbers = Numbers(codec=codec, merge="mean", eta=1.0, mu=0.0)
        chunk = all_of(numbers)
        data = memoryview(bytearray(numbers.up.encoded_size(SIZES)))
        numbers.encode(chunk, Moved(self.own.base, snapshot, feedback=True), data, scratch)
        return numbers, data

    def merge(self, codec: str = "int2") -> None:
        """Take part in a round that this peer is alone in."""
        numbers, data = self.encode(codec)
        chunk = all_of(numbers)
        theta, momentum = self.state.theta.copy(), self.state.momentum.copy()
        numbers.step(chunk, data, Step(self.state.theta, theta, momentum), Scratch())
        self.train()  # while the round is under way
        self.stand_on(theta)
        self.own.adopt(self.state, self.step - 1, step=self.step).apply(self.parameters)

    def stand_on(self, theta: Float32s) -> None:
        self.state = replace(self.state, version=self.state.version + 1, theta=theta)


def comes_to_nothing(peer: FedBack) -> None:
    peer.encode()
    peer.own.release()


def restarts_its_agent(peer: FedBack) -> None:
    """The new agent knows the base from a checkpoint, and drops a snapshot that is in doubt."""
    peer.encode()
    peer.own = OwnWork(peer.state, step=peer.own.merged_step)


def follows_without_its_work(peer: FedBack) -> None:
    """The same for a version that came by a replay, or by a meld."""
    peer.encode()
    moved = draw(8)
    peer.goal += moved
    peer.stand_on(peer.state.theta + moved)
    peer.own.adopt(peer.state, None, step=peer.step).apply(peer.parameters)


def changes_sides(peer: FedBack) -> None:
    """Give up the learner's last merge for another side of a fork."""
    ancestor, before = peer.state, peer.own.merged_step
    peer.merge()
    moved = draw(9)
    peer.goal += moved
    peer.stand_on(ancestor.theta + moved)
    parting = Parting(ancestor.version, ancestor.theta, before, peer.own.merged_step)
    rebased = peer.own.rebase(peer.state, parting, step=peer.step)
    assert rebased is not None
    rebased.adopted.apply(peer.parameters)


def changes_its_codec(peer: FedBack) -> None:
    peer.merge("int4")


@pytest.mark.parametrize(
    "happens",
    [
        comes_to_nothing,
        restarts_its_agent,
        follows_without_its_work,
        changes_sides,
        changes_its_codec,
    ],
)
def test_error_feedback_loses_nothing_whatever_happens(happens: Callable[[FedBack], None]) -> None:
    peer, size = FedBack(), float(np.linalg.norm(draw(100)))
    for number in range(24):
        (happens if number % 3 == 2 else FedBack.merge)(peer)
        off = np.linalg.norm(peer.parameters - peer.goal) / size
        assert off < 1e-3, f"after round {number} the parameters hold other steps than were made"
    peer.merge()
    assert np.linalg.norm(peer.state.theta - peer.goal) / size < 4, "a few rounds' rests at most"


@pytest.mark.parametrize("value", [np.inf, np.nan, np.finfo(np.float32).max])
def test_a_share_of_a_displacement_that_is_not_finite_is_refused(value: float) -> None:
    base, values = draw(0), draw(1)
    base[0], values[0] = -np.finfo(np.float32).max, value
    numbers = Numbers(codec="f32", merge="mean", eta=1.0, mu=0.0)
    chunk = all_of(numbers)
    data = memoryview(bytearray(numbers.up.encoded_size(SIZES)))

    with pytest.raises(NotFinite):
        numbers.encode(chunk, Moved(base, values, share=0.5), data, Scratch())


# Bounds on the norms of an upload, read without decoding it.


UNIT_SIZES = (3000, 0, 1, 1024, 1023, 0, 5 * 1024, 7, 7, 7)


@pytest.mark.parametrize("name", codec_names())
def test_the_bound_of_each_unit_is_above_its_norm_and_not_by_much(name: str) -> None:
    codec, scratch = codec_named(name), Scratch()
    values = np.random.default_rng(3).standard_normal(sum(UNIT_SIZES), dtype=np.float32)
    values[:3000] *= 1e6
    data = uninitialised(codec.encoded_size(UNIT_SIZES))
    codec.encode(values, UNIT_SIZES, data, scratch)

    found = squares_at_most(codec, data, UNIT_SIZES)

    ends = np.cumsum(UNIT_SIZES)
    for size, end, bound in zip(UNIT_SIZES, ends, found, strict=True):
        exact = float(np.square(values[end - size : end], dtype=np.float64).sum())
        assert exact <= bound * (1 + 1e-6)
        # A block counts as if all were its peak; scales of f16 are powers of two.
        assert bound <= 4 * 16 * exact


@pytest.mark.parametrize("name", codec_names())
def test_the_bound_of_a_unit_is_the_same_alone_and_among_others(name: str) -> None:
    codec, scratch = codec_named(name), Scratch()
    values = np.random.default_rng(4).standard_normal(sum(UNIT_SIZES), dtype=np.float32)
    data = uninitialised(codec.encoded_size(UNIT_SIZES))
    codec.encode(values, UNIT_SIZES, data, scratch)

    alone, at = [], 0
    for size in UNIT_SIZES:
        end = at + codec.encoded_size((size,))
        alone += squares_at_most(codec, data[at:end], (size,)).tolist()
        at = end

    assert squares_at_most(codec, data, UNIT_SIZES).tolist() == alone


def test_an_empty_payload_has_a_bound_of_zero() -> None:
    assert squares_at_most(codec_named("int8"), memoryview(b""), (0, 0)).tolist() == [0.0, 0.0]
