"""Values that are still on their way from the device: nobody waits until it has computed them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch

LAG = 1
"""Steps after which it is asked whether a step was skipped, where the answer is on a device. By
then it has arrived, and processes that are one learner ask at the same step."""


class LateValue:
    """A number that may still be on its way from the device."""

    def __init__(self, value: torch.Tensor | float) -> None:
        self._value: torch.Tensor | float = value
        self._arrived: torch.cuda.Event | None = None
        if isinstance(value, torch.Tensor):
            self._value = value.detach()
            if value.is_cuda:
                on_host = torch.empty((), dtype=torch.float32, pin_memory=True)
                on_host.copy_(self._value.reshape(()), non_blocking=True)
                self._value = on_host
                self._arrived = torch.cuda.current_stream(value.device).record_event()

    @property
    def is_late(self) -> bool:
        """True if it comes from a device."""
        return self._arrived is not None

    def ready(self) -> float | None:
        """The number, if it has arrived."""
        if self._arrived is not None and not self._arrived.query():  # type: ignore[no-untyped-call]
            return None
        return float(self._value)

    def wait(self) -> float:
        """The number, as soon as it has arrived. Work that was queued later is not waited for."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return float(self._value)


class Skips:
    """Finds out which steps of an optimizer a ``GradScaler`` has skipped."""

    def __init__(self) -> None:
        self._steps: deque[tuple[LateValue, int]] = deque()

    def note(self, optimizer: torch.optim.Optimizer, tokens: int = 0) -> Iterator[int]:
        """Note a step of the optimizer, in a hook of it: the scaler's note is gone afterwards.

        Returns the tokens of each step that is now known to have been made.
        """
        # A fused optimizer skips inside its kernel, where only ``found_inf`` shows it.
        found_inf = getattr(optimizer, "found_inf", None)
        late = LateValue(found_inf if isinstance(found_inf, torch.Tensor) else 0.0)
        self._steps.append((late, tokens))
        while len(self._steps) > (LAG if late.is_late else 0):
            found, tokens = self._steps.popleft()
            if not found.wait():
                yield tokens
