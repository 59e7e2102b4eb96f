"""The fields of every event, for the reference: as the source gives them, with their types.

A field has one type, whatever the event, unless ``OF_EVENTS`` says otherwise. ``UNSEEN`` has the
fields that no call shows: they come with a variable, or from one function to the next.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from docs.site.emissions import Emission, everywhere
from peer.events.table import COMMON, TABLE, Audience
from peer.status import FIGURES

TYPES: Mapping[str, str] = {
    field: kind
    for kind, fields in {
        "int": "addresses ballot bans contributors every exit_code fragment from_version group "
        "in_flight live members number parted_at peers pid promised promises restarts missed "
        "missing port protocol rounds schema since slice slices step steps version with_me",
        "text": "codec codec_down how kind left_out level limit link model name ours outcome "
        "parameters phase reason role run run_name stage text theirs url",
        "s": "encoded_s lasts_s merged_s offset_s restart_in_s seconds silent_s time_s took_s "
        "waited_s",
        "bool": "alone by_program contained contributed finished in_doubt merged mine reachable "
        "rebased stopped void",
        "peer id": "by leader peer signer source to",
        "peer ids": "majority",
        "bytes": "needed_bytes received_bytes received_line_bytes sent_bytes",
        "float": "after before dispersion loss strikes",
        "path": "directory path",
        "0 to 1": "done weight",
        "tokens": "tokens",
        "hex": "lineage proof round",
        "ints": "back_to fragments versions",
        "floats": "weights",
        "Unix time": "at expires_at",
        "peer ids with spaces": "banned",
        "bytes by purpose": "sent_for",
        "list of hex": "parents",
        "peer id by peer id": "delegates",
        "[incarnation; mark; steps; tokens] by peer id": "marks",
    }.items()
    for field in fields.split()
}

OF_EVENTS: Mapping[str, Mapping[str, str]] = {
    "bits_differ": {"peers": "peer ids"},
    "found": {"peers": "peer ids"},
    "founded": {"fragments": "int"},
    "founded_apart": {"mine": "tokens", "theirs": "tokens"},
    "level": {"before": "text"},
    "rebase": {"mine": "tokens", "theirs": "tokens"},
    "round": {
        "members": "peer ids",
        "contributors": "peer ids",
        "left_out": "reason by peer id",
    },
    "stale": {"versions": "int"},
    "stays_apart": {"mine": "tokens", "theirs": "tokens"},
    "went_over": {"theirs": "tokens"},
}

UNSEEN: Mapping[str, str] = {
    "log": "peer name role run run_name",
    "connected": "name",
    "founded_apart": "mine theirs",
    "heard_finished": "fragment",
    "hello_refused": "name ours theirs",
    "idle": "fragment",
    "jump_allowed": "before after reason fragments versions",
    "jump_measured": "before after reason fragments versions",
    "jump_refused": "before after reason fragments versions",
    "left_apart": "versions model",
    "measured": "version tokens",
    "other_run": "ours theirs",
    "peer_joined": "name",
    "peer_left": "name",
    "peer_lost": "name",
    "redirect": "fragment",
    "resumed": "text",
    "round": "delegates",
    "spot_check_failed": "peer before after seconds received_bytes",
    "spot_check_passed": "peer before after seconds received_bytes",
    "stays_apart": "mine theirs",
    "told_behind": "fragment",
    "upload_outlying": "reason",
    "work_lost": "tokens reason",
}


@cache
def _given() -> dict[str, set[str]]:
    """The fields of each event that the source names where it emits it."""
    given: dict[str, set[str]] = {name: set() for name in TABLE}
    for each in everywhere():
        if isinstance(each, Emission):
            given[each.name] |= each.fields - set(COMMON)
    return given


def fields_of(name: str) -> dict[str, str]:
    """The fields that an event may have, and their types. Most emissions have a part of them."""
    audience = TABLE[name].audience
    names = _given()[name] | set(UNSEEN.get(name, "").split())
    names |= {"fragment"} if audience & Audience.ROUND else set()
    names |= {"time_s"} if audience & Audience.LAB else set()
    kinds = {**TYPES, **OF_EVENTS.get(name, {})}
    of_figures = {}
    if name in ("progress", "done"):
        of_figures = {figure: mark.unit for figure, mark in FIGURES.items()}
    return {field: kinds[field] for field in sorted(names)} | of_figures
