"""The link that each learner needs, and the models that a link can train.

Arithmetic, not simulation. A step computes for ``step_s``; a link is fast enough when waiting for
it leaves the share ``utilisation`` of the time for computing. All figures are per learner and
direction: a learner sends and receives about equally much, at the same time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import typer
from typer import Option

from examples.paper.program import plain_ticks, run_program, show_rows
from examples.paper.typed import bits_per_second, seconds
from peer.cli.application import Json, json_text, usage_errors
from peer.simulate.results import Section, finished_png, new_axes, picture

Method = Literal["data parallel", "diloco", "streaming", "decoupled", "shoal"]
METHODS: tuple[Method, ...] = ("data parallel", "diloco", "streaming", "decoupled", "shoal")
CODECS = ("f16", "int8", "int4", "int2/int4", "int2")
UTILISATIONS = (0.5, 0.8, 0.9, 0.95, 0.99)

BITS: dict[str, float] = {
    "f32": 32.0,
    "bf16": 16.0,
    "f16": 16.0,
    "int8": 8.0 + 32.0 / 1024,
    "int4": 4.0 + 32.0 / 1024,
    "int2": 2.0 + 32.0 / 1024,
}
"""Bits per parameter on the wire, a block's scale included."""

REPORTED_GBIT_S = {"data parallel": 198.0, "decoupled": 0.84}
"""arXiv 2604.21428: 5B parameters over 8 sites, as reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The traffic-related properties of a training job."""

    parameters: float = 5e9
    step_s: float = 1.0
    learners: int = 8
    """Number of learners, or of sites with one learner each."""

    codec: str = "int4"
    """Codec of all methods but data parallel, which always sends bf16 gradients. ``int2/int4``: one
    for contributions and another one for what comes back."""

    steps_per_cycle: int = 24
    """H: number of steps in which every fragment is exchanged once."""

    fragments: int = 24
    overlap_steps: int = 2
    """tau: number of steps that an exchange may take while training goes on."""

    utilisation: float = 0.95
    backward_share: float = 2 / 3
    """Share of a step behind which data parallel can hide its gradients."""

    def __post_init__(self) -> None:
        if not 0 < self.utilisation < 1:
            raise ValueError(f"utilisation is {self.utilisation}; it must lie between 0 and 1")
        if not set(_ways(self.codec)) <= BITS.keys():
            raise ValueError(f"codec is {self.codec!r}; known are {', '.join(BITS)}")
        for name in ("parameters", "step_s", "learners", "steps_per_cycle", "fragments"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above zero")


def _ways(codec: str) -> tuple[str, str]:
    up, _, down = codec.partition("/")
    return up, down or up


def value_bits(codec: str) -> float:
    """Bits that a link carries per value and direction, the mean of both ways.

    In an all-reduce a peer sends contributions to other reducers and merged slices to other
    members, in equal numbers, and receives as many.
    """
    up, down = _ways(codec)
    return (BITS[up] + BITS[down]) / 2


def gbit_s(method: Method, setting: Setting) -> float:
    """The least link speed that keeps ``utilisation``."""
    s = setting
    # A ring or butterfly all-reduce sends each value twice, except the own share.
    all_reduce = 2 * (s.learners - 1) / s.learners
    spare_s = s.step_s * (1 / s.utilisation - 1)  # time that each step may wait
    if method == "data parallel":
        bits = all_reduce * BITS["bf16"] * s.parameters
        seconds = s.backward_share * s.step_s + spare_s
    elif method == "diloco":
        bits = all_reduce * value_bits(s.codec) * s.parameters
        seconds = s.steps_per_cycle * spare_s
    elif method == "streaming":
        # Overlaps for tau steps; then all learners wait for the rest of the fragment.
        bits = all_reduce * value_bits(s.codec) * s.parameters / s.fragments
        between_steps = s.steps_per_cycle / s.fragments
        seconds = min(s.overlap_steps, between_steps) * s.step_s + between_steps * spare_s
    else:
        # Without waiting the link only has to keep up. In the paper a learner sends a fragment to
        # the syncer and receives one; a peer of shoal takes part in an all-reduce of its group.
        if method == "decoupled":
            bits = max(map(BITS.__getitem__, _ways(s.codec)))  # a way in each direction
        else:
            bits = all_reduce * value_bits(s.codec)
        bits *= s.parameters / s.fragments
        seconds = s.steps_per_cycle / s.fragments * s.step_s
    return bits / seconds / 1e9


def largest_model(method: Method, setting: Setting, *, link_gbit_s: float) -> float:
    """The number of parameters that a link can train: the required speed is proportional to it."""
    if link_gbit_s <= 0:
        raise ValueError(f"the link is {link_gbit_s} Gbit/s; it must be above zero")
    return link_gbit_s / gbit_s(method, replace(setting, parameters=1.0))


def what_helps(setting: Setting, *, link_gbit_s: float) -> str:
    """What makes a link enough for shoal that is not: longer cycles, slower steps, fewer bits."""
    missing = gbit_s("shoal", setting) / link_gbit_s
    longest = math.ceil(missing * setting.steps_per_cycle)
    text = f"-H {longest} steps per cycle, or steps of {missing * setting.step_s:.3g} s with -H "
    text += f"{setting.steps_per_cycle}"
    for codec in ("int2/int4", "int2"):
        shorter = gbit_s("shoal", replace(setting, codec=codec)) / link_gbit_s
        text += f"; {codec} in place of {setting.codec} needs {shorter / missing:.0%} of either"
    return text


@dataclass(frozen=True, slots=True)
class Need:
    """One row of the table."""

    method: Method
    codec: str
    utilisation: float
    gbit_s: float
    reported_gbit_s: float | None


def needs(setting: Setting) -> list[Need]:
    """Every method with every codec it can use, at each utilisation."""
    found = []
    for method in METHODS:
        for codec in ("bf16",) if method == "data parallel" else CODECS:
            for utilisation in UTILISATIONS:
                chosen = replace(setting, codec=codec, utilisation=utilisation)
                reported = REPORTED_GBIT_S.get(method) if _is_the_reported(chosen) else None
                found.append(Need(method, codec, utilisation, gbit_s(method, chosen), reported))
    return found


def _is_the_reported(s: Setting) -> bool:
    same_job = (s.parameters, s.step_s, s.learners) == (5e9, 1.0, 8)
    return same_job and s.utilisation == 0.95 and s.codec in ("int4", "bf16")


def section(needs: Sequence[Need]) -> Section:
    """The link speed that each method needs, with a column per utilisation."""
    utilisations = sorted({n.utilisation for n in needs})
    rows = []
    for method, codec in dict.fromkeys((n.method, n.codec) for n in needs):
        row = [n for n in needs if (n.method, n.codec) == (method, codec)]
        values = {n.utilisation: n for n in row}
        rows.append([f"{method}, {codec}", *(_need_text(values[u]) for u in utilisations)])
    text = (
        "Gbit/s per learner and direction for the given share of time spent computing; reported "
        "figures in brackets. Data parallel hides its gradients behind the backward pass only. "
        "Decoupled and shoal never wait, so they need the same speed for every share."
    )
    columns = ["method, codec", *(f"{u:.0%}" for u in utilisations)]
    return Section("Bandwidth", text, columns, rows, picture(_picture, needs))


def _need_text(need: Need) -> str:
    reported = "" if need.reported_gbit_s is None else f" ({need.reported_gbit_s:g})"
    return f"{need.gbit_s:.3g}{reported}"


def _picture(needs: Sequence[Need]) -> bytes:
    axes = new_axes()
    for method, codec in dict.fromkeys((n.method, n.codec) for n in needs):
        if codec not in ("bf16", "int4"):
            continue
        row = [n for n in needs if (n.method, n.codec) == (method, codec)]
        xs, ys = [100 * n.utilisation for n in row], [n.gbit_s for n in row]
        axes.plot(xs, ys, marker="o", label=f"{method}, {codec}")
    axes.set(yscale="log", xlabel="share of time spent computing, percent", ylabel="Gbit/s")
    plain_ticks(axes.yaxis)
    axes.set_title("Link speed that each learner needs")
    return finished_png(axes)


def main(
    params: Annotated[float, Option(help="Number of parameters of the model.")] = 5e9,
    step: Annotated[str, Option(help="Duration of one training step.")] = "1s",
    sites: Annotated[int, Option(help="Number of sites, with one learner each.", min=2)] = 8,
    cycle: Annotated[int, Option("--cycle", "-H", help="H: steps per cycle.", min=1)] = 24,
    fragments: Annotated[
        int, Option("--fragments", "-P", help="P: fragments of the model.", min=1)
    ] = 24,
    tau: Annotated[int, Option(help="Steps that an exchange may overlap.", min=0)] = 2,
    up: Annotated[
        str | None, Option(help="Your link, such as 20Mbit: show the largest models for it.")
    ] = None,
    out: Annotated[Path | None, Option(help="Folder for CSV, PNG and an HTML page.")] = None,
    as_json: Json = False,
) -> None:
    """The link speed that each learner needs, or the models that your link can train.

    Assumes that data parallel sends bf16 gradients in a ring and hides them behind the backward
    pass, two thirds of a step; that DiLoCo waits for its exchange; that streaming overlaps tau
    steps and waits for the rest; that decoupled and shoal never wait. The reported 198 and 0.84
    Gbit/s are those for 95% utilisation.

    Example: python -m examples.paper.bandwidth.run --up 20Mbit --params 1.2e9
    """
    with usage_errors():
        setting = Setting(
            parameters=params,
            step_s=seconds(step, option="--step"),
            learners=sites,
            steps_per_cycle=cycle,
            fragments=fragments,
            overlap_steps=tau,
        )
    if up is None:
        rows = needs(setting)
        show_rows(section(rows), [asdict(row) for row in rows], out=out, as_json=as_json)
        return
    if out is not None:
        raise typer.BadParameter("--out is for the link that is needed: leave --up out")
    link = bits_per_second(up) / 1e9
    largest = {method: largest_model(method, setting, link_gbit_s=link) for method in METHODS}
    if as_json:
        print(json_text({"link_gbit_s": link, "largest_model": largest, "asked": params}))
        return
    for method, size in largest.items():
        verdict = "enough" if size >= params else "not enough"
        print(f"{method:14} up to {size / 1e6:12,.1f} M parameters: {verdict}")
    if largest["shoal"] < params:
        print(f"enough for shoal: {what_helps(setting, link_gbit_s=link)}")


if __name__ == "__main__":
    run_program(main)
