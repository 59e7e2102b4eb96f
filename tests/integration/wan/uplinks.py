"""The use of uplinks while something is uploaded, from the counters of the lines.

Over a whole run an uplink cannot be used by more than what the rounds have to send. While an
exchange is under way it can be full: a quarter of a second in which more than a tenth of the line
was used counts as part of an upload, and so does a shorter pause between two of them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

from tests.swarms.hurt_internet import HurtInternet

EVERY_S = 0.25
USED_SHARE = 0.1
PAUSE_MAX_S = 0.5
"""Longer times without an upload are between two exchanges."""


@dataclass(frozen=True, slots=True)
class Uploading:
    """The use of one uplink."""

    time_share: float
    """Share of the time in which something was uploaded."""

    line_share: float
    """Share of the line that was used in that time; 0 without any."""

    @classmethod
    def of(cls, counts: Sequence[tuple[float, int]], bytes_per_s: float) -> Uploading:
        """``counts``: bytes that had been sent at each time."""
        spans = [
            (later - earlier, after - before)
            for (earlier, before), (later, after) in pairwise(counts)
        ]
        used = [size > USED_SHARE * bytes_per_s * seconds for seconds, size in spans]
        _close_pauses(used, [seconds for seconds, _ in spans])
        inside = [span for span, counted in zip(spans, used, strict=True) if counted]
        seconds, size = (sum(column) for column in zip(*inside, strict=True)) if inside else (0, 0)
        whole = sum(span[0] for span in spans)
        return cls(
            seconds / whole if whole else 0.0, size / seconds / bytes_per_s if seconds else 0.0
        )


def _close_pauses(used: list[bool], seconds: Sequence[float]) -> None:
    """Count short pauses between uploads as parts of them."""
    last = None
    for index, counted in enumerate(used):
        if not counted:
            continue
        if last is not None and sum(seconds[last + 1 : index]) <= PAUSE_MAX_S:
            used[last + 1 : index] = [True] * (index - last - 1)
        last = index


@contextmanager
def watched(net: HurtInternet) -> Iterator[list[tuple[float, Mapping[str, int]]]]:
    """Times, and the bytes that had arrived from each site, as long as the block runs."""
    seen: list[tuple[float, Mapping[str, int]]] = []
    over = threading.Event()

    def watch() -> None:
        while not over.wait(EVERY_S):
            seen.append((time.monotonic(), net.arrived_bytes()))

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield seen
    finally:
        over.set()
        watching.join()
