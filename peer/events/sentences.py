"""Sentences of the events whose wording depends on more than the values of their fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from peer.quantities import bar_text, bytes_text, count_text, loss_at, peers_text, tokens_left

Fields: TypeAlias = Mapping[str, Any]

Sentence: TypeAlias = str | Callable[[Fields], str]
"""A format string over the fields, or a function of the event. The subject, which is the peer that
the event happened to, is left out."""


class _Fields(dict[str, Any]):
    """Fields for ``str.format_map``: lists read as text, and a missing field as ``unknown``."""

    def __missing__(self, name: str) -> str:
        return "unknown"

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        return ", ".join(map(str, value)) if isinstance(value, list | tuple) else value


def worded(sentence: Sentence | None, event: Fields) -> str | None:
    """The sentence with the event's values; ``None`` if they are of other types than expected."""
    if sentence is None:
        return None
    try:
        if callable(sentence):
            return sentence(event)
        return sentence.format_map(_Fields(event))
    except (KeyError, TypeError, ValueError):
        return None  # a log of another version


def round_in_story(event: Fields) -> str:
    """Outcome of the round, its duration, and the bytes transferred."""
    where = f"fragment {event['fragment']} version {event['version']}"
    if event["outcome"] != "finished":
        return f"{where}: gave up after {event['seconds']:.1f} s, work kept ({event['reason']})"
    part = "with its work" if event.get("contributed") else "without its work"
    traffic = (
        f"{bytes_text(event.get('sent_bytes') or 0)} up, "
        f"{bytes_text(event.get('received_bytes') or 0)} down"
    )
    took = f"in {event['seconds']:.1f} s" if event["seconds"] >= 0.05 else "at once"
    return f"{where}: done {took} {part}; {traffic}"


def round_on_screen(event: Fields) -> str:
    """Version and number of peers, and whether this peer's work is part of it."""
    members = event.get("members")
    count = len(members) if isinstance(members, list) else members
    merged = "with my work" if event.get("contributed", True) else "without my work"
    peers = peers_text(count) if isinstance(count, int) else "peers unknown"
    return f"fragment {event['fragment']} version {event['version']}: {peers}, {merged}"


def offer_in_round(event: Fields) -> str:
    """Result of this peer's offer in a finished round, with the reason if it was left out."""
    where = f"fragment {event['fragment']} version {event['version']}"
    if not event.get("contributed"):
        why = event.get("left_out") or "not all of it reached every reducer in time"
        return f"not merged into {where}: {why}; kept for the next round"
    weight, count = event.get("weight"), event.get("contributors")
    if not isinstance(weight, float) or not isinstance(count, int):
        return f"merged into {where}"
    return f"merged into {where}, {weight:.0%} of the work of {peers_text(count)}"


def link_on_screen(event: Fields) -> str:
    """How others join. The model of some runs is in a program, which `shoal join` does not have."""
    by = "the same program and the link" if event.get("by_program") else "shoal join"
    return f"others join with: {by} '{event['link']}'"


def measured(event: Fields) -> str:
    """The held-out loss, and the run's tokens when it was measured."""
    return f"held-out loss {loss_at(float(event['loss']), int(event['tokens']))}"


def measured_by(event: Fields) -> str:
    return f"{measured(event)}, measured by {event['peer']}"


def phase_on_screen(event: Fields) -> str:
    """Text of the phase, with the progress of a download."""
    text, done = str(event["text"]), event.get("done")
    if event.get("name") == "leaving":
        return f"leaving: {text}"
    if event.get("name") == "fetching" and isinstance(done, float) and 0.0 < done < 1.0:
        return f"{text}: {bar_text(done)}"
    return text


def last_offers(event: Fields) -> str:
    """Say whether the pending tokens of a peer were merged before it left, or how many were not."""
    if event["merged"] and event.get("alone"):
        return "all that was pending is in this peer's own state: no other trained here to merge it"
    if event["merged"]:
        return "handed over: all that was pending is merged"
    tokens = count_text(float(event["tokens"]))
    return f"left before {tokens} tokens of this peer's work could be merged"


def handing_over(event: Fields) -> str:
    """Tokens that are pending as a peer begins to leave, and the time to have them merged."""
    left = tokens_left(float(event["tokens"]), float(event["seconds"]))
    return f"{left}; Ctrl-C again leaves them behind"


def resumed(event: Fields) -> str:
    """The field ``text`` if there is one, or ``training goes on``."""
    return str(event.get("text") or "training goes on")


def state_adopted(event: Fields) -> str:
    """Fragment and version, and whether merges were replayed or a state downloaded."""
    fragment, version = event["fragment"], event["version"]
    if event.get("rebased"):
        return (
            f"fragment {fragment}: took version {version} of the others in place of its own "
            f"version {event['from_version']}, from which they do not go on"
        )
    how = "replaying merges" if event.get("how") == "replay" else "downloading the state"
    return f"fragment {fragment}: caught up with version {version} by {how}"


_HOW_LOST = {
    "crash": "the process that did it ended before it was merged",
    "overwritten": "its parameters were set to a version of the others",
    "replaced": "its parameters were set to the merged version, as the run file says",
    "left": "it left before the work was merged",
}


def work_lost(event: Fields) -> str:
    """The number of tokens that a fragment lost, and how."""
    reason = str(event["reason"])
    how = f"{_HOW_LOST[reason]} ({reason})" if reason in _HOW_LOST else reason
    lost = count_text(float(event["tokens"]))
    return f"lost {lost} tokens of work in fragment {event['fragment']}: {how}"


def given_up(event: Fields) -> str:
    """The number of tokens that this peer lost by changing sides, and why it did."""
    return (
        f"lost {count_text(float(event['tokens']))} tokens of its work (discarded: apart): they "
        "were merged in versions from which the others do not go on"
    )


def reachability(event: Fields) -> str:
    """Say whether other peers can connect to this one, without addresses."""
    if event["reachable"]:
        return "other peers can connect to this one"
    if event["reachable"] is False:
        return (
            "other peers cannot connect to this one, as it is behind a router or firewall; "
            "it connects to them and takes full part"
        )
    return "it is not known any more whether other peers can connect to this one"


def peer_joined(event: Fields) -> str:
    """The name of the peer, or its id, and ``joined``."""
    return _about_peer(event, "joined")


def peer_left(event: Fields) -> str:
    """The name of the peer, or its id, and ``left``."""
    return _about_peer(event, "left")


def peer_lost(event: Fields) -> str:
    """The name of the peer, or its id, and ``lost``."""
    return _about_peer(event, "lost: no message from it for a while")


def _about_peer(event: Fields, what: str) -> str:
    if not event.get("name") and event.get("text"):
        return str(event["text"])  # a bootstrap peer knows the name only here
    return f"{event.get('name') or event['peer']} {what}"


def page(event: Fields) -> str:
    """Address of the page, and who can open it."""
    return f"web page: {page_text(event['url'])}"


def run_page(event: Fields) -> str:
    """Address of the run's public page, and who can open it."""
    return f"public page of the run: {page_text(event['url'])}"


def page_text(url: str) -> str:
    """An address, and whether others can open it."""
    host = urlsplit(url).hostname
    local = host == "localhost" or (host is not None and host.startswith(("127.", "::1")))
    return url if local else f"{url} (others who reach this machine can open it, too)"
