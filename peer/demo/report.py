"""Compares the demo's swarm with a single learner, and writes the plot and the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from dht.identity import PeerId
from peer.data.sources import open_data
from peer.demo.demo import Comparison, DemoSettings, Point, Result
from peer.model.recipes import (
    build_model,
    build_optimizer,
    clip_gradients,
    held_out_loss,
    next_token_loss,
)
from peer.quantities import bytes_text, count_text
from peer.run_file.reading import parse
from peer.run_file.schedule import learning_rate
from peer.run_file.sections import RunFile
from peer.simulate.results import Section, finished_png, new_axes, picture, write_html
from peer.storage.checkpoint import CheckpointFolder
from peer.storage.home import OUTER
from peer.storage.outer_state import export


def train_alone(
    run: RunFile, *, steps: int, learners: int = 1, cache_dir: Path, data_dir: Path
) -> tuple[float, float]:
    """Train ``steps`` steps, each on one batch, from first weights that the run draws.

    Returns the held-out losses before and after.

    It is the baseline that a run is compared with: the same run file, model, data, optimizer and
    schedule, in one process without other peers.

    ``learners``: number of learners of the run that this one is compared with. The learning rate
    follows the tokens of so many, and so decays as far as theirs in as many steps.
    """
    data = open_data(run, peer_id=PeerId("alone"), cache_dir=cache_dir, data_dir=data_dir)
    model = build_model(run)
    optimizer = build_optimizer(run, model)
    before = held_out_loss(model, data.held_out)
    step_tokens = learners * run.inner.batch_size * run.data.sequence_length
    for step in range(steps):
        rate = learning_rate(run, step * step_tokens)
        for group in optimizer.param_groups:
            group["lr"] = rate
        batch = torch.from_numpy(data.train.next(run.inner.batch_size))
        torch.autograd.backward(next_token_loss(model, batch))
        clip_gradients(run, model)
        optimizer.step()
        optimizer.zero_grad()
    return before, held_out_loss(model, data.held_out)


SMOOTHED_STEPS = 9
SILENCE_S = 5.0
_ANNOTATION: dict[str, Any] = {"textcoords": "offset points", "fontsize": "small"}


def write(directory: Path, result: Result, compared: Comparison, record: Mapping[str, Any]) -> None:
    """Write ``demo.html``, and ``demo.png`` if matplotlib is installed."""
    drawn = picture(_picture, result, compared)
    if drawn is not None:
        (directory / "demo.png").write_bytes(drawn)
    columns = ["learner", "steps", "s/step", "bytes sent", "rounds", "merged", "blocked"]
    rows = [
        [
            learner.name,
            str(learner.steps),
            f"{learner.progress['step_time_s']:.2f}",
            bytes_text(sum(learner.bytes_sent)),
            str(len(learner.rounds)),
            count_text(learner.progress["fates"].get("merged", 0.0)),
            f"{sum(learner.blocked_s) / max(1e-9, sum(learner.alive_s)):.2%}",
        ]
        for learner in result.learners
    ]
    text = (
        f"{record['peers']} learners and a bootstrap peer as real processes on one machine. "
        f"Held-out loss {record['loss_start']:.3f} at the start, {record['loss_end']:.3f} at the "
        f"end; a single learner with as many steps as each of them: "
        f"{record['solo_loss_end']:.3f}. Kills: {record['kills']}; returns: {record['rejoins']}."
    )
    section = Section("A swarm on one machine", text, columns, rows, drawn)
    write_html(
        directory / "demo.html", title="shoal demo", command="shoal demo", sections=[section]
    )


def compare(settings: DemoSettings, result: Result) -> Comparison:
    """Evaluate the swarm's parameters, and train a single learner with the same run file."""
    torch.set_num_threads(1)  # more threads make such a small model slower
    run = parse(result.run_text)
    data = settings.directory / "solo"
    loss_start, solo_loss_end = train_alone(
        run, steps=settings.steps, learners=settings.peers, cache_dir=data, data_dir=data
    )
    loaded = build_model(run)
    out = settings.directory / "final.safetensors"
    export(CheckpointFolder(result.learners[0].directory / OUTER), out)
    loaded.load_state_dict(load_file(out), strict=False)
    held_out = open_data(run, peer_id=PeerId("demo"), cache_dir=data, data_dir=data).held_out
    return Comparison(
        loss_start=loss_start,
        loss_end=held_out_loss(loaded, held_out),
        solo_loss_end=solo_loss_end,
    )


def _picture(result: Result, compared: Comparison) -> bytes:
    axes = new_axes()
    for number, learner in enumerate(result.learners):
        color = f"C{number % 10}"
        lives = split_at_silence(learner.losses)
        for index, life in enumerate(lives):
            xs, ys = [point.at_s for point in life], _smoothed(life)
            label = learner.name if index == 0 else None
            axes.plot(xs, ys, lw=1, alpha=0.8, color=color, label=label)
            if index < len(lives) - 1:
                axes.plot(xs[-1], ys[-1], "x", ms=9, mew=2, color=color)
                axes.annotate("kill -9", (xs[-1], ys[-1]), xytext=(5, 5), **_ANNOTATION)
            if index > 0:
                axes.annotate("back", (xs[0], ys[0]), xytext=(3, 6), **_ANNOTATION)
    held_out = sorted((p for x in result.learners for p in x.held_out), key=lambda p: p.at_s)
    if held_out:
        xs, ys = [p.at_s for p in held_out], [p.loss for p in held_out]
        axes.plot(xs, ys, "k.-", lw=1.5, label="held-out, the swarm's parameters")
    axes.axhline(
        compared.solo_loss_end, color="gray", ls="--", label="held-out, single learner at its end"
    )
    axes.axhline(compared.loss_end, color="k", ls=":", label="held-out, the swarm at its end")
    axes.set(xlabel="seconds", ylabel="loss, nats per byte", title="shoal demo")
    return finished_png(axes, fontsize="small")


def split_at_silence(points: Sequence[Point]) -> list[Sequence[Point]]:
    """Divide the points of one learner into its lives, at gaps of more than ``SILENCE_S``."""
    borders = [
        index
        for index in range(1, len(points))
        if points[index].at_s - points[index - 1].at_s > SILENCE_S
    ]
    cuts = [0, *borders, len(points)]
    return [points[start:end] for start, end in pairwise(cuts) if end > start]


def _smoothed(points: Sequence[Point]) -> list[float]:
    values = [point.loss for point in points]
    half = SMOOTHED_STEPS // 2
    windows = (values[max(0, i - half) : i + half + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]
