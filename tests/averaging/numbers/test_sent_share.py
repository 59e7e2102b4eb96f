"""The share of a contribution that its encoding carries."""

from __future__ import annotations

import numpy as np
import pytest

from averaging.numbers.arithmetic import MergeNumbers, Moved
from averaging.numbers.arrays import Float32s
from averaging.numbers.chunks import Cutting
from averaging.numbers.codec import Scratch
from averaging.numbers.layout import Fragment, Layout, TensorSpec
from averaging.numbers.sent_share import SentShare

SMALL, LARGE = (
    Layout.build([TensorSpec("block.weight", shape), TensorSpec("block.bias", (50,))], 1).fragments[
        0
    ]
    for shape in ((70, 50), (3000, 1024))
)


def encoded(
    codec: str, base: Float32s, values: Float32s, fragment: Fragment = SMALL, *, share: float = 1.0
) -> tuple[float | None, Float32s]:
    """Encode what was moved, with feedback. Returns the measured share, and what was sent."""
    numbers = MergeNumbers(codec=codec, merge="mean", eta=1.0, mu=0.0)
    given = Moved(base, values, share=share, feedback=True)
    measured = SentShare(given, lossless=codec == "f32")
    for chunk in Cutting(fragment, numbers, (1,)).all_chunks:
        data = memoryview(bytearray(numbers.up.encoded_size(chunk.sizes)))
        numbers.encode(chunk, given, data, Scratch())
    return measured.after_encoding(), base - values


def draw(seed: int, fragment: Fragment = SMALL) -> Float32s:
    return np.random.default_rng(seed).standard_normal(fragment.size, np.float32)


def exact(offered: Float32s, sent: Float32s) -> float:
    left = float(np.linalg.norm((offered - sent).astype(np.float64)))
    return 1 - (left / float(np.linalg.norm(offered.astype(np.float64)))) ** 2


@pytest.mark.parametrize(
    ("codec", "least", "most"),
    [("int2", 0.7, 0.95), ("int4", 0.95, 0.999), ("int8", 0.999, 1 - 1e-9)],
)
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_fewer_bits_carry_less_of_a_contribution(
    codec: str, least: float, most: float, share: float
) -> None:
    base, values = draw(0), draw(1)
    offered = base - values
    found, sent = encoded(codec, base, values, share=share)
    assert found is not None and least < found < most
    assert found == pytest.approx(exact(offered, sent), abs=1e-6)


def test_f32_carries_exactly_all_whatever_the_parameters_round() -> None:
    base, values = 100 * draw(0), draw(1)
    before = values.copy()
    assert encoded("f32", base, values)[0] == 1.0
    assert np.any(before != values), "feedback rounds, which is no loss of the codec"


def test_of_a_large_fragment_a_sample_tells_the_share() -> None:
    base, moved = np.zeros(LARGE.size, np.float32), draw(2, LARGE)
    half = LARGE.size // 2
    moved[:half] *= np.abs(moved[:half])  # of values far apart in size less is carried
    found, sent = encoded("int2", base, -moved, LARGE)
    assert found == pytest.approx(exact(moved, sent), abs=0.03)
    assert exact(moved[half:], sent[half:]) > exact(moved, sent) + 0.06


def test_over_rounds_all_that_was_offered_is_sent() -> None:
    """Each round offers its own steps and the rest of the round before, and leaves a rest."""
    zeros, work, sent = (np.zeros(SMALL.size, np.float32) for _ in range(3))
    rest, shares, totals = zeros, [], []
    for number in range(40):
        steps = np.float32(0.01) * (draw(100 + number) + np.float32(1))
        offered = rest + steps
        found, now = encoded("int2", zeros, -offered)
        assert found is not None
        shares.append(found)
        work, sent, rest = work + steps, sent + now, offered - now
        totals.append(exact(work, sent))
    assert max(shares) < 0.98, "no round sends all of it"
    assert totals[0] < 0.9 and totals[-1] > 0.999


def test_nothing_is_told_where_the_rest_is_dropped_or_nothing_was_offered() -> None:
    numbers = MergeNumbers(codec="int2", merge="mean", eta=1.0, mu=0.0)
    (chunk,) = Cutting(SMALL, numbers, (1,)).all_chunks
    data = memoryview(bytearray(numbers.up.encoded_size(chunk.sizes)))
    given = Moved(draw(0), draw(1))
    measured = SentShare(given, lossless=False)
    numbers.encode(chunk, given, data, Scratch())
    assert measured.after_encoding() is None
    zeros = np.zeros(SMALL.size, np.float32)
    assert encoded("int2", zeros, zeros.copy())[0] is None
