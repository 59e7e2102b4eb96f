"""One learner's account with the run: which of its tokens are merged, pending or discarded.

It combines three sources: the trainer's counters (shared memory), the offered marks
(``peer.agent.slots``), and each state's entry for this peer (``merged``). The arithmetic is in
``peer.rules.ledger``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from averaging.history.manifest import grew_from
from averaging.history.state import FragmentState
from dht.identity import PeerId
from dht.membership.orders import Root
from peer.agent.slots import Adopted
from peer.bridge.shared_memory import SharedTensors
from peer.rules.ledger import APART, LOST, REFUSED, ROLLED_BACK, STALE, Fate, Ledger


@dataclass(slots=True)
class Account:
    """The account of one learner, updated before each use and saved with checkpoints."""

    me: PeerId
    memory: SharedTensors
    sizes: Sequence[int]
    tokens_at: Callable[[int, int], int | None]
    """Function of (fragment, own step): this incarnation's tokens, if that was offered lately."""
    ledger: Ledger = field(init=False)
    roots: Callable[[], Sequence[Root]] = lambda: ()
    """The states that the run goes on from after a rollback, one for each fragment."""
    opened_with: Fate | None = None
    """The fate of all earlier work, as of ``open``."""
    _rolled_back_to: dict[int, Root] = field(default_factory=dict)
    """The root that each fragment was last accounted for with."""

    def __post_init__(self) -> None:
        self.ledger = Ledger(self.sizes)

    def open(
        self, saved: Mapping[str, Any] | None, *, earlier_tokens: int, ended_cleanly: bool
    ) -> None:
        """Continue from a checkpoint, with a new incarnation if an earlier trainer saved it.

        Until then it may have been asked for, and has counted a running trainer's tokens.
        """
        self.ledger = Ledger(self.sizes)
        only_agent_is_new = False
        if saved is not None:
            self.ledger = Ledger.from_plain(saved, self.sizes)
            only_agent_is_new = saved.get("incarnation") == self.memory.incarnation
        if not only_agent_is_new:
            self.ledger.begin(earlier_tokens=earlier_tokens, clean=ended_cleanly)
        self.opened_with = self.ledger.total()

    def plain(self) -> dict[str, Any]:
        """Plain values for ``open``."""
        return {**self.ledger.plain(), "incarnation": self.memory.incarnation}

    def lost(self, adopted: Adopted) -> None:
        """Note that the trainer's own work was overwritten by what it adopted."""
        self.ledger.process(self.memory.tokens)
        pending = int(self.ledger.fate(adopted.fragment).pending)
        reasons = STALE, APART, ROLLED_BACK, REFUSED
        reason = next((each for each in reasons if adopted.reason.startswith(each)), LOST)
        self.ledger.discard(adopted.fragment, min(pending, adopted.lost_tokens), reason)

    def update(self, states: Sequence[FragmentState | None]) -> Fate:
        """Update it from the states, and return the total."""
        self.ledger.process(self.memory.tokens)
        for state in states:
            if state is not None:
                self._observe(state)
        return self.ledger.total()

    def _observe(self, state: FragmentState) -> None:
        """Judge the work that a state has of this learner, if that is possible now."""
        fragment, mark = state.fragment, state.merged.get(self.me)
        held = self.memory.base(fragment)
        if held is not None and not state.follows(held.version, held.lineage):
            # The trainer is ahead of its new agent, or not yet on the agent's side of a fork. Its
            # work can be judged when both have the same version.
            return
        # Settled work cannot be offered any more: it is merged or overwritten.
        settled = 0 if held is None else held.tokens
        if mark is not None and mark.incarnation == self.memory.incarnation:
            tokens = self.tokens_at(fragment, mark.step)
            if tokens is None and mark.step > (0 if held is None else held.mark):
                # It was offered to an agent that has died since. The number of tokens is known when
                # the trainer has adopted this state.
                return
            settled = max(settled, tokens or 0)
        self.ledger.observe(
            fragment,
            merged_tokens=0 if mark is None else mark.tokens,
            settled_tokens=min(settled, self.memory.tokens),
            given_up=self._fate_of_lost(state),
        )

    def _fate_of_lost(self, state: FragmentState) -> str:
        """The fate of own tokens that were merged before and are not in this state."""
        fragment, roots = state.fragment, self.roots()
        root = roots[fragment] if fragment < len(roots) else None
        if root is None or self._rolled_back_to.get(fragment) == root:
            return APART
        if not grew_from(state.chain, root.version, root.lineage):
            return APART
        self._rolled_back_to[fragment] = root
        return ROLLED_BACK


def fates(total: Fate) -> dict[str, float]:
    """A flat form for messages and logs: processed is the sum of the other values."""
    flat = {"processed": total.processed, "merged": total.merged, "pending": total.pending}
    return flat | {f"discarded.{reason}": count for reason, count in total.discarded.items()}
