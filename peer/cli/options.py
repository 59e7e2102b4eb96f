"""Options that several commands have."""

from __future__ import annotations

from typing import Annotated

from typer import Option

Json = Annotated[bool, Option("--json", help="Print one JSON object.")]
JsonLines = Annotated[bool, Option("--json", help="One JSON object per line.")]
JsonAtTheEnd = Annotated[bool, Option("--json", help="The last line is one JSON object.")]
Plain = Annotated[bool, Option("--plain", help="One line per event instead of a screen.")]
