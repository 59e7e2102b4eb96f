"""Runs each test of this folder that takes a ``world`` in memory and on real daemons.

On real daemons they are ``slow``, but for those that ``essential`` marks.
"""

from __future__ import annotations

import pytest

from tests.contract.worlds import HivemindWorld, MemoryWorld


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "world" in metafunc.fixturenames:
        marks = () if getattr(metafunc.function, "essential", False) else (pytest.mark.slow,)
        worlds = [
            pytest.param(MemoryWorld(), id="memory"),
            pytest.param(HivemindWorld(), id="hivemind", marks=marks),
        ]
        metafunc.parametrize("world", worlds)
