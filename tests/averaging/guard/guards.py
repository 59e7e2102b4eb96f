"""The guard of a live averager, with its parts."""

from __future__ import annotations

from averaging.guard.door import WholeGuard
from averaging.live.averager import Averager


def whole(averager: Averager) -> WholeGuard:
    assert isinstance(averager.guard, WholeGuard)
    return averager.guard
