"""Keys that join a swarm late and do as they like, and what the swarm makes beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from averaging.messages import (
    Accepted,
    Commit,
    Committed,
    Finished,
    Message,
    Promise,
    Void,
    decode_commit,
    digest,
)
from averaging.rules.policy import ProbationPolicy
from averaging.virtual.swarm import PeerPlan
from dht.identity import PeerId
from tests.averaging.virtual.swarm import POLICY, Swarm

MEMBERS = 3
OLD_S = 120.0
"""Time at which the newcomers come: too late to do half of all work by the end."""
END_S = 235.0

Behaviour = Callable[["Newcomers"], None]


@dataclass
class Newcomers:
    """A swarm of old members, the keys that came later, and the commits of the members' rounds."""

    swarm: Swarm
    names: frozenset[PeerId]
    commits: list[Commit]

    def versions(self) -> int:
        """The versions that the old members have made."""
        old = [node for node in self.swarm.trainers() if node.name not in self.names]
        return min(node.state.version for node in old if node.state is not None)

    def with_power(self) -> list[Commit]:
        """The commits in which a newcomer leads, reduces or votes for the old members."""
        return [
            commit
            for commit in self.commits
            if any(entry.peer not in self.names for entry in commit.members)
            and self.names.intersection(
                [
                    commit.leader,
                    *commit.reducers,
                    *(commit.members[index].peer for index in commit.voters),
                ]
            )
        ]


def old_swarm(
    seed: int,
    probation: ProbationPolicy,
    *,
    count: int,
    behaves: Behaviour | None = None,
    group_size: int = 16,
    leave_at: Sequence[float] = (),
) -> Newcomers:
    """A swarm in fair weather that ``count`` keys join. ``leave_at``: when old members crash."""
    plans = [PeerPlan(founder=number == 0) for number in range(MEMBERS)]
    plans += [PeerPlan(starts_at=OLD_S + 3.0 * number) for number in range(count)]
    policy = replace(POLICY, probation=probation, group_size=group_size)
    swarm = Swarm(seed, plans, policy=policy)
    made = Newcomers(swarm, frozenset(swarm.names[MEMBERS:]), [])

    def overhear(sender: PeerId, to: PeerId, message: Message) -> bool:
        if isinstance(message, Committed):
            commit = decode_commit(message.commit)
            if commit not in made.commits:
                made.commits.append(commit)
        return True

    swarm.on_send = overhear
    if behaves is not None:
        behaves(made)
    for name, at in zip(swarm.names, leave_at, strict=False):
        swarm.call_at(at, swarm.crash, name)
    swarm.run(END_S)
    return made


def never_vote(made: Newcomers) -> None:
    """The newcomers join and upload, and no vote of theirs arrives."""
    overhear = made.swarm.on_send
    assert overhear is not None

    def lose(sender: PeerId, to: PeerId, message: Message) -> bool:
        is_vote = isinstance(message, (Accepted, Promise)) and sender in made.names
        return overhear(sender, to, message) and not is_vote

    made.swarm.on_send = lose


def upload_nonsense(made: Newcomers) -> None:
    """The uploads of the newcomers are all refused."""
    made.swarm.faulty.update(dict.fromkeys(made.names, "the norm is out of bound"))


def claim_everything(made: Newcomers) -> None:
    """The newcomers tell of each round that it is void, and that they have finished it."""
    overhear = made.swarm.on_send
    assert overhear is not None

    def tell(sender: PeerId, to: PeerId, message: Message) -> bool:
        if isinstance(message, Committed) and to in made.names:
            commit = decode_commit(message.commit)
            round_id = digest(message.commit)
            head = made.swarm.nodes[to].machine.standing
            assert head is not None
            for entry in commit.members:
                if entry.peer not in made.names:
                    void = Void(0, round_id, "because", forsworn=True)
                    finished = Finished(0, round_id, head.head())
                    for claim in (void, finished):
                        made.swarm.say(to, entry.peer, claim)
        return overhear(sender, to, message)

    made.swarm.on_send = tell
