"""Watching one's own part in a run: what happened becomes sentences, a screen, or JSON lines.

Collects and words. Where the words go is ``peer.cli``'s decision.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Protocol, Self

from rich.live import Live
from rich.text import Text

from peer.events.telling import on_screen, own_offer
from peer.trainer.loop import Outcome
from peer.trainer.session import Fields, Run, Stats
from peer.views.event_log import plain
from peer.views.screen import PeerRow, View, bytes_text, count_text, draw, printable

REPORT_EVERY_S = 1.0
LOSSES_MAX = 4096
NEWS_MAX = 50
OTHERS_SHOWN = 5
SHOW_CURSOR = b"\x1b[?25h"


def sentence(fields: Fields) -> str | None:
    """An event in words for people; ``None`` for what only programs get."""
    text = on_screen(fields)
    return None if text is None else printable(text)


class Watch:
    """Remembers what a screen needs of one's own part in a run."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._losses: deque[float] = deque(maxlen=LOSSES_MAX)
        self._news: deque[str] = deque(maxlen=NEWS_MAX)
        self._last_offer = ""

    def on_event(self, fields: Fields) -> str | None:
        """Take note of an event; returns its sentence."""
        text = sentence(fields)
        if text is not None:
            self._news.append(text)
        self._last_offer = own_offer(fields) or self._last_offer
        return text

    def on_step(self, loss: float | None) -> None:
        if loss is not None:
            self._losses.append(loss)

    def view(self, run: Run) -> View:
        """The screen as of now."""
        stats = run.stats
        merged, processed = stats.fates.get("merged", 0.0), stats.fates.get("processed", 0.0)
        own = PeerRow(
            name=f"you ({run.peer_id[-6:]})",
            state="training" if run.rest is None else "resting",
            steps=None,
            step_time_s=stats.step_time_s,
            loss=None,
            version=min(run.versions),
            behind=run.staleness,
            last=run.last_offer,
            share=merged / run.merged_tokens if run.merged_tokens and processed else None,
        )
        goal = run.run_file.end.tokens
        return View(
            title=f"{run.run_file.name}, {_peers(run.peers)}",
            elapsed_s=time.monotonic() - self._began,
            losses=tuple(self._losses),
            global_tokens=run.merged_tokens,
            tokens_goal=goal if isinstance(goal, int) else None,
            rounds=stats.rounds,
            bytes_up=stats.bytes_sent,
            bytes_down=stats.bytes_received,
            blocked_fraction=stats.blocked.fraction,
            peers=(own, *_others(run)),
            steps=stats.steps,
            in_flight=run.in_flight,
            last_offer=self._last_offer,
            limits=([] if run.rest is None else [f"resting: {run.rest}"]) + list(run.limits),
            news=tuple(self._news),
        )


def _others(run: Run) -> list[PeerRow]:
    """As many as leave room for the news on a screen of 24 lines."""
    shown = [
        PeerRow(
            name=other.name,
            state=other.state,
            steps=None,
            step_time_s=other.step_time_s,
            loss=None,
            version=other.version,
            behind=other.behind,
            last=other.last,
            share=other.share,
        )
        for other in run.others[:OTHERS_SHOWN]
    ]
    more = len(run.others) - len(shown)
    if more > 0:
        shown.append(PeerRow(f"and {more} more", "", None, None, None, None, "", None))
    return shown


def progress(run: Run) -> dict[str, Any]:
    """Where this peer stands, for programs: the ``progress`` line of ``--json``."""
    return {
        "event": "progress",
        "peer": run.peer_id,
        "loss": run.loss,
        "held_out_loss": run.held_out_loss,
        "global_tokens": run.merged_tokens,
        "peers": run.peers,
        "versions": list(run.versions),
        **_figures(run.stats),
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
    """The same in one line for people."""
    loss = "-" if record["loss"] is None else f"{record['loss']:.3f}"
    return (
        f"step {record['steps']}  loss {loss}  {_peers(record['peers'])}  "
        f"{count_text(record['global_tokens'])} tokens merged  {record['rounds']} rounds  "
        f"up {bytes_text(record['bytes_sent'])}  blocked {record['blocked_fraction']:.2%}"
    )


def _peers(count: int) -> str:
    return "1 peer" if count == 1 else f"{count} peers"


class Reporter(Protocol):
    """Where news of one's own part in a run go."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def on_event(self, fields: Fields) -> None: ...

    def on_step(self, run: Run) -> None: ...

    def interrupted(self) -> None:
        """Somebody wants it to end; the next signal ends it without another word."""
        ...

    def done(self, outcome: Outcome) -> None: ...


class _Lines:
    """What the two reporters that write lines have in common."""

    every_s = REPORT_EVERY_S

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._said_at = float("-inf")
        self._link: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def on_step(self, run: Run) -> None:
        if run.link != self._link and run.link is not None:
            self._link = run.link
            self.tell_link(run.link)
        now = time.monotonic()
        if now - self._said_at >= self.every_s:
            self._said_at = now
            self.tell_progress(progress(run))

    def interrupted(self) -> None:
        return

    def tell_link(self, link: str) -> None:
        raise NotImplementedError

    def tell_progress(self, record: Mapping[str, Any]) -> None:
        raise NotImplementedError


class JsonReporter(_Lines):
    """One JSON object per line: events, ``link``, ``progress`` once a second, ``done``."""

    def on_event(self, fields: Fields) -> None:
        self._tell(fields)

    def tell_link(self, link: str) -> None:
        self._tell({"event": "link", "link": link})

    def tell_progress(self, record: Mapping[str, Any]) -> None:
        self._tell(record)

    def done(self, outcome: Outcome) -> None:
        ended = {
            "event": "done",
            "finished": outcome.finished,
            "stopped": outcome.stopped,
            "loss": outcome.loss,
            "held_out_loss": outcome.held_out_loss,
            "global_tokens": outcome.global_tokens,
            "directory": str(outcome.directory),
            **_figures(outcome.stats),
        }
        self._tell(ended)

    def _tell(self, record: Mapping[str, Any]) -> None:
        # A loss that is no number would make a line that is no JSON.
        self._say(json.dumps(plain(record)))


class PlainReporter(_Lines):
    """A sentence per event, and a line of figures now and then."""

    every_s = 10.0
    _phase: Fields | None = None

    def on_event(self, fields: Fields) -> None:
        before = self._phase
        if fields["event"] == "phase":
            self._phase = fields
            if before is not None and before["text"] == fields["text"]:
                return  # a bit further: for screens
        elif fields["event"] == "over" and before is not None and before["name"] == "leaving":
            return  # that it leaves, and why, was said
        text = sentence(fields)
        if text is not None:
            self._say(text)

    def tell_link(self, link: str) -> None:
        self._say(f"others join with: shoal join '{link}'")

    def tell_progress(self, record: Mapping[str, Any]) -> None:
        self._say(progress_line(record))

    def done(self, outcome: Outcome) -> None:
        self._say(outcome_text(outcome))


class ScreenReporter:
    """A screen that is drawn anew once a second."""

    def __init__(self) -> None:
        self._watch = Watch()
        self._live = Live("joining ...", auto_refresh=False)
        self._drawn_at = float("-inf")
        self._link: str | None = None

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def on_event(self, fields: Fields) -> None:
        text = self._watch.on_event(fields)
        if text is not None and fields["event"] in ("phase", "paused"):
            self._live.update(Text(text), refresh=True)

    def on_step(self, run: Run) -> None:
        self._watch.on_step(run.loss)
        if run.link != self._link and run.link is not None:
            self._link = run.link
            # Above the screen, where it stays and can be copied.
            told = Text(f"others join with: shoal join '{run.link}'")
            self._live.console.print(told, soft_wrap=True)
        now = time.monotonic()
        if now - self._drawn_at >= REPORT_EVERY_S:
            self._drawn_at = now
            width, height = self._live.console.size
            shown = draw(self._watch.view(run), width=width, height=height)
            self._live.update(shown, refresh=True)

    def interrupted(self) -> None:
        # Whoever insists kills this process, which must not leave a terminal without a cursor.
        # Past rich, as a signal may come while that writes.
        if self._live.console.is_terminal:
            with suppress(OSError):  # it may be the terminal's end that this is about
                os.write(self._live.console.file.fileno(), SHOW_CURSOR)

    def done(self, outcome: Outcome) -> None:
        self._live.update(Text(outcome_text(outcome)), refresh=True)


def outcome_text(outcome: Outcome) -> str:
    """The last words."""
    how = "the run is over" if outcome.finished else "left the run"
    fates = outcome.stats.fates
    merged = fates.get("merged", 0.0)
    held_out = "" if outcome.held_out_loss is None else f", held-out {outcome.held_out_loss:.3f}"
    loss = "-" if outcome.loss is None else f"{outcome.loss:.3f}"
    return (
        f"{how}: {outcome.steps} steps, loss {loss}{held_out}; "
        f"{count_text(merged)} of {count_text(fates.get('processed', 0.0))} tokens merged; "
        f"files in {outcome.directory}"
    )
