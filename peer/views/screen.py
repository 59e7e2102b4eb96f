"""What a person sees while training goes on: a picture of the run that fits 80 x 24.

Draws; it reads no clock, no file and no network. ``View`` is filled by whoever
watches (the demo, ``shoal join``, ``shoal status --watch``). What peers say of themselves is
shown as it is: rich would take square brackets in it for markup of ours.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from peer.quantities import bytes_text, count_text, duration_text

_BARS = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class PeerRow:
    """One peer, in the words of the screen."""

    name: str
    state: str
    """``training``, ``joining``, ``gone`` ..."""
    steps: int | None
    step_time_s: float | None
    loss: float | None
    version: int | None
    """The lowest version of its fragments."""
    last: str
    """What became of its last offer, in words."""
    share: float | None
    """Of all merged tokens."""
    behind: int | None = None
    """By so many versions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Everything on the screen."""

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
    """One's own, where the peers' are not known."""
    in_flight: Sequence[str] = ()
    """Fragments, and what is done about them just now."""
    last_offer: str = ""
    """Why the last offer of one's own was merged or not."""
    limits: Sequence[str] = ()
    """What the machine's owner allows, and why training rests, if it does."""
    news: Sequence[str] = field(default_factory=tuple)
    """The last events, newest last."""


NEWS_MIN, NEWS_MAX = 3, 12


def draw(view: View, *, width: int = 80, height: int = 24) -> RenderableType:
    """The whole screen. What there is no room for is left out, the oldest news first."""
    headline = textwrap.wrap(printable(_headline(view)), width)
    own = [line for text in _own(view) for line in _wrapped(printable(text), width)]
    taken = len(headline) + len(own) + 4 + (1 + len(view.peers)) + 2
    news = view.news[-max(NEWS_MIN, min(NEWS_MAX, height - taken - 1)) :]
    return Group(
        Text("\n".join(headline), style="bold"),
        Panel(_curve(view.losses, width - 4), title="training loss", title_align="left"),
        _peers(view.peers),
        *(Text(line) for line in own),
        Panel(
            Text(
                "\n".join(map(printable, news)) or "waiting for the first round",
                no_wrap=True,
                overflow="ellipsis",
            ),
            title="events",
            title_align="left",
        ),
    )


def printable(text: str) -> str:
    """``text`` without what a terminal would obey: it may come from anybody."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "\ufffd" for c in text)


def _own(view: View) -> list[str]:
    """What goes on here, and what became of the last offer."""
    found = []
    if view.in_flight:
        found.append(f"in flight: {', '.join(view.in_flight)}")
    if view.last_offer:
        found.append(f"last offer: {view.last_offer}")
    if view.limits:
        found.append(f"limits: {', '.join(view.limits)}")
    return found


def _wrapped(text: str, width: int) -> list[str]:
    """In two lines at most."""
    return textwrap.wrap(text, width, subsequent_indent="  ", max_lines=2, placeholder=" ...")


def _headline(view: View) -> str:
    parts = [view.title, duration_text(view.elapsed_s)]
    if view.steps is not None:
        parts.append(f"step {view.steps}")
    if view.losses:
        parts.append(f"loss {view.losses[-1]:.3f}")
    goal = f" of {count_text(view.tokens_goal)}" if view.tokens_goal else ""
    parts.append(f"{count_text(view.global_tokens)}{goal} tokens merged")
    parts.append(f"{view.rounds} rounds")
    parts.append(f"up {bytes_text(view.bytes_up)} down {bytes_text(view.bytes_down)}")
    if view.blocked_fraction is not None:
        parts.append(f"blocked {view.blocked_fraction:.2%}")
    return "  ".join(parts)


def _curve(losses: Sequence[float], width: int) -> Text:
    """A curve of bars, two rows high. A loss that is no number has no place in it."""
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
    """At most ``count`` means of consecutive stretches."""
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
    # What nobody tells takes no room.
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
