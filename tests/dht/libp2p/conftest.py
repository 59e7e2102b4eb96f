"""Coroutines among the tests of this folder run on a real loop."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tests.integration import loopback


@pytest.fixture
def runner() -> Callable[[Coroutine[Any, Any, None]], object]:
    return loopback.run
