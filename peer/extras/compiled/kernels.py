"""Passes over encoded payloads as machine code, which numba compiles when this module is imported.

Each kernel takes a block of up to 1024 values through all of its operations in the first cache,
where numpy makes a pass over a tile of 2 MB for each of them. All signatures are given, so nothing
is compiled later: a call with other types is an error. Machine code is kept in numba's cache, which
lies beside this file, or in the user's cache folder, or in ``NUMBA_CACHE_DIR``.

The codecs in ``averaging.numbers.codecs`` are the reference. A kernel gives the same bits,
operation by operation, on any processor: without ``fastmath`` LLVM neither fuses a multiply with an
add nor changes the order of operations, and ``error_model`` makes division follow IEEE 754. No
kernel starts a thread. Callers have checked all lengths: a kernel checks none.

Only ``codecs`` beside it imports this module, where numba is installed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

from averaging.numbers.arrays import SUM_TILE
from averaging.numbers.codec import FLOAT_MAX, PEAK_MIN
from averaging.numbers.codecs import SCALE_MAX, UNITS_LAST, Float16, Int4, Int8
from averaging.numbers.tiles import BLOCK

F16, INT8, INT4, INT2 = range(4)
"""Numbers by which kernels know the codecs."""

SET, ADD = range(2)
"""Actions of ``decode``: to set decoded values, or to add them."""

UNIT, START, ROWS, COLUMNS, SCALES_AT, SCALE_STEP, CODES_AT, CODE_STEP, CODE_BYTES, UNIT_STEP = (
    range(10)
)
"""Columns of a matrix of tiles (``averaging.numbers.tiles``). Steps are those from row to row."""

_F32, _I32, _U32, _U8, _U64, _F64 = (
    np.float32,
    np.int32,
    np.uint32,
    np.uint8,
    np.uint64,
    np.float64,
)
_MAGNITUDE = np.int32(0x7FFFFFFF)
_LARGEST_BITS = FLOAT_MAX.view(np.int32)
_SCALE_MAX_8, _SCALE_MAX_4 = (codec().scale_max for codec in (Int8, Int4))
_REBIAS, _UNBIAS, _LARGEST_HALF = Float16.REBIAS, Float16.UNBIAS, Float16.LARGEST
_K_BITS = np.uint32(127)
_UNITS_LAST_BITS = UNITS_LAST.view(np.int32)
_GATHER = np.uint64(0x8040201008040201)
"""Times eight bytes of 0 or 1 it has them in its highest byte, the first one the highest bit; and
times a byte it has its bits at the ends of eight bytes."""
_ONES = np.uint64(0x0101010101010101)

_tiles = types.Array(types.int64, 2, "C", readonly=True)
_given = types.Array(types.float32, 1, "C", readonly=True)
_rows = types.Array(types.float32, 2, "C", readonly=True)
_payload = types.Array(types.uint8, 1, "C", readonly=True)
_addresses = types.Array(types.uint64, 1, "C", readonly=True)
_two_codecs = types.UniTuple(types.int64, 2)
_vector, _bytes, _work = types.float32[::1], types.uint8[::1], types.float64[::1]

_part = njit(nogil=True, error_model="numpy")


def _kernel(*arguments: Any, returns: Any = types.int64) -> Any:
    return njit(returns(*arguments), nogil=True, error_model="numpy", cache=True)


@intrinsic
def _bytes_at(typing_context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.CPointer(types.uint8)(types.uint64), generate


# One block. ``work`` holds its values, ``bits`` is the same memory, ``codes`` is the part of a
# payload for its codes, and ``spare`` has room for two bytes per value.


@_part
def _put(scale, data):
    word = _F32(scale).view(np.uint32)
    for place in range(4):
        data[place] = _U8(word >> _U32(8 * place))


@_part
def _scale_of(data):
    word = _U32(0)
    for place in range(4):
        word = _U32(word | (_U32(data[place]) << _U32(8 * place)))
    return _U32(word).view(np.float32)


@_part
def _round(work, size, inverse):
    """Leave work * inverse, rounded to a whole number, in the lowest bits of ``work``."""
    for i in range(size):
        work[i] = work[i] * inverse + UNITS_LAST


@_part
def _write_int8(work, bits, size, peak, codes):
    _round(work, size, _F32(127) / peak)
    for i in range(size):
        codes[i] = _U8(bits[i])
    return min(peak / _F32(127), _SCALE_MAX_8)


@_part
def _write_int4(work, bits, size, peak, spare, codes):
    _round(work, size, _F32(7) / peak)
    low = spare[0]
    for i in range(size):
        low[i] = _U8(bits[i])
    half = codes.size
    high = low[half:size]
    for i in range(high.size):
        codes[i] = _U8((low[i] & _U8(15)) ^ _U8(8)) | _U8(high[i] << _U8(4))
    if high.size < half:
        codes[half - 1] = _U8(low[half - 1] + _U8(8))
    return min(peak / _F32(7), _SCALE_MAX_4)


@_part
def _write_int2(work, bits, size, peak, spare, codes):
    sizes, flags = spare[0], spare[1]
    eights, plane = flags.view(np.uint64), (size + 7) // 8
    for i in range(size, 8 * plane):
        work[i] = 0
    for i in range(8 * plane):
        flags[i] = _U8(_U32(bits[i]) >> _U32(31))
    for i in range(plane):
        codes[i] = _U8((eights[i] * _GATHER) >> _U64(56))
    inverse = _F32(127) / peak
    total = _I32(0)
    for i in range(8 * plane):
        code = _I32(_F32(work[i] * inverse + UNITS_LAST).view(np.int32) - _UNITS_LAST_BITS)
        magnitude = max(code, _I32(-code))
        sizes[i] = _U8(magnitude)
        total = _I32(total + magnitude)
    limit = _U8(min(3 * total // (2 * size), 127))
    count, above_total = _I32(0), _I32(0)
    for i in range(8 * plane):
        flags[i] = _U8(1) if sizes[i] > limit else _U8(0)
    for i in range(8 * plane):
        count = _I32(count + _I32(flags[i]))
        above_total = _I32(above_total + (_I32(sizes[i]) if flags[i] else _I32(0)))
    for i in range(plane):
        codes[plane + i] = _U8((eights[i] * _GATHER) >> _U64(56))
    low = _F64(total - above_total) / _F64(max(size - count, 1))
    high = _F64(above_total) / _F64(max(count, 1)) if count else (low if low != 0 else _F64(127))
    scale = min(_F32(_F64(peak) * (high / _F64(127 * 127))), SCALE_MAX)
    k = _U32(np.rint(_F64(127) * low / high))
    return _U32((_F32(scale).view(np.uint32) & ~_K_BITS) | k).view(np.float32)


@_part
def _write_f16(work, bits, size, peak, codes):
    # Powers of two: every product is exact, except for the last one where a half is subnormal.
    power = _U32(_F32(peak).view(np.uint32) & _U32(0x7F800000)).view(np.float32)
    scale = power * _F32(2.0**-14)
    inverse = _F32(1) / scale
    for i in range(size):
        work[i] = max(min(work[i], _LARGEST_HALF), -_LARGEST_HALF) * inverse * _REBIAS
    for i in range(size):
        word = _U32(bits[i])
        half = ((word + _U32(0x1000)) >> _U32(13)) | ((word >> _U32(16)) & _U32(0x8000))
        codes[2 * i] = _U8(half)
        codes[2 * i + 1] = _U8(half >> _U32(8))
    return scale


@_part
def _write(codec, work, bits, spare, size, scale_bytes, codes):
    """Encode a block. Return whether all values are finite; if not, nothing is written."""
    peak_bits = _I32(0)
    for i in range(size):
        peak_bits = max(peak_bits, _I32(bits[i] & _MAGNITUDE))
    if peak_bits > _LARGEST_BITS:
        return False
    peak = max(_I32(peak_bits).view(np.float32), PEAK_MIN)
    if codec == INT4:
        scale = _write_int4(work, bits, size, peak, spare, codes)
    elif codec == INT2:
        scale = _write_int2(work, bits, size, peak, spare, codes)
    elif codec == INT8:
        scale = _write_int8(work, bits, size, peak, codes)
    else:
        scale = _write_f16(work, bits, size, peak, codes)
    _put(scale, scale_bytes)
    return True


@_part
def _spread(plane, flags):
    """Set bytes to the bits of a plane: 1 or 0."""
    words = flags.view(np.uint64)
    for i in range(plane.size):
        words[i] = ((_U64(plane[i]) * _GATHER) >> _U64(7)) & _ONES


@_part
def _read_int2(codes, scale, factor, size, spare, out):
    k = _I32(_F32(scale).view(np.uint32) & _K_BITS)
    low, high = _F32(k) * factor, _F32(127) * factor
    less, least = _F32(_I32(-k)) * factor, _F32(-127) * factor  # a zero is never negative
    signs, bins, plane = spare[0], spare[1], (size + 7) // 8
    _spread(codes[:plane], signs)
    _spread(codes[plane:], bins)
    for i in range(size):
        small = less if signs[i] else low
        large = least if signs[i] else high
        out[i] = large if bins[i] else small


@_part
def _read(codec, codes, scale, factor, size, spare, out):
    """Set ``out`` to the decoded values, with ``factor`` in place of the scale."""
    if codec == INT4:
        high = out[codes.size : size]
        for i in range(codes.size):
            out[i] = _F32(_I32(_I32(codes[i] & _U8(15)) - _I32(8))) * factor
        for i in range(high.size):
            high[i] = _F32(_I32(_I32(np.int8(codes[i])) >> _I32(4))) * factor
    elif codec == INT2:
        _read_int2(codes, scale, factor, size, spare, out)
    elif codec == INT8:
        for i in range(size):
            out[i] = _F32(np.int8(codes[i])) * factor
    else:
        bits = out.view(np.int32)
        for i in range(size):
            half = _I32(np.int16(_I32(codes[2 * i]) | (_I32(codes[2 * i + 1]) << _I32(8))))
            bits[i] = (half << _I32(13)) & _I32(-0x70002000)
        for i in range(size):
            out[i] = out[i] * _UNBIAS * factor


# The kernels. All take the tiles of a range of units.


@_part
def _at(array, start, size):
    return array[start : start + size]


@_kernel(types.int64, _tiles, _given, _given, _bytes, _vector)
def encode(codec, tiles, base, values, out, rest):
    """Encode base - values, or ``values`` if ``base`` is empty.

    Unless it is empty, set ``rest``, which may be ``values``, to base less the decoded difference.
    Return -1, or the first unit that has a value which is not finite.
    """
    work = np.empty(BLOCK, np.float32)
    bits = work.view(np.int32)
    spare = np.empty((2, BLOCK), np.uint8)
    for tile in tiles:
        size = tile[COLUMNS]
        for row in range(tile[ROWS]):
            now = _at(values, tile[START] + row * size, size)
            if base.size:
                before = _at(base, tile[START] + row * size, size)
                for i in range(size):
                    work[i] = before[i] - now[i]
            else:
                for i in range(size):
                    work[i] = now[i]
            scale = _at(out, tile[SCALES_AT] + row * tile[SCALE_STEP], 4)
            codes = _at(out, tile[CODES_AT] + row * tile[CODE_STEP], tile[CODE_BYTES])
            if not _write(codec, work, bits, spare, size, scale, codes):
                return tile[UNIT] + row * tile[UNIT_STEP]
            if rest.size:
                factor = _scale_of(scale)
                _read(codec, codes, factor, factor, size, spare, work)
                before = _at(base, tile[START] + row * size, size)
                after = _at(rest, tile[START] + row * size, size)
                for i in range(size):
                    after[i] = before[i] - work[i]
    return -1


@_kernel(_two_codecs, _tiles, _tiles, _addresses, types.int64, _given, _bytes, _vector)
def merge(codecs, given, made, addresses, length, weights, out, rest):
    """Encode the weighted sum of payloads of ``length`` bytes each, which lie at ``addresses``.

    ``given`` and ``made`` are the tiles of the two ``codecs``, that of the payloads and that of
    ``out``. Unless it is empty, set ``rest`` to the sum less what is decoded. Returns what
    ``encode`` returns.
    """
    source, target = codecs
    work, more = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    bits = work.view(np.int32)
    spare = np.empty((2, BLOCK), np.uint8)
    for number in range(len(made)):
        tile, read = made[number], given[number]
        size = tile[COLUMNS]
        for row in range(tile[ROWS]):
            for member in range(len(addresses)):
                data = carray(_bytes_at(addresses[member]), (length,))
                scale = _scale_of(_at(data, read[SCALES_AT] + row * read[SCALE_STEP], 4))
                factor = scale * weights[member]
                codes = _at(data, read[CODES_AT] + row * read[CODE_STEP], read[CODE_BYTES])
                if member:
                    _read(source, codes, scale, factor, size, spare, more)
                    for i in range(size):
                        work[i] = work[i] + more[i]
                else:
                    _read(source, codes, scale, factor, size, spare, work)
                    for i in range(size):
                        work[i] = work[i] + _F32(0)  # a sum from zero has no negative zero
            scale = _at(out, tile[SCALES_AT] + row * tile[SCALE_STEP], 4)
            codes = _at(out, tile[CODES_AT] + row * tile[CODE_STEP], tile[CODE_BYTES])
            if rest.size:
                left = _at(rest, tile[START] + row * size, size)
                for i in range(size):
                    left[i] = work[i]
            if not _write(target, work, bits, spare, size, scale, codes):
                return tile[UNIT] + row * tile[UNIT_STEP]
            if rest.size:
                factor = _scale_of(scale)
                _read(target, codes, factor, factor, size, spare, more)
                for i in range(size):
                    left[i] = left[i] - more[i]
    return -1


@_kernel(types.int64, _tiles, _payload, _given, types.int64, _vector)
def decode(codec, tiles, data, weights, action, out):
    """Decode, times a weight for each unit, and set or add to ``out``, as ``action`` says."""
    work = np.empty(BLOCK, np.float32)
    spare = np.empty((2, BLOCK), np.uint8)
    for tile in tiles:
        size = tile[COLUMNS]
        for row in range(tile[ROWS]):
            scale = _scale_of(_at(data, tile[SCALES_AT] + row * tile[SCALE_STEP], 4))
            factor = scale * weights[tile[UNIT] + row * tile[UNIT_STEP]]
            codes = _at(data, tile[CODES_AT] + row * tile[CODE_STEP], tile[CODE_BYTES])
            result = _at(out, tile[START] + row * size, size)
            if action == ADD:
                _read(codec, codes, scale, factor, size, spare, work)
                for i in range(size):
                    result[i] = result[i] + work[i]
            else:
                _read(codec, codes, scale, factor, size, spare, result)
    return 0


@_kernel(types.int64, _tiles, _payload, _given, _vector, types.float32, types.float32, _vector)
def step(codec, tiles, data, theta, momentum, eta, mu, out):
    """Take the outer step (``averaging.numbers.outer``) with an encoded displacement."""
    work = np.empty(BLOCK, np.float32)
    spare = np.empty((2, BLOCK), np.uint8)
    for tile in tiles:
        size = tile[COLUMNS]
        for row in range(tile[ROWS]):
            scale = _scale_of(_at(data, tile[SCALES_AT] + row * tile[SCALE_STEP], 4))
            codes = _at(data, tile[CODES_AT] + row * tile[CODE_STEP], tile[CODE_BYTES])
            _read(codec, codes, scale, scale, size, spare, work)
            before = _at(theta, tile[START] + row * size, size)
            after = _at(out, tile[START] + row * size, size)
            if mu != 0:
                held = _at(momentum, tile[START] + row * size, size)
                for i in range(size):
                    held[i] = held[i] * mu + work[i]
                for i in range(size):
                    work[i] = held[i] * mu + work[i]
            for i in range(size):
                work[i] = before[i] - work[i] * eta
            for i in range(size):  # apart from the line above: theta and out may be the same
                after[i] = work[i]
    return 0


@_kernel(_rows, _work, _work)
def squared_norms(rows, work, totals):
    """Do what ``averaging.numbers.arrays.squared_norms`` does, in the same order."""
    for row in range(len(rows)):
        total = 0.0
        for start in range(0, rows.shape[1], SUM_TILE):
            tile = rows[row, start : start + SUM_TILE]
            count = (tile.size + 1) // 2
            upper = tile[count:]
            for i in range(upper.size):
                work[i] = _F64(tile[i]) * _F64(tile[i]) + _F64(upper[i]) * _F64(upper[i])
            if upper.size < count:
                work[count - 1] = _F64(tile[count - 1]) * _F64(tile[count - 1])
            while count > 1:
                half = (count + 1) // 2
                more = work[half:count]
                for i in range(more.size):
                    work[i] = work[i] + more[i]
                count = half
            total += work[0]
        totals[row] = total
    return 0
