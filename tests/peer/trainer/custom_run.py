"""A small run whose model, data and optimizer come from the test."""

from __future__ import annotations

TOML = """
name = "lone"
[model]
recipe = "custom"
[data]
recipe = "custom"
[inner]
optimizer = "custom"
learning_rate = 0.1
[schedule]
warmup_tokens = 100
[outer]
fragments = 3
steps_per_cycle = {cycle}
overlap_steps = {overlap}
"""


def toml(*, overlap: int = 2, cycle: int = 5) -> str:
    return TOML.format(overlap=overlap, cycle=cycle)
