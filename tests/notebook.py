"""Runs the code cells of a notebook, one after the other, in the notebook's folder.

python -m tests.notebook examples/notebook.ipynb 'range(20)=range(3)'

Each further argument is a text of the cells and what stands there instead.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def code_cells(path: Path) -> list[str]:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def main(path: Path, *changes: str) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    cells = code_cells(path)
    for old, new in (change.split("=") for change in changes):
        assert any(old in source for source in cells), f"no cell has {old!r}"
        cells = [source.replace(old, new) for source in cells]
    os.chdir(path.parent)
    for number, source in enumerate(cells):
        exec(compile(source, f"{path.name}, cell {number}", "exec"), names)  # noqa: S102  our own


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
