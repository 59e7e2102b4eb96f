"""Trainers that make no steps: because the machine's owner wants none, or by themselves."""

from __future__ import annotations

import asyncio

from averaging.live.streams.links import control_protocol
from peer.agent.peer import Peer
from peer.bridge.shared_memory import SharedTensors
from peer.bridge.trainer_line import TrainerLine

OFFERED_WITHIN_S = 20.0
OFFERED_WITHIN_MAX_S = 300.0
"""Time for a peer that begins to rest to have its work merged, at least, and at most on a slow line
(``peer.rules.ending``). It counts as training meanwhile."""

IDLE_AFTER_S = 30.0
IDLE_AFTER_STEPS = 20


class OwnersRest:
    """No steps while the limits of the machine's owner, or the orders of the run's, say so."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self.reason: str | None = None
        """The reason for resting now; ``None``: no rest."""
        self._since = 0.0
        self._patience_s = OFFERED_WITHIN_S

    def obey(self) -> bool:
        """Look at limits and orders. Returns whether ``reason`` has changed."""
        peer, averager = self._peer, self._peer.averager
        assert averager is not None, "its limits are looked at from its first states on"
        of_machine = peer.guest.look()
        reason = peer.owner.paused or of_machine
        if reason is not None:
            self._hand_over()
        if reason == self.reason:
            return False
        if self.reason is None:
            peer.event("paused", reason=reason)
            self._since = asyncio.get_running_loop().time()
            # Its work is offered now: later no other peer waits for this one.
            averager.make_due(range(len(peer.layout.fragments)))
            self._patience_s = OFFERED_WITHIN_S
        elif reason is None:
            peer.event("resumed")
            averager.stay()
        self.reason = reason
        peer.keep_state(None if reason is None else f"resting: {reason}")
        return True

    @property
    def hands_over(self) -> bool:
        """True while a peer that begins to rest has work that the others may still merge."""
        peer = self._peer
        if self.reason is None or peer.owner.paused is not None or peer.guest.is_used_up:
            return False
        rested_s = asyncio.get_running_loop().time() - self._since
        return rested_s < self._patience_s and peer.role.pending_tokens() > 0

    def _hand_over(self) -> None:
        """Offer pending work again before this peer rests, and wait as long as one that leaves.

        Nothing is offered when the month's volume is used up.
        """
        if self.hands_over:
            left = self._peer.offer_before_leaving()
            needed_s = left.patience_s(least_s=OFFERED_WITHIN_S, most_s=OFFERED_WITHIN_MAX_S)
            self._patience_s = max(self._patience_s, needed_s)

    def is_away(self) -> bool:
        """True if other peers should not wait for this one: it rests, and has offered its work."""
        if self.reason is None:
            return False
        rested_s = asyncio.get_running_loop().time() - self._since
        averager = self._peer.averager
        busy = rested_s < 1.0 or (averager is not None and averager.in_flight > 0)
        return not self.hands_over and (not busy or rested_s > OFFERED_WITHIN_S)

    def why_closed(self, protocol: str) -> str | None:
        """The reason to refuse a stream: the month's volume is used up, and all work is offered."""
        if not (self._peer.guest.is_used_up and self.is_away()):
            return None
        if protocol == control_protocol(self._peer.run_id):
            return None
        return "the volume that is allowed this month is used"


class IdleTrainer:
    """Notices when a trainer has made no step for long: other peers should not wait for it."""

    def __init__(self, peer: Peer, memory: SharedTensors, line: TrainerLine) -> None:
        self._peer = peer
        self._memory = memory
        self._line = line
        self._step_seen = -1
        self._stepped_at = asyncio.get_running_loop().time()
        self._was_idle = False

    def is_idle(self) -> bool:
        """True if it is idle now. To be asked again and again; a change is reported as an event."""
        now, run = asyncio.get_running_loop().time(), self._peer.run_file
        if self._memory.step != self._step_seen:
            self._step_seen, self._stepped_at = self._memory.step, now
        idle = now - self._stepped_at > max(
            IDLE_AFTER_S,
            IDLE_AFTER_STEPS * self._memory.step_time_s,
            # A synchronous trainer waits for a round.
            2 * run.rounds.round_deadline_s if run.synchronous else 0.0,
        )
        if idle != self._was_idle:
            self._was_idle = idle
            self._peer.event(
                "trainer_rests" if idle else "trainer_steps_again",
                silent_s=now - self._line.heard_at,
            )
        return idle
