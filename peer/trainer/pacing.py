"""Limits on the training loop: a least time per step, a share of the time, a number of threads."""

from __future__ import annotations

import time

import torch

from peer.bridge.messages import Report
from peer.rules.limits import pause_after_step_s

SLEEP_MAX_S = 60.0
"""Longest pause after a step: a small share must not make a trainer look dead."""


class Pacer:
    """Keeps one training loop to what its settings and the machine's owner allow."""

    def __init__(self, *, pace_s: float, device: torch.device) -> None:
        """``pace_s``: the least time of a step. ``device``: where the model trains."""
        self._pace_s = pace_s
        self._accelerator = None if device.type == "cpu" else device
        self._paced_at: float | None = None
        self._worked_from: float | None = None
        """Time at which the step began, while only a share of the time may be used."""
        self._own_threads: int | None = None
        """The program's own number of torch threads, while the owner wants fewer."""

    def pause(self, report: Report) -> None:
        """Sleep after a step as long as the limits ask for."""
        if self._accelerator is None:
            # Elsewhere these threads have little to do, and compiled code is compiled anew for
            # another number of them, while training waits.
            self._limit_threads(report.threads)
        share = report.cpu_share if self._accelerator is None else report.accelerator_share
        if share < 1.0:
            if self._accelerator is not None:
                # Queued kernels would run on while this thread sleeps.
                torch.accelerator.synchronize(self._accelerator)
            if self._worked_from is not None:
                worked_s = time.monotonic() - self._worked_from
                time.sleep(min(SLEEP_MAX_S, pause_after_step_s(share, worked_s)))
            self._worked_from = time.monotonic()
        else:
            self._worked_from = None
        if self._pace_s <= 0:
            return
        now = time.monotonic()
        if self._paced_at is not None and (left := self._paced_at + self._pace_s - now) > 0:
            time.sleep(left)
            now += left
        self._paced_at = now

    def forget(self) -> None:
        """Count the next step from its own beginning: there was a rest."""
        self._paced_at = self._worked_from = None

    def _limit_threads(self, wanted: int | None) -> None:
        if wanted is not None:
            if self._own_threads is None:
                self._own_threads = torch.get_num_threads()
            if torch.get_num_threads() != (count := min(wanted, self._own_threads)):
                torch.set_num_threads(count)
        elif self._own_threads is not None:
            torch.set_num_threads(self._own_threads)
            self._own_threads = None
