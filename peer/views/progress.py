"""Figures of this peer's own part in a run: records for ``--json``, and lines of text."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from peer.quantities import bytes_text, count_text, fates_text, peers_text, plural
from peer.status import PeerStatus, merges_alone_from

if TYPE_CHECKING:
    from peer.trainer.loop import Outcome
    from peer.trainer.session import Run

ON_A_LINE = (
    "tokens_per_s",
    "share_of_peak",
    "time_left_s",
    "next_merge_s",
    "processor_share",
    "device_bytes",
    "temperature_c",
    "preparing",
)
"""Figures of the speed on the screen and on the line of progress, as far as they are known."""


def progress(status: PeerStatus) -> dict[str, Any]:
    """The record ``progress``, which ``--json`` prints once a second."""
    return {"event": "progress", "peer": status.peer, **status.figures()}


def done(outcome: Outcome) -> dict[str, Any]:
    """The record ``done``, which ``--json`` prints at the end."""
    return {
        "event": "done",
        "peer": outcome.status.peer,
        "finished": outcome.finished,
        "stopped": outcome.stopped,
        "directory": str(outcome.directory),
        **outcome.status.figures(),
    }


def progress_line(status: PeerStatus) -> str:
    """The progress as a line of text."""
    loss = "-" if status.loss is None else f"{status.loss:.3f}"
    until = status.alone_until
    alone = "" if until is None else f"  alone: {merges_alone_from(until)}"
    return (
        f"step {status.steps}  loss {loss}  {peers_text(status.peers)}  "
        f"{count_text(status.global_tokens)} tokens merged  {plural(status.rounds, 'round')}"
        f"  sent {bytes_text(status.bytes_sent)}  blocked {status.blocked_fraction:.2%}"
        f"{''.join(f'  {text}' for text in status.words(ON_A_LINE))}{alone}"
    )


def cut_short_text(run: Run) -> str:
    """The last line of a peer that was told twice to stop."""
    pending = run.status.fates.get("pending", 0.0)
    return (
        f"stopped at once: {count_text(pending)} tokens of this peer were not merged and count as "
        f"left too early; files in {run.directory}, from where the same command goes on"
    )


def outcome_text(outcome: Outcome) -> str:
    how = "the run is over" if outcome.finished else "left the run"
    status = outcome.status
    held_out = "" if status.held_out is None else f", held-out loss {status.held_out}"
    loss = "-" if status.loss is None else f"{status.loss:.3f}"
    where, then = outcome.directory, ""
    if outcome.finished:
        then = f"; `shoal export {shlex.quote(str(where))} OUT` writes the model"
    elif outcome.lost is None:
        then = ", from where the same command goes on"
    return (
        f"{how}: {plural(status.steps, 'step')}, loss {loss}{held_out}; "
        f"tokens: {fates_text(status.fates)}; files in {where}{then}"
    )
