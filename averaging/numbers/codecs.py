"""The table of codecs, and f32: run files and commits name a codec, this module finds it.

To add one, derive a class from ``averaging.numbers.block_codecs.BlockCodec`` (or
``WholeNumberCodec``) and add an instance to the table below, or call ``register`` from a plugin.
``tests/averaging/numbers/test_new_codec.py`` does it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from averaging.errors import BadPayload, NotFinite
from averaging.numbers.arrays import Buffer, Float32s, Float64s, arithmetic
from averaging.numbers.block_codecs import Float16, Int2, Int4, Int8
from averaging.numbers.codec import (
    TILE,
    Addends,
    Codec,
    Scratch,
    TileReader,
    as_bytes,
    checked_bytes,
)


class Float32(Codec):
    """Raw little-endian fp32, without scales and without error."""

    name = "f32"
    peak_of_scale = 1.0

    def encoded_size(self, sizes: Sequence[int]) -> int:
        return 4 * sum(sizes)

    def error_bound(self, peak: float) -> float:
        return 0.0

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
        target = self._target(out, sizes, values.size)
        with arithmetic():
            for part in _parts(values.size):
                if base is None:
                    np.copyto(target[part], values[part])
                else:
                    np.subtract(base[part], values[part], out=target[part])
                self._refuse_not_finite(target[part], part.start, sizes)
        if base is not None and leaves_rest:
            self.decode_subtract(out, sizes, base, values, scratch)

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
        target = self._target(out, sizes, sum(sizes))
        target.fill(0)
        for payload, weight in zip(given.payloads, given.weights, strict=True):
            source.decode_add(payload, sizes, weight, target, scratch)
        for part in _parts(target.size):
            self._refuse_not_finite(target[part], part.start, sizes)
        if rest is not None:
            rest.fill(0)

    def tile_reader(
        self, data: Buffer, sizes: Sequence[int], weight: float, scratch: Scratch
    ) -> TileReader:
        values = self._source(data, sizes, sum(sizes))
        rounded = np.float32(weight)

        def read(_: int, part: slice, into: Float32s) -> None:
            np.multiply(values[part], rounded, out=into)

        return read

    def check(self, data: Buffer, sizes: Sequence[int], scratch: Scratch) -> None:
        octets = checked_bytes(self.name, data, self.encoded_size(sizes))
        try:
            for part in _parts(octets.size // 4):
                self._refuse_not_finite(octets.view("<f4")[part], part.start, sizes)
        except NotFinite as error:
            raise BadPayload(self.name, f"unit {error.unit} is not finite") from None

    def decode(self, data: Buffer, sizes: Sequence[int], out: Float32s, scratch: Scratch) -> None:
        source = self._source(data, sizes, out.size)
        np.copyto(out, source)

    def pieces(
        self, data: Buffer, sizes: Sequence[int], weight: float | Float64s, scratch: Scratch
    ) -> Iterator[tuple[slice, Float32s]]:
        source = self._source(data, sizes, sum(sizes))
        rounded = np.asarray(weight, np.float32)
        spread = np.repeat(rounded, sizes) if rounded.ndim else None
        for part in _parts(source.size):
            values = scratch.first[: part.stop - part.start]
            np.multiply(source[part], rounded if spread is None else spread[part], out=values)
            yield part, values

    def _target(self, out: Buffer, sizes: Sequence[int], count: int) -> Float32s:
        target = as_bytes(out)
        if target.size != self.encoded_size(sizes) or count != sum(sizes):
            raise ValueError(
                f"{count} values into {target.size} bytes; the units hold {sum(sizes)} values"
            )
        return target.view("<f4")

    def _source(self, data: Buffer, sizes: Sequence[int], count: int) -> Float32s:
        octets = checked_bytes(self.name, data, self.encoded_size(sizes))
        if count != sum(sizes):
            raise ValueError(f"a vector of {count} values for units of {sum(sizes)}")
        return octets.view("<f4")

    def _refuse_not_finite(self, values: Float32s, start: int, sizes: Sequence[int]) -> None:
        """Raise ``NotFinite`` unless all values are finite. They begin at value ``start``."""
        finite = np.isfinite(values)
        if not finite.all():
            at = start + int(np.argmin(finite))
            raise NotFinite(int(np.searchsorted(np.cumsum(sizes), at, side="right")))


def _parts(size: int) -> Iterator[slice]:
    return (slice(start, min(start + TILE, size)) for start in range(0, size, TILE))


_codecs: dict[str, Codec] = {
    codec.name: codec for codec in (Float32(), Float16(), Int8(), Int4(), Int2())
}


def register(codec: Codec) -> None:
    """Add a codec to the table. Raises ``ValueError`` if it is incomplete, or its name is taken."""
    needed = {*Codec.__annotations__, *Codec.__abstractmethods__}
    if lacks := sorted(each for each in needed if not hasattr(codec, each)):
        raise ValueError(
            f"the codec {type(codec).__name__} lacks {', '.join(lacks)}: see the class Codec in "
            "averaging/numbers/codec.py"
        )
    if codec.name in _codecs:
        raise ValueError(f"a codec is named {codec.name!r} already")
    _codecs[codec.name] = codec


def replace(codec: Codec) -> None:
    """Put a codec into the table in place of the one of its name, which gives the same bits."""
    assert codec.name in _codecs
    _codecs[codec.name] = codec


def codec_named(name: str) -> Codec:
    """Return the codec of this name. Raises ``ValueError`` if there is none."""
    try:
        return _codecs[name]
    except KeyError:
        raise ValueError(
            f"no codec is named {name!r}; there are {', '.join(codec_names())}"
        ) from None


def codec_names() -> tuple[str, ...]:
    """Return the names of all codecs, the most exact one first."""
    return tuple(_codecs)
