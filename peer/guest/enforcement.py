"""Limits of a running peer: their file, the traffic of the month, and the verdict.

``peer.rules.limits`` decides; this module has the files and the clock. The file of limits may
change at any time.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import msgspec

from dht.whole_files import new_file, write_whole
from dht.wrapped_host import Gate
from peer.guest import machine, other_programs
from peer.guest.accelerators import Accelerators
from peer.guest.other_programs import OwnUse, ProcessorTimes
from peer.rules.limits import (
    FULL_SCREEN,
    BadLimitsFile,
    DiskShares,
    Limits,
    MonthlyVolume,
    OthersBusy,
    Peak,
    Sensed,
    is_used_up,
    why_rest,
)
from peer.storage.home import folder_bytes

logger = logging.getLogger(__name__)

LIMITS_FILE = "limits.json"
VOLUME_FILE = "volume.json"
SAVE_EVERY_S = 30.0
LOOK_AT_MACHINE_S = 5.0
MEASURE_DISK_S = 15.0
LOG_MAX_BYTES = 16 << 20


def read_limits(folder: Path) -> Limits:
    """The limits in a peer's folder, empty if there is no file. Raises ``BadLimitsFile``."""
    path = folder / LIMITS_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=Limits)
    except FileNotFoundError:
        return Limits()
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadLimitsFile(str(path), str(error)) from None


def write_limits(folder: Path, limits: Limits) -> None:
    """Replace the limits. They are on the disk on return: a power cut must not lift them."""
    path = folder / LIMITS_FILE
    try:
        write_whole(path, msgspec.json.encode(limits))
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


class Guest:
    """The limits of one running peer, and what it has used of them."""

    def __init__(
        self,
        folder: Path,
        *,
        trains: bool = True,
        last_offers_bytes: float = 0.0,
        started_at: float | None = None,
    ) -> None:
        """``trains``: there is a trainer, which also saves checkpoints.

        ``last_offers_bytes``: upper bound on the traffic after it has been told to rest.
        ``started_at``: Unix time of the start, by default now; an earlier ``shoal leave`` is void.
        """
        self._last_offers_bytes = last_offers_bytes
        self._folder = folder
        self._trains = trains
        self._others = OthersBusy()
        self._accelerators = Accelerators()
        self._heat = Peak()
        self._sensed = Sensed()
        self._disk_used: int | None = None
        self._own_use = OwnUse(os.getppid() if trains else os.getpid())
        self.state_bytes: Callable[[], int] | None = None
        """Space of files without a name that have the state; ``None``: it is in memory."""
        self.processor_share: float | None = None
        """Share of all processors that this peer uses, its trainer included."""
        self._stamp: tuple[int, int] | None = None
        self.limits = Limits()
        self.up, self.down = Gate(), Gate()
        self._volume = self._saved_volume()
        self._counted_bytes = 0
        """Bytes that passed the gates and are in ``_volume``."""
        self._saved_at = time.monotonic()
        self.rest: str | None = None
        """Why it must not train, as of the last look; ``None``: it may."""
        self._read()
        since = time.time() if started_at is None else started_at
        asked_at = self.limits.leave_at
        self._void_leave = None if asked_at is None or asked_at > since else asked_at
        """The time of an earlier ``shoal leave``. Any other one is for this peer: since it started
        the clock may have been set back."""

    @property
    def sent_bytes(self) -> int:
        """Bytes sent since the start, for whatever purpose: states, rounds and relaying."""
        return self.up.passed

    @property
    def received_bytes(self) -> int:
        """Bytes received since the start, in the same way."""
        return self.down.passed

    @property
    def month_bytes(self) -> int:
        """Bytes sent and received this month: those two, and those of earlier starts."""
        return self._volume.bytes + self._passed - self._counted_bytes

    @property
    def disk(self) -> DiskShares:
        """Parts of the disk limit."""
        return DiskShares.of(
            self.limits, trains=self._trains, keeps_state=self.state_bytes is not None
        )

    @property
    def is_used_up(self) -> bool:
        """``True`` if the volume of this month is used."""
        return is_used_up(self.limits, self.month_bytes, self._last_offers_bytes)

    def words(self) -> tuple[str, ...]:
        """The limits in words, with the used part of each."""
        used = self.month_bytes
        return tuple(self.limits.words(month_used_bytes=used, disk_used_bytes=self._disk_used))

    @property
    def must_leave(self) -> bool:
        return self.limits.leave_at not in (None, self._void_leave)

    def look(self) -> str | None:
        """Read changed limits and decide (``rest``). Cheap enough for several times a second."""
        self._read()
        now = _local_time()
        self._count(now)
        self.up.set_rate(self.limits.up_bytes_s)
        self.down.set_rate(self.limits.down_bytes_s)
        self.rest = why_rest(
            self.limits,
            now=now,
            month_used_bytes=self.month_bytes,
            last_offers_bytes=self._last_offers_bytes,
            others=self._others,
            sensed=self._sensed,
        )
        if time.monotonic() - self._saved_at > SAVE_EVERY_S:
            self.save()
        return self.rest

    async def watch_machine(self) -> None:
        """Sample the own use of processors for ever, and what else there are limits for."""
        before: ProcessorTimes | None = None
        measured_at = float("-inf")
        while True:
            self.processor_share = await asyncio.to_thread(self._own_use.share_since_last)
            before = await asyncio.to_thread(self._sense, before)
            if self.limits.disk_bytes is None:
                self._disk_used = None
            elif time.monotonic() - measured_at >= MEASURE_DISK_S:
                measured_at = time.monotonic()
                nameless = 0 if self.state_bytes is None else self.state_bytes()
                self._disk_used = nameless + await asyncio.to_thread(folder_bytes, self._folder)
            await asyncio.sleep(LOOK_AT_MACHINE_S)

    def _sense(self, before: ProcessorTimes | None) -> ProcessorTimes | None:
        """Look at that part of the machine for which there are limits.

        Takes the sample of processes of the last look, and returns that of this one.
        """
        limits, now = self.limits, time.monotonic()
        after, on_devices = None, 0.0
        if limits.idle_below is not None or limits.not_while:
            after = other_programs.times_now()
        if limits.idle_below is not None or limits.celsius_below is not None:
            processes = {} if after is None else after.processes
            on_devices = self._accelerators.others_share(processes)
        if limits.idle_below is None:
            self._others.forget()
        elif before is not None and after is not None:
            share = other_programs.others_share(before, after)
            self._others.note(max(share, on_devices), now=now)
        degrees = None
        if limits.celsius_below is not None:
            measured = (machine.celsius(), self._accelerators.celsius)
            degrees = max((celsius for celsius in measured if celsius is not None), default=None)
        programs: frozenset[str] = frozenset()
        if after is not None and limits.not_while:
            programs = other_programs.names_of_others(after.processes)
        if FULL_SCREEN in limits.not_while and machine.screen_is_taken():
            programs |= {FULL_SCREEN}
        self._sensed = Sensed(
            programs=programs,
            battery=None if limits.battery_above is None else machine.battery(),
            celsius=self._heat.note(degrees, now=now),
        )
        return after

    @property
    def relay_bytes_s(self) -> float | None:
        """Rate at which bulk data of other peers is passed on now; ``None``: not at all."""
        return None if self.rest is not None else self.limits.relay_bytes_s

    async def meter_relayed(self, count: int) -> None:
        """Count bytes that are passed on, within the limits of both directions."""
        await self.down.pass_through(count)
        await self.up.pass_through(count)

    def line_max(self) -> float:
        """Bytes per second allowed in the direction with the lower limit."""
        rates = (self.limits.up_bytes_s, self.limits.down_bytes_s)
        return min((rate for rate in rates if rate is not None), default=math.inf)

    def save(self) -> None:
        """Save the count of the month. A full disk costs the count only."""
        self._saved_at = time.monotonic()
        self._count(_local_time())
        try:
            with new_file(self._folder / VOLUME_FILE) as beside:
                beside.write_bytes(msgspec.json.encode(self._volume))
        except OSError as error:
            logger.warning("volume_not_saved reason=%s", error)

    @property
    def _passed(self) -> int:
        return self.sent_bytes + self.received_bytes

    def _read(self) -> None:
        try:
            status = (self._folder / LIMITS_FILE).stat()
        except FileNotFoundError:
            self.limits, self._stamp = Limits(), None
            return
        except OSError:  # of a network's file system, for a while: the previous ones stay
            return
        stamp = (status.st_mtime_ns, status.st_ino)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self.limits = read_limits(self._folder)
        except (BadLimitsFile, OSError) as error:
            logger.warning("limits_not_read the previous ones stay; reason=%s", error)

    def _count(self, now: datetime) -> None:
        """Count what has passed since the last look for the month of that look."""
        passed = self._passed
        self._volume = self._volume.plus(passed - self._counted_bytes).on(now)
        self._counted_bytes = passed

    def _saved_volume(self) -> MonthlyVolume:
        try:
            return _volume_in(self._folder)
        except FileNotFoundError:
            return MonthlyVolume()
        except (OSError, ValueError) as error:
            logger.warning("volume_not_read counting from zero; reason=%s", error)
            return MonthlyVolume()


def _local_time() -> datetime:
    """The time on the wall. A process keeps the time zone of its start unless it looks again."""
    time.tzset()
    return datetime.now()


def _volume_in(folder: Path) -> MonthlyVolume:
    """Raises ``OSError`` or ``ValueError``."""
    return msgspec.json.decode((folder / VOLUME_FILE).read_bytes(), type=MonthlyVolume)


def used_this_month(folder: Path) -> int:
    """Bytes of this month, as a peer last saved them."""
    try:
        return _volume_in(folder).on(_local_time()).bytes
    except (OSError, ValueError):
        return 0


def trim_log(path: Path, allowed_bytes: float | None) -> None:
    """Truncate a log that another process appends to; its end is kept as ``.1``."""
    half = min(LOG_MAX_BYTES, math.inf if allowed_bytes is None else allowed_bytes / 2)
    try:
        if path.stat().st_size > half:
            with path.open("rb+") as log:
                log.seek(-int(half), os.SEEK_END)
                path.with_name(f"{path.name}.1").write_bytes(log.read())
                log.truncate(0)
    except FileNotFoundError:
        return
    except OSError as error:
        logger.warning("log_not_trimmed path=%s reason=%s", path, error)
