"""An estimate of a merge passes what is right, and nothing that differs by more than it says."""

from __future__ import annotations

import numpy as np
import pytest

from averaging.numbers.arrays import Float32s
from averaging.numbers.codec import TILE, Addends, Codec, Scratch
from averaging.numbers.codecs import codec_named
from averaging.numbers.layout import Kind
from averaging.numbers.merge import Contributions, Units, merge_encoded, rule_named
from averaging.numbers.merge_estimate import (
    DIFFERENCE_MAX,
    MEMORY_MAX,
    UNIT_MIN,
    can_estimate,
    factors_of,
    is_like,
)

RULE = rule_named("centered_clip")
SCRATCH = Scratch()
CODECS = [("int4", "int4"), ("int2", "int4"), ("int8", "int8"), ("f32", "f32"), ("f16", "int8")]


class Round:
    """Contributions of some members to a few units, one of them the reverse and far longer."""

    def __init__(self, count: int, sizes: tuple[int, ...], *, up: str = "int4", down: str = "int4"):
        self.up, self.down, self.sizes = codec_named(up), codec_named(down), sizes
        rng = np.random.default_rng([count, *sizes])
        common = rng.standard_normal(sum(sizes), dtype=np.float32)
        self.values = [
            1e-3 * (common + rng.standard_normal(common.size, dtype=np.float32))
            for _ in range(count)
        ]
        self.values[-1] = np.float32(-8) * self.values[-1]
        self.payloads = [self.encode(self.up, each) for each in self.values]
        self.weights = rng.dirichlet(np.ones(count)).tolist()

    def encode(self, codec: Codec, values: Float32s) -> bytearray:
        out = bytearray(codec.encoded_size(self.sizes))
        codec.encode(values.astype(np.float32), self.sizes, out, SCRATCH)
        return out

    def merged(self, rule: str = "centered_clip") -> bytearray:
        out = bytearray(self.down.encoded_size(self.sizes))
        kind: Kind = "matrix"
        given, units = self.addends(), Units(self.sizes, (kind,) * len(self.sizes))
        merge_encoded(rule_named(rule), self.up, given, units, out, SCRATCH, into=self.down)
        return out

    def is_like(self, merged: bytearray) -> bool:
        return is_like(self.up, self.addends(), self.sizes, merged, SCRATCH, into=self.down)

    def addends(self) -> Addends:
        return Addends(self.payloads, self.weights)

    def moved(self, by: float) -> bytearray:
        """The right merge, and a direction of its own in the second unit."""
        values = np.empty(sum(self.sizes), np.float32)
        self.down.decode(self.merged(), self.sizes, values, SCRATCH)
        second = values[self.sizes[0] : sum(self.sizes[:2])]
        other = np.random.default_rng(1).standard_normal(second.size)
        second += by * np.linalg.norm(second) / np.linalg.norm(other) * other
        return self.encode(self.down, values)


@pytest.mark.parametrize(("up", "down"), CODECS)
@pytest.mark.parametrize("count", [1, 2, 3, 10])
def test_a_right_merge_is_like_its_estimate(up: str, down: str, count: int) -> None:
    made = Round(count, (5000, 777, 1, 4096), up=up, down=down)
    assert made.is_like(made.merged())


def test_a_unit_of_several_tiles_is_estimated_as_one() -> None:
    made = Round(3, (TILE + 3000, 50))
    assert made.is_like(made.merged())
    assert not made.is_like(made.merged("mean"))


@pytest.mark.parametrize(("up", "down"), CODECS)
@pytest.mark.parametrize("rule", ["mean", "clip"])
def test_a_merge_of_another_rule_is_unlike_the_estimate(up: str, down: str, rule: str) -> None:
    made = Round(5, (5000, 777), up=up, down=down)
    assert not made.is_like(made.merged(rule))


def test_a_lie_in_one_unit_counts_by_its_share_of_that_unit() -> None:
    made = Round(5, (200_000, 777, 20), down="f32")
    assert made.is_like(made.moved(0.5 * DIFFERENCE_MAX))
    assert not made.is_like(made.moved(1.5 * DIFFERENCE_MAX))


def test_a_merge_that_is_not_finite_is_like_no_estimate() -> None:
    made = Round(3, (5000,), up="f32", down="f32")
    right = made.merged()
    merged = np.frombuffer(right, np.float32).copy()
    merged[7] = np.nan
    assert not made.is_like(bytearray(merged.tobytes()))
    made.values[0][3] = np.inf
    made.payloads[0] = bytearray(made.values[0].astype(np.float32).tobytes())
    assert not made.is_like(right)


def test_units_that_nobody_moved_are_like_nothing_but_themselves() -> None:
    made = Round(3, (5000, 300))
    for values in made.values:
        values.fill(0.0)
    made.payloads = [made.encode(made.up, each) for each in made.values]
    assert made.is_like(made.merged())
    lie = np.zeros(5300, np.float32)
    lie[5] = 1e-9
    assert not made.is_like(made.encode(made.down, lie))


def test_the_factors_are_those_of_the_rule() -> None:
    made = Round(6, (3000,), up="f32", down="f32")
    unit = Contributions(
        "matrix",
        (3000,),
        tuple(made.weights),
        made.up,
        tuple(memoryview(each) for each in made.payloads),
        SCRATCH,
    )
    right = np.empty(3000, np.float32)
    RULE.merge(unit, right)
    rows = np.stack(made.values).astype(np.float64)
    factors = factors_of(rows @ rows.T, np.array(made.weights))
    np.testing.assert_allclose(factors @ rows, right, rtol=1e-4, atol=1e-9)


def test_only_where_it_saves_time_and_fits_into_memory() -> None:
    assert can_estimate(RULE, 16, (UNIT_MIN,))
    assert not can_estimate(RULE, MEMORY_MAX // TILE + 1, (UNIT_MIN,))
    assert not can_estimate(RULE, 3, (2 * UNIT_MIN, *(64 for _ in range(9))))
    assert not can_estimate(rule_named("mean"), 3, (UNIT_MIN,))
    assert not can_estimate(rule_named("clip"), 3, (UNIT_MIN,))
