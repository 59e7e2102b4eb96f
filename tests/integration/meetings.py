"""Meetings of two peers on this machine, measured: ``python -m tests.integration.meetings``.

Every meeting has two learners as processes, each with its agent and its libp2p daemon. In half of
the meetings the second one joins by the link of the first; in the others both start the same run
file, whose only seed is a bootstrap host. They start up to three seconds apart, with the defaults
of a run file for heartbeats and deadlines. The table has a line for each meeting:

- ``broken``: streams and dials between the two that failed (events ``link_lost``);
- ``wait s``: the longest time beyond a cycle in which both trained and a fragment had no merge;
- ``double``: times at which both led one fragment for more than a second;
- ``twice``: whether both founded the run;
- ``daemons``: restarts of their daemons.

The exit code is 1 if a stream broke, a daemon was restarted or a wait was longer than
``--wait-max``.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from peer.storage.address import LOOKS_FIRST_S
from peer.views.event_log import read_events
from tests.processes import Processes
from tests.swarms import learner_process
from tests.swarms.commands import Swarm, address_of, tell
from tests.swarms.learners import Learner, seed_of

FRAGMENTS, CYCLE_STEPS, PACE_S = 3, 24, 0.05
CYCLE_S = CYCLE_STEPS * PACE_S
DOUBLE_S = 1.0
OVER = ("round", "no_quorum", "handed_over", "turned_away", "went_over", "missed", "idle", "void")
"""Events that end the time in which a peer leads a fragment."""


@dataclass
class Meeting:
    """What became of one meeting."""

    kind: str
    offset_s: float
    broken: list[str] = field(default_factory=list)
    wait_s: float = 0.0
    doubles: int = 0
    twice: bool = False
    restarts: list[str] = field(default_factory=list)
    rounds: int = 0

    def line(self) -> str:
        return (
            f"{self.kind:5} {self.offset_s:6.2f} {len(self.broken):6} {self.wait_s:6.1f} "
            f"{self.doubles:6} {'yes' if self.twice else 'no':>5} {len(self.restarts):7} "
            f"{self.rounds:6}"
        )


HEAD = f"{'kind':5} {'offset':>6} {'broken':>6} {'wait s':>6} {'double':>6} twice daemons rounds"


def judged(meeting: Meeting, logs: Sequence[Sequence[dict[str, Any]]], until: float) -> None:
    """Take what two event logs say up to a time (Unix) into a meeting."""
    logs = [[event for event in log if event["at"] < until] for log in logs]
    meeting.broken = [
        str(event["reason"]) for log in logs for event in log if event["event"] == "link_lost"
    ]
    meeting.twice = all(any(event["event"] == "founded" for event in log) for log in logs)
    rounds = [
        {
            f: [e["at"] for e in log if e["event"] == "round" and e["fragment"] == f]
            for f in range(FRAGMENTS)
        }
        for log in logs
    ]
    meeting.rounds = sum(len(times) for times in rounds[1].values())
    known = [next(e["at"] for e in log if e["event"] == "in_run") for log in logs]
    for fragment in range(FRAGMENTS):
        merged = sorted(at for each in rounds for at in each[fragment] if at > max(known))
        gaps = [after - before for before, after in pairwise([max(known), *merged, until])]
        meeting.wait_s = max(meeting.wait_s, max(gaps) - CYCLE_S)
        led = [list(leads(log, fragment, until)) for log in logs]
        meeting.doubles += sum(
            min(end, other_end) - max(began, other_began) > DOUBLE_S
            for began, end in led[0]
            for other_began, other_end in led[1]
        )


def leads(
    log: Sequence[dict[str, Any]], fragment: int, until: float
) -> Iterator[tuple[float, float]]:
    """The times in which a peer gathers a group for a fragment."""
    since: float | None = None
    for event in log:
        if event.get("fragment") != fragment:
            continue
        if event["event"] == "gathering" and since is None:
            since = event["at"]
        elif event["event"] in OVER and since is not None:
            yield since, event["at"]
            since = None
    if since is not None:
        yield since, until


def meet(
    kind: str, offset_s: float, processes: Processes, *, seed: str, together_s: float, folder: Path
) -> Meeting:
    """Have two learners meet."""
    meeting, learners = Meeting(kind, offset_s), list[Learner]()

    def start(seeds: Sequence[str], found_after_s: float) -> None:
        number = len(learners)
        directory = folder / f"peer{number}"
        directory.mkdir()
        learners.append(
            Learner(
                processes,
                directory,
                # On one machine the second would join the first without a search.
                environment={"XDG_DATA_HOME": str(folder / f"home{number}")},
                run=learner_process.text(
                    fragments=FRAGMENTS,
                    cycle=CYCLE_STEPS,
                    quorum_deadline_s=30.0,
                    heartbeat_s=10.0,
                    expiry_s=40.0,
                ),
                name=f"peer{number}",
                seeds=list(seeds),
                found_after_s=found_after_s,
                pace_s=PACE_S,
                sample_seed=number,
            )
        )

    if kind == "join":
        start([], 0.0)
        first = seed_of(learners[0])
        time.sleep(offset_s)
        start([first], 60.0)
    else:
        start([seed], LOOKS_FIRST_S)
        time.sleep(offset_s)
        start([seed], LOOKS_FIRST_S)
    firsts = [learner.ready() and learner.said("step")[0] for learner in learners]
    time.sleep(together_s)
    until = time.time()
    for learner in learners:
        learner.stop()
    for learner in learners:
        learner.end()
    logs = [list(read_events(learner.directory / "events.jsonl")) for learner in learners]
    for log, first_step in zip(logs, firsts, strict=True):
        log.append({"at": first_step["at"], "event": "in_run"})
    for learner in learners:
        path = learner.directory / "agent.log"
        told = path.read_text(errors="replace") if path.exists() else ""
        meeting.restarts += re.findall(r"daemon_lost .*?reason=(.*?) last_line", told)
    judged(meeting, logs, until)
    return meeting


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--meetings", type=int, default=8)
    parser.add_argument("--kind", choices=("join", "start"), help="only these (default: in turns)")
    parser.add_argument("--together", type=float, default=12.0, help="seconds of both in the run")
    parser.add_argument("--keep", type=Path, help="a new folder for the peers' folders")
    parser.add_argument("--wait-max", type=float, default=3.0)
    parser.add_argument(
        "--within", type=float, default=500.0, help="begin none after these seconds"
    )
    options = parser.parse_args(arguments)
    began, done = time.monotonic(), list[Meeting]()
    with (
        tempfile.TemporaryDirectory(prefix="shoal-meetings-") as made,
        Processes(options.keep or Path(made)) as processes,
    ):
        base = options.keep or Path(made)
        base.mkdir(parents=True, exist_ok=True)
        seed = address_of(Swarm(processes, base).bootstrap())
        tell(HEAD)
        for number in range(options.meetings):
            if time.monotonic() - began > options.within:
                break
            kind = options.kind or ("join", "start")[number % 2]
            offset_s = 3.0 * ((number * 0.618) % 1.0)  # every part of the range, evenly
            folder = base / str(number)
            folder.mkdir(parents=True)
            with Processes(folder) as here:
                met = meet(
                    kind, offset_s, here, seed=seed, together_s=options.together, folder=folder
                )
            done.append(met)
            tell(met.line())
            for reason in [*met.broken, *met.restarts]:
                tell(f"      {reason}")
    broken = sum(len(met.broken) for met in done)
    restarts = sum(len(met.restarts) for met in done)
    longest = max((met.wait_s for met in done), default=0.0)
    tell(
        f"{len(done)} meetings: {broken} broken streams in {sum(bool(m.broken) for m in done)}, "
        f"longest wait {longest:.1f} s, {sum(m.wait_s > options.wait_max for m in done)} over "
        f"{options.wait_max:g} s, {sum(m.doubles for m in done)} double leads, "
        f"{sum(m.twice for m in done)} founded twice, {restarts} daemon restarts"
    )
    return int(bool(broken or restarts or longest > options.wait_max))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
