"""A comparison of times on probation: their cost for honest newcomers, and the work asked of liars.

Three old members merge one fragment every ten seconds. Five keys come at once when the run is two
minutes old, and work honestly; as liars they would strike once they have a majority of the votes.
The old members leave one after the other from the end of the third minute on. Run it as
``python -m tests.averaging.simulated.probation_experiment``.
"""

from __future__ import annotations

from averaging.rules.probation import ProbationPolicy
from averaging.rules.weights import weights_of
from tests.averaging.simulated.newcomers import MEMBERS, OLD_S, Newcomers, old_swarm

NEWCOMERS = 5
SEEDS = range(3)


def majority_after(made: Newcomers) -> int | None:
    """Number of rounds with newcomers before they had a majority of the voters."""
    theirs = [commit for commit in made.commits if made.names & {e.peer for e in commit.members}]
    for number, commit in enumerate(theirs):
        names = {commit.members[index].peer for index in commit.voters}
        if 2 * len(names & made.names) > len(names):
            return number
    return None


def share(made: Newcomers) -> float:
    """Mean share of the newcomers in the merges with all of them; 5 of 8 would be equal."""
    full = [commit for commit in made.commits if len(commit.members) == MEMBERS + NEWCOMERS]
    shares = [
        sum(
            weight
            for entry, weight in zip(
                commit.members, weights_of(commit, range(len(commit.members))), strict=True
            )
            if entry.peer in made.names
        )
        for commit in full
    ]
    return sum(shares) / len(shares) if shares else 0.0


def main() -> None:
    print(f"{'rounds':>7} {'seconds':>8} {'versions':>9} {'share':>6}  rounds to a majority")  # noqa: T201
    for rounds in (0, 2, 4, 8, 16):
        policy = ProbationPolicy(rounds=rounds, seconds=9.0 * rounds)
        stays = [old_swarm(seed, policy, count=NEWCOMERS) for seed in SEEDS]
        leave_at = [OLD_S + 60.0 + 20.0 * number for number in range(MEMBERS)]
        left = [old_swarm(seed, policy, count=NEWCOMERS, leave_at=leave_at) for seed in SEEDS]
        last = [max(made.swarm.versions()) for made in left]
        majorities = ", ".join(str(majority_after(made)) for made in stays)
        mean = sum(share(made) for made in stays) / len(stays)
        print(f"{rounds:>7} {policy.seconds:>8g} {last!s:>9} {mean:>6.2f}  {majorities}")  # noqa: T201


if __name__ == "__main__":
    main()
