"""The ledger: every token that this peer processed has a fate, in every fragment.

    processed = merged + pending + discarded(reason)        for each fragment, always

``merged`` is the count of this peer's tokens in the fragment's state (``merged[me].tokens``).
``pending`` are tokens that the trainer processed after the last settled step. All other tokens were
discarded, with a reason. The fate of the peer is the mean over fragments, weighted by their size.

Pending work of an incarnation that ends is discarded as ``crash`` or ``left``. If a contribution
that was under way is merged after all, a later state contains it, and the tokens move to
``merged``.

``excess`` counts tokens that were merged although they had been neither pending nor discarded. It
must be zero, because a contribution is merged at most once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta, Struct

Tokens: TypeAlias = Annotated[int, Meta(ge=0)]

CRASH = "crash"
"""The trainer or its machine crashed."""
LEFT = "left"
"""The peer left before the work could be merged."""
STALE = "stale"
"""The work began too many versions ago."""
LOST = "lost"
"""Overwritten when the trainer adopted a state, by the run's rule or after a dead agent."""
APART = "apart"
"""Merged on a side of a fork that was given up later."""

REFUSED = "refused"
"""Pending when this peer went back from states of others (``averaging.guard.loss_gate``)."""

ROLLED_BACK = "rolled back"
"""Merged into, or offered to, versions that the run's owner has taken back."""

# Order in which tokens that were merged after all are taken back: those in doubt come first.
_IN_DOUBT_FIRST = (CRASH, LEFT, APART, LOST, STALE)


@dataclass(frozen=True, slots=True)
class Fate:
    """The fate of the tokens in one fragment, or the weighted mean over all fragments."""

    processed: float
    merged: float
    pending: float
    discarded: Mapping[str, float]
    excess: float = 0
    """Tokens merged more than once, by a bug of this peer or another."""

    @property
    def discarded_total(self) -> float:
        return sum(self.discarded.values())

    @property
    def imbalance(self) -> float:
        """Difference between both sides of the equation; zero unless the ledger is wrong."""
        return self.processed - self.merged - self.pending - self.discarded_total + self.excess


class _Account(Struct):
    """Counts of tokens in one fragment."""

    merged: Tokens
    settled: Tokens
    """Tokens of this incarnation that are no longer pending, whatever their fate."""
    discarded: dict[str, Tokens]
    excess: Tokens = 0
    recalled: Tokens = 0
    """Tokens of incarnations that only other peers know, as this peer lost its files."""
    observed: bool = False

    def discard(self, tokens: int, reason: str) -> None:
        if tokens:
            self.discarded[reason] = self.discarded.get(reason, 0) + tokens

    def retrieve(self, tokens: int, *, first: Sequence[str] = ()) -> int:
        """Take tokens back from those discarded; returns the number that was not found."""
        for reason in (*first, *_IN_DOUBT_FIRST, *sorted(self.discarded)):
            taken = min(tokens, self.discarded.get(reason, 0))
            if taken:
                self.discarded[reason] -= taken
                if not self.discarded[reason]:
                    del self.discarded[reason]
                tokens -= taken
        return tokens


class _Saved(Struct):
    """A ledger as it is kept with the outer checkpoint."""

    earlier: Tokens
    current: Tokens
    accounts: list[_Account]


class Ledger:
    """The tokens of one peer in one run, over all its incarnations."""

    def __init__(self, fragment_sizes: Sequence[int]) -> None:
        if not fragment_sizes or min(fragment_sizes) < 1:
            raise ValueError(f"fragment sizes are {list(fragment_sizes)}; each is at least 1")
        self._sizes = tuple(fragment_sizes)
        self._accounts = [_Account(0, 0, {}) for _ in fragment_sizes]
        self._earlier = 0
        self._current = 0

    def __repr__(self) -> str:
        return f"Ledger({self.total()})"

    def begin(self, *, earlier_tokens: int, clean: bool) -> None:
        """Begin a new incarnation; those before it processed ``earlier_tokens``.

        ``clean``: whether the last one ended in order (``peer.storage.progress``). Its pending
        tokens are discarded until a state shows that they were merged.
        """
        known_before = self._earlier + self._current
        if earlier_tokens < known_before:
            # The count was lost, with a damaged disk or in a power cut. Work after the checkpoint
            # is known to other peers only.
            for account in self._accounts:
                account.observed = False
        self._earlier = max(
            earlier_tokens,
            known_before,
            *(a.merged + sum(a.discarded.values()) - a.excess - a.recalled for a in self._accounts),
        )
        self._current = 0
        for account in self._accounts:
            known = account.merged + sum(account.discarded.values()) - account.excess
            account.discard(self._earlier + account.recalled - known, LEFT if clean else CRASH)
            account.settled = 0

    def process(self, tokens: int) -> None:
        """Set the number of tokens that this incarnation has processed."""
        self._current = max(self._current, tokens)

    def observe(
        self, fragment: int, *, merged_tokens: int, settled_tokens: int, given_up: str = APART
    ) -> None:
        """Take note of a state in which ``merged_tokens`` of this peer are merged.

        ``settled_tokens`` is this incarnation's count at the step up to which the state contains
        its work; later tokens are pending. Both may fall, when the peer moves to another side of a
        fork and offers its work again there. ``given_up``: the fate of tokens that were merged
        and are not any more.
        """
        account = self._accounts[fragment]
        gained = merged_tokens - account.merged
        settled = settled_tokens - account.settled
        if gained > settled:
            # Tokens that are pending again were discarded with the side they were merged on.
            first = (APART,) if settled < 0 else ()
            unexplained = account.retrieve(gained - settled, first=first)
            if account.observed:
                account.excess += unexplained
            else:
                account.recalled += unexplained
        else:
            account.discard(settled - gained, given_up)
        account.merged = merged_tokens
        account.settled = settled_tokens
        account.observed = True
        self._current = max(self._current, settled_tokens)

    def discard(self, fragment: int, tokens: int, reason: str) -> None:
        """Discard the oldest ``tokens`` of this incarnation's pending ones."""
        account = self._accounts[fragment]
        if not 0 <= tokens <= self._current - account.settled:
            raise ValueError(
                f"cannot discard {tokens} tokens of fragment {fragment}: "
                f"{self._current - account.settled} are pending"
            )
        account.discard(tokens, reason)
        account.settled += tokens

    def settled(self, fragment: int) -> int:
        """Tokens of this incarnation that are no longer pending, whatever their fate."""
        return self._accounts[fragment].settled

    def fate(self, fragment: int) -> Fate:
        """The fate of the tokens in one fragment, in whole tokens."""
        account = self._accounts[fragment]
        return Fate(
            processed=self._earlier + self._current + account.recalled,
            merged=account.merged,
            pending=self._current - account.settled,
            discarded=dict(sorted(account.discarded.items())),
            excess=account.excess,
        )

    def total(self) -> Fate:
        """The fate of the peer's tokens: the mean over fragments, weighted by size."""
        fates = [self.fate(index) for index in range(len(self._sizes))]
        whole = sum(self._sizes)

        def mean(values: Sequence[float]) -> float:
            pairs = zip(self._sizes, values, strict=True)
            return sum(size * value for size, value in pairs) / whole

        reasons = sorted({reason for fate in fates for reason in fate.discarded})
        return Fate(
            processed=mean([fate.processed for fate in fates]),
            merged=mean([fate.merged for fate in fates]),
            pending=mean([fate.pending for fate in fates]),
            discarded={
                reason: mean([fate.discarded.get(reason, 0) for fate in fates])
                for reason in reasons
            },
            excess=mean([fate.excess for fate in fates]),
        )

    # --- saved with the outer checkpoint ------------------------------------------------------

    def plain(self) -> dict[str, Any]:
        """The ledger as values that JSON has."""
        saved = _Saved(self._earlier, self._current, self._accounts)
        plain: dict[str, Any] = msgspec.to_builtins(saved, order="sorted")
        return plain

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any], fragment_sizes: Sequence[int]) -> Ledger:
        """Restore a ledger from ``plain()``; call ``begin`` next. Raises ``ValueError``."""
        try:
            saved = msgspec.convert(plain, _Saved)
        except msgspec.ValidationError as error:
            raise ValueError(f"not a ledger: {error}") from error
        if len(saved.accounts) != len(fragment_sizes):
            raise ValueError(
                f"a ledger of {len(saved.accounts)} fragments, not {len(fragment_sizes)}"
            )
        ledger = cls(fragment_sizes)
        ledger._earlier, ledger._current = saved.earlier, saved.current
        ledger._accounts = saved.accounts
        return ledger


QUIET_S = 60.0
CYCLES = 1.5


class GivenUpWork:
    """Says when to tell the owner of a peer that merged work was given up with a side of a fork.

    It watches the number of tokens that were discarded as ``APART``. Fragments change sides one by
    one, each when it is due, and some of the work may be pending again or merged after all. So the
    loss is told once, when the count has stood still for a cycle, or when the peer goes.
    """

    __slots__ = ("_seen", "_since", "_told")

    def __init__(self, tokens: float) -> None:
        """``tokens``: discarded in earlier lives of this peer."""
        self._told = self._seen = tokens
        self._since = 0.0

    def __repr__(self) -> str:
        return f"GivenUpWork(told={self._told:g}, seen={self._seen:g})"

    def look(self, tokens: float, *, now: float, cycle_s: float) -> int | None:
        """Number of tokens given up since the last time that it was told; ``None``: not now.

        ``cycle_s``: time in which each fragment is due once; ``math.inf`` as ``now`` is the end.
        """
        if tokens != self._seen:
            self._seen, self._since = tokens, now
        # Tokens that were merged after all are no loss, and lost again they are one.
        self._told = min(self._told, tokens)
        lost = round(tokens - self._told)
        if lost < 1 or now - self._since < max(QUIET_S, CYCLES * cycle_s):
            return None
        self._told = tokens
        return lost
