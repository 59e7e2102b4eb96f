"""The settings of rounds that a run decides once, in one place for the round machine."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from averaging.numbers.layout import Kind
from averaging.rules.due import DuePolicy
from averaging.rules.line_levels import Level
from averaging.rules.mixing import MixingPolicy
from averaging.rules.quorum import QuorumPolicy
from averaging.rules.reputation import Reputation
from averaging.rules.weights import LateWork

RETRY_MARGINS = 4
"""A source that could not be caught up with is not tried again for this many ``margin_s``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbationPolicy:
    """Work that makes a peer established."""

    rounds: int = 0
    """Merges that contain its work, of all fragments together; 0: there is no probation."""
    seconds: float = 0.0
    """Time since the first of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPolicy:
    """The settings of a run's rounds. All durations are on the own clock of the peer that waits."""

    quorum: QuorumPolicy = field(default_factory=QuorumPolicy)
    due: DuePolicy = field(default_factory=DuePolicy)
    mixing: MixingPolicy = field(default_factory=MixingPolicy)
    probation: ProbationPolicy = field(default_factory=ProbationPolicy)
    group_size: int = 16
    codec: str = "int4"
    """Codec of uploads."""
    codec_down: str | None = None
    """Codec of merged slices, if it is another one."""
    smaller_levels: tuple[Level, ...] = ()
    """Codecs and cycles with fewer bytes per step, for lines that do not carry the preferred ones
    (``averaging.rules.line_levels``)."""
    embedding_codecs: tuple[str, str] | None = None
    """Codecs of fragments of embeddings and head alone, up and down; ``None``: as of the others."""
    line_share: float = 0.7
    """Share of a line that rounds may take before a smaller level is chosen."""
    feedback: frozenset[str] = frozenset()
    """Codecs whose loss is left in the learner's parameters, as part of the next contribution. Only
    where ``carry`` adopts; each peer does it for itself."""
    feeds_back_merged: bool = True
    """True if the loss of encoding slices that the peer merges is left there, too, where one of the
    two codecs of a round is among these (``averaging.round.contributing``)."""
    merge: str = "mean"
    late_work: LateWork = "whole"
    """Length of the displacement of work that missed its round; each peer shortens its own."""
    eta: float = 1.0
    mu: float = 0.0
    batch_tokens_max: int | None = None
    """The run's largest batch: tokens beyond steps times this do not count. ``None``: all do."""
    tokens_end: int | None = None
    """Tokens with which a fragment is done (``averaging.rules.mixing``); ``None``: never."""
    audit_rate: float = 0.0
    """Chance that a piece of a merged slice is audited by anybody (``averaging.guard``); 0: no
    audits. Each peer does it for itself."""
    spot_checks: float = 0.0
    """Contributions that each learner checks in a cycle (``averaging.guard.rules.spot_checks``)."""
    stale_max: int = 8
    """Work that began more than this many versions, and ``stale_s``, ago is discarded."""
    stale_s: float = 600.0
    """Age below which no work is discarded: many versions pass while a slow line catches up
    once, and older work counts less (``averaging.rules.weights``)."""
    slice_bytes_min: int = 256 << 10
    """Smallest slice that is worth a reducer of its own."""
    snapshot_s: float = 60.0
    """Time that the learner may take to reach its next safe point."""
    answer_s: float = 5.0
    """A leader that has not answered a ``Join`` by then counts as dead for this round."""
    upload_s: float = 15.0
    """Time from the commit until all uploads should have arrived, besides the time for their bytes
    (``averaging.round.gathering.roster``); the same again for merged slices.
    """
    slow_link_bytes_s: float = 625_000.0
    """Speed that an unknown line counts as (5 Mbit/s). A slower line is slow in any company."""
    margin_s: float = 3.0
    """Allowance for a slow message; also the delay between successors."""
    resend_s: float = 2.0
    """Interval at which messages that matter are repeated."""
    suspect_s: float = 1.0
    """Time that a peer whose link broke has to be heard again before others replace it."""
    round_s: float = 180.0
    """After this, and the time for the bytes, a round is over for a member in any case."""
    catch_up_s: float = 600.0
    doubt_s: float = 300.0
    """After this a doubt that nobody could settle ends, and the work is pending again."""
    alone_s: float = 600.0
    """Time after which a peer that has lost sight of all others folds its work into theta."""

    @property
    def codecs(self) -> tuple[str, str]:
        """The preferred codecs of uploaded and of merged displacements."""
        return self.codec, self.codec_down or self.codec

    @property
    def levels(self) -> tuple[Level, ...]:
        """The preferred codecs and cycle, and the smaller ones after them."""
        up, down = self.codecs
        first = Level(codec=up, codec_down=down, cycle_steps=self.due.cycle_steps)
        return first, *self.smaller_levels

    def __post_init__(self) -> None:
        if self.round_s <= 2 * self.upload_s:
            raise ValueError(
                f"round_s is {self.round_s}; uploads and merged slices alone may take twice "
                f"upload_s, {self.upload_s} s each"
            )

    def reputation(self) -> Reputation:
        """The reputation of peers of whom nothing is known yet."""
        return Reputation(
            retry_s=RETRY_MARGINS * self.margin_s,
            retry_max_s=self.catch_up_s,
        )

    def of_statistics(self) -> RoundPolicy:
        """The policy of the fragment of statistics: their exact mean, and no outer optimizer."""
        exact = self.in_codecs("f32", "f32")
        return replace(
            exact,
            feedback=frozenset(),
            merge="mean",
            late_work="whole",
            eta=1.0,
            mu=0.0,
        )

    def in_codecs(self, up: str, down: str) -> RoundPolicy:
        """The same policy with these codecs on every line. Cycles still follow the lines."""
        levels = (replace(each, codec=up, codec_down=down) for each in self.smaller_levels)
        other = None if down == up else down
        return replace(self, codec=up, codec_down=other, smaller_levels=tuple(levels))

    def of_kinds(self, kinds: Collection[Kind]) -> RoundPolicy:
        """The policy of a fragment with tensors of these kinds."""
        if "statistic" in kinds:
            return self.of_statistics()
        if self.embedding_codecs is not None and set(kinds) <= {"embedding", "head"}:
            return self.in_codecs(*self.embedding_codecs)
        return self
