"""A frozen view of a round machine, for its parts.

The machine makes a new ``Situation`` for each call of a part. A part never sees the machine.
"""

from __future__ import annotations

import math

from msgspec import Struct

from averaging.history.standing import Standing
from averaging.messages import Join
from averaging.round.interface.phase import Phase
from averaging.round.interface.signed_commit import SignedCommit
from averaging.rules.final_mix import Goal, RunsEnd
from averaging.rules.mixing import Measured
from dht.identity import PeerId


class Attempt(Struct, frozen=True):
    """One attempt to get into a round, from the offer to the commit."""

    join: Join
    leader: PeerId
    leaders_tried: int = 0
    resent: bool = False
    """True if the leader got the join a second time."""
    first_leader: PeerId | None = None
    leader_life: int | None = None
    """The incarnation of the leader when it got the first join; ``None``: not known."""
    asked_at: float | None = None
    """Time at which the leader got the message that it has not answered yet."""
    until: float = math.inf
    """A leader that has noted this peer and not closed its roster by then does not lead."""


class Situation(Struct, frozen=True, kw_only=True):
    """The state of a machine between two changes."""

    phase: Phase
    standing: Standing | None
    """``None`` at an auxiliary peer without state."""
    fresh_version: int
    """The version at which the pending work began."""
    fresh_at: float
    """Time at which it began."""
    shown_version: int
    """The newest version that another peer has shown certified."""
    bytes_per_s: float
    catching_since: float | None
    """Time at which this peer began to catch up or to rebase; ``None``: it does not."""
    attempt: Attempt | None
    roster_decides_at: float | None
    """Time at which this peer decides again about the roster that it has open; ``None``: none."""
    under_way: SignedCommit | None
    """The open round that this peer is a member of, else one that it leads for others."""
    measured: Measured | None
    in_doubt: bool
    goal: Goal | None
    """The state with which the fragment is done, as of the round that would follow."""
    is_final: bool
    closed_ranks: bool
    end: RunsEnd | None
    """The end of the run, once this peer may have to settle with others which state it ends on."""
    several_groups_version: int | None

    @property
    def gathers(self) -> bool:
        """True if this peer has a roster open."""
        return self.roster_decides_at is not None
