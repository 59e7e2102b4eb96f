"""The recipe for adding a codec, followed: a class, an entry in the table, the tests of codecs.

``python -m tests.averaging.numbers.test_new_codec`` adds the codec to the table of its own process
and runs the general tests of codecs on it. The golden tests are left out: a codec that stays in the
table also gets a file ``tests/golden/codec_NAME.bin`` and its bits in ``GOLDEN_BITS``.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from averaging.numbers.arrays import Bytes, Float32s
from averaging.numbers.codec import PEAK_MIN, Scratch
from averaging.numbers.codecs import WholeNumberCodec, codec_names, register

HERE = Path(__file__).parent
TESTS = (HERE / "test_codec.py", HERE / "test_arithmetic.py")


class Int16(WholeNumberCodec):
    """Two bytes per value."""

    name = "int16"
    steps = 32767

    def code_bytes(self, columns: int) -> int:
        return 2 * columns

    def error_bound(self, peak: float) -> float:
        # Half a step. The rounding of scale, quotient and product is 1/128 of a step this small.
        return max(peak, float(PEAK_MIN)) / (2 * self.steps) * (1 + 2.0**-6)

    def pack(self, tile: Float32s, peaks: Float32s, codes: Bytes, scratch: Scratch) -> None:
        codes.view("<i2")[:] = self.codes(tile, peaks, scratch)

    def unpack(self, codes: Bytes, factors: Float32s, out: Float32s, scratch: Scratch) -> None:
        np.multiply(codes.view("<i2"), factors[:, None], out=out)


@pytest.mark.slow  # it runs those tests again
def test_a_new_codec_passes_the_tests_of_codecs() -> None:
    assert "int16" not in codec_names()
    command = [sys.executable, "-m", __name__]
    ran = subprocess.run(
        command, cwd=HERE.parents[2], capture_output=True, text=True, timeout=250, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    passed = re.search(r"(\d+) passed", ran.stdout)
    assert passed is not None and int(passed[1]) > 50, ran.stdout


if __name__ == "__main__":
    register(Int16())
    options = ["-q", "-p", "no:cacheprovider", "-k", "int16 and not (golden or pass_the_check)"]
    sys.exit(pytest.main([*options, *map(str, TESTS)]))
