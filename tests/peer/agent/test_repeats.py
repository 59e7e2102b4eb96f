"""Sentences that come again and again."""

from __future__ import annotations

from itertools import pairwise

from peer.agent.repeats import PAUSE_MAX_S, SENTENCES_MAX, Repeats


def test_a_sentence_is_told_again_after_pauses_that_grow() -> None:
    repeats = Repeats()
    told = [now for now in range(0, 20_000, 10) if repeats.is_due("it broke", now=float(now))]
    pauses = [later - before for before, later in pairwise(told)]
    assert pauses == [60, 120, 240, 480, 960, 1920, *[PAUSE_MAX_S] * 4]


def test_another_sentence_is_told_at_once_and_few_are_remembered() -> None:
    repeats = Repeats()
    assert repeats.is_due("it broke", now=0.0)
    assert all(repeats.is_due(f"reason {n}", now=1.0) for n in range(2 * SENTENCES_MAX))
    assert len(repeats._told) <= SENTENCES_MAX
