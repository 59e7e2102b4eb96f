"""Tests of experiments, after which the rules of their own are forgotten."""

from __future__ import annotations

import pytest

from averaging.numbers import merge


@pytest.fixture(autouse=True)
def own_rules_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal names all rules that there are, in whichever order tests run."""
    monkeypatch.setattr(merge, "_rules", dict(merge._rules))
