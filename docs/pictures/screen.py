"""``python -m docs.pictures.screen`` makes ``screen.svg``: the screen of ``shoal demo``, animated.

With ``--run`` it first runs the demo and keeps what its screen showed in ``screen.txt``: a real
run, with a learner that is killed and comes back.
"""

from __future__ import annotations

import sys
import tempfile
import time
from html import escape
from pathlib import Path

FOLDER = Path(__file__).parent
COLUMNS, LINES = 62, 20
EVERY_S = 1.0
KEPT = 18
FRAME_S = 1.3
CHARACTER, LINE, MARGIN = 7.3, 16.5, 14
PAGE = "\f\n"

STYLE = """
svg{background:#0d1117;border-radius:8px}
text{font:12px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace}
text{fill:#d7dde4;white-space:pre}
g{opacity:0;animation:show TOTALs linear infinite}
@keyframes show{0%,SHAREDONE%{opacity:1}SHAREOFF%,100%{opacity:0}}
@media (prefers-reduced-motion:reduce){g{animation:none}g:last-of-type{opacity:1}}
"""


def record() -> list[str]:
    """The texts that the demo's screen showed, one a second."""
    from rich.console import Console

    from peer.demo.demo import Demo, DemoSettings
    from peer.views.screen import draw

    texts: list[str] = []
    due = 0.0
    console = Console(width=COLUMNS, height=LINES, color_system=None, force_terminal=False)
    with (
        tempfile.TemporaryDirectory() as folder,
        Demo(DemoSettings(directory=Path(folder))) as swarm,
    ):

        def look() -> None:
            nonlocal due
            if time.monotonic() >= due:
                due = time.monotonic() + EVERY_S
                with console.capture() as captured:
                    console.print(draw(swarm.view(), width=COLUMNS, height=LINES))
                texts.append(captured.get())

        swarm.run(look)
        look()
    return texts


def chosen(texts: list[str]) -> list[str]:
    """Some of the texts: the first, the last, those after news, and others evenly between."""
    step = max(1.0, (len(texts) - 1) / (KEPT - 1))
    return [texts[min(len(texts) - 1, round(index * step))] for index in range(KEPT)]


def animated(texts: list[str]) -> str:
    """The texts as an SVG that shows one after the other."""
    width = COLUMNS * CHARACTER + 2 * MARGIN
    height = LINES * LINE + 2 * MARGIN
    share = 100 / len(texts)
    style = (
        STYLE.replace("TOTAL", f"{len(texts) * FRAME_S:.1f}")
        .replace("SHAREDONE", f"{share:.3f}")
        .replace("SHAREOFF", f"{share + 0.001:.3f}")
    )
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" role="img" '
        f'viewBox="0 0 {width:.0f} {height:.0f}">',
        "<title>The screen of shoal demo: four learners train one model; one is killed with "
        "kill -9 and comes back</title>",
        f"<style>{style}</style>",
    ]
    for index, text in enumerate(texts):
        parts.append(f'<g style="animation-delay:{index * FRAME_S:.1f}s">')
        for number, line in enumerate(text.rstrip("\n").split("\n")):
            line = line.rstrip()
            if line:
                y = MARGIN + (number + 0.8) * LINE
                length = len(line) * CHARACTER
                parts.append(
                    f'<text x="{MARGIN}" y="{y:.1f}" textLength="{length:.1f}"'
                    f' lengthAdjust="spacingAndGlyphs" xml:space="preserve">{escape(line)}</text>'
                )
        parts.append("</g>")
    return "\n".join([*parts, "</svg>\n"])


def main() -> None:
    kept = FOLDER / "screen.txt"
    if "--run" in sys.argv[1:]:
        kept.write_text(PAGE.join(chosen(record())), encoding="utf-8")
    (FOLDER / "screen.svg").write_text(
        animated(kept.read_text(encoding="utf-8").split(PAGE)), encoding="utf-8"
    )


if __name__ == "__main__":
    main()
