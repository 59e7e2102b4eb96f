"""``shoal simulate``: sweeps, result files, and errors."""

from __future__ import annotations

import csv
import json
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

from peer import cli
from peer.simulate.report import cells, rows, simulate
from peer.simulate.settings import Swarm, parse, sweep

EXAMPLES = Path(__file__).parents[3] / "examples"
SMALL = ("peers.count=5", "problem.size=2", "outer.fragments=1", "end.cycles=4")


def swarm(*arguments: str) -> tuple[int, str]:
    small = [part for setting in SMALL for part in ("--set", setting)]
    return said("simulate", *small, *arguments)


def said(*arguments: str) -> tuple[int, str]:
    """The exit code of a command line, and all that it prints."""
    with redirect_stdout(StringIO()) as printed, redirect_stderr(printed):
        return cli.run(arguments), printed.getvalue()


def test_cells_are_labelled_by_what_is_swept() -> None:
    todo = cells(Swarm(), sweep(["rounds.group_size=2,3", "peers.count=4"]), seeds=(3, 4))

    assert [(cell.label, cell.seed) for cell in todo] == [
        ("rounds.group_size=2", 3),
        ("rounds.group_size=2", 4),
        ("rounds.group_size=3", 3),
        ("rounds.group_size=3", 4),
    ]
    assert all(cell.experiment.peers.count == 4 for cell in todo)
    assert [cell.label for cell in cells(Swarm(name="x"), sweep([]), (0,))] == ["x"]


def test_a_sweep_leaves_tables_curves_plots_event_logs_and_one_page(tmp_path: Path) -> None:
    code, output = swarm("--set", "rounds.group_size=2,3", "--out", str(tmp_path))

    assert code == 0 and "rounds.group_size=2" in output
    with (tmp_path / "swarm.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [line["label"] for line in lines] == ["rounds.group_size=2", "rounds.group_size=3"]
    assert all(float(line["dispersion"]) > 0 for line in lines)
    with (tmp_path / "swarm-curves.csv").open() as file:
        assert {line["label"] for line in csv.DictReader(file)} == {line["label"] for line in lines}
    page = (tmp_path / "swarm.html").read_text()
    assert page.count("data:image/png;base64") == 6 and "http://" not in page
    assert "shoal simulate" in page
    events = [
        json.loads(line)
        for line in (tmp_path / "rounds.group_size=3.seed-0.events.jsonl").read_text().splitlines()
    ]
    melds = [event for event in events if event["event"] == "round" and event["kind"] == "meld"]
    assert melds and all(len(event["members"]) <= 3 for event in melds)
    assert (tmp_path / "swarm-dispersion.png").read_bytes().startswith(b"\x89PNG")


def test_one_json_object_for_scripts() -> None:
    code, output = swarm("--json", "--seeds", "2")

    told = json.loads(output)
    assert code == 0 and [row["seed"] for row in told["rows"]] == [0, 1]
    assert told["rows"][0]["merged_share"] > 0.5


def test_a_part_of_ones_own_stands_beside_the_file_and_is_the_same_in_every_process() -> None:
    """Processes are spawned, so they import it themselves."""

    def traces(workers: int) -> list[str]:
        code, output = swarm(
            *(str(EXAMPLES / "swarm.toml"), "--set", "outer.merge=mean,own_merge_rule:Middle"),
            *("--set", "event=[]", "--workers", str(workers), "--json"),
        )
        told = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
        assert code == 0 and all(row["loss"] < 1.0 for row in told["rows"])
        return [row["trace"] for row in told["rows"]]

    together = traces(2)
    assert len(set(together)) == 2
    assert together == traces(1)


def test_the_example_experiment_is_one() -> None:
    experiment = parse((EXAMPLES / "swarm.toml").read_text())
    quick = experiment.with_settings({"end.cycles": 2.0, "event": []})
    todo = cells(quick, sweep([]), (0,))
    (row,) = rows(todo, simulate(todo))

    assert row.melds > 0
