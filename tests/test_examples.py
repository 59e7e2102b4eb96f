"""Every example runs as its README says, in its shortest form."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.processes import Processes

EXAMPLES = Path(__file__).parents[1] / "examples"
LOOPBACK = "/ip4/127.0.0.1/tcp/0"


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    # One thread: several would wait for each other on a machine that runs other tests as well.
    return {"XDG_DATA_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}


def test_an_own_loop_founds_a_run_and_trains(
    processes: Processes, tmp_path: Path, home: dict[str, str]
) -> None:
    arguments = ("--steps", "150", "--pace", "0", "--directory", str(tmp_path / "peer"))
    loop = processes.python(str(EXAMPLES / "own_loop.py"), *arguments, environment=home)
    assert loop.wait(timeout=110) == 0, processes.output_of(loop)
    output = processes.output_of(loop)
    assert "step 0  loss" in output
    assert "done; the loop was held up for" in output


def test_the_notebook_trains_and_leaves_with_nothing_but_peer(
    processes: Processes, home: dict[str, str]
) -> None:
    text = (EXAMPLES / "notebook.py").read_text(encoding="utf-8")
    imports = [line for line in text.splitlines() if line.startswith(("import ", "from "))]
    assert imports == ["import sys", "from pathlib import Path", "import peer"]
    notebook = processes.python(str(EXAMPLES / "notebook.py"), environment=home)
    assert notebook.wait(timeout=110) == 0, processes.output_of(notebook)
    assert "held-out loss" in processes.output_of(notebook)


@pytest.mark.slow  # each imports a large library
@pytest.mark.parametrize(
    ("example", "library"),
    [("hf_trainer", "transformers"), ("lightning", "lightning"), ("island", "torch")],
)
def test_a_trainer_that_people_know_founds_a_run_and_trains(
    processes: Processes, tmp_path: Path, home: dict[str, str], example: str, library: str
) -> None:
    pytest.importorskip(library, reason=f"the extra for {library} is not installed")
    trainer = processes.python(
        str(EXAMPLES / example / "train.py"),
        *("--steps", "5", "--directory", str(tmp_path / "peer"), "--listen", LOOPBACK),
        environment=home,
    )
    assert trainer.wait(timeout=110) == 0, processes.output_of(trainer)
    lines = processes.output_of(trainer).splitlines()
    records = [json.loads(line) for line in lines if line.startswith('{"event"')]
    assert records[-1]["event"] == "done"
    assert records[-1]["steps"] == 5


def test_tiny_gpt_starts_and_prints_the_line_that_others_paste(
    processes: Processes, tmp_path: Path, home: dict[str, str]
) -> None:
    run = processes.start(
        [
            *(sys.executable, "-P", "-m", "peer.cli"),
            *("start", str(EXAMPLES / "tiny_gpt" / "run.toml"), "--directory", str(tmp_path / "p")),
            *("--listen", LOOPBACK, "--threads", "1"),
            *("--steps", "6", "--json", "--yes"),
        ],
        environment=home,
    )
    assert run.wait(timeout=110) == 0, processes.output_of(run)
    lines = processes.output_of(run).splitlines()
    records = [json.loads(line) for line in lines if line.startswith("{")]
    assert any(r["event"] == "link" and r["link"].startswith("shoal://") for r in records)
    assert records[-1]["event"] == "done"
    assert records[-1]["steps"] == 6
