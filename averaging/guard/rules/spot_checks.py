"""Spot checks: whether a contribution lowers the loss on the data that its author must have used.

Each peer's data order follows from its key, so anybody can read the sequences that an author had in
the steps of a contribution. An honest contribution lowers the loss on them, a reversed one raises
it, and one in any other direction leaves it where it was. That holds for one fragment at a time,
and only on the author's own sequences: the effect on those of others is too small to see. So a peer
draws a contribution now and then, and has the loss measured without it and with it.

By how much an honest one lowers the loss depends on the model, the fragment, the batch and the
learning rate: by 17% in one run, by 1% in another and there by nothing in the fragment that has the
norms' scales, and by nothing that can be measured during a warm-up from zero. So a fall is compared
with what is usual for its fragment: the median of those that this peer has measured, which is an
honest one while most members are honest. Until that is known, a check also measures what this
peer's own contribution to the same round does, and takes that for usual: it knows that one to be
honest. Before, poison that moves the loss nowhere was merged for seven of 24 cycles, and cost 5% of
loss in place of 1%. Where the usual fall is too small to be measured in the precision of training,
a contribution fails only if it raises the loss. And no contribution fails that is not below nine
tenths of the known falls of others, whichever of them is left out: where training has slowed down
honest ones vary more than they help. Without that, and when two reversals were enough, all four
learners refused an honest one within 140 s (one of three runs; 20 of 167 honest contributions
failed; real processes, 20 000 parameters, rate 1e-2).

The result of a check is one peer's opinion: losses are no proof, and learners differ in hardware
and state. So it counts in the author's reputation, here and nowhere else
(``averaging.rules.reputation``). One failure
has no consequence: where models are small and rates high, one honest contribution in ten of one
fragment helps less than it should, and one in twenty does harm (real processes, 20 000 parameters).
A peer that has failed is checked again as soon as possible, and a check that it passes takes back a
failure. After three this peer refuses its work for some minutes; then it is checked again at once.
As a reducer it takes no upload of it, as it takes none that is too long, and a seal leaves out
every peer that any reducer refuses. As the coordinator of a round, mostly its leader, it leaves it
out of the seal that it proposes. So one honest peer that has found a poisoner keeps it out of all
rounds that it leads or reduces. Nobody gains power by that: both can leave out whom they like in
any case. And a peer that is suspected wrongly loses no more than time: it stays a member, gets the
new version, and offers the same work to the next round, whose leader is another. A join that is
refused would cost more. The peers of one group would gather at two leaders.

**Words of others.** At one check in a cycle a peer of ten looks at a certain other one every nine
cycles. So a peer that has seen another fail twice names it to the others, and each of them checks
it next: one contribution more between two usual checks, at most. A word is no failure and no
strike, however many say it. A peer that names others which then pass a check is not heard for a
while, until one that it has named fails.

**Accomplices.** No rule can tell who is honest among more than a third of liars. For fewer the
falls of a third of the other authors, whichever these are, do not make a bad one look common, and
those of peers that have no power here do not count.

The checks come after a round and not before its seal: reducers have slices and no fragments, and a
round would wait for trainers. So a check never prevents the harm of the round that it is about.

Not seen: a member that trains honestly and adds poison on top, and one that poisons only while it
is not looked at. Half of its work is then honest.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable
from statistics import median

from averaging.rules.reputation import LIMIT, Deed, Ground, Reputation
from dht.bounded_mapping import BoundedMapping
from dht.identity import PeerId

CHANGE_MIN = 0.005
"""Share of the loss by which a contribution that raises it fails where nothing is usual, and by
which one that lowers it takes a failure back."""
FALL_SHARE = 0.1
"""Share of the usual fall of the loss that is enough."""
LOWEST_SHARE = 0.1
"""Share of others' known falls that are lower than one for which nobody is blamed."""
ACCOMPLICES_SHARE = 1 / 3
"""Share of the other authors whose falls do not count there, whichever these are."""
FALL_MEASURABLE = 0.0005
"""Share of the loss below which a usual fall is lost in the rounding of bf16."""
FALLS_KEPT = 31
FALLS_MIN = 5
"""Falls that must be known before anything is usual."""
FIRST_SHARE = 0.25
"""Time between two checks of a fragment in which nothing is usual yet, as a share of that later."""
PEERS_MAX = 1024
FAILED = Deed.HARMS.weight
"""Strikes of a failure. A check that is passed takes back as much."""
SUSPICIOUS = FAILED / 2
"""Strikes from which on a peer is checked as soon as possible."""
NAMED = 1.5 * FAILED
"""Strikes from which on a peer is named to others: one failure may be chance."""
NAMERS_MAX = 64
BACK_MAX = 1024
"""Steps before its mark that an author must remember the data of."""

REFUSED = "what it brought did not lower the loss on its own data"
"""The reason to merge nothing of a peer, as the round's report is told, and the sender of a refused
upload."""


def expected(before: float, after: float, *, own_steps: int, steps: int) -> float | None:
    """Return the fall of the loss to expect of so many steps, as a share of the loss.

    ``before``, ``after``: the loss on this peer's own data without its own contribution and with
    it. The first steps bring the most, so fewer steps bring at least their share.
    """
    if not (math.isfinite(before) and math.isfinite(after) and before > 0.0):
        return None
    return (before - after) / before * min(1.0, steps / max(1, own_steps))


def steps_between(*, cycle_steps: float, per_cycle: float) -> int:
    """Return the own steps between two checks."""
    return max(1, round(cycle_steps / per_cycle))


class SpotChecks:
    """The checks of one peer. Times are on its own clock."""

    def __init__(
        self, reputation: Reputation, *, every_steps: int, random: Callable[[], float]
    ) -> None:
        """``every_steps``: own steps between two checks. ``random``: a number below 1 that others
        cannot foresee."""
        if every_steps < 1:
            raise ValueError(f"every_steps is {every_steps}; it must be 1 or more")
        self.reputation = reputation
        self._every_steps = every_steps
        self._random = random
        self._drawn_at = self._named_drawn_at = -math.inf
        self._wait = 1.0
        """Random factor of the time until the next draw: 0.5 to 1.5."""
        self._named = BoundedMapping[PeerId, set[PeerId]](
            "named suspects", PEERS_MAX, worth=lambda _, by: len(by)
        )
        """Peers that others suspect and this one has not checked since, and who has named each."""
        self._unclear = BoundedMapping[PeerId, float](
            "unclear authors", PEERS_MAX, worth=lambda _, strikes: strikes
        )
        """Authors whose last check said too little, and their strikes then."""
        self._falls = defaultdict[int, deque[tuple[PeerId, float]]](
            lambda: deque(maxlen=FALLS_KEPT)
        )
        """The last falls of the loss by fragment, as shares of it, and their authors."""

    def draw(
        self, contributors: Iterable[PeerId], step: int, now: float, *, fragment: int = 0
    ) -> PeerId | None:
        """Return the author to check of a round with these contributors; ``None``: check nobody.

        ``step``: own steps so far. A suspect is checked at once, where a check may tell something.
        """
        there = sorted(contributors)
        usual = self._usual(fragment, now)
        tells = usual is None or usual >= FALL_MEASURABLE
        # Without anything usual another check of a suspect may say as little as the last one, and
        # would take the place of those by which something becomes usual.
        unclear = () if usual is not None else self._unclear
        suspects = [
            peer for peer in there if tells and self._is_suspect(peer, now) and peer not in unclear
        ]
        if suspects:
            return suspects[int(self._random() * len(suspects))]
        named = [peer for peer in there if tells and peer in self._named]
        if named and step >= self._named_drawn_at + self._every_steps:
            self._named_drawn_at = step
            return named[int(self._random() * len(named))]
        usual_wait = self._every_steps * (FIRST_SHARE if usual is None else 1.0)
        if not there or step < self._drawn_at + self._wait * usual_wait:
            return None
        # Whole cycles between two checks would be always of the same fragment.
        self._drawn_at, self._wait = step, 0.5 + self._random()
        return there[int(self._random() * len(there))]

    def names(self, author: PeerId, now: float) -> bool:
        """True if this peer is to tell the others now that it suspects an author."""
        is_suspect = self.strikes_of(author, now) >= NAMED
        return is_suspect and self.reputation.saw(author, Deed.IS_NAMED, now)

    def named(self, author: PeerId, by: PeerId, now: float) -> None:
        """Another peer says that it suspects an author. It only makes this peer look."""
        if by == author or self.reputation.is_over(by, Ground.WORD, now):
            return
        if self.strikes_of(author, now) < SUSPICIOUS:  # else it is checked anyway
            by_whom = self._named.setdefault(author, set())
            if len(by_whom) < NAMERS_MAX:
                by_whom.add(by)

    def step_to_read(self, mark: int, steps: int) -> int:
        """Return the step of a contribution whose data is read, drawn now.

        Nobody can know it beforehand: to pass, a contribution must help on all of its steps' data.
        """
        return max(1, mark - int(self._random() * max(1, min(steps, BACK_MAX))))

    def asks_own(self, fragment: int, now: float) -> bool:
        """True while a check compares with what this peer's own contribution does."""
        return self._usual(fragment, now) is None

    def _known(self, fragment: int, now: float) -> list[tuple[float, PeerId]]:
        """The known falls with their authors, in order. Those of distrusted peers do not count."""
        falls = self._falls[fragment]
        return sorted((fall, by) for by, fall in falls if self.reputation.has_power(by, now))

    def _usual(self, fragment: int, now: float) -> float | None:
        known = [fall for fall, _ in self._known(fragment, now)]
        return median(known) if len(known) >= FALLS_MIN else None

    def _lowest(self, fragment: int, author: PeerId, now: float) -> float:
        """The fall that few of the known ones of other authors are below, whichever third of these
        authors is left out.

        Accomplices whose work is now bad and now good are never refused: they would shield another.
        """
        falls = [(fall, by) for fall, by in self._known(fragment, now) if by != author]
        made = Counter(by for _, by in falls)
        left_out = max(1, int(ACCOMPLICES_SHARE * len(made))) if len(made) > 1 else 0
        lowest, below = -math.inf, Counter[PeerId]()
        for fall, by in falls:
            # As few as possible are below it without those that have the most there.
            worst = sorted(made, key=lambda each: (-below[each], made[each], each))[:left_out]
            rest = len(falls) - sum(made[each] for each in worst)
            if below.total() - sum(below[each] for each in worst) > int(LOWEST_SHARE * rest):
                break
            lowest = fall
            below[by] += 1
        return lowest if falls else math.inf

    def checked(
        self,
        author: PeerId,
        before: float,
        after: float,
        now: float,
        *,
        fragment: int = 0,
        own: float | None = None,
    ) -> bool:
        """The loss was measured without a contribution and with it. True if it is in order.

        A loss before that is not a number says nothing of the contribution. ``own``: the fall that
        this peer's own contribution to the same round lets expect, if that was asked for.
        """
        if not math.isfinite(before) or before <= 0.0:
            return True
        fall = (before - after) / before if math.isfinite(after) else -math.inf
        namers = self._named.pop(author, set())
        self._unclear.pop(author, None)
        usual = self._usual(fragment, now)
        if usual is None:
            usual = own
        if self.strikes_of(author, now) < SUSPICIOUS:  # a suspect is checked far more often
            self._falls[fragment].append((author, fall))
        if usual is not None and usual >= FALL_MEASURABLE:
            enough = least = FALL_SHARE * usual
        else:
            enough, least = CHANGE_MIN, -CHANGE_MIN
        if fall >= enough:
            self.reputation.saw(author, Deed.HELPS, now)
            for each in sorted(namers):
                self.reputation.saw(each, Deed.ALARMS_FALSELY, now)
            return True
        if fall >= min(least, self._lowest(fragment, author, now)):
            self._unclear[author] = self.strikes_of(author, now)
            return True  # it says too little to take anything back
        self.reputation.saw(author, Deed.HARMS, now)
        for each in sorted(namers):
            self.reputation.saw(each, Deed.ALARMS_RIGHTLY, now)
        return False

    def evaded(self, author: PeerId, now: float) -> None:
        """An author has not shown what the check needs, although it answers."""
        self.reputation.saw(author, Deed.HARMS, now)

    def unanswered(self, author: PeerId, now: float) -> bool:
        """A check came to nothing. True if that counts: a peer that has failed before has to show
        its work, or it would be drawn again and again, and nobody else."""
        return self._is_suspect(author, now) and self.reputation.saw(author, Deed.IS_UNCLEAR, now)

    def _is_suspect(self, author: PeerId, now: float) -> bool:
        return SUSPICIOUS <= self.strikes_of(author, now) < LIMIT

    def strikes_of(self, author: PeerId, now: float) -> float:
        return self.reputation.count(author, Ground.WORK, now)
