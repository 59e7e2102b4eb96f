"""Training in one of several processes that the commands start."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from peer.cli.learner_options import Options
from peer.cli.training import _rank
from peer.island.ranks import Place
from peer.run_file.reading import parse
from peer.storage.home import data_home
from peer.trainer.computing.choices import Choices
from peer.trainer.computing.fitting import Goal, Remembered
from peer.trainer.loop import TrainerSettings
from peer.trainer.settings import JoinSettings
from tests.peer.trainer.recipe_run import TEXT


def test_the_first_process_trains_and_remembers_what_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    (tmp_path / "corpus.txt").write_text("one two three " * 20_000, encoding="utf-8")
    own = JoinSettings(
        directory=tmp_path / "peer",
        data_directory=tmp_path,
        agent_command=(sys.executable, "-m", "tests.peer.agent.lone_agent"),
        drain_s=5.0,
    )
    wanted = Choices(micro_batch=2)
    code = _rank(
        parse(TEXT),
        own,
        Options(plain=True),
        TrainerSettings(device="cpu", threads=torch.get_num_threads(), steps_max=12),
        Goal(first=Choices(micro_batch=1), choices=wanted, room_bytes=1e9),
        "a key",
        Place(0, ("cpu",), tmp_path / "meeting", tmp_path / "log"),
    )
    assert code == 0
    assert "left the run: 12 steps" in capsys.readouterr().out
    found = Remembered(data_home(os.environ) / "measured.json").get("a key")
    assert found is not None
    assert found.choices == wanted
