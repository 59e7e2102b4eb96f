"""A simulated swarm that grows and shrinks by schedule, and what that does to its merges.

``resized`` puts a schedule into an experiment, ``follow`` simulates it and looks at it in windows
of time, and ``table`` shows them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeAlias

import msgspec

from peer.rules.ledger import Fate
from peer.simulate.outcome import Point, RoundRecord
from peer.simulate.results import Section
from peer.simulate.settings import End, Event, Swarm
from peer.simulate.simulation import SimulatedSwarm
from tests.swarms.sizes import Sizes

Ending: TypeAlias = Literal["crash", "leave"]
"""The end of a peer: without a word, or in order."""

TAIL_CYCLES = 4.0
"""The swarm goes on for so long at its last size."""
NO_END_TOKENS = 10**15
WINDOWS = 10


@dataclass(frozen=True, slots=True)
class Window:
    """Figures of the time between two moments."""

    until_s: float
    peers: int
    """Living peers at its end."""
    merges: float
    """Finished rounds of a fragment in a cycle: about as many as there are groups."""
    group: float
    """Mean number of contributors of a round."""
    pause: float
    """Longest time without a merge of any fragment that ended in it, in cycles."""
    fragment_pause: float
    """The same for one fragment alone, whose merges come once in a cycle."""
    fate: Fate
    """Fate of all tokens that were processed until its end."""
    loss: float


@dataclass(frozen=True, slots=True)
class Resized:
    """A simulated swarm that followed a schedule of sizes."""

    windows: list[Window]
    rise: float
    """Largest rise of the loss of the mean model above the lowest of the three looks before, as a
    share of that."""
    group_max: int
    """Largest number of members of a round."""
    trace: str

    @property
    def pause(self) -> float:
        return max(window.pause for window in self.windows)

    @property
    def fragment_pause(self) -> float:
        return max(window.fragment_pause for window in self.windows)


def resized(experiment: Swarm, sizes: Sizes, ending: Ending) -> Swarm:
    """The experiment with this schedule in place of its number of peers, events and end."""
    events = []
    for change in sizes.changes:
        if change.starts:
            events.append(Event(kind="join", at_s=change.at_s, peers=list(change.starts)))
        if change.ends:
            events.append(Event(kind=ending, at_s=change.at_s, peers=list(change.ends)))
    time_s = sizes.over_s + TAIL_CYCLES * experiment.cycle_s
    replace = msgspec.structs.replace
    return replace(
        experiment,
        peers=replace(experiment.peers, count=sizes.count),
        event=events,
        end=End(tokens=NO_END_TOKENS, time_s=time_s),
    )


def window_ends(experiment: Swarm, sizes: Sizes) -> list[float]:
    """The ends of the windows: tenths of the schedule, and the time after it."""
    ends = [sizes.over_s * number / WINDOWS for number in range(1, WINDOWS + 1)]
    return [*ends, sizes.over_s + TAIL_CYCLES * experiment.cycle_s]


def follow(
    experiment: Swarm,
    sizes: Sizes,
    ending: Ending,
    seed: int = 0,
    *,
    progress: Callable[[float], None] = lambda share: None,
) -> Resized:
    """Simulate a swarm that follows a schedule. The same seed gives the same result."""
    ends = window_ends(experiment, sizes)
    looks: list[tuple[int, Fate]] = []
    with SimulatedSwarm(resized(experiment, sizes, ending), seed) as swarm:
        for end_s in ends[:-1]:
            swarm.lives.call_at(end_s, lambda: looks.append((len(swarm.alive), swarm.fate())))
        result = swarm.run(progress)
        looks.append((len(swarm.alive), result.fate))
    windows = [
        _window(experiment, begin_s, end_s, look, result.rounds, result.points)
        for (begin_s, end_s), look in zip(pairwise([0.0, *ends]), looks, strict=True)
    ]
    losses = [point.loss for point in result.points]
    rises = [losses[i] / min(losses[i - 3 : i]) - 1.0 for i in range(3, len(losses))]
    group_max = max((record.members for record in result.rounds), default=0)
    return Resized(windows, max([0.0, *rises]), group_max, result.trace)


def _window(
    experiment: Swarm,
    begin_s: float,
    end_s: float,
    look: tuple[int, Fate],
    rounds: Sequence[RoundRecord],
    points: Sequence[Point],
) -> Window:
    fragments = range(experiment.outer.fragments)
    within = [record for record in rounds if begin_s < record.time_s <= end_s]
    sizes = [record.contributors for record in within]
    cycles = (end_s - begin_s) / experiment.cycle_s
    whole = _pause([record.time_s for record in rounds], begin_s, end_s)
    alone = max(
        _pause([record.time_s for record in rounds if record.fragment == index], begin_s, end_s)
        for index in fragments
    )
    return Window(
        until_s=end_s,
        peers=look[0],
        merges=len(within) / cycles / len(fragments),
        group=sum(sizes) / max(1, len(sizes)),
        pause=whole / experiment.cycle_s,
        fragment_pause=alone / experiment.cycle_s,
        fate=look[1],
        loss=[point.loss for point in points if point.time_s <= end_s][-1],
    )


def _pause(times: Sequence[float], begin_s: float, end_s: float) -> float:
    """The longest time between two merges that ended between two moments, or had not ended then."""
    before = max((at_s for at_s in times if at_s <= begin_s), default=0.0)
    moments = [before, *sorted(at_s for at_s in times if begin_s < at_s <= end_s), end_s]
    return max(later - earlier for earlier, later in pairwise(moments))


def table(label: str, found: Resized) -> Section:
    return Section(
        label,
        "Merges: of a fragment in a cycle. Group: contributors of a round. Pause: longest time "
        "between two merges, in cycles, of any fragment and of one alone. Tokens in thousands, all "
        "until then; excess is what does not add up. "
        f"Largest rise of the loss {found.rise:.1%}; largest roster {found.group_max}.",
        [
            *("s", "peers", "merges", "group", "pause", "of one"),
            *("processed", "merged", "pending", "discarded", "excess", "loss"),
        ],
        [
            [
                f"{window.until_s:.0f}",
                str(window.peers),
                f"{window.merges:.1f}",
                f"{window.group:.1f}",
                f"{window.pause:.2f}",
                f"{window.fragment_pause:.2f}",
                *(
                    f"{tokens / 1e3:.1f}"
                    for tokens in (
                        window.fate.processed,
                        window.fate.merged,
                        window.fate.pending,
                        window.fate.discarded_total,
                    )
                ),
                f"{window.fate.excess:.0f}",
                f"{window.loss:.4f}",
            ]
            for window in found.windows
        ],
    )
