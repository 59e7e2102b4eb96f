"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

from typer import Option

Json = Annotated[bool, Option("--json", help="Print one JSON object.")]
JsonLines = Annotated[bool, Option("--json", help="Print one JSON object per line.")]
JsonAtTheEnd = Annotated[bool, Option("--json", help="Print one JSON object as the last line.")]
RelayBulk = Annotated[
    str | None,
    Option(
        help="Pass bulk data on between peers whose routers let no direct connection through, up "
        "to this many bytes per second, such as 2M; 'off': do not. They need it where nobody else "
        "can be dialled.",
        metavar="RATE",
    ),
]
RunPageAt = Annotated[
    str | None,
    Option(
        "--run-page",
        help="HOST:PORT of a public page of the run, for anybody to read; without addresses of "
        "peers, and safe behind a proxy.",
        metavar="HOST:PORT",
        show_default=False,
    ),
]
Plain = Annotated[bool, Option("--plain", help="Print one line per event instead of a screen.")]
