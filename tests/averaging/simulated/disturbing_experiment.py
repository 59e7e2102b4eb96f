"""Versions that five honest peers make beside one that disturbs every round in which it has a part:
``python -m tests.averaging.simulated.disturbing_experiment``. Virtual time, minutes of work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import msgspec

from averaging import messages as said
from averaging.messages import Commit, Message, decode_commit, digest
from averaging.round.interface.effects import Note
from averaging.round.sealing.seals import ballot_of
from dht.identity import PeerId
from tests.averaging.simulated.liars import SwarmWithLiars
from tests.averaging.simulated.swarm import POLICY, Node, PeerPlan

LIVE_S = 300.0
HONEST = 5
QUICK_LINES_BYTES_S, SLOW_LINES_BYTES_S = 1e6, 500.0
"""On slow lines uploads of a round take seconds."""

SOON_S = 0.1
"""Time after a commit at which a disturber acts."""
AWAY_S = 0.5


@dataclass(slots=True)
class Disturber:
    """The one peer that disturbs, and what it knows of the rounds that it is in."""

    swarm: SwarmWithLiars
    rounds: dict[bytes, Commit] = field(default_factory=dict)
    votes: dict[tuple[bytes, int], dict[int, bytes]] = field(default_factory=dict)
    """Votes for the empty seals that it has proposed, by round and ballot."""

    @property
    def name(self) -> PeerId:
        (name,) = self.swarm.liars
        return name

    def ballot(self, commit: Commit, *, above: int = 0) -> int | None:
        """Its own next ballot; ``None`` where it has no vote."""
        index, voters = commit.index(self.name), commit.voters
        if index not in voters:
            return None
        return ballot_of(voters.index(index), voters=len(voters), above=above)

    def tell(self, commit: Commit, message: Message) -> None:
        """Send a message to all other members."""
        for member in commit.members:
            if member.peer != self.name:
                self.swarm.wires.deliver(self.name, member.peer, 0, message)

    def vote_for_nothing(self, commit: Commit, ballot: int) -> None:
        """Propose the empty seal."""
        name = digest_of(commit)
        signature = self.swarm.sign(self.name, said.vote(name, ballot, ()))
        own = commit.index(self.name)
        assert own is not None
        self.votes[name, ballot] = {own: signature}
        self.tell(commit, said.Propose(0, name, ballot, (), signature))

    def collect(self, voter: PeerId, accepted: said.Accepted) -> None:
        """Show the votes for the empty seal once they are a majority."""
        votes = self.votes.get((accepted.round, accepted.ballot))
        if votes is None:
            return
        commit = self.rounds[accepted.round]
        index = commit.index(voter)
        assert index is not None
        votes[index] = accepted.signature
        if len(votes) >= commit.majority:
            shown = tuple(sorted(votes.items()))
            self.tell(commit, said.Void(0, accepted.round, "", False, accepted.ballot, shown))


def digest_of(commit: Commit) -> bytes:
    return digest(said.encode_commit(commit))


Act = Callable[[Disturber, Commit], None]
Filter = Callable[[Disturber, PeerId, PeerId, Message], bool]
"""Says whether a message of this sender reaches this receiver."""


def own_empty_seal(disturber: Disturber, commit: Commit) -> None:
    ballot = disturber.ballot(commit)
    if ballot is not None:
        disturber.vote_for_nothing(commit, ballot)


def higher_and_higher(disturber: Disturber, commit: Commit) -> None:
    for second in range(30):
        ballot = disturber.ballot(commit, above=second * len(commit.voters))
        if ballot is not None:
            prepare = said.Prepare(0, digest_of(commit), ballot)
            disturber.swarm.heap.call_in(float(second), disturber.tell, commit, prepare)


def forswearing(disturber: Disturber, commit: Commit) -> None:
    ballot = disturber.ballot(commit)
    if ballot is not None:
        disturber.tell(commit, said.Forswear(0, digest_of(commit), ballot))


def giving_away(disturber: Disturber, commit: Commit) -> None:
    ballot, members = disturber.ballot(commit), commit.members
    if ballot is None:
        return
    for second in range(6):
        for number in range(len(commit.reducers)):
            reducer = members[(number + second) % len(members)].peer
            message = said.Reassign(0, digest_of(commit), ballot, number, reducer)
            disturber.swarm.heap.call_in(float(second), disturber.tell, commit, message)


def leading_to_nothing(disturber: Disturber, commit: Commit) -> None:
    if commit.leader == disturber.name:
        disturber.vote_for_nothing(commit, 0)


def leading_to_vows(disturber: Disturber, commit: Commit) -> None:
    if commit.leader == disturber.name:
        disturber.tell(commit, said.Forswear(0, digest_of(commit), 0))


def living_on(disturber: Disturber, commit: Commit) -> None:
    """Show each second that it is alive."""
    for second in range(60):
        message = said.Pass(0, "")
        disturber.swarm.heap.call_in(float(second), disturber.tell, commit, message)


def nothing(disturber: Disturber, commit: Commit) -> None: ...


def all_pass(disturber: Disturber, sender: PeerId, to: PeerId, message: Message) -> bool:
    return True


def no_seals(disturber: Disturber, sender: PeerId, to: PeerId, message: Message) -> bool:
    seals = isinstance(message, said.Propose | said.Sealed) and bool(message.seal)
    return sender != disturber.name or not seals


def outbid_at_once(disturber: Disturber, commit: Commit) -> None:
    outbid = said.Outbid(0, digest_of(commit), 0, 1000)
    disturber.swarm.wires.deliver(disturber.name, commit.leader, 0, outbid)


def outbidding(disturber: Disturber, sender: PeerId, to: PeerId, message: Message) -> bool:
    """Answer every coordinator that a higher ballot was promised."""
    if to == disturber.name and isinstance(message, said.Prepare | said.Propose):
        outbid = said.Outbid(0, message.round, message.ballot, message.ballot + 1000)
        disturber.swarm.wires.deliver(disturber.name, sender, 0, outbid)
    return True


def reporting_nothing(disturber: Disturber, sender: PeerId, to: PeerId, message: Message) -> bool:
    """Reduce, and report that no upload came."""
    if sender != disturber.name or not isinstance(message, said.Report) or not message.complete:
        return True
    empty = msgspec.structs.replace(message, complete=())
    disturber.swarm.wires.deliver(sender, to, 0, empty)
    return False


def mute(disturber: Disturber, sender: PeerId, to: PeerId, message: Message) -> bool:
    """Say nothing about a round once its roster is known."""
    return sender != disturber.name or getattr(message, "round", None) not in disturber.rounds


@dataclass(frozen=True, slots=True)
class Way:
    """A way to disturb: what is done at each commit, and with each message."""

    text: str
    act: Act = nothing
    passes: Filter = all_pass
    answers_half: bool = False
    """Merged slices are sent to half of the members alone."""
    killed_at: str | None = None
    """The event of its own at which it is killed each time; it is back after half a second."""


WAYS = (
    Way("nothing"),
    Way("it has its own empty seal accepted", own_empty_seal),
    Way("prepares a higher ballot each second", higher_and_higher),
    Way("tells every coordinator that it is outbid", outbid_at_once, outbidding),
    Way("has rounds forsworn", forswearing),
    Way("gives slices to others all the time", giving_away),
    Way("as a leader seals nothing", leading_to_nothing, no_seals),
    Way("as a leader has its rounds forsworn", leading_to_vows),
    Way("as a leader only shows that it lives", living_on, no_seals),
    Way("reports no upload as a reducer", passes=reporting_nothing),
    Way("answers half of the members as a reducer", answers_half=True),
    Way("moves its bytes and says nothing in a round", passes=mute),
    Way("is killed after each seal, and back after half a second", killed_at="learned_seal"),
    Way("as a leader is killed at each commit, and back after half a second", killed_at="closed"),
)


def disturbed(
    way: Way, *, line_bytes_s: float, live_s: float = LIVE_S, seed: int = 0
) -> tuple[int, Counter[str]]:
    """Number of versions, and how often each event happened at an honest peer."""
    plans = [PeerPlan(founder=not number, step_time_s=1.0) for number in range(HONEST + 1)]
    swarm = SwarmWithLiars(seed, plans, policy=replace(POLICY, audit_rate=0.4), slices=3)
    weather = replace(swarm.network.weather, bandwidth_bytes_s=line_bytes_s)
    swarm.network.weather = weather
    disturber = Disturber(swarm)
    seen: Counter[str] = Counter()

    def on_send(sender: PeerId, to: PeerId, message: Message) -> bool:
        if isinstance(message, said.Committed) and disturber.name in (sender, to):
            commit = decode_commit(message.commit)
            is_new = digest(message.commit) not in disturber.rounds
            if is_new and commit.index(disturber.name) is not None:
                disturber.rounds[digest(message.commit)] = commit
                swarm.heap.call_in(SOON_S, way.act, disturber, commit)
        if to == disturber.name and isinstance(message, said.Accepted):
            disturber.collect(sender, message)
        return way.passes(disturber, sender, to, message)

    def on_note(node: Node, note: Note) -> None:
        if node.name != disturber.name:
            seen[note.event] += 1
        elif note.event == way.killed_at:
            swarm.heap.call_in(0.0, swarm.crash, node.name)
            swarm.heap.call_in(AWAY_S, swarm.restart, node.name)

    swarm.on_send, swarm.on_note = on_send, on_note
    if way.answers_half:
        half = set(swarm.names[: len(swarm.names) // 2])
        swarm.answer_filter = lambda node, name, slice_index, to: (
            node.name != disturber.name or to in half
        )
    swarm.run(live_s)
    return max(swarm.versions()), seen


def row(way: Way) -> str:
    """The result as a line of a table."""
    cells = [way.text]
    for line_bytes_s in (QUICK_LINES_BYTES_S, SLOW_LINES_BYTES_S):
        versions, seen = disturbed(way, line_bytes_s=line_bytes_s)
        cells += str(versions), f"{seen['void'] / HONEST:.0f}"
    return f"| {' | '.join(cells)} |"


def main() -> None:
    print("| it | versions | void | on slow lines | void |\n|---|---|---|---|---|")  # noqa: T201
    for way in WAYS:
        print(row(way), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
