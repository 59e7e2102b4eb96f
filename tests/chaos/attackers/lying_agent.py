"""The agent of a member that lies: an honest agent, parts of which are replaced in its process.

``python -m tests.chaos.attackers.lying_agent ORDERS LOG ...`` behaves honestly, except while the
file ORDERS names a way to lie (``tests.chaos.judging.lies``). Each lie is appended to LOG, with
its time and round, so that the judge knows what there was to be found. A line ``counts`` says since
when it is established: a commit named it as a voter.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from averaging import messages as said
from averaging.audit.claims import claim, digest_of_pieces, digests_of
from averaging.history.parent_maps import ParentMap
from averaging.history.replay import ReplayEntry
from averaging.history.state import FragmentState
from averaging.live.averager import Averager
from averaging.live.checks.auditing import Auditing
from averaging.live.fragment import FragmentWork
from averaging.live.learner_port import Snapshot
from averaging.live.slices.evidence import Evidence, Uploads
from averaging.live.slices.exchange import Exchange
from averaging.live.slices.reducing import OngoingMerge, Reducing
from averaging.round.contributing import Contribution
from averaging.round.interface.effects import Effect, Enter, Send
from dht.identity import PeerId
from peer.agent import agent
from tests.chaos.judging.lies import Lie

LOOK_EVERY_S = 0.1
INCREDIBLE = 10**6
"""Factor by which steps are overstated that nobody can have made. It takes turns with
``CREDIBLE``."""
CREDIBLE = 20
"""Factor by which steps are overstated that a faster machine could explain."""
INVENTED_TOKENS = 10**6


class Orders(Protocol):
    """Tells a liar how to lie now, and hears of each lie."""

    def now(self, me: PeerId) -> Lie | None:
        """The way in which this peer is to lie now."""
        ...

    @property
    def victim(self) -> str:
        """The peer to censor."""
        ...

    def told(self, me: PeerId, lie: Lie, round_id: bytes = b"", **more: Any) -> None: ...

    def established(self, me: PeerId) -> None:
        """A commit counts it."""
        ...


class WrittenOrders:
    """The orders that the scenario's director writes to a file, for the one peer of a process."""

    def __init__(self, orders: Path, log: Path) -> None:
        self._orders = orders
        self._log = log
        self._read_s = 0.0
        self._lie: Lie | None = None
        self.victim = ""
        self._counts = False

    def now(self, me: PeerId) -> Lie | None:
        if time.monotonic() - self._read_s > LOOK_EVERY_S:
            self._read_s = time.monotonic()
            self._read()
        return self._lie

    def _read(self) -> None:
        try:
            told = json.loads(self._orders.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return
        self._lie = Lie(told["lie"]) if told["lie"] and self._counts else None
        self.victim = told.get("victim", "")

    def told(self, me: PeerId, lie: Lie, round_id: bytes = b"", **more: Any) -> None:
        self._note({"what": "lied", "lie": lie, "round": round_id.hex(), **more})

    def established(self, me: PeerId) -> None:
        if not self._counts:
            self._counts = True
            self._note({"what": "counts"})

    def _note(self, record: dict[str, Any]) -> None:
        with self._log.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"at": time.time(), **record}) + "\n")


def lie_by(orders: Orders) -> None:
    """Replace the parts of this process that lie."""
    _watch_standing(orders)
    for replace_part in (_overstate, _contribute, _forge, _censor, _say, _merge, _show):
        replace_part(orders)


def _watch_standing(orders: Orders) -> None:
    enter = FragmentWork._enter

    def entered(self: FragmentWork, effect: Enter) -> None:
        if effect.entry is not None and effect.entry in effect.commit.voters:
            orders.established(self.averager.life.peer)
        enter(self, effect)

    FragmentWork._enter = entered


def _overstate(orders: Orders) -> None:
    offer, count = FragmentWork._offer, 0

    async def offered(self: FragmentWork, snapshot: Snapshot | None) -> None:
        nonlocal count
        me = self.averager.life.peer
        if snapshot is not None and orders.now(me) is Lie.OVERSTATE:
            count += 1
            factor = INCREDIBLE if count % 2 else CREDIBLE
            steps, tokens = factor * snapshot.steps, factor * snapshot.tokens
            snapshot = replace(snapshot, steps=steps, tokens=tokens)
            orders.told(me, Lie.OVERSTATE, factor=factor)
        await offer(self, snapshot)

    FragmentWork._offer = offered


def _contribute(orders: Orders) -> None:
    """Poison, and invented marks."""
    contribute = Exchange.contribute

    def contributed(self: Exchange, given: Contribution) -> None:
        me, own_map = self.parts.me, given.own_map
        lie = orders.now(me)
        if lie is Lie.POISON and not self.parts.is_mix:
            orders.told(me, lie, self.parts.round)
            # A copy: the learner keeps its own.
            given = replace(given, values=given.base + (given.base - given.values))
        elif lie is Lie.MARKS and own_map is not None:
            orders.told(me, lie, self.parts.round)
            merged = own_map.merged.with_work(me, 1, 10**6, INVENTED_TOKENS)
            given = replace(given, own_map=ParentMap(merged, own_map.history))
        contribute(self, given)

    Exchange.contribute = contributed


def _forge(orders: Orders) -> None:
    state, replay = Averager.state, Averager.replay
    forged: dict[bytes, FragmentState] = {}

    def served(self: Averager, fragment: int) -> FragmentState | None:
        true = state(self, fragment)
        me = self.life.peer
        if true is None or orders.now(me) is not Lie.FORGE:
            return true
        if true.lineage not in forged:
            forged.clear()
            rng = np.random.default_rng(list(true.lineage))
            noise = rng.standard_normal(true.theta.size, np.float32) * np.std(true.theta)
            forged[true.lineage] = replace(true, theta=true.theta + noise.astype(np.float32))
        orders.told(me, Lie.FORGE, served="state")
        return forged[true.lineage]

    def replayed(self: Averager, fragment: int, version: int, lineage: Any) -> Any:
        true = replay(self, fragment, version, lineage)
        me = self.life.peer
        if not true or orders.now(me) is not Lie.FORGE:
            return true
        orders.told(me, Lie.FORGE, served="rounds")
        return [_with_other_bits(entry) for entry in true]

    Averager.state = served
    Averager.replay = replayed


def _with_other_bits(entry: ReplayEntry) -> ReplayEntry:
    payload = bytearray(entry.payload)
    payload[len(payload) // 2] ^= 1
    return replace(entry, payload=bytes(payload))


def _censor(orders: Orders) -> None:
    """Leave the victim out, as a reducer and as a leader."""
    contribute, heard = Exchange.contribute, Averager._heard

    def contributed(self: Exchange, given: Contribution) -> None:
        parts, tell = self.parts, self.parts.tell_upload

        def censored(
            index: int, sender: PeerId, problem: str | None, *rest: Any, **more: Any
        ) -> None:
            victim = sender == orders.victim
            if problem is None and victim and orders.now(parts.me) is Lie.CENSOR:
                orders.told(parts.me, Lie.CENSOR, parts.round)
                problem, rest = "payload in int8: a scale is not finite", ()
            tell(index, sender, problem, *rest, **more)

        parts.tell_upload = censored
        contribute(self, given)

    def ignored(self: Averager, peer: Any, data: bytes) -> None:
        me = self.life.peer
        if peer == orders.victim and orders.now(me) is Lie.CENSOR:
            try:
                message: Any = said.decode(data)
            except said.BadMessage:
                message = None
            if isinstance(message, said.Join):
                orders.told(me, Lie.CENSOR)
                return
        heard(self, peer, data)

    Exchange.contribute = contributed
    Averager._heard = ignored


def _say(orders: Orders) -> None:
    """Withheld votes, second commits, and second seals."""
    do = FragmentWork._do
    count = 0

    def done(self: FragmentWork, effect: Effect) -> None:
        nonlocal count
        if isinstance(effect, Send):
            me, message = self.averager.life.peer, effect.message
            lie = orders.now(me)
            if lie is Lie.SILENCE and isinstance(message, said.Accepted | said.Promise):
                orders.told(me, lie, message.round)
                return
            if lie is Lie.EQUIVOCATE and effect.to != me:
                count += 1
                if count % 2:
                    effect = Send(effect.to, _contradicted(self, message, orders))
        do(self, effect)

    FragmentWork._do = done


def _contradicted(work: FragmentWork, message: said.Message, orders: Orders) -> said.Message:
    """Another commit, or seal, than other members get."""
    identity = work.averager.me.identity
    if isinstance(message, said.Committed):
        commit = said.decode_commit(message.commit)
        other = said.encode_commit(msgspec.structs.replace(commit, round_s=commit.round_s - 0.5))
        round_id = said.digest(message.commit)
        orders.told(identity.peer_id, Lie.EQUIVOCATE, round_id, of="commits")
        return msgspec.structs.replace(message, commit=other, signature=identity.sign(other))
    if isinstance(message, said.Propose) and len(message.seal) > 2:
        seal = message.seal[:-1]
        signature = identity.sign(said.vote(message.round, message.ballot, seal))
        orders.told(identity.peer_id, Lie.EQUIVOCATE, message.round, of="seals")
        return msgspec.structs.replace(message, seal=seal, signature=signature)
    return message


def _merge(orders: Orders) -> None:
    """False merges, and merged slices that are withheld."""
    chunks, merge, give = Reducing._merge_chunks, Reducing._merge, Reducing._give_merged

    def merged_chunks(
        self: Reducing, given: Any, places: Any, ongoing: OngoingMerge, say: Any
    ) -> None:
        if orders.now(self.parts.me) is Lie.REDUCE:
            # The first contribution is taken for the mean: within any bound on norms.
            ongoing = replace(ongoing, weights=(1.0, *[0.0] * (len(ongoing.sources) - 1)))
        chunks(self, given, places, ongoing, say)

    async def merged(self: Reducing, index: int, inside: tuple[int, ...], taken: Any) -> None:
        if orders.now(self.parts.me) is Lie.REDUCE and len(inside) > 1:
            orders.told(self.parts.me, Lie.REDUCE, self.parts.round)
        await merge(self, index, inside, taken)

    async def gives(self: Reducing, bulk: Any, index: int, but: str) -> None:
        if orders.now(self.parts.me) is Lie.STALL:
            orders.told(self.parts.me, Lie.STALL, self.parts.round)
            await asyncio.Event().wait()  # until the deadline of the round
        await give(self, bulk, index, but)

    Reducing._merge_chunks = merged_chunks
    Reducing._merge = merged
    Reducing._give_merged = gives


def _show(orders: Orders) -> None:
    """Auditors are shown nothing, or another upload that is signed as well."""
    uploads_of = Auditing._uploads_of

    def shown(self: Auditing, round_id: bytes, asker: Any) -> Uploads:
        me = self._host.peer_id
        lie = orders.now(me) if asker != me else None
        uploads = uploads_of(self, round_id, asker)
        if lie is Lie.HIDE:
            orders.told(me, lie, round_id)
            return replace(
                uploads, evidence=_copied(uploads.evidence, keeps=False), own={}, alone={}
            )
        if lie is Lie.UPLOADS and uploads.own:
            orders.told(me, lie, round_id)
            return _other_uploads(uploads, me, self._sign)
        return uploads

    Auditing._uploads_of = shown


def _other_uploads(true: Uploads, me: PeerId, sign: Callable[[bytes], bytes]) -> Uploads:
    """Uploads of zeros, with claims about them."""
    evidence = _copied(true.evidence, keeps=True)
    evidence.own, evidence.own_leaves = {}, {}
    own = {}
    for index, said_before in true.evidence.own.items():
        if index not in true.own:
            continue
        own[index] = memoryview(bytes(len(true.own[index])))
        places = (place for _, place in true.cutting.audited(index))
        leaves = digests_of(own[index], places)
        evidence.own_leaves[index] = leaves
        evidence.own[index] = claim(
            evidence.subject(index, merged=False), true.commit, me, said_before.members,
            digest_of_pieces(leaves), sign=sign,
        )  # fmt: skip
    return replace(true, evidence=evidence, own=own)


def _copied(true: Evidence, *, keeps: bool) -> Evidence:
    """A copy of the evidence on a round; without the claims that an auditor asks for first."""
    copied = copy(true)
    if not keeps:
        copied.sources, copied.sources_of_own = {}, {}
    return copied


if __name__ == "__main__":
    lie_by(WrittenOrders(Path(sys.argv[1]), Path(sys.argv[2])))
    raise SystemExit(agent.main(sys.argv[3:]))
