"""Orders of a run's owner: what a directive says besides bans. Pure.

A directive holds all orders that are in force, so that only the last one has to be known:

    paused      no new rounds; trainers rest, and keep their pending work
    end         the version, or the moment, at which the run ends
    amendments  settings of the run file that change, each from a version on
    attested    states that peers take without a certificate: version, lineage, digest of the bits
    rollback    the states with which the run goes on instead of those that came after them

Versions are those that a round makes, and every fragment counts its own. The limits of settings are
not decided here (``peer.rules.amendments``), nor the right to sign
(``dht.membership.credentials``).
"""

from __future__ import annotations

import math
from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

FRAGMENTS_MAX = 40
"""Fragments of a run whose states can be attested: so many fit into one directive."""

AMENDMENTS_MAX = 8
SETTINGS_MAX = 8
DIGEST_BYTES = 32

Number: TypeAlias = Annotated[int, Meta(ge=1, le=2**32)]
Version: TypeAlias = Annotated[int, Meta(ge=0, lt=2**53)]
Moment: TypeAlias = Annotated[int, Meta(ge=0, lt=2**40)]
Digest: TypeAlias = Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
Name: TypeAlias = Annotated[str, Meta(pattern=r"^[a-z_]{1,24}\.[a-z_]{1,32}\Z")]
Text: TypeAlias = Annotated[str, Meta(max_length=40)]
Value: TypeAlias = int | float | Text


class _Order(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A part of a directive."""


class End(_Order, frozen=True):
    """The end of the run: either of the two is set."""

    version: Version | None = None
    """The last version of each fragment."""

    at: Moment | None = None
    """Unix time, by the swarm's clock."""


class Amendment(_Order, frozen=True):
    """Settings that differ from those of the run file in rounds that make ``version`` or later."""

    version: Version
    settings: Annotated[tuple[tuple[Name, Value], ...], Meta(min_length=1, max_length=SETTINGS_MAX)]
    """Names such as ``inner.learning_rate`` with their values, in the order of the names."""


class Attested(_Order, frozen=True):
    """One fragment's state at one version."""

    version: Version
    lineage: Digest
    digest: Digest
    """Digest of its numbers (``averaging.history.manifest``)."""


class Root(_Order, frozen=True):
    """The first state of a fragment after a rollback: its numbers are those of an earlier one."""

    version: Version
    lineage: Digest


class Rollback(_Order, frozen=True):
    """The states that every history followed from now on grows out of, one for each fragment."""

    number: Number
    """The directive that ordered it first. Later ones repeat the order."""

    roots: Annotated[tuple[Root, ...], Meta(min_length=1, max_length=FRAGMENTS_MAX)]


class Orders(_Order, frozen=True, kw_only=True):
    """All orders in force."""

    paused: bool = False
    end: End | None = None
    amendments: Annotated[tuple[Amendment, ...], Meta(max_length=AMENDMENTS_MAX)] = ()
    """Amendments in ascending order of their versions. Where two change one setting, the later
    wins."""

    attested: Annotated[tuple[Attested, ...], Meta(max_length=FRAGMENTS_MAX)] = ()
    """The state of every fragment, in order; empty if none is attested."""

    rollback: Rollback | None = None


NONE = Orders()


def problem(orders: Orders) -> str | None:
    """Reason why these orders contradict themselves; ``None`` if they do not."""
    end = orders.end
    if end is not None and (end.version is None) == (end.at is None):
        return "an end is either a version or a moment"
    versions = [each.version for each in orders.amendments]
    if versions != sorted(set(versions)):
        return "the amendments are not in ascending order of their versions"
    for each in orders.amendments:
        names = [name for name, _ in each.settings]
        if names != sorted(set(names)):
            return "the settings of an amendment are not in ascending order"
        for name, value in each.settings:
            if isinstance(value, float) and not math.isfinite(value):
                return f"{name} is {value}; it is finite"
            if isinstance(value, str) and not value.isprintable():  # it is shown on terminals
                return f"{name} contains characters that cannot be printed"
    return None


def settings_at(orders: Orders, version: int) -> dict[str, Value]:
    """Settings that differ from the run file's in a round that makes ``version``."""
    return {
        name: value
        for each in orders.amendments
        if each.version <= version
        for name, value in each.settings
    }


def amended(orders: Orders, version: int, settings: dict[str, Value]) -> tuple[Amendment, ...]:
    """The amendments with these settings from ``version`` on. Raises ``ValueError`` for too many.

    Amendments at later versions give way where they change the same setting: the new order is the
    owner's last word.
    """
    kept: dict[int, dict[str, Value]] = {}
    for each in orders.amendments:
        later = {
            name: value
            for name, value in each.settings
            if each.version < version or name not in settings
        }
        if later:
            kept[each.version] = later
    kept[version] = kept.get(version, {}) | settings
    if len(kept) > AMENDMENTS_MAX:
        kept = _united(kept, AMENDMENTS_MAX)
    for at, each_settings in kept.items():
        if len(each_settings) > SETTINGS_MAX:
            raise ValueError(
                f"{len(each_settings)} settings change at version {at}; at most {SETTINGS_MAX} can"
            )
    return tuple(Amendment(at, tuple(sorted(each.items()))) for at, each in sorted(kept.items()))


def _united(kept: dict[int, dict[str, Value]], most: int) -> dict[int, dict[str, Value]]:
    """The oldest amendments as one, at the last of their versions: they are in force by then."""
    versions = sorted(kept)
    oldest, rest = versions[: len(versions) - most + 1], versions[len(versions) - most + 1 :]
    united: dict[str, Value] = {}
    for version in oldest:
        united |= kept[version]
    return {oldest[-1]: united} | {version: kept[version] for version in rest}


def words(orders: Orders) -> list[str]:
    """The orders for people, each in a few words."""
    told = []
    if orders.paused:
        told.append("paused")
    if orders.end is not None:
        end = orders.end
        told.append("ends now" if end.version is None else f"ends at version {end.version}")
    for each in orders.amendments:
        changes = ", ".join(f"{name} = {value}" for name, value in each.settings)
        told.append(f"from version {each.version}: {changes}")
    if orders.attested:
        told.append(f"attested {_versions([each.version for each in orders.attested])}")
    if orders.rollback is not None:
        roots = [root.version for root in orders.rollback.roots]
        told.append(f"rolled back by directive {orders.rollback.number} to {_versions(roots)}")
    return told


def _versions(versions: list[int]) -> str:
    first, last = min(versions), max(versions)
    return f"version {first}" if first == last else f"versions {first} to {last}"
