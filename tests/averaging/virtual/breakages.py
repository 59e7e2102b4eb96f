"""Bugs, planted on purpose: an invariant that none of them trips is no invariant.

Each function breaks the machine in one way that somebody could plausibly have written.
``test_simulation`` runs storms with each until a promise is seen to break.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec
import pytest

from averaging.history import lineage, standing
from averaging.history.state import FragmentState
from averaging.messages import Commit
from averaging.round import participation
from averaging.round.gathering.joining import Attempt, Joining
from averaging.round.interface.effects import Merge
from averaging.round.interface.inputs import MergedArrived
from averaging.round.interface.phase import Phase, Stage
from averaging.round.machine import FragmentRounds
from averaging.round.participation import Participation
from averaging.round.sealing.paxos import Acceptor, Coordinator
from dht.identity import PeerId

Breakage = Callable[[pytest.MonkeyPatch], None]


def an_acceptor_forgets_its_promises(patch: pytest.MonkeyPatch) -> None:
    def propose(self: Acceptor, ballot: int, seal: tuple[int, ...]) -> bool:
        self.accepted_ballot, self.accepted = ballot, seal
        return True

    patch.setattr(Acceptor, "propose", propose)


def a_successor_ignores_accepted_seals(patch: pytest.MonkeyPatch) -> None:
    plain = Coordinator._begin_ballot

    def begin(self: Coordinator, uploads_until: float, now: float) -> None:
        for sender, promise in self.promises.items():
            self.promises[sender] = msgspec.structs.replace(
                promise, accepted_ballot=None, accepted=()
            )
        plain(self, uploads_until, now)

    patch.setattr(Coordinator, "_begin_ballot", begin)


def half_is_taken_for_a_majority(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Commit, "majority", property(lambda self: max(1, len(self.members) // 2)))


def a_restarted_member_is_taken_for_absent(patch: pytest.MonkeyPatch) -> None:
    plain = Coordinator.declined

    def declined(self: Coordinator, peer: PeerId, reason: str, now: float, *, absent: bool) -> None:
        plain(self, peer, reason, now, absent=True)

    patch.setattr(Coordinator, "declined", declined)


def a_reducer_merges_whoever_it_has(patch: pytest.MonkeyPatch) -> None:
    def try_merge(self: Participation, index: int) -> None:
        state = self.reducer.slices.get(index)
        lacks_it = self.slices.digests[index] is None
        if self.seal and state and state.complete and not state.merging and lacks_it:
            state.merging = True
            have = tuple(sorted(state.complete))
            share = 1.0 / len(have)
            self._emit(Merge(self.id, index, have, (share,) * len(have)))

    patch.setattr(Participation, "_try_merge", try_merge)


def weights_depend_on_who_computes_them(patch: pytest.MonkeyPatch) -> None:
    plain = Participation.weights

    def weights(self: Participation) -> tuple[float, ...]:
        shares = plain(self)
        return shares[::-1] if self.entry == 1 else shares

    patch.setattr(Participation, "weights", weights)


def a_forsworn_round_is_applied_all_the_same(patch: pytest.MonkeyPatch) -> None:
    plain = Participation._give_up
    gone_on: list[Participation] = []

    def give_up(self: Participation, reason: str, *, in_doubt: bool) -> None:
        before, end_at = self.stage, self.end_at
        plain(self, reason, in_doubt=in_doubt)
        if before is Stage.SEALED and self not in gone_on:
            gone_on.append(self)
            self.stage = before
            self.acceptor.forsworn = False
            self.end_at = end_at + 30.0

    patch.setattr(Participation, "_give_up", give_up)
    patch.setattr(Participation, "_void", lambda self, reason, *, may_be_finished: None)


def a_contribution_is_never_marked_as_merged(patch: pytest.MonkeyPatch) -> None:
    plain = standing.after_commit

    def after_commit(
        before: standing.Standing,
        commit: Commit,
        round_id: bytes,
        seal: Sequence[int],
        digests: Sequence[bytes],
    ) -> standing.Standing:
        after = plain(before, commit, round_id, seal, digests)
        return standing.Standing(after.version, after.lineage, after.chain, before.merged)

    patch.setattr(participation, "after_commit", after_commit)


def the_lineage_leaves_out_the_seal(patch: pytest.MonkeyPatch) -> None:
    """And digests and merged map: then rounds with other contents are taken for the same."""
    plain = lineage.after_round

    def after_round(
        parents: Sequence[bytes], commit: bytes, seal: bytes, slices: Sequence[bytes]
    ) -> bytes:
        return plain(parents, bytes(32), bytes(32), ())

    patch.setattr(standing, "after_round", after_round)
    patch.setattr(standing, "bound", lambda history, merged: history)


def a_commit_holds_whoever_it_was_meant_for(patch: pytest.MonkeyPatch) -> None:
    """Neither promises nor incarnations are looked at."""
    patch.setattr(FragmentRounds, "_objection", lambda self, round_id, commit, now: None)


def nobody_watches_the_leader(patch: pytest.MonkeyPatch) -> None:
    def join(self: Joining, attempt: Attempt, now: float) -> None:
        self.attempt = attempt
        self._fragment.goes_to(Phase.JOINING)
        self._fragment.send(attempt.leader, attempt.join)

    patch.setattr(Joining, "_join", join)


def a_round_has_no_end(patch: pytest.MonkeyPatch) -> None:
    def next_at(self: Participation) -> float:
        return math.inf

    patch.setattr(Participation, "next_at", next_at)


def a_member_applies_what_it_has(patch: pytest.MonkeyPatch) -> None:
    """Slices that have not come are taken for empty ones."""

    def merged_arrived(self: Participation, arrived: MergedArrived, now: float) -> None:
        plain(self, arrived, now)
        if self.stage is Stage.SEALED and self.entry is not None and arrived.slice == 0:
            self.slices.digests = [seen or bytes(32) for seen in self.slices.digests]
            self._try_apply(now)

    plain = Participation._merged_arrived
    patch.setattr(Participation, "_merged_arrived", merged_arrived)


def caught_up_means_that_my_work_is_in(patch: pytest.MonkeyPatch) -> None:
    """The learner's counters restart with every new state, whatever its ``merged`` says."""
    from tests.averaging.virtual import truth

    def adopt(self: truth.Learner, state: FragmentState, *, contained: int | None) -> None:
        plain(self, state, contained=contained)
        self.own.merged_step = self.step

    plain = truth.Learner.adopt
    patch.setattr(truth.Learner, "adopt", adopt)


IN_SEALING: tuple[Breakage, ...] = (
    an_acceptor_forgets_its_promises,
    a_successor_ignores_accepted_seals,
    half_is_taken_for_a_majority,
    a_restarted_member_is_taken_for_absent,
)
"""Too rare in storms: ``test_sealing`` tries orders of messages instead. (And for who forswore
and applies all the same there is a schedule.)"""

IN_STORMS: tuple[Breakage, ...] = (
    a_reducer_merges_whoever_it_has,
    weights_depend_on_who_computes_them,
    a_contribution_is_never_marked_as_merged,
    the_lineage_leaves_out_the_seal,
    a_commit_holds_whoever_it_was_meant_for,
    nobody_watches_the_leader,
    a_round_has_no_end,
    a_member_applies_what_it_has,
    caught_up_means_that_my_work_is_in,
)
