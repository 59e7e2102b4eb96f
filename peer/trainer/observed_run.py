"""Values that screens, curves and other programs read of a run that this process trains in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from peer.errors import RunLost
from peer.status import HeldOut


@dataclass(frozen=True, slots=True)
class BlockedTime:
    """Time that the training thread spent in safe points."""

    p99_ms: float
    max_ms: float
    cpu_p99_ms: float
    """The same percentile of the processor time used there. The difference to ``p99_ms`` is time
    spent waiting for a processor that other programs had."""
    total_s: float
    total_cpu_s: float
    """Processor time of it."""
    elapsed_s: float
    """Time from the first step to the last one."""

    @property
    def fraction(self) -> float:
        return self.total_s / self.elapsed_s if self.elapsed_s > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Counters of this peer, as of now."""

    steps: int
    """Optimizer steps since the program started."""
    tokens: int
    """Tokens trained on since the program started."""
    step_time_s: float
    blocked: BlockedTime
    agent_restarts: int
    rounds: int
    rounds_missed: int
    """Rounds of this peer's fragments that closed without its work."""
    bytes_sent: int
    bytes_received: int
    fates: Mapping[str, float]
    """All tokens of this peer ever: processed = merged + pending + discarded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """The speed of this peer's training, as of now. ``None``: not known."""

    tokens_per_s: float | None = None
    share_of_peak: float | None = None
    percent: float | None = None
    """Merged part of the tokens at which the run ends. ``None`` if it ends by date alone."""
    time_left_s: float | None = None
    """Time until the run ends, at the present speed of all peers."""
    next_merge_s: float | None = None
    """Time until the next merge of a fragment is expected."""
    device_bytes: float | None = None
    temperature_c: float | None = None
    processor_share: float | None = None
    """Share of the machine's processors that this peer uses, agent and daemon included."""
    preparing: str | None = None
    """The preparation under way that will make it faster: ``compiling for 12 s``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of a finished training loop."""

    finished: bool
    """True if the run reached its end; false if this peer left earlier."""
    stopped: bool
    """True if this peer was asked to leave."""
    lost: RunLost | None
    """The reason why it could not continue, if there was one."""
    steps: int
    tokens: int
    global_tokens: int
    """Merged tokens of all peers."""
    loss: float | None
    held_out: HeldOut | None
    """The newest published held-out loss."""
    stats: Stats
    directory: Path
