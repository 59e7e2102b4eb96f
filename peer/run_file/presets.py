"""Run files for models of named sizes, from which the author of a run starts. Pure.

Unlike defaults, presets are no part of any run's id: the file says every setting.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from peer.run_file.merging import Outer
from peer.run_file.sections import (
    Data,
    End,
    Evaluation,
    GptModel,
    HfData,
    MuonInner,
    PythonStdlibData,
    RunFile,
    Schedule,
)

STDLIB, FINEWEB = "python_stdlib", "fineweb-edu"
FINEWEB_COMMIT = "87f09149ef4734204d70ed1d046ddc9ca3f2b8f9"
TOKENIZER = "openai-community/gpt2@607a30d783dfa663caf39e06633721c8d4cfcd7e"

TOKENS_PER_PARAMETER = 20
"""The compute-optimal number of training tokens (Hoffmann et al., 2022, arXiv 2203.15556)."""

ROBUST_MERGE: Final = "centered_clip"
"""Merge rule of new runs, which anybody may join unless their file says otherwise. Without liars it
costs at most 0.15% of loss, also where peers differ in speed, and with 30% of the members poisoning
within the norm bound it loses least of all rules (results-poison.md). Merging takes sixteen times
the processor time of a mean, which is still little."""

NEW_OUTER: Final = Outer(
    merge=ROBUST_MERGE,
    # With 30% failing 6.9% behind in place of 12.1% (results-muon.md); with AdamW 1.3% worse.
    late_work="per_cycle",
    # At most 0.3% of loss for 25% fewer bytes, and 0.4% for 50%, with 10.7 million parameters
    # (results-muon.md). At equal bytes int2 ends 0.9 to 2.3% lower than int4 in cycles twice as
    # long (results-short-cycles.md).
    smaller_codecs=["int2/int4", "int2"],
    # From 0.8% ahead of the best fixed setting of a line to 0.7% behind it (results-slow-links.md).
    steps_per_cycle_max=120,
)
"""The section of new runs with Muon, with the figures of what differs from the defaults; they are
in docs/research, those of the defaults in results-settings.md."""


_OF_ALL_SIZES = {"context": 1024, "vocabulary": 50304, "qk_norm": True}
SIZES: Mapping[str, Mapping[str, Any]] = {
    "124m": {"layers": 12, "width": 768, "heads": 12, **_OF_ALL_SIZES},
    "350m": {"layers": 24, "width": 1024, "heads": 16, **_OF_ALL_SIZES},
    "1b": {"layers": 24, "width": 1792, "heads": 14, **_OF_ALL_SIZES},
}
"""Settings of models of named sizes. The vocabulary is GPT-2's, rounded up to 128."""

_PARAMETERS = {"124m": 124_000_000, "350m": 355_000_000, "1b": 1_000_000_000}
_BATCHES = {"124m": 128, "350m": 128, "1b": 256}
"""131 000 tokens a step, and more. With 4096 eight members are 0.4 to 0.9% behind data parallel;
with 1024 and less more (results-few-members.md), so smaller steps are remarked on."""
_RATES = {"124m": 2e-3, "350m": 1.5e-3, "1b": 1e-3}
"""Rates of Muon of 1.5 divided by the width, or near it, which were best with widths of 64 (0.024),
128 (0.012) and 384 (0.004); for these sizes that is an extrapolation (results-muon.md)."""


def starting(name: str) -> RunFile:
    """A run to edit: the defaults, but for what turned out to train better after they were fixed.

    Muon takes 9 to 12% off the loss of AdamW at equal tokens and bytes (results-muon.md). With its
    rate of 0.012, which follows from the width as those of the named sizes do, one peer alone ends
    24% lower than with 0.002, and 4% lower than with 0.006 (results-muon.md). In cycles of 8 steps
    two peers end 4.0% lower than in cycles of 24, as do eight with 70 000 parameters
    (results-momentum.md); lines that do not carry such cycles lengthen them.
    """
    return RunFile(
        name=name,
        inner=MuonInner(learning_rate=1.2e-2),
        outer=msgspec.structs.replace(NEW_OUTER, steps_per_cycle=8, overlap_steps=2),
        evaluation=Evaluation(every_versions=3),
    )


def preset(size: str, data: str = STDLIB) -> RunFile:
    """A run of a model of this size, one of ``SIZES``. Raises ``ValueError``.

    ``data``: ``python_stdlib``, ``fineweb-edu``, or the name of a dataset on the hub, with or
    without ``@`` and a commit.
    """
    if size not in SIZES:
        raise ValueError(f"size is {size!r}; it is one of {', '.join(SIZES)}")
    model = GptModel(**SIZES[size])
    tokens = TOKENS_PER_PARAMETER * _PARAMETERS[size]
    return RunFile(
        name=name_from(f"{data.partition('@')[0]}-{size}"),
        model=model,
        data=_data(data, sequence_length=model.context),
        inner=MuonInner(learning_rate=_RATES[size], batch_size=_BATCHES[size]),
        schedule=Schedule(warmup_tokens=tokens // 100),
        # A fragment is about a block; a cycle of 30 steps loses little against a shorter one, and
        # cycles of 60 and 120 steps cost lines that need them about 1% and 4% of loss.
        outer=msgspec.structs.replace(NEW_OUTER, fragments=model.layers, steps_per_cycle=30),
        evaluation=Evaluation(every_versions=4),
        end=End(tokens=tokens),
    )


def name_from(text: str) -> str:
    """The nearest valid name of a run."""
    return re.sub(r"[^a-z0-9._-]+", "-", text.lower()).strip("._-")[:64] or "my-run"


def _data(name: str, *, sequence_length: int) -> Data:
    if name == STDLIB:
        return PythonStdlibData(sequence_length=sequence_length)
    dataset, _, commit = name.partition("@")
    subset = None
    if name == FINEWEB:
        dataset, subset, commit = "HuggingFaceFW/fineweb-edu", "sample-100BT", FINEWEB_COMMIT
    elif "/" not in name:
        raise ValueError(
            f"data is {name!r}; it is {STDLIB}, {FINEWEB}, or the name of a dataset on the hub "
            "such as owner/name"
        )
    return HfData(
        dataset=dataset,
        subset=subset,
        revision=commit or None,
        tokenizer=TOKENIZER,
        sequence_length=sequence_length,
    )
