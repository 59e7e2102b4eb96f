"""The facts about the run that an agent sends to its trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from peer.agent.local_peer import TrainerStatus
from peer.agent.online_peer import OnlinePeer
from peer.bridge.messages import Facts, Other, Value

OTHERS_MAX = 16
"""Number of other peers in the facts, for the trainer's screen."""


def facts_of(online: OnlinePeer, trainer: TrainerStatus) -> Facts:
    """The run as this peer sees it now."""
    local, guest = online.local, online.local.guest
    stats, live = local.averaging.stats, local.live_peers
    merged_tokens = local.merged_tokens()
    rows = online.peer_rows()
    others_train = any(seen.trains for seen in live)
    return Facts(
        peer_id=local.me,
        link=online.link(),
        merged_tokens=merged_tokens,
        # Own work that is not merged yet is part of the run; of a lone peer it is all.
        global_tokens=merged_tokens + trainer.pending_tokens,
        versions=local.versions(),
        peers=1 + len(live),
        held_out=local.held_out.newest,
        fates=dict(trainer.fates),
        rounds=stats.rounds,
        rounds_missed=local.rounds_missed,
        bytes_sent=guest.sent_bytes,
        bytes_received=guest.received_bytes,
        synchronous=local.phase == "ready" and others_train,
        rest=trainer.rest,
        amended=local.amended,
        gone_back=local.gone_back,
        cpu_share=guest.limits.share(accelerated=False),
        accelerator_share=guest.limits.share(accelerated=True),
        threads=guest.limits.threads,
        inner_bytes=guest.disk.inner,
        limits=guest.words(),
        others=tuple(
            Other(
                name=row["name"],
                state=row["state"],
                step_time_s=row.get("step_time_s"),
                version=row.get("version"),
                share=row["share"],
                behind=row["behind"],
                last=row["last"] or "",
            )
            for row in [row for row in rows if not row["you"]][:OTHERS_MAX]
        ),
        share=next(row["share"] for row in rows if row["you"]),
        processor_share=guest.processor_share,
        in_flight=local.in_flight(),
        staleness=trainer.staleness,
        last=local.offer_outcomes.get(local.me, ""),
        others_train=others_train,
        alone_until=local.alone_until,
    )


def event_value(value: Any) -> Value:
    """A field of an event, as a message can carry it."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, list | tuple) and all(isinstance(v, str | int | float) for v in value):
        return list(value)
    if isinstance(value, Mapping):
        return [f"{key}: {each}" for key, each in value.items()]
    return str(value)
