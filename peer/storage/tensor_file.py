"""Files of tensors in the safetensors format, written without a second copy in memory.

They are read with the library.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

_PIECE_BYTES = 4 << 20

_WORDS = {"float": "F", "bfloat": "BF", "int": "I", "uint": "U"}


def type_name(dtype: Any) -> str | None:
    """The name of a type of numpy or torch in the format: ``F32`` for ``float32``. ``None``: it is
    not used here."""
    word = str(dtype).removeprefix("torch.")
    kind = word.rstrip("0123456789")
    if word == "bool":
        return "BOOL"
    return f"{_WORDS[kind]}{word.removeprefix(kind)}" if kind in _WORDS else None


def item_bytes(name: str) -> int:
    """The size of an item of a type, by its name in the format."""
    return 1 if name == "BOOL" else int(name.lstrip("BFIU")) // 8


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor to be written: its type, its shape, and its bytes in any number of pieces."""

    dtype: str
    shape: tuple[int, ...]
    pieces: Iterable[memoryview | NDArray[np.generic]]

    @classmethod
    def of(cls, array: NDArray[np.generic]) -> Tensor:
        name = type_name(array.dtype)
        assert name is not None, "a type that no file here has"
        little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
        return cls(name, array.shape, (little,))

    @classmethod
    def once(cls, array: NDArray[np.generic]) -> Tensor:
        """A tensor that can be written once, and lets go of its array then."""
        whole = cls.of(array)
        return cls(whole.dtype, whole.shape, _taken_from(list(whole.pieces)))

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * item_bytes(self.dtype)


def _taken_from(
    pieces: list[memoryview | NDArray[np.generic]],
) -> Iterator[memoryview | NDArray[np.generic]]:
    while pieces:
        yield pieces.pop()


def write_safetensors(
    file: BinaryIO, tensors: Mapping[str, Tensor], *, metadata: Mapping[str, str] | None = None
) -> tuple[str, int]:
    """Stream tensors in the safetensors format; returns the digest and size of the file.

    The format has 8 bytes with the header's length, the header in JSON, then the tensors:
    https://huggingface.co/docs/safetensors. The library needs every tensor as one bytes object,
    which would be a second copy of the whole model.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    # Larger items first, as the library does: then every tensor is aligned to its item size.
    order = sorted(tensors, key=lambda name: (-item_bytes(tensors[name].dtype), name))
    for name in order:
        tensor = tensors[name]
        end = offset + tensor.size_bytes
        header[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    hasher = blake3()
    size = 0
    for piece in _all_pieces(encoded, [tensors[name] for name in order]):
        hasher.update(piece)
        file.write(piece)
        size += len(piece)
    return hasher.hexdigest(), size


def _all_pieces(header: bytes, tensors: Iterable[Tensor]) -> Iterator[bytes | memoryview]:
    yield struct.pack("<Q", len(header)) + header
    for tensor in tensors:
        written = 0
        for piece in tensor.pieces:
            flat = np.asarray(piece).reshape(-1).view(np.uint8)
            written += flat.size
            for start in range(0, flat.size, _PIECE_BYTES):
                yield flat[start : start + _PIECE_BYTES].data
        assert written == tensor.size_bytes, "a tensor's pieces do not add up to its shape"


def digest_of(file: BinaryIO) -> str:
    hasher = blake3()
    while piece := file.read(_PIECE_BYTES):
        hasher.update(piece)
    return hasher.hexdigest()
