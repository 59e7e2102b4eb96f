"""Judges whether a swarm kept its promises, from evidence alone.

A verdict is ``None`` where the evidence cannot tell: too short a run, nobody that came back.
"""

from __future__ import annotations

from tests.chaos.judging.evidence import Evidence
from tests.chaos.judging.history import judge_identical, judge_once
from tests.chaos.judging.progress import judge_goes_on, judge_returns
from tests.chaos.judging.resources import judge_clean, judge_flat
from tests.chaos.judging.tokens import judge_ledger
from tests.chaos.judging.verdict import Verdict


def judge(evidence: Evidence, control: Evidence | None = None) -> tuple[Verdict, ...]:
    """Every promise, in the order of ``Promise``."""
    return (
        judge_identical(evidence),
        judge_once(evidence),
        judge_ledger(evidence),
        judge_goes_on(evidence),
        judge_returns(evidence),
        judge_clean(evidence),
        judge_flat(evidence, control),
    )
