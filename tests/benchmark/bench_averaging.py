"""Speed of a round compared with hivemind and gloo: the project's targets, measured in one run.

Run by ``pytest -m bench tests/benchmark/bench_averaging.py -s`` on an otherwise idle machine;
``python -m tests.benchmark.averaging`` prints the same table. Ratios, not seconds, are compared.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.benchmark.averaging import AveragingBench, run_averaging_bench, table

pytestmark = [pytest.mark.bench, pytest.mark.timeout(900)]

VALUES = 30_000_000
CODECS = ("f32", "f16", "int8", "int4", "int2/int4")
TIMES_FASTER = {"f16": 2.0, "int8": 3.5, "int4": 5.0, "int2/int4": 5.0}


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    bench = AveragingBench(values=VALUES, peers=(2,), rounds=9, codecs=CODECS)
    found = run_averaging_bench(bench, tell=print)["rows"]
    print(table(found))
    return found


def row(rows: list[dict[str, Any]], system: str, codec: str) -> dict[str, Any]:
    return next(r for r in rows if (r["system"], r["codec"]) == (system, codec))


@pytest.mark.parametrize("codec", sorted(TIMES_FASTER))
def test_a_round_is_several_times_faster_than_hivemind_in_fp16(
    rows: list[dict[str, Any]], codec: str
) -> None:
    ratio = row(rows, "hivemind", "f16")["seconds"] / row(rows, "shoal", codec)["seconds"]
    assert ratio >= TIMES_FASTER[codec]


@pytest.mark.parametrize("codec", CODECS)
def test_a_round_takes_at_most_half_longer_than_transfer_and_codec_work(
    rows: list[dict[str, Any]], codec: str
) -> None:
    ours = row(rows, "shoal", codec)
    assert ours["seconds"] <= 1.5 * (ours["daemon_seconds"] + ours["codec_seconds"])


@pytest.mark.parametrize("codec", CODECS)
def test_bytes_and_memory_stay_within_their_bounds(rows: list[dict[str, Any]], codec: str) -> None:
    ours = row(rows, "shoal", codec)
    encoded = ours["encoded_bytes"]
    assert ours["bytes_per_peer"] <= 1.03 * encoded  # 2 peers: half out, half back
    copied = 4 * VALUES if codec.startswith("int2") else 0  # feedback writes to what is offered
    assert ours["peak_memory_bytes"] <= 4 * VALUES + copied + 3 * encoded + (16 << 20)
