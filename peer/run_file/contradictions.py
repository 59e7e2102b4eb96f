"""Combinations of settings that are invalid although each setting alone is within its limits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TypeAlias

from dht import addresses
from dht.identity import parse_peer_id
from peer.run_file.hf_config import config_problems
from peer.run_file.sections import (
    CustomData,
    GptModel,
    HfData,
    HfModel,
    RunFile,
    TextData,
    vocabulary,
)

Contradiction: TypeAlias = tuple[str, str]
"""Full name of a setting, and the problem: its value and the rule it breaks."""


def contradictions(run: RunFile) -> Iterator[Contradiction]:
    yield from _of_model(run)
    yield from _of_data_files(run)
    yield from _of_thresholds(run)
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
        if data.sequence_length > model.context:
            yield (
                "data.sequence_length",
                f"is {data.sequence_length}; it must be at most model.context, {model.context}",
            )
    size = vocabulary(model)
    tokenizer = data.tokenizer if isinstance(data, HfData) else "bytes"
    if not isinstance(data, CustomData) and tokenizer == "bytes" and (size or 256) < 256:
        setting = "model.vocabulary" if isinstance(model, GptModel) else "model.config"
        yield setting, f"has a vocabulary of {size} tokens; data in bytes needs at least 256"
    if isinstance(model, HfModel):
        for problem in config_problems(model.config):
            yield "model.config", problem


def _of_data_files(run: RunFile) -> Iterator[Contradiction]:
    if isinstance(run.data, TextData):
        for pattern in run.data.files:
            # A run file from an untrusted peer must not read outside the data folder.
            parts = pattern.replace("\\", "/").split("/")
            if pattern.startswith(("/", "\\", "~")) or ":" in pattern or ".." in parts:
                yield "data.files", f"has {pattern!r}; it must stay inside the data folder"


def _of_thresholds(run: RunFile) -> Iterator[Contradiction]:
    for name, threshold in (
        ("inner.clip_norm", run.inner.clip_norm),
        ("rounds.norm_max_ratio", run.rounds.norm_max_ratio),
        ("mixing.dispersion_max", run.mixing.dispersion_max),
    ):
        if isinstance(threshold, float) and not (math.isfinite(threshold) and threshold > 0):
            yield name, f"is {threshold:g}; it must be a number above 0 or 'off'"


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
    if isinstance(rounds.quorum, int) and rounds.quorum > rounds.group_size:
        yield (
            "rounds.quorum",
            f"is {rounds.quorum}; a group has at most rounds.group_size = "
            f"{rounds.group_size} peers",
        )
