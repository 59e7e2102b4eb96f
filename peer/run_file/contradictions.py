"""Combinations of settings that are invalid although each setting alone is within its limits."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from datetime import datetime
from typing import TypeAlias

from dht import addresses
from dht.identity import parse_peer_id
from peer.run_file.forms import TEMPLATES, template_problems
from peer.run_file.hf_config import config_problems
from peer.run_file.merging import Outer
from peer.run_file.places import (
    LIST_FORMAT,
    TEXT_FORMATS,
    TOKEN_FORMATS,
    base_problems,
    fault_of_place,
    leaves_folder,
    place_of,
)
from peer.run_file.sections import (
    HUB_COMMIT,
    HUB_NAME,
    CustomData,
    FilesData,
    GptModel,
    HfData,
    HfModel,
    MuonInner,
    RunFile,
    TextData,
    vocabulary,
)

Contradiction: TypeAlias = tuple[str, str]
"""Full name of a setting, and the problem: its value and the rule it breaks."""


def contradictions(run: RunFile) -> Iterator[Contradiction]:
    yield from _of_model(run)
    yield from _of_data_files(run)
    yield from _of_examples(run)
    yield from _without_commit(run)
    yield from _of_token_counts(run)
    yield from _of_rounds(run)
    if run.policy.admission == "listed" and not run.policy.peers:
        yield "policy.peers", "is empty; admission = 'listed' would admit no peer"
    if run.policy.admission == "invited" and run.policy.owner is None:
        yield (
            "policy.owner",
            "is unset; admission = 'invited' needs an owner who invites: `shoal run sign FILE` "
            "writes your key into the file",
        )
    if run.policy.spot_checks and isinstance(run.data, CustomData):
        yield (
            "policy.spot_checks",
            f"is {run.policy.spot_checks:g}; with data.recipe = 'custom' nobody knows what others "
            "train on, so it must be 0",
        )
    if run.policy.spot_checks and run.synchronous:
        yield (
            "policy.spot_checks",
            f"is {run.policy.spot_checks:g}; in a synchronous run all learners would wait for "
            "each check, so it must be 0",
        )
    for name, peers in (("owner", [run.policy.owner or ""]), ("peers", run.policy.peers)):
        for peer in filter(None, peers):
            try:
                parse_peer_id(peer)
            except ValueError as error:
                yield f"policy.{name}", f"has {peer!r}: {error}"
    for seed in run.seeds:
        try:
            addresses.parse_seed(seed)
        except ValueError as error:
            yield "seeds", f"has {seed!r}: {error}"


def _of_model(run: RunFile) -> Iterator[Contradiction]:
    model, data = run.model, run.data
    if isinstance(model, GptModel):
        if model.width % (2 * model.heads):
            yield (
                "model.heads",
                f"is {model.heads}; the width {model.width} must be a multiple of twice that, "
                "as rotary positions need an even number of features per head",
            )
        if model.heads % (model.kv_heads or model.heads):
            yield "model.kv_heads", f"is {model.kv_heads}; it must divide the {model.heads} heads"
        if data.sequence_length > model.context:
            yield (
                "data.sequence_length",
                f"is {data.sequence_length}; it must be at most model.context, {model.context}",
            )
    size = vocabulary(model)
    if _is_in_bytes(run) and (size or 256) < 256:
        is_gpt = isinstance(model, GptModel)
        setting, has = ("vocabulary", "is") if is_gpt else ("config", "has a vocab_size of")
        yield f"model.{setting}", f"{has} {size}; data in bytes needs at least 256"
    if isinstance(model, HfModel):
        for problem in config_problems(model.config):
            yield "model.config", problem
        for key in sorted(set(model.config_unset or ()) & (model.config.keys() | {"model_type"})):
            yield "model.config_unset", f"has {key!r}, which has a value in model.config"
        yield from base_problems(model)


def _is_in_bytes(run: RunFile) -> bool:
    """Return whether a token may be any byte."""
    data = run.data
    if isinstance(data, FilesData):
        names = [place_of(text) for source in data.sources for text in source.files]
        all_tokens = all(name.suffix in TOKEN_FORMATS for name in names)
        return data.tokenizer == "bytes" and not all_tokens
    if isinstance(data, HfData):
        return data.tokenizer == "bytes"
    return not isinstance(data, CustomData)


def _of_data_files(run: RunFile) -> Iterator[Contradiction]:
    # A run file from an untrusted peer must not read outside the data folder.
    if isinstance(run.data, TextData):
        for pattern in run.data.files:
            if leaves_folder(pattern):
                yield "data.files", f"has {pattern!r}; it must stay inside the data folder"
    elif isinstance(run.data, FilesData):
        formats = (*TEXT_FORMATS, *TOKEN_FORMATS, LIST_FORMAT)
        for index, source in enumerate(run.data.sources):
            for text in source.files:
                if fault := fault_of_place(place_of(text), formats):
                    yield f"data.sources.{index}.files", f"has {text!r}: {fault}"
        yield from _of_tokenizer(run.data)


def _of_examples(run: RunFile) -> Iterator[Contradiction]:
    data = run.data
    if not isinstance(data, HfData | FilesData):
        return
    if data.form == "text":
        for name in ("columns", "template"):
            if getattr(data, name) is not None:
                yield f"data.{name}", "is for data.form = 'chat' or 'completion'; form is 'text'"
        return
    count = 1 if data.form == "chat" else 2
    if data.columns is not None and len(data.columns) != count:
        yield "data.columns", f"names {len(data.columns)}; form = {data.form!r} has {count}"
    for problem in template_problems(data.form, data.template or TEMPLATES[data.form]):
        yield "data.template", problem
    for index, source in enumerate(data.sources if isinstance(data, FilesData) else ()):
        for text in source.files:
            if place_of(text).suffix in (".txt", *TOKEN_FORMATS):
                yield (
                    f"data.sources.{index}.files",
                    f"has {text!r}, which has no columns; form = {data.form!r} reads .jsonl and "
                    ".parquet",
                )


def _of_tokenizer(data: FilesData) -> Iterator[Contradiction]:
    place = place_of(data.tokenizer)
    if place.sha256 is not None or place.is_url:
        if fault := fault_of_place(place, (".json",)):
            yield "data.tokenizer", f"is {data.tokenizer!r}: {fault}"
        if data.end_token is None:
            yield "data.end_token", "is missing; a tokenizer.json does not say what ends a document"
    else:
        name, at, commit = data.tokenizer.partition("@")
        if not re.fullmatch(HUB_NAME, name) or (at and not re.fullmatch(HUB_COMMIT, commit)):
            yield (
                "data.tokenizer",
                f"is {data.tokenizer!r}; it must be 'bytes', a name with a commit such as "
                "'owner/name@' and 40 hex digits, or a tokenizer.json with '#sha256=' and its hash",
            )


def _without_commit(run: RunFile) -> Iterator[Contradiction]:
    """Refuse a name without a commit: the files under it change with time."""
    data = run.data
    if not isinstance(data, HfData | FilesData):
        return
    if isinstance(data, HfData) and not re.fullmatch(HUB_COMMIT, data.revision or ""):
        yield (
            "data.revision",
            f"is {data.revision!r}; it must be a commit of {data.dataset}, 40 hex digits: `shoal "
            f"run new` writes the newest, and https://huggingface.co/datasets/{data.dataset}"
            "/commits/main lists all",
        )
    if data.tokenizer != "bytes" and re.fullmatch(HUB_NAME, data.tokenizer):
        yield (
            "data.tokenizer",
            f"is {data.tokenizer!r}; add its commit, '{data.tokenizer}@' and 40 hex digits: "
            f"https://huggingface.co/{data.tokenizer}/commits/main lists them",
        )


def _of_token_counts(run: RunFile) -> Iterator[Contradiction]:
    step_tokens = run.inner.batch_size * run.data.sequence_length
    if step_tokens > run.limits.step_tokens_max:
        yield (
            "limits.step_tokens_max",
            f"is {run.limits.step_tokens_max}; one step has inner.batch_size x "
            f"data.sequence_length = {step_tokens} tokens",
        )
    schedule = run.schedule
    if schedule.shape == "constant":
        return
    if schedule.decay_tokens is None and run.end.tokens == "unlimited":
        yield (
            "schedule.decay_tokens",
            f"is unset; the shape '{schedule.shape}' needs it when end.tokens is 'unlimited'",
        )
    elif schedule.warmup_tokens >= (run.decay_tokens or 0):
        yield (
            "schedule.warmup_tokens",
            f"is {schedule.warmup_tokens}; it must be less than the {run.decay_tokens} tokens "
            "at which the decay ends",
        )


_BITS = {"f32": 32, "f16": 16, "int8": 8, "int4": 4, "int2": 2}


def _of_levels(outer: Outer) -> Iterator[Contradiction]:
    longest = outer.steps_per_cycle_max
    if longest is not None and longest < outer.steps_per_cycle:
        yield (
            "outer.steps_per_cycle_max",
            f"is {longest}; it must be at least outer.steps_per_cycle, {outer.steps_per_cycle}",
        )
    before, (up, down) = outer.codecs_text, outer.codecs
    bits = _BITS[up] + _BITS[down]
    for name, (up, down) in zip(outer.smaller_codecs, outer.smaller_pairs, strict=True):
        if _BITS[up] + _BITS[down] >= bits:
            yield (
                "outer.smaller_codecs",
                f"{name!r} has more bytes than {before}, or as many; each must have fewer than "
                "the one before it",
            )
        before, bits = name, _BITS[up] + _BITS[down]


def _of_rounds(run: RunFile) -> Iterator[Contradiction]:
    rounds, membership = run.rounds, run.membership
    if membership.expiry_s < 2 * membership.heartbeat_s:
        yield (
            "membership.expiry_s",
            f"is {membership.expiry_s:g}; it must be at least twice "
            f"membership.heartbeat_s, {membership.heartbeat_s:g}",
        )
    if rounds.round_deadline_s < rounds.quorum_deadline_s:
        yield (
            "rounds.round_deadline_s",
            f"is {rounds.round_deadline_s:g}; it must be at least "
            f"rounds.quorum_deadline_s, {rounds.quorum_deadline_s:g}",
        )
    yield from _of_levels(run.outer)
    if isinstance(rounds.quorum, int) and rounds.quorum > rounds.group_size:
        yield (
            "rounds.quorum",
            f"is {rounds.quorum}; a group has at most rounds.group_size = "
            f"{rounds.group_size} peers",
        )


def obstacles(run: RunFile, *, now: datetime) -> Iterator[Contradiction]:
    """Settings that a peer may read, but with which a run that has yet to begin would fail.

    They are no contradictions: the peers of a run under way must be able to read its file when its
    date has passed.
    """
    end, outer, schedule = run.end, run.outer, run.schedule
    if end.date is not None and end.date <= now:
        yield "end.date", f"is {end.date:%Y-%m-%dT%H:%M:%SZ}, which is past: the run would be over"
    if outer.overlap_steps > outer.steps_per_cycle:
        yield (
            "outer.overlap_steps",
            f"is {outer.overlap_steps}; a fragment would be due again after "
            f"outer.steps_per_cycle = {outer.steps_per_cycle} steps, before its merge is over",
        )
    quorum, peers = run.rounds.quorum, run.policy.peers
    if run.policy.admission == "listed" and isinstance(quorum, int) and quorum > len(peers):
        yield (
            "rounds.quorum",
            f"is {quorum}; policy.peers lists {len(peers)}, so no round would ever have a quorum",
        )
    if end.tokens == "unlimited":
        return
    if (schedule.decay_tokens or 0) > end.tokens:
        yield (
            "schedule.decay_tokens",
            f"is {schedule.decay_tokens}; the run ends at end.tokens = {end.tokens}, before the "
            "learning rate has decayed",
        )
    if schedule.warmup_tokens >= end.tokens:
        yield (
            "schedule.warmup_tokens",
            f"is {schedule.warmup_tokens}; the run ends at end.tokens = {end.tokens}, before the "
            "learning rate has risen",
        )
    cycle_tokens = run.inner.batch_size * run.data.sequence_length * outer.steps_per_cycle
    if not isinstance(run.data, CustomData) and cycle_tokens > end.tokens:
        yield (
            "end.tokens",
            f"is {end.tokens}; a peer trains on {cycle_tokens} tokens in one cycle "
            "(inner.batch_size x data.sequence_length x outer.steps_per_cycle), so the run would "
            "end before every fragment is merged once",
        )


FEW_TOKENS = 1024
"""Tokens of a step up to which eight members that merge every eight steps were measured to end with
5 to 6% less loss than if they merge every thirty steps (256 and 1024 tokens, Muon;
results-short-cycles.md in docs/research)."""
SHORT_CYCLE = 8
RATE_TIMES_WIDTH = 1.5
"""The best learning rate of Muon, with widths of 64, 128 and 384, is this divided by the width
(results-muon.md in docs/research)."""
RATE_FACTOR_MAX = 3.0
"""A fifth of that was measured to cost a quarter of the loss, half of it 4%, and twice 4%."""

MEASURING_MAX = 0.05
"""Share of the time of two peers that measuring the held-out loss may take."""
MEASURED_OF_STEP = 1 / 3
"""Work of measuring a sequence, relative to training on it: it has no backward pass."""


def remarks(run: RunFile) -> Iterator[str]:
    """Settings that work, and for which others have been found better."""
    step_tokens = run.inner.batch_size * run.data.sequence_length
    outer, inner, model = run.outer, run.inner, run.model
    yield from _of_measuring(run)
    if outer.momentum > 0.0:
        yield (
            f"outer.momentum is {outer.momentum:g}; with 0 peers hold, send and save half as much, "
            "and end with as little loss or less at the learning rate that is best for one machine"
        )
    if isinstance(inner, MuonInner) and isinstance(model, GptModel):
        best = RATE_TIMES_WIDTH / model.width
        if not 1 / RATE_FACTOR_MAX <= inner.learning_rate / best <= RATE_FACTOR_MAX:
            yield (
                f"inner.learning_rate is {inner.learning_rate:g}; for a width of {model.width} the "
                f"best one of Muon was near {best:.2g} (1.5 divided by the width)"
            )
    is_long = outer.steps_per_cycle > SHORT_CYCLE
    if is_long and not isinstance(run.data, CustomData) and step_tokens <= FEW_TOKENS:
        yield (
            f"one step has {step_tokens} tokens (inner.batch_size x data.sequence_length), and is "
            f"mostly noise: eight peers that merge every {SHORT_CYCLE} steps, not every 30, end "
            "with 5 to 6% less loss, for four times the bytes; outer.steps_per_cycle is "
            f"{outer.steps_per_cycle}"
        )


def _of_measuring(run: RunFile) -> Iterator[str]:
    """One peer measures at each version: in short cycles that is often."""
    every, steps = run.evaluation.every_versions, run.outer.steps_per_cycle
    measured_steps = MEASURED_OF_STEP * run.evaluation.sequences / run.inner.batch_size
    share = measured_steps / (2 * steps * every)
    if share > MEASURING_MAX and not isinstance(run.data, CustomData):
        better = math.ceil(every * share / MEASURING_MAX)
        yield (
            f"evaluation.every_versions is {every}: of two peers' time {share:.0%} goes into "
            f"measuring {run.evaluation.sequences} held-out sequences every {every * steps} "
            f"steps; with {better} it is at most {MEASURING_MAX:.0%}"
        )
