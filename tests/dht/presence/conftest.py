"""A swarm for each test that asks for one; what is left of it is closed at the end."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from dht.memory import virtual_loop
from tests.dht.presence.presence_swarm import Swarm


@pytest.fixture
def swarm() -> Swarm:
    return Swarm()


@pytest.fixture
def runner(swarm: Swarm) -> Callable[[Coroutine[Any, Any, None]], object]:
    async def whole(test: Coroutine[Any, Any, None]) -> None:
        await test
        await swarm.stop_all()

    return lambda test: virtual_loop.run(whole(test))
