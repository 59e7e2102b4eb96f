"""Settings of a simulated swarm: one TOML file, in which every setting has a default.

``[outer]``, ``[rounds]`` and ``[mixing]`` are those of a run file, with a few more. ``[peers]``
describes the participants, ``[[peer]]`` those that differ from the others, ``[problem]`` their
training, ``[weather]`` and ``[[event]]`` the conditions, ``[end]`` and ``[measure]`` duration and
measurement. Merge rules, codecs, outer optimizers and problems are given by name: that
of one of ours, or ``module:name`` (``peer.simulate.names``).
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct

from averaging.rules.due import DuePolicy
from averaging.rules.policy import ProbationPolicy, RoundPolicy
from peer.agent.policies import merging_policy
from peer.errors import PeerError
from peer.run_file import merging
from peer.run_file.declaring import Findings, check_table
from peer.run_file.writing import setting_lines

SHARE = Meta(ge=0.0, le=1.0)
POSITIVE = Meta(gt=0.0)
NATURAL = Meta(ge=0)
COUNT = Meta(ge=1)
AT_LEAST_0 = Meta(ge=0.0)
UPLOAD_S = 30.0
"""Time after which a contribution that is still on its way is left out."""
NESTEROV = "nesterov"
MU_OF_OWN = 0.5
"""Mu of an outer optimizer of one's own, which does not read it but has a vector of memory."""

Range: TypeAlias = tuple[float, float]
Positive: TypeAlias = Annotated[float, POSITIVE]
Line: TypeAlias = tuple[Positive, Positive]
Count: TypeAlias = Annotated[int, COUNT]


class BadExperiment(PeerError):
    """An experiment file, or a setting given by ``--set``, breaks a rule."""

    exit_code = 2
    problem: str
    message = "{problem}"


class _Table(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the file."""


class Peers(_Table, frozen=True, kw_only=True):
    """The participants."""

    count: Annotated[int, Meta(ge=1, le=20_000), "Number of peers."] = 8
    step_time_s: Annotated[float, POSITIVE, "Seconds that a training step takes."] = 1.0
    speeds: Annotated[
        tuple[Positive, ...],
        Meta(min_length=1),
        "Factors of the step time, dealt to the peers in turn: [1, 1.18] makes half of them "
        "slower.",
    ] = (1.0,)
    speed_spread: Annotated[
        float,
        Meta(ge=0.0, le=3.0),
        "Standard deviation of the logarithm of each peer's step time.",
    ] = 0.0
    step_jitter: Annotated[
        float, SHARE, "Standard deviation of a single step's time, as a share of the step time."
    ] = 0.0
    misses: Annotated[
        float,
        SHARE,
        "Share of rounds for which a peer has nothing to offer; its work stays pending.",
    ] = 0.0
    liars: Annotated[
        float, SHARE, "Share of the peers, the last ones by number, whose uploads are poison."
    ] = 0.0
    poison: Annotated[
        Literal["sign", "noise", "drift"],
        "Direction of their uploads: back along the true displacement, a random one each time, or "
        "one that is the same for all of them and for the whole run.",
    ] = "sign"
    poison_length: Annotated[
        float,
        POSITIVE,
        "Norm of their uploads, as a multiple of that of the displacement that they really have.",
    ] = 1.0
    false_reducers: Annotated[
        float,
        SHARE,
        "Share of the peers, the last ones by number, that merge falsely: they pass the first "
        "contribution off as the mean. `rounds.audit_rate` finds them.",
    ] = 0.0


class Peer(_Table, frozen=True, kw_only=True):
    """Some peers that differ from the others."""

    peers: Annotated[
        Annotated[float, Meta(gt=0.0, le=1.0)] | list[int],
        "The peers: the first share of all peers, or a list of numbers.",
    ]
    speed: Annotated[
        Positive | None, "Factor of their step time; unset: as `peers.speeds` says."
    ] = None
    mbit_s: Annotated[
        Line | None, "Bandwidths up and down, which they know; unset: as `weather` says."
    ] = None
    clock_s: Annotated[float, "Seconds by which their clocks are ahead of the others'."] = 0.0


class ProblemChoice(_Table, frozen=True, kw_only=True):
    """The training problem, its optimizer and learning rate."""

    name: Annotated[
        str,
        "quadratic (cheap: for thousands of peers), text_gpt, or module:name of a "
        "problem of your own.",
    ] = "quadratic"
    size: Annotated[
        Count | None,
        "Number of 8 x 16 tensors of quadratic, or width of text_gpt; unset: the problem's "
        "own. So are all that follow.",
    ] = None
    optimizer: Annotated[
        Literal["adamw", "muon"] | None,
        "The inner optimizer of text_gpt; unset: AdamW.",
    ] = None
    learning_rate: Annotated[Positive | None, "Peak learning rate."] = None
    momentum: Annotated[
        Annotated[float, Meta(ge=0.0, lt=1.0)] | None,
        "Momentum of Muon in text_gpt, or beta1 of its AdamW.",
    ] = None
    batch: Annotated[
        Count | None,
        "Sequences of text_gpt in one step of a learner.",
    ] = None
    layers: Annotated[Count | None, "Blocks of text_gpt."] = None
    length: Annotated[Count | None, "Tokens of each sequence of text_gpt."] = None
    text: Annotated[
        str | None,
        "A pattern of text files that text_gpt learns from, such as corpus/**/*.txt; unset: "
        "Python's standard library, which a large swarm reads several times.",
    ] = None
    device: Annotated[
        str | None, "The device on which the learners of text_gpt compute, such as cuda."
    ] = None
    precision: Annotated[
        Literal["fp32", "bf16"] | None,
        "Precision of their passes; unset: bf16 on a GPU, fp32 on a CPU.",
    ] = None
    warmup_share: Annotated[
        float, SHARE, "Share of all tokens during which the learning rate rises to its peak."
    ] = 0.0
    decay: Annotated[
        Literal["constant", "linear", "cosine"], "How the learning rate falls after that."
    ] = "constant"
    final_fraction: Annotated[
        float, SHARE, "Learning rate at the end of a decay, as a share of the peak."
    ] = 0.1

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
    """Merging and adoption, as in a run file, and rules of your own."""

    fragments: Annotated[
        int,
        Meta(ge=1, le=4096),
        "Number of parts of the model (P) that are merged separately, in turn.",
    ] = 4
    optimizer: Annotated[str, "nesterov, or module:name of an outer optimizer of your own."] = (
        "nesterov"
    )
    merge: Annotated[
        str, "mean, rda, centered_clip, or module:name of a merge rule of your own."
    ] = "mean"  # type: ignore[assignment]
    codec: Annotated[str, "f32, f16, int8, int4, int2, or module:name of a codec of your own."] = (
        "int4"  # type: ignore[assignment]
    )
    codec_up: Annotated[str | None, "Encoding of contributions; unset: as `codec`."] = None  # type: ignore[assignment]
    codec_down: Annotated[
        str | None, "Encoding of merged updates on their way back; unset: as `codec`."
    ] = None  # type: ignore[assignment]
    missed: Annotated[
        Literal["keep", "damp", "drop"],
        "Share of work missing from a version that is offered again: all, half or none of it. A "
        "live peer keeps all; the other choices exist for comparison.",
    ] = "keep"
    waits: Annotated[
        bool,
        "Stop a learner that has offered a fragment after `overlap_steps`, until the round is "
        "over.",
    ] = False

    def __post_init__(self) -> None:
        if self.buffers != "own":
            raise ValueError(f"outer.buffers is {self.buffers!r}; simulated models have no buffers")


class Rounds(merging.Rounds, frozen=True, kw_only=True):
    """Forming and closing of rounds, as in a run file."""

    round_deadline_s: Annotated[
        float, POSITIVE, "Seconds after which an unfinished round is aborted."
    ] = 180.0
    scale_by_speed: Annotated[
        bool, "Let slow peers make fewer steps in a cycle, so that all are due at the same time."
    ] = True
    called_share: Annotated[
        float,
        Meta(gt=0.0, le=1.0),
        "Share of a cycle's steps after which a peer joins a round that another peer has called; "
        "1: only when it is due itself.",
    ] = 0.5
    slice_bytes_min: Annotated[
        int, COUNT, "Smallest part of a fragment that a peer merges for the others."
    ] = 256 << 10
    norm_max_ratio: Annotated[
        Positive | None,
        "An upload so many times longer than usual is left out, as in a run file; unset: none is.",
    ] = None  # type: ignore[assignment]
    spot_checks: Annotated[
        float,
        Meta(ge=0.0, le=24.0),
        "Contributions that each honest peer checks on their authors' data in a cycle.",
    ] = 0.0
    audit_rate: Annotated[
        float,
        SHARE,
        "Share of merged pieces that members audit, as `policy.audit_rate` of a run file.",
    ] = 0.0
    probation_rounds: Annotated[
        int,
        NATURAL,
        "Merges after which a newcomer counts, as in a run file (there 64, over 10 minutes). Each "
        "peer then judges all others by itself, which takes more time than a shared judgement.",
    ] = 0
    probation_minutes: Annotated[
        float, AT_LEAST_0, "Minutes over which these merges are spread at least."
    ] = 0.0
    by_site: Annotated[
        bool,
        "Let peers of one site (`weather.site_size`) reduce among themselves first, so that only "
        "one of them uses the shared line.",
    ] = True


class Weather(_Table, frozen=True, kw_only=True):
    """The network between the peers, and their crashes."""

    latency_s: Annotated[Range, "Range of one-way latencies, drawn for each pair of peers."] = (
        0.01,
        0.05,
    )
    jitter_s: Annotated[float, AT_LEAST_0, "Most that a message takes longer, at random."] = 0.0
    mbit_s: Annotated[
        Range, "Range of bandwidths in each direction, drawn log-uniformly for each peer."
    ] = (100.0, 100.0)
    lines: Annotated[
        tuple[Line, ...],
        "Bandwidths up and down, dealt to the peers in turn instead of `mbit_s`; peers know them.",
    ] = ()
    loss: Annotated[
        float, Meta(ge=0.0, lt=1.0), "Probability that a message breaks its connection."
    ] = 0.0
    silence_s: Annotated[
        float, POSITIVE, "Seconds after which the connections to a dead peer break."
    ] = 10.0
    site_size: Annotated[
        int,
        COUNT,
        "Number of peers per site. They share one line to all others, and have lines of 1 Gbit/s "
        "among themselves.",
    ] = 1
    bulk_factor: Annotated[
        float,
        POSITIVE,
        "Factor on the size of the model on the line, merged data and states alike, so that a "
        "small model stands for a large one.",
    ] = 1.0
    crash_share: Annotated[float, SHARE, "Mean share of the peers that crash during one cycle."] = (
        0.0
    )
    away_s: Annotated[float, POSITIVE, "Mean time until a crashed peer returns (exponential)."] = (
        60.0
    )
    returns: Annotated[
        Literal["empty", "checkpoint", "never"],
        "Return without a state, with the state before the crash, or not at all.",
    ] = "empty"


class Event(_Table, frozen=True, kw_only=True):
    """An event that affects some peers at a given time."""

    kind: Annotated[
        Literal["crash", "leave", "pause", "partition", "join", "order"],
        "crash: return after `lasts_s` as in `weather.returns`. leave: in order, as at Ctrl-C, and "
        "for good. pause: suspended for `lasts_s`. partition: cut off from all other peers. join: "
        "first start. order: hear a directive of the run's owner, and pass it on in rounds.",
    ]
    at_s: Annotated[float, AT_LEAST_0, "Virtual time."]
    lasts_s: Annotated[float, AT_LEAST_0, "Duration."] = 0.0
    every_s: Annotated[float, AT_LEAST_0, "Period of a repeated event; 0: once."] = 0.0
    peers: Annotated[
        Annotated[float, Meta(gt=0.0, le=1.0)] | list[int],
        "Affected peers: the first share of all peers, or a list of numbers.",
    ] = 0.5
    paused: Annotated[bool, "An order: no round begins until another order."] = False
    amends: Annotated[
        list[str],
        "An order: settings of `outer`, `rounds` and `mixing` that change two versions later, such "
        "as outer.codec=int8.",
    ] = []


class End(_Table, frozen=True, kw_only=True):
    """The end of the experiment: the first of these limits."""

    cycles: Annotated[
        float,
        POSITIVE,
        "Without `tokens`: the tokens that all peers process in this number of cycles.",
    ] = 40.0
    tokens: Annotated[Count | None, "Tokens of all peers together."] = None
    counts: Annotated[
        Literal["merged", "processed"],
        "Tokens that count, for the end and for the learning rate. They differ where work is "
        "dropped.",
    ] = "merged"
    together: Annotated[
        bool, "Go on until all peers have one model, as a live run does that ends by tokens."
    ] = False
    date_s: Annotated[
        Positive | None,
        "Virtual time of the run's date: from then on each peer makes a last round of each "
        "fragment, and the experiment goes on until all have one model. The other limits do not "
        "count.",
    ] = None
    time_s: Annotated[
        Positive | None,
        "Virtual time; unset: three times the duration of `tokens` without any waiting.",
    ] = None


class Measure(_Table, frozen=True, kw_only=True):
    """Measurements during the experiment."""

    every_cycles: Annotated[float, POSITIVE, "Cycles between two measurements."] = 1.0
    peers_max: Annotated[
        int,
        NATURAL,
        "Number of peers whose own parameters are evaluated each time, besides the mean of all.",
    ] = 4


class Swarm(_Table, frozen=True, kw_only=True):
    """All settings of one simulated swarm, except its seed."""

    name: Annotated[str, "Name of the experiment, in tables and plots."] = "swarm"
    peers: Peers = Peers()
    problem: ProblemChoice = ProblemChoice()
    outer: Outer = Outer()
    rounds: Rounds = Rounds()
    mixing: merging.Mixing = merging.Mixing()
    weather: Weather = Weather()
    end: End = End()
    measure: Measure = Measure()
    peer: Annotated[list[Peer], "Peers that differ from the others."] = []
    event: Annotated[list[Event], "What happens to some peers, and when."] = []

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
                upload_s=UPLOAD_S,
                muon=self.problem.optimizer == "muon",
            ),
            mu=outer.momentum if outer.optimizer == NESTEROV else MU_OF_OWN,
            due=DuePolicy(
                cycle_steps=outer.steps_per_cycle,
                fragments=outer.fragments,
                scale_by_speed=rounds.scale_by_speed,
                called_share=rounds.called_share,
            ),
            slice_bytes_min=rounds.slice_bytes_min,
            spot_checks=rounds.spot_checks,
            audit_rate=rounds.audit_rate,
            probation=ProbationPolicy(
                rounds=rounds.probation_rounds, seconds=60.0 * rounds.probation_minutes
            ),
            # The machines know the small model: to them all lines are so many times slower.
            slow_link_bytes_s=RoundPolicy().slow_link_bytes_s / self.weather.bulk_factor,
        )

    def with_settings(self, settings: Mapping[str, Any]) -> Swarm:
        """A copy with some settings replaced, by full names such as ``rounds.quorum``."""
        table = msgspec.to_builtins(self)
        for name, value in settings.items():
            *path, last = name.split(".")
            inner = table
            for step in path:
                inner = inner.setdefault(step, {})
                if not isinstance(inner, dict):
                    raise BadExperiment(f"{name} is not a setting: {step} is no table")
            inner[last] = value
        return _converted(table)


def commented() -> str:
    """An experiment file with every setting at its default, and a comment for each."""
    head = (
        "# A simulated swarm. A setting that is left out has its default, the value here.",
        "#",
        "#   shoal simulate FILE --set rounds.group_size=4,8,16 --seeds 3 --out results",
        "#",
        "# A merge rule, codec, outer optimizer or problem of your own is named",
        "# module:name; the module is found beside this file or in the current folder.",
    )
    return "\n".join([*head, *setting_lines(Swarm())]) + "\n"


def parse(text: str) -> Swarm:
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


def _converted(table: dict[str, Any]) -> Swarm:
    findings = Findings(lines=None, whole="an experiment")
    check_table(table, Swarm, (), findings)
    if findings.faults:
        raise BadExperiment("; ".join(str(fault) for fault in findings.faults))
    try:
        return msgspec.convert(table, Swarm)
    except msgspec.ValidationError as error:  # a rule of several settings, in words of its table
        raise BadExperiment(str(error).partition(" - at `$")[0]) from error
