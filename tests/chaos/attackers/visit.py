"""Strangers visit a run: they attack members and bootstrap peers until their time is over.

``python -m tests.chaos.attackers.visit --what garbage|flood|crowd --run ID --seconds S
ADDRESS...``: see ``stranger`` for the first two, ``crowd`` for the third. The last line of the
output is one JSON object with counters.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import Any

from multiaddr import Multiaddr

from dht.identity import RunId
from peer.signals import run_until_stopped, unless_stopped
from tests.chaos.attackers import crowd, stranger

REQUESTS_PER_S = 25.0
"""Requests of one identity of a crowd that shares the machine with members: they must have time
left."""


async def visit(attack: Coroutine[Any, Any, None], *, seconds: float, stop: asyncio.Event) -> None:
    """Attack for ``seconds``, or until told to stop."""
    with suppress(asyncio.CancelledError, TimeoutError):
        async with asyncio.timeout(seconds):
            await unless_stopped(stop, attack)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--what", choices=["garbage", "flood", "crowd"], required=True)
    parser.add_argument("--run", type=RunId, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--knock", type=int, action="append", default=[])
    parser.add_argument("--babble", type=int, action="append", default=[])
    parser.add_argument("--rate", type=float, default=REQUESTS_PER_S)
    parser.add_argument("addresses", type=Multiaddr, nargs="+")
    given = parser.parse_args(arguments)
    began, done = time.monotonic(), Counter[str]()
    if given.what == "crowd":
        # The strangers' own machines would not take time from the members'.
        os.nice(19)
        attack = crowd.attack(
            given.run,
            given.addresses,
            done,
            knock=given.knock,
            babble_at=given.babble,
            rate=given.rate,
            seed=given.seed,
        )
    else:
        attack = stranger.attack(given.what, given.run, given.addresses, done, seed=given.seed)
    run_until_stopped(lambda stop: visit(attack, seconds=given.seconds, stop=stop))
    done["seconds"] = round(time.monotonic() - began)
    sys.stdout.write(json.dumps({"event": "did", **done}) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
