"""The settings of a run after its owner's amendments: a function of run file, orders and version.

An owner may change few settings: those that do not alter what a state is, so that rounds before and
after go on in one history. Each change is in force in the rounds that make its version or a later
one, and for the trainer from the moment at which every fragment has come that far.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

import msgspec

from dht.membership.orders import Orders, Value, settings_at
from peer.errors import RunFileError
from peer.run_file.reading import with_settings
from peer.run_file.sections import End as EndSettings
from peer.run_file.sections import RunFile

AMENDABLE = (
    "end.date",
    "end.tokens",
    "inner.learning_rate",
    "limits.step_tokens_max",
    "outer.codec",
    "outer.codec_down",
    "outer.codec_up",
    "outer.steps_per_cycle",
)
"""Settings that an owner may change while the run goes on."""


def effective(run: RunFile, orders: Orders, version: int) -> RunFile:
    """The run file of rounds that make this version. Raises ``RunFileError`` (see ``objection``).

    A run that is ordered to end at a moment has it for its date.
    """
    settings: dict[str, Value] = dict(settings_at(orders, version))
    if orders.end is not None and orders.end.at is not None:
        settings["end.date"] = date_value(orders.end.at)
    return with_settings(run, settings) if settings else run


def date_value(at: int) -> str:
    """A Unix time as a value of ``end.date``."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def objection(run: RunFile, orders: Orders) -> str | None:
    """Reason why no peer of this run can follow the orders; ``None`` if all can."""
    fragments = run.outer.fragments + (run.outer.buffers == "mean")
    if orders.rollback is not None and len(orders.rollback.roots) > fragments:
        return f"{len(orders.rollback.roots)} roots; the run has at most {fragments} fragments"
    if len(orders.attested) > fragments:
        return f"{len(orders.attested)} attested states; the run has at most {fragments} fragments"
    for amendment in orders.amendments:
        if (refusal := refused(dict(amendment.settings))) is not None:
            return refusal
    for version in [0, *(each.version for each in orders.amendments)]:
        try:
            effective(run, orders, version)
        except (RunFileError, OverflowError, ValueError) as error:
            return str(error)
    return None


def past(settings: Mapping[str, Value], now: datetime) -> str | None:
    """Reason why the date among these settings would end any run at once; ``None``: it would not.

    A value that is no date is left to ``objection``.
    """
    try:
        date = msgspec.convert({"date": settings.get("end.date")}, EndSettings).date
    except msgspec.ValidationError:
        return None
    if date is None or date > now:
        return None
    return f"end.date is {date:%Y-%m-%dT%H:%M:%SZ}, which is past"


def spent(run: RunFile, settings: Mapping[str, Value], merged: int) -> str | None:
    """Reason why the budget among these settings would end a run with ``merged`` tokens at once;
    ``None``: it would not.

    Values that break a rule are left to ``objection``.
    """
    try:
        tokens = with_settings(run, settings).end.tokens
    except (RunFileError, OverflowError, ValueError):
        return None
    if "end.tokens" in settings and tokens != "unlimited" and tokens <= merged:
        return f"end.tokens is {tokens}, and {merged} tokens are merged already"
    return None


def refused(settings: Mapping[str, Value]) -> str | None:
    """Reason why the owner may not change one of these settings; ``None`` if it may."""
    for name in settings:
        if name not in AMENDABLE:
            return f"{name} cannot be amended; these can: {', '.join(AMENDABLE)}"
    return None
