"""The settings of rounds: what a run decides once, in one place for the machine."""

from __future__ import annotations

from dataclasses import dataclass, field

from averaging.messages import ROSTER_MAX
from averaging.rules.due import DuePolicy
from averaging.rules.mixing import MixingPolicy
from averaging.rules.quorum import QuorumPolicy

_WAITS = (
    "snapshot_s",
    "answer_s",
    "upload_s",
    "margin_s",
    "resend_s",
    "suspect_s",
    "round_s",
    "catch_up_s",
    "doubt_s",
    "alone_s",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPolicy:
    """How rounds of a run go. All durations are on the own clock of whoever waits."""

    quorum: QuorumPolicy = field(default_factory=QuorumPolicy)
    due: DuePolicy = field(default_factory=DuePolicy)
    mixing: MixingPolicy = field(default_factory=MixingPolicy)
    group_size: int = 16
    grouping: str = "halves"
    """How more peers than that are dealt into groups: ``averaging.rules.grouping``."""
    codec: str = "int4"
    merge: str = "mean"
    eta: float = 1.0
    mu: float = 0.5
    batch_tokens_max: int | None = None
    """The run's largest batch. Tokens beyond steps times this do not count. Not set: as said."""
    tokens_end: int | None = None
    """With so many tokens merged a fragment is done: ``averaging.rules.final_mix``.

    Not set: never.
    """
    stale_max: int = 8
    """Work that began more than this many versions ago is not offered any more."""
    slice_bytes_min: int = 256 << 10
    """A slice is not cut smaller than this (DESIGN 3.1)."""
    snapshot_s: float = 60.0
    """How long the learner may take to its next safe point."""
    answer_s: float = 5.0
    """A leader that has not noted a ``Join`` by then is dead for this round."""
    upload_s: float = 15.0
    """From the commit until all uploads should have arrived, besides what their bytes take
    (``averaging.rules.deadlines``); the same again for merged slices."""
    slow_link_bytes_s: float = 625_000.0
    """A link of which nobody knows the speed is taken for this, and no slower one is waited for."""
    margin_s: float = 3.0
    """What a message may take more than expected; also the distance between successors."""
    resend_s: float = 2.0
    """Nothing that matters is said only once."""
    suspect_s: float = 1.0
    """A peer whose link broke has this long to be heard again before others replace it."""
    round_s: float = 180.0
    """After this, and what the bytes take, a round is over for a member, whatever happened."""
    catch_up_s: float = 600.0
    doubt_s: float = 300.0
    """A doubt that nobody could settle for so long ends: the work is pending again."""
    alone_s: float = 600.0
    """Who has been alone for so long folds its work into theta by itself."""

    def __post_init__(self) -> None:
        if not 2 <= self.group_size <= ROSTER_MAX:
            raise ValueError(
                f"group_size is {self.group_size}; a group has 2 to {ROSTER_MAX} peers"
            )
        if self.tokens_end is not None and self.tokens_end < 1:
            raise ValueError(f"tokens_end is {self.tokens_end}; a run has at least one token")
        for name in _WAITS:
            if not getattr(self, name) > 0.0:
                raise ValueError(f"{name} is {getattr(self, name)}; every wait is above 0 s")
        if not self.slow_link_bytes_s > 0.0:
            raise ValueError(
                f"slow_link_bytes_s is {self.slow_link_bytes_s}; a link moves some bytes"
            )
        if self.round_s <= 2 * self.upload_s:
            raise ValueError(
                f"round_s is {self.round_s}; uploads and merged slices alone may take twice "
                f"upload_s, {self.upload_s} s each"
            )
