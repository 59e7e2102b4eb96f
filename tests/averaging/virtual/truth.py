"""The promises of averaging, watched from outside: whoever breaks one breaks the test.

``Truth`` sees everything that a swarm does, and says nothing to it. ``Learner``
trains a handful of values, so that bits can be compared and every token followed.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from averaging.history.adoption import OwnWork, Parting
from averaging.history.parent_maps import ParentMaps
from averaging.history.standing import Standing
from averaging.history.state import FragmentState
from averaging.live.learner_port import Progress, Snapshot
from averaging.messages import Commit
from averaging.numbers.arrays import Float32s
from averaging.numbers.codec import Addends, Codec, Scratch
from averaging.numbers.codecs import codec_named
from averaging.numbers.layout import Layout, TensorSpec
from averaging.numbers.merge import Units, merge_encoded, rule_named
from averaging.round.fetched_states import Life
from averaging.round.interface.effects import Apply, Note
from averaging.round.interface.inputs import Offer
from averaging.rules.weights import weights_of
from dht.identity import PeerId

LAYOUT = Layout.build(
    [TensorSpec("a", (5, 3)), TensorSpec("b", (11,)), TensorSpec("c", (2, 2)), TensorSpec("d", ())],
    1,
)
FRAGMENT = LAYOUT.fragments[0]

_scratch = Scratch()


class Broken(AssertionError):
    """An invariant does not hold. The message says which, when, and for whom."""


@dataclass(slots=True)
class Work:
    """An interval of one incarnation's steps, as it was offered."""

    peer: PeerId
    incarnation: int
    begin: int
    end: int
    tokens: int


class Truth:
    """Sees all, says nothing to the swarm, and breaks the test when promises are broken."""

    def __init__(self) -> None:
        self.bits: dict[bytes, bytes] = {}
        self.covered: dict[bytes, dict[tuple[PeerId, int], int]] = {}
        self.mixed: dict[bytes, bool] = {}
        self.seals: dict[bytes, tuple[int, ...]] = {}
        self.void: set[bytes] = set()
        self.payloads: dict[tuple[bytes, int], bytes] = {}
        self.merged: dict[bytes, tuple[bytes, ParentMaps | None]] = {}
        self.checked: dict[bytes, tuple[Commit, tuple[float, ...]]] = {}
        """The contributions that merged slices were found to be the sum of. Each member has the
        same, or it fails."""
        self.offers: dict[tuple[PeerId, int, int], Work] = {}
        self.vows: set[tuple[Life, bytes]] = set()
        self.finishers: dict[bytes, list[PeerId]] = {}
        self.lies: set[bytes] = set()
        """Rounds in which a reducer lies: what is merged there is not compared."""
        self.coverage: Counter[str] = Counter()
        self.versions_made = 0

    def founded(self, state: FragmentState) -> None:
        self.bits[state.lineage] = state.digest()
        self.covered[state.lineage] = {}
        self.mixed[state.lineage] = False

    def offered(self, work: Work) -> None:
        self.offers[work.peer, work.incarnation, work.end] = work

    def uploaded(self, round_id: bytes, member: int, payload: bytes) -> None:
        known = self.payloads.setdefault((round_id, member), payload)
        if known != payload:
            raise Broken(f"member {member} uploaded two different payloads in one round")

    def sealed(self, round_id: bytes, seal: tuple[int, ...]) -> None:
        known = self.seals.setdefault(round_id, seal)
        if known != seal:
            raise Broken(f"two seals were chosen in round {round_id.hex()[:8]}: {known} and {seal}")

    def vowed(self, life: Life, round_id: bytes) -> None:
        self.vows.add((life, round_id))

    def applies(self, life: Life, apply: Apply, data: bytes, maps: ParentMaps | None) -> None:
        """``data``: all merged slices as they are at this peer."""
        round_id, commit = apply.round, apply.commit
        self.sealed(round_id, apply.seal)
        if not apply.seal:
            raise Broken(f"{life} applies a void round")
        if (life, round_id) in self.vows:
            raise Broken(f"{life} applies a round that it has forsworn")
        self.finishers.setdefault(round_id, []).append(life.peer)
        if round_id in self.lies:
            return
        if self.merged.setdefault(round_id, (data, maps)) != (data, maps):
            raise Broken(f"what {round_id.hex()[:8]} has merged differs at {life}")
        sums = (commit, tuple(apply.weights))
        if commit.kind == "merge" and self.checked.get(round_id) != sums:
            self._check_all_slices(round_id, commit, apply, data)
            self.checked[round_id] = sums

    def _check_all_slices(self, round_id: bytes, commit: Commit, apply: Apply, data: bytes) -> None:
        """Check that exactly the sealed contributions are merged, in every slice.

        Who has a delegate is in its bundle, and counts there with its weight.
        """
        up, down = map(codec_named, commit.codecs)

        def merged(payloads: Sequence[bytes], weights: Sequence[float], into: Codec) -> bytes:
            out = bytearray(into.encoded_size(FRAGMENT.unit_sizes))
            rule, given = rule_named(commit.merge), Addends(payloads, weights)
            units = Units(FRAGMENT.unit_sizes, FRAGMENT.kinds)
            merge_encoded(rule, up, given, units, out, _scratch, into=into)
            return bytes(out)

        weight_of = dict(zip(apply.seal, apply.weights, strict=True))
        payloads, weights = [], []
        for index in apply.seal:
            delegate = commit.members[index].delegate
            if delegate is not None:
                if delegate not in weight_of:
                    raise Broken(f"{commit.members[index].peer} is sealed without its delegate")
                continue
            inside = [i for i in apply.seal if index in (i, commit.members[i].delegate)]
            own = [self.payloads[round_id, i] for i in inside]
            payloads.append(merged(own, weights_of(commit, inside), up) if inside[1:] else own[0])
            weights.append(sum(weight_of[i] for i in inside))
            self.coverage["merged a bundle"] += len(inside) > 1
        if data != merged(payloads, weights, down):
            raise Broken(f"{round_id.hex()[:8]}: merged is not the sealed contributions")

    def stands(self, name: PeerId, state: FragmentState) -> None:
        """A peer has taken this state. Equal lineage, equal bits."""
        digest = state.digest()
        known = self.bits.setdefault(state.lineage, digest)
        if known != digest:
            raise Broken(f"{name}: lineage {state.lineage.hex()[:8]} has two states")

    def made(
        self, state: FragmentState, parents: Sequence[bytes], works: Sequence[Work], melds: bool
    ) -> None:
        """A version of a lineage: which work is in it that was not in its parents."""
        if state.lineage in self.covered:
            return
        self.versions_made += 1
        covered: dict[tuple[PeerId, int], int] = {}
        for parent in parents:
            for key, end in self.covered[parent].items():
                covered[key] = max(end, covered.get(key, 0))
        for work in works:
            key = (work.peer, work.incarnation)
            if work.begin < covered.get(key, 0):
                raise Broken(
                    f"work of {work.peer} from step {work.begin} to {work.end} is merged a second "
                    f"time: {covered[key]} was covered"
                )
            covered[key] = work.end
        self.covered[state.lineage] = covered
        self.mixed[state.lineage] = melds or any(self.mixed[parent] for parent in parents)
        for peer, mark in state.merged.items():
            if (peer, mark.incarnation) not in covered:
                raise Broken(f"merged names work of {peer} that was never merged")
            if covered[peer, mark.incarnation] != mark.step:
                raise Broken(f"merged says step {mark.step} of {peer}, which is not so")

    def note(self, note: Note) -> None:
        self.coverage[note.event] += 1
        if note.event in ("closed", "finished"):
            self.coverage[f"{note.event} {note.fields['kind']}"] += 1

    def check_fate(
        self,
        life: Life,
        standing: Standing,
        learner: Learner,
        former: Mapping[int, tuple[int, int]],
        *,
        forked: bool,
    ) -> None:
        """Every token of a peer is merged, pending or discarded.

        ``former``: steps and tokens per step of its former lives. ``forked``: after a meld the
        larger of two forks' token counts stands, so some work may be called lost; and work that a
        peer has called merged elsewhere may be merged nowhere.
        """
        covered = self.covered[standing.lineage]
        mine = covered.get((life.peer, life.incarnation), 0)
        if learner.own.merged_step < mine:
            raise Broken(
                f"{life}: steps {learner.own.merged_step} to {mine} would be offered again"
            )
        mark = standing.merged.get(life.peer)
        merged = mark.tokens if mark is not None else 0
        processed = learner.step * learner.tokens_per_step
        discarded = learner.discarded
        for incarnation, (steps, tokens_per_step) in former.items():
            processed += steps * tokens_per_step
            lost = steps - covered.get((life.peer, incarnation), 0)
            discarded += lost * tokens_per_step
        if processed == merged + learner.pending + discarded:
            return
        if (forked or self.mixed[standing.lineage]) and merged + learner.pending <= processed:
            return
        raise Broken(
            f"{life}: processed {processed}, merged {merged}, pending {learner.pending}, "
            f"discarded {discarded}"
        )


class Learner:
    """Trains a few values towards a goal of its own, counts steps and tokens, never waits."""

    def __init__(
        self, state: FragmentState, goal: Float32s, tokens_per_step: int, *, step: int = 0
    ) -> None:
        """``step``: the number that it has made before."""
        self.goal = goal
        self.tokens_per_step = tokens_per_step
        self.step = step
        self.values = state.theta.copy()
        self.own = OwnWork(state, step=step)
        self.written_off = 0
        """Tokens that were merged on a side of a fork that was given up."""

    def train(self, rate: float = 0.05) -> None:
        self.step += 1
        self.values += np.float32(rate) * (self.goal - self.values)

    @property
    def base(self) -> Float32s:
        return self.own.base

    @property
    def snapshot(self) -> Float32s | None:
        return self.own.snapshot

    @property
    def pending(self) -> int:
        return (self.step - self.own.merged_step) * self.tokens_per_step

    @property
    def discarded(self) -> int:
        return self.own.discarded_steps * self.tokens_per_step + self.written_off

    def offer(self) -> Offer:
        self.own.offer(self.values.copy(), step=self.step)
        return Offer(
            mark=self.step,
            steps=self.step - self.own.merged_step,
            tokens=self.pending,
            base_version=self.own.base_version,
            base_lineage=self.own.base_lineage,
            batch_tokens_max=self.tokens_per_step,
        )

    def release(self) -> None:
        self.own.release()

    def adopt(self, state: FragmentState, *, contained: int | None) -> None:
        self.own.adopt(state, contained, step=self.step).apply(self.values)

    def rebase(self, state: FragmentState, parting: Parting) -> int | None:
        rebased = self.own.rebase(state, parting, step=self.step)
        if rebased is None:
            return None
        rebased.adopted.apply(self.values)
        return rebased.again_steps * self.tokens_per_step

    def write_off(self, tokens: int) -> None:
        # Those of former lives are counted by the swarm.
        counted = self.own.discarded_steps * self.tokens_per_step + self.written_off
        own = self.own.merged_step * self.tokens_per_step - counted
        self.written_off += min(tokens, own)

    def discard(self, state: FragmentState) -> None:
        self.own.discard(state, step=self.step).apply(self.values)


class Port:
    """A ``LearnerPort`` over a ``Learner`` of each fragment. Whoever trains them calls ``stepped``
    after each step of all."""

    def __init__(self, *, step_time_s: float, batch_tokens: int) -> None:
        self.step_time_s = step_time_s
        self.batch_tokens = batch_tokens
        self.step = 0
        self.rests = False
        """True while the learner makes no steps: it is at a safe point all the time."""
        self.parts: dict[int, Learner] = {}
        self._stepped = asyncio.Event()

    def rest(self) -> None:
        self.rests = True

    def stepped(self) -> None:
        self._stepped.set()
        self._stepped = asyncio.Event()

    def progress(self) -> Progress:
        return Progress(
            step=self.step,
            tokens=self.step * self.batch_tokens,
            step_time_s=self.step_time_s,
            batch_tokens_max=self.batch_tokens,
        )

    async def snapshot(self, fragment: int, *, timeout_s: float) -> Snapshot | None:
        part = self.parts.get(fragment)
        if part is None:
            return None
        assert part.snapshot is None, "one snapshot at a time"
        # The next safe point is the end of the step that is under way.
        try:
            async with asyncio.timeout(timeout_s):
                if not self.rests:
                    await self._stepped.wait()
        except TimeoutError:
            return None
        offer = part.offer()
        assert part.snapshot is not None
        return Snapshot(
            base=part.base,
            values=part.snapshot,
            base_version=offer.base_version,
            base_lineage=offer.base_lineage,
            mark=offer.mark,
            steps=offer.steps,
            tokens=offer.tokens,
        )

    def adopt(self, fragment: int, state: FragmentState, *, contained: int | None) -> None:
        self.parts[fragment].adopt(state, contained=contained)

    def rebase(self, fragment: int, state: FragmentState, parting: Parting) -> int | None:
        return self.parts[fragment].rebase(state, parting)

    def discard(self, fragment: int, state: FragmentState, *, reason: str) -> None:
        self.parts[fragment].discard(state)

    def passed(self, fragment: int, state: FragmentState) -> None:
        return

    def moved(self, fragment: int, before: FragmentState, after: FragmentState) -> None:
        own = self.parts[fragment].own
        if own.base is before.theta:
            own.base = after.theta

    def misses_base(self, fragment: int) -> bool:
        return False

    def release(self, fragment: int) -> None:
        self.parts[fragment].release()
