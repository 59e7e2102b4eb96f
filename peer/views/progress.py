"""Figures of this peer's own part in a run: records for ``--json``, and lines of text."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from peer.quantities import bytes_text, count_text, duration_text, fates_text, peers_text, plural
from peer.status import HeldOut, merges_alone_from
from peer.trainer.observed_run import Outcome, Speed, Stats

if TYPE_CHECKING:
    from peer.trainer.session import Run


def progress(run: Run) -> dict[str, Any]:
    """The record ``progress``, which ``--json`` prints once a second."""
    return {
        "event": "progress",
        "peer": run.peer_id,
        "loss": run.loss,
        **_held_out(run.held_out),
        "global_tokens": run.merged_tokens,
        "peers": run.peers,
        "alone_until": run.alone_until,
        "versions": list(run.versions),
        **asdict(run.speed),
        **_figures(run.stats),
    }


def done(outcome: Outcome) -> dict[str, Any]:
    """The record ``done``, which ``--json`` prints at the end."""
    return {
        "event": "done",
        "finished": outcome.finished,
        "stopped": outcome.stopped,
        "loss": outcome.loss,
        **_held_out(outcome.held_out),
        "global_tokens": outcome.global_tokens,
        "directory": str(outcome.directory),
        **_figures(outcome.stats),
    }


def _held_out(held_out: HeldOut | None) -> dict[str, float | None]:
    return {
        "held_out_loss": None if held_out is None else held_out.loss,
        "held_out_tokens": None if held_out is None else held_out.tokens,
    }


def _figures(stats: Stats) -> dict[str, Any]:
    return {
        "steps": stats.steps,
        "tokens": stats.tokens,
        "step_time_s": stats.step_time_s,
        "rounds": stats.rounds,
        "rounds_missed": stats.rounds_missed,
        "bytes_sent": stats.bytes_sent,
        "bytes_received": stats.bytes_received,
        "trained_s": stats.blocked.elapsed_s,
        "blocked_s": stats.blocked.total_s,
        "blocked_fraction": stats.blocked.fraction,
        "blocked_p99_ms": stats.blocked.p99_ms,
        "blocked_cpu_p99_ms": stats.blocked.cpu_p99_ms,
        "agent_restarts": stats.agent_restarts,
        "fates": dict(stats.fates),
    }


def progress_line(record: Mapping[str, Any]) -> str:
    """The record ``progress`` as a line of text."""
    loss = "-" if record["loss"] is None else f"{record['loss']:.3f}"
    until = record.get("alone_until")
    alone = "" if until is None else f"  alone: {merges_alone_from(until)}"
    return (
        f"step {record['steps']}  loss {loss}  {peers_text(record['peers'])}  "
        f"{count_text(record['global_tokens'])} tokens merged  {plural(record['rounds'], 'round')}"
        f"  sent {bytes_text(record['bytes_sent'])}  blocked {record['blocked_fraction']:.2%}"
        f"{''.join(f'  {text}' for text in speed_texts(_speed_of(record)))}{alone}"
    )


def _speed_of(record: Mapping[str, Any]) -> Speed:
    return Speed(**{field.name: record.get(field.name) for field in fields(Speed)})


def speed_texts(speed: Speed) -> list[str]:
    """The known figures of the speed, in words: ``425 k tokens/s (37% of peak)``."""
    texts = []
    if speed.tokens_per_s is not None:
        share = "" if speed.share_of_peak is None else f" ({speed.share_of_peak:.0%} of peak)"
        texts.append(f"{count_text(speed.tokens_per_s)} tokens/s{share}")
    if speed.time_left_s is not None:
        texts.append(f"{duration_text(speed.time_left_s)} left")
    if speed.next_merge_s is not None:
        texts.append(f"next merge in {duration_text(speed.next_merge_s)}")
    if speed.processor_share is not None:
        texts.append(f"{speed.processor_share:.0%} of the processors")
    if speed.device_bytes is not None:
        texts.append(f"{bytes_text(speed.device_bytes)} on the device")
    if speed.temperature_c is not None:
        texts.append(f"{speed.temperature_c:.0f} °C")
    if speed.preparing is not None:
        texts.append(speed.preparing)
    return texts


def cut_short_text(run: Run) -> str:
    """The last line of a peer that was told twice to stop."""
    pending = run.stats.fates.get("pending", 0.0)
    return (
        f"stopped at once: {count_text(pending)} tokens of this peer were not merged and count as "
        f"left too early; files in {run.directory}, from where the same command goes on"
    )


def outcome_text(outcome: Outcome) -> str:
    how = "the run is over" if outcome.finished else "left the run"
    held_out = "" if outcome.held_out is None else f", held-out loss {outcome.held_out}"
    loss = "-" if outcome.loss is None else f"{outcome.loss:.3f}"
    where, then = outcome.directory, ""
    if outcome.finished:
        then = f"; `shoal export {shlex.quote(str(where))} OUT` writes the model"
    elif outcome.lost is None:
        then = ", from where the same command goes on"
    return (
        f"{how}: {plural(outcome.steps, 'step')}, loss {loss}{held_out}; "
        f"tokens: {fates_text(outcome.stats.fates)}; files in {where}{then}"
    )
