"""Swarms that a test leaves open are closed: each has an event loop and tasks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.averaging.virtual.swarm import open_swarms


@pytest.fixture(autouse=True)
def _closed_swarms() -> Iterator[None]:
    yield
    while open_swarms:
        open_swarms[-1].close()
