"""Settings of a simulated swarm: one TOML file, in which every setting has a default.

``[outer]`` and ``[mixing]`` are those of a run file, and other settings that it has keep their
names. ``[peers]`` describes the participants, ``[problem]`` their training, ``[network]``,
``[churn]`` and ``[[event]]`` the conditions, ``[end]`` and ``[measure]`` duration and measurement.
Merge rules, codecs and groupings are given by name; every registered one can be used.
"""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct

from averaging.rules.due import DuePolicy
from averaging.rules.policy import RoundPolicy
from averaging.rules.probation import ProbationPolicy
from peer.agent.policies import merging_policy
from peer.errors import PeerError
from peer.run_file import merging
from peer.run_file.setting_rules import Findings, check_table

Share: TypeAlias = Annotated[float, Meta(ge=0.0, le=1.0)]
Positive: TypeAlias = Annotated[float, Meta(gt=0.0)]
Natural: TypeAlias = Annotated[int, Meta(ge=0)]
Count: TypeAlias = Annotated[int, Meta(ge=1)]
Range: TypeAlias = tuple[float, float]
Line: TypeAlias = tuple[Positive, Positive]


class BadExperiment(PeerError):
    """An experiment file, or a setting given by ``--set``, breaks a rule."""

    exit_code = 2
    problem: str
    message = "{problem}"


class _Table(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the file."""


class Peers(_Table, frozen=True, kw_only=True):
    """The participants."""

    count: Annotated[int, Meta(ge=1, le=20_000)] = 8
    step_time_s: Positive = 1.0
    speeds: Annotated[tuple[Positive, ...], Meta(min_length=1)] = (1.0,)
    """Factors of the step time, dealt to the peers in turn: [1, 1.18] makes half of them slower."""
    speed_spread: Annotated[float, Meta(ge=0.0, le=3.0)] = 0.0
    """Standard deviation of the logarithm of each peer's step time."""
    step_jitter: Share = 0.0
    """Standard deviation of a single step's time, as a share of the step time."""
    misses: Share = 0.0
    """Share of rounds for which a peer has nothing to offer; its work stays pending."""
    starts_within_s: Annotated[float, Meta(ge=0.0)] = 0.0
    """Peers start at random moments within this time; the first one starts at once."""
    liars: Share = 0.0
    """Share of the peers, the last ones by number, whose uploads are poison."""
    poison: Literal["sign", "noise", "drift"] = "sign"
    """Direction of their uploads (``peer.simulate.swarm.poison``)."""
    poison_length: Positive = 1.0
    """Norm of their uploads, as a multiple of that of the displacement that they really have."""
    exchanges_max: Count = 4
    """Maximum number of simultaneous exchanges of one peer."""
    snapshot_s: Range = (0.0, 0.0)
    """Range of the time that copying a fragment out takes a learner, drawn for each copy."""
    views: Count = 4
    """Number of different views of the membership, each with heartbeats at other moments."""


class ProblemChoice(_Table, frozen=True, kw_only=True):
    """The training problem (``peer.simulate.problems``), its optimizer and learning rate."""

    name: str = "quadratic"
    size: Count | None = None
    """Number of 8 x 16 tensors of ``quadratic``, or width of the text models."""
    optimizer: Literal["adamw", "muon"] | None = None
    """The inner optimizer of ``text_gpt``. Default: AdamW, which the other text model always has.
    """
    learning_rate: Positive | None = None
    momentum: Annotated[float, Meta(ge=0.0, lt=1.0)] | None = None
    """Momentum of Muon in ``text_gpt``, or beta1 of its AdamW."""
    batch: Count | None = None
    """Sequences of ``text_gpt``, or predictions of ``text_mlp``, in one step of a learner."""
    layers: Count | None = None
    """Blocks of ``text_gpt``."""
    length: Count | None = None
    """Tokens of each sequence of ``text_gpt``."""
    text: str | None = None
    """A pattern of text files that ``text_gpt`` learns from, such as corpus/**/*.txt. Default:
    Python's standard library, which a large swarm reads several times."""
    device: str | None = None
    """The device on which the learners of ``text_gpt`` compute, such as cuda."""
    precision: Literal["fp32", "bf16"] | None = None
    """Precision of their passes. Default: bf16 on a GPU, fp32 on a CPU."""
    warmup_share: Share = 0.0
    """Share of all tokens during which the learning rate rises from zero to its peak."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    final_fraction: Share = 0.1
    """Learning rate at the end of a decay, as a share of the peak."""

    def rate_at(self, share: float) -> float:
        """The share of the peak learning rate after a share of all tokens."""
        if share < self.warmup_share:
            return max(0.01, share / self.warmup_share)
        if self.decay == "constant":
            return 1.0
        left = min(1.0, (share - self.warmup_share) / max(1e-9, 1.0 - self.warmup_share))
        falling = 1.0 - left if self.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * left))
        return self.final_fraction + (1.0 - self.final_fraction) * falling


class Outer(merging.Outer, frozen=True, kw_only=True):
    """Merging and adoption, as in a run file. The rule and the first codecs may be a plugin's."""

    fragments: Count = 4
    merge: str = "mean"  # type: ignore[assignment]
    codec: str = "int4"  # type: ignore[assignment]
    codec_up: str | None = None  # type: ignore[assignment]
    codec_down: str | None = None  # type: ignore[assignment]
    missed: Literal["keep", "damp", "drop"] = "keep"
    """Share of work missing from a version that is offered again: all, half or none of it. A live
    peer keeps all; the other choices exist for comparison."""
    waits: bool = False
    """Stop a learner that has offered a fragment after ``overlap_steps``, until the round is
    over."""

    def __post_init__(self) -> None:
        if self.buffers != "own":
            raise ValueError(f"outer.buffers is {self.buffers!r}; simulated models have no buffers")


class Rounds(merging.Rounds, frozen=True, kw_only=True):
    """Forming and closing of rounds, as in a run file."""

    grouping: str = "halves"
    round_deadline_s: Positive = 180.0
    upload_s: Positive = 30.0
    scale_by_speed: bool = True
    called_share: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.5
    """Share of a cycle's steps after which a peer joins a round that another peer has called;
    1: only when it is due itself."""
    slice_bytes_min: Count = 256 << 10
    norm_max_ratio: Positive | None = None  # type: ignore[assignment]
    """An upload so many times longer than usual is left out, as in a run file; ``None``: nothing
    is, and nothing is measured."""
    spot_checks: Annotated[float, Meta(ge=0.0, le=24.0)] = 0.0
    """Contributions that each honest peer checks on their authors' data in a cycle
    (``averaging.audit.spot_checks``)."""
    probation_rounds: Natural = 0
    """Merges after which a newcomer counts, as in a run file (there 64, over 10 minutes). Each peer
    then judges all others by itself, which takes more time than a shared judgement."""
    probation_minutes: Annotated[float, Meta(ge=0.0)] = 0.0
    by_site: bool = True
    """Let peers of one site (``network.site_size``) reduce among themselves first, so that only
    one of them uses the shared line (``averaging.rules.sites``)."""


class Network(_Table, frozen=True, kw_only=True):
    """The network between the peers."""

    latency_s: Range = (0.01, 0.05)
    """Range of one-way latencies, drawn for each pair of peers."""
    jitter_s: Annotated[float, Meta(ge=0.0)] = 0.0
    mbit_s: Range = (100.0, 100.0)
    """Range of bandwidths in each direction, drawn log-uniformly for each peer."""
    lines: tuple[Line, ...] = ()
    """Bandwidths up and down, dealt to the peers in turn instead of ``mbit_s``; peers know them."""
    loss: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.0
    """Probability that a message breaks its connection."""
    silence_s: Positive = 10.0
    """Time after which the connections to a dead peer break."""
    site_size: Count = 1
    """Number of peers per site. They share one line to all others, and have lines of
    ``site_mbit_s`` among themselves."""
    site_mbit_s: Positive = 1000.0
    bulk_factor: Positive = 1.0
    """Factor on the size of all merged data, so that a small model stands for a large one. Traffic
    of joining is not scaled."""


class Churn(_Table, frozen=True, kw_only=True):
    """Random crashes and returns."""

    share_per_cycle: Share = 0.0
    """Mean share of the peers that crash during one cycle."""
    away_s: Positive = 60.0
    """Mean time until the return (exponential)."""
    returns: Literal["empty", "checkpoint", "never"] = "empty"
    """Return without a state, with the state before the crash, or not at all."""


class Event(_Table, frozen=True, kw_only=True):
    """An event that affects some peers at a given time."""

    kind: Literal["crash", "leave", "pause", "partition", "join"]
    """crash: return after ``lasts_s`` as in ``churn.returns``. leave: in order, as at Ctrl-C, and
    for good. pause: suspended for ``lasts_s``. partition: cut off from all other peers. join: first
    start."""
    at_s: Annotated[float, Meta(ge=0.0)]
    lasts_s: Annotated[float, Meta(ge=0.0)] = 0.0
    every_s: Annotated[float, Meta(ge=0.0)] = 0.0
    """Period of a repeated event; 0: once."""
    peers: Annotated[float, Meta(gt=0.0, le=1.0)] | list[int] = 0.5
    """Affected peers: the first share of all peers, or a list of numbers."""


class End(_Table, frozen=True, kw_only=True):
    """The end of the experiment: the first of these limits."""

    cycles: Positive = 40.0
    """Without ``tokens``: the tokens that all peers process in this number of cycles."""
    tokens: Count | None = None
    """Tokens of all peers together."""
    counts: Literal["merged", "processed"] = "merged"
    """Tokens that count, for the end and for the learning rate. They differ where work is
    dropped."""
    together: bool = False
    """Go on until all peers have one model, as a live run does that ends by tokens."""
    date_s: Positive | None = None
    """Virtual time of the run's date: from then on each peer makes a last round of each fragment,
    and the experiment goes on until all have one model. The other limits do not count."""
    time_s: Positive | None = None
    """Virtual time. Default: three times the duration of ``tokens`` without any waiting."""


class Measure(_Table, frozen=True, kw_only=True):
    """Measurements during the experiment."""

    every_cycles: Positive = 1.0
    peers_max: Natural = 4
    """Number of peers whose own parameters are evaluated each time, besides the mean of all."""


class Experiment(_Table, frozen=True, kw_only=True):
    """All settings of one simulated swarm, except its seed."""

    name: str = "swarm"
    peers: Peers = Peers()
    problem: ProblemChoice = ProblemChoice()
    outer: Outer = Outer()
    rounds: Rounds = Rounds()
    mixing: merging.Mixing = merging.Mixing()
    network: Network = Network()
    churn: Churn = Churn()
    event: list[Event] = []
    end: End = End()
    measure: Measure = Measure()

    @property
    def cycle_s(self) -> float:
        """Duration of a cycle of a peer with factor 1."""
        return self.outer.steps_per_cycle * self.peers.step_time_s

    def policy(self) -> RoundPolicy:
        """The policy of the round machines."""
        outer, rounds = self.outer, self.rounds
        return replace(
            merging_policy(
                outer,
                rounds,
                self.mixing,
                upload_s=rounds.upload_s,
                muon=self.problem.optimizer == "muon",
            ),
            due=DuePolicy(
                cycle_steps=outer.steps_per_cycle,
                fragments=outer.fragments,
                scale_by_speed=rounds.scale_by_speed,
                called_share=rounds.called_share,
            ),
            grouping=rounds.grouping,
            slice_bytes_min=rounds.slice_bytes_min,
            probation=ProbationPolicy(
                rounds=rounds.probation_rounds, seconds=60.0 * rounds.probation_minutes
            ),
            # The machines know the small model: to them all lines are so many times slower.
            slow_link_bytes_s=RoundPolicy().slow_link_bytes_s / self.network.bulk_factor,
        )

    def with_settings(self, settings: Mapping[str, Any]) -> Experiment:
        """A copy with some settings replaced, by full names such as ``rounds.quorum``."""
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
    """Split at commas outside of brackets and quotes."""
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
    """Parse a value as TOML does; a bare word is a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _converted(table: dict[str, Any]) -> Experiment:
    unknown = [name for name in settings_of(table) if name not in KNOWN]
    if unknown:
        raise BadExperiment(_unknown(unknown[0]))
    found = Findings(lines=None)
    check_table(table, Experiment, (), found)
    if found.faults:
        raise BadExperiment("; ".join(str(fault) for fault in found.faults))
    try:
        return msgspec.convert(table, Experiment)
    except msgspec.ValidationError as error:  # a rule of several settings, in words of its table
        raise BadExperiment(str(error).partition(" - at `$")[0]) from error


def settings_of(table: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Full names of the settings in a table. The list ``[[event]]`` is one setting."""
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from settings_of(value, f"{path}{name}.")
        else:
            yield f"{path}{name}"


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(name, KNOWN, n=3, cutoff=0.4)
    section = name.split(".")[0] + "."
    known = near or [known for known in KNOWN if known.startswith(section)]
    if not known:
        sections = dict.fromkeys(known.partition(".")[0] for known in KNOWN)
        return f"{name} is no setting of an experiment, which has: {', '.join(sections)}"
    return f"{name} is no setting of an experiment; did you mean one of: {', '.join(known)}"


KNOWN: tuple[str, ...] = tuple(settings_of(msgspec.to_builtins(Experiment())))
"""The full name of every setting."""
