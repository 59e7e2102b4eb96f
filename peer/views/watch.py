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

from peer.joining.link import only_from
from peer.observed_run import Fields, Outcome, Stats
from peer.observed_run import ObservedRun as Run
from peer.quantities import bytes_text, count_text
from peer.views.event_log import plain
from peer.views.screen import PeerRow, View, draw, printable

REPORT_EVERY_S = 1.0
LOSSES_MAX = 4096
NEWS_MAX = 50
OTHERS_SHOWN = 5
SHOW_CURSOR = b"\x1b[?25h"


_FOR_PROGRAMS = frozenset(
    (
        "adopted",
        "agent_started",
        "agent_ended",
        "founded",
        "state_fetched",
        "last_round",
        "not_merged",
    )
)
"""What a person learns in other words as well, or need not know."""


def _link_lines(link: str) -> list[str]:
    """The command that others join with, and whom it is of no use to."""
    limit = only_from(link)
    return [f"others join with: shoal join '{link}'", *([limit] if limit is not None else [])]


def sentence(fields: Fields) -> str | None:
    """An event in words for people; ``None`` for what only programs want to know."""
    told = _sentence(fields)
    return None if told is None else printable(told)


def _sentence(fields: Fields) -> str | None:
    name = fields["event"]
    if name in _FOR_PROGRAMS:
        return None
    if name == "phase":
        return _phase(fields)
    if name == "round":
        members, version = fields.get("members"), fields.get("version")
        count = len(members) if isinstance(members, list) else members
        merged = "with my work" if fields.get("contributed", True) else "without my work"
        return f"fragment {fields.get('fragment')} version {version}: {count} peers, {merged}"
    if name == "round_missed":
        return (
            f"fragment {fields.get('fragment')}: round missed, work kept ({fields.get('reason')})"
        )
    if name in ("peer_joined", "peer_left", "peer_lost"):
        return f"{fields.get('name') or fields.get('peer')} {name.removeprefix('peer_')}"
    if name == "agent_died":
        return (
            f"the agent ended with code {fields['exit_code']}; a new one starts in "
            f"{fields['restart_in_s']:.1f} s, training goes on"
        )
    if name == "measured":
        return f"held-out loss {fields.get('loss'):.4f}"
    if name == "over":
        return str(fields["reason"])
    if name == "link":
        return "; ".join(_link_lines(str(fields["link"])))
    if name == "paused":
        return f"{fields.get('reason')}; no work is lost"
    if name == "resumed":
        return str(fields.get("text") or "training goes on")
    if name == "page":
        return f"see it at {fields['url']}"
    if name == "fetch_failed":
        return f"{fields.get('reason')}; trying again"
    if name == "state_adopted":
        how = "replaying merges" if fields.get("how") == "replay" else "downloading its state"
        return (
            f"fragment {fields.get('fragment')}: caught up with version {fields.get('version')} "
            f"by {how}"
        )
    if name == "optimizer_restored":
        return f"the optimizer goes on from where it was at step {fields.get('step')}"
    if name == "optimizer_not_restored":
        return f"the optimizer begins anew: {fields.get('reason')}"
    if name == "exported":
        return f"wrote {fields.get('path')}, model {fields.get('model')}"
    if name == "not_a_commit":
        return (
            f"warning: a commit of {fields.get('peer')} cannot be read ({fields.get('reason')}); "
            "rounds that it leads come to nothing here"
        )
    if name == "left_apart":
        return (
            f"the run ended with several models; this peer's is {fields.get('model')}, and not "
            f"that of {fields.get('text')}"
        )
    if isinstance(fields.get("text"), str):
        return str(fields["text"])
    detail = " ".join(f"{key}={value}" for key, value in fields.items() if key != "event")
    return f"{name} {detail}".strip()


def offer_told(fields: Fields) -> str | None:
    """What became of this peer's own offer, and why; ``None`` for any other event."""
    name, fragment = fields["event"], fields.get("fragment")
    if name == "not_merged":
        return f"fragment {fragment} not merged: {fields['reason']}; kept for the next round"
    if name == "round_missed":
        return f"fragment {fragment} not merged: {fields.get('reason')}; kept for the next round"
    if name != "round":
        return None
    where = f"fragment {fragment} version {fields.get('version')}"
    if not fields.get("contributed"):
        why = fields.get("left_out") or "it was not among those that every reducer had in time"
        return f"not merged into {where}: {why}; kept for the next round"
    weight, count = fields.get("weight"), fields.get("contributors")
    part = f", {weight:.0%} of the work of {count} peers" if isinstance(weight, float) else ""
    return f"merged into {where}{part}"


def _phase(fields: Fields) -> str:
    text, done = str(fields["text"]), fields.get("done")
    if fields.get("name") == "leaving":
        return f"leaving ({text}): finishing what is under way"
    if fields.get("name") == "fetching" and isinstance(done, float) and 0.0 < done < 1.0:
        return f"{text}: {done:.0%}"
    return text


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
        self._last_offer = offer_told(fields) or self._last_offer
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
        for line in _link_lines(link):
            self._say(line)

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
            for line in _link_lines(run.link):
                self._live.console.print(Text(line), soft_wrap=True)
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
