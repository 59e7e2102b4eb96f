"""The loss gate of a live averager: jumps that raise the loss are undone, and others are not."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from averaging.guard.loss_gate import GateSettings, LossGate
from averaging.guard.rules.loss_gate import PATIENCE_VERSIONS, REFUSALS_MAX, Refusals
from averaging.history.standing import Standing
from averaging.history.state import FragmentState
from averaging.live.settings import AveragerSettings
from averaging.messages import Link
from averaging.numbers.arrays import Float32s
from averaging.round.interface.phase import Phase
from dht.membership.orders import Attested
from dht.memory.host import MemoryNetwork
from tests.averaging.live.quadratic import LAYOUT, Peer, Swarm, layout_of, start_of, swarm

SETTINGS = GateSettings(rise_max=0.25, quiet_s=3.0, open_s=25.0)
NO_REPLAY = AveragerSettings(progress_s=0.1, replay_bytes_max=1)
FAR = {True: np.float32(60), False: np.float32(18)}
"""The parameters that the others train towards: far enough to be noticed, and for a state not so
far that its norm alone is refused."""


@dataclass
class Gated:
    """A swarm in which one peer has a gate."""

    swarm: Swarm
    anna: Peer
    others: Sequence[Peer]
    gate: LossGate
    events: list[tuple[str, dict[str, Any]]]
    measured: list[float]
    optimum: list[Float32s]

    def told(self, event: str) -> list[dict[str, Any]]:
        return [fields for name, fields in self.events if name == event]

    def versions(self) -> list[int]:
        return [version or 0 for version in self.anna.versions()]

    def behind(self) -> int:
        theirs = self.others[0].versions()
        return min((b or 0) - a for a, b in zip(self.versions(), theirs, strict=True))

    def poison(self, far: np.float32) -> None:
        """From now on the others train towards something far away."""
        for peer in self.others:
            assert peer.learner is not None
            for target in peer.learner.targets:
                target += far


async def gated(made: Swarm, *, replays: bool = False) -> Gated:
    events: list[tuple[str, dict[str, Any]]] = []
    measured: list[float] = []
    settings = AveragerSettings(progress_s=0.1) if replays else NO_REPLAY

    async def measure() -> float | None:
        await asyncio.sleep(0.5)
        assert anna.learner is not None
        measured.append(anna.learner.distance(optimum))
        return measured[-1]

    gate = LossGate(
        SETTINGS,
        measure=measure,
        holds=lambda fragment: True,
        on_event=lambda name, fields: events.append((name, dict(fields))),
    )
    anna = await made.add("anna", gate=gate, settings=settings)
    others = [await made.add(name, settings=settings) for name in ("boris", "clara", "dora")]
    for peer in made.peers:
        assert peer.learner is not None
        peer.learner.is_noisy = False
    optimum = [target.copy() for target in made.optimum]
    return Gated(made, anna, others, gate, events, measured, optimum)


async def parted(case: Gated, seconds: float) -> None:
    """Let the others go on without the gated peer for a while, then let it meet them again."""
    network = case.swarm.memory
    network.partition([[case.anna.id]])
    await case.swarm.live(seconds)
    network.heal()


@pytest.mark.parametrize(
    "replays", [pytest.param(False, marks=pytest.mark.slow), True], ids=["state", "replay"]
)
async def test_a_peer_that_was_away_takes_honest_states_over_and_measures_no_more_than_it_must(
    replays: bool,
) -> None:
    async with swarm(MemoryNetwork()) as made, asyncio.TaskGroup() as tasks:
        case = await gated(made, replays=replays)
        judging = tasks.create_task(case.gate.run(case.anna.averager))
        await made.live(20.0)
        await parted(case, 25.0 if replays else 50.0)  # more rounds are larger than a state
        assert case.behind() >= 1
        await made.live(30.0)
        made.check()
        assert case.behind() <= 1
        assert not case.told("jump_refused") and len(case.gate.refusals) == 0
        # Steps cost nothing, and fragments that are taken over together are one jump.
        assert len(case.measured) == 2 * len(case.told("jump_measured"))
        jumped = [told["fragments"] for told in case.told("jump_measured")]
        assert max(map(len, jumped), default=0) >= (0 if replays else 2)
        assert bool(jumped) is not replays
        judging.cancel()


@pytest.mark.parametrize(
    "replays", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["state", "replay"]
)
async def test_a_jump_that_raises_the_loss_is_undone_and_not_taken_again(replays: bool) -> None:
    """All of four fragments jump before the loss is measured."""
    network = MemoryNetwork()
    async with swarm(network, layout=layout_of(4)) as made, asyncio.TaskGroup() as tasks:
        case = await gated(made, replays=replays)
        judging = tasks.create_task(case.gate.run(case.anna.averager))
        await made.live(45.0)
        before, good = case.versions(), case.measured
        case.poison(FAR[replays])
        network.partition([[case.anna.id]])
        await made.live(30.0)
        before = case.versions()
        for peer in case.others:  # they do nothing more: what is refused stays as it is
            assert peer.learner is not None
            peer.learner.end()
        await made.live(30.0)
        network.heal()
        await made.live(40.0)

        [refused] = case.told("jump_refused")
        assert refused["after"] > 1.25 * refused["before"] + 0.1
        assert refused["fragments"] == list(range(len(before)))
        assert refused["back_to"] == before
        assert case.behind() > 0
        assert case.anna.learner is not None
        assert case.anna.learner.distance(case.optimum) < refused["after"] / 2
        assert good[-1] == refused["after"]
        reasons = [told["reason"] for told in case.anna.told("catch_up_failed")]
        assert all(reasons)
        assert any("raised the held-out loss here" in reason for reason in reasons)
        made.check()
        judging.cancel()


async def test_an_unusually_long_merge_is_a_jump_also_for_a_member_of_its_round() -> None:
    async with swarm(MemoryNetwork()) as made, asyncio.TaskGroup() as tasks:
        case = await gated(made)
        judging = tasks.create_task(case.gate.run(case.anna.averager))
        await made.live(45.0)
        assert not case.measured  # usual steps cost nothing
        case.poison(FAR[True])
        while not case.told("jump_refused"):
            await made.live(5.0)
        assert not case.anna.told("state_adopted")  # it was in all of these rounds
        [refused] = case.told("jump_refused")
        assert all(
            back < version
            for back, version in zip(refused["back_to"], refused["versions"], strict=True)
        )
        await made.live(5.0)
        for fragment in refused["fragments"]:
            state = case.anna.averager.states[fragment]
            assert state is not None and state.version in refused["back_to"]
        made.check()
        judging.cancel()


@pytest.mark.slow
async def test_a_peer_alone_with_its_judgement_goes_with_the_others_in_the_end() -> None:
    async with swarm(MemoryNetwork()) as made, asyncio.TaskGroup() as tasks:
        case = await gated(made)
        judging = tasks.create_task(case.gate.run(case.anna.averager))
        await made.live(45.0)
        case.poison(FAR[False])
        await parted(case, 30.0)
        seen: list[int] = []
        made_by_others: list[int] = []
        for _ in range(60):
            await made.live(20.0)
            seen.append(case.behind())
            made_by_others.append(sum(version or 0 for version in case.others[0].versions()))
            if case.told("jump_allowed"):
                break
        rows = Counter(
            fragment for told in case.told("jump_refused") for fragment in told["fragments"]
        )
        # It leads as often as the others, and keeps none of them from a round.
        grown = [now - before for before, now in pairwise(made_by_others)]
        assert min(grown) >= 2, made_by_others
        # A jump that was kept in between, from one bad state to another, begins a new row.
        assert REFUSALS_MAX <= max(rows.values()) <= 3 * REFUSALS_MAX, (rows, seen)
        assert case.told("jump_allowed")
        first, *_, last = case.told("jump_refused")
        assert min(last["versions"]) - min(first["versions"]) >= 2 * PATIENCE_VERSIONS
        await made.live(60.0)
        made.check()
        assert case.behind() <= 1  # and it is one of them again
        assert case.anna.averager.stats.contributed > 0
        judging.cancel()


class Still:
    """An averager with two fragments, on which nothing happens by itself."""

    def __init__(self) -> None:
        self.first = list(start_of(LAYOUT)[:2])
        self.states: tuple[FragmentState | None, ...] = tuple(self.first)
        self.phases: tuple[Phase, ...] = (Phase.IDLE, Phase.IDLE)
        self.replaced: list[tuple[int, int, str]] = []
        self.losses: list[float | None] = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.kept: list[int] = []

    async def replace_states(self, states: Sequence[FragmentState], *, reason: str) -> None:
        for state in states:
            self.replaced.append((state.fragment, state.version, reason))
            self._stand(state)

    def _stand(self, state: FragmentState) -> None:
        states = list(self.states)
        states[state.fragment] = state
        self.states = tuple(states)

    def gate(self, **changes: Any) -> LossGate:
        async def measure() -> float | None:
            return self.losses.pop(0)

        async def keep(refusals: Refusals) -> None:
            self.kept.append(len(refusals))

        given: dict[str, Any] = {"measure": measure, "holds": lambda fragment: True, "keep": keep}
        made = LossGate(
            SETTINGS,
            on_event=lambda name, fields: self.events.append((name, dict(fields))),
            **{**given, **changes},
        )
        self._judging = asyncio.ensure_future(made.run(self))
        return made

    async def jump(self, gate: LossGate, fragment: int, *, version: int = 1) -> FragmentState:
        before = self.states[fragment]
        assert before is not None
        lineage = bytes([fragment]) * 24 + version.to_bytes(8, "big")
        chain = before.chain.extended(Link(version, lineage, 10 * version))
        after = replace(before, version=version, lineage=lineage, chain=chain)
        await gate.before_jump(before, Standing.of(after))
        self._stand(after)
        return after

    async def judged(self) -> list[str]:
        await asyncio.sleep(2 * SETTINGS.open_s)
        self._judging.cancel()
        return [name for name, _ in self.events]


async def test_all_fragments_of_a_jump_are_undone_together_once_they_are_written_down() -> None:
    still = Still()
    still.losses = [2.0, 3.0]
    gate = still.gate()
    after = [await still.jump(gate, fragment) for fragment in (1, 0)]
    assert await still.judged() == ["jump_refused"]
    assert still.replaced == [(0, 0, "refused"), (1, 0, "refused")]
    assert still.kept == [2]
    assert all(gate.refuses(state.fragment, state.chain) for state in after)
    assert not any(gate.refuses(state.fragment, state.chain) for state in still.first)


@pytest.mark.parametrize("losses", [[None], [2.0, None]], ids=["before", "after"])
async def test_a_learner_that_cannot_measure_has_no_gate(losses: list[float | None]) -> None:
    still = Still()
    still.losses = losses
    await still.jump(still.gate(), 0)
    assert set(await still.judged()) <= {"jump_measured"}
    assert not still.replaced


async def test_a_learner_that_does_not_answer_delays_a_jump_only_for_a_while() -> None:
    async def never() -> float | None:
        await asyncio.sleep(1e9)
        return 0.0

    still, began = Still(), asyncio.get_running_loop().time()
    await still.jump(still.gate(measure=never), 0)
    assert asyncio.get_running_loop().time() - began == pytest.approx(SETTINGS.measure_s)
    assert await still.judged() == []


async def test_nothing_is_judged_for_a_time_while_something_is_fetched_or_not_adopted() -> None:
    for fetches, holds in ((True, True), (False, False)):
        still = Still()
        still.losses = [2.0, 3.0]
        still.phases = (Phase.IDLE, Phase.CATCHING if fetches else Phase.IDLE)
        await still.jump(still.gate(holds=lambda fragment, holds=holds: holds), 0)
        await asyncio.sleep(SETTINGS.open_s - 1.0)
        assert not still.events
        assert await still.judged() == ["jump_refused"]


async def test_after_some_refusals_in_a_row_the_jump_stays_and_the_row_ends() -> None:
    still = Still()
    refusals = Refusals(in_a_row={0: REFUSALS_MAX})
    still.losses = [2.0, 3.0]
    await still.jump(still.gate(refusals=refusals), 0)
    assert await still.judged() == ["jump_allowed"]
    assert not still.replaced and len(refusals) == refusals.row([0]) == 0


async def test_a_state_that_the_owner_attests_stays() -> None:
    still = Still()
    still.losses = [2.0, 3.0]
    attested: list[Attested] = []
    gate = still.gate(attested=lambda fragment: attested[0] if attested else None)
    after = await still.jump(gate, 0)
    attested.append(Attested(after.version, after.lineage, bytes(32)))
    assert await still.judged() == ["jump_allowed"]


async def test_a_run_that_was_taken_back_meanwhile_is_not_judged() -> None:
    still = Still()
    still.losses = [2.0, 3.0]
    await still.jump(still.gate(), 0)
    still.states = tuple(still.first)
    assert await still.judged() == []
    assert not still.replaced
