"""Facts of a run beside its parameters: who took part, and its held-out losses.

A name that a peer was given by default has a part of its machine's name in it, and nobody agreed
to have it published: such peers are counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from averaging.history.merged_map import MergedMap
from dht.identity import PeerId
from peer.bridge.settings import is_default
from peer.contributors import Contributor
from peer.installed import extras
from peer.joining.visit import RunStatus
from peer.storage.outer_state import OuterState
from peer.views.event_log import read_events

EVENTS = "events.jsonl"
MEASURED_MAX = 24


@dataclass(frozen=True, slots=True)
class Measured:
    """A held-out loss in nats per token, at a version of the first fragment."""

    version: int
    loss: float
    tokens: int
    """Merged tokens of the run when it was measured."""
    at: datetime | None = None


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Facts of a run that neither its run file nor its parameters contain."""

    names: tuple[str, ...] = ()
    """Chosen names of peers whose work is in the parameters, sorted."""
    others: int = 0
    """Number of such peers without a chosen name that is known."""
    measured: tuple[Measured, ...] = ()
    """Held-out losses, oldest first."""
    contributors: tuple[Contributor, ...] = ()
    """All whose work is merged, the largest first; empty if no tally is known."""


def facts_in_folder(folder: Path, outer: OuterState) -> RunFacts:
    """The facts in the event log of a peer's folder."""
    names: dict[str, str] = {}
    measured: dict[int, Measured] = {}
    for event in read_events(folder / EVENTS):
        peer, name = event.get("peer"), event.get("name")
        if isinstance(peer, str) and isinstance(name, str):
            names[peer] = name
        if event.get("event") == "measured" and (one := _measured(event)) is not None:
            measured[one.version] = one
    rows: list[Contributor] = []
    for credit in extras("credit.reading"):
        rows = credit.contributors_in(folder, outer.run.run_id)
    return _facts(outer, names, [measured[version] for version in sorted(measured)], rows)


def _measured(event: Mapping[str, object]) -> Measured | None:
    match event:
        case {
            "version": int(version),
            "loss": float(loss),
            "tokens": int(tokens),
            "at": int() | float() as at,
        }:
            return Measured(version, loss, tokens, datetime.fromtimestamp(at, UTC))
    return None


def facts_of_peers(seen: RunStatus, outer: OuterState) -> RunFacts:
    """The facts that peers on line report."""
    names = {peer.peer: peer.name for peer in seen.peers}
    names |= {peer: silent.name for peer, silent in seen.silent.items()}
    newest = seen.held_out
    measured = [] if newest is None else [Measured(newest.version, newest.loss, newest.tokens)]
    return _facts(outer, names, measured, seen.contributors)


def _facts(
    outer: OuterState,
    names: Mapping[str, str],
    measured: Iterable[Measured],
    rows: Iterable[Contributor],
) -> RunFacts:
    merged = MergedMap()
    for state in outer.states:
        merged = merged.united(state.merged)
    worked = {peer for peer, mark in merged.items() if mark.tokens}
    chosen = {peer: name for peer, name in names.items() if not is_default(name, PeerId(peer))}
    known = sorted(peer for peer in worked if peer in chosen)
    return RunFacts(
        tuple(sorted(chosen[peer] for peer in known)),
        len(worked) - len(known),
        tuple(measured),
        tuple(rows),
    )


def spread(measured: tuple[Measured, ...], count: int = MEASURED_MAX) -> tuple[Measured, ...]:
    """Return at most ``count`` measurements, evenly spaced, with the first and the newest."""
    if len(measured) <= count:
        return measured
    last = len(measured) - 1
    return tuple(measured[round(index * last / (count - 1))] for index in range(count))
