"""The page of a learner or keeper: checks, figures for Prometheus, and content for people."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from averaging.history.merged_map import Mark
from dht.identity import PeerId
from dht.membership.table import Member
from dht.records import unpack_versions
from peer.bridge.messages import Device
from peer.events.board import Board
from peer.quantities import fates_text, plural, rounded_shares
from peer.status import Status, merges_alone_from, state_in_words
from peer.views.pages import Check


def checks(status: Status) -> Sequence[Check]:
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


def figures(status: Status) -> Iterator[Metric]:
    """The numbers of ``status`` as metrics, with names that begin with ``shoal_``."""
    held_out_loss, held_out_tokens = _held_out(status)
    for name, value, text in (
        ("peers", status.peers, "Live peers of the run, this one included"),
        (
            "staleness_versions",
            status.staleness,
            "Versions that the trainer is behind, at most",
        ),
        ("step_seconds", status.step_time_s, "Median duration of a step"),
        ("loss", status.loss, "Last training loss"),
        ("held_out_loss", held_out_loss, "Newest held-out loss known"),
        ("held_out_tokens", held_out_tokens, "Merged tokens of all peers when it was measured"),
    ):
        if value is not None:
            yield GaugeMetricFamily(f"shoal_{name}", text, value=float(value))
    resting = float(status.rest is not None)
    yield GaugeMetricFamily("shoal_resting", "1: training rests, by the limits", value=resting)
    if status.cycle_steps:
        text = "Steps in which every fragment is merged once"
        yield GaugeMetricFamily("shoal_cycle_steps", text, value=float(status.cycle_steps))
    for name, count, text in (
        ("steps", status.steps, "Optimizer steps since the trainer started"),
        ("rounds", status.rounds, "Finished rounds"),
        ("rounds_missed", status.rounds_missed, "Finished rounds without this peer's work"),
        ("sent_bytes", status.bytes_sent, "Bytes sent since the start"),
        ("received_bytes", status.bytes_received, "Bytes received since the start"),
        ("blocked_seconds", status.blocked_s, "Time that rounds blocked the trainer"),
        ("global_tokens", status.global_tokens, "Merged tokens of all peers"),
        ("relayed_bytes", status.relayed_bytes, "Bulk data passed on between other peers"),
        ("jumps_judged", status.jumps_judged, "States of others judged by their held-out loss"),
        ("jumps_refused", status.jumps_refused, "States of others that raised it, taken back"),
    ):
        yield CounterMetricFamily(f"shoal_{name}", text, value=float(count))
    versions = GaugeMetricFamily("shoal_version", "Version of each fragment", labels=["fragment"])
    for fragment, version in enumerate(status.versions):
        versions.add_metric([str(fragment)], version)
    yield versions
    paths = GaugeMetricFamily("shoal_paths", "Peers by path of bulk data", labels=["path"])
    for name in ("direct", "punched", "relayed"):
        paths.add_metric([name], status.paths.get(name, 0))
    yield paths
    tokens = GaugeMetricFamily("shoal_tokens", "Tokens of this peer by fate", labels=["fate"])
    for name, amount in sorted(status.fates.items()):
        tokens.add_metric([name], amount)
    yield tokens


def _held_out(status: Status) -> tuple[float | None, int | None]:
    """The newest held-out loss, and the run's tokens when it was measured."""
    newest = status.held_out
    return (None, None) if newest is None else (newest.loss, newest.tokens)


SCHEMA = 1
"""Version of ``/state.json``. Fields are added, never changed."""

MORE = PeerId("")
"""Id of the row for all further peers that left."""

GONE_MAX = 32
"""Peers that left and are shown, the largest contributors first."""


@dataclass(frozen=True, slots=True)
class KnownPeers:
    """The other peers of the run, as this peer knows them."""

    members: Sequence[Member]
    """Live members."""
    merged: Mapping[PeerId, Mark]
    """Marks in the states, which have the tokens of every contributor."""
    offer_outcomes: Mapping[PeerId, str]
    """Results of the peers' last offers, in words."""
    now: float
    """Time on the clock of ``Member.last_sign_at``."""


@dataclass(frozen=True, slots=True)
class OwnState:
    """This peer's state, apart from its ``Status``."""

    link: str
    tokens_goal: int | None
    """Tokens after which the run ends."""
    rest: str | None
    """The reason why training rests; ``None`` if it does not."""
    limits: Sequence[str]
    orders: Sequence[str]
    """Orders of the run's owner in words, and the number of those that it bans."""
    in_flight: Sequence[str]
    """Fragments with the current activity, in words."""
    processor_share: float | None
    device: Device | None
    time_left_s: float | None


def content(
    status: Status,
    board: Board,
    peers: KnownPeers,
    own: OwnState,
    *,
    run_id: str,
    run_name: str,
    wall_time: float,
) -> dict[str, Any]:
    """Content of the page, for ``/state.json``."""
    held_out_loss, held_out_tokens = _held_out(status)
    blocked = status.blocked_s / status.up_s if status.up_s > 0 else 0.0
    device = own.device
    rows = peer_rows(status, peers, board.names)
    return {
        "schema": SCHEMA,
        "kind": status.role,
        "now": wall_time,
        "title": run_name,
        "run": run_id,
        "phase": status.phase if own.rest is None else own.rest,
        "state": _own_state(status),
        "resting": own.rest is not None,
        "limits": list(own.limits),
        "orders": list(own.orders),
        "merging": status.merging,
        "who": f"{status.name}, {status.role}"
        + (f", step {status.steps}" if status.role == "learner" else ""),
        "link": own.link or None,
        "ended_at": status.ended_at,
        "fragments": len(status.versions),
        "figures": {
            "loss": status.loss,
            "held_out_loss": held_out_loss,
            "held_out_tokens": held_out_tokens,
            "global_tokens": status.global_tokens,
            "tokens_goal": own.tokens_goal,
            "peers": status.peers,
            "steps": status.steps,
            "step_time_s": status.step_time_s,
            "rounds": status.rounds,
            "rounds_missed": status.rounds_missed,
            "bytes_sent": status.bytes_sent,
            "bytes_received": status.bytes_received,
            "blocked_fraction": blocked if status.role == "learner" else None,
            "staleness": status.staleness,
            "versions": list(status.versions),
            "fates": dict(status.fates),
            "fates_text": fates_text(status.fates) if status.role == "learner" else None,
            "tokens_per_s": status.tokens / status.steps / status.step_time_s
            if status.steps and status.step_time_s
            else None,
            "time_left_s": own.time_left_s,
            "processor_share": own.processor_share,
            "share_of_peak": None if device is None else device.share_of_peak,
            "device_bytes": None if device is None else device.memory_bytes,
            "temperature_c": None if device is None else device.temperature_c,
        },
        "in_flight": list(own.in_flight),
        "alone": None if status.alone_until is None else merges_alone_from(status.alone_until),
        "peers": rows,
        **board.plain(),
    }


def peer_rows(
    status: Status, peers: KnownPeers, names: Callable[[str], str]
) -> list[dict[str, Any]]:
    """Rows of this peer, of live peers, and of peers that left but have merged tokens."""
    tokens = {peer: mark.tokens for peer, mark in peers.merged.items()}
    total = sum(tokens.values())
    rows = [_own_row(status), *(_row(member, peers.now) for member in peers.members)]
    here = {row["peer"] for row in rows}
    gone = sorted((peer for peer in tokens if peer not in here), key=lambda peer: -tokens[peer])
    rows += [
        {"peer": peer, "name": names(peer), "you": False, "role": None, "state": "gone"}
        for peer in gone[:GONE_MAX]
    ]
    if more := gone[GONE_MAX:]:
        tokens[MORE] = sum(tokens[peer] for peer in more)
        name = plural(len(more), "other")
        rows.append({"peer": MORE, "name": name, "you": False, "role": None, "state": "gone"})
    newest = max((row["version"] for row in rows if row.get("version") is not None), default=0)
    for row in rows:
        version = row.get("version")
        row["behind"] = None if version is None else newest - version
        row["last"] = peers.offer_outcomes.get(row["peer"])
        row["tokens"] = tokens.get(row["peer"])
        row["share"] = tokens.get(row["peer"], 0) / total if total else 0.0
    per_mille = rounded_shares([row["share"] for row in rows], whole=1000)
    for row, share in zip(rows, per_mille, strict=True):
        row["percent"] = share / 10 if total else None
    return sorted(rows, key=lambda row: (-row["share"], row["name"]))


def _own_row(status: Status) -> dict[str, Any]:
    return {
        "peer": status.peer,
        "name": status.name,
        "you": True,
        "role": status.role,
        "state": _own_state(status),
        "step_time_s": status.step_time_s or None,
        "version": min(status.versions) if status.versions else None,
        "rounds": status.rounds,
        "bytes_sent": status.bytes_sent,
        "seen_s": None,
    }


def _row(member: Member, now: float) -> dict[str, Any]:
    record = member.record
    versions = unpack_versions(record.versions)
    return {
        "peer": member.peer,
        "name": record.name or member.peer[-6:],
        "you": False,
        "role": record.role,
        "state": state_in_words(
            record.role,
            "ready" if record.trains or record.versions else "connecting",
            rests=not record.trains,
        ),
        "step_time_s": record.step_time_s,
        "version": min(versions) if versions else None,
        "rounds": record.counters.rounds,
        "bytes_sent": record.counters.bytes_sent,
        "seen_s": max(0.0, now - member.last_sign_at),
    }


def _own_state(status: Status) -> str:
    return state_in_words(status.role, status.phase, rests=status.rest is not None)
