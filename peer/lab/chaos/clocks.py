"""Wrong clocks: processes whose ``time.time`` is off by the number of seconds in a file.

Setting the machine's clock needs root. Instead, the processes of a learner get a folder with a
``sitecustomize`` module on their path, which Python imports at its start. Monotonic clocks stay
right, as on a machine whose clock is set.
"""

from __future__ import annotations

from pathlib import Path

from dht.whole_files import write_whole

HOOK = '''\
"""Shifts time.time() by the seconds in the file SHOAL_CHAOS_CLOCK (peer.lab.chaos.clocks)."""
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
    """Write the module into a folder, which then belongs on ``PYTHONPATH``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(HOOK, encoding="utf-8")


def set_clock(path: Path, offset_s: float) -> None:
    """Shift the clock of all processes that use this file, within a fraction of a second."""
    write_whole(path, str(offset_s).encode())
