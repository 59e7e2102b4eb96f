"""Saves of a trainer's inner state at intervals: copied on its thread, written on another."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import torch

from peer.errors import CheckpointDamaged, DiskFull
from peer.storage.checkpoint import CheckpointFolder
from peer.storage.inner_state import (
    InnerState,
    InnerStateUnknown,
    Optimizers,
    Restored,
    capture,
    restore_inner,
    save,
)


class InnerSaves:
    """Checkpoints of the inner state of one trainer, in one folder.

    ``tell(event, fields)`` is called with events and failures. Training continues in any case.
    """

    def __init__(
        self,
        folder: Path,
        model: torch.nn.Module,
        optimizers: Optimizers,
        *,
        run_id: str,
        every_s: float,
        tell: Callable[[str, Mapping[str, str | int]], None],
        allowed_bytes: Callable[[], float | None] = lambda: None,
    ) -> None:
        self._folder = CheckpointFolder(folder, keep=2, allowed_bytes=allowed_bytes)
        self._model, self._optimizers = model, optimizers
        self._saved_optimizers = optimizers
        """Those whose state is saved: none, if it cannot be."""
        self.scaler: torch.amp.GradScaler | None = None
        """The scaler of a trainer in fp16, whose scale is saved as well."""
        self._run_id = run_id
        self._every_s = every_s
        self._tell = tell
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="inner checkpoint")
        self._saving: Future[Path] | None = None
        self._skipped: tuple[int, Mapping[str, int]] | None = None
        """Step and position of the last save, if another one was being written."""
        self._full = False
        """The last save found no room, and that was reported."""
        self._save_at = time.monotonic() + every_s

    def restore(self) -> Restored | None:
        """Restore the state of optimizer, scaler and torch's generators after a restart."""
        try:
            restored = restore_inner(
                self._folder, self._model, self._optimizers, run_id=self._run_id
            )
        except CheckpointDamaged as error:
            self._tell("optimizer_not_restored", {"reason": str(error)})
            return None
        if restored is not None and restored.scaler and self.scaler is not None:
            self.scaler.load_state_dict(dict(restored.scaler))
        if restored is None or not self._optimizers:
            return restored
        if restored.reason:
            self._tell("optimizer_not_restored", {"reason": restored.reason})
        else:
            self._tell("optimizer_restored", {"step": restored.step})
        return restored

    def maybe_save(self, *, step: int, position: Callable[[], Mapping[str, int]]) -> None:
        """Save if it is time. ``position()`` returns the position in the data."""
        began = time.monotonic()
        if began < self._save_at:
            return
        self._report_failure()
        self.save(step=step, position=position())
        copying_s = time.monotonic() - began
        # Copying takes at most a thousandth of the time.
        self._save_at = max(self._save_at, began + max(self._every_s, 1000 * copying_s))

    def save(self, *, step: int, position: Mapping[str, int]) -> None:
        """Copy the state now, unless the last copy is still being written."""
        if self._saving is not None and not self._saving.done():
            self._skipped = step, position
            return
        self._skipped = None
        try:
            inner = self._captured(step, position)
        except InnerStateUnknown as error:
            self._tell("checkpoint_failed", {"text": str(error)})
            # The position in the data does not depend on it.
            self._saved_optimizers = ()
            inner = self._captured(step, position)
        try:
            self._saving = self._writer.submit(save, self._folder, inner)
        except RuntimeError:  # the program ends, and no thread can be started any more
            save(self._folder, inner)

    def _captured(self, step: int, position: Mapping[str, int]) -> InnerState:
        return capture(
            self._model,
            self._saved_optimizers,
            run_id=self._run_id,
            step=step,
            data=position,
            scaler=None if self.scaler is None else self.scaler.state_dict(),
        )

    def finish(self) -> None:
        """Wait until the current write has finished.

        If the last save was skipped for it, it is made then: no step was made in between.
        """
        if self._skipped is not None and self._saving is not None:
            wait((self._saving,))
            self._report_failure()
            step, position = self._skipped
            self.save(step=step, position=position)
        self._writer.shutdown()
        self._report_failure()

    def close(self) -> None:
        """Start no new write, and do not wait for the current one."""
        self._writer.shutdown(wait=False)

    def _report_failure(self) -> None:
        """Report the failure of the last write, if it failed."""
        if self._saving is None or not self._saving.done():
            return
        error = self._saving.exception()
        self._saving = None
        was_full, self._full = self._full, isinstance(error, DiskFull)
        if isinstance(error, DiskFull):
            if not was_full:
                self._tell("disk_full", {"text": str(error)})
        elif isinstance(error, OSError):
            self._tell("checkpoint_failed", {"text": str(error)})
        elif error is not None:
            raise error
