"""The policy of rounds, and its variant for statistics."""

from __future__ import annotations

from dataclasses import replace

from averaging.numbers.layout import Layout, TensorSpec
from averaging.rules.policy import RoundPolicy

LAYOUT = Layout.build(
    [TensorSpec("weight", (4, 4)), TensorSpec("running_var", (4,))], 2, statistics=["running_var"]
)


def test_statistics_are_merged_as_exact_means_without_an_outer_optimizer() -> None:
    policy = RoundPolicy(codec="int4", merge="rda", eta=0.7, eta_of_two=0.5, mu=0.9, stale_max=3)
    *trained, statistics = [policy.of_kinds(fragment.kinds) for fragment in LAYOUT.fragments]
    assert trained == [policy] * len(trained)
    assert statistics == replace(
        policy, codec="f32", merge="mean", eta=1.0, eta_of_two=None, mu=0.0
    )


def test_rounds_of_two_may_have_an_outer_learning_rate_of_their_own() -> None:
    usual = RoundPolicy(eta=0.9)
    assert [usual.eta_of(members) for members in (1, 2, 3)] == [0.9, 0.9, 0.9]
    shorter = replace(usual, eta_of_two=0.7)
    assert [shorter.eta_of(members) for members in (1, 2, 3)] == [0.7, 0.7, 0.9]
