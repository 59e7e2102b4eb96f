"""A small run of the built-in recipes."""

from __future__ import annotations

TEXT = """\
schema = 1
name = "trainer-test"
[model]
recipe = "gpt"
layers = 1
width = 16
heads = 2
context = 16
[data]
recipe = "text"
files = ["*.txt"]
sequence_length = 16
[inner]
optimizer = "adamw"
batch_size = 2
[schedule]
warmup_tokens = 10
[outer]
fragments = 2
[end]
tokens = 1000000
"""
