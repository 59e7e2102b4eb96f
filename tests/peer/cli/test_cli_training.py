"""Training in one of several processes that the commands start."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from peer.cli.learner_options import Options
from peer.cli.training import Training
from peer.island.ranks import RankPlace
from peer.run_file.reading import parse
from peer.storage.home import data_home
from peer.storage.progress import read_progress
from peer.trainer.computing.choices import Choices
from peer.trainer.computing.fitting import Goal, Remembered
from peer.trainer.loop import TrainerSettings
from peer.trainer.settings import JoinSettings
from tests.peer.agent.lone_agents import AGENT
from tests.peer.trainer.recipe_run import TEXT
from tests.processes import Processes


@pytest.mark.usefixtures("agent_threads")
def test_the_first_process_trains_and_remembers_what_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    (tmp_path / "corpus.txt").write_text("one two three " * 20_000, encoding="utf-8")
    own = JoinSettings(
        directory=tmp_path / "peer",
        data_directory=tmp_path,
        agent_command=AGENT,
        drain_s=5.0,
    )
    wanted = Choices(micro_batch=2)
    goal = Goal(first=Choices(micro_batch=1), choices=wanted, room_bytes=1e9)
    look: Any = SimpleNamespace(run=parse(TEXT), goal=goal, key="a key")
    settings = TrainerSettings(device="cpu", threads=torch.get_num_threads(), steps_max=12)
    training = Training(own, Options(plain=True), settings, look)
    code = training.rank(RankPlace(0, ("cpu",), tmp_path / "meeting", tmp_path / "log"))
    assert code == 0
    assert "left the run: 12 steps" in capsys.readouterr().out
    found = Remembered(data_home(os.environ) / "measured.json").get("a key")
    assert found is not None
    assert found.choices == wanted


LEAVING = """
import os
import signal
import sys
import time
from pathlib import Path

from peer.cli.learner_options import Options
from peer.cli.training import Training
from peer.run_file.reading import parse
from peer.trainer.loop import TrainerSettings, train
from peer.trainer.settings import JoinSettings
from tests.peer.trainer.recipe_run import TEXT

folder = Path(sys.argv[1])
agent = (sys.executable, "-m", "tests.peer.agent.lone_agent")
own = JoinSettings(directory=folder / "peer", data_directory=folder, agent_command=agent)
settings = TrainerSettings(device="cpu", threads=1)

def work(stop, on_event, on_step):
    def long_step(run):
        on_step(run)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(600)

    return train(
        parse(TEXT), own=own, settings=settings, stop=stop, on_event=on_event, on_step=long_step
    )

Training(own, Options(plain=True), settings, None)._watched(work)
"""


@pytest.mark.slow  # tests/peer/test_signals.py: a second signal ends a process
def test_a_second_signal_says_what_was_left_behind_and_is_no_crash(
    tmp_path: Path, processes: Processes
) -> None:
    """Nothing was printed, and the pending tokens counted as lost in a crash."""
    (tmp_path / "corpus.txt").write_text("one two three " * 20_000, encoding="utf-8")
    learner = processes.python("-c", LEAVING, str(tmp_path))
    processes.wait_for_line(learner, "shoal: leaving", timeout_s=120)
    learner.send_signal(signal.SIGTERM)
    assert learner.wait(60) == 128 + signal.SIGTERM
    last = processes.output_of(learner).splitlines()[-1]
    assert re.match(r"shoal: stopped at once: \d+ tokens of this peer were not merged", last), last
    ended = read_progress(tmp_path / "peer" / "progress")
    assert ended is not None and ended.tokens and ended.clean
