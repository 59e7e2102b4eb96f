"""The weight of each contribution in a merge.

The weight is tokens^2 / steps (quantity times quality: Decoupled DiLoCo, arXiv 2604.21428), damped
by 1 / (1 + 0.25 s) for s versions of staleness. Tokens are clamped to what the steps can have
processed, and no share is above max(2/n, 1/3), so that no peer dominates a merge. Fractions are
exact until the last division, so every machine gets the same floats. Contributors on probation
(``averaging.rules.electors``) have a quarter of the merge together at most: their number buys them
nothing.

The same claims decide how many tokens a merge adds to a run (``credited``).

**Late work** missed the round it was meant for. A learner keeps it and offers it again with its
next steps, so its displacement is that of several cycles. Merged ``whole`` it makes the outer step
longer: where a third of the contributions miss each round, a merge moves theta about twice as far
as one to which everybody came, and momentum has gone on meanwhile. With ``per_cycle`` its sender
uploads the mean of its cycles: an outer step then stays as long as a cycle, as in FedNova (arXiv
2007.07481). The work is merged as a whole in both cases, and all its tokens count.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from statistics import median_high
from typing import Literal, TypeAlias

from averaging.messages import Commit

STALENESS_DAMPING = Fraction(1, 4)
SHARE_CAP_MIN = Fraction(1, 3)
"""Less would hurt few fast members among many slow ones: with a quarter, two fast ones and ten that
take ten times as long end 1.3% higher, one fast one and ten 1.6%
(docs/research/results-few-members.md).
"""
NEWCOMERS_SHARE_MAX = Fraction(1, 4)
"""The share of all contributors on probation together."""
CREDIT_RATIO_MAX = 1024
"""Largest number of tokens that count of one contribution, as a multiple of the round's median."""
NEWCOMER_CREDIT_RATIO_MAX = 64
"""The same for a member on probation."""


@dataclass(frozen=True, slots=True)
class Contribution:
    """A contributor's statement about its work since it was last merged."""

    tokens: int
    steps: int
    staleness: int = 0
    """Versions between its base and the version that it is merged into."""


def shares_of(
    contributions: Sequence[Contribution],
    *,
    batch_tokens_max: int | None = None,
    on_probation: Collection[int] = (),
) -> tuple[float, ...]:
    """Return the weight of each contribution, in order; they sum to one except for rounding.

    ``batch_tokens_max`` is the run's largest batch: tokens beyond steps times this do not count
    (``None``: tokens have been clamped before). A contribution without tokens or steps weighs
    nothing, unless all are without: then all weigh the same. ``on_probation``: indices of
    contributions whose share is bounded.
    """
    return _shares(tuple(contributions), batch_tokens_max, frozenset(on_probation))


@lru_cache(maxsize=512)
def _shares(
    contributions: tuple[Contribution, ...],
    batch_tokens_max: int | None,
    on_probation: frozenset[int],
) -> tuple[float, ...]:
    """Cached: a peer asks for one round's as a reducer of each slice and as a member."""
    worth = [_worth(contribution, batch_tokens_max) for contribution in contributions]
    if not any(worth):
        worth = [Fraction(1)] * len(contributions)
    shares = _capped(worth)
    theirs = sum((shares[index] for index in on_probation), Fraction(0))
    if NEWCOMERS_SHARE_MAX < theirs < 1:
        less, more = NEWCOMERS_SHARE_MAX / theirs, (1 - NEWCOMERS_SHARE_MAX) / (1 - theirs)
        shares = [
            share * (less if index in on_probation else more) for index, share in enumerate(shares)
        ]
    return tuple(float(share) for share in shares)


def weights_of(commit: Commit, contributors: Sequence[int]) -> tuple[float, ...]:
    """Return the weights of these roster entries, in order: a function of commit and seal."""
    return shares_of(
        [
            Contribution(tokens=entry.tokens, steps=entry.steps, staleness=entry.staleness)
            for entry in (commit.members[index] for index in contributors)
        ],
        batch_tokens_max=commit.batch_tokens_max,
        on_probation=[
            place for place, index in enumerate(contributors) if index in commit.on_probation
        ],
    )


def credited(
    claims: Sequence[tuple[int, int]], *, batch_tokens_max: int, on_probation: Collection[int] = ()
) -> tuple[int, ...]:
    """Return the tokens that count of each claim (tokens, steps), in order.

    No claim counts for more than its steps can have processed, nor for more than
    ``CREDIT_RATIO_MAX`` times the median: a run's schedule and its end follow the tokens, and must
    not follow one member's word. Of two claims the larger one is the median, and claims of members
    on probation (their indices) do not move it; of theirs, at most ``NEWCOMER_CREDIT_RATIO_MAX``
    times as much counts.

    A small multiple would be a tighter bound, and would hurt: tokens that do not count are lost in
    their owner's ledger. A rack of eight large devices does the work of three hundred laptops with
    a graphics card each, so an established member has a thousand times the median. Its weight is
    capped in any case.
    """
    clamps = [
        clamped(tokens, steps=max(1, s), batch_tokens_max=batch_tokens_max) for tokens, s in claims
    ]
    middle = median_high(
        [tokens for index, tokens in enumerate(clamps) if index not in on_probation]
    )
    ratios = (
        NEWCOMER_CREDIT_RATIO_MAX if index in on_probation else CREDIT_RATIO_MAX
        for index in range(len(clamps))
    )
    return tuple(min(tokens, middle * ratio) for tokens, ratio in zip(clamps, ratios, strict=True))


def clamped(tokens: int, *, steps: int, batch_tokens_max: int) -> int:
    """Return ``tokens``, limited to what this many steps can have processed."""
    return max(0, min(tokens, steps * batch_tokens_max))


def _worth(work: Contribution, batch_tokens_max: int | None) -> Fraction:
    tokens = work.tokens
    if batch_tokens_max is not None:
        tokens = clamped(tokens, steps=work.steps, batch_tokens_max=batch_tokens_max)
    if tokens <= 0 or work.steps <= 0:
        return Fraction(0)
    damping = 1 + STALENESS_DAMPING * max(0, work.staleness)
    return Fraction(tokens * tokens, work.steps) / damping


def _capped(worth: Sequence[Fraction]) -> list[Fraction]:
    """Return shares none of which is above the cap; the excess goes to the others in proportion.

    That may lift another share above the cap, so it is repeated until none is. n counts only
    contributions that are worth anything: otherwise few among many idle ones could not add up to a
    whole.
    """
    working = sum(1 for value in worth if value)
    if not working:
        return []
    cap = max(Fraction(2, working), SHARE_CAP_MIN)
    capped: set[int] = set()
    while True:
        free = sum(value for index, value in enumerate(worth) if index not in capped)
        left = 1 - cap * len(capped)
        shares = [
            cap if index in capped else (value * left / free if free else Fraction(0))
            for index, value in enumerate(worth)
        ]
        above = {index for index, share in enumerate(shares) if share > cap}
        if not above:
            return shares
        capped |= above


LateWork: TypeAlias = Literal["whole", "per_cycle"]


def uploaded_share(rule: LateWork, *, staleness: int) -> float:
    """Return the factor on a displacement that is uploaded.

    ``staleness``: versions between the one at which the work began and the one it is offered to.
    """
    return 1.0 / (1 + staleness) if rule == "per_cycle" else 1.0
