"""The agent of a member that lies: an honest agent with a watch that changes what it does.

``python -m tests.chaos.attackers.lying_agent ORDERS LOG ...`` behaves honestly, except while the
file ORDERS names a way to lie (``tests.chaos.judging.lies``). Each lie is appended to LOG, with
its time and round, so that the judge knows what there was to be found. A line ``counts`` says since
when it is established: a commit named it as a voter.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from averaging import messages as said
from averaging.history.claims import claim
from averaging.history.parent_maps import ParentMap
from averaging.history.replay import ReplayEntry
from averaging.history.state import FragmentState
from averaging.live.slices.evidence import Evidence, Uploads
from averaging.live.slices.watch import Watch
from averaging.messages import Commit, Message
from averaging.numbers.chunks import digests_of, root_of
from averaging.round.contributing import Contribution
from averaging.round.interface.effects import Effect, Enter, Merge, Send
from averaging.round.interface.inputs import Offer, UploadArrived
from dht.identity import Identity, PeerId
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


class Liar(Watch):
    """The watch of a member that lies when its orders say so, and is honest otherwise."""

    def __init__(self, identity: Identity, orders: Orders) -> None:
        self._identity = identity
        self._me = identity.peer_id
        self._orders = orders
        self._turns: Counter[Lie] = Counter()
        self._forged: dict[bytes, FragmentState] = {}

    def _lies(self, *lies: Lie) -> Lie | None:
        """The way in which it is to lie now, if it is one of these."""
        lie = self._orders.now(self._me)
        return lie if lie in lies else None

    def _tell(self, lie: Lie, round_id: bytes = b"", **more: Any) -> None:
        self._orders.told(self._me, lie, round_id, **more)

    def offers(self, offer: Offer | None) -> Offer | None:
        if offer is None or not self._lies(Lie.OVERSTATE):
            return offer
        self._turns[Lie.OVERSTATE] += 1
        factor = INCREDIBLE if self._turns[Lie.OVERSTATE] % 2 else CREDIBLE
        self._tell(Lie.OVERSTATE, factor=factor)
        steps, tokens = factor * offer.steps, factor * offer.tokens
        return msgspec.structs.replace(offer, steps=steps, tokens=tokens)

    def contributes(self, commit: Commit, given: Contribution | None) -> Contribution | None:
        """Poison, and invented marks."""
        lie = self._lies(Lie.POISON, Lie.MARKS)
        if lie is None or given is None:
            return given
        round_id = said.digest(said.encode_commit(commit))
        if lie is Lie.POISON:
            self._tell(lie, round_id)
            # A copy: the learner keeps its own.
            return replace(given, values=given.base + (given.base - given.values))
        if lie is Lie.MARKS and given.own_map is not None:
            self._tell(lie, round_id)
            merged = given.own_map.merged.with_work(self._me, 1, 10**6, INVENTED_TOKENS)
            return replace(given, own_map=ParentMap(merged, given.own_map.history))
        return given

    def serves(self, state: FragmentState) -> FragmentState | None:
        if not self._lies(Lie.FORGE):
            return state
        if state.lineage not in self._forged:
            self._forged.clear()
            rng = np.random.default_rng(list(state.lineage))
            noise = rng.standard_normal(state.theta.size, np.float32) * np.std(state.theta)
            self._forged[state.lineage] = replace(
                state, theta=state.theta + noise.astype(np.float32)
            )
        self._tell(Lie.FORGE, served="state")
        return self._forged[state.lineage]

    def serves_rounds(self, entries: Sequence[ReplayEntry]) -> Sequence[ReplayEntry]:
        if not entries or not self._lies(Lie.FORGE):
            return entries
        self._tell(Lie.FORGE, served="rounds")
        return [_with_other_bits(entry) for entry in entries]

    def heard(self, peer: PeerId, message: Message) -> Message | None:
        """As a leader it leaves the victim out."""
        is_victims = peer == self._orders.victim and isinstance(message, said.Join)
        if not is_victims or not self._lies(Lie.CENSOR):
            return message
        self._tell(Lie.CENSOR)
        return None

    def arrived(self, upload: UploadArrived) -> UploadArrived:
        """As a reducer it leaves the victim out."""
        if upload.problem is not None or upload.sender != self._orders.victim:
            return upload
        if not self._lies(Lie.CENSOR):
            return upload
        self._tell(Lie.CENSOR, upload.round)
        problem = "payload in int8: a scale is not finite"
        return UploadArrived(upload.round, upload.slice, upload.sender, problem)

    def effect(self, fragment: int, effect: Effect) -> Effect | None:
        match effect:
            case Enter() if effect.entry is not None and effect.entry in effect.commit.voters:
                self._orders.established(self._me)
            case Send():
                return self._sent(effect)
            case Merge() if len(effect.contributors) > 1 and self._lies(Lie.REDUCE):
                # The first contribution is taken for the mean: within any bound on norms.
                self._tell(Lie.REDUCE, effect.round)
                weights = (1.0, *[0.0] * (len(effect.weights) - 1))
                return msgspec.structs.replace(effect, weights=weights)
            case Merge() if self._lies(Lie.STALL):
                self._tell(Lie.STALL, effect.round)
                return None
        return effect

    def _sent(self, effect: Send) -> Effect | None:
        """Withheld votes, and second commits and seals."""
        message = effect.message
        if isinstance(message, said.Accepted | said.Promise) and self._lies(Lie.SILENCE):
            self._tell(Lie.SILENCE, message.round)
            return None
        if effect.to == self._me or not self._lies(Lie.EQUIVOCATE):
            return effect
        self._turns[Lie.EQUIVOCATE] += 1
        if self._turns[Lie.EQUIVOCATE] % 2:
            return Send(effect.to, self._contradicted(message))
        return effect

    def _contradicted(self, message: Message) -> Message:
        """Another commit, or seal, than other members get."""
        if isinstance(message, said.Committed):
            commit = said.decode_commit(message.commit)
            changed = msgspec.structs.replace(commit, round_s=commit.round_s - 0.5)
            other = said.encode_commit(changed)
            self._tell(Lie.EQUIVOCATE, said.digest(message.commit), of="commits")
            signature = self._identity.sign(other)
            return msgspec.structs.replace(message, commit=other, signature=signature)
        if isinstance(message, said.Propose) and len(message.seal) > 2:
            seal = message.seal[:-1]
            signature = self._identity.sign(said.vote(message.round, message.ballot, seal))
            self._tell(Lie.EQUIVOCATE, message.round, of="seals")
            return msgspec.structs.replace(message, seal=seal, signature=signature)
        return message

    def shows(self, asker: PeerId, uploads: Uploads) -> Uploads:
        """Auditors are shown nothing, or another upload that is signed as well."""
        if asker == self._me:
            return uploads
        lie = self._lies(Lie.HIDE, Lie.UPLOADS)
        round_id = said.digest(said.encode_commit(uploads.commit))
        if lie is Lie.HIDE:
            self._tell(lie, round_id)
            evidence = _copied(uploads.evidence, keeps=False)
            return replace(uploads, evidence=evidence, own={}, alone={})
        if lie is Lie.UPLOADS and uploads.own:
            self._tell(lie, round_id)
            return _other_uploads(uploads, self._me, self._identity.sign)
        return uploads


def _with_other_bits(entry: ReplayEntry) -> ReplayEntry:
    payload = bytearray(entry.payload)
    payload[len(payload) // 2] ^= 1
    return replace(entry, payload=bytes(payload))


def _other_uploads(true: Uploads, me: PeerId, sign: Callable[[bytes], bytes]) -> Uploads:
    """Uploads of zeros, with claims about them."""
    evidence = _copied(true.evidence, keeps=True)
    evidence.own, evidence.own_leaves = {}, {}
    own = {}
    for index, said_before in true.evidence.own.items():
        if index not in true.own:
            continue
        own[index] = memoryview(bytes(len(true.own[index])))
        places = (place for _, place in true.cutting.pieces(index))
        leaves = digests_of(own[index], places)
        evidence.own_leaves[index] = leaves
        evidence.own[index] = claim(
            evidence.subject(index, merged=False), true.commit, me, said_before.members,
            root_of(leaves), sign=sign,
        )  # fmt: skip
    return replace(true, evidence=evidence, own=own)


def _copied(true: Evidence, *, keeps: bool) -> Evidence:
    """A copy of the evidence on a round; without the claims that an auditor asks for first."""
    copied = copy(true)
    if not keeps:
        copied.sources, copied.sources_of_own = {}, {}
    return copied


if __name__ == "__main__":
    written = WrittenOrders(Path(sys.argv[1]), Path(sys.argv[2]))
    raise SystemExit(agent.main(sys.argv[3:], partial(Liar, orders=written)))
