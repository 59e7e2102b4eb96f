"""Seeds of storms: a few in every run of the tests, the rest in `make soak`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

soak_may_run = True
"""Whether this run of pytest may select soak tests, as ``tests/conftest.py`` finds out. Otherwise
their seeds are not collected: they were 5800 of 15000 items, in each worker."""


def seeds(default: int, *, soak: int, step: int = 1) -> list[Any]:
    """Seeds to parametrize with: those below ``default`` in every run, those below ``soak`` in
    soak tests. With a ``step``, the first of each so many, for a test that runs ``step`` storms.
    """
    rest = range(default, soak if soak_may_run else default, step)
    return [*range(0, default, step), *(pytest.param(n, marks=pytest.mark.soak) for n in rest)]


def all_that_happens(
    storm: Callable[[int], Counter[str]], *, first: int, count: int
) -> Counter[str]:
    """Run ``count`` storms and add up what they count. An error names its seed."""
    happened: Counter[str] = Counter()
    for seed in range(first, first + count):
        try:
            happened += storm(seed)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
    return happened
