"""The mean over seeds with its standard error, and how both are written in a table."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mean:
    """Mean of a few samples with its standard error (0, and not shown, for a single sample)."""

    value: float
    error: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Mean:
        found = list(values)
        error = statistics.stdev(found) / math.sqrt(len(found)) if len(found) > 1 else 0.0
        return cls(statistics.fmean(found), error)

    def text(self, digits: int, *, per: float = 1.0) -> str:
        error = f" ±{self.error / per:.{digits}f}" if self.error else ""
        return f"{self.value / per:.{digits}f}{error}"

    def percent(self, digits: int = 1) -> str:
        error = f" ±{100 * self.error:.{digits}f}" if self.error else ""
        return f"{100 * self.value:+.{digits}f}%{error}"
