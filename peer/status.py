"""The status of a peer, and the call that asks for it.

A status is a claim, like a peer's record: it is shown to people, and nothing relies on it.
``shoal status`` asks every peer, and asks those that answered for peers out of its reach. Agents
ask a few peers regularly, which also spreads the newest held-out loss.
"""

from __future__ import annotations

import math
from datetime import datetime
from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

from dht.host import Host
from dht.identity import PeerId, RunId
from peer.calls import Call
from peer.quantities import loss_at

VERSION = 1

TEXT_MAX = 64
BANNED_MAX = 64
Text: TypeAlias = Annotated[str, Meta(max_length=TEXT_MAX)]
Count: TypeAlias = Annotated[int, Meta(ge=0, lt=2**62)]
Number: TypeAlias = Annotated[float, Meta(ge=-1e18, le=1e18)]


class HeldOut(Struct, frozen=True, array_like=True):
    """A held-out loss, measured at a version of the first fragment by ``peer``."""

    version: Count
    loss: Number
    peer: Annotated[str, Meta(max_length=64)]
    tokens: Count
    """Merged tokens of all peers when it was measured."""

    def __str__(self) -> str:
        return loss_at(self.loss, self.tokens)


class Status(Struct, frozen=True, array_like=True, kw_only=True):
    """Figures of one peer: training, rounds, traffic, and the fate of its tokens."""

    version: Annotated[int, Meta(ge=0, le=2**31)] = VERSION
    peer: Text
    name: Text
    role: Text
    phase: Text
    steps: Count
    tokens: Count
    """Steps and tokens since the trainer was started."""
    step_time_s: Annotated[float, Meta(ge=0, le=1e9)]
    loss: Number | None
    held_out: HeldOut | None
    global_tokens: Count
    """Merged tokens of all peers."""
    versions: Annotated[tuple[Count, ...], Meta(max_length=4096)]
    """Versions of the fragments' states; empty before there are any."""
    staleness: Count
    """Largest number of versions by which the trainer's parameters are behind a state."""
    peers: Count
    fates: Annotated[dict[Text, Number], Meta(max_length=32)]
    rounds: Count
    rounds_missed: Count
    bytes_sent: Count
    bytes_received: Count
    blocked_s: Annotated[float, Meta(ge=0, le=1e18)]
    up_s: Annotated[float, Meta(ge=0, le=1e18)]
    reachable: bool | None
    layout: Text = ""
    """Hash of the layout, in hex. Peers with another layout cannot train with this one."""
    model: Text = ""
    """``peer.storage.outer_state.model_name`` of the states.

    It differs between peers at equal versions if their histories differ.
    """
    founding: Text = ""
    """``peer.storage.outer_state.founding_name`` of the states: equal for one history of a run."""
    ended_at: Annotated[float, Meta(ge=0, le=2.5e11)] | None = None
    """Wall-clock time at which the run ended; ``None`` while it goes on."""
    rest: Text | None = None
    """The reason why the trainer rests; ``None`` if it does not."""
    limits: Annotated[tuple[Text, ...], Meta(max_length=16)] = ()
    """Limits set by the owner of the machine, in words."""
    paths: Annotated[dict[Text, Count], Meta(max_length=8)] = {}
    """Number of peers by the best path for bulk data: direct, punched or relayed."""
    relayed_bytes: Count = 0
    """Bulk data passed on between other peers."""
    frozen: Text = ""
    """Hash of the parameters that are not exchanged; empty if they are not known."""
    merging: Text = ""
    """Codecs and cycle of its rounds, where the run lets them follow the line, and why."""
    cycle_steps: Count = 0
    """The cycle in steps of the median peer, where it may change; else 0."""
    banned: Annotated[tuple[Text, ...], Meta(max_length=BANNED_MAX)] = ()
    """Peers of which this one has seen it proved that they lied."""
    directive: Count = 0
    """Number of the owner's directive that the peer follows; 0: none."""
    jumps_judged: Count = 0
    """Times that the loss gate judged states of others that the peer had taken."""
    jumps_refused: Count = 0
    """Times that the peer went back, because its held-out loss had risen."""
    batches: Text = ""
    """Digest of its program's first batch, or of its random seed; empty: in an own order."""
    alone_until: Annotated[float, Meta(ge=0, le=2.5e11)] | None = None
    """Unix time from which it merges by itself, as it has lost sight of all others that train."""


def merges_alone_from(at: float) -> str:
    """``merges by itself from 12:04 on``: the first minute, in local time, after ``at``."""
    begins = datetime.fromtimestamp(60 * math.ceil(at / 60)).astimezone()
    is_today = begins.date() == datetime.now().astimezone().date()
    return f"merges by itself from {begins:%H:%M}{'' if is_today else f' of {begins:%Y-%m-%d}'} on"


def state_in_words(role: str, phase: str, *, rests: bool = False) -> str:
    """The state of a peer, in the same word on every screen and page."""
    if phase in ("connecting", "fetching", "founding"):
        return "joining"
    if phase != "ready":
        return phase
    if role == "learner":
        return "resting" if rests else "training"
    return "keeping" if role == "keeper" else role


def _check(status: Status) -> None:
    shown = (status.peer, status.name, status.role, status.phase, status.rest or "", status.merging)
    hashes = (status.layout, status.model, status.founding, status.frozen, status.batches)
    measured = () if status.held_out is None else (status.held_out.peer,)
    lists = (*status.fates, *status.limits, *status.paths, *status.banned)
    for text in (*shown, *hashes, *measured, *lists):
        if not text.isprintable():  # it is shown on terminals
            raise ValueError("a status contains characters that cannot be printed")


CALL: Call[Status] = Call("/shoal/status/1", Status, "a status", 64 << 10, _check)
"""In particular: the peer that it is about, unless that is the one asked."""


async def ask(
    host: Host, peer: PeerId, run: RunId, *, timeout_s: float, about: PeerId | None = None
) -> Status:
    """Ask one peer about itself, or ``about`` another one, which it asks in turn.

    A peer behind a router is out of reach for a stranger, and in reach for the peers that it has
    dialled. Raises ``DhtError``, or ``ValueError`` for an invalid answer.
    """
    status = await CALL.ask(host, peer, run, about or "", timeout_s=timeout_s)
    if status.peer != (about or peer):
        raise ValueError(f"this is the status of {status.peer}, not of {about or peer}")
    return status
