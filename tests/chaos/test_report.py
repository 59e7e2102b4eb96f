"""The report, the summary and the JSON record of a chaos run."""

from __future__ import annotations

import json
from pathlib import Path

from tests.chaos import report
from tests.chaos.judging.oracle import judge
from tests.chaos.judging.scenarios import chosen
from tests.chaos.judging.schedule import FaultKind
from tests.chaos.judging.verdict import Promise
from tests.chaos.run import ChaosSettings, Judged, Outcome, schedule, summary
from tests.chaos.stories import evidence, fault, loss_curve, peer


def outcome(directory: Path, *, broken: bool = False) -> Outcome:
    hurt = evidence(
        faults=(
            fault(FaultKind.KILL, "anna", 20.0, 25.0),
            fault(FaultKind.SEEDS, None, 30.0, 40.0),
        ),
        held_out=loss_curve(last=2.05),
    )
    if broken:
        hurt = evidence(peer("anna", processed_tokens=1), peer("boris"))
    settings = ChaosSettings(scenarios=chosen(("kill",)), directory=directory, minutes=2.0)
    control = evidence()
    judged = Judged(
        scenario="kill",
        seed=0,
        evidence=hurt,
        verdicts=judge(hurt, control),
        seconds=100.0,
        control=control,
    )
    return Outcome(settings=settings, judged=(judged,))


def test_the_json_record_has_promises_faults_tokens_and_losses(
    tmp_path: Path,
) -> None:
    record = json.loads(json.dumps(summary(outcome(tmp_path))))
    assert record["ok"] is True
    assert set(record["verdicts"]) == {str(promise) for promise in Promise}
    assert set(record["verdicts"].values()) == {True, None}
    assert record["faults"] == {"kill": 1, "seeds": 1}
    tokens = record["tokens"]
    assert tokens["processed"] == tokens["merged"] + tokens["pending"] + tokens["discarded"]
    assert 0.9 < record["goodput"] < 1.0
    assert record["control_loss"] < record["loss"] < 2.4


def test_one_broken_promise_makes_the_whole_outcome_fail(tmp_path: Path) -> None:
    record = summary(outcome(tmp_path, broken=True))
    assert record["ok"] is False
    assert record["verdicts"]["once"] is record["verdicts"]["ledger"] is False


def test_the_report_has_verdicts_faults_and_lives_by_time(tmp_path: Path) -> None:
    lines = report.write(tmp_path, outcome(tmp_path)).read_text(encoding="utf-8").splitlines()
    assert lines[0] == "kill, seed 0"
    assert any(line.startswith("  once       kept") for line in lines)
    timeline = [line.strip() for line in lines if " s  " in line]
    assert "20.0 s  kill of anna, until 25.0 s" in timeline
    assert "30.0 s  seeds of all, until 40.0 s" in timeline
    assert timeline == sorted(timeline, key=lambda line: float(line.split()[0]))


def test_the_summary_as_text_names_the_broken_promises(tmp_path: Path) -> None:
    good = report.text(summary(outcome(tmp_path)))
    assert "kept" in good and "1 kill, 1 seeds" in good and str(tmp_path) in good
    bad = report.text(summary(outcome(tmp_path, broken=True)))
    assert "BROKEN: once, ledger" in bad


def test_a_schedule_does_not_depend_on_the_other_scenarios(tmp_path: Path) -> None:
    (kill,) = chosen(("kill",))
    alone = ChaosSettings(scenarios=(kill,), directory=tmp_path, seed=5)
    among = ChaosSettings(scenarios=chosen(("all",)), directory=tmp_path, seed=5)
    assert schedule(alone, kill) == schedule(among, kill)
