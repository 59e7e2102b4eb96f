"""``shoal runs``, and the choice of a run from a list."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dht.identity import Identity
from peer import cli
from peer.errors import NobodyMet
from peer.extras.run_lists import commands
from peer.joining.link import Link

SEED = f"/ip4/192.168.1.5/tcp/7700/p2p/{Identity.from_seed(bytes(32)).peer_id}"
FIRST, SECOND = (f"shoal://{digits * 32}?seed={SEED}" for digits in ("ab", "cd"))
RUNS = [
    {
        "link": FIRST,
        "name": "tiny\x1b[2Jstories",
        "description": "Stories\nfor all.",
        "model": "gpt, 124 M parameters",
        "needs": "8 GB of memory",
        "tokens": 5_000_000,
        "tokens_goal": 10**9,
    },
    {"link": SECOND, "learners": 3},
    {"name": "of a private network"},
]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A list, of whose runs the first one answers."""

    async def who_trains(link: Link) -> Mapping[str, Any]:
        if str(link) == SECOND:
            raise NobodyMet("run cd", "no peer of it was found")
        return {"training": ["anna", "boris"], "held_out": 2.5}

    monkeypatch.setattr(commands, "_who_trains", who_trains)
    path = tmp_path / "runs.json"
    path.write_text(json.dumps({"runs": RUNS}))
    return path


def test_runs_are_shown_with_what_they_train_who_trains_and_what_a_machine_needs(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["runs", str(file)]) == 0
    shown = capsys.readouterr().out.partition("\n 2  ")[0]
    assert shown.splitlines() == [
        " 1  tiny\ufffd[2Jstories   gpt, 124 M parameters",
        "    Stories for all.",
        "    trains now: 2 peers (anna and boris), held-out loss 2.500; 5 M of 1 G tokens merged, "
        "by the list",
        "    needs: 8 GB of memory",
        f"    shoal join '{FIRST}'",
    ]
    assert cli.run(["runs", str(file), "--json"]) == 0
    first, second, third = json.loads(capsys.readouterr().out)["runs"]
    assert (first["training"], first["reason"]) == (["anna", "boris"], None)
    assert second["training"] is None and "no peer of it was found" in second["reason"]
    assert (third["link"], third["reason"]) == ("", "the list has no link to it")


def test_no_list_is_fetched_that_nobody_has_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("SHOAL_RUNS", raising=False)
    assert cli.run(["runs"]) == 2
    assert cli.run(["join", "--yes"]) == 2
    assert "set SHOAL_RUNS to a list of runs" in capsys.readouterr().err


def test_join_without_a_link_asks_which_run_of_the_list(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHOAL_RUNS", str(file))
    with pytest.raises(Exception, match="no terminal to ask at"):
        commands.chosen_link()
    terminal = io.StringIO("0\n3\n2\n")
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", terminal)
    assert commands.chosen_link() == SECOND
    shown = capsys.readouterr().out
    assert "Which one, 1 to 2" in shown and "of a private network" not in shown
    assert "not known, run cd" in shown and "3 by the list" in shown
