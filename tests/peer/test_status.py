"""The status of a peer: what it tells others, and the way of a figure to all that show it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from peer.status import CALL, NOT_TOLD, Figure, time_left_s
from tests.peer.statuses import a_status

ROOT = Path(__file__).parents[2]

FIELD = '    {name}: Annotated[Count, Figure("Furlongs", words="{{}} {name}")] = 0\n'
"""A field as somebody adds it: its type, its text and its unit."""

EVERYWHERE = """
import json, os, time
from pathlib import Path
from types import SimpleNamespace
import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from peer.agent.agent import Agent
from peer.bridge import messages
from peer.bridge.shared_memory import SharedTensors
from peer.cli.steering import _own_peer
from peer.events.board import Board
from peer.events.names import Names
from peer.joining.visit import RunStatus
from peer.rules.ledger import Fate
from peer.run_file.sections import RunFile
from peer.status import CALL, PeerStatus, Training
from peer.storage.home import occupant_of, occupied
from peer.storage.earlier import KeptState, save_state
from peer.trainer.loop import Outcome
from peer.trainer.news import News
from peer.views import agent_page
from peer.views.watch import done, progress, progress_line
from peer.views.screen import View, draw
from rich.console import Console

def passed_on(message, decode):
    return decode(messages.pack(message)[4:])

told = passed_on(messages.Progress(Training(rods=7)), messages.decode_from_trainer)
memory = SharedTensors.create([3], layout=bytes(32), incarnation=1, coarse=False)
fate = Fate(processed=0.0, merged=0.0, pending=0.0, discarded={})
agent = SimpleNamespace(
    _memory=memory, _why_no_steps=None, _training=told.training, peer=SimpleNamespace(states=()),
    _account=SimpleNamespace(update=lambda states: fate),
)
status = Agent.with_training(agent, PeerStatus(peer="p", role="learner", phase="ready", furlongs=9))
news = News()
news.hear(passed_on(messages.Report(status=status), messages.decode_from_agent))
at_the_trainer = news.report.status

class Collector:
    def collect(self):
        return agent_page.metrics(status)

registry = CollectorRegistry()
registry.register(Collector())
page = agent_page.content(status, Board(Names({})), [], run_id="", run_name="", wall_time=0.0)
folder, run = Path(os.environ["XDG_DATA_HOME"]) / "p", RunFile()
with occupied(folder, run, "learner"):
    save_state(folder, KeptState("ready", "in the run", time.time(), status.figures()))
    row = _own_peer(folder, occupant_of(folder))
asked = RunStatus("ab" * 32, (CALL.decode(CALL.encode(status.for_others())),), {})
outcome = Outcome(
    finished=True, stopped=False, lost=None, status=at_the_trainer, directory=folder
)
console = Console(width=100, record=True, file=open(os.devnull, "w"))
console.print(draw(View(title="x", elapsed_s=0.0, status=at_the_trainer), width=100))
print(json.dumps({
    "progress": progress(at_the_trainer), "done": done(outcome), "page": page["figures"],
    "status": row["figures"], "status LINK": asked.plain()["peers"][0], "curves": status.numbers(),
    "metrics": generate_latest(registry).decode(), "line": progress_line(at_the_trainer),
    "screen": console.export_text(),
}, default=list))
"""


def test_a_figure_that_is_added_is_one_field_and_its_name_on_a_line(tmp_path: Path) -> None:
    """One that the trainer knows, and one that the agent knows, are found wherever figures are."""
    copy = tmp_path / "tree"
    shutil.copytree(ROOT / "peer", copy / "peer")  # with what is compiled already
    for file, mark, added in (
        ("status.py", '    steps: Annotated[Count, Figure("Optimizer', FIELD.format(name="rods")),
        ("status.py", "    reachable: bool", FIELD.format(name="furlongs")),
        ("views/screen.py", '    "tokens_per_s",\n', '    "rods",\n    "furlongs",\n'),
    ):
        source = (copy / "peer" / file).read_text()
        assert source.count(mark) == 1, mark
        (copy / "peer" / file).write_text(source.replace(mark, added + mark))
    where = {"PYTHONPATH": str(copy), "XDG_DATA_HOME": str(tmp_path / "home")}
    ended = subprocess.run(
        [sys.executable, "-c", EVERYWHERE],
        cwd=copy,
        env={**os.environ, **where},
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    for name in ("progress", "done", "page", "status", "status LINK", "curves"):
        assert (found[name]["rods"], found[name]["furlongs"]) == (7, 9), name
    for name in ("line", "screen"):
        assert "7 rods" in found[name] and "9 furlongs" in found[name], name
    assert "shoal_rods 7.0" in found["metrics"] and "shoal_furlongs 9.0" in found["metrics"]


def test_a_peer_tells_others_no_figures_of_its_machine() -> None:
    own = {"temperature_c": 61.0, "device_bytes": 2e9, "processor_share": 0.5, "link": "shoal://x"}
    told = CALL.decode(CALL.encode(a_status(**own).for_others()))
    assert told == a_status()
    assert own.keys() <= NOT_TOLD.keys()


@pytest.mark.parametrize(
    ("figure", "value", "text"),
    [
        (Figure("", "tokens"), 1_234_567, "1.23 M"),
        (Figure("", "s", words="{} left"), 125.0, "2:05 left"),
        (Figure("", "0 to 1", words="{} of peak"), 0.374, "37% of peak"),
        (Figure("", "bytes"), 17e9, "17 GB"),
        (Figure("", "°C"), 61.2, "61 °C"),
        (Figure("", "text"), "compiling", "compiling"),
    ],
)
def test_a_figure_is_written_in_its_unit(figure: Figure, value: object, text: str) -> None:
    assert figure.told(value) == text


def test_a_status_too_large_or_with_control_characters_is_refused() -> None:
    with pytest.raises(ValueError, match="at most"):
        CALL.decode(b"x" * (CALL.answer_max_bytes + 1))
    with pytest.raises(ValueError, match="printed"):
        CALL.decode(CALL.encode(a_status(name="\x1b[2J")))


def test_a_status_with_thousands_of_arrays_inside_one_another_is_refused() -> None:
    fields = msgspec.msgpack.decode(CALL.encode(a_status()))
    data = msgspec.msgpack.encode([*fields, None])[:-1] + b"\x91" * 20_000 + b"\xc0"
    with pytest.raises(ValueError, match="not a status"):
        CALL.decode(data)


def test_the_run_ends_by_tokens_at_the_speed_of_all_or_by_date() -> None:
    def left(tokens: float | None, date: float | None, *times: float) -> float | None:
        return time_left_s(
            tokens_left=tokens, step_tokens=100.0, step_times_s=times, date_left_s=date
        )

    assert left(1000.0, None, 1.0) == 10.0
    assert left(1000.0, None, 1.0, 0.25) == 2.0
    assert left(1000.0, 5.0, 1.0) == 5.0
    assert left(None, None, 1.0) is None
    assert left(1000.0, None, 0.0) is None, "no step yet"
    assert left(-50.0, None, 1.0) == 0.0
