"""The model card of an export: ``README.md``, with the facts of the run.

Texts of the run file and names of peers come from strangers, and appear as plain text.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator

from peer.data.files import hosts_of
from peer.extras.export.facts import RunFacts, spread
from peer.quantities import peers_text, plural
from peer.run_file.places import base_of
from peer.run_file.sections import FilesData, HfData, HfModel, RunFile
from peer.storage.outer_state import OuterState

LICENCES = frozenset(
    (
        *("afl-3.0", "agpl-3.0", "apache-2.0", "artistic-2.0", "bsd-2-clause", "bsd-3-clause"),
        *("bsl-1.0", "cc", "cc-by-4.0", "cc-by-nc-4.0", "cc-by-nc-sa-4.0", "cc-by-sa-4.0"),
        *("cc0-1.0", "ecl-2.0", "epl-2.0", "eupl-1.1", "gpl-2.0", "gpl-3.0", "isc", "lgpl-3.0"),
        *("mit", "mpl-2.0", "ms-pl", "openrail", "osl-3.0", "pddl", "unlicense", "wtfpl", "zlib"),
    )
)
"""Licences that the hub knows by these names; any other is 'other' with a name."""

LISTED_MAX = 100
"""Contributors that the card lists; the others are one line."""


def card(
    outer: OuterState, facts: RunFacts, *, tokenizer: str | None, dtype: str, kind: str
) -> str:
    """The text of the card. ``kind``: the architecture and the number of parameters."""
    run = outer.run
    rows = "\n".join(f"| {name} | {value} |" for name, value in _rows(outer, facts, dtype, kind))
    parts = [
        _head(run),
        f"# {plain_text(run.name)}",
        *([plain_text(run.description)] if run.description else []),
        _trained_by(facts),
        f"| | |\n|---|---|\n{rows}",
        *_contributors(facts),
        *_history(facts, in_bytes=tokenizer == "bytes"),
        *_use(tokenizer),
    ]
    return "\n\n".join(parts) + "\n"


def _trained_by(facts: RunFacts) -> str:
    if len(facts.names) + facts.others == 1:
        return "One peer trained this model with Shoal, in a run that others can join."
    return (
        "Many peers trained this model together with Shoal, without a server: each trains on its "
        "own machine, and they merge their progress."
    )


def _head(run: RunFile) -> str:
    licence = run.licence.strip()
    lines = ["library_name: transformers", "pipeline_tag: text-generation", "tags: [shoal]"]
    if licence.lower() in LICENCES:
        lines.append(f"license: {licence.lower()}")
    elif licence:
        lines += ["license: other", f"license_name: {json.dumps(licence)}"]
    return "\n".join(["---", *lines, "---"])


def _rows(outer: OuterState, facts: RunFacts, dtype: str, kind: str) -> Iterator[tuple[str, str]]:
    run = outer.run
    yield "run", f"`{run.run_id}`"
    yield "model", f"`{outer.model}` (exports with the same name have the same parameters)"
    yield "architecture", f"{kind}, {dtype}"
    if (base := base_of(run.model)) is not None:
        adapts = isinstance(run.model, HfModel) and run.model.lora is not None
        yield "base", f"{plain_text(base.source)}{', adapted' if adapts else ', trained on'}"
    yield "tokens", f"{outer.global_tokens:,} in sequences of {run.data.sequence_length}"
    yield "data", _data(run)
    yield "peers", _peers(facts)
    if facts.measured:
        newest = facts.measured[-1]
        yield "held-out loss", f"{newest.loss:.4f} nats per token at {newest.tokens:,} tokens"
    yield "licence", plain_text(run.licence) or "not stated"
    for name in ("homepage", "contact", "discussion"):
        if where := getattr(run, name):
            yield name, f"<{where}>"


def _data(run: RunFile) -> str:
    """The recipe, and what it reads as far as that has a name everywhere."""
    tag, data = str(run.data.__struct_config__.tag), run.data
    if isinstance(data, HfData):
        return f"{plain_text(data.dataset)} at {data.revision}"
    if isinstance(data, FilesData):
        hosts = ", ".join(map(plain_text, hosts_of(data)))
        return f"files from {hosts}" if hosts else tag
    return plain_text(tag)


def _peers(facts: RunFacts) -> str:
    if facts.contributors:
        return f"{peers_text(len(facts.contributors))}, listed below"
    names = [plain_text(name) for name in facts.names]
    if not names:
        return peers_text(facts.others)
    return ", ".join(names) + (f" and {plural(facts.others, 'other')}" if facts.others else "")


def _contributors(facts: RunFacts) -> Iterator[str]:
    if not facts.contributors:
        return
    yield "## Contributors"
    lines = ["| contributor | tokens | share |", "|---|---|---|"]
    for row in facts.contributors[:LISTED_MAX]:
        lines.append(f"| {plain_text(row.shown)} | {row.tokens:,} | {row.share} |")
    if more := facts.contributors[LISTED_MAX:]:
        tokens, share = sum(row.tokens for row in more), sum(row.per_mille for row in more)
        lines.append(f"| {plural(len(more), 'other')} | {tokens:,} | {share / 10:.1f}% |")
    yield "\n".join(lines)


def _history(facts: RunFacts, *, in_bytes: bool) -> Iterator[str]:
    if len(facts.measured) < 2:
        return
    yield "## Held-out loss"
    also = " | bits per byte" if in_bytes else ""
    lines = [f"| tokens | date | nats per token{also} |", "|---|---|---|" + "---|" * in_bytes]
    for one in spread(facts.measured):
        date = "" if one.at is None else f"{one.at:%Y-%m-%d %H:%M} UTC"
        bits = f" {one.loss / math.log(2):.4f} |" if in_bytes else ""
        lines.append(f"| {one.tokens:,} | {date} | {one.loss:.4f} |{bits}")
    yield "\n".join(lines)


def _use(tokenizer: str | None) -> Iterator[str]:
    yield "## Use"
    lines = [
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        'model = AutoModelForCausalLM.from_pretrained("THIS FOLDER")',
        'tokenizer = AutoTokenizer.from_pretrained("THIS FOLDER")',
        'tokens = tokenizer("Once upon a time", return_tensors="pt")',
        "print(tokenizer.decode(model.generate(**tokens, max_new_tokens=100)[0]))",
    ]
    if tokenizer is None:
        lines = lines[:3]
        lines[0] = lines[0].removesuffix(", AutoTokenizer")
    yield "\n".join(["```python", *lines, "```"])
    yield {
        None: "The run file names no tokenizer: its data was tokenized before.",
        "bytes": "A token is a byte of UTF-8; byte 0 ends a document.",
    }.get(tokenizer, f"Tokenizer: {plain_text(tokenizer or '')}.")


def plain_text(text: str) -> str:
    """Text that Markdown shows as it is, on one line."""
    return re.sub(r"([\\`*_{}\[\]<>()#+!|~&$-])", r"\\\1", " ".join(text.split()))
