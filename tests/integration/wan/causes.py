"""Causes of a phase's extra bytes and of its missed member-rounds, from the peers' event logs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

Events = Sequence[Mapping[str, Any]]

CAUSES = ("too_late", "turned_away", "passed_over", "declined", "upload_refused", "behind")
"""Events of a peer that tell why it is not in a round, and those after which it was not ready."""


def sent_for(logs: Iterable[Events], began: float, ended: float) -> Counter[str]:
    """Bytes on the line that all peers sent in a period, by purpose.

    Each round's event tells the bytes so far; between two of them they grow evenly.
    """
    found: Counter[str] = Counter()
    for log in logs:
        told = [(event["at"], event["sent_for"]) for event in log if "sent_for" in event]
        times = [at for at, _ in told]
        for purpose in {each for _, counts in told for each in counts}:
            sizes = [counts.get(purpose, 0) for _, counts in told]
            before, after = np.interp([began, ended], times, sizes)
            found[purpose] += round(after - before)
    return found


def why_missed(log: Events, fragment: int, since: float, at: float) -> str:
    """Return the last event by which a peer was not in a round of a fragment.

    ``since``, ``at``: the ends of the round before and of this one.
    """
    causes = [
        event["event"]
        for event in log
        if event["event"] in CAUSES
        and event.get("fragment") == fragment
        and since < event["at"] < at
    ]
    return causes[-1] if causes else "no join"
