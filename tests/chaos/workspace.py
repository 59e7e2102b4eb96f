"""Folder, clock, process environment and bookkeeping that all processes of one swarm share.

``Workspace`` remembers every process that belongs to the swarm, so that its processor time can be
told from that of other programs and nothing of it is left behind unnoticed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

from dht.whole_files import write_whole
from tests.chaos.composition import SwarmSettings
from tests.chaos.judging.evidence import Leaks
from tests.chaos.proxy import Proxies
from tests.processes import described, still_running

STILL_RUNNING_S = 8.0
"""How long processes may take to end before they count as left behind."""


class Workspace:
    """Everything that the processes of one swarm share."""

    def __init__(self, settings: SwarmSettings) -> None:
        self.settings = settings
        self.directory = settings.directory
        self.directory.mkdir(parents=True, exist_ok=True)
        self.run_path = self.directory / "run.toml"
        self.began_at = time.time()
        """Unix time at 0 s."""
        self._began = time.monotonic()
        # A short path: daemons create sockets in it, and the length of their paths is limited.
        self._temporary = Path(tempfile.mkdtemp(prefix="shoal-chaos-"))
        self._shared_memory_before = _shared_memory()
        self._used_s: dict[psutil.Process, float] = {}
        """Processor time of every process of the swarm, when it was last seen."""
        self.proxies = Proxies() if settings.scenario.proxied else None
        if settings.scenario.skewed:
            write_hook(self.directory / "clock")

    def now(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._began

    def environment(self, *, clock: Path | None = None) -> dict[str, str]:
        """Environment variables of a process; ``clock`` is the file with its clock's error."""
        environment = {
            "XDG_DATA_HOME": str(self.directory / "data"),
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(self._temporary),
            # Otherwise torch keeps a cache in the temporary folder that outlives its processes.
            "TORCHINDUCTOR_CACHE_DIR": str(self.directory / "torch"),
        }
        if clock is not None and self.settings.scenario.skewed:
            folders = [str(self.directory / "clock"), os.environ.get("PYTHONPATH", "")]
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
            environment["SHOAL_CHAOS_CLOCK"] = str(clock)
        return environment

    def note(self, processes: Iterable[psutil.Process]) -> None:
        """Remember processes of the swarm: they count as such even when orphaned later."""
        for process in processes:
            self._used_s.setdefault(process, 0.0)
            with contextlib.suppress(psutil.Error):
                self._used_s[process] = _used_s(process)

    def used_s(self) -> tuple[float, float]:
        """Processor time so far: of the swarm with this process, and of the whole machine."""
        times = psutil.cpu_times()
        machine_s = times.user + times.nice + times.system + getattr(times, "steal", 0.0)
        return sum(self._used_s.values()) + _used_s(psutil.Process()), machine_s

    def close(self) -> Leaks:
        """Remove temporary files and kill remaining processes; returns what was left behind."""
        if self.proxies is not None:
            self.proxies.close()
        left = still_running(self._used_s, timeout_s=STILL_RUNNING_S)
        processes = tuple(described(left))
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        files = tuple(sorted(str(path) for path in self._temporary.iterdir()))
        shared = tuple(sorted(_shared_memory() - self._shared_memory_before))
        shutil.rmtree(self._temporary, ignore_errors=True)
        return Leaks(processes=processes, files=files, shared_memory=shared)


def _shared_memory() -> set[str]:
    """Named shared memory segments of this program."""
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return set()
    return {str(path) for path in folder.iterdir() if "shoal" in path.name}


def _used_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


HOOK = '''\
"""Shifts time.time() by the seconds in the file SHOAL_CHAOS_CLOCK (tests.chaos.workspace)."""
import os
import time

_path = os.environ.get("SHOAL_CHAOS_CLOCK")
if _path:
    _true, _true_ns, _monotonic = time.time, time.time_ns, time.monotonic
    _read_at, _offset = -1.0, 0.0

    def _off():
        global _read_at, _offset
        now = _monotonic()
        if now - _read_at > 0.2:
            _read_at = now
            try:
                with open(_path, encoding="ascii") as file:
                    _offset = float(file.read() or 0.0)
            except (OSError, ValueError):
                pass
        return _offset

    time.time = lambda: _true() + _off()
    time.time_ns = lambda: _true_ns() + int(1e9 * _off())
'''


def write_hook(folder: Path) -> None:
    """Write a module into a folder on ``PYTHONPATH`` that makes ``time.time`` of a process wrong.

    Setting the machine's clock needs root. Monotonic clocks stay right, as on a machine whose clock
    is set.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(HOOK, encoding="utf-8")


def set_clock(path: Path, offset_s: float) -> None:
    """Shift the clock of all processes that use this file, within a fraction of a second."""
    write_whole(path, str(offset_s).encode())
