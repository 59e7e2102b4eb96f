"""Every example runs as its README says, with few steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.processes import Processes

EXAMPLES = Path(__file__).parents[1] / "examples"
LOOPBACK = "/ip4/127.0.0.1/tcp/0"


def environment_below(folder: Path) -> dict[str, str]:
    # One thread: several would wait for each other on a machine that runs other tests as well.
    return {"XDG_DATA_HOME": str(folder), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """Exit code and output of the three small examples, which run side by side."""
    tiny_gpt = (
        *("start", str(EXAMPLES / "tiny_gpt" / "run.toml"), "--listen", LOOPBACK),
        *("--threads", "1", "--steps", "6", "--json", "--yes"),
    )
    commands: dict[str, tuple[str, ...]] = {
        "notebook": (str(EXAMPLES / "notebook.py"),),
        "own_loop": (str(EXAMPLES / "own_loop.py"), "--steps", "150", "--pace", "0"),
        "tiny_gpt": ("-P", "-m", "peer.cli", *tiny_gpt),
    }
    with Processes(tmp_path_factory.mktemp("output")) as processes:
        started = {
            name: processes.python(
                *command, environment=environment_below(tmp_path_factory.mktemp(name))
            )
            for name, command in commands.items()
        }
        return {
            name: (process.wait(timeout=250), processes.output_of(process))
            for name, process in started.items()
        }


def test_an_own_loop_founds_a_run_and_trains(ended: dict[str, tuple[int, str]]) -> None:
    code, output = ended["own_loop"]
    assert code == 0, output
    assert "step 0  loss" in output
    assert "done; the loop was blocked for" in output


def test_the_notebook_trains_and_leaves_with_nothing_but_peer(
    ended: dict[str, tuple[int, str]],
) -> None:
    text = (EXAMPLES / "notebook.py").read_text(encoding="utf-8")
    imports = [line for line in text.splitlines() if line.startswith(("import ", "from "))]
    assert imports == ["import sys", "from pathlib import Path", "import peer"]
    code, output = ended["notebook"]
    assert code == 0, output
    assert "held-out loss" in output


def test_tiny_gpt_starts_and_prints_its_link(
    ended: dict[str, tuple[int, str]],
) -> None:
    code, output = ended["tiny_gpt"]
    assert code == 0, output
    records = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert any(r["event"] == "link" and r["link"].startswith("shoal://") for r in records)
    assert records[-1]["event"] == "done"
    assert records[-1]["steps"] == 6


@pytest.mark.slow  # each imports a large library
@pytest.mark.parametrize(
    ("example", "library"),
    [("hf_trainer", "transformers"), ("lightning", "lightning"), ("island", "torch")],
)
def test_the_trainer_of_another_framework_founds_a_run_and_trains(
    processes: Processes, tmp_path: Path, example: str, library: str
) -> None:
    pytest.importorskip(library, reason=f"the extra for {library} is not installed")
    trainer = processes.python(
        str(EXAMPLES / example / "train.py"),
        *("--steps", "5", "--directory", str(tmp_path / "peer"), "--listen", LOOPBACK),
        environment=environment_below(tmp_path / "home"),
    )
    assert trainer.wait(timeout=250) == 0, processes.output_of(trainer)
    lines = processes.output_of(trainer).splitlines()
    records = [json.loads(line) for line in lines if line.startswith('{"event"')]
    assert records[-1]["event"] == "done"
    assert records[-1]["steps"] == 5
