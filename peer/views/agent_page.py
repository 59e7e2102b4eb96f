"""The page of a learner or keeper: checks, figures for Prometheus, and content for people."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from averaging.history.merged_map import Mark
from dht.identity import PeerId
from dht.membership.table import Member
from dht.records import unpack_versions
from peer.events.board import Board
from peer.quantities import fates_text, plural, rounded_shares
from peer.status import FIGURES, PeerRow, PeerStatus, merges_alone_from, state_in_words
from peer.views.pages import Check


def checks(status: PeerStatus) -> Sequence[Check]:
    """The checks of ``/readyz``: whether this peer has the run's parameters."""
    others = status.peers - 1
    return (
        Check(
            "in_the_run",
            status.phase == "ready",
            "has the run's parameters" if status.phase == "ready" else f"still {status.phase}",
        ),
        Check(
            "peers",
            True,  # a run of one peer is a run
            plural(others, "other live peer") if others else "no other live peer; training goes on",
        ),
    )


def metrics(status: PeerStatus) -> Iterator[Metric]:
    """The figures of ``status`` that are numbers, with names that begin with ``shoal_``."""
    for name, figure in FIGURES.items():
        value, family = getattr(status, name), figure.family(name)
        kind = CounterMetricFamily if figure.counts else GaugeMetricFamily
        if figure.label:
            amounts = value.items() if isinstance(value, Mapping) else enumerate(value)
            metric = kind(family, figure.text, labels=[figure.label])
            for label, amount in amounts:
                metric.add_metric([str(label)], amount)
            yield metric
        elif isinstance(value, int | float):
            yield kind(family, figure.text, value=float(value))


SCHEMA = 1
"""Version of ``/state.json``. Fields are added, never changed."""

MORE = PeerId("")
"""Id of the row for all further peers that left."""

LOSS_SHOWN_MAX = 1e6
"""A larger loss that a peer tells of is left out: it would push other columns off the screen."""
GONE_MAX = 32
"""Peers that left and are shown, the largest contributors first."""


def content(
    status: PeerStatus,
    board: Board,
    rows: Sequence[PeerRow],
    *,
    run_id: str,
    run_name: str,
    wall_time: float,
) -> dict[str, Any]:
    """Content of the page, for ``/state.json``."""
    learns = status.role == "learner"
    return {
        "schema": SCHEMA,
        "kind": status.role,
        "now": wall_time,
        "title": run_name,
        "run": run_id,
        "phase": status.rest or status.phase,
        "state": status.state,
        "resting": status.resting,
        "limits": list(status.limits),
        "orders": list(status.orders),
        "merging": status.merging,
        "who": f"{status.name}, {status.role}" + (f", step {status.steps}" if learns else ""),
        "link": status.link or None,
        "ended_at": status.ended_at,
        "fragments": len(status.versions),
        "figures": {
            **status.figures(),
            "fates_text": fates_text(status.fates) if learns else None,
        },
        "in_flight": list(status.in_flight),
        "alone": None if status.alone_until is None else merges_alone_from(status.alone_until),
        "peers": [msgspec.structs.asdict(row) for row in rows],
        **board.plain(),
    }


def peer_rows(
    status: PeerStatus,
    live: Sequence[PeerRow],
    merged: Mapping[PeerId, Mark],
    offers: Mapping[PeerId, str],
    names: Callable[[str], str],
) -> list[PeerRow]:
    """Rows of this peer, of live peers, and of peers that left but have merged tokens.

    ``merged``: the marks in the states, which have the tokens of every contributor. ``offers``: the
    results of the peers' last offers, in words.
    """
    tokens = {peer: mark.tokens for peer, mark in merged.items()}
    rows = [_own_row(status), *live]
    here = {row.peer for row in rows}
    gone = sorted((peer for peer in tokens if peer not in here), key=lambda peer: -tokens[peer])
    rows += [PeerRow(peer=peer, name=names(peer), state="gone") for peer in gone[:GONE_MAX]]
    if more := gone[GONE_MAX:]:
        tokens[MORE] = sum(tokens[peer] for peer in more)
        rows.append(PeerRow(peer=MORE, name=plural(len(more), "other"), state="gone"))
    newest = max((row.version for row in rows if row.version is not None), default=0)
    counts = [tokens.get(PeerId(row.peer)) for row in rows]
    per_mille = rounded_shares([count or 0 for count in counts], whole=1000)
    rows = [
        msgspec.structs.replace(
            row,
            behind=None if row.version is None else newest - row.version,
            last=offers.get(PeerId(row.peer)),
            tokens=count,
            share=share / 1000 if any(per_mille) else None,
        )
        for row, count, share in zip(rows, counts, per_mille, strict=True)
    ]
    return sorted(rows, key=lambda row: (-(row.tokens or 0), row.name))


def _own_row(status: PeerStatus) -> PeerRow:
    return PeerRow(
        peer=status.peer,
        name=status.name,
        you=True,
        role=status.role,
        state=status.state,
        steps=status.steps,
        step_time_s=status.step_time_s or None,
        loss=status.loss,
        version=min(status.versions, default=None),
        rounds=status.rounds,
        bytes_sent=status.bytes_sent,
    )


def row_of(member: Member, told: tuple[int, float | None] | None, now: float) -> PeerRow:
    """The row of a live member. ``told``: its steps and its loss, as it told them last."""
    record = member.record
    versions = unpack_versions(record.versions)
    steps, loss = told or (None, None)
    if loss is not None and not abs(loss) <= LOSS_SHOWN_MAX:
        loss = None
    return PeerRow(
        peer=member.peer,
        name=record.name or member.peer[-6:],
        role=record.role,
        state=state_in_words(
            record.role,
            "ready" if record.versions and not record.arrives else "connecting",
            rests=not record.trains,
        ),
        steps=steps or None,
        step_time_s=record.step_time_s,
        loss=loss,
        version=min(versions, default=None),
        rounds=record.counters.rounds,
        bytes_sent=record.counters.bytes_sent,
        seen_s=max(0.0, now - member.last_sign_at),
    )
