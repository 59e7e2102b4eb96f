"""Reporters of this peer's own part in a run: a screen, sentences, or JSON lines.

``peer.cli`` chooses one of them, and decides where its lines go.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Any, Self

import msgspec
from rich.live import Live
from rich.text import Text

from peer.bridge.messages import Fields
from peer.events.names import Names, printable
from peer.events.table import on_screen, own_offer
from peer.quantities import bytes_text, count_text, fates_text, peers_text, plural, rounded_shares
from peer.status import PeerRow, PeerStatus, merges_alone_from
from peer.views.event_log import plain
from peer.views.screen import ON_A_LINE, View, draw

if TYPE_CHECKING:
    from peer.trainer.loop import Outcome
    from peer.trainer.session import Run

REPORT_EVERY_S = 1.0
LOSSES_MAX = 4096
NEWS_MAX = 50
OTHERS_SHOWN = 5
"""Other peers on the screen: with more, its 24 lines have no room for events."""

SHOW_CURSOR = "\x1b[?25h"
LEAVING = "leaving after this step; Ctrl-C again stops at once and leaves work behind"


def sentence(fields: Fields) -> str | None:
    """The sentence of an event; ``None`` for events that are not shown to people."""
    text = on_screen(fields)
    return None if text is None else printable(text)


class Sentences:
    """Sentences of events, with the peers by the names that earlier events gave."""

    def __init__(self) -> None:
        self._names = Names({})

    def __call__(self, fields: Fields) -> str | None:
        peer, name = fields.get("peer"), fields.get("name")
        if isinstance(peer, str) and isinstance(name, str) and name:
            self._names.learn(peer, printable(name))
        text = sentence(fields)
        # A link is copied as it is.
        return text if text is None or fields["event"] == "link" else self._names.within(text)


def _is_progress(fields: Fields, before: Fields) -> bool:
    """Say whether an event only shows how far the phase of the event before has come."""
    if not fields["event"] == before.get("event") == "phase" or fields["name"] != before["name"]:
        return False
    # "downloading the state of the run from 3 peers": their number changes all the time.
    texts = [str(event["text"]).partition(" from ")[0] for event in (fields, before)]
    is_bar = fields.get("done") and before.get("done")
    # How much a peer hands over when it leaves is told by an event of its own.
    return texts[0] == texts[1] or bool(is_bar) or fields["name"] == "leaving"


class Watch:
    """The recent losses and events that the screen shows."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._losses: deque[float] = deque(maxlen=LOSSES_MAX)
        self._news: deque[str] = deque(maxlen=NEWS_MAX)
        self._last_offer = ""
        self._sentence = Sentences()
        self._last: Fields = {}
        """The event behind the newest of the news."""

    def on_event(self, fields: Fields) -> str | None:
        """Take note of an event; returns its sentence."""
        text = self._sentence(fields)
        if text is not None:
            if _is_progress(fields, self._last):
                self._news.pop()  # a bar that grows
            self._news.append(text)
            self._last = fields
        self._last_offer = own_offer(fields) or self._last_offer
        return text

    def on_step(self, loss: float | None) -> None:
        if loss is not None:
            self._losses.append(loss)

    def view(self, status: PeerStatus, rows: Sequence[PeerRow], title: str) -> View:
        """The content of the screen as of now."""
        return View(
            title=f"{title}, {peers_text(status.peers)}",
            elapsed_s=time.monotonic() - self._began,
            losses=tuple(self._losses),
            status=status,
            peers=with_whole_shares(_shown(rows)),
            last_offer=self._last_offer,
            news=tuple(self._news),
        )


def _shown(rows: Sequence[PeerRow]) -> list[PeerRow]:
    """This peer's row, those of the first ``OTHERS_SHOWN`` others, and the number of the rest."""
    shown = [
        msgspec.structs.replace(row, name=f"you ({row.peer[-6:]})") if row.you else row
        for row in rows[: 1 + OTHERS_SHOWN]
    ]
    more = len(rows) - len(shown)
    if more <= 0:
        return shown
    rest = 1.0 - sum(row.share or 0.0 for row in shown)
    return [*shown, PeerRow(name=f"and {more} more", state="", share=max(0.0, rest))]


def with_whole_shares(rows: Sequence[PeerRow]) -> tuple[PeerRow, ...]:
    """The rows with shares that sum to 100 percent as they are shown; none before a merge."""
    shares = rounded_shares([row.share or 0.0 for row in rows])
    return tuple(
        msgspec.structs.replace(row, share=share / 100 if any(shares) else None)
        for row, share in zip(rows, shares, strict=True)
    )


class Reporter(ABC):
    """Reports what happens while this peer takes part in a run, and the progress now and then."""

    every_s = REPORT_EVERY_S
    """Time between two reports of the progress."""
    _told_at = float("-inf")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return

    @abstractmethod
    def on_event(self, fields: Fields) -> None: ...

    def on_step(self, run: Run) -> None:
        """A step has ended, or training rests."""
        now = time.monotonic()
        if now - self._told_at >= self.every_s:
            self._told_at = now
            self.tell_progress(run)

    @abstractmethod
    def tell_progress(self, run: Run) -> None: ...

    def interrupted(self) -> None:
        """A signal has asked the process to end; the next one kills it."""
        return

    def cut_short(self, run: Run) -> None:
        """A second signal ends the process, on another thread than that of the steps."""
        _write_now(sys.stderr, f"shoal: {cut_short_text(run)}\n")

    @abstractmethod
    def done(self, outcome: Outcome) -> None: ...


def _write_now(file: IO[str], text: str) -> None:
    """Write in the handler of a signal: not through a buffer, which its code may be writing to."""
    with suppress(OSError, ValueError):  # the terminal may be closed already
        os.write(file.fileno(), text.encode())


class JsonReporter(Reporter):
    """One JSON object per line: events, ``link``, ``progress`` once a second, ``done``."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say

    def on_event(self, fields: Fields) -> None:
        # ``plain``: JSON has no number for a loss that is infinite or not a number.
        self._say(json.dumps(plain(fields)))

    def tell_progress(self, run: Run) -> None:
        self.on_event(progress(run.status))

    def done(self, outcome: Outcome) -> None:
        self.on_event(done(outcome))


class PlainReporter(Reporter):
    """A sentence for each event, and a line of figures every ten seconds."""

    every_s = 10.0

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._phase: Fields = {}
        self._sentence = Sentences()

    def on_step(self, run: Run) -> None:
        if run.rest is None:  # the event ``paused`` told the reason
            super().on_step(run)

    def on_event(self, fields: Fields) -> None:
        before = self._phase
        if fields["event"] == "phase":
            self._phase = fields
            if _is_progress(fields, before):
                return
        elif fields["event"] == "over" and before.get("name") == "leaving":
            return  # the phase had the same reason
        text = self._sentence(fields)
        if text is not None:
            self._say(text)

    def tell_progress(self, run: Run) -> None:
        self._say(progress_line(run.status))

    def interrupted(self) -> None:
        _write_now(sys.stderr, f"shoal: {LEAVING}\n")

    def done(self, outcome: Outcome) -> None:
        self._say(outcome_text(outcome))


class ScreenReporter(Reporter):
    """A screen that is redrawn once a second."""

    def __init__(self) -> None:
        self._watch = Watch()
        self._live = Live("joining ...", auto_refresh=False)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def on_event(self, fields: Fields) -> None:
        if fields["event"] in ("link", "link_limited", "page"):
            # Above the screen, where it stays and can be copied.
            self._live.console.print(Text(sentence(fields) or ""), soft_wrap=True)
            return
        text = self._watch.on_event(fields)
        if text is not None and fields["event"] in ("phase", "compiler_awaited"):
            self._live.update(Text(text), refresh=True)

    def on_step(self, run: Run) -> None:
        if run.rest is None:
            self._watch.on_step(run.loss)
        super().on_step(run)

    def tell_progress(self, run: Run) -> None:
        width, height = self._live.console.size
        view = self._watch.view(run.status, run.rows, run.run_file.name)
        self._live.update(draw(view, width=width, height=height), refresh=True)

    def interrupted(self) -> None:
        # A second signal kills this process, which must not leave a terminal without a cursor. A
        # step may take a minute, and nothing is drawn before its end: the last line tells.
        if self._live.console.is_terminal:
            width = self._live.console.width
            _write_now(self._live.console.file, f"{SHOW_CURSOR}\r\x1b[2K{LEAVING[: width - 1]}")

    def cut_short(self, run: Run) -> None:
        _write_now(self._live.console.file, f"{SHOW_CURSOR}\r\x1b[2K{cut_short_text(run)}\n")

    def done(self, outcome: Outcome) -> None:
        self._live.update(Text(outcome_text(outcome)), refresh=True)


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
        f"{count_text(status.global_tokens)} tokens merged by all  {plural(status.rounds, 'round')}"
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
        f"tokens of this peer: {fates_text(status.fates)}; files in {where}{then}"
    )
