"""The screen of a run, which fits 80 x 24 characters.

It is drawn from a ``View``, which ``shoal join`` and the demo fill. Texts of other peers become
``Text`` objects, because rich would interpret square brackets in strings as markup.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from peer.events.names import printable
from peer.quantities import bytes_text, count_text, duration_text, fates_text, plural
from peer.status import PeerRow, PeerStatus, merges_alone_from

_BARS = " ▁▂▃▄▅▆▇█"
CURVE = 2
"""Rows of the loss curve."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The content of the screen."""

    title: str
    elapsed_s: float
    status: PeerStatus
    """The status of this peer, or of a whole swarm, which has no role."""
    peers: Sequence[PeerRow] = ()
    losses: Sequence[float] = ()
    """Training loss over time, oldest first."""
    last_offer: str = ""
    """The result of this peer's last offer, with the reason."""
    news: Sequence[str] = ()
    """Sentences of the last events, newest last."""


NEWS_MIN, NEWS_MAX = 3, 12
"""Lines for events."""
EVENT_LINES_MAX = 3
SECTION = re.compile(r" \(shoal docs [\w-]+\)$")
NAME_MAX = 24
"""A section of the documents that a warning names has at most about this many letters."""
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
    status = view.status
    speed = [] if status.resting else status.words(ON_A_LINE)
    until = status.alone_until
    lines = {
        "resting": status.rest,
        "speed": ", ".join(speed),
        "tokens of this peer": fates_text(status.fates) if status.fates.get("processed") else "",
        "in progress": ", ".join(status.in_flight),
        "alone": "" if until is None else merges_alone_from(until),
        "last offer": view.last_offer,
        "limits": ", ".join(status.limits),
    }
    return [f"{what}: {text}" for what, text in lines.items() if text]


def _wrapped(text: str, width: int, *, most: int = 2) -> list[str]:
    """``text`` wrapped to at most ``most`` lines. One that is cut keeps the section it names."""
    section = SECTION.search(text) if width > 2 * NAME_MAX else None
    end = f" ...{section[0]}" if section else " ..."
    return textwrap.wrap(text, width, subsequent_indent="  ", max_lines=most, placeholder=end)


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
    status = view.status
    parts = [view.title, duration_text(view.elapsed_s)]
    if status.role:
        parts.append(f"step {status.steps}")
    if view.losses:
        parts.append(f"loss {view.losses[-1]:.3f}")
    goal = f" of {count_text(status.tokens_goal)}" if status.tokens_goal else ""
    whose = " by all" if status.role else ""  # beside those of this peer
    parts.append(f"{count_text(status.global_tokens)}{goal} tokens merged{whose}")
    parts.append(plural(status.rounds, "round"))
    parts.append(f"{bytes_text(status.bytes_sent)} up, {bytes_text(status.bytes_received)} down")
    parts.append(f"blocked {status.blocked_fraction:.2%}")
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
        cells = [peer.name, peer.state, *(cells[row] for cells in shown.values()), peer.last or ""]
        table.add_row(*(Text(printable(cell)) for cell in cells), style=style)
    return table


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
