"""The codecs with compiled kernels in place of numpy's passes: the same bytes in less time.

A class here is one of ``averaging.numbers.codecs`` and takes from it everything that is not worth a
kernel. ``loading`` puts them into the table of codecs when they have been compared with numpy on
this machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from averaging.errors import NotFinite
from averaging.numbers.arrays import (
    WORK_VALUES,
    Buffer,
    Bytes,
    Float32Rows,
    Float32s,
    Float64s,
    squared_norms,
    take_squared_norms,
)
from averaging.numbers.codec import Addends, Codec, Scratch, checked_bytes, require_size
from averaging.numbers.codecs import Float16, Int2, Int4, Int8, replace
from averaging.numbers.outer import Nesterov, Step, StepsFused, step_encoded
from averaging.numbers.tiles import plan_of
from peer.errors import PeerError
from peer.extras.compiled import kernels

_NOTHING = np.empty(0, np.float32)


class CodecsDiffer(PeerError):
    """A compiled codec and numpy's disagree on this machine."""

    codec: str
    what: str
    message = "compiled {codec} has other bits than numpy's in {what}"


class _Compiled(Codec, StepsFused):
    """Base of the compiled codecs. Scratch memory is not used: a kernel needs 16 kB of its own."""

    number: ClassVar[int]

    def encode(
        self,
        values: Float32s,
        sizes: Sequence[int],
        out: Buffer,
        scratch: Scratch,
        *,
        base: Float32s | None = None,
        leaves_rest: bool = False,
    ) -> None:
        target, tiles = self._target(out, sizes, values.size), _tiles_of(self, tuple(sizes))
        if base is not None:
            require_size(base, sizes)
        before = _NOTHING if base is None else base
        rest = _NOTHING if base is None or not leaves_rest else values
        _refuse(kernels.encode(self.number, tiles, before, values, target, rest))

    def encode_sum(
        self,
        source: Codec,
        given: Addends,
        sizes: Sequence[int],
        out: Buffer,
        scratch: Scratch,
        *,
        rest: Float32s | None = None,
    ) -> None:
        if not isinstance(source, _Compiled):
            super().encode_sum(source, given, sizes, out, scratch, rest=rest)
            return
        if rest is not None:
            require_size(rest, sizes)
        left = _NOTHING if rest is None else rest
        target = self._target(out, sizes, sum(sizes))
        length = source.encoded_size(sizes)
        payloads = [checked_bytes(source.name, payload, length) for payload in given.payloads]
        factors = np.array(given.weights, np.float32)
        if len(factors) != len(payloads):
            raise ValueError(f"{len(factors)} weights for {len(payloads)} payloads")
        addresses = np.array([data.ctypes.data for data in payloads], np.uint64)
        tiles, made = _tiles_of(source, tuple(sizes)), _tiles_of(self, tuple(sizes))
        _refuse(
            kernels.merge(
                (source.number, self.number), tiles, made, addresses, length, factors, target, left
            )
        )

    def decode(self, data: Buffer, sizes: Sequence[int], out: Float32s, scratch: Scratch) -> None:
        self._decode(data, sizes, 1.0, kernels.SET, out)

    def decode_add(
        self,
        data: Buffer,
        sizes: Sequence[int],
        weight: float | Float64s,
        accumulator: Float32s,
        scratch: Scratch,
    ) -> None:
        self._decode(data, sizes, weight, kernels.ADD, accumulator)

    def _decode(
        self,
        data: Buffer,
        sizes: Sequence[int],
        weight: float | Float64s,
        action: int,
        out: Float32s,
    ) -> None:
        octets = self._source(data, sizes, out)
        weights = np.ascontiguousarray(np.broadcast_to(np.float32(weight), len(sizes)))
        kernels.decode(self.number, _tiles_of(self, tuple(sizes)), octets, weights, action, out)

    def decode_subtract(
        self,
        data: Buffer,
        sizes: Sequence[int],
        minuend: Float32s,
        out: Float32s,
        scratch: Scratch,
    ) -> None:
        self.step_fused(Step(minuend, out, _NOTHING), data, sizes, Nesterov(1.0, 0.0))

    def step_fused(
        self, made: Step, payload: Buffer, sizes: Sequence[int], optimizer: Nesterov
    ) -> None:
        octets = self._source(payload, sizes, made.before)
        eta, mu = np.float32(optimizer.eta), np.float32(optimizer.mu)
        held = made.momentum if mu else _NOTHING
        require_size(made.theta, sizes)
        require_size(held, sizes if mu else ())
        tiles = _tiles_of(self, tuple(sizes))
        kernels.step(self.number, tiles, octets, made.before, held, eta, mu, made.theta)

    def _source(self, data: Buffer, sizes: Sequence[int], vector: Float32s) -> Bytes:
        octets = checked_bytes(self.name, data, plan_of(self, tuple(sizes)).bytes)
        require_size(vector, sizes)
        return octets


class _Float16(_Compiled, Float16):
    number = kernels.F16


class _Int8(_Compiled, Int8):
    number = kernels.INT8


class _Int4(_Compiled, Int4):
    number = kernels.INT4


class _Int2(_Compiled, Int2):
    number = kernels.INT2


PAIRS: tuple[tuple[Codec, _Compiled], ...] = (
    (Float16(), _Float16()),
    (Int8(), _Int8()),
    (Int4(), _Int4()),
    (Int2(), _Int2()),
)
"""The codecs of numpy, each with its compiled one."""


def take() -> None:
    """Put the compiled codecs, and the one of squared norms, in the place of numpy's."""
    for _, codec in PAIRS:
        replace(codec)
    take_squared_norms(kernels.squared_norms)


def give_back() -> None:
    """Undo ``take``."""
    for codec, _ in PAIRS:
        replace(codec)
    take_squared_norms(squared_norms)


def check() -> None:
    """Compare all kernels with numpy on a few blocks. Raises ``CodecsDiffer``."""
    rng = np.random.default_rng(0)
    sizes = (1, 7, 7, 1024, 2500)
    values = rng.standard_normal((2, sum(sizes)), dtype=np.float32)
    values[:, rng.integers(0, values.shape[1], 99)] = -0.0
    # Halves of a step: a multiply fused with the add that rounds would not see them as such.
    ties = [(np.arange(steps) + 0.5) / steps for steps in (127, 7)]
    halves = np.concatenate([[1.0], *ties]).astype(np.float32)
    for pair in PAIRS:
        both = np.stack([halves, np.zeros_like(halves)])
        compare(pair, both, (halves.size,), (0.3, 0.6), Nesterov(1.0, 0.0))
    for size in (1.0, 1e-42, 1e-20, 1e37):
        for pair in PAIRS:
            compare(pair, values * np.float32(size), sizes, (0.3, 0.6), Nesterov(0.7, 0.9))
        compare_sums(values * np.float32(size))


def compare_sums(rows: Float32Rows) -> None:
    """Raise ``CodecsDiffer`` unless the rows have the same squared norms as in numpy."""
    work, first, second = np.empty(WORK_VALUES), np.empty(len(rows)), np.empty(len(rows))
    squared_norms(rows, work, first)
    kernels.squared_norms(rows, work, second)
    if first.tobytes() != second.tobytes():
        raise CodecsDiffer("f32", f"the squared norms of rows of {rows.shape[1]} values")


def compare(
    pair: tuple[Codec, Codec],
    values: NDArray[np.float32],
    sizes: Sequence[int],
    weights: tuple[float, float],
    optimizer: Nesterov,
) -> None:
    """Raise ``CodecsDiffer`` unless both codecs do the same with two vectors, to the last bit."""
    first, second = values
    results = []
    for codec in pair:
        scratch = Scratch()
        encoded, other, merged = (bytearray(codec.encoded_size(sizes)) for _ in range(3))
        codec.encode(second, sizes, encoded, scratch, base=first)
        codec.encode(second, sizes, other, scratch)
        codec.encode_sum(codec, Addends([encoded, other], weights), sizes, merged, scratch)
        decoded, theta, momentum, plain, left, lost = (second.copy() for _ in range(6))
        both, into = Addends([encoded, other], weights), bytearray(len(merged))
        codec.encode_sum(codec, both, sizes, into, scratch, rest=lost)
        codec.decode(other, sizes, decoded, scratch)
        spread = np.linspace(*weights, len(sizes))
        codec.decode_add(encoded, sizes, spread, decoded, scratch)
        step_encoded(Step(theta, theta, momentum), codec, merged, sizes, optimizer, scratch)
        codec.decode_subtract(encoded, sizes, first, plain, scratch)
        again = bytearray(len(encoded))
        codec.encode(left, sizes, again, scratch, base=first, leaves_rest=True)
        vectors = (each.tobytes() for each in (decoded, theta, momentum, plain, left, lost))
        results.append((*map(bytes, (encoded, other, merged, again, into)), *vectors))
    names = (
        *("a difference", "values", "a sum", "a difference with its rest", "a sum with its rest"),
        *("decoding", "theta", "momentum", "subtraction", "the rest of a difference"),
        "the rest of a sum",
    )
    for name, expected, found in zip(names, *results, strict=True):
        if found != expected:
            raise CodecsDiffer(pair[0].name, name)


@lru_cache(maxsize=256)
def _tiles_of(codec: Codec, sizes: tuple[int, ...]) -> NDArray[np.int64]:
    """Return the tiles of these units as kernels take them, a row for each."""
    rows = []
    for tile in plan_of(codec, sizes).tiles:
        size = codec.code_bytes(tile.columns)
        steps = (tile.record, tile.record, 1) if tile.record else (4, size, 0)
        scale_step, code_step, unit_step = steps
        place = tile.unit, tile.start, tile.rows, tile.columns
        rows.append((*place, tile.scales_at, scale_step, tile.codes_at, code_step, size, unit_step))
    return np.array(rows, np.int64).reshape(len(rows), kernels.UNIT_STEP + 1)


def _refuse(unit: int) -> None:
    """Raise ``NotFinite`` for what ``kernels.encode`` returns, unless that is -1."""
    if unit >= 0:
        raise NotFinite(unit)
