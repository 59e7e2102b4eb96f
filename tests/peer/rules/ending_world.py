"""A small run whose peers all end at once, in virtual time, to storm ``peer.rules.ending``.

The peers are ``Ending`` machines, driven as ``peer.agent.leaving`` drives them, with an averaging
that takes a moment: all open peers in sight are merged, a peer that is shown a better state takes
it, and one that sees nobody folds. Tokens are counted, so that a lost one is seen.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

from dht.identity import PeerId
from peer.rules.ending import (
    Adopt,
    Answers,
    Ask,
    CameToNothing,
    Do,
    Drain,
    Drained,
    Effect,
    Ending,
    Export,
    Heard,
    Input,
    Look,
    MakeDue,
    Merged,
    Seen,
    Show,
    State,
    Tell,
    Whom,
)
from peer.rules.leaving import Departure, LastOffers
from peer.status import PeerStatus
from tests.peer.statuses import a_status

FRAGMENTS = 2
STEP_TOKENS = 10
ALL_LEAVE_AT_S = 150.0
"""Time at which those are asked to leave whose run goes on, or that stay after its end."""

OVER_AT_S = 600.0
LEFT_OUT_SHARE = 0.15
"""Share of peers that a round goes on without."""

FORGOTTEN_AFTER_S = 5.0
"""Time for which a peer that has crashed counts as live."""

NAMES = [PeerId(f"peer {number}") for number in range(6)]


class Watched(Ending):
    """An ``Ending`` that tells which ways it goes."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self.went: list[tuple[State, State]] = []

    def _go(self, state: State) -> list[Effect]:
        self.went.append((self.state, state))
        return super()._go(state)


@dataclass(frozen=True, slots=True)
class Fragment:
    """One state of a fragment. Equal lineages mean equal parameters."""

    version: int
    lineage: int
    merged: dict[PeerId, int]
    """The tokens of each peer that are in it."""
    epoch: int = 0
    """Number of times that the owner has taken the run back."""

    @property
    def tokens(self) -> int:
        return sum(self.merged.values())

    @property
    def rank(self) -> tuple[int, int, int, int]:
        return self.epoch, self.tokens, self.version, self.lineage


@dataclass(eq=False, slots=True, repr=False)
class Peer:
    """One peer of the run."""

    name: PeerId
    learns: bool
    ending: Watched
    begins: float
    skew_s: float
    """How late its clock has the date. Others do not wait for one that is far off."""
    states: list[Fragment]
    has_state: bool = False
    trained: int = 0
    """Tokens that were processed, of each fragment."""
    busy: set[int] = field(default_factory=set)
    drains: bool = False
    merges: bool = True
    folds: int = 0
    stopped: bool = False
    crashed_at: float | None = None
    trainer_gone: bool = False
    todo: deque[tuple[State, Effect]] = field(default_factory=deque)
    waits: int | None = None
    """The number of what it waits for; ``None``: it waits for nothing."""
    looked_in: State | None = None
    done: list[Effect] = field(default_factory=list)
    saves: int = 0
    exported: list[Fragment] | None = None
    taken_over: bool | None = None
    """Another one had all of its versions when it went; ``None``: nobody was there."""

    @property
    def is_there(self) -> bool:
        return self.crashed_at is None and not self.stopped

    @property
    def is_open(self) -> bool:
        """True if it begins rounds, and answers calls."""
        return self.is_there and self.merges and not self.drains and self.has_state

    @property
    def phase(self) -> str:
        if self.ending.state is State.ARRIVING:
            return "fetching"
        return "ready" if self.ending.departure is None else "leaving"

    @property
    def trains(self) -> bool:
        on = self.ending.trains_on and self.ending.state is not State.ARRIVING
        pending = sum(map(self.pending, range(FRAGMENTS)))
        return self.learns and (on or self.ending.offers_last(pending))

    @property
    def versions(self) -> tuple[int, ...]:
        return tuple(state.version for state in self.states) if self.has_state else ()

    @property
    def model(self) -> str:
        return "-".join(str(state.lineage) for state in self.states)

    def __repr__(self) -> str:
        shown = "".join(f"\n    {effect}" for effect in self.done)
        return f"\n{self.name}: {self.ending!r}, {self.states}, {self.trained}{shown}"

    def pending(self, fragment: int) -> int:
        return self.trained - self.states[fragment].merged.get(self.name, 0)

    def told(self, name: str) -> list[Tell]:
        return [each for each in self.done if isinstance(each, Tell) and each.name == name]


class World:
    """A run of a few peers that ends by tokens or by date, drawn from a seed.

    ``evening``: it has no end, and all peers are asked to leave at the same time.
    """

    def __init__(self, seed: int, *, evening: bool = False) -> None:
        self.rng = rng = random.Random(seed)
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0
        self._lineage = 0
        self.about = rng.uniform(2.0, 8.0)
        """Everything ends at about this time."""
        self.goal = rng.choice((None, int(15 * self.about), int(40 * self.about)))
        self.date = rng.choice((None, self.about + rng.uniform(-2.0, 2.0)))
        if evening:
            self.goal = self.date = None
        self.is_cut = False
        self.events: Counter[str] = Counter()
        learners, keepers = rng.choice((1, 2, 2, 3)), rng.choice((0, 0, 1, 1, 2))
        self.peers = [
            self._peer(name, learns=number < learners)
            for number, name in enumerate(NAMES[: learners + keepers])
        ]
        for peer in self.peers:
            self._at(peer.begins, self._arrive, peer)
        self._at(0.5, self._call)
        happens = self._ask, self._lose_trainer, self._take_back
        self._trap = rng.choice(list(State)), rng.choice(happens)
        """What happens to the first peer that comes into a state."""
        self._is_sprung = evening
        if evening:
            for peer in self.peers:
                self._at(10.0 + rng.uniform(0.0, 0.05), self._ask, peer, 30.0)
            return
        for peer in self.peers:
            self._plan(peer)
        if rng.random() < 0.25:
            self._at(self._soon(), self._take_back, rng.choice(self.peers))
        if rng.random() < 0.15:
            self._at(self._soon(), self._cut, True)
            self._at(self._soon() + 20.0, self._cut, False)
        self._at(ALL_LEAVE_AT_S, self._ask_all)

    def _peer(self, name: PeerId, *, learns: bool) -> Peer:
        rng = self.rng
        stays = not learns and rng.random() < 0.7
        ending = Watched(fragments=FRAGMENTS, learns=learns, stays=stays, last_round_s=20.0)
        begins = 0.0 if name == NAMES[0] else rng.choice((0.0, 0.0, self._soon()))
        first = [Fragment(0, 0, {}) for _ in range(FRAGMENTS)]
        skew_s = 60.0 if rng.random() < 0.03 else rng.uniform(-0.5, 0.5)
        return Peer(name, learns, ending, begins, skew_s, first)

    def _soon(self) -> float:
        later_s = self.rng.choice((0.0, self.rng.uniform(-1.0, 6.0), self.rng.uniform(0.0, 20.0)))
        return max(0.0, self.about + later_s)

    def _plan(self, peer: Peer) -> None:
        rng = self.rng
        for share in (0.35, 0.15):
            if rng.random() < share:
                self._at(self._soon(), self._ask, peer)
        if peer.learns and rng.random() < 0.3:
            self._at(self._soon(), self._lose_trainer, peer)
        if rng.random() < 0.07:
            self._at(self._soon(), self._crash, peer)

    def _at(self, when: float, what: Callable[..., None], *arguments: Any) -> None:
        self._count += 1
        heappush(self._events, (max(when, self.now), self._count, what, arguments))

    def run(self) -> None:
        while self._events:
            self.now, _, what, arguments = heappop(self._events)
            assert self.now < OVER_AT_S, f"it never ends: {[p.ending for p in self.peers]}"
            what(*arguments)

    # --- what happens to peers ------------------------------------------------------------------

    def _arrive(self, peer: Peer) -> None:
        if not peer.is_there or peer.ending.departure is not None:
            self._wake(peer)
            return
        others = [each for each in self._in_sight(peer) if each.has_state and each.is_there]
        if not (others or peer.begins == 0.0):
            self._at(self.now + 1.0, self._arrive, peer)  # it waits until somebody is there
            return
        peer.has_state = True
        for other in others:
            self._compare(peer, other)
        self._hear(peer, Heard.ARRIVED)
        if peer.learns:
            self._at(self.now + 1.0, self._step, peer)

    def _step(self, peer: Peer) -> None:
        if peer.is_there and not peer.trainer_gone and peer.ending.trains_on:
            peer.trained += STEP_TOKENS
            self._at(self.now + 1.0, self._step, peer)
        elif peer.is_there and peer.ending.state in (State.AGREEING, State.LAST_DRAIN):
            self._at(self.now + 1.0, self._step, peer)  # the owner may take the run back

    def _ask(self, peer: Peer, timeout_s: float | None = None) -> None:
        if timeout_s is None:
            timeout_s = self.rng.choice((0.0, 10.0, 30.0))
        departure = Departure(
            "asked", 0, finished=False, timeout_s=timeout_s, patience_s=3 * timeout_s
        )
        if peer.is_there:
            self.events["asked"] += 1
            self._hear(peer, departure)

    def _ask_all(self) -> None:
        for peer in self.peers:
            if peer.is_there:
                self._hear(peer, Departure("asked", 0, finished=False, timeout_s=10.0))

    def _lose_trainer(self, peer: Peer) -> None:
        if peer.is_there and peer.learns:
            self.events["trainer gone"] += 1
            peer.trainer_gone = True
            self._hear(peer, Heard.TRAINER_GONE)

    def _crash(self, peer: Peer) -> None:
        if peer.is_there:
            self.events["crash"] += 1
            peer.crashed_at = self.now

    def _cut(self, is_cut: bool) -> None:
        self.events["cut"] += is_cut
        self.is_cut = is_cut

    def _take_back(self, first: Peer) -> None:
        self.events["taken back"] += 1
        self._go_back(first)
        for peer in self.peers:
            if peer is not first:
                self._at(self.now + self.rng.uniform(0.0, 0.5), self._go_back, peer)

    def _go_back(self, peer: Peer) -> None:
        if peer.is_there:
            root = peer.states[0].epoch + 1
            peer.states = [Fragment(9, -root, {}, root) for _ in range(FRAGMENTS)]
            self._hear(peer, Heard.TAKEN_BACK)

    # --- who sees whom --------------------------------------------------------------------------

    def _sees(self, peer: Peer, other: Peer) -> bool:
        if self.is_cut and (NAMES.index(peer.name) + NAMES.index(other.name)) % 2:
            return False
        if other.crashed_at is not None:
            return self.now - other.crashed_at < FORGOTTEN_AFTER_S
        return not other.stopped and other.begins <= self.now

    def _in_sight(self, peer: Peer) -> list[Peer]:
        return [each for each in self.peers if each is not peer and self._sees(peer, each)]

    def _seen(self, peer: Peer) -> Seen:
        final = frozenset(i for i, s in enumerate(peer.states) if self._is_final(s))
        return Seen(
            versions=peer.versions,
            model=peer.model,
            final=final,
            in_flight=len(peer.busy),
            pending=max(peer.pending(i) for i in range(FRAGMENTS)),
            folds=peer.folds,
            learners=sum(other.trains for other in self._in_sight(peer)),
            date_left_s=None if self.date is None else self.date - self.now + peer.skew_s,
            state_bytes=800,
            round_bytes=100,
            bytes_per_s=1000.0,
        )

    def _is_final(self, state: Fragment) -> bool:
        return self.goal is not None and state.tokens >= self.goal

    def _status(self, peer: Peer) -> PeerStatus:
        return a_status(
            peer=peer.name,
            name=peer.name,
            role="learner" if peer.learns else "keeper",
            phase=peer.phase,
            versions=peer.versions,
            model=peer.model,
            ended_at=peer.ending.ended_at,
            fates={"pending": max(peer.pending(i) for i in range(FRAGMENTS))},
        )

    # --- averaging ------------------------------------------------------------------------------

    def _call(self) -> None:
        """The cycle: now and then somebody who trains makes a fragment due."""
        training = [each for each in self.peers if each.trains and each.is_open]
        if training:
            self._offer(self.rng.choice(training), self.rng.randrange(FRAGMENTS))
            self._compare(self.rng.choice(training), self.rng.choice(self.peers))
        if any(peer.is_there for peer in self.peers):
            self._at(self.now + self.rng.uniform(0.5, 2.0), self._call)

    def _may_offer(self, peer: Peer, fragment: int) -> bool:
        free = fragment not in peer.busy and fragment not in peer.ending.closed
        final = self._is_final(peer.states[fragment])
        return peer.is_open and free and not final and peer.pending(fragment) > 0

    def _offer(self, peer: Peer, fragment: int) -> None:
        if not self._may_offer(peer, fragment):
            return
        others = [other for other in self._in_sight(peer) if other.is_open]
        free = [other for other in others if fragment not in other.busy]
        called = [other for other in free if self.rng.random() > LEFT_OUT_SHARE]
        most = 1 + len(others) // 2
        if len(called) < most:
            called = free[:most]
        members = [peer, *called]
        if 2 * len(members) <= 1 + len(others):
            return  # two halves would make versions apart
        learners = [each for each in members if self._may_offer(each, fragment)]
        work = {each.name: each.trained for each in learners}
        for member in members:
            member.busy.add(fragment)
        takes_s = self.rng.uniform(0.1, 1.5)
        self._at(self.now + takes_s, self._merge, fragment, members, work, peer.states[0].epoch)

    def _merge(
        self, fragment: int, members: list[Peer], work: dict[PeerId, int], epoch: int
    ) -> None:
        for member in members:
            member.busy.discard(fragment)
        here = [m for m in members if m.is_there and m.states[fragment].epoch == epoch]
        is_void = self.rng.random() < 0.15 or len(here) <= len(members) // 2
        if is_void and len(members) > 1:
            for member in here:
                self._hear(member, CameToNothing(fragment))
        elif here:
            base = max((m.states[fragment] for m in here), key=lambda state: state.rank)
            self._lineage += 1
            there = {member.name for member in here}
            merged = base.merged | {n: t for n, t in work.items() if n in there}
            state = Fragment(base.version + 1, self._lineage, merged, epoch)
            for member in here:
                member.states[fragment] = state
                member.folds += len(members) == 1
                self._hear(member, Merged(self._seen(member).final, owner_set_version=False))
        for member in members:
            self._wake(member)

    def _compare(self, peer: Peer, other: Peer) -> None:
        """The one that is behind takes the other's states."""
        if not (peer.is_there and other.is_there and self._sees(peer, other)):
            return
        for fragment in range(FRAGMENTS):
            best = max(peer.states[fragment], other.states[fragment], key=lambda state: state.rank)
            for one in (peer, other):
                if fragment not in one.busy and one.states[fragment].epoch == best.epoch:
                    one.states[fragment] = best

    # --- driving --------------------------------------------------------------------------------

    def _hear(self, peer: Peer, heard: Input) -> None:
        before = peer.ending.state
        effects = peer.ending.hear(heard, now=self.now, wall_time=self.now)
        peer.todo.extend((peer.ending.state, effect) for effect in effects)
        if peer.ending.state is not before:
            peer.waits = None
            self._spring(peer)
        if effects or peer.ending.state is not before:
            self._at(self.now, self._act, peer)

    def _spring(self, peer: Peer) -> None:
        if peer.ending.state is not self._trap[0] or self._is_sprung:
            return
        self._is_sprung = True
        self._at(self.now + self.rng.choice((0.0, 0.04)), self._trap[1], peer)

    def _wake(self, peer: Peer) -> None:
        """A peer that drains looks whether its rounds have ended."""
        self._at(self.now, self._act, peer)

    def _act(self, peer: Peer) -> None:
        while peer.is_there or peer.todo:
            if peer.crashed_at is not None or peer.waits is not None:
                return
            if peer.todo:
                self._do(peer, *peer.todo.popleft())
                continue
            if peer.ending.state in (State.ARRIVING, State.GONE):
                return
            if peer.looked_in is peer.ending.state:
                self._wait(peer, peer.ending.look_every_s, self._look)
                return
            self._look(peer)

    def _look(self, peer: Peer) -> None:
        peer.looked_in = peer.ending.state
        self._hear(peer, Look(self._seen(peer)))

    def _wait(self, peer: Peer, seconds: float, then: Callable[[Peer], None]) -> None:
        """Go on with ``then`` unless the peer is in another state before."""
        self._count += 1
        peer.waits = number = self._count
        self._at(self.now + seconds, self._go_on, peer, number, then)

    def _go_on(self, peer: Peer, number: int, then: Callable[[Peer], None]) -> None:
        if peer.waits == number and peer.crashed_at is None:
            peer.waits = None
            then(peer)
            self._act(peer)

    def _do(self, peer: Peer, state: State, effect: Effect) -> None:
        assert (
            peer.ending.state is not State.GONE
            or effect in (Do.GOODBYE,)
            or isinstance(effect, Export)
        )
        peer.done.append(effect)
        in_time = peer.ending.state is state
        match effect:
            case Ask(whom) if in_time:
                asked = self._whom(peer, whom)

                def answer(peer: Peer) -> None:
                    there = [each for each in asked if each.is_there and self._sees(peer, each)]
                    answers = [self._status(each) for each in there]
                    self._hear(peer, Answers(answers, len(asked), self._seen(peer)))

                slow = any(not each.is_there for each in asked)
                self._wait(peer, 2.0 if slow else self.rng.uniform(0.02, 0.3), answer)
            case Drain(timeout_s) if in_time:
                peer.drains = True
                until = self.now + timeout_s
                self._wait(peer, min(timeout_s, 0.05), lambda peer: self._drain(peer, until))
            case Adopt() if in_time:
                self._wait(peer, 0.1, lambda peer: self._hear(peer, Heard.ADOPTED))
            case Show(names):
                for other in self.peers:
                    if other.name in names:
                        self._at(self.now + 0.1, self._compare, peer, other)
            case MakeDue(fragments):
                for fragment in fragments:
                    self._offer(peer, fragment)
            case Do.HURRY:
                for fragment in range(FRAGMENTS):
                    self._offer(peer, fragment)
            case Do.OFFER:
                left = sum(peer.pending(i) > 0 for i in range(FRAGMENTS))
                for fragment in range(FRAGMENTS):
                    self._offer(peer, fragment)
                self._hear(peer, LastOffers(encoded_bytes=100 * left, bytes_per_s=1000.0))
            case Do.END_MERGES:
                peer.merges = False
            case Do.STOP:
                takers = [each for each in self._in_sight(peer) if each.has_state]
                if takers:
                    versions = [each.states for each in takers]
                    mine = peer.states
                    peer.taken_over = any(
                        all(
                            theirs.merged.get(peer.name, 0) >= own.merged.get(peer.name, 0)
                            for theirs, own in zip(states, mine, strict=True)
                        )
                        for states in versions
                    )
                peer.stopped = True
            case Do.SAVE:
                peer.saves += peer.stopped
                self._hear(peer, Heard.SAVED)
            case Export():
                peer.exported = list(peer.states)
            case Tell(name):
                self.events[name] += 1

    def _drain(self, peer: Peer, until: float) -> None:
        if peer.busy and self.now < until:
            self._wait(peer, 0.05, lambda peer: self._drain(peer, until))
        else:
            self._hear(peer, Drained(self._seen(peer)))

    def _whom(self, peer: Peer, whom: Whom) -> list[Peer]:
        seen = self._in_sight(peer)
        if whom is Whom.LEARNERS:
            return [each for each in seen if each.trains]
        keepers = [each for each in seen if not each.learns]
        return keepers if whom is Whom.TAKERS and keepers else seen
