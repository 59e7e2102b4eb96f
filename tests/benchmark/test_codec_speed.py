from __future__ import annotations

import pytest

from averaging.numbers.codecs import codec_names
from averaging.numbers.layout import UNIT_MAX_VALUES
from tests.benchmark.codec_speed import measure, table


@pytest.mark.bench
def test_print_the_speed_of_the_codecs() -> None:
    print("\n" + table(measure(values=16 * UNIT_MAX_VALUES, repetitions=9)))


def test_the_benchmark_measures_every_codec() -> None:
    speeds = measure(values=1, repetitions=1)

    assert len(speeds) == len(codec_names()) * 9
    assert all(speed.gb_per_s > 0 for speed in speeds)
