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

import numpy as np

from averaging.history.adoption import AdoptionRule, Held, Origin, Parting, change_for
from averaging.history.state import FragmentState
from averaging.live.learner_port import Progress, Snapshot
from averaging.numbers.arrays import Float32s
from dht.identity import PeerId
from peer.bridge.shared_memory import Adoption, Base, Order, SharedTensors, SlotState

logger = logging.getLogger(__name__)

MARKS_MAX = 16


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
class _Seat:
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
    overwritten: tuple[int, int] = (0, 0)
    """Own step and tokens at that moment."""
    overwrites: bool = False
    """``turned`` overwrites the trainer's own work."""
    giving_up: str | None = None
    """Why ``next`` overwrites what the trainer has of its own."""
    lost_reason: str = ""
    turned: FragmentState | None = None
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
    _seats: list[_Seat] = field(init=False)

    def __post_init__(self) -> None:
        self._seats = [_Seat() for _ in range(self.memory.fragments)]

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
        seat, base = self._seats[fragment], self.memory.base(fragment)
        if offered is None:
            return None
        if seat.base is None or base is None:
            self.release(fragment)
            return None
        mark, tokens = self.memory.offered(fragment)
        return Snapshot(
            base=seat.base,
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
        seat = self._seats[fragment]
        if seat.outstanding is not None or seat.waiting is not None:
            raise RuntimeError(f"fragment {fragment} has an outstanding snapshot already")
        self._advance(fragment)
        if self.memory.state(fragment) is SlotState.OFFERED and not seat.orphan:
            self.memory.pass_on(fragment, SlotState.FREE)  # an old one; a fresh one is wanted
        try:
            async with asyncio.timeout(timeout_s):
                return await self._offered(fragment, seat)
        except TimeoutError:
            return None
        finally:
            seat.waiting = None

    async def _offered(self, fragment: int, seat: _Seat) -> Float32s:
        while True:
            seat.waiting = asyncio.get_running_loop().create_future()
            self._advance(fragment)
            state = self.memory.state(fragment)
            if state is SlotState.OFFERED and not seat.orphan:
                mark, tokens = self.memory.offered(fragment)
                seat.outstanding = mark
                seat.marks[mark] = tokens
                while len(seat.marks) > MARKS_MAX:
                    del seat.marks[next(iter(seat.marks))]
                return self.memory.slot(fragment)
            if state is SlotState.FREE and seat.next is None:
                self.memory.pass_on(fragment, SlotState.WANTED)
            await seat.waiting

    def adopt(self, fragment: int, state: FragmentState, *, contained: int | None) -> None:
        """A new theta; own work up to step ``contained`` is in it."""
        seat = self._seats[fragment]
        if seat.taken_over:
            # Averaging knows nothing of what the agent before this one had offered.
            self.adopt_first(fragment, state)
        else:
            if _holds(state, seat.kept):
                # Some of what counts as own work is in there: it must not be added once more.
                seat.base = seat.kept = None
            self._adopt_next(fragment, seat, state, contained)

    def _adopt_next(
        self, fragment: int, seat: _Seat, state: FragmentState, contained: int | None
    ) -> None:
        if seat.next is not None and contained is None:
            contained = seat.next[1]
        seat.next = (state, contained)
        seat.keeping = None
        seat.outstanding = None
        self._advance(fragment)

    def passed(self, fragment: int, state: FragmentState) -> None:
        """A replay goes through ``state``: it may be what the trainer's parameters grew from."""
        held = self.memory.base(fragment)
        if self.misses_base(fragment) and held is not None and held.lineage == state.lineage:
            self._seats[fragment].base = state.theta.copy()

    def misses_base(self, fragment: int) -> bool:
        """Whether only a replay can tell what the trainer's parameters grew from."""
        in_hand = self.memory.state(fragment) is not SlotState.ADOPT
        known = self._seats[fragment].base is not None
        return in_hand and not known and self.memory.base(fragment) is not None

    def rebase(self, fragment: int, state: FragmentState, parting: Parting) -> int | None:
        """Take the other side of a fork; what was moved since the parting stays whole."""
        seat = self._seats[fragment]
        again = self.tokens_at(fragment, parting.given_up_mark)
        left = self._tokens_since(fragment, parting.merged_mark)
        if again is None or left is None or seat.base is None or seat.taken_over:
            return None
        if _holds(state, seat.kept):
            return None
        if parting.version < seat.set_version or seat.giving_up is not None:
            return None  # some of it was given up since: it must not come back
        seat.parting = parting
        seat.next = (state, None)
        seat.outstanding = None
        self._advance(fragment)
        return max(0, again - left)

    def discard(self, fragment: int, state: FragmentState, *, reason: str) -> None:
        """Give up pending work that is too old to be offered: go on from ``state.theta``."""
        self._seats[fragment].giving_up = reason
        self.adopt(fragment, state, contained=None)

    def write_off(self, fragment: int, tokens: int, *, reason: str) -> None:
        """Work of mine that was merged is in no version that I follow now.

        Nothing is to be done here: the ledger finds it missing from the state's ``merged`` map.
        """

    def release(self, fragment: int) -> None:
        """The outstanding snapshot will not be used, and there is nothing new to adopt."""
        seat = self._seats[fragment]
        seat.outstanding = None
        self._advance(fragment)
        if self.memory.state(fragment) is SlotState.OFFERED:
            self.memory.pass_on(fragment, SlotState.FREE)

    # --- taking over --------------------------------------------------------------------------

    def resume(self, fragment: int, base: Float32s | None) -> None:
        """Begin on memory that another agent left. ``base``: theta of ``memory.base(fragment)``.

        For coarse parameters it is not quite what they hold; the difference is one rounding, once.
        """
        seat = self._seats[fragment]
        state = self.memory.state(fragment)
        seat.taken_over = self.memory.base(fragment) is not None or state is SlotState.ADOPT
        if state is SlotState.OFFERED:
            seat.orphan = True
        elif state in (SlotState.TURNING, SlotState.BASE):
            self.memory.pass_on(fragment, SlotState.FREE)
        # In ADOPT the trainer is about to take in a version that is not the one asked about.
        if base is not None and state is not SlotState.ADOPT:
            self._know_base(seat, base)

    def adopt_first(self, fragment: int, state: FragmentState) -> None:
        """The first state after ``resume``: it tells what became of the work in doubt."""
        seat, held = self._seats[fragment], self.memory.base(fragment)
        seat.taken_over = False
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
            self._know_base(seat, state.theta)
            seat.orphan = False
            self.release(fragment)
            return
        self._adopt_next(fragment, seat, state, contained)

    def keep(self, fragment: int, state: FragmentState, *, tokens: int) -> None:
        """Begin with a ``state`` that the trainer has left behind, without changing what it has.

        For a version that died with the agent before this one: all that the trainer moved since
        ``state`` is its own displacement, what others had done of it included. ``tokens`` are
        those of this incarnation up to the step that ``state`` has its work of.
        """
        seat, mark = self._seats[fragment], state.merged.get(self.peer)
        ours = mark is not None and mark.incarnation == self.memory.incarnation
        seat.taken_over = False
        seat.kept = self.memory.base(fragment)
        seat.next = (state, None)
        seat.keeping = (mark.step, tokens) if mark is not None and ours else (0, 0)
        seat.outstanding = None
        self._advance(fragment)

    def _know_base(self, seat: _Seat, theta: Float32s) -> None:
        # That of coarse parameters is written to; a state's theta never is.
        seat.base = theta.copy() if self.memory.coarse else theta

    # --- turns --------------------------------------------------------------------------------

    def rang(self) -> None:
        """The trainer passed a turn on, or may have: look at every slot. Cheap."""
        for fragment in range(len(self._seats)):
            self._advance(fragment)

    def holds(self, fragment: int) -> bool:
        """Whether the trainer's parameters have a base that is known here."""
        seat = self._seats[fragment]
        return seat.base is not None and seat.turned is None and seat.next is None

    def tokens_at(self, fragment: int, step: int) -> int | None:
        """This incarnation's tokens at an own step that was offered lately."""
        if step == 0:
            return 0
        held = self.memory.base(fragment)
        if held is not None and held.mark == step:
            return held.tokens
        return self._seats[fragment].marks.get(step)

    def _tokens_since(self, fragment: int, step: int) -> int | None:
        """``tokens_at``, or those at which the trainer's own work was overwritten if that is
        later."""
        overwritten_step, tokens = self._seats[fragment].overwritten
        return tokens if overwritten_step > step else self.tokens_at(fragment, step)

    def _advance(self, fragment: int) -> None:
        seat = self._seats[fragment]
        state = self.memory.state(fragment)
        if state is SlotState.BASE:
            self._note_base(fragment, seat)
            self.memory.pass_on(fragment, SlotState.FREE)
            state = SlotState.FREE
        if state is SlotState.FREE and seat.turned is not None:
            self._taken_in(fragment, seat, seat.turned)
        if seat.next is not None and state in (SlotState.FREE, SlotState.OFFERED):
            self._turn(fragment, seat, *seat.next, offered=state is SlotState.OFFERED)
        elif (
            state is SlotState.OFFERED
            and seat.outstanding is None
            and seat.waiting is None
            and not seat.orphan
        ):
            # Asked for by somebody who has stopped waiting.
            self.memory.pass_on(fragment, SlotState.FREE)
        state = self.memory.state(fragment)
        ours = state is SlotState.FREE or (state is SlotState.OFFERED and not seat.orphan)
        if ours and seat.waiting is not None and not seat.waiting.done():
            seat.waiting.set_result(None)

    def _turn(
        self,
        fragment: int,
        seat: _Seat,
        state: FragmentState,
        contained: int | None,
        *,
        offered: bool,
    ) -> None:
        """Fill the slot with what the trainer has to take in."""
        slot, held = self.memory.slot(fragment), self.memory.base(fragment)
        offered_mark, offered_tokens = self.memory.offered(fragment)
        given_up, seat.giving_up = seat.giving_up, None
        parting, seat.parting = seat.parting, None
        keeping, seat.keeping = seat.keeping, None
        seat.next = None
        seat.outstanding = None
        seat.orphan = False
        if seat.base is None and held is not None and held.lineage == state.lineage:
            self._know_base(seat, state.theta)
        change = change_for(
            Held(
                base_version=None if held is None else held.version,
                knows_base=seat.base is not None,
                snapshot_mark=offered_mark if offered else None,
                overwritten_mark=seat.overwritten[0],
            ),
            rule=self.rule,
            contained=contained,
            parting=parting,
            gives_up=given_up is not None,
        )
        operation = Adoption.ADD
        seat.reference = "base"
        self.memory.pass_on(fragment, SlotState.TURNING)
        if keeping is not None:
            self._know_base(seat, state.theta)
            slot.fill(0.0)
        elif change.origin is Origin.SNAPSHOT:
            self._set_reference(seat, slot)
            np.subtract(state.theta, slot, out=slot)
            seat.reference = "snapshot"
        elif change.origin is Origin.PARTING:
            assert parting is not None
            self._set_reference(seat, parting.theta)
            np.subtract(state.theta, parting.theta, out=slot)
        elif change.origin is Origin.BASE:
            assert seat.base is not None
            np.subtract(state.theta, seat.base, out=slot)
        else:
            np.copyto(slot, state.theta)
            operation = Adoption.BLEND if change.blends else Adoption.SET
            seat.reference = "set"
        mark = change.mark if keeping is None else keeping[0]
        is_snapshot = mark is not None and mark == contained
        seat.lost_from, seat.lost_reason = None, ""
        if operation is Adoption.SET and held is not None:
            seat.lost_reason = given_up or ("replaced" if is_snapshot else "crash")
            seat.lost_from = offered_tokens if is_snapshot else held.tokens
        seat.overwrites = operation is Adoption.SET
        if seat.overwrites:
            seat.set_version = state.version
        tokens = offered_tokens if is_snapshot else 0
        if change.origin is Origin.PARTING and mark is not None:
            tokens = self._tokens_since(fragment, mark) or 0
        if keeping is not None:
            tokens = keeping[1]
        seat.turned = state
        self.memory.give(
            fragment,
            Order(
                operation=operation,
                alpha=self.alpha,
                version=state.version,
                lineage=state.lineage,
                mark=mark,
                tokens=tokens,
            ),
        )

    def _set_reference(self, seat: _Seat, snapshot: Float32s) -> None:
        if not self.memory.coarse:
            return
        if seat.base is None:
            seat.base = snapshot.copy()
        else:
            np.copyto(seat.base, snapshot)

    def _note_base(self, fragment: int, seat: _Seat) -> None:
        """Coarse parameters: what the trainer's rounding made of the version it took in."""
        slot = self.memory.slot(fragment)
        if seat.reference == "set" or seat.base is None:
            if seat.base is None:
                seat.base = slot.copy()
            else:
                np.copyto(seat.base, slot)
        else:
            np.add(seat.base, slot, out=seat.base)

    def _taken_in(self, fragment: int, seat: _Seat, state: FragmentState) -> None:
        seat.turned = None
        if not self.memory.coarse:
            seat.base = state.theta
        lost = 0
        if seat.overwrites:
            seat.overwritten = self.memory.adopted_at(fragment)
        if seat.lost_from is not None:
            lost = max(0, self.memory.adopted_at(fragment)[1] - seat.lost_from)
        self.on_adopted(Adopted(fragment, state.version, lost, seat.lost_reason))


def _holds(state: FragmentState, base: Base | None) -> bool:
    """Whether ``state`` grew from that version."""
    return base is not None and state.chain.find(base.version, base.lineage) is not None
