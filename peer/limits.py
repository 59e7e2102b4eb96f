"""How much of somebody's machine a peer may use, and when. Pure: a verdict from what is known.

The settings are the owner's, not the run's. They lie in the peer's folder, where ``shoal limits``,
``pause``, ``resume`` and ``leave`` write them and the running peer looks for them (``peer.guest``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from peer.errors import PeerError

RATE_MIN_BYTES_S = 100_000
"""Slower lines do not carry a piece of half a megabyte before the other side gives up."""

DAY_MINUTES = 24 * 60


class BadLimit(PeerError):
    """A limit that cannot be."""

    exit_code = 2

    def __init__(self, setting: str, value: str, rule: str) -> None:
        super().__init__(setting, value, rule)
        self.setting = setting
        self.value = value
        self.rule = rule

    def __str__(self) -> str:
        return f"{self.setting} is {self.value!r}; {self.rule}"


Minute = Annotated[int, Meta(ge=0, lt=DAY_MINUTES)]


class Limits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What the owner allows. Unset: no limit."""

    paused: bool = False
    leave_at: float | None = None
    """Unix time of the wish to leave. A peer that was started after it does not mind."""
    up_bytes_s: Annotated[float, Meta(ge=RATE_MIN_BYTES_S)] | None = None
    down_bytes_s: Annotated[float, Meta(ge=RATE_MIN_BYTES_S)] | None = None
    month_bytes: Annotated[float, Meta(gt=0)] | None = None
    """Both directions together, in a calendar month."""
    hours: tuple[Minute, Minute] | None = None
    """Minutes of the day, from and until, in local time. May go over midnight."""
    cpu_share: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Of the time; the rest is slept between steps."""

    def words(self) -> list[str]:
        """For people."""
        found = ["paused"] if self.paused else []
        if self.up_bytes_s is not None:
            found.append(f"up {self.up_bytes_s / 1e6:g} MB/s")
        if self.down_bytes_s is not None:
            found.append(f"down {self.down_bytes_s / 1e6:g} MB/s")
        if self.month_bytes is not None:
            found.append(f"{self.month_bytes / 1e9:g} GB a month")
        if self.hours is not None:
            found.append(f"from {_time(self.hours[0])} to {_time(self.hours[1])}")
        if self.cpu_share < 1:
            found.append(f"{self.cpu_share:.0%} of the time")
        return found


@dataclass(frozen=True, slots=True)
class Go:
    """Train."""


@dataclass(frozen=True, slots=True)
class Rest:
    """Do not train, for this reason."""

    reason: str


def decide(limits: Limits, *, now: datetime, month_used_bytes: float) -> Go | Rest:
    """Whether this peer may work now. ``now`` is local time."""
    if limits.paused:
        return Rest("paused; go on with `shoal resume`")
    if limits.hours is not None and not _within(limits.hours, now.hour * 60 + now.minute):
        return Rest(f"only from {_time(limits.hours[0])} to {_time(limits.hours[1])}")
    if limits.month_bytes is not None and month_used_bytes >= limits.month_bytes:
        used = f"{month_used_bytes / 1e9:.3g} of {limits.month_bytes / 1e9:g} GB"
        return Rest(f"this month's volume is used: {used}")
    return Go()


def must_leave(limits: Limits, *, started_at: float) -> bool:
    """Whether somebody has asked this peer to leave since it was started."""
    return limits.leave_at is not None and limits.leave_at > started_at


def pause_after_step_s(limits_share: float, step_s: float) -> float:
    """How long to sleep after a step, to use no more than a share of the time."""
    return step_s * (1.0 / limits_share - 1.0)


def decode(data: bytes) -> Limits:
    """Read the file. Raises ``BadLimit``."""
    try:
        return msgspec.json.decode(data, type=Limits)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadLimit("the file of limits", "", f"{error}; write it with `shoal limits`") from None


def encode(limits: Limits) -> bytes:
    return msgspec.json.encode(limits)


_SIZES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def parse_size(setting: str, text: str) -> float:
    """``10M`` is ten million. Raises ``BadLimit``."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)B?", text.strip().upper())
    if found is None or not float(found[1]):
        raise BadLimit(setting, text, "write a size such as 500K, 10M or 200G")
    return float(found[1]) * _SIZES[found[2]]


def parse_rate(setting: str, text: str) -> float:
    """Bytes per second. Raises ``BadLimit``."""
    rate = parse_size(setting, text.removesuffix("/s"))
    if rate < RATE_MIN_BYTES_S:
        raise BadLimit(setting, text, f"the least is {RATE_MIN_BYTES_S // 1000}K bytes per second")
    return rate


def parse_hours(text: str) -> tuple[int, int]:
    """``22-7`` or ``21:30-6:15``. Raises ``BadLimit``."""
    found = re.fullmatch(r"(\d{1,2})(?::([0-5]\d))?-(\d{1,2})(?::([0-5]\d))?", text.strip())
    if found is not None:
        begin = int(found[1]) * 60 + int(found[2] or 0)
        end = int(found[3]) * 60 + int(found[4] or 0)
        if begin < DAY_MINUTES and end <= DAY_MINUTES and begin != end % DAY_MINUTES:
            return begin, end % DAY_MINUTES
    raise BadLimit("--hours", text, "write hours such as 22-7 or 21:30-6:15")


def parse_share(text: str) -> float:
    """``50%``. Raises ``BadLimit``."""
    found = re.fullmatch(r"(\d{1,3})%?", text.strip())
    if found is None or not 0 < int(found[1]) <= 100:
        raise BadLimit("--cpu", text, "write a share from 1% to 100%")
    return int(found[1]) / 100


def _within(hours: tuple[int, int], minute: int) -> bool:
    begin, end = hours
    return begin <= minute < end if begin < end else minute >= begin or minute < end


def _time(minute: int) -> str:
    return f"{minute // 60}:{minute % 60:02}"
