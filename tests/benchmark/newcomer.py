"""Times of somebody who has Python and nothing else: ``python -m tests.benchmark.newcomer``.

Packages are fetched first, into a folder, and no time of it counts. Then, each in an environment of
its own, a host without torch is installed and started, until it prints its address; and a learner,
with its dependencies, until the learners of ``shoal demo`` train. ``--folder`` keeps what was
fetched, for the next time.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from peer.demo.processes import kill_tree, launch
from tests.swarms.commands import load

ROOT = Path(__file__).parents[2]
HOST = ROOT / "examples/bootstrap_host/requirements.txt"
PINNED = ("--constraint", str(ROOT / "constraints.txt"))
WITHIN_S = 300.0

HOST_MB_MAX, HOST_S_MAX, DEMO_S_MAX = 250.0, 10.0, 90.0
"""Goals: size of a host, time to its address, time to a demo that trains."""


def pip(python: str | Path, *arguments: str) -> None:
    subprocess.run([str(python), "-m", "pip", "--quiet", *arguments], check=True)


def fetch(wheels: Path) -> None:
    """What the installations need, with what builds packages that have no wheel."""
    pip(sys.executable, "wheel", "--no-deps", "--wheel-dir", str(wheels), str(ROOT))
    (shoal,) = wheels.glob("shoal-*.whl")
    pip(sys.executable, "download", "--dest", str(wheels), "setuptools", "wheel")
    for more in (["--no-deps", "--requirement", str(HOST)], [str(shoal)]):
        pip(sys.executable, "download", *PINNED, "--dest", str(wheels), *more)


class Newcomer:
    """A new environment, and the time since the first command in it."""

    def __init__(self, folder: Path, wheels: Path) -> None:
        began = time.monotonic()
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        self.folder, self._wheels = folder, wheels
        self.made_s = time.monotonic() - began
        self._began = time.monotonic()
        self.installed_s = 0.0

    def install(self, *arguments: str) -> None:
        """Everything from the folder, whatever this machine's pip is told otherwise."""
        (shoal,) = self._wheels.glob("shoal-*.whl")
        of_pip = {name for name in os.environ if name.startswith("PIP_")}
        environment = {name: os.environ[name] for name in os.environ.keys() - of_pip}
        environment["PIP_CONFIG_FILE"] = os.devnull
        command = [self.folder / "bin/pip", "install", "--quiet", "--no-index", *PINNED]
        command += ["--find-links", self._wheels, *arguments, shoal]
        subprocess.run([*map(str, command)], check=True, env=environment)
        self.installed_s = time.monotonic() - self._began

    def runs(self, *arguments: str, until: Callable[[str], bool]) -> float:
        """Time from the first command until this one's output is what was waited for."""
        home = self.folder / "home"
        home.mkdir()
        log = self.folder / "output"
        process = launch(
            [str(self.folder / "bin/shoal"), *arguments],
            log,
            environment={"HOME": str(home), "XDG_DATA_HOME": str(home)},
        )
        try:
            while time.monotonic() - self._began < WITHIN_S and process.poll() is None:
                if until(log.read_text(errors="replace")):
                    return time.monotonic() - self._began
                time.sleep(0.05)
            said = log.read_text(errors="replace")[-1000:]
            raise SystemExit(f"shoal {' '.join(arguments)}: not within {WITHIN_S:g} s: {said}")
        finally:
            kill_tree(process)

    @property
    def megabytes(self) -> float:
        files = (
            path for path in self.folder.rglob("*") if path.is_file() and not path.is_symlink()
        )
        return sum(path.stat().st_size for path in files) / 1e6


def host(folder: Path, wheels: Path) -> str:
    newcomer = Newcomer(folder, wheels)
    newcomer.install("--no-deps", "--requirement", str(HOST))
    size = newcomer.megabytes
    address_s = newcomer.runs(
        *("bootstrap", "--listen", "/ip4/127.0.0.1/tcp/0", "--data-dir", str(folder / "data")),
        *("--page", "off"),
        until=lambda text: "/p2p/" in text,
    )
    return (
        f"host: {size:.0f} MB installed ({_held(size, HOST_MB_MAX, 'MB')}), environment made in "
        f"{newcomer.made_s:.1f} s, pip {newcomer.installed_s:.1f} s, address printed after "
        f"{address_s:.1f} s ({_held(address_s, HOST_S_MAX, 's')})"
    )


def learner(folder: Path, wheels: Path) -> str:
    newcomer = Newcomer(folder, wheels)
    newcomer.install()
    demo_s = newcomer.runs("demo", "--plain", until=lambda text: "is training" in text)
    return (
        f"learner: {newcomer.megabytes:.0f} MB installed, environment made in "
        f"{newcomer.made_s:.1f} s, pip {newcomer.installed_s:.1f} s, the demo trains after "
        f"{demo_s:.1f} s ({_held(demo_s, DEMO_S_MAX, 's')})"
    )


def _held(value: float, most: float, unit: str) -> str:
    return f"{'held' if value <= most else 'MISSED'}: {most:g} {unit}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmark.newcomer", description=__doc__)
    parser.add_argument("--folder", type=Path, help="keep the packages in this folder")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="shoal-new-") as temporary:
        wheels: Path = options.folder or Path(temporary) / "wheels"
        for old in wheels.glob("shoal-*.whl"):
            old.unlink()
        fetch(wheels)
        for case in (host, learner):
            sys.stdout.write(f"{case(Path(temporary) / case.__name__, wheels)}, {load()}\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
