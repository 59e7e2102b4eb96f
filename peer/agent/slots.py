"""The agent's side of the shared memory: the learner, as ``averaging`` wants to see it.

``SlotPort`` is the ``LearnerPort`` of a live peer. It takes its turns with the slots of
``peer.bridge.shared_memory``, keeps what each fragment of the trainer's parameters grew from,
and turns an offered snapshot in place into the delta which the trainer adds (DESIGN 3.4)::

    merged       slot := theta' - snapshot      (carry; replace and blend: theta' itself)
    not merged   slot := theta' - base          the own displacement stays whole
    rebased      slot := theta' - ancestor      so does what was moved since the sides parted
    base lost    slot := theta'                 only after an agent died at a bad moment

For fp32 parameters the new base is theta' itself and costs no memory. Coarser ones
answer by how much they really moved, and base moves just as much: so parameters
that nobody trained equal their base to the bit, and contribute exactly nothing.

**A new agent on used memory** (the trainer lives, the old agent died) finds in each control block
which version the trainer holds. That version's theta it has from the last checkpoint (``resume``),
or from the replay that leads from there to the newest version and passes through it (``passed``).
If nobody who is there has that version any more, the trainer keeps what it has, as its own
displacement since the checkpoint (``keep``). Only where others are further and no replay leads
there can the own displacement not be told apart: it is given up (the ledger calls it
discarded(lost)) and the current theta is set. A snapshot that was OFFERED is intact, and in doubt:
the first state to be adopted tells by its ``merged`` map whether it is in. One that was TURNING is
gone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np

from averaging.history.state import FragmentState
from averaging.live.learner_port import Parting, Progress, Snapshot
from averaging.numbers.arrays import Float32s
from dht.identity import PeerId
from peer.bridge.shared_memory import Adoption, AdoptionOrder, Base, SharedTensors, SlotState

logger = logging.getLogger(__name__)

MARKS_MAX = 16

AdoptionRule: TypeAlias = Literal["carry", "replace", "blend"]


@dataclass(frozen=True, slots=True)
class Adopted:
    """The trainer has taken a version in.

    ``lost_tokens`` of its own were overwritten: as the run's rule is (``replaced``), because an
    agent died (``crash``), or for the reason given to ``discard``.
    """

    fragment: int
    version: int
    lost_tokens: int
    reason: str


@dataclass(slots=True, eq=False)
class _Entry:
    """What the agent knows of one fragment."""

    base: Float32s | None = None
    """Theta as the trainer holds it; for fp32 parameters the very array of a ``FragmentState``."""
    marks: dict[int, int] = field(default_factory=dict)
    """The last steps that were offered, oldest first, with the tokens up to them."""
    outstanding: int | None = None
    """The mark of a snapshot that averaging has in its hands."""
    waiting: asyncio.Future[None] | None = None
    """Somebody awaits this fragment's next OFFERED."""
    next: tuple[FragmentState, int | None] | None = None
    """To be adopted as soon as it is our turn, and what of our work is in it."""
    parting: Parting | None = None
    """``next`` is another side of a fork, which left the trainer's there."""
    set_version: int = 0
    """The trainer's own work from before this version was overwritten."""
    giving_up: str | None = None
    """Why ``next`` overwrites what the trainer has of its own."""
    lost_reason: str = ""
    given: FragmentState | None = None
    """Given to the trainer, and not yet taken in."""
    reference: str = ""
    lost_from: int | None = None
    """What was given accounts for tokens up to here; a SET loses what came after."""
    taken_over: bool = False
    """The trainer had an agent before this one, and nothing was adopted since."""
    orphan: bool = False
    """OFFERED to an agent that died."""
    keeping: tuple[int, int] | None = None
    """``next`` changes nothing; own work up to this step and its tokens is in it."""
    kept: Base | None = None
    """What was in the trainer's hands when ``keep`` made its work since then its own."""


@dataclass(slots=True)
class SlotPort:
    """Offers and adoptions of one trainer. Everything happens on the loop's thread."""

    memory: SharedTensors
    peer: PeerId
    rule: AdoptionRule = "carry"
    alpha: float = 0.5
    on_adopted: Callable[[Adopted], None] = lambda adopted: None
    closed: set[int] = field(default_factory=set)
    """Fragments that are final: nothing of them is offered any more."""
    _entries: list[_Entry] = field(init=False)

    def __post_init__(self) -> None:
        self._entries = [_Entry() for _ in range(self.memory.fragments)]

    def __repr__(self) -> str:
        return f"SlotPort({self.memory!r})"

    # --- LearnerPort --------------------------------------------------------------------------

    def progress(self) -> Progress:
        """Cheap; never waits."""
        memory = self.memory
        return Progress(
            step=memory.step,
            tokens=memory.tokens,
            step_time_s=memory.step_time_s,
            batch_tokens_max=memory.batch_tokens_max,
        )

    async def snapshot(self, fragment: int, *, timeout_s: float) -> Snapshot | None:
        """The fragment at the trainer's next safe point; ``None`` when there is none in time."""
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
        """The parameters alone, as of the next safe point. For a founder, who has no base yet.

        They count as outstanding until ``adopt`` or ``release``.
        """
        entry = self._entries[fragment]
        if entry.outstanding is not None or entry.waiting is not None:
            raise RuntimeError(f"fragment {fragment} has an outstanding snapshot already")
        self._advance(fragment)
        if self.memory.state(fragment) is SlotState.OFFERED and not entry.orphan:
            self.memory.pass_on(fragment, SlotState.FREE)  # an old one; a fresh one is wanted
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
                while len(entry.marks) > MARKS_MAX:
                    del entry.marks[next(iter(entry.marks))]
                return self.memory.slot(fragment)
            if state is SlotState.FREE and entry.next is None:
                self.memory.pass_on(fragment, SlotState.WANTED)
            await entry.waiting

    def adopt(self, fragment: int, state: FragmentState, *, contained: int | None) -> None:
        """A new theta; own work up to step ``contained`` is in it."""
        entry = self._entries[fragment]
        if entry.taken_over:
            # Averaging knows nothing of what the agent before this one had offered.
            self.adopt_first(fragment, state)
        else:
            if _holds(state, entry.kept):
                # Some of what counts as own work is in there: it must not be added once more.
                entry.base = entry.kept = None
            self._adopt_next(fragment, entry, state, contained)

    def _adopt_next(
        self, fragment: int, entry: _Entry, state: FragmentState, contained: int | None
    ) -> None:
        if entry.next is not None and contained is None:
            contained = entry.next[1]
        entry.next = (state, contained)
        entry.keeping = None
        entry.outstanding = None
        self._advance(fragment)

    def passed(self, fragment: int, state: FragmentState) -> None:
        """A replay goes through ``state``: it may be what the trainer's parameters grew from."""
        held = self.memory.base(fragment)
        if self.misses_base(fragment) and held is not None and held.lineage == state.lineage:
            self._entries[fragment].base = state.theta.copy()

    def misses_base(self, fragment: int) -> bool:
        """True if only a replay can tell what the trainer's parameters grew from."""
        in_hand = self.memory.state(fragment) is not SlotState.ADOPT
        known = self._entries[fragment].base is not None
        return in_hand and not known and self.memory.base(fragment) is not None

    def rebase(self, fragment: int, state: FragmentState, parting: Parting) -> int | None:
        """Take the other side of a fork; what was moved since the parting stays whole."""
        entry = self._entries[fragment]
        again = self.tokens_at(fragment, parting.given_up_mark)
        left = self.tokens_at(fragment, parting.merged_mark)
        if again is None or left is None or entry.base is None or entry.taken_over:
            return None
        if _holds(state, entry.kept):
            return None
        if parting.version < entry.set_version or entry.giving_up is not None:
            return None  # some of it was given up since: it must not come back
        entry.parting = parting
        entry.next = (state, None)
        entry.outstanding = None
        self._advance(fragment)
        return again - left

    def discard(self, fragment: int, state: FragmentState, *, reason: str) -> None:
        """Give up pending work that is too old to be offered: go on from ``state.theta``."""
        self._entries[fragment].giving_up = reason
        self.adopt(fragment, state, contained=None)

    def write_off(self, fragment: int, tokens: int, *, reason: str) -> None:
        """Work of mine that was merged is in no version that I follow now.

        Nothing is to be done here: the ledger finds it missing from the state's ``merged`` map.
        """

    def release(self, fragment: int) -> None:
        """The outstanding snapshot will not be used, and there is nothing new to adopt."""
        entry = self._entries[fragment]
        entry.outstanding = None
        self._advance(fragment)
        if self.memory.state(fragment) is SlotState.OFFERED:
            self.memory.pass_on(fragment, SlotState.FREE)

    # --- taking over --------------------------------------------------------------------------

    def resume(self, fragment: int, base: Float32s | None) -> None:
        """Begin on memory that another agent left. ``base``: theta of ``memory.base(fragment)``.

        For coarse parameters it is not quite what they hold; the difference is one rounding, once.
        """
        entry = self._entries[fragment]
        state = self.memory.state(fragment)
        entry.taken_over = self.memory.base(fragment) is not None or state is SlotState.ADOPT
        if state is SlotState.OFFERED:
            entry.orphan = True
        elif state in (SlotState.TURNING, SlotState.BASE):
            self.memory.pass_on(fragment, SlotState.FREE)
        # In ADOPT the trainer is about to take in a version that is not the one asked about.
        if base is not None and state is not SlotState.ADOPT:
            self._know_base(entry, base)

    def adopt_first(self, fragment: int, state: FragmentState) -> None:
        """The first state after ``resume``: it tells what became of the work in doubt."""
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
        """Begin with a ``state`` that the trainer has left behind, without changing what it has.

        For a version that died with the agent before this one: all that the trainer moved since
        ``state`` is its own displacement, what others had done of it included. ``tokens`` are
        those of this incarnation up to the step that ``state`` has its work of.
        """
        entry, mark = self._entries[fragment], state.merged.get(self.peer)
        ours = mark is not None and mark.incarnation == self.memory.incarnation
        entry.taken_over = False
        entry.kept = self.memory.base(fragment)
        entry.next = (state, None)
        entry.keeping = (mark.step, tokens) if mark is not None and ours else (0, 0)
        entry.outstanding = None
        self._advance(fragment)

    def _know_base(self, entry: _Entry, theta: Float32s) -> None:
        # That of coarse parameters is written to; a state's theta never is.
        entry.base = theta.copy() if self.memory.coarse else theta

    # --- turns --------------------------------------------------------------------------------

    def rang(self) -> None:
        """The trainer passed a turn on, or may have: look at every slot. Cheap."""
        for fragment in range(len(self._entries)):
            self._advance(fragment)

    def holds(self, fragment: int) -> bool:
        """True if the trainer's parameters have a base that is known here."""
        entry = self._entries[fragment]
        return entry.base is not None and entry.given is None and entry.next is None

    def tokens_at(self, fragment: int, step: int) -> int | None:
        """This incarnation's tokens at an own step that was offered lately."""
        if step == 0:
            return 0
        held = self.memory.base(fragment)
        if held is not None and held.mark == step:
            return held.tokens
        return self._entries[fragment].marks.get(step)

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
            self._give(fragment, entry, *entry.next, offered=state is SlotState.OFFERED)
        elif (
            state is SlotState.OFFERED
            and entry.outstanding is None
            and entry.waiting is None
            and not entry.orphan
        ):
            # Asked for by somebody who has stopped waiting.
            self.memory.pass_on(fragment, SlotState.FREE)
        state = self.memory.state(fragment)
        ours = state is SlotState.FREE or (state is SlotState.OFFERED and not entry.orphan)
        if ours and entry.waiting is not None and not entry.waiting.done():
            entry.waiting.set_result(None)

    def _give(
        self,
        fragment: int,
        entry: _Entry,
        state: FragmentState,
        contained: int | None,
        *,
        offered: bool,
    ) -> None:
        """Fill the slot with what the trainer has to take in."""
        slot, held = self.memory.slot(fragment), self.memory.base(fragment)
        offered_mark, offered_tokens = self.memory.offered(fragment)
        given_up, entry.giving_up = entry.giving_up, None
        parting, entry.parting = entry.parting, None
        keeping, entry.keeping = entry.keeping, None
        since: Parting | None = None
        snapshot = (
            offered and contained is not None and contained == offered_mark and given_up is None
        )
        entry.next = None
        entry.outstanding = None
        entry.orphan = False
        operation = Adoption.ADD
        if entry.base is None and held is not None and held.lineage == state.lineage:
            self._know_base(entry, state.theta)
        self.memory.pass_on(fragment, SlotState.TURNING)
        if snapshot and self.rule == "carry":
            self._set_reference(entry, slot)
            np.subtract(state.theta, slot, out=slot)
            entry.reference = "snapshot"
        elif keeping is not None:
            self._know_base(entry, state.theta)
            slot.fill(0.0)
            entry.reference = "base"
        elif contained is None and entry.base is not None and given_up is None:
            if parting is not None and held is not None and held.version > parting.version:
                since = parting
                self._set_reference(entry, parting.theta)
            np.subtract(state.theta, entry.base if since is None else since.theta, out=slot)
            entry.reference = "base"
        else:
            np.copyto(slot, state.theta)
            operation = Adoption.BLEND if snapshot and self.rule == "blend" else Adoption.SET
            entry.reference = "set"
        entry.lost_from, entry.lost_reason = None, ""
        if operation is Adoption.SET and held is not None:
            entry.lost_reason = given_up or ("replaced" if snapshot else "crash")
            entry.lost_from = offered_tokens if snapshot else held.tokens
        if operation is Adoption.SET:
            entry.set_version = state.version
        mark, tokens = (contained, offered_tokens) if snapshot else (None, 0)
        if since is not None:
            mark, tokens = since.merged_mark, self.tokens_at(fragment, since.merged_mark) or 0
        if keeping is not None:
            mark, tokens = keeping
        entry.given = state
        self.memory.give(
            fragment,
            AdoptionOrder(
                operation=operation,
                alpha=self.alpha,
                version=state.version,
                lineage=state.lineage,
                mark=mark,
                tokens=tokens,
            ),
        )

    def _set_reference(self, entry: _Entry, snapshot: Float32s) -> None:
        if not self.memory.coarse:
            return
        if entry.base is None:
            entry.base = snapshot.copy()
        else:
            np.copyto(entry.base, snapshot)

    def _note_base(self, fragment: int, entry: _Entry) -> None:
        """Coarse parameters: what the trainer's rounding made of the version it took in."""
        slot = self.memory.slot(fragment)
        if entry.reference == "set" or entry.base is None:
            if entry.base is None:
                entry.base = slot.copy()
            else:
                np.copyto(entry.base, slot)
        else:
            np.add(entry.base, slot, out=entry.base)

    def _note_adopted(self, fragment: int, entry: _Entry, state: FragmentState) -> None:
        entry.given = None
        if not self.memory.coarse:
            entry.base = state.theta
        lost = 0
        if entry.lost_from is not None:
            lost = max(0, self.memory.adopted_at(fragment)[1] - entry.lost_from)
        self.on_adopted(Adopted(fragment, state.version, lost, entry.lost_reason))


def _holds(state: FragmentState, base: Base | None) -> bool:
    """True if ``state`` grew from that version."""
    return base is not None and state.chain.find(base.version, base.lineage) is not None
