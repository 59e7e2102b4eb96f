"""What `pip install` leaves on a volunteer's machine: Shoal, and no program that attacks it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("averaging", "dht", "peer")
VERIFICATION = {"tests", "examples", "lab", "chaos", "attackers", "bench", "benchmark", "swarms"}
"""Names of folders that belong to a clone."""

ATTACKS = ("hostile", "lying", "attacker", "stranger_attacks", "crowd")
"""What modules of attack programs are called."""

PATCHED = "method-assign"
"""How a program says that it puts its own function in place of a method."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The text of each module in the wheel of this tree, by its path there."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in (*PACKAGES, "docs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("tests", "examples"):  # in reach, as in a clone
        (folder / name).mkdir()
        (folder / name / "__init__.py").touch()
    for path in (*ROOT.glob("*.md"), ROOT / "pyproject.toml", ROOT / "LICENSE"):
        shutil.copy(path, folder)
    build = "from setuptools import build_meta; build_meta.build_wheel('built')"
    subprocess.run([sys.executable, "-c", build], cwd=folder, check=True, capture_output=True)
    (built,) = (folder / "built").glob("*.whl")
    with zipfile.ZipFile(built) as content:
        return {
            name: content.read(name).decode() for name in content.namelist() if name.endswith(".py")
        }


def faults_of(modules: dict[str, str]) -> list[str]:
    """What in a wheel is none of a user's business."""
    wrong = []
    for name, source in modules.items():
        path = PurePosixPath(name)
        folders = set(path.parts[:-1])
        if path.parts[0] not in PACKAGES:
            wrong.append(f"{name} is in none of the packages")
        if folders & VERIFICATION or any(word in path.stem for word in ATTACKS):
            wrong.append(f"{name} has the name of a program that tries or attacks Shoal")
        if PATCHED in source:
            wrong.append(f"{name} puts functions in place of methods")
        if any(
            line.lstrip().startswith(("import tests", "from tests")) for line in source.splitlines()
        ):
            wrong.append(f"{name} imports tests")
    return wrong


def test_the_wheel_has_no_program_that_attacks(wheel: dict[str, str]) -> None:
    assert "peer/cli/__init__.py" in wheel
    wrong = faults_of(wheel)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("tests/chaos/run.py", ""),
        ("peer/lab/chaos/run.py", ""),
        ("peer/attackers/visit.py", ""),
        ("peer/agent/lying_agent.py", ""),
        ("averaging/live/odd.py", "Reducing._merge = ours  # type: ignore[method-assign]"),
        ("peer/odd.py", "def f():\n    from tests.chaos import run"),
    ],
)
def test_such_a_program_is_found(name: str, source: str) -> None:
    assert faults_of({name: source})
