"""The table of codecs: run files and commits name a codec, this module finds it.

To add one, derive a class from ``averaging.numbers.block_codecs.BlockCodec`` (or
``WholeNumberCodec``) and add an instance to the table below, or call ``register`` from a plugin.
``tests/averaging/numbers/test_new_codec.py`` does it.
"""

from __future__ import annotations

from averaging.numbers.block_codecs import Float16, Int4, Int8
from averaging.numbers.codec import Codec
from averaging.numbers.float32_codec import Float32
from averaging.numbers.two_level_codec import Int2

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
