"""Islands that ``shoal join`` makes: ranks that are lost, asked to end, or left out."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from peer.island.ranks import run_island
from tests.peer.island import works

pytestmark = pytest.mark.slow  # each process imports torch

TWO = ("cpu:0", "cpu:1")


def test_the_code_of_a_refused_rank_0_is_final(tmp_path: Path) -> None:
    assert run_island(TWO, works.refuse, logs=tmp_path, tell=pytest.fail) == 4


def test_a_device_that_fails_again_and_again_is_left_out(tmp_path: Path) -> None:
    told: list[str] = []
    three = ("cpu:0", "cpu:1", "cpu:2")
    code = run_island(three, works.lose_one_device_always, logs=tmp_path, tell=told.append)
    assert code == 40 + 3, "two ranks are left"
    assert "going on without cpu:1" in told[-2]
    assert "fallen off the bus" in (tmp_path / "rank-1.log").read_text()


def test_a_signal_reaches_rank_0_and_ends_all(tmp_path: Path) -> None:
    def ask() -> None:
        while not (tmp_path / "ready").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=ask, daemon=True).start()
    assert run_island(TWO, works.add_up_for_ever, logs=tmp_path, tell=pytest.fail) == 7
