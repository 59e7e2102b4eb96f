"""Event logs of several peers as one timeline.

Peers' clocks differ. Rounds that two logs have in common show the difference, and the times of all
but the first log are shifted by it. Damaged lines are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, TypeGuard

from peer.events.sentences import Fields
from peer.events.table import OPENED

CLOCK_OFF_MIN_S = 1.0
"""Smaller offsets are not corrected: peers see the end of a round at slightly different moments."""

AT_MAX = 2.0**33
"""Latest accepted Unix time, in the 23rd century; ``datetime`` fails on much later ones."""


@dataclass(frozen=True, slots=True)
class Log:
    """One peer's events, oldest first."""

    peer: str
    """Id of the peer; the path of the log where its first line has no id."""
    name: str
    events: tuple[Fields, ...]
    clock_off_s: float = 0.0
    """Seconds added to the times of this log, to agree with the first one."""


def read_logs(events: Iterable[Fields], *, place: str) -> list[Log]:
    """The logs in one file: one for each peer that has written it, as the key of a folder changes
    with its key file. ``place`` is the name of one that does not say who it is."""
    owners: dict[str, str] = {}
    written: dict[str, list[Fields]] = {}
    early: list[Fields] = []
    mine = early
    for event in filter(_is_whole, events):
        if event["event"] == OPENED:
            peer = str(event.get("peer") or place)
            owners[peer] = str(event.get("name") or place)
            mine = written.setdefault(peer, [])
        mine.append(event)
    if early:
        # Files are deleted whole, so this is one whose first line was damaged.
        first = next(iter(owners), place)
        written[first] = [*early, *written.get(first, ())]
    return [Log(peer, owners.get(peer, place), tuple(own)) for peer, own in written.items()]


def aligned(logs: Sequence[Log]) -> list[Log]:
    """The logs, with the clocks of all but the first corrected by the rounds in common."""
    if not logs:
        return []
    done = [logs[0]]
    known = _round_times(logs[0])
    for log in logs[1:]:
        own = _round_times(log)
        apart = [known[round_id] - at for round_id, at in own.items() if round_id in known]
        off_s = median(apart) if apart else 0.0
        if abs(off_s) < CLOCK_OFF_MIN_S:
            off_s = 0.0
        moved = tuple({**event, "at": event["at"] + off_s} for event in log.events)
        done.append(replace(log, events=moved, clock_off_s=off_s))
        for round_id, at in own.items():
            known.setdefault(round_id, at + off_s)
    return done


def timeline(logs: Sequence[Log]) -> list[tuple[Log, Fields]]:
    """All events of all logs in the order of their times."""
    pairs = [(log, event) for log in logs for event in log.events]
    return sorted(pairs, key=lambda pair: (pair[1]["at"], pair[0].peer))


def _round_times(log: Log) -> dict[str, float]:
    return {
        event["round"]: event["at"]
        for event in log.events
        if event["event"] == "round" and event["outcome"] == "finished"
    }


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


_OF_A_ROUND: Mapping[str, type | tuple[type, ...]] = {
    "round": str,
    "fragment": int,
    "version": int,
    "outcome": str,
    "seconds": (int, float),
    "reason": str,
    "left_out": Mapping,
    "members": list,
    "contributors": list,
}


def _is_whole(event: Fields) -> bool:
    """``True`` if a line has the fields that stories read without a check."""
    at, name = event.get("at"), event.get("event")
    if not (_is_number(at) and 0 <= at < AT_MAX and isinstance(name, str)):
        return False
    return name != "round" or all(
        isinstance(event.get(key), kind) for key, kind in _OF_A_ROUND.items()
    )
