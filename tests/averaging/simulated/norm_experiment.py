"""The norms of honest uploads over the usual ones, and the poison that is merged.

Learners of the quadratic problem on virtual time; ``python -m
tests.averaging.simulated.norm_experiment``. *Own* is the rule before: an upload against another
one's displacement.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any
from unittest.mock import patch

from averaging.live.exchange import Exchange
from averaging.live.settings import AveragerSettings
from averaging.numbers.chunks import Chunk
from averaging.round.contributing import Contribution
from averaging.round.reducer import Reducer
from dht.memory.host import MemoryNetwork, identity_of
from dht.memory.virtual_loop import run
from tests.averaging.live.quadratic import QuadraticLearner, Swarm, layout_of, swarm

MALLORY = identity_of("mallory").peer_id
LIVE_S = 100.0
WARM_UP_S = 60.0


@dataclass(slots=True)
class Seen:
    """The norms of others' uploads that reducers saw at their last verdicts."""

    by_usual: dict[tuple[int, int, int], float] = field(default_factory=dict)
    by_own: dict[tuple[int, int, int], float] = field(default_factory=dict)
    refused: set[tuple[int, int, int]] = field(default_factory=set)


def experiment(prepare: Callable[[Swarm], Any], *, poison: float = 1.0) -> tuple[Seen, int, int]:
    """Returns what was seen, and of mallory's rounds how many there were and merged its work."""
    seen = Seen()
    judge = Reducer.outlying
    encode = Exchange._encode_chunk

    def judged(self: Reducer, index: int) -> dict[int, str]:
        found = judge(self, index)
        norms = self.slices[index].norms
        for who, norm in norms.items():
            others = [other.value for name, other in norms.items() if name != who]
            usual = max(median(others) if others else 0.0, norm.usual or 0.0)
            key = id(self), index, who
            if usual > 0 and norm.value > norm.harmless:
                seen.by_usual[key] = norm.value / usual
            if others and min(others) > 0:
                seen.by_own[key] = norm.value / min(others)
            if who in found:
                seen.refused.add(key)
        keep.append(self)
        return found

    keep: list[Reducer] = []  # so that no other one gets its id

    def spoilt(self: Exchange, chunk: Chunk, given: Contribution, out: memoryview) -> None:
        if self._me == MALLORY and poison != 1.0:
            far = given.base - poison * (given.base - given.values)
            given = replace(given, values=far)
        encode(self, chunk, given, out)

    rounds: dict[str, bool] = {}

    async def main() -> None:
        async with swarm(MemoryNetwork(), layout=layout_of(4)) as made:
            await prepare(made)
            await made.live(LIVE_S)
            for peer in made.peers:
                for told in peer.told("round"):
                    if told["outcome"] == "finished" and MALLORY in told["members"]:
                        rounds[told["round"]] = MALLORY in told["contributors"]

    with patch.object(Reducer, "outlying", judged), patch.object(Exchange, "_encode_chunk", spoilt):
        run(main())
    return seen, len(rounds), sum(rounds.values())


SETTINGS = AveragerSettings(progress_s=0.5)


async def four(
    made: Swarm, *, mallory: bool = False, step_times: tuple[float, ...] = (1.0,)
) -> None:
    for index, name in enumerate(("anna", "boris", "clara", "mallory" if mallory else "dora")):
        step_time_s = step_times[index % len(step_times)]
        await made.add(name, settings=SETTINGS, step_time_s=step_time_s)


async def at_four_speeds(made: Swarm) -> None:
    await four(made, step_times=(1.0, 1.5, 2.5, 4.0))


async def joining_late(made: Swarm) -> None:
    await four(made)
    await made.live(60.0)
    for name in ("erik", "fred", "gina", "hans"):
        await made.add(name, settings=SETTINGS)
        await made.live(7.0)


def warming_up(prepare: Callable[[Swarm], Any]) -> Callable[[Swarm], Any]:
    """The rate rises from nothing, with the time, so that who comes later is further."""

    async def prepared(made: Swarm) -> None:
        train_once = QuadraticLearner.train_once
        began = asyncio.get_running_loop().time()

        def slowly(self: QuadraticLearner) -> None:
            since_s = asyncio.get_running_loop().time() - began
            self.rate = 0.05 * min(1.0, since_s / WARM_UP_S)
            train_once(self)

        QuadraticLearner.train_once = slowly
        try:
            await prepare(made)
            await made.live(WARM_UP_S)
        finally:
            QuadraticLearner.train_once = train_once

    return prepared


async def in_pairs(made: Swarm) -> None:
    await made.add("anna", settings=SETTINGS)
    await made.add("boris", settings=SETTINGS, step_time_s=4.0)


def report() -> Iterator[str]:
    yield f"{'honest uploads':<34} {'of usual':>9} {'of another':>11} {'refused':>8}"
    honest = {
        "four alike": four,
        "1 to 4 times as fast": at_four_speeds,
        "four more join": joining_late,
        "two, 1 and 4 times as fast": in_pairs,
        "warm-up from zero, 1 to 4 times": warming_up(at_four_speeds),
        "warm-up from zero, two": warming_up(in_pairs),
        "warm-up from zero, four join": warming_up(joining_late),
    }
    for name, prepare in honest.items():
        seen, _, _ = experiment(prepare)
        usual, other = (
            max(found.values(), default=math.nan) for found in (seen.by_usual, seen.by_own)
        )
        yield f"{name:<34} {usual:>9.3g} {other:>11.3g} {len(seen.refused):>8}"
    yield "of four one sends so many times its displacement: rounds with it, and that merged it"
    for poison in (10.0, 30.0, 100.0, 1000.0):
        _, rounds, merged = experiment(lambda made: four(made, mallory=True), poison=poison)
        yield f"{poison:>6g} times {rounds:>4} {merged:>4}"


if __name__ == "__main__":
    for line in report():
        print(line, flush=True)  # noqa: T201
