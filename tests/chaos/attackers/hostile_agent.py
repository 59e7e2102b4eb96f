"""The agent of a hostile learner: an honest agent except for its uploads.

Each upload to another peer is spoilt in one of several ways, in turn: not a number, infinite, a
thousandfold norm, too short, too long, flipped signs. The kind and the round of each are appended
to a file, so that the judge can look for them in the merged rounds.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from averaging.live.slices.uploading import Uploading
from averaging.live.streams.bulk import Bulk
from averaging.numbers.codec import Scratch
from averaging.numbers.codecs import codec_named
from peer.agent import agent

KINDS = ("nan", "norm", "inf", "flip", "short", "long")
NORM_FACTOR = 1000.0


def spoilt(kind: str, data: bytes, *, codec: str, sizes: Sequence[int]) -> bytes:
    """Spoil an encoded slice; ``sizes`` are the numbers of values in its units."""
    if kind == "nan":
        return np.float32(np.nan).tobytes() + data[4:]  # the first block's scale
    if kind == "inf":
        return np.float32(np.inf).tobytes() + data[4:]
    if kind == "short":
        return data[: len(data) // 2]
    if kind == "long":
        return data + b"and more"
    factor = {"norm": NORM_FACTOR, "flip": -1.0}[kind]
    scratch, coder = Scratch(), codec_named(codec)
    values = np.empty(sum(sizes), np.float32)
    coder.decode(data, sizes, values, scratch)
    out = bytearray(len(data))
    coder.encode(values * np.float32(factor), sizes, out, scratch)
    return bytes(out)


class KindOfUpload:
    """Chooses how each upload is spoilt: the kinds in turn, but always the same for one upload.

    A refused upload may be sent again. Spoilt in another way, such as with flipped signs, it would
    be accepted, and the judge could not tell which of the two was merged.
    """

    def __init__(self) -> None:
        self._kinds = itertools.cycle(KINDS)
        self._given: dict[tuple[bytes, int], str] = {}

    def of(self, round_id: bytes, index: int) -> str:
        if (round_id, index) not in self._given:
            self._given[round_id, index] = next(self._kinds)
        return self._given[round_id, index]


def be_hostile(log: Path) -> None:
    """Spoil every upload of this process from now on."""
    kinds = KindOfUpload()
    honest_part = Uploading.send_part

    async def send_part(self: Uploading, bulk: Bulk, index: int) -> None:
        parts = self.parts
        own = parts.own
        if own is None:
            await honest_part(self, bulk, index)
            return
        growing = own[index]
        while growing.filled < len(growing.data):
            await growing.beyond(growing.filled)
        piece = parts.cutting.slices[index]
        sizes = parts.cutting.fragment.unit_sizes[piece.first_unit : piece.end_unit]
        if not sizes:
            await honest_part(self, bulk, index)
            return
        kind = kinds.of(parts.round, index)
        data = spoilt(kind, bytes(growing.data), codec=parts.commit.codec, sizes=sizes)
        with log.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"round": parts.round.hex(), "kind": kind}) + "\n")
        await bulk.send(data)
        if kind == "short":
            bulk.abort()

    Uploading.send_part = send_part


if __name__ == "__main__":
    be_hostile(Path(sys.argv[1]))
    raise SystemExit(agent.main(sys.argv[2:]))
