"""``python -m docs.pictures.curves`` draws losses against tokens, bytes and hours.

The points are kept in ``examples/paper/compare/curves.json``. With a FOLDER that ``COMMAND`` has
filled, they are taken from there first. Bytes and hours are those of the large model: of data
parallel training by the arithmetic of that program, of Shoal as simulated, with the bytes spread
evenly over the tokens.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from docs.pictures.draw import EDGE, FOLDER, WIDTH, Drawing

KEPT = FOLDER.parents[1] / "examples/paper/compare/curves.json"
COMMAND = (
    "python -m examples.paper.compare.run --step 2.4s --loss 1.65 --link 100Mbit --latency 20 "
    "--out FOLDER"
)
LEFT, TOP, HEIGHT = 46, 46, 210
"""Of the field of the curves: its left edge, its upper edge, and how high it is."""
LOSS_MAX = 3.2
"""The first steps are above; they would press all others together."""
AIM = 1.65
COLOURS = (("#0969da", "#6cb6ff"), ("#bc4c00", "#f0883e"))
"""Of Shoal and of data parallel training, in light and in dark."""

AXES: Mapping[str, tuple[str, str, bool]] = {
    "tokens": ("million tokens of the small model", "million tokens", False),
    "bytes": ("GB sent by each learner (logarithmic)", "GB", True),
    "hours": ("hours on 100 Mbit/s (logarithmic)", "hours", True),
}
"""By the name of a picture: the words below it, the series of its axis, and whether that is
logarithmic."""


def taken_from(folder: Path) -> dict[str, Any]:
    """The points of a finished comparison of 8 learners and 3e8 parameters on 100 Mbit/s."""
    learners, parameters, step_s = 8, 3e8, 2.4
    sent = 2 * (learners - 1) / learners * 2 * parameters
    slow_s = step_s + sent * 8 / 100e6 + 2 * (learners - 1) * 0.02 - step_s * 2 / 3
    curves = []
    for path in sorted((folder / "trainings").glob("*.json")):
        one = json.loads(path.read_text(encoding="utf-8"))
        last = one["tokens"][-1]
        steps = one["duration_s"] / step_s
        if one["bytes_sent"]:
            name, whole = "Shoal", one["bytes_sent"] / learners
            seconds = one["times_s"]
        else:
            name, whole = "data parallel", sent * steps
            seconds = [at / step_s * slow_s for at in one["times_s"]]
        curves.append(
            {
                "name": name,
                "million tokens": [round(tokens / 1e6, 4) for tokens in one["tokens"]],
                "GB": [round(whole / 1e9 * at / last, 3) for at in one["tokens"]],
                "hours": [round(at / 3600, 4) for at in seconds],
                "losses": [round(loss, 4) for loss in one["losses"]],
            }
        )
    return {"curves": sorted(curves, key=lambda curve: curve["name"] != "Shoal")}


def reached(curve: Mapping[str, Any], series: str) -> float | None:
    """Where a curve first comes down to ``AIM``, interpolated."""
    points = list(zip(curve[series], curve["losses"], strict=True))
    for (x, loss), (next_x, next_loss) in pairwise(points):
        if next_loss <= AIM < loss:
            return float(x + (next_x - x) * (loss - AIM) / (loss - next_loss))
    return None


def drawn(kept: Mapping[str, Any], axis: str) -> str:
    """The SVG of all curves against one axis."""
    below, series, is_log = AXES[axis]
    curves = kept["curves"]
    losses: list[float] = [loss for curve in curves for loss in curve["losses"]]
    low, high = min(losses), LOSS_MAX
    xs = [
        x
        for curve in curves
        for x, loss in zip(curve[series], curve["losses"], strict=True)
        if x > 0 and loss <= high
    ]
    first = 10.0 ** math.floor(math.log10(min(xs))) if is_log else 0.0
    last = 10.0 ** math.ceil(math.log10(max(xs))) if is_log else max(xs)

    def across(x: float) -> float:
        share = math.log(x / first) / math.log(last / first) if is_log else x / last
        return LEFT + share * (WIDTH - EDGE - LEFT)

    def down(loss: float) -> float:
        return TOP + (high - loss) / (high - low) * HEIGHT

    drawing = Drawing()
    drawing.parts.append(_style())
    drawing.text(["loss"], EDGE, TOP - 22, "dim", "start")
    for loss in _steps(low, high, 0.5):
        drawing.parts.append(
            f'<path class="life" d="M{LEFT} {down(loss):.1f}H{WIDTH - EDGE}"/>',
        )
        drawing.text([f"{loss:.1f}"], LEFT - 6, down(loss) + 4, "dim", "end")
    for x in _marks(first, last, is_log=is_log):
        drawing.text([f"{x:g}"], min(across(x), WIDTH - EDGE - 10), TOP + HEIGHT + 18, "dim")
    drawing.text([below], (LEFT + WIDTH - EDGE) / 2, TOP + HEIGHT + 38, "dim")
    told = []
    for number, curve in enumerate(curves):
        points = [
            (across(x), down(loss))
            for x, loss in zip(curve[series], curve["losses"], strict=True)
            if x > 0 and loss <= high
        ]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        drawing.parts.append(f'<path class="curve c{number}" d="M{path}"/>')
        y = TOP - 22 + 18 * number
        drawing.parts.append(f'<path class="curve c{number}" d="M{WIDTH - 150} {y - 4}h22"/>')
        drawing.text([curve["name"]], WIDTH - 120, y, "ink", "start")
        if (at := reached(curve, series)) is not None:
            drawing.parts.append(
                f'<circle class="dot c{number}" cx="{across(at):.1f}" cy="{down(AIM):.1f}" r="4"/>'
            )
            told.append(f"{curve['name']} comes to a loss of {AIM} at {at:.3g} {series}")
        told.append(f"{curve['name']} ends at {curve['losses'][-1]:.3f}")
    drawing.y = TOP + HEIGHT + 46
    return drawing.finished(f"Loss against {axis}: {', '.join(told)}", [])


def _style() -> str:
    rules = "".join(
        f".c{number}{{stroke:{light}}}.dot.c{number}{{fill:{light}}}"
        for number, (light, _) in enumerate(COLOURS)
    )
    dark = "".join(
        f".c{number}{{stroke:{colour}}}.dot.c{number}{{fill:{colour}}}"
        for number, (_, colour) in enumerate(COLOURS)
    )
    # Told apart without colours, too.
    own = ".curve{fill:none;stroke-width:2.2}.curve.c1{stroke-dasharray:6 3}"
    return f"<style>{own}{rules}@media (prefers-color-scheme:dark){{{dark}}}</style>"


def _steps(low: float, high: float, step: float) -> list[float]:
    count = math.floor(high / step)
    return [step * number for number in range(math.ceil(low / step), count + 1)]


def _marks(first: float, last: float, *, is_log: bool) -> Sequence[float]:
    if is_log:
        tens = round(math.log10(last / first))
        return [first * 10**number for number in range(tens + 1)]
    step = 10 ** math.floor(math.log10(last))
    step = step if last / step >= 3 else step / 2 if last / step >= 1.5 else step / 4
    return _steps(0, last, step)


def main(folder: str | None = None) -> None:
    if folder is not None:
        kept = taken_from(Path(folder))
        KEPT.write_text(f"{json.dumps({'command': COMMAND, **kept})}\n", encoding="utf-8")
    kept = json.loads(KEPT.read_text(encoding="utf-8"))
    for axis in AXES:
        (FOLDER / f"loss-by-{axis}.svg").write_text(drawn(kept, axis), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
