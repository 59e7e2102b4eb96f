"""Parts of the demo; the demo itself runs in tests/integration/test_demo.py."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from peer.demo.demo import (
    HELD_OUT,
    Comparison,
    Demo,
    DemoSettings,
    Learner,
    Point,
    Result,
    summary,
    summary_text,
)
from peer.demo.report import split_at_silence, write
from peer.run_file.contradictions import remarks
from peer.run_file.reading import parse


def result(**changes: object) -> Result:
    values: dict[str, object] = {
        "seconds": 100.0,
        "learners": (),
        "rounds": 40,
        "tokens": {"processed": 100.0, "merged": 90.0, "pending": 7.0, "discarded": 3.0},
        "blocked_fraction": 0.001,
        "bytes_per_token": 5.0,
        "kills": 1,
        "rejoins": 1,
        "run_text": "",
    }
    return Result(**{**values, **changes})  # type: ignore[arg-type]


LEARNED = Comparison(loss_start=5.5, loss_end=1.9, solo_loss_end=2.1)


def test_each_demo_has_a_valid_run_of_its_own(tmp_path: Path) -> None:
    """A second demo on the same machine joined the run of the first one."""
    seed = "/ip4/127.0.0.1/tcp/7700/p2p/12D3KooWE7jUkqLCMSni6TN3DpkvE4x6y7t6mfGPoBKzwuNrv9fq"
    settings = DemoSettings(directory=tmp_path)
    first, second = (parse(settings.run_text(seed)) for _ in range(2))
    assert first.outer.codec == "int4"
    assert not list(remarks(first))
    assert first.run_id != second.run_id


def test_the_demo_succeeds_only_if_the_swarm_learned_and_the_killed_learner_came_back(
    tmp_path: Path,
) -> None:
    settings = DemoSettings(directory=tmp_path)
    assert summary(settings, result(), LEARNED)["ok"] is True
    assert summary(settings, result(rejoins=0), LEARNED)["ok"] is False
    assert summary(settings, result(rounds=0), LEARNED)["ok"] is False
    worse = Comparison(loss_start=5.5, loss_end=5.6, solo_loss_end=2.1)
    assert summary(settings, result(), worse)["ok"] is False


def test_the_command_that_the_summary_shows_can_be_pasted(tmp_path: Path) -> None:
    settings = DemoSettings(directory=tmp_path / "my demo")
    shown = summary_text(summary(settings, result(), LEARNED)).splitlines()[-1]
    _, _, command = shown.partition(": ")
    learner = str(tmp_path / "my demo" / "learner-0")
    assert shlex.split(command) == ["shoal", "say", learner, "def main("]


def test_a_gap_in_a_learners_points_separates_two_lives() -> None:
    points = [Point(at_s, 1.0) for at_s in (0.0, 1.0, 2.0, 9.0, 10.0)]
    assert [len(life) for life in split_at_silence(points)] == [3, 2]
    assert [len(life) for life in split_at_silence(points[:3])] == [3]
    assert split_at_silence([]) == []


def test_the_demo_needs_no_plots_to_show_what_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what `pip install shoal` brings alone it did not start."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    record = summary(DemoSettings(directory=tmp_path), result(), LEARNED)
    write(tmp_path, result(), LEARNED, record)
    assert [path.name for path in tmp_path.iterdir()] == ["demo.html"]


def started_again(demo: Demo) -> Learner:
    """The last learner, which made 30 steps before it was killed, and 40 since."""
    learner = demo.learners[-1]
    for steps in (30, 40):
        for per_life in (learner.blocked_s, learner.alive_s, learner.bytes_sent):
            per_life.append(1)
        learner.steps_made.append(steps)
    learner.progress.update(steps=40, step_time_s=0.25, fates={"merged": 70.0})
    return learner


def test_the_steps_of_a_learner_that_came_back_are_those_of_all_its_lives(tmp_path: Path) -> None:
    """The page said that it had made fewer steps than were merged."""
    demo = Demo(DemoSettings(directory=tmp_path))
    learner = started_again(demo)
    assert demo.view().peers[-1].steps == 70
    shown = result(learners=(learner,))
    write(tmp_path, shown, LEARNED, summary(demo.settings, shown, LEARNED))
    assert "<td>70</td>" in (tmp_path / "demo.html").read_text()


def test_the_screen_has_the_newest_held_out_loss_and_all_other_news(tmp_path: Path) -> None:
    """A dozen measurements hid the kill."""
    demo = Demo(DemoSettings(directory=tmp_path))
    demo.news += [f"{HELD_OUT}2.0", "kill -9 learner-3", f"{HELD_OUT}1.9", f"{HELD_OUT}1.8"]
    assert demo.view().news == ["kill -9 learner-3", f"{HELD_OUT}1.8"]
