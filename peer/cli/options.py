"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

from typer import Option

Json = Annotated[bool, Option("--json", help="Print one JSON object.")]
JsonLines = Annotated[bool, Option("--json", help="Print one JSON object per line.")]
JsonAtTheEnd = Annotated[bool, Option("--json", help="Print one JSON object as the last line.")]
Plain = Annotated[bool, Option("--plain", help="Print one line per event instead of a screen.")]
