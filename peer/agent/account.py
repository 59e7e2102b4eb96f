"""One learner's account with the run: what became of its tokens, as the fragments' states tell.

Brings together what three sides know: the trainer's counters (shared memory), which
marks were offered (``peer.agent.slots``), and what each state says of this peer (``merged``). The
arithmetic is ``peer.rules.ledger``'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from averaging.history.merged_map import MergedMap
from averaging.history.state import FragmentState
from dht.identity import PeerId
from peer.agent.slots import Adopted
from peer.bridge.shared_memory import Base, SharedTensors
from peer.rules import ledger as fate

TokensAt = Callable[[int, int], int | None]
"""This incarnation's tokens at (fragment, own step), if that was offered lately."""


@dataclass(slots=True)
class Account:
    """Kept up to date by whoever asks; saved with the agent's checkpoints."""

    me: PeerId
    memory: SharedTensors
    sizes: Sequence[int]
    tokens_at: TokensAt
    ledger: fate.Ledger = field(init=False)

    def __post_init__(self) -> None:
        self.ledger = fate.Ledger(self.sizes)

    def open(
        self, saved: Mapping[str, Any] | None, *, earlier_tokens: int, ended_cleanly: bool
    ) -> None:
        """Go on from a checkpoint. A new incarnation begins unless it saved that one itself."""
        if saved is not None:
            self.ledger = fate.Ledger.from_plain(saved, self.sizes)
            if saved.get("incarnation") == self.memory.incarnation:
                return  # only the agent was started anew
        self.ledger.begin(earlier_tokens=earlier_tokens, clean=ended_cleanly)

    def plain(self) -> dict[str, Any]:
        """As ``open`` reads it."""
        return {**self.ledger.plain(), "incarnation": self.memory.incarnation}

    def lost(self, adopted: Adopted) -> None:
        """The trainer's own work was overwritten by what it took in."""
        self.ledger.process(self.memory.tokens)
        pending = int(self.ledger.fate(adopted.fragment).pending)
        stale = adopted.reason.startswith(fate.STALE)
        reason = fate.STALE if stale else fate.LOST
        self.ledger.discard(adopted.fragment, min(pending, adopted.lost_tokens), reason)

    def update(self, states: Sequence[FragmentState | None]) -> fate.Fate:
        """Bring it up to date with what the states say of this peer."""
        memory = self.memory
        self.ledger.process(memory.tokens)
        for state in states:
            if state is None:
                continue
            fragment, mark = state.fragment, state.merged.get(self.me)
            held = memory.base(fragment)
            if held is not None and not _reaches(state, held):
                # The trainer is elsewhere: further than its new agent, or not yet on the side of a
                # fork that the agent has taken. What became of its work shows when they meet.
                continue
            # Settled is what can no longer be offered: merged, or overwritten.
            settled = 0 if held is None else held.tokens
            if mark is not None and mark.incarnation == memory.incarnation:
                tokens = self.tokens_at(fragment, mark.step)
                if tokens is None and mark.step > (0 if held is None else held.mark):
                    # Offered to an agent that has died since: how many tokens those are shows
                    # when the trainer has taken this state in.
                    continue
                settled = max(settled, tokens or 0)
            self.ledger.observe(
                fragment,
                merged_tokens=0 if mark is None else mark.tokens,
                settled_tokens=min(settled, memory.tokens),
            )
        return self.ledger.total()


def _reaches(state: FragmentState, held: Base) -> bool:
    """Whether a state is the version that the trainer holds, or grew from it."""
    return state.lineage == held.lineage or state.chain.find(held.version, held.lineage) is not None


def fates(total: fate.Fate) -> dict[str, float]:
    """Flat, for messages and logs. They add up: processed is the sum of the others."""
    flat = {"processed": total.processed, "merged": total.merged, "pending": total.pending}
    return flat | {f"discarded.{reason}": count for reason, count in total.discarded.items()}


def merged_of(states: Sequence[FragmentState | None]) -> MergedMap:
    """Merged work of everybody: entry by entry the maximum over the fragments."""
    merged = MergedMap()
    for state in states:
        if state is not None:
            merged = merged.united(state.merged)
    return merged


def global_tokens(states: Sequence[FragmentState | None]) -> int:
    """Merged tokens of everybody."""
    return merged_of(states).tokens
