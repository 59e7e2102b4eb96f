"""The facts of a run beside its parameters, and the model card of an export that is made of them.

Peers are named as they have signed for it (``peer.extras.credit``). Texts of the run file and names
of peers come from strangers, and appear in the card, which is ``README.md``, as plain text.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from peer.contributors import Contributor
from peer.data.files import data_words
from peer.installed import extras
from peer.joining.visit import RunStatus
from peer.quantities import peers_text, plural
from peer.run_file.places import base_of
from peer.run_file.sections import HfModel, RunFile
from peer.storage.outer_state import OuterState, merged_of
from peer.views.event_log import read_events

EVENTS = "events.jsonl"
MEASURED_MAX = 24


@dataclass(frozen=True, slots=True)
class Measured:
    """A held-out loss in nats per token, at a version of the first fragment."""

    version: int
    loss: float
    tokens: int
    """Merged tokens of the run when it was measured."""
    at: datetime | None = None


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Facts of a run that neither its run file nor its parameters contain."""

    measured: tuple[Measured, ...] = ()
    """Held-out losses, oldest first."""
    contributors: tuple[Contributor, ...] = ()
    """All whose work is merged, the largest first; empty if no tally is known."""
    average_losses: tuple[float | None, float | None] = (None, None)
    """Held-out losses of the average that is exported, and of the newest version; ``None``: not
    measured."""


def facts_in_folder(folder: Path, outer: OuterState) -> RunFacts:
    """The facts in the event log of a peer's folder."""
    measured: dict[int, Measured] = {}
    for event in read_events(folder / EVENTS):
        if event.get("event") == "measured" and (one := _measured(event)) is not None:
            measured[one.version] = one
    rows: list[Contributor] = []
    for credit in extras("credit.reading"):
        rows = credit.contributors_in(folder, outer.run.run_id)
    return RunFacts(tuple(measured[version] for version in sorted(measured)), tuple(rows))


def _measured(event: Mapping[str, object]) -> Measured | None:
    match event:
        case {
            "version": int(version),
            "loss": float(loss),
            "tokens": int(tokens),
            "at": int() | float() as at,
        }:
            return Measured(version, loss, tokens, datetime.fromtimestamp(at, UTC))
    return None


def facts_of_peers(seen: RunStatus) -> RunFacts:
    """The facts that peers on line report."""
    newest = seen.held_out
    measured = () if newest is None else (Measured(newest.version, newest.loss, newest.tokens),)
    return RunFacts(measured, seen.contributors)


def spread(measured: tuple[Measured, ...], count: int = MEASURED_MAX) -> tuple[Measured, ...]:
    """Return at most ``count`` measurements, evenly spaced, with the first and the newest."""
    if len(measured) <= count:
        return measured
    last = len(measured) - 1
    return tuple(measured[round(index * last / (count - 1))] for index in range(count))


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
    workers = len(facts.contributors)
    if not workers:
        workers = sum(mark.tokens > 0 for mark in merged_of(outer.states).values())
    described = _rows(outer, facts, dtype, kind, workers)
    rows = "\n".join(f"| {name} | {value} |" for name, value in described)
    parts = [
        _head(run),
        f"# {plain_text(run.name)}",
        *([plain_text(run.description)] if run.description else []),
        _trained_by(workers),
        f"| | |\n|---|---|\n{rows}",
        *_contributors(facts),
        *_history(facts, in_bytes=tokenizer == "bytes"),
        *_use(tokenizer),
    ]
    return "\n\n".join(parts) + "\n"


def _trained_by(workers: int) -> str:
    if workers == 1:
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


def _rows(
    outer: OuterState, facts: RunFacts, dtype: str, kind: str, workers: int
) -> Iterator[tuple[str, str]]:
    run = outer.run
    yield "run", f"`{run.run_id}`"
    yield "model", f"`{outer.model}` (exports with the same name have the same parameters)"
    yield "architecture", f"{kind}, {dtype}"
    if (base := base_of(run.model)) is not None:
        adapts = isinstance(run.model, HfModel) and run.model.lora is not None
        yield "base", f"{plain_text(base.source)}{', adapted' if adapts else ', trained on'}"
    if outer.averaged > 1:
        yield "parameters", _average(outer.averaged, *facts.average_losses)
    yield "tokens", f"{outer.global_tokens:,} in sequences of {run.data.sequence_length}"
    yield "data", plain_text(data_words(run))
    yield "peers", peers_text(workers) + (", listed below" if facts.contributors else "")
    if facts.measured:
        newest = facts.measured[-1]
        yield "held-out loss", f"{newest.loss:.4f} nats per token at {newest.tokens:,} tokens"
    yield "licence", plain_text(run.licence) or "not stated"
    for name in ("homepage", "contact", "discussion"):
        if where := getattr(run, name):
            yield name, f"<{where}>"


def _average(checkpoints: int, loss: float | None, newest: float | None) -> str:
    what = f"the average over the last versions, of {checkpoints} checkpoints of one peer"
    if loss is None or newest is None:
        return what
    return f"{what}; held-out loss {loss:.4f} nats per token, of the newest version {newest:.4f}"


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
