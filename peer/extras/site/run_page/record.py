"""The loss, the tokens and the news of a whole run, as one peer has seen them. Pure. Bounded.

Points are thinned out as a run gets longer: beyond ``POINTS_MAX`` every second one is dropped, and
the next ones come half as often.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from dht.identity import PeerId
from peer.extras.site.run_page.content import DAYS_MAX, NEWS_MAX, POINTS_MAX, Day, News, Point
from peer.quantities import count_text, loss_at

FIRST_EVERY_S = 10.0
MET_MAX = 4096
"""Contributors that were news. Beyond them nobody is."""
_TEXT_MAX = 300


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """A record as a file."""

    every_s: float = FIRST_EVERY_S
    tokens: int = 0
    losses: tuple[Point, ...] = ()
    held_out: tuple[Point, ...] = ()
    days: tuple[Day, ...] = ()
    news: tuple[News, ...] = ()
    met: tuple[PeerId, ...] = ()


class Record:
    """Record of the events of a run."""

    def __init__(self, saved: Saved | None = None) -> None:
        saved = saved or Saved()
        self._every_s = saved.every_s
        self._losses = list(saved.losses)
        self._held_out = list(saved.held_out)
        self._days = {day.date: day.tokens for day in saved.days}
        self._news = list(saved.news)
        self._met = set(saved.met)
        """Contributors that were news already: a name may change at any time."""
        self._tokens = saved.tokens

    @classmethod
    def decode(cls, data: bytes) -> Record:
        """The record of a file; an empty one if it cannot be read."""
        try:
            return cls(msgspec.json.decode(data, type=Saved))
        except (msgspec.DecodeError, UnicodeDecodeError):
            return cls()

    def encode(self) -> bytes:
        return msgspec.json.encode(
            Saved(
                every_s=self._every_s,
                tokens=self._tokens,
                losses=self.losses,
                held_out=self.held_out,
                days=self.days,
                news=self.news,
                met=tuple(sorted(self._met)),
            )
        )

    @property
    def losses(self) -> tuple[Point, ...]:
        return tuple(self._losses)

    @property
    def held_out(self) -> tuple[Point, ...]:
        return tuple(self._held_out)

    @property
    def days(self) -> tuple[Day, ...]:
        """The tokens merged on each day that this peer has seen, the oldest first."""
        days = sorted(self._days.items())[-DAYS_MAX:]
        return tuple(Day(date=date, tokens=tokens) for date, tokens in days)

    @property
    def news(self) -> tuple[News, ...]:
        """The newest first."""
        return tuple(self._news)

    def sample(self, at: float, tokens: int, losses: Sequence[float]) -> None:
        """Note the training losses that learners tell of now; their median counts."""
        if not tokens and self._tokens:
            return  # the states to which the run was taken back are still to be fetched
        if tokens < self._tokens:  # the run was taken back, and these points with it
            self._losses = [point for point in self._losses if point.tokens <= tokens]
            self._held_out = [point for point in self._held_out if point.tokens <= tokens]
        if self._tokens and tokens > self._tokens:  # what was there before this record has no day
            day = f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d}"
            self._days[day] = self._days.get(day, 0) + tokens - self._tokens
        self._tokens = tokens
        known = sorted(loss for loss in losses if -1e9 < loss < 1e9)
        # A clock that was ahead once must not end the curve.
        if not known or (self._losses and 0 <= at - self._losses[-1].at < self._every_s):
            return
        self._losses.append(Point(at=at, tokens=tokens, loss=known[len(known) // 2]))
        if len(self._losses) > POINTS_MAX:
            del self._losses[-2::-2]  # the newest stays
            self._every_s *= 2

    def note(self, event: Mapping[str, Any]) -> None:
        """Take note of an event of this peer that is of interest to everybody."""
        at = float(event["at"])
        match event:
            case {"event": "measured", "loss": float(loss), "tokens": int(n)} if -1e9 < loss < 1e9:
                self._held_out.append(Point(at=at, tokens=n, loss=loss))
                if len(self._held_out) > POINTS_MAX:
                    del self._held_out[-2::-2]
                self._tell(at, f"held-out loss {loss_at(loss, n)}")
            case {"event": "published", "tokens": int(exported)}:
                self._tell(at, f"a new export, of {count_text(exported)} tokens")
            case {"event": "ended_here"}:
                self._tell(at, "the run has ended")

    def meet(self, at: float, contributors: Sequence[tuple[str, PeerId]]) -> None:
        """Welcome new contributors, by name and id. Those of before this record are no news."""
        is_new = not self._met
        for name, peer in contributors:
            if peer in self._met:
                continue
            if len(self._met) >= MET_MAX:
                return
            if not is_new:
                self._tell(at, f"{name} contributes")
            self._met.add(peer)

    def _tell(self, at: float, text: str) -> None:
        self._news.insert(0, News(at=at, text=text[:_TEXT_MAX]))
        del self._news[NEWS_MAX:]
