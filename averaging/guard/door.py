"""The door to the guard: ``Defences`` makes the guard of a peer, of what its owner plugs in.

Whoever runs a peer imports this module, and nothing else of the folder; the rest of ``averaging``
knows only ``averaging.live.guard``. ``tests/test_layers.py`` holds both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from averaging.guard.auditing import Auditing
from averaging.guard.kept_proofs import VERDICTS_MAX, ProofShelf, Verdict
from averaging.guard.loss_gate import GateSettings, LossGate
from averaging.guard.rules.loss_gate import Refusals, Refused
from averaging.guard.rules.probation import Probation
from averaging.guard.rules.proofs import Proof, decode_head
from averaging.guard.rules.spot_checks import BACK_MAX, REFUSED, SpotChecks, steps_between
from averaging.guard.spot_checking import Judge, Losses, OtherData, SpotChecking, Trial
from averaging.live.guard import Guard
from averaging.live.services import Services
from averaging.live.slices.parts import Parts
from averaging.messages import Message, Suspected
from averaging.numbers.arrays import Float32s
from dht.identity import PeerId

__all__ = [
    "BACK_MAX",
    "REFUSED",
    "VERDICTS_MAX",
    "Defences",
    "GateSettings",
    "Judge",
    "LossGate",
    "Losses",
    "OtherData",
    "Proof",
    "ProofShelf",
    "Refusals",
    "Refused",
    "Trial",
    "Verdict",
    "decode_head",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Defences:
    """The defences of a peer beside the run's policy. Called, it makes a guard."""

    trusted: Callable[[PeerId], bool] = lambda peer: False
    """True if the run's owner vouches for a peer: it is never on probation."""
    gate: LossGate | None = None
    """Asked before a state is taken that this peer has not merged step by step."""
    judge: Judge | None = None
    """The learner's judgement of others' contributions; ``None``: it cannot judge them."""
    shelf: ProofShelf | None = None
    """Keeps what is proved against peers over a restart; ``None``: nothing is kept."""
    on_convicted: Callable[[PeerId, str], None] = lambda peer, what: None
    """Hears that a peer is proved to have lied, now or before a restart: the owner bans it."""

    def __call__(self, averager: Services) -> Guard:
        return WholeGuard(averager, self)


class WholeGuard(Auditing):
    """The guard of one peer: probation, audits, spot checks and a loss gate."""

    def __init__(self, averager: Services, defences: Defences) -> None:
        policy = averager.terms.policy
        electors = Probation(
            policy.probation, trusted=defences.trusted, reputation=averager.reputation
        )
        judge = defences.judge if policy.spot_checks > 0 else None
        super().__init__(
            averager,
            electors,
            defences.gate,
            shelf=defences.shelf,
            reading_of=judge.reading_of if judge is not None else None,
            on_convicted=defences.on_convicted,
        )
        self._averager = averager
        self.spot_checks: SpotChecking | None = None
        """Checks of others' contributions, where the run asks for them and a learner judges."""
        if judge is not None and averager.port is not None:
            every_steps = steps_between(
                cycle_steps=policy.due.cycle_steps, per_cycle=policy.spot_checks
            )
            checks = SpotChecks(
                averager.reputation, every_steps=every_steps, random=averager.draw_share
            )
            self.spot_checks = SpotChecking(judge, checks, audits=self, around=averager)

    def refuses(self, peer: PeerId) -> str | None:
        averager = self._averager
        return REFUSED if averager.reputation.refuses_work(peer, averager.now()) else None

    def saw(self, peer: PeerId, message: Message) -> bool:
        if isinstance(message, Suspected) and self.spot_checks is not None:
            self.spot_checks.heard_of(peer, message)
            return True
        return super().saw(peer, message)

    def finished(
        self, parts: Parts, lineage: bytes, seal: Iterable[int], theta: Float32s, step: int | None
    ) -> None:
        super().finished(parts, lineage, seal, theta, step)
        if self.spot_checks is not None and step is not None:
            self.spot_checks.draw(parts, seal, theta, step=step)
