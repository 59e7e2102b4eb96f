"""A codec of your own in a simulated swarm: five values in a byte.

    cd examples
    shoal simulate --set outer.codec_up=int4,own_codec:Ternary --set outer.feedback=on

A codec of whole numbers divides each block of 1024 values by a scale, rounds to whole numbers from
-steps to steps, and packs them. Decoding must have the same bits on every machine.

For simulations only, as own_merge_rule.py explains.
"""

import numpy as np

from peer.simulate import Bytes, Float32s, Scratch, WholeNumberCodec

POWERS = 3 ** np.arange(5)


class Ternary(WholeNumberCodec):
    """1.6 bits for a value: -1, 0 or 1 times the largest absolute value of its block."""

    steps = 1

    def code_bytes(self, columns: int) -> int:
        return -(-columns // 5)

    def pack(self, tile: Float32s, peaks: Float32s, codes: Bytes, scratch: Scratch) -> None:
        digits = np.ones((len(tile), 5 * codes.shape[1]), np.int64)
        digits[:, : tile.shape[1]] += self.codes(tile, peaks, scratch)
        codes[:] = digits.reshape(len(tile), -1, 5) @ POWERS

    def unpack(self, codes: Bytes, factors: Float32s, out: Float32s, scratch: Scratch) -> None:
        digits = codes[:, :, None] // POWERS % 3
        out[:] = digits.reshape(len(codes), -1)[:, : out.shape[1]] - 1
        np.multiply(out, factors[:, None], out=out)
