"""The loss gate of one peer: it has the loss measured around a jump, and undoes what raised it.

Decisions are those of ``averaging.guard.rules.loss_gate``. Before a fragment jumps, the averager
asks ``before_jump``: the loss is measured, and the state that is given up stays in memory. A peer
that was away has several fragments to take over, and a model of which only a part is new says
nothing: the loss is measured again when the learner holds all of them and nothing is being fetched.
That costs, until then, another theta and momentum of each fragment that jumped.

An undone fragment goes back to its state before the jump. Work that the learner has not merged
since is given up, because it was done on the parameters that were refused; work that was merged
after the jump is lost with the versions that contain it.

A jump is judged only if the loss before it could be measured, and measuring has deadlines: a
learner that cannot measure, or is too slow, has no gate.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar, Final, Protocol

from averaging.guard.rules.loss_gate import Attested, GivesWay, Refusals, Undo, judge
from averaging.history.chain import Chain
from averaging.history.lineage import Lineage
from averaging.history.standing import Standing
from averaging.history.state import FragmentState
from averaging.live.guard import Gate
from averaging.round.interface.phase import Phase

REFUSED: Final = "refused"
"""Reason why the learner's work is given up with a jump that is undone."""


VERSIONS_APART: Final = 4
"""Versions by which fragments may differ without a sign that some of them are behind. They are
merged in turn, once in a cycle each."""


class Jumping(Protocol):
    """An averager, as far as jumps concern it."""

    @property
    def states(self) -> tuple[FragmentState | None, ...]: ...

    @property
    def phases(self) -> tuple[Phase, ...]: ...

    async def replace_states(self, states: Sequence[FragmentState], *, reason: str) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GateSettings:
    """Times of a loss gate."""

    rise_max: float
    """Largest rise of the loss, as a share of the loss before."""
    measure_s: float = 60.0
    """Time that measuring the loss may take."""
    quiet_s: float = 5.0
    """Time without another jump after which the loss is measured again."""
    open_s: float = 120.0
    """Longest time from the first jump until the loss is measured again."""
    look_s: float = 0.25


@dataclass(slots=True)
class _Jump:
    """One fragment that has jumped, once or several times."""

    before: FragmentState
    to: list[tuple[int, Lineage]] = field(default_factory=list)


@dataclass(slots=True, eq=False, repr=False)
class LossGate(Gate):
    """The judge of jumps of a peer with a learner. ``run`` judges until it is cancelled."""

    settings: GateSettings
    _: KW_ONLY
    measures: ClassVar[bool] = True
    measure: Callable[[], Awaitable[float | None]]
    """The learner's held-out loss now; ``None``: it cannot tell."""
    holds: Callable[[int], bool]
    """True if the learner has adopted the newest state of a fragment."""
    refusals: Refusals = field(default_factory=Refusals)
    attested: Callable[[int], Attested | None] = lambda fragment: None
    """The state of a fragment that the run's owner attests."""
    keep: Callable[[Refusals], Awaitable[None]] | None = None
    """Writes down what is refused."""
    on_event: Callable[[str, Mapping[str, Any]], None] = lambda event, fields: None
    _jumps: dict[int, _Jump] = field(default_factory=dict)
    _before: float = math.nan
    _began_at: float = 0.0
    _last_at: float = 0.0
    _apart_before: int = 0
    _averager: Jumping | None = None
    _opening: asyncio.Lock = field(default_factory=asyncio.Lock)

    def event(self, event: str, **fields: Any) -> None:
        self.on_event(event, fields)

    # For an averager

    def refuses(self, fragment: int, chain: Chain) -> str | None:
        """The reason to take no state with this history; ``None``: there is none."""
        return self.refusals.why_not(fragment, chain, self.attested(fragment))

    def refuses_any(self, fragment: int) -> bool:
        """True if some history of the fragment is refused.

        A whole state shows its history before its numbers are fetched; a replay does not.
        """
        return self.refusals.of(fragment)

    async def before_jump(self, before: FragmentState, after: Standing) -> None:
        """The fragment is about to jump. Returns within a bounded time, whatever happens."""
        loop = asyncio.get_running_loop()
        async with self._opening:
            if not self._jumps:
                loss = await self._loss()
                if loss is None:
                    return
                self._before, self._began_at = loss, loop.time()
                self._apart_before = 0 if self._averager is None else _apart(self._averager)
            jump = self._jumps.setdefault(before.fragment, _Jump(before))
            jump.to.append((after.version, after.lineage))
            self._last_at = loop.time()

    # Judging

    async def run(self, averager: Jumping) -> None:
        """Judge jumps when they are over."""
        self._averager = averager
        while True:
            await asyncio.sleep(self.settings.look_s)
            if self._jumps and self._is_over(averager):
                await self._judge(averager)

    def _is_over(self, averager: Jumping) -> bool:
        now, settings = asyncio.get_running_loop().time(), self.settings
        if now - self._began_at >= settings.open_s:
            return True
        if now - self._last_at < settings.quiet_s or Phase.CATCHING in averager.phases:
            return False
        if _apart(averager) > max(VERSIONS_APART, self._apart_before):
            return False  # the others are still to be caught up with in some fragments
        return all(map(self.holds, self._jumps))

    async def _loss(self) -> float | None:
        try:
            async with asyncio.timeout(self.settings.measure_s):
                return await self.measure()
        except TimeoutError:
            return None

    async def _judge(self, averager: Jumping) -> None:
        async with self._opening:  # a jump meanwhile is measured on its own
            after = await self._loss()
            before, jumps, self._jumps = self._before, self._jumps, {}
        jumps = {fragment: jump for fragment, jump in jumps.items() if _stands(averager, jump)}
        if not jumps:
            return  # the run's owner has taken the run back, or another history was gone over to
        verdict = judge(
            before,
            after,
            rise_max=self.settings.rise_max,
            refused=self.refusals.row(jumps),
            attested=all(self._is_attested(fragment, jump) for fragment, jump in jumps.items()),
        )
        fields = {
            "before": before,
            "after": after,
            "reason": verdict.reason,
            "fragments": sorted(jumps),
            "versions": [jump.to[-1][0] for _, jump in sorted(jumps.items())],
        }
        match verdict:
            case Undo():
                await self._undo(averager, jumps, fields)
            case GivesWay():
                self.refusals.forget()
                self.event("jump_allowed", **fields)
                await self._write()
            case _:
                self.refusals.kept(jumps)
                self.event("jump_measured", **fields)

    def _is_attested(self, fragment: int, jump: _Jump) -> bool:
        attested = self.attested(fragment)
        return attested is not None and (attested.version, attested.lineage) == jump.to[-1]

    async def _undo(
        self, averager: Jumping, jumps: dict[int, _Jump], fields: dict[str, Any]
    ) -> None:
        links = [(f, *link) for f, jump in sorted(jumps.items()) for link in jump.to]
        # First of all, or the fragments would be back there before the last one is undone.
        self.refusals.refuse(links)
        back = [jump.before for _, jump in sorted(jumps.items())]
        self.event("jump_refused", **fields, back_to=[state.version for state in back])
        await self._write()
        await averager.replace_states(back, reason=REFUSED)
        for fragment in jumps:
            self._jumps.pop(fragment, None)  # from there it has not jumped

    async def _write(self) -> None:
        if self.keep is not None:
            await self.keep(self.refusals)


def _apart(averager: Jumping) -> int:
    """Versions between the fragment that is furthest and the one that is least far."""
    versions = [0 if state is None else state.version for state in averager.states]
    return max(versions, default=0) - min(versions, default=0)


def _stands(averager: Jumping, jump: _Jump) -> bool:
    """True if the fragment's state still goes on from what it jumped to."""
    state = averager.states[jump.before.fragment]
    return state is not None and any(state.chain.find(*link) is not None for link in jump.to)
