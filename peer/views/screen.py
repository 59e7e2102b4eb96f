"""The screen of a run, which fits 80 x 24 characters.

It is drawn from a ``View``, which ``shoal join`` and the demo fill. Texts of other peers become
``Text`` objects, because rich would interpret square brackets in strings as markup.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from peer.events.names import printable
from peer.quantities import bytes_text, count_text, duration_text, plural

_BARS = " ▁▂▃▄▅▆▇█"
CURVE = 2
"""Rows of the loss curve."""


@dataclass(frozen=True, slots=True)
class PeerRow:
    """The row of one peer. ``None`` and empty texts are not known."""

    name: str
    state: str
    """``training``, ``joining``, ``gone`` ... (``peer.status.state_in_words``)"""
    steps: int | None = None
    step_time_s: float | None = None
    loss: float | None = None
    version: int | None = None
    """The lowest version of its fragments."""
    last: str = ""
    """The result of its last offer, in words."""
    share: float | None = None
    """Share of its tokens in all merged tokens."""
    behind: int | None = None
    """Versions by which it is behind the newest peer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The content of the screen."""

    title: str
    elapsed_s: float
    losses: Sequence[float] = ()
    """Training loss over time, oldest first."""
    global_tokens: int = 0
    tokens_goal: int | None = None
    rounds: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    blocked_fraction: float | None = None
    peers: Sequence[PeerRow] = ()
    steps: int | None = None
    """Steps of this peer, if those of the others are not known."""
    resting: str = ""
    """The reason why training rests; empty if it does not."""
    speed: Sequence[str] = ()
    """Speed of this peer, time left, use of processor and device, in words."""
    fates: str = ""
    """This peer's tokens by their fate, in words."""
    in_flight: Sequence[str] = ()
    """Fragments with the current activity, in words."""
    alone: str = ""
    """When this peer merges by itself, where it waits for others that it does not see."""
    last_offer: str = ""
    """The result of this peer's last offer, with the reason."""
    limits: Sequence[str] = ()
    """The owner's limits."""
    news: Sequence[str] = field(default_factory=tuple)
    """Sentences of the last events, newest last."""


NEWS_MIN, NEWS_MAX = 3, 12
"""Lines for events."""
EVENT_LINES_MAX = 3
FRAME = 2
"""Lines of a panel's border."""


def draw(view: View, *, width: int = 80, height: int = 24) -> RenderableType:
    """The whole screen, in at most ``height - 1`` lines.

    Where there is no room, the least useful part at that moment is left out: older events, then the
    curve, then other peers, then lines about this peer. The newest event is always shown.
    """
    headline = _lines(map(printable, _headline(view)), width)
    room = max(0, height - 1 - len(headline) - FRAME - 1)
    own = [line for text in _own(view) for line in _wrapped(printable(text), width)][:room]
    room -= len(own)
    peers = view.peers[: max(0, room - 1)]
    room -= len(peers) + 1 if peers else 0
    news = 1 + min(NEWS_MIN - 1, room)
    room -= news - 1
    curve = [Panel(_curve(view.losses, width - 4), title="training loss", title_align="left")]
    room_for_curve = CURVE + FRAME
    if room < room_for_curve:
        curve = []
    else:
        room -= room_for_curve
    news = min(NEWS_MAX, news + room)
    return Group(
        Text("\n".join(headline), style="bold"),
        *curve,
        *([_peers(peers)] if peers else []),
        *(Text(line) for line in own),
        Panel(
            Text("\n".join(_news(view.news, width - 4, news)) or "waiting for the first round"),
            title="events",
            title_align="left",
        ),
    )


def _news(news: Sequence[str], width: int, room: int) -> list[str]:
    """The newest events in at most ``room`` lines, in the order in which they came."""
    lines: list[str] = []
    for text in reversed(news):
        wrapped = _wrapped(printable(text), width, most=min(room, EVENT_LINES_MAX))
        if len(lines) + len(wrapped) > room:
            break
        lines = wrapped + lines
    return lines


def _own(view: View) -> list[str]:
    """Lines about this peer: why it rests, speed, activity, last offer, limits."""
    found = []
    if view.resting:
        found.append(f"resting: {view.resting}")
    if view.speed:
        found.append(f"speed: {', '.join(view.speed)}")
    if view.fates:
        found.append(f"tokens: {view.fates}")
    if view.in_flight:
        found.append(f"in progress: {', '.join(view.in_flight)}")
    if view.alone:
        found.append(f"alone: {view.alone}")
    if view.last_offer:
        found.append(f"last offer: {view.last_offer}")
    if view.limits:
        found.append(f"limits: {', '.join(view.limits)}")
    return found


def _wrapped(text: str, width: int, *, most: int = 2) -> list[str]:
    """``text`` wrapped to at most ``most`` lines."""
    return textwrap.wrap(text, width, subsequent_indent="  ", max_lines=most, placeholder=" ...")


def _lines(parts: Iterable[str], width: int) -> list[str]:
    """Lines of parts, none of which is broken unless it is wider than a line."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + 2 + len(part) <= width:
            lines[-1] += f"  {part}"
        else:
            lines += textwrap.wrap(part, width)
    return lines


def _headline(view: View) -> list[str]:
    parts = [view.title, duration_text(view.elapsed_s)]
    if view.steps is not None:
        parts.append(f"step {view.steps}")
    if view.losses:
        parts.append(f"loss {view.losses[-1]:.3f}")
    goal = f" of {count_text(view.tokens_goal)}" if view.tokens_goal else ""
    parts.append(f"{count_text(view.global_tokens)}{goal} tokens merged")
    parts.append(plural(view.rounds, "round"))
    parts.append(f"{bytes_text(view.bytes_up)} up, {bytes_text(view.bytes_down)} down")
    if view.blocked_fraction is not None:
        parts.append(f"blocked {view.blocked_fraction:.2%}")
    return parts


def _curve(losses: Sequence[float], width: int) -> Text:
    """A curve of bars, two rows high, without losses that are not finite."""
    known = [loss for loss in losses if math.isfinite(loss)]
    if len(known) < 2:
        return Text("no losses yet\n")
    values = _resampled(known, width - 18)
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    heights = [round((value - low) / span * 16) for value in values]
    upper = "".join(_BARS[max(0, min(8, h - 8))] for h in heights)
    lower = "".join(_BARS[min(8, max(1, h))] for h in heights)
    return Text(f"{high:7.3f} {upper}\n{low:7.3f} {lower}  {values[-1]:.3f}")


def _resampled(values: Sequence[float], count: int) -> list[float]:
    """Means of at most ``count`` consecutive parts."""
    if len(values) <= count:
        return list(values)
    edges = [round(i * len(values) / count) for i in range(count + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(edges) if b > a]


def _peers(peers: Sequence[PeerRow]) -> Table:
    columns: dict[str, list[str]] = {
        "steps": [_or_dash(peer.steps, "d") for peer in peers],
        "s/step": [_or_dash(peer.step_time_s, ".2f") for peer in peers],
        "loss": [_or_dash(peer.loss, ".3f") for peer in peers],
        "version": [_or_dash(peer.version, "d") for peer in peers],
        "behind": [_or_dash(peer.behind, "d") for peer in peers],
        "share": [_or_dash(peer.share, ".0%") for peer in peers],
    }
    # Columns without any value are left out.
    shown = {name: cells for name, cells in columns.items() if any(c != "-" for c in cells)}
    table = Table(expand=True, box=None, pad_edge=False)
    table.add_column("peer", no_wrap=True, max_width=22)
    table.add_column("state", no_wrap=True)
    for heading in shown:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("last offer", overflow="ellipsis", no_wrap=True, ratio=1)
    for row, peer in enumerate(peers):
        style = "" if peer.state == "training" else "dim"
        cells = [peer.name, peer.state, *(cells[row] for cells in shown.values()), peer.last]
        table.add_row(*(Text(printable(cell)) for cell in cells), style=style)
    return table


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
