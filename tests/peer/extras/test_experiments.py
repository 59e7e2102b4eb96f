"""The output of programs that run experiments."""

from __future__ import annotations

import pytest

from peer.extras.experiments import course


def test_the_course_of_a_trial_is_not_in_its_json(capsys: pytest.CaptureFixture[str]) -> None:
    """``shoal demo --json | jq`` failed at the first line that said what went on."""
    for as_json in (True, False):
        course(as_json=as_json)("learner-0 is training")
        output, errors = capsys.readouterr()
        assert (errors if as_json else output) == "learner-0 is training\n"
        assert (output if as_json else errors) == ""
