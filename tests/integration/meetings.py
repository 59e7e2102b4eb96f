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

Torch is imported once: learners are forked from this process. The exit code is 1 if a stream broke,
a daemon was restarted or a wait was longer than ``--wait-max``.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

import peer.trainer.parts  # noqa: F401  # imported before the forks, as what the optimizer imports
from dht.presence.presence import Presence
from dht.presence.settings import Profile
from peer.storage.address import LOOKS_FIRST_S
from peer.views.event_log import read_events
from tests.integration.loopback import LOOPBACK, identity
from tests.processes import said
from tests.swarms import learner_process

FRAGMENTS, CYCLE_STEPS, PACE_S = 3, 24, 0.05
CYCLE_S = CYCLE_STEPS * PACE_S
DOUBLE_S = 1.0
IN_THE_RUN_WITHIN_S = 60.0
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
    trouble: str = ""

    def line(self) -> str:
        return (
            f"{self.kind:5} {self.offset_s:6.2f} {len(self.broken):6} {self.wait_s:6.1f} "
            f"{self.doubles:6} {'yes' if self.twice else 'no':>5} {len(self.restarts):7} "
            f"{self.rounds:6} {self.trouble}"
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
    entered = [next((e["at"] for e in log if e["event"] == "in_run"), None) for log in logs]
    known = [at for at in entered if at is not None]
    if len(known) < 2:
        meeting.trouble = "not both in the run"
        return
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


class Learners:
    """The two learners of one meeting, forked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pids: list[int] = []

    def start(self, seeds: Sequence[str], found_after_s: float) -> Path:
        number = len(self.pids)
        directory = self.folder / f"peer{number}"
        directory.mkdir()
        settings = {
            "directory": str(directory),
            "run": learner_process.text(
                fragments=FRAGMENTS,
                cycle=CYCLE_STEPS,
                quorum_deadline_s=30.0,
                heartbeat_s=10.0,
                expiry_s=40.0,
            ),
            "name": f"peer{number}",
            "seeds": list(seeds),
            "found_after_s": found_after_s,
            "pace_s": PACE_S,
            "sample_seed": number,
        }
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            # On one machine the second would join the first without a search.
            os.environ["XDG_DATA_HOME"] = str(self.folder / f"home{number}")
            output = os.open(self._output(number), os.O_CREAT | os.O_WRONLY, 0o600)
            os.dup2(output, 1)
            os.dup2(output, 2)
            code = 1
            try:
                learner_process.main(settings)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(code)
        self.pids.append(pid)
        return directory

    def _output(self, number: int) -> Path:
        return self.folder / f"output{number}.txt"

    def said(self, number: int, kind: str) -> list[dict[str, Any]]:
        output = self._output(number)
        text = output.read_text(errors="replace") if output.exists() else ""
        return said(text, kind)

    def stop(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            deadline = time.monotonic() + 30.0
            for pid in self.pids:
                os.kill(pid, number)
            while self.pids and time.monotonic() < deadline:
                self.pids = [pid for pid in self.pids if os.waitpid(pid, os.WNOHANG)[0] == 0]
                time.sleep(0.05)


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def wait_for(learners: Learners, number: int, kind: str) -> dict[str, Any]:
    deadline = time.monotonic() + IN_THE_RUN_WITHIN_S
    while time.monotonic() < deadline:
        if said := learners.said(number, kind):
            return said[0]
        time.sleep(0.05)
    raise TimeoutError(f"peer {number} did not say {kind} within {IN_THE_RUN_WITHIN_S:g} s")


def meet(kind: str, offset_s: float, *, seed: str, together_s: float, folder: Path) -> Meeting:
    """Have two learners meet."""
    meeting = Meeting(kind, offset_s)
    learners = Learners(folder)
    try:
        if kind == "join":
            learners.start([], 0.0)
            link = str(wait_for(learners, 0, "ready")["link"])
            time.sleep(offset_s)
            learners.start([link.partition("seed=")[2].split("&")[0]], 60.0)
        else:
            learners.start([seed], LOOKS_FIRST_S)
            time.sleep(offset_s)
            learners.start([seed], LOOKS_FIRST_S)
        for number in (0, 1):
            wait_for(learners, number, "step")
        time.sleep(together_s)
    except TimeoutError as error:
        meeting.trouble = str(error)
    except BaseException:
        learners.stop()
        raise
    until = time.time()
    firsts = [
        next(iter(learners.said(number, "step")), None) for number in range(len(learners.pids))
    ]
    count = len(learners.pids)
    learners.stop()
    directories = [folder / f"peer{number}" for number in range(count)]
    logs = [list(read_events(directory / "events.jsonl")) for directory in directories]
    for log, first in zip(logs, firsts, strict=True):
        if first is not None:
            log.append({"at": first["at"], "event": "in_run"})
    for directory in directories:
        path = directory / "agent.log"
        said = path.read_text(errors="replace") if path.exists() else ""
        meeting.restarts += re.findall(r"daemon_lost .*?reason=(.*?) last_line", said)
    if len(logs) == 2:
        judged(meeting, logs, until)
    return meeting


@contextmanager
def bootstrap() -> Iterator[str]:
    """The address of a bootstrap host, which runs in a process of its own."""
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

        async def serve() -> None:
            from dataclasses import replace

            from dht.libp2p.hivemind_host import HivemindHost

            daemon = replace(LOOPBACK.daemon, serve_as_relay=True, is_public=True)
            host = await HivemindHost.open(identity(1), replace(LOOPBACK, daemon=daemon))
            presence = Presence(host, identity(1), Profile(None, role="bootstrap"))
            await presence.start()
            os.write(write, f"{(await host.addresses())[0]}\n".encode())
            await presence.watch()

        asyncio.run(serve())
        os._exit(0)
    try:
        yield os.fdopen(read).readline().strip()
    finally:
        os.kill(pid, signal.SIGTERM)
        os.waitpid(pid, 0)


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
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))  # and end the learners
    torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)
    began, done = time.monotonic(), list[Meeting]()
    with tempfile.TemporaryDirectory(prefix="shoal-meetings-") as base, bootstrap() as seed:
        base = options.keep or base
        say(HEAD)
        for number in range(options.meetings):
            if time.monotonic() - began > options.within:
                break
            kind = options.kind or ("join", "start")[number % 2]
            offset_s = 3.0 * ((number * 0.618) % 1.0)  # every part of the range, evenly
            folder = Path(base) / str(number)
            folder.mkdir(parents=True)
            met = meet(kind, offset_s, seed=seed, together_s=options.together, folder=folder)
            done.append(met)
            say(met.line())
            for reason in [*met.broken, *met.restarts]:
                say(f"      {reason}")
    broken = sum(len(met.broken) for met in done)
    restarts = sum(len(met.restarts) for met in done)
    longest = max((met.wait_s for met in done), default=0.0)
    say(
        f"{len(done)} meetings: {broken} broken streams in {sum(bool(m.broken) for m in done)}, "
        f"longest wait {longest:.1f} s, {sum(m.wait_s > options.wait_max for m in done)} over "
        f"{options.wait_max:g} s, {sum(m.doubles for m in done)} double leads, "
        f"{sum(m.twice for m in done)} founded twice, {restarts} daemon restarts, "
        f"{sum(bool(m.trouble) for m in done)} not judged"
    )
    return int(bool(broken or restarts or longest > options.wait_max))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
