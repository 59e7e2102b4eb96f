"""Storms of all kinds in turn, for as long as you like: seeds that fail are printed.

    python -m tests.averaging.virtual.soak --seconds 600 --seed 6000
    python -m tests.averaging.virtual.soak --kinds liars,voters --seconds 600

A storm follows from its kind and its seed. Start one process for each processor, each with a first
seed of its own.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from tests.averaging.virtual.swarm import SEVERAL_GROUPS, Storm, storm, weather_out
from tests.averaging.virtual.test_liars import OF_VOTERS, besieged, flooded
from tests.averaging.virtual.test_probation import STORMS as PROBATION
from tests.averaging.virtual.test_storms import SOAKS


def blown(how: Storm, seed: int) -> Counter[str]:
    """What happened in one storm. Raises ``Broken``."""
    swarm = storm(seed, how)
    try:
        weather_out(swarm, how)
    except Exception as error:
        error.add_note(f"at {swarm.now:.3f} s")
        raise
    finally:
        swarm.close()
    return swarm.truth.coverage


def unguarded(seed: int) -> Counter[str]:
    how = SEVERAL_GROUPS[seed % len(SEVERAL_GROUPS)] if seed % 2 else Storm()
    return blown(replace(how, guarded=False), seed)


KINDS: Mapping[str, Callable[[int], Counter[str]]] = {
    "plain": lambda seed: blown(SOAKS[seed % len(SOAKS)], seed),
    "groups": lambda seed: blown(SEVERAL_GROUPS[seed % len(SEVERAL_GROUPS)], seed),
    "gives way": lambda seed: blown(Storm(gives_way=0.15), seed),
    "unguarded": unguarded,
    "probation": lambda seed: blown(PROBATION[seed % len(PROBATION)], seed),
    "liars": besieged,
    "voters": partial(besieged, behaviours=OF_VOTERS),
    "keys": flooded,
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Run storms until the time is over.")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=6000, help="the first one")
    parser.add_argument("--kinds", default=",".join(KINDS), help="separated by commas")
    given = parser.parse_args()
    kinds = given.kinds.split(",")
    if unknown := sorted(set(kinds) - KINDS.keys()):
        parser.error(f"unknown kinds: {', '.join(unknown)}; there are: {', '.join(KINDS)}")

    end = time.monotonic() + given.seconds
    ran: Counter[str] = Counter()
    failed: list[str] = []
    happened: Counter[str] = Counter()
    while time.monotonic() < end:
        done, turn = divmod(sum(ran.values()), len(kinds))
        kind, seed = kinds[turn], given.seed + done
        try:
            happened += KINDS[kind](seed)
        except Exception as error:  # any failure at all is a finding
            failed.append(f"{kind} {seed}")
            notes = " ".join(getattr(error, "__notes__", ()))
            print(f"{kind} {seed}: {type(error).__name__}: {error} {notes}", flush=True)  # noqa: T201
        ran[kind] += 1
        if not sum(ran.values()) % 100:
            print(f"{sum(ran.values())} storms, {len(failed)} failed", flush=True)  # noqa: T201
    for event, times in sorted(happened.items()):
        print(f"{times:>8}  {event}")  # noqa: T201
    print(f"{sum(ran.values())} storms from {given.seed} on, {dict(ran)}; failed: {failed}")  # noqa: T201
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
