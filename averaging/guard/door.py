"""The door to the guard: ``Defences`` makes the guard of a peer, of what its owner plugs in.

Whoever runs a peer imports this module, and nothing else of the folder; the rest of ``averaging``
knows only ``averaging.live.guard``. ``tests/test_layers.py`` holds both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from averaging.guard.auditing import Auditing
from averaging.guard.kept_proofs import VERDICTS_MAX, ProofShelf, Verdict
from averaging.guard.loss_gate import GateSettings, LossGate
from averaging.guard.rules.loss_gate import Refusals, Refused
from averaging.guard.rules.probation import Probation
from averaging.guard.rules.proofs import Guilty, Proof, decode_head
from averaging.guard.rules.spot_checks import BACK_MAX, REFUSED, SpotChecks, steps_between
from averaging.guard.spot_checking import Drawn, Judge, Losses, OtherData, SpotChecking, Trial
from averaging.history.claims import Claim
from averaging.live.guard import Guard
from averaging.live.services import Services
from averaging.live.slices.parts import Parts
from averaging.messages import Accused, Message, Suspected
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


class WholeGuard(Guard):
    """The guard of one peer: probation, audits, spot checks and a loss gate."""

    def __init__(self, averager: Services, defences: Defences) -> None:
        policy = averager.terms.policy
        electors = Probation(
            policy.probation, trusted=defences.trusted, reputation=averager.reputation
        )
        super().__init__(electors, defences.gate)
        self._averager = averager
        self._defences = defences
        judge = defences.judge if policy.spot_checks > 0 else None
        self.audits = Auditing(
            averager,
            shelf=defences.shelf,
            reading_of=judge.reading_of if judge is not None else None,
            convict=self._convict,
        )
        self.counters = self.audits.counters
        self.spot_checks: SpotChecking | None = None
        """Checks of others' contributions, where the run asks for them and a learner judges."""
        if judge is not None and averager.port is not None:
            every_steps = steps_between(
                cycle_steps=policy.due.cycle_steps, per_cycle=policy.spot_checks
            )
            checks = SpotChecks(
                averager.reputation, every_steps=every_steps, random=averager.draw_share
            )
            self.spot_checks = SpotChecking(judge, checks, audits=self.audits, around=averager)
            self.spot_checks.counters = self.counters

    async def start(self) -> None:
        await self.audits.start()
        self._averager.spawn(self.audits.spread_for_ever(), "spread proofs")

    def _convict(self, guilty: Guilty) -> None:
        """A peer is proved to have lied: its messages count no more, and it is as good as gone."""
        self._defences.on_convicted(guilty.peer, guilty.what)
        self._averager.cut_off(guilty.peer, guilty.what)

    @property
    def convicted(self) -> Collection[PeerId]:
        return self.audits.convicted

    def lie_of(self, peer: PeerId) -> str | None:
        verdict = self.audits.convicted.get(peer)
        return None if verdict is None else verdict.what

    def refuses(self, peer: PeerId) -> str | None:
        averager = self._averager
        return REFUSED if averager.reputation.refuses_work(peer, averager.now()) else None

    def saw(self, peer: PeerId, message: Message) -> bool:
        match message:
            case Accused():
                self.audits.heard_of(peer, message)
            case Suspected() if self.spot_checks is not None:
                self.spot_checks.heard_of(peer, message)
            case _:
                self.audits.sees(peer, message)
                return False
        return True

    def saw_commit(self, encoded: bytes, signature: bytes) -> None:
        self.audits.sees_commit(encoded, signature)

    def saw_claim(self, encoded: bytes, index: int, said: Claim, merged: bool) -> None:
        self.audits.sees_claim(encoded, index, said, merged)

    def saw_merge(
        self, parts: Parts, seal: Iterable[int], theta: Float32s, *, step: int | None
    ) -> Drawn | None:
        if self.spot_checks is None or step is None:
            return None
        return self.spot_checks.draw(parts, seal, theta, step=step)

    def finished(self, parts: Parts, lineage: bytes, saw: Drawn | None) -> None:
        self.audits.finished(parts, lineage)
        if saw is not None and self.spot_checks is not None:
            self.spot_checks.begin(parts, saw)

    def forgot(self, round_id: bytes, parts: Parts | None) -> None:
        self.audits.round_is_over(round_id)
        if parts is not None:
            self.audits.keep(parts)
