"""Runs the code cells of a notebook, one after the other, in the notebook's folder.

python -m tests.notebook examples/notebook.ipynb
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


def main(path: Path) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    cells = code_cells(path)
    os.chdir(path.parent)
    for number, source in enumerate(cells):
        exec(compile(source, f"{path.name}, cell {number}", "exec"), names)  # noqa: S102  our own


if __name__ == "__main__":
    main(Path(sys.argv[1]))
