"""``shoal run amend``, ``end``, ``pause``, ``attest`` and ``rollback``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated

import typer
from typer import Option

from dht.membership.orders import (
    FRAGMENTS_MAX,
    Attested,
    End,
    Rollback,
    Root,
    Value,
    amended,
    settings_at,
)
from peer.calls import Kept
from peer.cli.application import Json
from peer.errors import Declined
from peer.extras.orders.directives import Before, KeyFile, Seeds, Where, direct


def chosen(told: Sequence[Sequence[Kept]], fragments: int) -> tuple[tuple[Kept, int], ...] | None:
    """The newest state of each fragment that most peers hold alike, with their number.

    ``told``: the answer of each peer that keeps states. ``None`` if there is a fragment without.
    """
    holders: dict[Kept, int] = {}
    for states in told:
        for kept in set(states):
            holders[kept] = holders.get(kept, 0) + 1
    attested = []
    for fragment in range(fragments):
        able = [
            (kept.version, count, kept.digest, kept)
            for kept, count in holders.items()
            if kept.fragment == fragment and 2 * count > len(told)
        ]
        if not able:
            return None
        _, count, _, kept = max(able, key=lambda each: each[:3])
        attested.append((kept, count))
    return tuple(attested)


runs = typer.Typer()

AMENDED_IN = "+20"
TO_END = "to end the run: shoal run end"

AtVersion = Annotated[
    str | None,
    Option(
        "--at",
        help="Version of the fragments, such as 800, or +20 for so many after the newest one.",
        metavar="VERSION",
    ),
]


@runs.command("amend")
def amend(
    where: Where,
    settings: Annotated[
        list[str],
        Option("--set", help="Setting and value; repeatable.", metavar="SECTION.NAME=VALUE"),
    ],
    at: AtVersion = AMENDED_IN,
    key: KeyFile = None,
    seed: Seeds = None,
    as_json: Json = False,
) -> int:
    """Change settings of your run while it goes on, at all peers from the same version on.

    Settings that can change: inner.learning_rate, end.tokens, end.date, outer.steps_per_cycle,
    outer.codec, outer.codec_up, outer.codec_down and limits.step_tokens_max.

    Example: shoal run amend my.run.toml --set inner.learning_rate=5e-4 --at +20
    """
    from peer.rules.amendments import past, refused, spent
    from peer.run_file.reading import wrong_values

    changes = dict(_setting(text) for text in settings)
    if (reason := refused(changes)) is not None:
        raise typer.BadParameter(reason)
    if faults := wrong_values(changes):
        raise typer.BadParameter(str(faults[0]))
    if (reason := past(changes, datetime.now(UTC))) is not None:
        raise typer.BadParameter(f"{reason}; {TO_END}")
    _check_version(at)

    def change(before: Before) -> Before:
        version = version_of(at or AMENDED_IN, before.newest)
        if settings_at(before.orders, version).items() >= changes.items():
            return before
        if reason := spent(before.found.run, changes, before.seen.global_tokens):
            raise ValueError(f"{reason}; {TO_END}")
        return before.with_orders(amendments=amended(before.orders, version, changes))

    return direct(where, change, key=key, seeds=seed, as_json=as_json)


@runs.command("end")
def end(
    where: Where,
    at: AtVersion = None,
    key: KeyFile = None,
    seed: Seeds = None,
    as_json: Json = False,
) -> int:
    """End your run: now, with a last round of all peers, or at a version.

    Example: shoal run end my.run.toml --at +10
    """

    _check_version(at)

    def change(before: Before) -> Before:
        if at is not None:
            wanted = End(version=version_of(at, before.newest))
        elif before.orders.end is not None and before.orders.end.at is not None:
            return before
        else:
            wanted = End(at=int(time.time()))
        return before.with_orders(end=wanted, paused=False)

    return direct(where, change, key=key, seeds=seed, as_json=as_json, to_ended=True)


@runs.command("pause")
def pause(
    where: Where,
    lift: Annotated[bool, Option("--lift", help="Let a paused run go on instead.")] = False,
    key: KeyFile = None,
    seed: Seeds = None,
    as_json: Json = False,
) -> int:
    """Pause your run: no round begins, and training rests. Work that is not merged yet is kept.

    Example: shoal run pause my.run.toml; later: shoal run pause my.run.toml --lift
    """

    return direct(
        where,
        lambda before: before.with_orders(paused=not lift),
        key=key,
        seeds=seed,
        as_json=as_json,
    )


@runs.command("attest")
def attest(where: Where, key: KeyFile = None, seed: Seeds = None, as_json: Json = False) -> int:
    """Attest the newest state of your run that most of its peers keep.

    Peers take an attested state from anybody, keep it, and can go back to it: `shoal run rollback`.

    Example: shoal run attest my.run.toml
    """

    def change(before: Before) -> Before:

        answers = [states for states in before.kept.values() if states]
        if (count := before.seen.fragments) > FRAGMENTS_MAX:
            raise ValueError(
                f"the run has {count} fragments; the states of up to {FRAGMENTS_MAX} "
                "can be attested"
            )
        found = chosen(answers, count)
        if not found:
            raise Declined(
                nothing_to_attest(len(answers)),
                section="no-state-to-attest",
            )
        attested = tuple(Attested(kept.version, kept.lineage, kept.digest) for kept, _ in found)
        return before.with_orders(attested=attested)

    return direct(where, change, key=key, seeds=seed, as_json=as_json, asks_kept=True)


def nothing_to_attest(peers: int) -> str:
    """The reason, where so many peers keep good states."""
    lack = "no peer keeps a good state of each fragment yet"
    if peers:
        lack = f"most of the {peers} peers that keep good states have none in common"
    return f"{lack}; they keep every eighth version: try again when the run has made some more"


@runs.command("rollback")
def rollback(
    where: Where,
    again: Annotated[
        bool, Option("--again", help="Go back once more to a state that the run went back to.")
    ] = False,
    key: KeyFile = None,
    seed: Seeds = None,
    as_json: Json = False,
) -> int:
    """Take your run back to the state that you attested last. Later states are discarded.

    Example: shoal run rollback my.run.toml
    """

    def change(before: Before) -> Before:
        from averaging.history.manifest import root_lineage

        orders = before.orders
        if not orders.attested:
            raise Declined(
                "there is no attested state to go back to; `shoal run attest` attests one while "
                "the run is as it should be",
                section="nothing-attested",
            )
        versions = [each.version + 1 for each in orders.attested]
        done = orders.rollback
        if done is not None and [root.version for root in done.roots] == versions and not again:
            return before
        known = {
            (kept.fragment, kept.version, kept.lineage, kept.digest): kept.merged
            for states in before.kept.values()
            for kept in states
        }
        roots = []
        for fragment, each in enumerate(orders.attested):
            merged = known.get((fragment, each.version, each.lineage, each.digest))
            if merged is None:
                raise ValueError(
                    f"no peer on line keeps version {each.version} of fragment {fragment}, which "
                    "is attested; try again when one of those that were on line then is back"
                )
            lineage = root_lineage(each.lineage, merged, before.number)
            roots.append(Root(each.version + 1, lineage))
        return before.with_orders(rollback=Rollback(before.number, tuple(roots)))

    return direct(where, change, key=key, seeds=seed, as_json=as_json, asks_kept=True)


def _check_version(text: str | None) -> None:
    """Refuse what names no version, before peers are searched for."""
    if text is not None and not text.removeprefix("+").isdecimal():
        raise typer.BadParameter(f"--at is {text!r}; it is a version such as 800, or +20")


def version_of(text: str, newest: int) -> int:
    """The version that ``--at`` names. Raises ``ValueError`` for one that is over already."""
    number = text.removeprefix("+")
    if text.startswith("+"):
        return newest + max(1, int(number))
    if int(number) <= newest:
        raise ValueError(
            f"--at is {number}, and the run is at version {newest} already; name a later version, "
            "or +20 for twenty versions from now"
        )
    return int(number)


def _setting(text: str) -> tuple[str, Value]:
    name, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not name or not value:
        raise typer.BadParameter(f"--set is {text!r}; it is such as inner.learning_rate=5e-4")
    for kind in (int, float):
        try:
            return name, kind(value)
        except ValueError:
            continue
    return name, value.strip("\"'")
