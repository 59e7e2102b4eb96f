"""What a simulated swarm is like: one TOML file, every setting with a default.

Names are those of a run file where it has them. ``[peers]`` says who takes part, ``[problem]``
what they train, ``[outer]``, ``[rounds]`` and ``[mixing]`` how, ``[network]``, ``[churn]`` and
``[[event]]`` in which weather, ``[end]`` and ``[measure]`` for how long and how it is looked at.
Merge rules, codecs and groupings are names: whatever is registered can be used.
"""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct

from averaging.rules.due import DuePolicy
from averaging.rules.mixing import MixingPolicy
from averaging.rules.policy import RoundPolicy
from averaging.rules.quorum import ALL, QuorumPolicy, Required
from peer.errors import PeerError

Share: TypeAlias = Annotated[float, Meta(ge=0.0, le=1.0)]
Positive: TypeAlias = Annotated[float, Meta(gt=0.0)]
Natural: TypeAlias = Annotated[int, Meta(ge=0)]
Count: TypeAlias = Annotated[int, Meta(ge=1)]
Range: TypeAlias = tuple[float, float]
Quorum: TypeAlias = (
    Annotated[int, Meta(ge=2)] | Annotated[float, Meta(gt=0.0, le=1.0)] | Literal["majority", "all"]
)


class BadExperiment(PeerError):
    """An experiment file, or a setting given beside it, breaks a rule."""

    exit_code = 2

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem

    def __str__(self) -> str:
        return self.problem


class _Table(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the file."""


class Peers(_Table, frozen=True, kw_only=True):
    """Who takes part."""

    count: Annotated[int, Meta(ge=1, le=20_000)] = 8
    step_time_s: Positive = 1.0
    speeds: Annotated[tuple[Positive, ...], Meta(min_length=1)] = (1.0,)
    """Factors of the step time, dealt to the peers in turn: [1, 1.18] is half of them slower."""
    speed_spread: Annotated[float, Meta(ge=0.0, le=3.0)] = 0.0
    """Each peer's step time also varies log-normally by this much."""
    step_jitter: Share = 0.0
    """Each single step varies by this share (standard deviation)."""
    misses: Share = 0.0
    """Of the rounds a peer misses so many: it has nothing to offer, and its work stays pending."""
    starts_within_s: Annotated[float, Meta(ge=0.0)] = 0.0
    """Peers begin at random moments within so long; the first at once."""
    exchanges_max: Count = 4
    """With so many rounds exchanging at once a peer begins nothing new."""
    views: Count = 4
    """Peers hear of others by so many different heartbeats, so their views differ."""


class ProblemChoice(_Table, frozen=True, kw_only=True):
    """What they train: ``peer.lab.simulate.problems.problem``."""

    name: str = "quadratic"
    size: Count | None = None
    """Quadratic: how many 8 x 16 tensors. text_mlp: the width."""
    learning_rate: Positive | None = None
    warmup_share: Share = 0.0
    """Of the end's tokens: the learning rate rises from zero to its peak."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    final_fraction: Share = 0.1
    """Rate at the end, as a share of the peak, if it decays."""

    def rate_at(self, share: float) -> float:
        """The share of the peak learning rate when this share of the end's tokens is done."""
        if share < self.warmup_share:
            return max(0.01, share / self.warmup_share)
        if self.decay == "constant":
            return 1.0
        left = min(1.0, (share - self.warmup_share) / max(1e-9, 1.0 - self.warmup_share))
        falling = 1.0 - left if self.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * left))
        return self.final_fraction + (1.0 - self.final_fraction) * falling


class Outer(_Table, frozen=True, kw_only=True):
    """What peers make of each other's work: as in a run file."""

    fragments: Count = 4
    steps_per_cycle: Count = 24
    overlap_steps: Natural = 6
    learning_rate: Positive = 1.0
    momentum: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.5
    merge: str = "mean"
    codec: str = "int4"
    adoption: Literal["carry", "replace", "blend"] = "carry"
    blend_alpha: Share = 0.5
    missed: Literal["keep", "damp", "drop"] = "keep"
    """What becomes of work that a version came without: all, half or none of it is offered again.
    A live peer keeps it; the others are there to be compared."""
    waits: bool = False
    """A learner that offered a fragment stops after ``overlap_steps`` until the round is over."""


class Rounds(_Table, frozen=True, kw_only=True):
    """When a round may close: as in a run file."""

    group_size: Annotated[int, Meta(ge=2, le=64)] = 16
    grouping: str = "halves"
    quorum: Quorum = "majority"
    grace: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.8
    quorum_deadline_s: Positive = 30.0
    round_deadline_s: Positive = 180.0
    upload_s: Positive = 30.0
    stale_max: Natural = 8
    scale_by_speed: bool = True
    called_share: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.5
    """Of its steps: who has made so many joins a round when it is called; 1: only who is due."""
    slice_bytes_min: Count = 256 << 10
    alone_s: Positive = 600.0
    by_site: bool = True
    """Peers at one place (``network.site_size``) reduce among themselves first, and one of them
    crosses the line that they share: ``averaging.rules.sites``."""


class Mixing(_Table, frozen=True, kw_only=True):
    """What rounds do in a swarm of several groups: ``averaging.rules.mixing``."""

    every: Natural = 1
    """Slow weights are mixed at every so many versions; 0: never."""
    dispersion_max: Positive | None = None
    """Mix only when a peer is about to be further than this from its group."""
    theta: str = "f32"
    momentum: str = "f16"


class Network(_Table, frozen=True, kw_only=True):
    """The lines between them."""

    latency_s: Range = (0.01, 0.05)
    """One way; each pair has its own."""
    jitter_s: Annotated[float, Meta(ge=0.0)] = 0.0
    mbit_s: Range = (100.0, 100.0)
    """Of each peer's line, both ways; log-uniform between these."""
    loss: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.0
    """A connection breaks with a message on it."""
    silence_s: Positive = 10.0
    site_size: Count = 1
    """So many peers, next to each other by number, are at one place: they share the line to all
    others, and have one of ``site_mbit_s`` each between themselves."""
    site_mbit_s: Positive = 1000.0
    bulk_factor: Positive = 1.0
    """What is merged travels as if it were so many times as large: a small model stands for a large
    one. Catching up and joining do not count so."""


class Churn(_Table, frozen=True, kw_only=True):
    """Peers that leave without a word, and come back."""

    share_per_cycle: Share = 0.0
    """Of the peers, on average, in the time in which every fragment is merged once."""
    away_s: Positive = 60.0
    """On average (exponential)."""
    returns: Literal["empty", "checkpoint", "never"] = "empty"
    """With nothing but their data, with the state they had, or not at all."""


class Event(_Table, frozen=True, kw_only=True):
    """Something that happens to some peers at a certain time."""

    kind: Literal["crash", "pause", "partition", "join"]
    """crash: gone, back after ``lasts_s`` as ``churn.returns`` says. pause: asleep for so long.
    partition: cut off from the others. join: they begin only then."""
    at_s: Annotated[float, Meta(ge=0.0)]
    lasts_s: Annotated[float, Meta(ge=0.0)] = 0.0
    every_s: Annotated[float, Meta(ge=0.0)] = 0.0
    """Again and again; 0: once."""
    peers: Annotated[float, Meta(gt=0.0, le=1.0)] | list[int] = 0.5
    """The first share of them, or these by number."""


class End(_Table, frozen=True, kw_only=True):
    """When it is over: at the first of these."""

    cycles: Positive = 40.0
    """If ``tokens`` is not set: as many as everybody makes in so many cycles."""
    tokens: Count | None = None
    """Of all peers."""
    counts: Literal["merged", "processed"] = "merged"
    """Which tokens: the learning rate follows the same. Where work is dropped there are more of
    these than of those."""
    together: bool = False
    """It goes on until all stand on one model, as a live run does that ends by tokens."""
    time_s: Positive | None = None
    """Of virtual time. Not set: three times what ``tokens`` take if nobody ever waits."""


class Measure(_Table, frozen=True, kw_only=True):
    """How it is looked at."""

    every_cycles: Positive = 1.0
    peers_max: Natural = 4
    """Peers whose own parameters are evaluated each time, beside the mean of all."""


class Experiment(_Table, frozen=True, kw_only=True):
    """One simulated swarm, but for the seed."""

    name: str = "swarm"
    peers: Peers = Peers()
    problem: ProblemChoice = ProblemChoice()
    outer: Outer = Outer()
    rounds: Rounds = Rounds()
    mixing: Mixing = Mixing()
    network: Network = Network()
    churn: Churn = Churn()
    event: list[Event] = []
    end: End = End()
    measure: Measure = Measure()

    @property
    def cycle_s(self) -> float:
        """How long a cycle of a peer of speed 1 takes."""
        return self.outer.steps_per_cycle * self.peers.step_time_s

    def policy(self) -> RoundPolicy:
        """How rounds go, for the machine."""
        outer, rounds = self.outer, self.rounds
        return RoundPolicy(
            quorum=QuorumPolicy(
                required=_required(rounds.quorum),
                wait_s=rounds.quorum_deadline_s,
                gamma=rounds.grace,
                tau=float(outer.overlap_steps),
            ),
            due=DuePolicy(
                cycle_steps=outer.steps_per_cycle,
                fragments=outer.fragments,
                scale_by_speed=rounds.scale_by_speed,
                called_share=rounds.called_share,
            ),
            mixing=MixingPolicy(
                every=self.mixing.every,
                dispersion_max=self.mixing.dispersion_max,
                theta=self.mixing.theta,
                momentum=self.mixing.momentum,
            ),
            group_size=rounds.group_size,
            grouping=rounds.grouping,
            codec=outer.codec,
            merge=outer.merge,
            eta=outer.learning_rate,
            mu=outer.momentum,
            stale_max=rounds.stale_max,
            upload_s=rounds.upload_s,
            round_s=rounds.round_deadline_s,
            slice_bytes_min=rounds.slice_bytes_min,
            alone_s=rounds.alone_s,
        )

    def with_settings(self, settings: Mapping[str, Any]) -> Experiment:
        """With some settings replaced, by their full names, such as ``rounds.quorum``."""
        table = msgspec.to_builtins(self)
        for name, value in settings.items():
            *path, last = name.split(".")
            inner = table
            for step in path:
                if not isinstance(inner.get(step), dict):
                    raise BadExperiment(_unknown(name))
                inner = inner[step]
            if last not in inner:
                raise BadExperiment(_unknown(name))
            inner[last] = value
        return _converted(table)


def parse(text: str) -> Experiment:
    """Read an experiment's TOML. Raises ``BadExperiment``."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadExperiment(f"the experiment is not valid TOML: {error}") from error
    return _converted(table)


def sweep(settings: Sequence[str]) -> Iterator[dict[str, Any]]:
    """All combinations of ``key=v1,v2`` settings, each a mapping for ``with_settings``."""
    axes = []
    for setting in settings:
        name, equals, values = setting.partition("=")
        if not equals or not name or not values:
            raise BadExperiment(f"--set {setting!r} is not of the form key=value or key=v1,v2")
        axes.append([(name, _value(value)) for value in _split(values)])
    for combination in product(*axes):
        yield dict(combination)


def _split(values: str) -> list[str]:
    """At the commas that are not inside brackets or quotes."""
    parts, depth, quoted = [""], 0, ""
    for letter in values:
        if quoted:
            quoted = "" if letter == quoted else quoted
        elif letter in "\"'":
            quoted = letter
        elif letter in "[{":
            depth += 1
        elif letter in "]}":
            depth -= 1
        elif letter == "," and not depth:
            parts.append("")
            continue
        parts[-1] += letter
    return parts


def _value(text: str) -> Any:
    """As TOML has it; a bare word is a text."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _converted(table: Mapping[str, Any]) -> Experiment:
    unknown = [name for name in settings_of(table) if not _is_known(name)]
    if unknown:
        raise BadExperiment(_unknown(unknown[0]))
    try:
        return msgspec.convert(table, Experiment)
    except msgspec.ValidationError as error:
        raise BadExperiment(f"the experiment breaks a rule: {error}") from error


def settings_of(table: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Full names of what a table sets. Entries of ``[[event]]`` are one setting."""
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from settings_of(value, f"{path}{name}.")
        else:
            yield f"{path}{name}"


def _is_known(name: str) -> bool:
    return name in KNOWN


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(name, KNOWN, n=3, cutoff=0.4)
    section = name.split(".")[0] + "."
    known = near or [known for known in KNOWN if known.startswith(section)] or list(KNOWN)
    return f"{name} is no setting of an experiment; did you mean one of: {', '.join(known)}"


def _required(quorum: Quorum) -> Required:
    if quorum == "all":
        return ALL
    if quorum == "majority":
        return None
    return quorum


KNOWN: tuple[str, ...] = tuple(settings_of(msgspec.to_builtins(Experiment())))
"""The full name of every setting."""
