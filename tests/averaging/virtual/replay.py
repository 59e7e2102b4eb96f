"""Prints what happened in one storm, event by event.

    python -m tests.averaging.virtual.replay 43
    python -m tests.averaging.virtual.replay 64 --group-size 4 --peers 9 14

A storm follows from its seed and its settings. A test that fails names both; the last events
before the broken promise are the last lines here.
"""

from __future__ import annotations

import argparse
import sys

from tests.averaging.virtual.swarm import Storm, storm, weather_out


def main() -> int:
    usual = Storm()
    parser = argparse.ArgumentParser(description="Replay one storm and print its events.")
    parser.add_argument("seed", type=int)
    parser.add_argument("--peers", type=int, nargs=2, default=usual.peers, metavar=("MIN", "MAX"))
    parser.add_argument("--group-size", type=int, default=usual.group_size)
    parser.add_argument("--sites", type=int, default=None)
    parser.add_argument("--last", type=int, default=200, help="events to print, 0 for all")
    given = parser.parse_args()

    how = Storm(
        peers=tuple(given.peers),
        group_size=given.group_size,
        sites=given.sites,
    )
    swarm = storm(given.seed, how)
    swarm.keep_events = True
    broken: Exception | None = None
    try:
        weather_out(swarm, how)
    except Exception as error:
        broken = error
    for at, name, note in swarm.events[-given.last :] if given.last else swarm.events:
        fields = " ".join(f"{key}={value}" for key, value in note.fields.items())
        print(f"{at:10.3f}  {name}  {note.event}  {fields}")  # noqa: T201
    if broken is not None:
        print(f"{type(broken).__name__}: {broken}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
