"""The loss gate: which states are jumps, and whether one that raised the held-out loss is undone.

Most versions are steps: the merge of a round that this peer was in, or that it replays from the
merged bytes, and each moves a fragment about as far as the ones before. A state that is taken over
whole (to catch up, to give way, to go over to another founding) is always a jump, and so is a step
that moves a fragment further than steps usually do. Certificates say that enough peers stand on
such a state, and nothing about whether it is any good; the loss says that.

A peer measures the loss of its own held-out sequences before and after a jump
(``averaging.guard.loss_gate``). ``judge`` compares the two. A jump that is refused is undone,
and ``Refusals`` remembers its target, so that it is not taken again from the next peer.

The gate is one peer's own judgement: nobody hears of it, and nobody is blamed. So it must not part
an honest peer from a run that has simply had a bad hour. A refusal ends

- when the run's owner has attested a state that goes on from the refused one;
- when the others have certified ``PATIENCE_VERSIONS`` further versions. Their state is then
  measured again, and taken if it is good. Each refusal in a row doubles that number;
- after ``REFUSALS_MAX`` in a row: the next jump is taken whatever it does, and the peer says so.

A peer without parameters of the run has nothing to compare with, and refuses nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from averaging.history.chain import Chain
from averaging.history.lineage import Lineage
from dht.bounded_mapping import BoundedMapping, by_age

RISE_HARMLESS: Final = 0.1
"""A rise of the loss up to this is never refused. Where the loss is close to zero, noise alone may
be a large share of it."""

PATIENCE_VERSIONS: Final = 8
"""Further versions after which a refused history, as it is by then, is measured again."""

REFUSALS_MAX: Final = 3
"""Jumps that are refused in a row."""

REMEMBERED_MAX: Final = 64
"""Refused states that are remembered of one fragment."""


@dataclass(frozen=True, slots=True)
class Passed:
    """The jump stays."""

    reason: str


@dataclass(frozen=True, slots=True)
class Undo:
    """The jump is to be undone."""

    reason: str


@dataclass(frozen=True, slots=True)
class GivesWay:
    """The loss has risen beyond the bound, and the jump stays all the same."""

    reason: str


Verdict = Passed | Undo | GivesWay


def judge(
    before: float | None,
    after: float | None,
    *,
    rise_max: float,
    refused: int = 0,
    attested: bool = False,
) -> Verdict:
    """Decide about a jump by the loss of the same sequences before and after it.

    ``None``: not measured, or not measurable. ``rise_max``: largest rise, as a share of the loss
    before. ``refused``: jumps of this peer that were undone in a row. ``attested``: the run's owner
    vouches for the very states that were jumped to.
    """
    if before is None or not math.isfinite(before):
        return Passed("there is no loss to compare with")
    if after is None:
        return Passed("the loss could not be measured afterwards")
    allowed = before + max(RISE_HARMLESS, rise_max * abs(before))
    if after <= allowed:  # false for a loss that is not a number
        return Passed(f"the loss went from {before:.4g} to {after:.4g}")
    rise = f"the loss rose from {before:.4g} to {after:.4g}; at most {allowed:.4g} is allowed"
    if attested:
        return GivesWay(f"{rise}, but the run's owner attests these states")
    if refused >= REFUSALS_MAX:
        return GivesWay(f"{rise}, but {refused} jumps were refused and the others have gone on")
    return Undo(rise)


class Attested(Protocol):
    """A state of one fragment that the run's owner attests."""

    @property
    def version(self) -> int: ...

    @property
    def lineage(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Refused:
    """A state that this peer has jumped to and gone back from."""

    fragment: int
    version: int
    lineage: Lineage
    times: int
    """Refusals in a row up to this one."""

    @property
    def until_version(self) -> int:
        """The version from which on histories with this state are looked at again."""
        return self.version + PATIENCE_VERSIONS * (1 << (self.times - 1))


class Refusals:
    """The refused states of all fragments, as remembered by one peer."""

    def __init__(
        self, remembered: Iterable[Refused] = (), *, in_a_row: Mapping[int, int] | None = None
    ) -> None:
        self.in_a_row = dict(in_a_row or {})
        """Refusals of each fragment since its last jump that was kept; fragments without any are
        left out."""
        self._refused: dict[int, BoundedMapping[tuple[int, Lineage], Refused]] = {}
        for each in remembered:
            self._remember(each)

    def __len__(self) -> int:
        return sum(map(len, self._refused.values()))

    @property
    def all(self) -> tuple[Refused, ...]:
        return tuple(each for _, known in sorted(self._refused.items()) for each in known.values())

    def of(self, fragment: int) -> bool:
        """True if a state of this fragment is remembered."""
        return bool(self._refused.get(fragment))

    def refuse(self, jumps: Sequence[tuple[int, int, Lineage]]) -> None:
        """Remember the states of one jump: fragment, version and lineage of each."""
        for fragment in {fragment for fragment, _, _ in jumps}:
            self.in_a_row[fragment] = self.in_a_row.get(fragment, 0) + 1
        for fragment, version, lineage in jumps:
            self._remember(Refused(fragment, version, lineage, self.in_a_row[fragment]))

    def _remember(self, refused: Refused) -> None:
        known = self._refused.setdefault(
            refused.fragment, BoundedMapping("refused states", REMEMBERED_MAX, worth=by_age)
        )
        known.renew((refused.version, refused.lineage), refused)

    def row(self, fragments: Iterable[int]) -> int:
        """Most refusals in a row of any of these fragments."""
        return max((self.in_a_row.get(fragment, 0) for fragment in fragments), default=0)

    def kept(self, fragments: Iterable[int]) -> None:
        """A jump of these has been kept: their next refusal is the first one again."""
        for fragment in fragments:
            self.in_a_row.pop(fragment, None)

    def forget(self) -> None:
        """Refuse nothing any more.

        A peer that goes with the others does so with its whole model: fragments of two histories
        side by side are worse than either.
        """
        self._refused.clear()
        self.in_a_row.clear()

    def why_not(self, fragment: int, chain: Chain, attested: Attested | None = None) -> str | None:
        """The reason not to take a state with this history; ``None``: there is none.

        ``attested``: the state of the fragment that the run's owner attests.
        """
        owners = attested is not None and chain.find(attested.version, attested.lineage)
        for each in self._refused.get(fragment, {}).values():
            if chain.find(each.version, each.lineage) is None:
                continue
            if owners and attested is not None and attested.version >= each.version:
                continue
            if chain.tip.version < each.until_version:
                return (
                    f"it goes on from version {each.version}, which raised the held-out loss here; "
                    f"looked at again from version {each.until_version} on"
                )
        return None
