"""The figures of a peer: one struct, from the processes that know them to all who show them.

The training process knows ``Training`` and sends it to its agent. The agent adds what it knows,
sends the whole ``PeerStatus`` back, serves it on its page and under ``/metrics``, keeps it in the
peer's folder, and answers other peers with the part that is not ``PRIVATE``. So a figure is one
field here, with its text and unit; records of ``--json``, page, metrics and curves then have it,
and a line for people names it where it is to be shown.

To others a status is a claim, like a peer's record: it is shown to people, and nothing relies on
it. ``shoal status`` asks every peer, and asks those that answered for peers out of its reach.
Agents ask a few peers regularly, which also spreads the newest held-out loss.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, TypeAlias, get_type_hints

import msgspec
from msgspec import Meta, Struct

from dht.host import Host
from dht.identity import PeerId, RunId
from peer.calls import Call
from peer.quantities import bytes_text, count_text, duration_text, loss_at

VERSION = 1

WORDS_MAX = 300
BANNED_MAX = 64
Text: TypeAlias = Annotated[str, Meta(max_length=64)]
Words: TypeAlias = Annotated[str, Meta(max_length=WORDS_MAX)]
Count: TypeAlias = Annotated[int, Meta(ge=0, lt=2**62)]
Number: TypeAlias = Annotated[float, Meta(ge=-1e18, le=1e18)]
Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=1e18)]
UnixTime: TypeAlias = Annotated[float, Meta(ge=0, le=2.5e11)]


@dataclass(frozen=True, slots=True)
class Figure:
    """Marks a field or a property of a status as a figure."""

    text: str
    """The meaning of the figure, for the help of its metric."""
    unit: str = "int"
    """Its type or unit, as in ``peer.events.table``."""
    metric: str = ""
    """Its name under ``/metrics`` after ``shoal_``, where that is not the field's."""
    counts: bool = False
    """True if it only grows."""
    label: str = ""
    """Name of the metric's label, for a figure of several values."""
    words: str = "{}"
    """Its value on a line of figures, such as ``{} left``."""

    def family(self, name: str) -> str:
        """The name of the metric of the figure ``name``; empty for one that is a text."""
        return "" if self.unit == "text" else f"shoal_{self.metric or name}"

    def told(self, value: Any) -> str:
        """A value on a line of figures."""
        return self.words.format(IN_UNIT.get(self.unit, str)(value))


IN_UNIT: Mapping[str, Any] = {
    "tokens": count_text,
    "tokens/s": count_text,
    "bytes": bytes_text,
    "s": duration_text,
    "0 to 1": "{:.0%}".format,
    "°C": "{:.0f} °C".format,
}
"""Texts of values for people, by unit."""

PRIVATE = "private"
"""Marks a field that a peer does not tell other peers."""


class HeldOut(Struct, frozen=True, array_like=True):
    """A held-out loss, measured at a version of the first fragment by ``peer``."""

    version: Count
    loss: Number
    peer: Annotated[str, Meta(max_length=64)]
    tokens: Count
    """Merged tokens of all peers when it was measured."""

    def __str__(self) -> str:
        return loss_at(self.loss, self.tokens)


class Training(Struct, frozen=True, array_like=True, kw_only=True):
    """Figures that the training process knows. A peer that does not train has the defaults."""

    steps: Annotated[Count, Figure("Optimizer steps since the trainer started", counts=True)] = 0
    tokens: Annotated[
        Count,
        Figure(
            "Tokens trained on since the trainer started",
            "tokens",
            metric="trained_tokens",
            counts=True,
        ),
    ] = 0
    step_time_s: Annotated[
        float, Meta(ge=0, le=1e9), Figure("Median duration of a step", "s", metric="step_seconds")
    ] = 0.0
    loss: Annotated[Number | None, Figure("Last training loss", "float")] = None
    blocked_s: Annotated[
        Seconds,
        Figure("Time that rounds blocked the trainer", "s", metric="blocked_seconds", counts=True),
    ] = 0.0
    trained_s: Annotated[
        Seconds,
        PRIVATE,
        Figure("Time from the first step to the last", "s", metric="trained_seconds", counts=True),
    ] = 0.0
    blocked_p99_ms: Annotated[
        Seconds, PRIVATE, Figure("99th percentile of the time blocked at a step", "ms")
    ] = 0.0
    agent_restarts: Annotated[
        Count, PRIVATE, Figure("Agents that this trainer started anew", counts=True)
    ] = 0
    next_merge_s: Annotated[
        Seconds | None,
        PRIVATE,
        Figure(
            "Time until the next merge of a fragment is expected",
            "s",
            metric="next_merge_seconds",
            words="next merge in {}",
        ),
    ] = None
    share_of_peak: Annotated[
        Number | None,
        PRIVATE,
        Figure("Part of the device's peak that training uses", "0 to 1", words="{} of peak"),
    ] = None
    device_bytes: Annotated[
        Number | None,
        PRIVATE,
        Figure("Memory of the device in use", "bytes", words="{} on the device"),
    ] = None
    temperature_c: Annotated[
        Number | None,
        PRIVATE,
        Figure("Temperature of the device", "°C", metric="temperature_celsius"),
    ] = None
    preparing: Annotated[
        Words | None, PRIVATE, Figure("Preparation that will make it faster", "text")
    ] = None
    """``compiling for 12 s``"""

    @property
    def blocked_fraction(
        self,
    ) -> Annotated[float, Figure("Part of the training time that rounds blocked it", "float")]:
        return self.blocked_s / self.trained_s if self.trained_s else 0.0

    @property
    def tokens_per_s(
        self,
    ) -> Annotated[
        float | None,
        Figure("Speed of this peer", "tokens/s", metric="tokens_per_second", words="{} tokens/s"),
    ]:
        if not self.steps or not self.step_time_s:
            return None
        return self.tokens / self.steps / self.step_time_s


class PeerStatus(Training, frozen=True, array_like=True, kw_only=True):
    """Figures and state of one peer: training, rounds, traffic, and the fate of its tokens."""

    version: Annotated[int, Meta(ge=0, le=2**31)] = VERSION
    peer: Text = ""
    name: Text = ""
    role: Text = ""
    phase: Text = ""
    held_out: HeldOut | None = None
    """The newest published held-out loss, and the run's tokens when it was measured."""
    global_tokens: Annotated[
        Count,
        Figure(
            "Merged tokens of all peers", "tokens", counts=True, words="{} tokens merged by all"
        ),
    ] = 0
    tokens_goal: Annotated[
        Count | None, PRIVATE, Figure("Merged tokens at which the run ends", "tokens")
    ] = None
    """``None`` if it ends by date alone."""
    versions: Annotated[
        tuple[Count, ...],
        Meta(max_length=4096),
        Figure("Version of each fragment", "ints", metric="version", label="fragment"),
    ] = ()
    """Versions of the fragments' states; empty before there are any."""
    staleness: Annotated[
        Count, Figure("Versions that the trainer is behind, at most", metric="staleness_versions")
    ] = 0
    peers: Annotated[Count, Figure("Live peers of the run, this one included")] = 1
    fates: Annotated[
        dict[Text, Number],
        Meta(max_length=32),
        Figure("Tokens of this peer by fate", "tokens by fate", metric="tokens", label="fate"),
    ] = {}
    """All tokens of this peer ever: processed = merged + pending + discarded."""
    rounds: Annotated[Count, Figure("Finished rounds", counts=True)] = 0
    rounds_missed: Annotated[
        Count, Figure("Finished rounds without this peer's work", counts=True)
    ] = 0
    bytes_sent: Annotated[
        Count, Figure("Bytes sent since the start", "bytes", metric="sent_bytes", counts=True)
    ] = 0
    bytes_received: Annotated[
        Count,
        Figure("Bytes received since the start", "bytes", metric="received_bytes", counts=True),
    ] = 0
    up_s: Annotated[Seconds, Figure("Time since the agent started", "s", metric="up_seconds")] = 0.0
    reachable: bool | None = None
    layout: Text = ""
    """Hash of the layout, in hex. Peers with another layout cannot train with this one."""
    model: Text = ""
    """``peer.storage.outer_state.model_name`` of the states.

    It differs between peers at equal versions if their histories differ.
    """
    founding: Text = ""
    """``peer.storage.outer_state.founding_name`` of the states: equal for one history of a run."""
    ended_at: UnixTime | None = None
    """Wall-clock time at which the run ended; ``None`` while it goes on."""
    rest: Words | None = None
    """The reason why the trainer rests; ``None`` if it does not."""
    limits: Annotated[tuple[Words, ...], Meta(max_length=16)] = ()
    """Limits set by the owner of the machine, in words."""
    paths: Annotated[
        dict[Text, Count],
        Meta(max_length=8),
        Figure("Peers by path of bulk data", "peers by path", label="path"),
    ] = {}
    """Number of peers by the best path for bulk data: direct, punched or relayed."""
    relayed_bytes: Annotated[
        Count, Figure("Bulk data passed on between other peers", "bytes", counts=True)
    ] = 0
    frozen: Text = ""
    """Hash of the parameters that are not exchanged; empty if they are not known."""
    merging: Words = ""
    """Codecs and cycle of its rounds, where the run lets them follow the line, and why."""
    cycle_steps: Annotated[
        Count, Figure("Steps in which every fragment is merged once; 0: the run file says it")
    ] = 0
    """The cycle in steps of the median peer, where it may change; else 0."""
    banned: Annotated[tuple[Text, ...], Meta(max_length=BANNED_MAX)] = ()
    """Peers of which this one has seen it proved that they lied."""
    directive: Count = 0
    """Number of the owner's directive that the peer follows; 0: none."""
    orders: Annotated[tuple[Words, ...], PRIVATE] = ()
    """Orders of the run's owner in words, and the number of those that it bans."""
    jumps_judged: Annotated[
        Count, Figure("States of others judged by their held-out loss", counts=True)
    ] = 0
    """Times that the loss gate judged states of others that the peer had taken."""
    jumps_refused: Annotated[
        Count, Figure("States of others that raised it, taken back", counts=True)
    ] = 0
    """Times that the peer went back, because its held-out loss had risen."""
    batches: Text = ""
    """Digest of its program's first batch, or of its random seed; empty: in an own order."""
    alone_until: Annotated[
        UnixTime | None, Figure("Unix time from which it merges by itself", "Unix time")
    ] = None
    """``None``: it does, or others train that it sees."""
    link: Annotated[str, PRIVATE] = ""
    """Link for others to join by; empty while this peer knows no address of its own."""
    in_flight: Annotated[tuple[str, ...], PRIVATE] = ()
    """Fragments with the work in progress on them: ``fragment 2 exchanging``."""
    processor_share: Annotated[
        Number | None,
        PRIVATE,
        Figure(
            "Share of the machine's processors that this peer uses, daemon included",
            "0 to 1",
            words="{} of the processors",
        ),
    ] = None
    time_left_s: Annotated[
        Seconds | None,
        PRIVATE,
        Figure(
            "Time until the run ends, at the present speed of all peers",
            "s",
            metric="time_left_seconds",
            words="{} left",
        ),
    ] = None

    @property
    def state(self) -> str:
        """The state of the peer, in the same word on every screen and page."""
        return state_in_words(self.role, self.phase, rests=self.rest is not None)

    @property
    def held_out_loss(
        self,
    ) -> Annotated[float | None, Figure("Newest held-out loss known", "float")]:
        return None if self.held_out is None else self.held_out.loss

    @property
    def held_out_tokens(
        self,
    ) -> Annotated[int | None, Figure("Merged tokens of all peers when it was measured", "tokens")]:
        return None if self.held_out is None else self.held_out.tokens

    @property
    def percent(
        self,
    ) -> Annotated[float | None, Figure("Merged part of the run's tokens", "float")]:
        if self.tokens_goal is None:
            return None
        return min(100.0, 100.0 * self.global_tokens / self.tokens_goal)

    @property
    def resting(self) -> Annotated[bool, Figure("1: training rests, by the limits", "bool")]:
        return self.rest is not None

    def figures(self) -> dict[str, Any]:
        """All figures by name, as plain values."""
        values = {name: getattr(self, name) for name in FIGURES}
        return {n: list(v) if isinstance(v, tuple) else v for n, v in values.items()}

    def numbers(self) -> dict[str, float]:
        """The known figures that are one number each, for curves."""
        values = self.figures().items()
        return {n: float(v) for n, v in values if isinstance(v, int | float)}

    def words(self, names: tuple[str, ...]) -> list[str]:
        """The known ones of these figures in words: ``425 k tokens/s``."""
        known = ((name, getattr(self, name)) for name in names)
        return [FIGURES[name].told(value) for name, value in known if value is not None]

    def for_others(self) -> PeerStatus:
        """The status as this peer tells it others."""
        return msgspec.structs.replace(self, **NOT_TOLD)


def _marks(kind: type) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Names of fields and properties, with what their types are annotated with."""
    for name, hint in get_type_hints(kind, include_extras=True).items():
        yield name, getattr(hint, "__metadata__", ())
    for name, member in inspect.getmembers(kind):
        if isinstance(member, property):
            hint = get_type_hints(member.fget, include_extras=True)["return"]
            yield name, getattr(hint, "__metadata__", ())


FIGURES: Mapping[str, Figure] = {
    name: mark for name, marks in _marks(PeerStatus) for mark in marks if isinstance(mark, Figure)
}

NOT_TOLD: Mapping[str, Any] = {
    field.name: field.default
    for field in msgspec.structs.fields(PeerStatus)
    if PRIVATE in dict(_marks(PeerStatus))[field.name]
}
"""The defaults of the fields that are ``PRIVATE``."""


class PeerRow(Struct, frozen=True, array_like=True, kw_only=True):
    """A peer of the run in a table for people. ``None`` and empty texts are not known."""

    peer: str = ""
    name: str
    you: bool = False
    role: str | None = None
    state: str
    """``training``, ``joining``, ``gone`` ... (``state_in_words``)"""
    steps: int | None = None
    step_time_s: float | None = None
    loss: float | None = None
    version: int | None = None
    """The lowest version of its fragments."""
    behind: int | None = None
    """Versions by which it is behind the newest peer."""
    last: str | None = None
    """The result of its last offer, in words."""
    tokens: int | None = None
    """Its tokens that are merged."""
    share: float | None = None
    """Its part of all merged tokens, in thousandths that sum to 1 over all rows."""
    rounds: int | None = None
    bytes_sent: int | None = None
    seen_s: float | None = None
    """Time since the last sign of life."""


def merges_alone_from(at: float) -> str:
    """``merges by itself from 12:04 on``: the first minute, in local time, after ``at``."""
    begins = datetime.fromtimestamp(60 * math.ceil(at / 60)).astimezone()
    is_today = begins.date() == datetime.now().astimezone().date()
    return f"merges by itself from {begins:%H:%M}{'' if is_today else f' of {begins:%Y-%m-%d}'} on"


def time_left_s(
    *,
    tokens_left: float | None,
    step_tokens: float,
    step_times_s: Sequence[float],
    date_left_s: float | None,
) -> float | None:
    """Time until the run ends, by its tokens or its date; ``None`` if it has no end.

    ``step_times_s``: those of all peers that train, each on ``step_tokens`` tokens a step.
    """
    speed = sum(step_tokens / step_s for step_s in step_times_s if step_s > 0)
    ends = [] if date_left_s is None else [date_left_s]
    if tokens_left is not None and speed > 0:
        ends.append(tokens_left / speed)
    return max(0.0, min(ends)) if ends else None


def state_in_words(role: str, phase: str, *, rests: bool = False) -> str:
    """The state of a peer, in the same word on every screen and page."""
    if phase in ("connecting", "fetching", "founding"):
        return "joining"
    if phase != "ready":
        return phase
    if role == "learner":
        return "resting" if rests else "training"
    return "keeping" if role == "keeper" else role


def _check(status: PeerStatus) -> None:
    def check(value: Any) -> None:
        if isinstance(value, str) and not value.isprintable():  # it is shown on terminals
            raise ValueError("a status contains characters that cannot be printed")
        if isinstance(value, tuple | dict):
            for part in value:
                check(part)

    if not status.peer:
        raise ValueError("a status says of no peer what it is")
    for value in msgspec.structs.astuple(status):
        check(value)
    check("" if status.held_out is None else status.held_out.peer)


CALL: Call[str, PeerStatus] = Call("/shoal/status/1", PeerStatus, "a status", 64 << 10, _check)
"""The question of this call is the peer that it is about, unless that is the one asked."""


async def ask(
    host: Host, peer: PeerId, run: RunId, *, timeout_s: float, about: PeerId | None = None
) -> PeerStatus:
    """Ask one peer about itself, or ``about`` another one, which it asks in turn.

    A peer behind a router is out of reach for a stranger, and in reach for the peers that it has
    dialled. Raises ``DhtError``, or ``ValueError`` for an invalid answer.
    """
    status = await CALL.ask(host, peer, run, about or "", timeout_s=timeout_s)
    if status.peer != (about or peer):
        raise ValueError(f"this is the status of {status.peer}, not of {about or peer}")
    return status
