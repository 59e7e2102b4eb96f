"""Hooks through which a simulation or a test sees what an averager does, and may change it.

Planted liars and broken parts stand on these hooks, so that nobody has to replace private methods.
A live peer has the ``Watch`` below, which changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from averaging.history.parent_maps import ParentMap
from averaging.history.replay import ReplayEntry
from averaging.history.state import FragmentState
from averaging.live.slices.evidence import Uploads
from averaging.messages import Commit, Message
from averaging.round.contributing import Contribution
from averaging.round.interface.effects import Apply, Effect, Fold
from averaging.round.interface.inputs import Offer, UploadArrived
from averaging.round.machine import FragmentRounds
from dht.identity import PeerId


class Watch:
    """The watcher of one averager. Its methods are called at once and must not wait."""

    def began(self, machine: FragmentRounds) -> None:
        """A fragment has a machine that knows nothing yet: at the start, and after a rollback."""

    def effect(self, fragment: int, effect: Effect) -> Effect | None:
        """The effect to carry out in place of this one; ``None``: none."""
        return effect

    def handled(self, fragment: int) -> None:
        """An input of a machine was handled; its effects are carried out, or under way."""

    def applied(
        self,
        apply: Apply,
        before: FragmentState,
        after: FragmentState,
        merged: memoryview,
        maps: Mapping[int, ParentMap],
    ) -> None:
        """The outer step of a round is taken. ``merged``: all slices; ``maps``: those of a meld."""

    def folded(self, fold: Fold, before: FragmentState, after: FragmentState) -> None:
        """A lone peer has made its parameters the state."""

    def heard(self, peer: PeerId, message: Message) -> Message | None:
        """The message to take in place of one that has come from a peer; ``None``: none."""
        return message

    def sends(self, peer: PeerId, message: Message) -> Message | None:
        """The message to send in place of this one; ``None``: none."""
        return message

    def contributes(self, commit: Commit, given: Contribution | None) -> Contribution | None:
        """The values to encode for a round in place of the own contribution; ``None``: nothing."""
        return given

    def encoded(self, commit: Commit, round_id: bytes, slices: Sequence[memoryview]) -> None:
        """The own contribution to a round is encoded: a delegate's alone, without its riders'."""

    def arrived(self, upload: UploadArrived) -> UploadArrived:
        """The input for the machine about an upload that has come, or has failed to."""
        return upload

    def offers(self, offer: Offer | None) -> Offer | None:
        """The offer to make in place of the learner's; ``None``: it has nothing."""
        return offer

    def shows(self, asker: PeerId, uploads: Uploads) -> Uploads:
        """The record of a round that an auditor is shown."""
        return uploads

    def serves(self, state: FragmentState) -> FragmentState | None:
        """The state to show to those that fetch the own one; ``None``: none."""
        return state

    def serves_rounds(self, entries: Sequence[ReplayEntry]) -> Sequence[ReplayEntry]:
        """The rounds to show to those that are behind."""
        return entries
