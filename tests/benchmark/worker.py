"""The process of one peer of ``tests.benchmark.averaging``.

It reads commands as JSON lines on its standard input, carries them out with a ``Participant``,
answers on its standard output, and measures itself. ``tests.benchmark.averaging`` sends the
commands.
"""

from __future__ import annotations

import json
import os
import sys
import time

from tests.benchmark.meter import Meter
from tests.benchmark.participant import Participant, Reply, Setup, largest_error


def open_participant(system: str, setup: Setup, meeting_point: str | None) -> Participant:
    """Start one peer; ``meeting_point`` is ``None`` for the first one.

    Imports are local: each system has heavy dependencies of its own.
    """
    if system == "gloo":
        from tests.benchmark.gloo_averager import GlooParticipant

        return GlooParticipant(setup, meeting_point)
    if system == "hivemind":
        from tests.benchmark.hivemind_averager import HivemindParticipant

        return HivemindParticipant(setup, meeting_point)
    if system in ("shoal", "daemon", "numpy"):
        from tests.benchmark.shoal_averager import ShoalParticipant

        return ShoalParticipant(
            setup, meeting_point, direct=system != "daemon", compiled=system != "numpy"
        )
    raise ValueError(f"system is {system!r}; known: daemon, gloo, hivemind, numpy, shoal")


class CommandLoop:
    """Carries out the commands of the benchmark, one at a time."""

    def __init__(self, system: str, setup: Setup) -> None:
        self._system = system
        self._setup = setup
        self._participant: Participant | None = None
        self._meter = Meter()
        self._direct_bytes_before = 0

    def obey(self, do: str, arguments: Reply) -> Reply:
        """Carry out one command and return the reply."""
        if self._participant is None:
            assert do == "open", f"{do} came before open"
            opened = open_participant(self._system, self._setup, arguments["meeting_point"])
            self._participant = opened
            return {"meeting_point": opened.meeting_point}
        participant = self._participant
        match do:
            case "ready":
                participant.ready()
                self._meter.start()
                self._direct_bytes_before = participant.direct_bytes_sent
                return {}
            case "form" | "exchange":
                began = time.perf_counter()
                (participant.form if do == "form" else participant.exchange)()
                return {"seconds": time.perf_counter() - began}
            case "spent":
                return self._usage(participant)
            case "error":
                return {"max_error": largest_error(participant.result(), self._setup.peers)}
            case "close":
                participant.close()
                return {}
            case _:  # a command that only one system has
                reply: Reply = getattr(participant, f"do_{do}")(**arguments)
                return reply

    def _usage(self, participant: Participant) -> Reply:
        usage = self._meter.stop()
        reply: Reply = {
            "cpu_seconds": usage.cpu_seconds,
            "peak_memory_bytes": usage.peak_memory_bytes,
        }
        if usage.daemon_bytes_sent is not None:
            direct = participant.direct_bytes_sent - self._direct_bytes_before
            reply["bytes_sent"] = usage.daemon_bytes_sent + direct
        return reply


def main() -> None:
    settings = json.loads(sys.argv[1])
    commands = CommandLoop(settings.pop("system"), Setup(**settings))
    # Libraries print: replies get a descriptor of their own, and prints go to standard error.
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        arguments = json.loads(line)
        do = arguments.pop("do")
        replies.write(json.dumps(commands.obey(do, arguments)) + "\n")
        if do == "close":
            return


if __name__ == "__main__":
    main()
