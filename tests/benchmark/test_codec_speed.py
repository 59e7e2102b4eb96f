from __future__ import annotations

from averaging.numbers.codecs import codec_names
from tests.benchmark.codec_speed import measure


def test_the_benchmark_measures_every_codec() -> None:
    speeds = measure(values=1, repetitions=1)

    assert len(speeds) == len(codec_names()) * 8
    assert all(speed.gb_per_s > 0 for speed in speeds)
