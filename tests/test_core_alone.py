"""The core without ``peer.extras``: it is imported, and takes part in a run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

PROGRAM = r"""
import importlib, pkgutil, sys

import peer
from peer import cli
from peer.simulate.settings import parse
from peer.simulate.simulation import run

NEED_MORE = {"peer.hf", "peer.lightning"}
for module in pkgutil.walk_packages(peer.__path__, "peer."):
    if module.name not in NEED_MORE and not module.name.endswith("__main__"):
        importlib.import_module(module.name)

assert cli.run(["--help"]) == 0
assert cli.run(["run", "new", "small.toml"]) == 0
assert cli.run(["run", "check", "small.toml"]) == 0
two = {"peers.count": 2, "problem.size": 2, "outer.fragments": 1, "end.cycles": 3}
rounds = run(parse("\n".join(f"{name} = {value}" for name, value in two.items()))).rounds
assert rounds and all(each.contributors == 2 for each in rounds), rounds

assert cli.run(["doctor"]) == 2
assert cli.run(["run", "new", "--base", "owner/name"]) == 2
assert not [name for name in sys.modules if name.startswith("peer.extras")]
"""


NOT_INSTALLED = """
import sys
sys.meta_path[:] = [each for each in sys.meta_path if "_Editable" not in str(each)]
"""
"""An installation of the whole tree would find the parts that are left out of the copy."""


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the packages without ``peer/extras``."""
    tree = tmp_path_factory.mktemp("core")
    left_out = shutil.ignore_patterns("extras", "__pycache__")
    shutil.copytree(ROOT / "peer", tree / "peer", ignore=left_out)
    for name in ("averaging", "dht", "docs"):
        (tree / name).symlink_to(ROOT / name)
    (tree / "sitecustomize.py").write_text(NOT_INSTALLED)
    return tree


def run_in(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_core_is_imported_and_two_peers_merge(core: Path) -> None:
    done = run_in(core, "-c", PROGRAM)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "peer.extras.bases.commands" in done.stderr


OF_THE_WHOLE = {
    "tests/peer/cli": "the whole command line",
    "tests/peer/events/test_table.py": "all events that are emitted",
    "tests/peer/test_releases.py": "figures of the whole command line",
    "tests/peer/views/test_dashboard.py": "the figures of bootstrap peers",
}
"""Tests of rooms of the core that need the extras as well, and what for."""


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_tests_of_the_core_pass(core: Path) -> None:
    left_out = shutil.ignore_patterns("extras", "__pycache__")
    shutil.copytree(ROOT / "tests", core / "tests", ignore=left_out)
    for name in ("pyproject.toml", "examples"):
        (core / name).symlink_to(ROOT / name)
    ignored = [f"--ignore={place}" for place in OF_THE_WHOLE]
    options = ("-q", "-n", "2", "--dist", "loadfile", "-p", "no:cacheprovider")
    done = run_in(core, "-m", "pytest", *options, *ignored, "tests/peer")
    assert done.returncode == 0, done.stdout + done.stderr
