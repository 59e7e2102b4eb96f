"""An agent's local page: is it in the run, its figures for Prometheus, and what people see."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from averaging.history.merged_map import Mark
from dht.identity import PeerId
from dht.membership.table import Member
from dht.records import unpack_versions
from peer.status import Status
from peer.views.board import Board
from peer.views.pages import Check


def checks(status: Status) -> Sequence[Check]:
    """What has to be right before this peer is of use to the run."""
    met = status.peers > 1
    return (
        Check(
            "in_the_run",
            status.phase == "ready",
            "it has the run's parameters" if status.phase == "ready" else f"still {status.phase}",
        ),
        Check(
            "peers",
            True,  # a run of one peer is a run
            f"{status.peers - 1} others are live" if met else "nobody else is here; it trains on",
        ),
    )


def figures(status: Status) -> Iterator[Metric]:
    """Everything in ``status`` that is a number, under names that begin with shoal_."""
    for name, value, text in (
        ("peers", status.peers, "Live peers of the run, this one included"),
        ("staleness_versions", status.staleness, "Versions that the trainer is behind, at most"),
        ("step_seconds", status.step_time_s, "Median time of a step"),
        ("loss", status.loss, "The last training loss"),
        ("held_out_loss", None if status.held_out is None else status.held_out.loss, "Newest"),
    ):
        if value is not None:
            yield GaugeMetricFamily(f"shoal_{name}", text, value=float(value))
    resting = float(status.rest is not None)
    yield GaugeMetricFamily("shoal_resting", "1: its owner wants no steps now", value=resting)
    for name, count, text in (
        ("steps", status.steps, "Optimizer steps since the trainer started"),
        ("rounds", status.rounds, "Rounds finished"),
        ("rounds_missed", status.rounds_missed, "Rounds that closed without this peer's work"),
        ("sent_bytes", status.bytes_sent, "Bytes of rounds sent"),
        ("received_bytes", status.bytes_received, "Bytes of rounds received"),
        ("blocked_seconds", status.blocked_s, "Time that the trainer was held up"),
        ("global_tokens", status.global_tokens, "Tokens that the run has trained on"),
    ):
        yield CounterMetricFamily(f"shoal_{name}", text, value=float(count))
    versions = GaugeMetricFamily("shoal_version", "Version of each fragment", labels=["fragment"])
    for fragment, version in enumerate(status.versions):
        versions.add_metric([str(fragment)], version)
    yield versions
    tokens = GaugeMetricFamily("shoal_tokens", "This peer's tokens by their fate", labels=["fate"])
    for name, amount in sorted(status.fates.items()):
        tokens.add_metric([name], amount)
    yield tokens


SCHEMA = 1
"""Of ``/state.json``. Fields are added to it, never changed."""

GONE_MAX = 32
"""Peers that have left are shown as long as they are among the largest contributors."""


def content(
    status: Status,
    board: Board,
    *,
    run_id: str,
    run_name: str,
    rest: str | None,
    limits: Sequence[str],
    tokens_goal: int | None,
    link: str,
    members: Iterable[Member],
    merged: Mapping[PeerId, Mark],
    last_offers: Mapping[PeerId, str],
    in_flight: Sequence[str],
    now: float,
    wall_time: float,
) -> dict[str, Any]:
    """What the page shows. ``now`` is of the clock on which members were seen."""
    held_out = None if status.held_out is None else status.held_out.loss
    blocked = status.blocked_s / status.up_s if status.up_s > 0 else 0.0
    return {
        "schema": SCHEMA,
        "kind": status.role,
        "now": wall_time,
        "title": run_name,
        "run": run_id,
        "phase": status.phase if rest is None else rest,
        "resting": rest is not None,
        "limits": list(limits),
        "who": f"{status.name}, {status.role}, step {status.steps}",
        "link": link if "?" in link else None,
        "fragments": len(status.versions),
        "figures": {
            "loss": status.loss,
            "held_out_loss": held_out,
            "global_tokens": status.global_tokens,
            "tokens_goal": tokens_goal,
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
        },
        "in_flight": list(in_flight),
        "peers": peer_rows(status, members, merged, board.names, last_offers, now=now),
        **board.plain(),
    }


def peer_rows(
    status: Status,
    members: Iterable[Member],
    merged: Mapping[PeerId, Mark],
    names: Callable[[str], str],
    last_offers: Mapping[PeerId, str],
    *,
    now: float,
) -> list[dict[str, Any]]:
    """This peer, the others, and those who are gone but whose work is in the model."""
    tokens = {peer: mark.tokens for peer, mark in merged.items()}
    total = sum(tokens.values()) or 1
    rows: list[dict[str, Any]] = [
        {
            "peer": status.peer,
            "name": status.name,
            "you": True,
            "role": status.role,
            "state": status.phase if status.phase != "ready" else _doing(status.role, True),
            "step_time_s": status.step_time_s or None,
            "version": min(status.versions) if status.versions else None,
            "rounds": status.rounds,
            "bytes_sent": status.bytes_sent,
            "seen_s": None,
        }
    ]
    for member in members:
        record = member.record
        try:
            versions = unpack_versions(record.versions)
        except ValueError:  # his claim; a page is no reason to mind
            versions = ()
        rows.append(
            {
                "peer": member.peer,
                "name": record.name or member.peer[-6:],
                "you": False,
                "role": record.role,
                "state": _doing(record.role, record.trains),
                "step_time_s": record.step_time_s,
                "version": min(versions) if versions else None,
                "rounds": record.counters.rounds,
                "bytes_sent": record.counters.bytes_sent,
                "seen_s": max(0.0, now - member.last_sign_at),
            }
        )
    here = {row["peer"] for row in rows}
    gone = sorted((peer for peer in tokens if peer not in here), key=lambda peer: -tokens[peer])
    rows += [
        {"peer": peer, "name": names(peer), "you": False, "role": None, "state": "gone"}
        for peer in gone[:GONE_MAX]
    ]
    newest = max((row["version"] for row in rows if row.get("version") is not None), default=0)
    for row in rows:
        version = row.get("version")
        row["behind"] = None if version is None else newest - version
        row["last"] = last_offers.get(row["peer"])
        row["tokens"] = tokens.get(row["peer"])
        row["share"] = tokens.get(row["peer"], 0) / total
    return sorted(rows, key=lambda row: (-row["share"], row["name"]))


def _doing(role: str, trains: bool) -> str:
    if role != "learner":
        return role
    return "training" if trains else "not training"
