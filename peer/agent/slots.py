"""The agent's side of the shared memory: the learner, as ``averaging`` sees it.

``SlotPort`` is the ``LearnerPort`` of a live peer. It shares the slots of
``peer.bridge.shared_memory`` with the trainer, keeps the base of each fragment of the trainer's
parameters, and turns an offered snapshot in place into the delta which the trainer adds::

    merged       slot := theta' - snapshot      (steps made meanwhile stay)
    not merged   slot := theta' - base          the own displacement is kept whole
    rebased      slot := theta' - ancestor      so is the displacement since the fork
    base lost    slot := theta'                 only if an agent died at a bad moment
    statistics   slot := theta'                 in all of these cases, and nothing counts as lost

For fp32 parameters the new base is theta' itself and costs no memory. Coarser parameters answer by
how much they really moved, and the base moves by as much: parameters that nobody trained equal
their base to the bit, and contribute exactly nothing.

**A new agent on used memory** (the trainer lives, the old agent died) reads the version that the
trainer holds from each control block. It gets that version's theta from the last checkpoint
(``resume``), or from a replay that passes through it on the way to the newest version
(``passed``). If no live peer has that version any more, the trainer keeps its parameters, as its
own displacement since the checkpoint (``keep``). Only if other peers are ahead and no replay leads
there, the own displacement cannot be told apart: it is given up (the ledger calls it
discarded(lost)) and the current theta is set. A snapshot in state OFFERED is intact, and in doubt:
the ``merged`` map of the first adopted state tells whether it was merged. A snapshot in state
TURNING is lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from averaging.history.adoption import Change, Held, Origin, Parting, change_for
from averaging.history.state import FragmentState
from averaging.live.learner_port import Progress, Snapshot
from averaging.numbers.arrays import Float32s
from dht.bounded_mapping import BoundedMapping, by_age
from dht.identity import PeerId
from peer.bridge.shared_memory import Adoption, AdoptionOrder, Base, SharedTensors, SlotState

MARKS_MAX = 16
"""Number of offered steps whose token counts are remembered."""

CHECKED_AT_ONCE = 1 << 20


@dataclass(frozen=True, slots=True)
class Adopted:
    """The trainer has adopted a version.

    ``lost_tokens`` of its own were overwritten: because an agent died (``overwritten``), or for the
    reason given to ``discard``.
    """

    fragment: int
    version: int
    lost_tokens: int
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class _Next:
    """A state to be adopted when the slot is free."""

    state: FragmentState
    contained: int | None = None
    """The last own step that is in it."""
    parting: Parting | None = None
    """The fork whose other side it is on; ``None``: the trainer is on the same side."""
    keeping: tuple[int, int] | None = None
    """Own step and tokens up to which it has the own work, if it changes no parameter."""


@dataclass(slots=True, eq=False)
class _Given:
    """A state that was given to the trainer and is not adopted yet."""

    state: FragmentState
    operation: Adoption
    lost_from: int | None = None
    """Tokens that it accounts for; those after them are lost by a SET."""
    lost_reason: str = ""


@dataclass(slots=True, eq=False)
class _Entry:
    """The agent's knowledge of one fragment."""

    base: Float32s | None = None
    """Theta as the trainer holds it; for fp32 parameters the very array of a ``FragmentState``."""
    marks: dict[int, int] = field(
        default_factory=lambda: BoundedMapping("marks", MARKS_MAX, worth=by_age)
    )
    """The steps offered last, oldest first, with the tokens up to them."""
    outstanding: int | None = None
    """The mark of a snapshot that averaging is using."""
    is_finite: bool = True
    """The last offered snapshot was."""
    waiting: asyncio.Future[None] | None = None
    """Set by a caller that waits for the next OFFERED."""
    next: _Next | None = None
    given: _Given | None = None
    begun_version: int = 0
    """The trainer's own displacement is known since this version: its work was overwritten there,
    or another side of a fork was taken without its parting."""
    begun: tuple[int, int] = (0, 0)
    """Own step and tokens of the work that is not in this displacement."""
    giving_up: str | None = None
    """Reason why the next state overwrites the trainer's own work."""
    taken_over: bool = False
    """True while the trainer has adopted nothing since an earlier agent died."""
    orphan: bool = False
    """True while the slot has what was offered to an agent that died."""
    is_empty: bool = False
    """The memory of its slot was given back."""
    kept: Base | None = None
    """Base of the trainer's parameters at the time of ``keep``."""


@dataclass(slots=True)
class SlotPort:
    """Offers and adoptions of one trainer, all on the thread of the event loop."""

    memory: SharedTensors
    peer: PeerId
    on_adopted: Callable[[Adopted], None] = lambda adopted: None
    on_not_finite: Callable[[int], None] = lambda fragment: None
    """Called when the trainer's offer of a fragment is not finite, once until it is again."""
    statistics: frozenset[int] = frozenset()
    """Fragments of statistics (``averaging.history.adoption``)."""
    empties: bool = False
    """Give the memory of slots back while nothing is in them."""
    closed: set[int] = field(default_factory=set)
    """Final fragments, of which nothing is offered any more."""
    _entries: list[_Entry] = field(init=False)

    def __post_init__(self) -> None:
        self._entries = [_Entry() for _ in range(self.memory.fragments)]

    def __repr__(self) -> str:
        return f"SlotPort({self.memory!r})"

    # --- LearnerPort --------------------------------------------------------------------------

    def progress(self) -> Progress:
        """The trainer's counters, at once."""
        memory = self.memory
        return Progress(
            step=memory.step,
            tokens=memory.tokens,
            step_time_s=memory.step_time_s,
            batch_tokens_max=memory.batch_tokens_max,
        )

    async def snapshot(self, fragment: int, *, timeout_s: float) -> Snapshot | None:
        """The fragment at the trainer's next safe point; ``None`` if there is none in time."""
        if fragment in self.closed:
            return None
        offered = await self.values(fragment, timeout_s=timeout_s)
        entry, base = self._entries[fragment], self.memory.base(fragment)
        if offered is None:
            return None
        if entry.base is None or base is None:
            self.release(fragment)
            return None
        mark, tokens = self.memory.offered(fragment)
        was_finite, entry.is_finite = entry.is_finite, await _is_finite(offered)
        if entry.outstanding != mark:
            return None  # something was adopted meanwhile
        if not entry.is_finite:
            self.release(fragment)
            if was_finite:
                self.on_not_finite(fragment)
            return None
        return Snapshot(
            base=entry.base,
            values=offered,
            base_version=base.version,
            base_lineage=base.lineage,
            mark=mark,
            steps=max(0, mark - base.mark),
            tokens=max(0, tokens - base.tokens),
        )

    async def values(self, fragment: int, *, timeout_s: float) -> Float32s | None:
        """The parameters alone, as of the next safe point, for a founder, which has no base yet.

        They count as outstanding until ``adopt`` or ``release``.
        """
        entry = self._entries[fragment]
        if entry.outstanding is not None or entry.waiting is not None:
            raise RuntimeError(f"fragment {fragment} has an outstanding snapshot already")
        self._advance(fragment)
        if self.memory.state(fragment) is SlotState.OFFERED and not entry.orphan:
            self.memory.pass_on(fragment, SlotState.FREE)  # it is old; ask for a fresh one
        try:
            async with asyncio.timeout(timeout_s):
                return await self._offered(fragment, entry)
        except TimeoutError:
            return None
        finally:
            entry.waiting = None

    async def _offered(self, fragment: int, entry: _Entry) -> Float32s:
        while True:
            entry.waiting = asyncio.get_running_loop().create_future()
            self._advance(fragment)
            state = self.memory.state(fragment)
            if state is SlotState.OFFERED and not entry.orphan:
                mark, tokens = self.memory.offered(fragment)
                entry.outstanding = mark
                entry.marks[mark] = tokens
                return self.memory.slot(fragment)
            if state is SlotState.FREE and entry.is_empty:
                await asyncio.to_thread(self.memory.fill, fragment)
                entry.is_empty = False
                continue
            if state is SlotState.FREE and entry.next is None:
                self.memory.pass_on(fragment, SlotState.WANTED)
            await entry.waiting

    def adopt(self, fragment: int, state: FragmentState, *, contained: int | None) -> None:
        """Let the trainer adopt ``state``, which has the own work up to step ``contained``."""
        entry = self._entries[fragment]
        if entry.taken_over:
            # Averaging knows nothing of the offers of the agent before this one.
            self.adopt_first(fragment, state)
        else:
            if _holds(state, entry.kept):
                # Some of the work kept as own is in it: it must not be added once more.
                entry.base = entry.kept = None
            self._adopt_next(fragment, entry, state, contained)

    def _adopt_next(
        self, fragment: int, entry: _Entry, state: FragmentState, contained: int | None
    ) -> None:
        before = entry.next or _Next(state)
        contained = before.contained if contained is None else contained
        entry.next = _Next(state, contained, before.parting)
        entry.outstanding = None
        self._advance(fragment)

    def passed(self, fragment: int, state: FragmentState) -> None:
        """Note ``state``, which a replay passes through, if it is the base of the trainer."""
        held = self.memory.base(fragment)
        if self.misses_base(fragment) and held is not None and held.lineage == state.lineage:
            self._entries[fragment].base = state.theta.copy()

    def moved(self, fragment: int, before: FragmentState, after: FragmentState) -> None:
        """Hold on to the arrays of ``after``, which have the values of ``before``."""
        entry = self._entries[fragment]
        if entry.base is before.theta:
            entry.base = after.theta
        if entry.given is not None and entry.given.state is before:
            entry.given.state = after
        if entry.next is not None and entry.next.state is before:
            entry.next = replace(entry.next, state=after)

    def misses_base(self, fragment: int) -> bool:
        """True if only a replay can recover the base of the trainer's parameters."""
        in_hand = self.memory.state(fragment) is not SlotState.ADOPT
        known = self._entries[fragment].base is not None
        return in_hand and not known and self.memory.base(fragment) is not None

    def rebase(self, fragment: int, state: FragmentState, parting: Parting) -> int | None:
        """Adopt the other side of a fork, and keep the displacement since the parting.

        Returns the tokens that are pending again; ``None`` if it cannot be done.
        """
        entry = self._entries[fragment]
        again = self.tokens_at(fragment, parting.given_up_mark)
        left = self._tokens_since(fragment, parting.merged_mark)
        if again is None or left is None or entry.base is None or entry.taken_over:
            return None
        if _holds(state, entry.kept):
            return None
        if entry.next is not None and not _holds(entry.next.state, self.memory.base(fragment)):
            return None  # the trainer has yet to take the side that is given up
        if parting.version < entry.begun_version or entry.giving_up is not None:
            return None  # some of that work was given up since: it must not come back
        entry.next = _Next(state, parting=parting)
        entry.outstanding = None
        self._advance(fragment)
        return max(0, again - left)

    def discard(self, fragment: int, state: FragmentState, *, reason: str) -> None:
        """Give up pending work that is too old to be offered, and set ``state.theta``."""
        self._entries[fragment].giving_up = reason
        self.adopt(fragment, state, contained=None)

    def overwrite(self, fragment: int, state: FragmentState, *, reason: str) -> bool:
        """``discard`` for the trainer, which asks for it, unless a round uses what it offered."""
        entry = self._entries[fragment]
        if entry.outstanding is not None:
            return False
        entry.taken_over = False
        entry.giving_up = reason
        self._adopt_next(fragment, entry, state, None)
        return True

    def release(self, fragment: int) -> None:
        """Take the outstanding snapshot back: it is not used, and there is nothing to adopt."""
        entry = self._entries[fragment]
        entry.outstanding = None
        self._advance(fragment)
        if self.memory.state(fragment) is SlotState.OFFERED:
            self.memory.pass_on(fragment, SlotState.FREE)

    # --- taking over --------------------------------------------------------------------------

    def resume(self, fragment: int, base: Float32s | None) -> None:
        """Begin on memory of an earlier agent. ``base``: theta of ``memory.base(fragment)``.

        Coarse parameters differ from it by one rounding, once.
        """
        entry, held = self._entries[fragment], self.memory.base(fragment)
        state = self.memory.state(fragment)
        entry.taken_over = held is not None or state is SlotState.ADOPT
        if held is not None:
            # What became of the work before is known to the earlier agent alone.
            entry.begun_version, entry.begun = held.version, (held.mark, held.tokens)
        if state is SlotState.OFFERED:
            entry.orphan = True
        elif state in (SlotState.TURNING, SlotState.BASE):
            self.memory.pass_on(fragment, SlotState.FREE)
        # In ADOPT the trainer is about to adopt another version than its present base.
        if base is not None and state is not SlotState.ADOPT:
            self._know_base(entry, base)

    def adopt_first(self, fragment: int, state: FragmentState) -> None:
        """Adopt the first state after ``resume``, which settles the work in doubt."""
        entry, held = self._entries[fragment], self.memory.base(fragment)
        entry.taken_over = False
        mark = state.merged.get(self.peer)
        ours = mark is not None and mark.incarnation == self.memory.incarnation
        merged_step = mark.step if mark is not None and ours else None
        contained = None
        if merged_step is not None and held is not None and merged_step > held.mark:
            contained = merged_step
        elif (
            held is not None
            and held.lineage == state.lineage
            and self.memory.state(fragment) is not SlotState.ADOPT
        ):
            self._know_base(entry, state.theta)
            entry.orphan = False
            self.release(fragment)
            return
        self._adopt_next(fragment, entry, state, contained)

    def keep(self, fragment: int, state: FragmentState, *, tokens: int) -> None:
        """Begin with a ``state`` older than the trainer's parameters, without changing these.

        For a version that was lost with an earlier agent: the whole difference to ``state`` becomes
        the trainer's own displacement, including the work of other peers in it. ``tokens`` are
        those of this incarnation up to the last own step in ``state``.
        """
        entry, mark = self._entries[fragment], state.merged.get(self.peer)
        ours = mark is not None and mark.incarnation == self.memory.incarnation
        entry.taken_over = False
        entry.kept = self.memory.base(fragment)
        keeping = (mark.step, tokens) if mark is not None and ours else (0, 0)
        entry.next = _Next(state, keeping=keeping)
        entry.outstanding = None
        self._advance(fragment)

    def _know_base(self, entry: _Entry, theta: Float32s) -> None:
        # The base of coarse parameters is changed later; a state's theta never is.
        entry.base = theta.copy() if self.memory.coarse else theta

    # --- slots --------------------------------------------------------------------------------

    def rang(self) -> None:
        """Look at every slot: the trainer may have passed one on. Costs little."""
        for fragment in range(len(self._entries)):
            self._advance(fragment)

    def holds(self, fragment: int) -> bool:
        """True if the trainer's base is known here and it has nothing to adopt."""
        entry = self._entries[fragment]
        return entry.base is not None and entry.given is None and entry.next is None

    def tokens_at(self, fragment: int, step: int) -> int | None:
        """This incarnation's tokens at an own step; ``None`` if it was not offered lately."""
        if step == 0:
            return 0
        held = self.memory.base(fragment)
        if held is not None and held.mark == step:
            return held.tokens
        return self._entries[fragment].marks.get(step)

    def _tokens_since(self, fragment: int, step: int) -> int | None:
        """``tokens_at``, or those at which the trainer's own displacement begins if that is
        later."""
        begun_step, tokens = self._entries[fragment].begun
        return tokens if begun_step > step else self.tokens_at(fragment, step)

    def _advance(self, fragment: int) -> None:
        entry = self._entries[fragment]
        state = self.memory.state(fragment)
        if state is SlotState.BASE:
            self._note_base(fragment, entry)
            self.memory.pass_on(fragment, SlotState.FREE)
            state = SlotState.FREE
        if state is SlotState.FREE and entry.given is not None:
            self._note_adopted(fragment, entry, entry.given)
        if entry.next is not None and state in (SlotState.FREE, SlotState.OFFERED):
            self._give(fragment, entry, entry.next, offered=state is SlotState.OFFERED)
        elif (
            state is SlotState.OFFERED
            and entry.outstanding is None
            and entry.waiting is None
            and not entry.orphan
        ):
            # The caller that asked for it has stopped waiting.
            self.memory.pass_on(fragment, SlotState.FREE)
        state = self.memory.state(fragment)
        ours = state is SlotState.FREE or (state is SlotState.OFFERED and not entry.orphan)
        if ours and entry.waiting is not None and not entry.waiting.done():
            entry.waiting.set_result(None)
        if state is SlotState.FREE and self.empties and entry.waiting is None:
            self._empty(fragment, entry)

    def _empty(self, fragment: int, entry: _Entry) -> None:
        if not entry.is_empty:
            self.memory.empty(fragment)
            entry.is_empty = True

    def _give(self, fragment: int, entry: _Entry, new: _Next, *, offered: bool) -> None:
        """Fill the slot for the trainer to adopt it."""
        state, held = new.state, self.memory.base(fragment)
        offered_mark, offered_tokens = self.memory.offered(fragment)
        given_up, entry.giving_up = entry.giving_up, None
        entry.next = entry.outstanding = None
        entry.orphan = entry.is_empty = False
        if entry.base is None and held is not None and held.lineage == state.lineage:
            self._know_base(entry, state.theta)
        change = change_for(
            Held(
                base_version=None if held is None else held.version,
                knows_base=entry.base is not None,
                snapshot_mark=offered_mark if offered else None,
                begun_mark=entry.begun[0],
            ),
            statistics=fragment in self.statistics,
            contained=new.contained,
            parting=new.parting,
            gives_up=given_up is not None,
        )
        mark = change.mark
        is_snapshot = mark is not None and mark == new.contained
        tokens = offered_tokens if is_snapshot else 0
        self.memory.pass_on(fragment, SlotState.TURNING)
        if new.keeping is not None:
            mark, tokens = new.keeping
            operation = Adoption.ADD
            self._know_base(entry, state.theta)
            self.memory.slot(fragment).fill(0.0)
        else:
            if change.origin is Origin.PARTING and mark is not None:
                tokens = self._tokens_since(fragment, mark) or 0
            operation = self._fill(fragment, entry, state, change, new.parting)
        given = entry.given = _Given(state, operation)
        if operation is Adoption.SET and held is not None:
            given.lost_reason = given_up or "overwritten"
            given.lost_from = held.tokens
        if operation is Adoption.SET or (new.parting is None and not _holds(state, held)):
            entry.begun_version = state.version
        order = AdoptionOrder(operation, state.version, state.lineage, mark, tokens)
        self.memory.give(fragment, order)

    def _fill(
        self,
        fragment: int,
        entry: _Entry,
        state: FragmentState,
        change: Change,
        parting: Parting | None,
    ) -> Adoption:
        """Fill the slot with theta, or its difference to the origin of the change.

        Returns how the trainer adopts it.
        """
        slot = self.memory.slot(fragment)
        if change.sets:
            np.copyto(slot, state.theta)
            return Adoption.PUT
        if change.origin is Origin.NONE:
            np.copyto(slot, state.theta)
            return Adoption.SET
        if change.origin is Origin.SNAPSHOT:
            self._set_reference(entry, slot)
            origin = slot
        elif change.origin is Origin.PARTING:
            assert parting is not None
            self._set_reference(entry, parting.theta)
            origin = parting.theta
        else:
            assert entry.base is not None
            origin = entry.base
        np.subtract(state.theta, origin, out=slot)
        return Adoption.ADD

    def _set_reference(self, entry: _Entry, snapshot: Float32s) -> None:
        if not self.memory.coarse:
            return
        if entry.base is None:
            entry.base = snapshot.copy()
        else:
            np.copyto(entry.base, snapshot)

    def _note_base(self, fragment: int, entry: _Entry) -> None:
        """Update the base of coarse parameters by the trainer's rounding of the adopted version."""
        slot = self.memory.slot(fragment)
        if entry.base is None:
            entry.base = slot.copy()
        elif entry.given is not None and entry.given.operation is not Adoption.ADD:
            np.copyto(entry.base, slot)
        else:
            np.add(entry.base, slot, out=entry.base)

    def _note_adopted(self, fragment: int, entry: _Entry, given: _Given) -> None:
        entry.given = None
        if not self.memory.coarse:
            entry.base = given.state.theta
        lost = 0
        base = self.memory.base(fragment)
        if base is not None and base.version == entry.begun_version:
            entry.begun = base.mark, base.tokens
        if given.lost_from is not None:
            lost = max(0, self.memory.adopted_at(fragment)[1] - given.lost_from)
        self.on_adopted(Adopted(fragment, given.state.version, lost, given.lost_reason))


async def _is_finite(values: Float32s) -> bool:
    """Return whether all values are finite, without keeping the event loop for long."""
    for start in range(0, values.size, CHECKED_AT_ONCE):
        part = values[start : start + CHECKED_AT_ONCE]
        # Without a temporary; NaN is the result of both where there is any.
        if not (np.isfinite(part.min()) and np.isfinite(part.max())):
            return False
        await asyncio.sleep(0)
    return True


def _holds(state: FragmentState, base: Base | None) -> bool:
    """True if ``state`` is that version, or descends from it."""
    return base is not None and state.follows(base.version, base.lineage)
