"""The orders of the run's owner, as one peer follows them.

``peer.agent.histories`` goes back to earlier states where they say so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from averaging.history.manifest import grew_from
from averaging.history.state import FragmentState
from averaging.rules.orders import RoundOrders
from dht.identity import PeerId
from dht.membership.credentials import Directive, Refused, read_directive
from dht.membership.orders import NONE, Orders, Root, Value, settings_at
from peer.agent.policies import round_orders
from peer.rules.amendments import effective
from peer.run_file.sections import RunFile
from peer.storage.good_states import GoodStates
from peer.storage.outer_state import OuterState


@dataclass(slots=True, kw_only=True, eq=False)
class OwnersOrders:
    """The directive that a peer follows, and what follows from it."""

    run: RunFile
    fragments: int
    good: GoodStates | None
    """The states that the run may be taken back to, as far as they are kept here."""
    versions: Callable[[], tuple[int, ...]]
    """Those of this peer; empty until it has all states."""
    directive: Directive | None = None
    """The directive of the run's owner that this peer follows."""
    gone_back: int = 0
    """The directive that took this peer back last, while it was running; 0: none."""
    paused: str | None = None
    """Reason why its owner has paused the run; ``None``: it goes on."""
    _amended: tuple[tuple[Directive | None, int], RunFile] | None = None

    def __repr__(self) -> str:
        return f"OwnersOrders({self.orders})"

    @property
    def orders(self) -> Orders:
        return NONE if self.directive is None else self.directive.orders

    def follow(self, directive: Directive | None) -> RoundOrders | None:
        """Follow the newest directive. Returns the orders of rounds, if it is a new one."""
        if directive == self.directive:
            return None
        self.directive = directive
        if self.good is not None:
            self.good.attested = self.orders.attested
        of_rounds = self.of_rounds()
        self.paused = of_rounds.paused
        return of_rounds

    def of_rounds(self) -> RoundOrders:
        return round_orders(self.run, self.directive, fragments=self.fragments)

    # --- amendments -----------------------------------------------------------------------------

    @property
    def run_now(self) -> RunFile:
        """The run file with the amendments that every fragment of this peer has come to."""
        key = self.directive, self._next_version
        if self._amended is None or key != self._amended[0]:
            self._amended = key, effective(self.run, self.orders, key[1])
        return self._amended[1]

    @property
    def amended(self) -> dict[str, Value]:
        """The settings that differ from the run file's for this peer's trainer."""
        return settings_at(self.orders, self._next_version)

    @property
    def _next_version(self) -> int:
        """The version that the fragment which is least far makes next."""
        return 1 + min(self.versions(), default=0)

    # --- rollbacks ------------------------------------------------------------------------------

    @property
    def rollback(self) -> int:
        """The directive that took the run back to the states it goes on from; 0: none."""
        return 0 if self.orders.rollback is None else self.orders.rollback.number

    @property
    def root_links(self) -> tuple[Root, ...]:
        """The states that every history grows out of after a rollback, one for each fragment."""
        return () if self.orders.rollback is None else self.orders.rollback.roots

    def takes_back(
        self, states: Iterable[FragmentState | None], *, if_unknown: bool = False
    ) -> bool:
        """True if the run's owner has taken back the history of one of these states.

        ``if_unknown``: the answer for states whose chains do not reach back so far.
        """
        roots = dict(enumerate(self.root_links))
        for state in states:
            if state is None or (root := roots.get(state.fragment)) is None:
                continue
            grew = grew_from(state.chain, root.version, root.lineage)
            if grew is False or (grew is None and if_unknown):
                return True
        return False

    def takes_back_checkpoint(self, outer: OuterState) -> bool:
        """True if the run's owner has taken back the history of a checkpoint.

        Where its chains do not reach back so far, it is of the time before the rollback unless its
        peer had heard of that.
        """
        heard = self.rollback in map(self._rollback_of, outer.directives)
        return self.takes_back(outer.states, if_unknown=not heard)

    def _rollback_of(self, data: bytes) -> int | None:
        """The directive that took the run back, as this one tells; ``None`` if it tells of none."""
        owner = self.run.policy.owner
        if owner is None:
            return None
        directive = read_directive(data, run=self.run.run_id, owner=PeerId(owner))
        if isinstance(directive, Refused) or directive.orders.rollback is None:
            return None
        return directive.orders.rollback.number

    def roots(self) -> list[FragmentState | None]:
        """The states that a rollback goes on from, as far as they are kept here.

        Later ones are forgotten, or the run's owner might attest one of them.
        """
        assert self.good is not None, "a run without an owner is never taken back"
        roots = self.good.roots(self.orders)
        self.good.forget_recent()
        return roots
