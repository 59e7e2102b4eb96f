"""The effect of each way to lie on a swarm of live averagers, on the virtual clock.

``python -m tests.chaos.lies_in_memory`` prints for each who found it, after how many
rounds, and what it cost. Five honest peers and two liars, beside five honest peers alone.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

from averaging.rules.policy import RoundPolicy
from averaging.rules.probation import ProbationPolicy
from dht.identity import PeerId
from dht.memory.host import MemoryNetwork, identity_of
from dht.memory.virtual_loop import run
from tests.averaging.live.quadratic import POLICY, Peer, Swarm, check_tokens, layout_of, swarm
from tests.chaos.attackers.lying_agent import Liar
from tests.chaos.judging.lies import Lie

FRAGMENTS = 4
HONEST = tuple(f"honest {number}" for number in range(5))
LIARS = tuple(f"liar {number}" for number in range(2))
LATE = "late"
"""One more honest peer, which comes when states are forged."""
QUIET_S, LIE_S = 40.0, 160.0


@dataclass(eq=False)
class Script:
    """Orders for the liars among the peers of one process."""

    lie: Lie
    liars: frozenset[PeerId] = frozenset(identity_of(name).peer_id for name in LIARS)
    victim: str = identity_of(HONEST[0]).peer_id
    on: bool = False
    lies: list[tuple[float, PeerId, bytes]] = field(default_factory=list)

    def now(self, me: PeerId) -> Lie | None:
        return self.lie if self.on and me in self.liars else None

    def told(self, me: PeerId, lie: Lie, round_id: bytes = b"", **more: Any) -> None:
        self.lies.append((asyncio.get_running_loop().time(), me, round_id))

    def established(self, me: PeerId) -> None:
        pass


@dataclass(frozen=True)
class Seen:
    """The effects of a lie."""

    lies: int
    banned_by: dict[PeerId, int]
    """Number of honest peers that banned each liar."""
    rounds_until: int | None
    """Rounds from the first lie until all honest peers had banned all who told one."""
    blames: Counter[str]
    """The faults that honest peers held against liars."""
    struck: int
    """Pairs of an honest peer and a liar that counts for it no more, because of strikes."""
    wronged: list[str]
    """The faults that honest peers held against each other, other than once."""
    versions: int
    """Versions that were made while they lied."""
    victims: int
    """Versions among them that have work of the victim."""
    left_out: int


def policy_of(lie: Lie | None, *, audit_rate: float = 0.1) -> RoundPolicy:
    probation = ProbationPolicy(rounds=16, seconds=10.0)  # as in open runs
    due = replace(POLICY.due, fragments=FRAGMENTS)
    policy = replace(POLICY, due=due, audit_rate=audit_rate, upload_s=5.0, probation=probation)
    if lie is Lie.MARKS:
        return replace(policy, group_size=5)
    return policy


async def lived(
    lie: Lie | None, script: Script, *, audit_rate: float, lie_s: float
) -> tuple[Swarm, Seen]:
    async with swarm(MemoryNetwork(), layout=layout_of(FRAGMENTS)) as made:
        policy = policy_of(lie, audit_rate=audit_rate)
        honest = [await made.add(name, policy=policy) for name in HONEST]
        for name in LIARS:
            if lie is not None:
                watch = Liar(identity_of(name), script)
                await made.add(name, policy=policy, watch=watch)
        await made.live(QUIET_S)
        script.on = True
        began = asyncio.get_running_loop().time()
        if lie is Lie.FORGE:
            await made.add(LATE, policy=policy, knows_start=False, states=())
        await made.live(lie_s)
        script.on = False
        seen = _seen(made, honest, script, began)
        if lie is not Lie.OVERSTATE:
            await made.live(QUIET_S)
            made.check()
            if lie is not Lie.MARKS:
                check_tokens(honest)
        return made, seen


def _seen(made: Swarm, honest: list[Peer], script: Script, began: float) -> Seen:
    rounds: dict[str, tuple[float, Any]] = {}
    for peer in honest:
        for at, name, fields in peer.events:
            if name == "round" and fields["outcome"] == "finished" and at > began:
                rounds.setdefault(fields["round"], (at, fields))
    ids = {peer.id for peer in honest}
    told = {liar for _, liar, _ in script.lies}
    first = min((at for at, _, _ in script.lies), default=0.0)
    bans = [
        next((at for at, name, f in peer.events if name == "convicted" and f["peer"] == liar), None)
        for peer in honest
        for liar in told
    ]
    until = None
    if bans and None not in bans:
        until = sum(first < at <= max(filter(None, bans)) for at, _ in rounds.values())
    blames = Counter(
        f"{name}.{fields.get('kind', '')}".rstrip(".")
        for peer in made.peers
        for at, name, fields in peer.events
        if name in ("refused", "audit_refused", "proof_refused", "struck")
        and at > began
        and fields["peer"] in script.liars
        and peer.id not in script.liars
    )
    wronged = Counter(
        f"{name} {fields['peer']}"
        for peer in honest
        for at, name, fields in peer.events
        if name in ("convicted", "audit_refused", "struck") and fields["peer"] in ids
    )
    now = asyncio.get_running_loop().time()
    return Seen(
        lies=len(script.lies),
        banned_by={
            liar: sum(liar in peer.averager.audits.convicted for peer in honest)
            for liar in sorted(script.liars)
        },
        rounds_until=until,
        blames=blames,
        struck=sum(
            peer.averager.audits.strikes.is_out(liar, now)
            for peer in honest
            for liar in script.liars
        ),
        wronged=[text for text, count in wronged.items() if count > 1 or "convicted" in text],
        versions=len(rounds),
        victims=sum(script.victim in fields["contributors"] for _, fields in rounds.values()),
        left_out=sum(script.victim in fields["left_out"] for _, fields in rounds.values()),
    )


def outcome(lie: Lie | None, *, audit_rate: float = 0.1, lie_s: float = LIE_S) -> Seen:
    """Let a swarm live with these liars; ``None``: without any."""
    script = Script(lie or Lie.REDUCE, frozenset() if lie is None else Script.liars)
    return run(lived(lie, script, audit_rate=audit_rate, lie_s=lie_s))[1]


if __name__ == "__main__":
    for each in [None, *(Lie(name) for name in sys.argv[1:] or Lie)]:
        sys.stdout.write(f"{each}: {outcome(each)}\n")
        sys.stdout.flush()
