"""Spot checks by the honest members of a simulated swarm (``averaging.audit.spot_checks``).

Losses are real: those of the model with the checker's own states, on the batch of one of the
author's steps, without and with what the author has uploaded. Measuring takes no virtual time.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from averaging.audit.spot_checks import REFUSED, SpotChecks, expected, steps_between
from averaging.audit.strikes import Strikes
from averaging.messages import Entry
from averaging.numbers.arrays import Float32s
from averaging.round.interface.effects import Apply
from averaging.simulated.node import FragmentNode
from dht.bounded_mapping import BoundedMapping, by_age
from dht.identity import PeerId
from peer.simulate.problems.problem import ChecksOthers
from peer.simulate.slots import Environment

ROUNDS_KEPT = 64


class SpotChecking:
    """The checks of all honest members of one swarm."""

    def __init__(self, environment: Environment, *, per_cycle: float) -> None:
        problem, cycle = environment.problem, environment.experiment.outer.steps_per_cycle
        if not isinstance(problem, ChecksOthers):
            raise ValueError(f"problem.name is {problem.name!r}, which has no spot checks")
        self._environment = environment
        self._problem = problem
        self._slots = {slot.name: slot for slot in environment.slots}
        self._uploads = BoundedMapping[bytes, dict[PeerId, Float32s]](
            "simulated uploads", ROUNDS_KEPT, worth=by_age
        )
        self._strikes = {slot.name: Strikes() for slot in environment.slots}
        self._checks = {
            slot.name: SpotChecks(
                self._strikes[slot.name],
                every_steps=steps_between(cycle_steps=cycle, per_cycle=per_cycle),
                random=np.random.default_rng([environment.seed, 6, slot.number]).random,
            )
            for slot in environment.slots
            if not slot.lies
        }
        self.counts: Counter[str] = Counter()
        """Checks of honest members and of others, by result, and refused uploads."""

    def __repr__(self) -> str:
        return f"SpotChecking({dict(self.counts)})"

    def uploaded(self, node: FragmentNode, round_id: bytes) -> None:
        """A member has encoded its contribution."""
        learner = node.learner
        if learner is not None and learner.snapshot is not None:
            self._uploads.setdefault(round_id, {})[node.name] = learner.snapshot - learner.base

    def finished(self, node: FragmentNode, apply: Apply) -> None:
        """A member is about to take the outer step: it may check one of the others."""
        checks = self._checks.get(node.name)
        if checks is None or apply.commit.kind == "mix":
            return
        entries = {entry.peer: entry for entry in map(apply.commit.members.__getitem__, apply.seal)}
        uploads = self._uploads.get(apply.round, {})
        there = uploads.keys() & entries.keys() - {node.name}
        checker, fragment = self._slots[node.name], node.fragment.index
        now = self._environment.heap.now
        author = checks.draw(there, checker.steps, now, fragment=fragment)
        if author is None:
            return
        entry, mine, own = entries[author], entries.get(node.name), None
        if mine is not None and node.name in uploads and checks.asks_own(fragment, now):
            losses = self._losses(checks, node, mine, uploads[node.name])
            own = expected(*losses, own_steps=mine.steps, steps=entry.steps)
        before, after = self._losses(checks, node, entry, uploads[author])
        passed = checks.checked(author, before, after, now, fragment=fragment, own=own)
        who = "liars" if self._slots[author].lies else "honest"
        self.counts[f"checks of {who}, {'passed' if passed else 'failed'}"] += 1
        if not passed and checks.names(author, now):
            self.counts[f"{who} named"] += 1
            for name, others in self._checks.items():
                if name not in (checker.name, author):
                    others.named(author, checker.name, now)

    def _losses(
        self, checks: SpotChecks, node: FragmentNode, entry: Entry, moved: Float32s
    ) -> tuple[float, float]:
        """The loss on an author's own data without what it has uploaded, and with it."""
        env, author, checker = self._environment, self._slots[entry.peer], self._slots[node.name]
        assert checker.peer is not None
        values = env.places.join([state.theta for state in checker.peer.states])
        earlier = sum(life.steps for life in author.past[: entry.incarnation - 1])
        step = earlier + checks.step_to_read(entry.mark, entry.steps) - 1
        sample = (author.number, env.seed, step)
        before = self._problem.loss_of_step(values, *sample)
        env.places.add(node.fragment.index, values, moved)
        return before, self._problem.loss_of_step(values, *sample)

    def distrusts(self, me: PeerId, author: PeerId) -> bool:
        """True if another peer has no power at this one for now."""
        checks = self._checks.get(me)
        return checks is not None and checks.distrusts(author, self._environment.heap.now)

    def refuses(self, me: PeerId, author: PeerId, what: str) -> str | None:
        """The reason why this peer takes nothing of another one; ``what`` is then counted."""
        checks = self._checks.get(me)
        if checks is None or not checks.refuses(author, self._environment.heap.now):
            return None
        self.counts[f"{what} of {'liars' if self._slots[author].lies else 'honest'} refused"] += 1
        return REFUSED
