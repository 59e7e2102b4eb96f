"""Compiled kernels for int4 against the codec's numpy: processor time, and equality of bits.

Each kernel goes through a block of 1024 values in the first cache, where numpy makes a pass over a
tile of 2 MB for each operation. They are an experiment: nothing but this module uses them, and
numba is not among the project's packages (``pip install numba``, 0.68 was used).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numba
import numpy as np

from averaging.numbers.arrays import Bytes, Float32s
from averaging.numbers.block_codecs import PEAK_MIN, Int4
from averaging.numbers.codec import BLOCK, Scratch
from averaging.numbers.codecs import codec_named
from averaging.numbers.layout import UNIT_MAX_VALUES
from averaging.numbers.merge import Units, merge_encoded, rule_named
from averaging.numbers.outer import Nesterov, step_encoded

UNITS, TURNS = 16, 9
HALF = BLOCK // 2
MAGNITUDE, ROUNDER = np.int32(0x7FFFFFFF), np.float32(3 << 22)
SCALE_MAX = Int4()._scale_max
compiled = numba.njit(nogil=True, cache=True)


@compiled
def quantise(work, codes, peak):  # type: ignore[no-untyped-def]
    """Encode a block in ``work``, whose largest magnitude has the bits ``peak``; its scale."""
    bits = work.view(np.int32)
    bound = np.empty(1, np.int32)
    bound[0] = peak
    peak_value = max(bound.view(np.float32)[0], PEAK_MIN)
    inverse = np.float32(7) / peak_value
    for i in range(BLOCK):
        work[i] = work[i] * inverse + ROUNDER
    for i in range(HALF):
        low = np.uint8((bits[i] & np.int32(15)) ^ np.int32(8))
        codes[i] = low | np.uint8((bits[i + HALF] & np.int32(15)) << np.int32(4))
    return min(peak_value / np.float32(7), SCALE_MAX)


@compiled
def peak_of(work):  # type: ignore[no-untyped-def]
    bits, peak = work.view(np.int32), np.int32(0)
    for i in range(BLOCK):
        peak = max(peak, bits[i] & MAGNITUDE)
    return peak


@compiled
def read(codes, factor, out):  # type: ignore[no-untyped-def]
    for i in range(HALF):
        out[i] = np.float32(np.int32(codes[i] & np.uint8(15)) - np.int32(8)) * factor
        out[i + HALF] = np.float32(np.int32(np.int8(codes[i])) >> np.int32(4)) * factor


@compiled
def encode_difference(base, values, scales, codes):  # type: ignore[no-untyped-def]
    work = np.empty(BLOCK, np.float32)
    for block in range(scales.size):
        one, other = base[block * BLOCK :], values[block * BLOCK :]
        for i in range(BLOCK):
            work[i] = one[i] - other[i]
        scales[block] = quantise(work, codes[block * HALF : (block + 1) * HALF], peak_of(work))


@compiled
def encode_sum(payloads, payload_scales, weights, scales, codes):  # type: ignore[no-untyped-def]
    total, more = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    for block in range(scales.size):
        for number in range(weights.size):
            factor = payload_scales[number, block] * weights[number]
            read(payloads[number, block * HALF : (block + 1) * HALF], factor, more)
            for i in range(BLOCK):
                total[i] = more[i] if number == 0 else total[i] + more[i]
        scales[block] = quantise(total, codes[block * HALF : (block + 1) * HALF], peak_of(total))


@compiled
def step(theta, momentum, scales, codes, mu, out):  # type: ignore[no-untyped-def]
    moved = np.empty(BLOCK, np.float32)
    for block in range(scales.size):
        old, new = theta[block * BLOCK :], out[block * BLOCK :]
        read(codes[block * HALF : (block + 1) * HALF], scales[block], moved)
        if mu != np.float32(0):
            held = momentum[block * BLOCK :]
            for i in range(BLOCK):
                held[i] = held[i] * mu + moved[i]
            for i in range(BLOCK):
                moved[i] = held[i] * mu + moved[i]
        for i in range(BLOCK):
            new[i] = old[i] - moved[i]


def units(data: Bytes) -> Iterator[tuple[slice, Float32s, Bytes]]:
    """The values, the scales and the codes of each unit."""
    blocks = UNIT_MAX_VALUES // BLOCK
    for number, unit in enumerate(data.reshape(UNITS, -1)):
        start = number * UNIT_MAX_VALUES
        yield (
            slice(start, start + UNIT_MAX_VALUES),
            unit[: 4 * blocks].view("<f4"),
            unit[4 * blocks :],
        )


def main() -> None:
    sizes, rng = (UNIT_MAX_VALUES,) * UNITS, np.random.default_rng(0)
    count, int4, scratch = sum(sizes), codec_named("int4"), Scratch()
    base = rng.standard_normal(count, dtype=np.float32)
    values = base + np.float32(0.01) * rng.standard_normal(count, dtype=np.float32)
    weights = np.array([0.5, 0.5], np.float32)
    room = {way: np.zeros((2, int4.encoded_size(sizes)), np.uint8) for way in ("numpy", "numba")}
    stepped = {way: np.ones((2, count), np.float32) for way in room}

    def encode(way: str) -> None:
        sent = room[way][0]
        if way == "numpy":
            int4.encode_difference(base, values, sizes, sent.data, scratch)
            return
        for at, scales, codes in units(sent):
            encode_difference(base[at], values[at], scales, codes)

    def merge(way: str) -> None:
        sent, merged = room[way]
        if way == "numpy":
            mean, kinds = rule_named("mean"), ["matrix"] * UNITS
            both = [sent.data, sent.data]
            merge_encoded(mean, int4, both, [0.5, 0.5], Units(sizes, kinds), merged.data, scratch)  # type: ignore[arg-type]
            return
        for (_, given, payload), (_, scales, codes) in zip(units(sent), units(merged), strict=True):
            encode_sum(np.stack([payload] * 2), np.stack([given] * 2), weights, scales, codes)

    def outer_step(way: str, mu: float) -> None:
        (out, momentum), merged = stepped[way], room[way][1]
        if way == "numpy":
            optimizer = Nesterov(1.0, mu)
            step_encoded(
                base, momentum, int4, merged.data, sizes, optimizer, scratch=scratch, into=out
            )
            return
        for at, scales, codes in units(merged):
            step(base[at], momentum[at], scales, codes, np.float32(mu), out[at])

    works: dict[str, Callable[[str], None]] = {
        "encode": encode,
        "merge of two": merge,
        "step, mu 0": lambda way: outer_step(way, 0.0),
        "step, mu 0.5": lambda way: outer_step(way, 0.5),
    }
    for what, work in works.items():
        best = dict.fromkeys(room, float("inf"))
        for way in list(room) * TURNS:
            began = time.thread_time()
            work(way)
            best[way] = min(best[way], time.thread_time() - began)
        equal = all(np.array_equal(each["numpy"], each["numba"]) for each in (room, stepped))
        shown = ", ".join(f"{way} {best[way] / count * 30e9:.1f}" for way in best)
        print(f"{what}: {shown} ms for 30 M values; bits {'equal' if equal else 'DIFFER'}")


if __name__ == "__main__":
    main()
