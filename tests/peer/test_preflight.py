"""Looking before leaping."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from peer.preflight import Preflight, examine, expected_share
from peer.run_file import parse
from tests.peer.test_trainer import TEXT


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Preflight:
    return examine(
        parse(TEXT),
        device=torch.device("cpu"),
        pace_s=0.5,
        directory=tmp_path_factory.mktemp("run") / "not" / "there",
    )


def test_it_says_what_the_run_trains_and_what_it_costs(found: Preflight) -> None:
    text = "\n".join(found.lines)
    assert "trainer-test" in text
    assert "CPU" in text
    assert "tokens/s" in text
    assert "nothing from the network is executed" in text
    assert max(map(len, found.lines)) < 160


def test_a_paced_step_takes_its_pace(found: Preflight) -> None:
    assert found.step_time_s == 0.5


def test_upload_follows_from_the_model_the_codec_and_the_pace(found: Preflight) -> None:
    # int4 and its scales: between 0.5 and 1 byte a value, each sent at most twice a cycle.
    cycles = 3600 / (24 * 0.5)
    assert 1.0 <= found.upload_per_hour / (found.parameters * cycles) <= 2.0


def test_a_machine_that_is_too_small_hears_what_is_missing_and_what_to_do(
    found: Preflight,
) -> None:
    assert found.problems == ()
    cramped = dataclasses.replace(found, memory_free=1e6, disk_free=1e3)
    memory, disk = cramped.problems
    assert "1 MB are free" in memory
    assert "1 kB are free" in disk
    assert "--directory" in disk


def test_a_peer_twice_as_fast_as_two_others_is_half_of_the_run() -> None:
    assert expected_share(0.5, [1.0, 1.0]) == 0.5
    assert expected_share(0.5, []) == 1.0
    assert expected_share(1.0, [1.0, 0.0]) == 0.5  # one that has not stepped yet


def test_looking_writes_nothing(tmp_path: Path) -> None:
    examine(parse(TEXT), device=torch.device("cpu"), pace_s=0.0, directory=tmp_path / "x")
    assert list(tmp_path.iterdir()) == []
