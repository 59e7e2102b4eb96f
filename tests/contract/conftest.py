"""Runs each test of this folder that takes a ``world`` in memory, on real daemons, and with the
direct lane beside them.

On real daemons they are ``slow``, but for those that ``essential`` marks; with the lane all are.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tests.contract.worlds import HivemindWorld, LaneWorld, MemoryWorld, World


@pytest.fixture
def runner(world: World) -> Callable[[Coroutine[Any, Any, None]], object]:
    return world.run


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "world" in metafunc.fixturenames:
        marks = () if getattr(metafunc.function, "essential", False) else (pytest.mark.slow,)
        worlds = [
            pytest.param(MemoryWorld(), id="memory"),
            pytest.param(HivemindWorld(), id="hivemind", marks=marks),
            pytest.param(LaneWorld(), id="lane", marks=pytest.mark.slow),
        ]
        metafunc.parametrize("world", worlds)
