"""Limits on the use of a machine, and the decision whether a peer may train now.

The limits are set by the owner of the machine, and are not part of the run. ``shoal limits``,
``pause``, ``resume`` and ``leave`` write them into the peer's folder, where the running peer reads
them (``peer.guest.enforcement``).
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from statistics import fmean
from typing import Annotated, Any, Literal, TypeAlias, get_args

import msgspec
from msgspec import Meta, Struct

from peer.errors import PathError, PeerError
from peer.quantities import bytes_text, plural

RATE_MIN_BYTES_S = 100_000
"""Smallest allowed rate: below it a piece of 512 kB takes longer than its timeout."""

DAY_MINUTES = 24 * 60

BUSY_FOR_S = 15.0
"""Other programs count as busy when their average over this time reaches the limit."""

IDLE_FOR_S = 60.0
"""Other programs count as idle when the average over this time is below the limit: a compiler
pauses, too."""

VOLUME_MIN_BYTES = 1_000_000
"""Smallest volume of a month, and smallest limit of the disk."""

LOGS_OF_DISK = 0.1
"""Share of the allowed disk space for logs. The rest is for checkpoints and the state."""

STATE_OF_DISK = 0.25
"""Share of the allowed disk space for the state, where that is in files: as much as a
checkpoint."""

CELSIUS_MIN, CELSIUS_MAX = 40.0, 110.0

HOT_FOR_S = 60.0
"""A machine that was too hot rests for so long after it was so last."""

PROGRAMS_MAX = 50

FULL_SCREEN = "full-screen"
"""Stands among the names of programs for any program that fills the screen."""

DESKTOP_NICENESS = 10
"""Nice level of a trainer on a desktop, behind the programs of its owner."""


class BadLimit(PeerError):
    """The value of a limit is invalid."""

    exit_code = 2
    setting: str
    value: str
    rule: str
    message = "{setting} is {value!r}; {rule}"


class BadLimitsFile(PathError):
    """The file of limits cannot be read."""

    exit_code = 2
    message = (
        "{path} is not a valid file of limits: {reason}; remove it and set "
        "the limits again with `shoal limits`"
    )


Minute = Annotated[int, Meta(ge=0, lt=DAY_MINUTES)]


class Limits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Limits set by the owner of a machine. ``None``: no limit."""

    paused: bool = False
    leave_at: float | None = None
    """Unix time of ``shoal leave``. It does not concern a peer that was started later."""
    up_bytes_s: Annotated[float, Meta(ge=RATE_MIN_BYTES_S)] | None = None
    down_bytes_s: Annotated[float, Meta(ge=RATE_MIN_BYTES_S)] | None = None
    month_bytes: Annotated[float, Meta(gt=0)] | None = None
    """Bytes sent and received in a calendar month."""
    hours: tuple[Minute, Minute] | None = None
    """Begin and end of the allowed time, in minutes of the local day; may span midnight."""
    cpu_share: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Share of the time that the trainer computes. It sleeps between steps for the rest."""
    gpu_share: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """The same for the time of an accelerator."""
    free_gpu: bool = False
    """Give the accelerator's memory to other programs while training rests."""
    threads: Annotated[int, Meta(ge=1)] | None = None
    """Largest number of CPU threads of the trainer."""
    idle_below: Annotated[float, Meta(gt=0, lt=1)] | None = None
    """Train only while other programs use less than this share of all processors, and of each
    accelerator."""
    not_while: Annotated[tuple[str, ...], Meta(max_length=PROGRAMS_MAX)] = ()
    """Names of programs beside which this peer does not train."""
    battery_above: Annotated[float, Meta(gt=0, le=1)] | None = None
    """On battery train only while it holds more than this share; with 1.0 never."""
    celsius_below: Annotated[float, Meta(ge=CELSIUS_MIN, le=CELSIUS_MAX)] | None = None
    """Train only while processors and accelerators are cooler."""
    disk_bytes: Annotated[float, Meta(ge=VOLUME_MIN_BYTES)] | None = None
    """Size of all files in the peer's folder."""
    relay_bytes_s: Annotated[float, Meta(ge=RATE_MIN_BYTES_S)] | None = None
    """Rate of bulk data that this peer passes on between others. ``None``: it does not relay.

    That is the default: every byte passes its line twice, on its owner's bill, and a member that
    can be dialled already helps more by leading and reducing. Only where nobody in a run can be
    dialled does a relay decide whether anything is merged, and there a host outside has to consent.
    """

    def words(
        self, *, month_used_bytes: float | None = None, disk_used_bytes: float | None = None
    ) -> list[str]:
        """The limits in words, with the used part where it is known."""
        used = {"month_bytes": _used(month_used_bytes), "disk_bytes": _used(disk_used_bytes)}
        values = ((name, getattr(self, name), getattr(Limits(), name)) for name in WORDS)
        set_ = {name: value for name, value, default in values if value != default}
        return [f"{used.get(name, '')}{WORDS[name](value)}" for name, value in set_.items()]

    def share(self, *, accelerated: bool) -> float:
        """Share of the time for the trainer. With an accelerator both limits apply."""
        return min(self.cpu_share, self.gpu_share) if accelerated else self.cpu_share


WORDS: Mapping[str, Callable[[Any], str]] = {
    "paused": lambda _: "paused",
    "up_bytes_s": lambda rate: f"up {rate / 1e6:g} MB/s",
    "down_bytes_s": lambda rate: f"down {rate / 1e6:g} MB/s",
    "month_bytes": lambda size: f"{_gigabytes(size)} a month",
    "hours": lambda hours: f"from {_time(hours[0])} to {_time(hours[1])}",
    "cpu_share": "training {:.0%} of the time".format,
    "gpu_share": "{:.0%} of the accelerator's time".format,
    "free_gpu": lambda _: "accelerator's memory given back while resting",
    "threads": lambda count: plural(count, "thread"),
    "idle_below": "only while other programs use less than {:.0%}".format,
    # Without their names: other peers are told these words.
    "not_while": lambda names: f"not beside {plural(len(names), 'program')} of your list",
    "battery_above": "on battery only above {:.0%}".format,
    "celsius_below": "only below {:g} degrees Celsius".format,
    "disk_bytes": lambda size: f"{_gigabytes(size)} of disk",
    "relay_bytes_s": lambda rate: f"relays {rate / 1e6:g} MB/s for others",
}
"""A limit in words, by its field, if it is not the default."""


class OthersBusy:
    """Recent use of all processors by other programs."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque()
        self._is_busy = False

    def note(self, share: float, *, now: float) -> None:
        """Add the average share since the last sample."""
        self._samples.append((now, share))
        while self._samples[0][0] <= now - IDLE_FOR_S:
            self._samples.popleft()

    def forget(self) -> None:
        """Drop all samples, when the limit is removed."""
        self._samples.clear()
        self._is_busy = False

    def above(self, share: float) -> bool:
        """``True`` if other programs keep the machine busy; ``False`` while that is unknown."""
        if not self._samples:
            return False
        newest = self._samples[-1][0]
        lately = [used for at, used in self._samples if at > newest - BUSY_FOR_S]
        if fmean(lately) >= share:
            self._is_busy = True
        elif fmean([used for _, used in self._samples]) < share:
            self._is_busy = False
        return self._is_busy


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensed:
    """Other facts of the machine, as last seen. Empty: none, or there was no reason to look."""

    programs: frozenset[str] = frozenset()
    """Names of other programs that run, in small letters, and ``FULL_SCREEN``."""
    battery: float | None = None
    """Charge of the battery, 0 to 1; ``None`` on mains power."""
    celsius: float | None = None
    """The highest temperature of the last ``HOT_FOR_S``."""


class Peak:
    """The highest of the values of the last ``HOT_FOR_S``."""

    def __init__(self) -> None:
        self._values: deque[tuple[float, float]] = deque()

    def note(self, value: float | None, *, now: float) -> float | None:
        """Add a value, if there is one, and return the highest."""
        if value is not None:
            self._values.append((now, value))
        while self._values and self._values[0][0] <= now - HOT_FOR_S:
            self._values.popleft()
        return max((value for _, value in self._values), default=None)


@dataclass(frozen=True, slots=True)
class DiskShares:
    """Parts of the disk limit, in bytes; ``None``: no limit."""

    outer: float | None = None
    """Checkpoints of the agent, including the one that is being written."""
    inner: float | None = None
    """Checkpoints of the trainer, likewise."""
    logs: float | None = None
    state: float | None = None
    """The state, if it is in files (``peer.rules.limits``)."""

    @classmethod
    def of(cls, limits: Limits, *, trains: bool, keeps_state: bool = False) -> DiskShares:
        """Fixed parts: two processes that save at once cannot exceed the limit together.

        ``keeps_state``: the state is in files.
        """
        if limits.disk_bytes is None:
            return cls()
        logs = LOGS_OF_DISK * limits.disk_bytes
        state = STATE_OF_DISK * limits.disk_bytes if keeps_state else 0.0
        saves = limits.disk_bytes - logs - state
        inner = saves / 2 if trains else 0.0
        return cls(saves - inner, inner, logs, state)


@dataclass(frozen=True, slots=True)
class Manners:
    """Nice level and threads of a trainer."""

    niceness: int
    threads: int | None
    """``None``: as many as the libraries choose."""


def manners(*, desktop: bool, cores: int, container: int | None = None) -> Manners:
    """On a desktop a low priority, and one core left free for its owner.

    ``cores``: physical cores; two threads on one of them train no faster. ``container``: number of
    processors whose time may be used. More threads than these wait for each other, and waiting
    takes time as well: of eight threads on two processors a third.
    """
    threads = max(1, cores - 1) if desktop else None
    if container is not None and container < (threads or cores):
        threads = container
    return Manners(DESKTOP_NICENESS if desktop else 0, threads)


def why_rest(
    limits: Limits,
    *,
    now: datetime,
    month_used_bytes: float,
    last_offers_bytes: float = 0.0,
    others: OthersBusy,
    sensed: Sensed = Sensed(),
) -> str | None:
    """The reason why this peer must not train now; ``None``: it may. ``now`` is local time.

    ``last_offers_bytes``: upper bound on its traffic after it has been told to rest.
    """
    if limits.paused:
        return "paused; continue with `shoal resume`"
    if limits.hours is not None and not _within(limits.hours, now.hour * 60 + now.minute):
        return f"only from {_time(limits.hours[0])} to {_time(limits.hours[1])}"
    if limits.month_bytes is not None and is_used_up(limits, month_used_bytes, last_offers_bytes):
        used = f"{month_used_bytes / 1e9:.3g} of {limits.month_bytes / 1e9:g} GB"
        return f"the volume of this month is used: {used}"
    if limits.idle_below is not None and others.above(limits.idle_below):
        share = f"{limits.idle_below:.0%}"
        return f"other programs use {share} of the processors or of an accelerator, or more"
    if not sensed.programs.isdisjoint(limits.not_while):
        return "a program runs beside which it does not train (--not-while)"
    least, held = limits.battery_above, sensed.battery
    if least is not None and held is not None and held <= least:
        return f"on battery, which holds {held:.0%}; above {least:.0%} it trains"
    most, celsius = limits.celsius_below, sensed.celsius
    if most is not None and celsius is not None and celsius >= most:
        return f"too hot: {celsius:.0f} degrees Celsius in the last minute, below {most:g}"
    return None


def is_used_up(limits: Limits, month_used_bytes: float, last_offers_bytes: float = 0.0) -> bool:
    """``True`` if the volume of this month is used, apart from a reserve to finish open rounds.

    The reserve is ``last_offers_bytes``, but at most half of the volume.
    """
    if limits.month_bytes is None:
        return False
    reserve = min(last_offers_bytes, limits.month_bytes / 2)
    return month_used_bytes >= limits.month_bytes - reserve


def pause_after_step_s(limits_share: float, step_s: float) -> float:
    """Pause after a step that keeps the trainer within its share of the time."""
    return step_s * (1.0 / limits_share - 1.0)


_SIZES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def parse_size(setting: str, text: str, *, least: float = 0.0, unit: str = "bytes") -> float:
    """A size in bytes; ``10M`` is ten million. Raises ``BadLimit``."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)B?", text.strip().upper())
    if found is None or not float(found[1]):
        raise BadLimit(setting, text, "write a size such as 500K, 10M or 200G")
    size = float(found[1]) * _SIZES[found[2]]
    if size < least:
        minimum = f"{least / 1e6:g}M" if least >= 1e6 else f"{least / 1e3:g}K"
        raise BadLimit(setting, text, f"the minimum is {minimum} {unit}")
    return size


def parse_rate(setting: str, text: str) -> float:
    """A rate in bytes per second. Raises ``BadLimit``."""
    return parse_size(setting, text.removesuffix("/s"), least=RATE_MIN_BYTES_S, unit="bytes/s")


def parse_relay_rate(text: str | None) -> float | None:
    """The rate of ``--relay-bulk``; ``None`` for 'off' or no option. Raises ``BadLimit``."""
    return None if text in (None, "off") else parse_rate("--relay-bulk", text)


def parse_hours(text: str) -> tuple[int, int]:
    """Minutes of the day from ``22-7`` or ``21:30-6:15``. Raises ``BadLimit``."""
    found = re.fullmatch(r"(\d{1,2})(?::([0-5]\d))?-(\d{1,2})(?::([0-5]\d))?", text.strip())
    if found is not None:
        begin = int(found[1]) * 60 + int(found[2] or 0)
        end = int(found[3]) * 60 + int(found[4] or 0)
        if begin < DAY_MINUTES and end <= DAY_MINUTES and begin != end % DAY_MINUTES:
            return begin, end % DAY_MINUTES
    raise BadLimit("--hours", text, "write hours such as 22-7 or 21:30-6:15")


def parse_share(setting: str, text: str, *, most: int = 100) -> float:
    """A share such as ``50%``. Raises ``BadLimit``."""
    found = re.fullmatch(r"(\d{1,3})%?", text.strip())
    if found is None or not 0 < int(found[1]) <= most:
        raise BadLimit(setting, text, f"write a share from 1% to {most}%")
    return int(found[1]) / 100


def parse_threads(text: str) -> int:
    """A number of threads. Raises ``BadLimit``."""
    if not re.fullmatch(r"[1-9]\d{0,3}", text.strip()):
        raise BadLimit("--threads", text, "write a number such as 4")
    return int(text)


def parse_programs(text: str) -> tuple[str, ...]:
    """Names of programs such as ``blender,my-game``. Raises ``BadLimit``."""
    names = tuple(name.strip().lower().removesuffix(".exe") for name in text.split(","))
    if len(names) > PROGRAMS_MAX or not all(re.fullmatch(r"[^/\\\x00-\x1f]+", n) for n in names):
        raise BadLimit(
            "--not-while", text, f"write names such as blender,steam, {PROGRAMS_MAX} at most"
        )
    return names


def parse_switch(setting: str, text: str) -> bool:
    """``on``; ``off`` is no value but lifts a limit. Raises ``BadLimit``."""
    if text.strip() != "on":
        raise BadLimit(setting, text, "write on or off")
    return True


def parse_celsius(text: str) -> float:
    """A temperature such as ``80``. Raises ``BadLimit``."""
    found = re.fullmatch(r"(\d{1,3})( ?[Cc])?", text.strip())
    if found is None or not CELSIUS_MIN <= int(found[1]) <= CELSIUS_MAX:
        raise BadLimit(
            "--celsius", text, f"write degrees from {CELSIUS_MIN:g} to {CELSIUS_MAX:g}, such as 80"
        )
    return float(found[1])


def _within(hours: tuple[int, int], minute: int) -> bool:
    begin, end = hours
    return begin <= minute < end if begin < end else minute >= begin or minute < end


def _time(minute: int) -> str:
    return f"{minute // 60}:{minute % 60:02}"


def _gigabytes(count: float) -> str:
    return f"{count / 1e9:g} GB" if count >= 1e8 else f"{count / 1e6:g} MB"


def _used(count: float | None) -> str:
    return "" if count is None else f"{_gigabytes(float(f'{count:.3g}'))} of "


SLACK = timedelta(days=2)
"""Largest step back of a clock after which a month that had begun counts on when it comes again."""

FIRST_YEAR = 2026
"""A clock that shows an earlier year is not set: there was no Shoal."""


class MonthlyVolume(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Bytes of the month that the clock shows, and of the one that it showed before.

    The clock may be set, or moved to another time zone. Bytes count for the month that the local
    clock shows when they pass. Three things must not give a month its volume twice, nor take it
    from a month in which nothing has passed:

    - The clock goes back over the begin of a month: by an hour (time zones, daylight saving) or a
      day. Traffic of "next month" counts for this month, too, because it has passed by now. If the
      clock went back by at most ``SLACK``, it keeps counting for next month as well: either clock
      may be the wrong one, and with the smaller count a month would have its volume twice.
    - The clock was wrong by more, and is corrected: traffic counted for a later month counts for
      this one alone, or that month would begin with its volume used.
    - The clock is not set yet, as on a machine without a battery for it: the count stands still.
    """

    month: str = ""
    """The month, such as 2026-11; empty before anything was counted."""
    bytes: int = 0
    at: datetime | None = None
    """Local time of the last look."""
    other: tuple[str, int] | None = None
    """The month before or after this one, and its bytes."""

    def plus(self, count: int) -> MonthlyVolume:
        return msgspec.structs.replace(self, bytes=self.bytes + count)

    def on(self, now: datetime) -> MonthlyVolume:
        """The volume at a local time: a new month begins with 0 bytes."""
        month = f"{now:%Y-%m}"
        if now.year < FIRST_YEAR:
            return self
        if month == self.month:
            return msgspec.structs.replace(self, at=now)
        if not self.month:
            return msgspec.structs.replace(self, month=month, at=now)
        known = self.other[1] if self.other is not None and self.other[0] == month else 0
        left: tuple[str, int] | None = (self.month, self.bytes)
        if month < self.month:
            known += self.bytes
            if self.at is not None and self.at - now > SLACK:
                left = None
        return MonthlyVolume(month=month, bytes=known, at=now, other=left)


# --- the place of the run's state ----------------------------------------------------------------

# It is a choice of the machine: bits and rounds are the same. In files a state takes as much of the
# disk as it would take of the memory, and each round writes its fragment's share of it.

StateOnDisk: TypeAlias = Literal["auto", "on", "off"]

SHARE_OF_MEMORY = 0.25
"""Share of the machine's memory from which on ``auto`` keeps a state in files."""


@dataclass(frozen=True, slots=True)
class StatePlace:
    """The choice, and a sentence about it."""

    on_disk: bool
    text: str
    """Empty if nobody needs to hear of it."""


def check_wish(wish: str) -> None:
    """Raise ``ValueError`` unless it is a value of ``--state-on-disk``."""
    if wish not in (known := get_args(StateOnDisk)):
        raise ValueError(f"--state-on-disk is {wish!r}; it is one of {', '.join(known)}")


def choose_place(
    wish: str, size: int, *, memory_bytes: float, free_bytes: float, volatile: str | None
) -> StatePlace:
    """The place of a state of so many bytes.

    ``free_bytes``: of the disk of the peer's folder; ``volatile``: the kind of its file system, if
    that keeps files in memory.
    """
    share = size / memory_bytes
    if wish == "off" or (wish == "auto" and share < SHARE_OF_MEMORY):
        return StatePlace(False, "")
    why = f"{bytes_text(size)}, {share:.0%} of the memory"
    if volatile is not None:
        return StatePlace(
            False,
            f"the run's state ({why}) stays in memory: its folder is there as well, {volatile}",
        )
    if free_bytes < size:
        return StatePlace(
            False,
            f"the run's state ({why}) stays in memory: {bytes_text(free_bytes)} of disk are free",
        )
    return StatePlace(
        True,
        f"keeps the run's state ({why}) in files of its folder; --state-on-disk off: in memory",
    )
