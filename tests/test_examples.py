"""Every example runs as its README says, with few steps."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from peer.run_file.contradictions import obstacles
from peer.run_file.reading import parse_whole
from tests.notebook import code_cells
from tests.processes import Processes

EXAMPLES = Path(__file__).parents[1] / "examples"
NOTEBOOK = EXAMPLES / "notebook.ipynb"


def environment_below(folder: Path) -> dict[str, str]:
    # One thread: several would wait for each other on a machine that runs other tests as well.
    return {"XDG_DATA_HOME": str(folder), "OMP_NUM_THREADS": "1"}


def ran(processes: Processes, home: Path, *command: str) -> str:
    """The output of a Python command that ends well."""
    process = processes.python(*command, environment=environment_below(home))
    assert process.wait(timeout=250) == 0, processes.output_of(process)
    return processes.output_of(process)


def test_an_own_loop_founds_a_run_and_trains(processes: Processes, tmp_path: Path) -> None:
    loop = (str(EXAMPLES / "own_loop.py"), "--steps", "80", "--pace", "0")
    output = ran(processes, tmp_path, *loop)
    assert "step 0  loss" in output
    assert output.count("others join with: the same program and the link 'shoal://") == 1
    assert "done; the loop was blocked for" in output


RUN_FILES = sorted(set(EXAMPLES.glob("**/*.toml")) - {EXAMPLES / "swarm.toml"})


@pytest.mark.parametrize("file", RUN_FILES, ids=lambda file: str(file.relative_to(EXAMPLES)))
def test_a_run_file_of_the_examples_may_start(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert not list(obstacles(parse_whole(text, source=str(file)), now=datetime.now(UTC)))


def test_the_notebook_imports_nothing_but_peer() -> None:
    lines = [line for cell in code_cells(NOTEBOOK) for line in cell.splitlines()]
    imports = [line for line in lines if line.startswith(("import ", "from "))]
    assert imports == ["import peer"]


@pytest.mark.slow  # the loop above goes through the same calls
def test_the_notebook_trains_and_leaves(processes: Processes, tmp_path: Path) -> None:
    output = ran(processes, tmp_path, "-m", "tests.notebook", str(NOTEBOOK), "range(20)=range(3)")
    assert output.count("others join with: shoal join 'shoal://") == 1
    assert "held-out loss" in output


@pytest.mark.slow  # trains, and measures on all held-out data
def test_the_figures_of_tiny_gpt_are_measured_as_its_document_says() -> None:
    """Earlier, the document named arguments that the function has not had for long."""
    text = (EXAMPLES / "tiny_gpt" / "README.md").read_text()
    code = text.partition("```python\n")[2].partition("```")[0]
    assert "(60, 120, 180, 240)" in code
    done = subprocess.run(
        [sys.executable, "-c", code.replace("(60, 120, 180, 240)", "(1,)")],
        cwd=EXAMPLES.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    steps, loss = done.stdout.split()
    assert steps == "1" and 2.0 < float(loss) < 6.0


@pytest.mark.slow
@pytest.mark.timeout(480)
def test_examples_run_again_in_two_terminals_and_beside_each_other(
    processes: Processes, tmp_path: Path
) -> None:
    """All without options, with one home, as a person would start them."""
    home = environment_below(tmp_path)
    loop = str(EXAMPLES / "own_loop.py")

    def link_of(process: subprocess.Popen[bytes]) -> str:
        line = processes.wait_for_line(process, "others join with", timeout_s=120)
        return line.split("'")[1]

    loops = EXAMPLES / "plain_torch"
    for again in range(2):
        first = processes.python("-u", loop, "--steps", "100000", environment=home)
        second = processes.python("-u", loop, link_of(first), "--steps", "300", environment=home)
        others = [
            processes.python(str(loops / name), "--steps", "50", environment=home)
            for name in ("partly_frozen.py", "several_optimizers.py")
        ]
        for process in (*others, second):
            assert process.wait(timeout=200) == 0, (again, processes.output_of(process))
        assert "merged with 2 peers" in processes.output_of(second)
        processes.kill_hard(first)
