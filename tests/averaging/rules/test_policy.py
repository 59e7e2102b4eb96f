"""The policy of rounds, and its variant for statistics."""

from __future__ import annotations

from dataclasses import replace

from averaging.numbers.layout import Layout, TensorSpec
from averaging.rules.policy import RoundPolicy

LAYOUT = Layout.build(
    [TensorSpec("weight", (4, 4)), TensorSpec("running_var", (4,))], 2, statistics=["running_var"]
)


def test_statistics_are_merged_as_exact_means_without_an_outer_optimizer() -> None:
    policy = RoundPolicy(codec="int4", merge="rda", eta=0.7, mu=0.9, stale_max=3)
    *trained, statistics = [policy.of_kinds(fragment.kinds) for fragment in LAYOUT.fragments]
    assert trained == [policy] * len(trained)
    assert statistics == replace(policy, codec="f32", merge="mean", eta=1.0, mu=0.0)
