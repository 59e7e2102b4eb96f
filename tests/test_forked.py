"""``pytest --forks`` reports what ``pytest`` would, and a process that dies is a failure."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.processes import Processes

MODULES = {
    "test_right": """
        import os, pytest
        def test_passes(tmp_path): assert not list(tmp_path.iterdir())
        def test_is_skipped(): pytest.skip("for a reason")
        @pytest.mark.slow
        def test_is_deselected(): raise AssertionError
    """,
    "test_wrong": """
        import pytest
        def test_fails(): print("its output"); assert 2 + 2 == 5
        @pytest.fixture
        def broken(): yield; raise OSError("while it is released")
        def test_passes_and_breaks(broken): pass
    """,
    "test_kills_itself": """
        import os
        def test_passes(): pass
        def test_dies(): os.kill(os.getpid(), 9)
        def test_never_runs(): pass
    """,
    "test_has_an_error": "import nothing_of_this_name",
    "test_skips_itself": "import pytest; pytest.skip('all of it', allow_module_level=True)",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("modules")
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = slow\npython_files = test_*.py\n")
    for name, text in MODULES.items():
        lines = [line.removeprefix(" " * 8) for line in text.splitlines()]
        (folder / f"{name}.py").write_text("\n".join(lines))
    return folder


def command(*arguments: str) -> list[str]:
    plugins = ["tests.forked", "no:cacheprovider", "no:hypothesispytest", "no:xdist"]
    options = [option for name in plugins for option in ("-p", name)]
    return [sys.executable, "-m", "pytest", *options, *arguments]


def outcome(output: str) -> dict[str, int]:
    last = output.splitlines()[-1]
    return {what: int(count) for count, what in re.findall(r"(\d+) (\w+)", last)}


def test_forked_modules_have_the_outcomes_that_they_have_in_one_process(folder: Path) -> None:
    def run(*arguments: str) -> str:
        of = command("-m", "not slow", "--continue-on-collection-errors", *arguments)
        done = subprocess.run(of, capture_output=True, text=True, check=False)
        assert done.returncode == 1, done.stdout + done.stderr
        return done.stdout

    survive = [str(folder / f"{name}.py") for name in MODULES if name != "test_kills_itself"]
    alone, forked = run(*survive), run("--forks", "2", str(folder))
    expected = outcome(alone)
    assert expected["failed"] == 1 and expected["skipped"] == 2 and expected["deselected"] == 1
    expected["failed"] += 1  # the process that died
    expected["passed"] += 1
    assert outcome(forked) == expected
    assert "assert (2 + 2) == 5" in forked and "its output" in forked
    assert "nothing_of_this_name" in forked and "while it is released" in forked
    assert "ended with -9" in forked
    assert "test_kills_itself.py::test_dies" in forked and "never_runs" not in forked


def test_modules_after_a_failure_are_run(tmp_path: Path) -> None:
    """Their processes took the failure for one of their own, and ended before the first test."""
    (tmp_path / "test_a.py").write_text("def test_fails(): assert False\n")
    (tmp_path / "test_b.py").write_text("def test_passes(): pass\n")
    of = command("--forks", "1", str(tmp_path))
    done = subprocess.run(of, capture_output=True, text=True, check=False)
    assert outcome(done.stdout) == {"failed": 1, "passed": 1}


def test_a_module_that_ends_before_its_last_test_has_failed(tmp_path: Path) -> None:
    (tmp_path / "test_stops.py").write_text(
        "def test_stops(request): request.session.shouldstop = 'enough'\ndef test_more(): pass\n"
    )
    of = command("--forks", "1", str(tmp_path))
    done = subprocess.run(of, capture_output=True, text=True, check=False)
    assert outcome(done.stdout) == {"failed": 1, "passed": 1}
    assert "1 tests before its end" in done.stdout


def test_an_interrupted_run_releases_what_its_modules_hold(
    processes: Processes, tmp_path: Path
) -> None:
    (tmp_path / "test_holds.py").write_text(
        "import pytest, time, pathlib\n"
        "here = pathlib.Path(__file__).parent\n"
        "@pytest.fixture(scope='module')\n"
        "def held():\n"
        "    yield\n"
        "    (here / 'released').touch()\n"
        "def test_waits(held):\n"
        "    (here / 'began').touch()\n"
        "    time.sleep(60)\n"
    )
    process = processes.start(command("--forks", "1", str(tmp_path)))
    deadline = time.monotonic() + 30
    while not (tmp_path / "began").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 2, processes.output_of(process)
    assert (tmp_path / "released").exists()
