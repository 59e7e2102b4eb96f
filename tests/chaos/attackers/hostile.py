"""A hostile learner: it takes part in a run, but spoils its uploads, or lies on orders.

``python -m tests.chaos.attackers.hostile join LINK ...`` is an ordinary learner whose agent is
``tests.chaos.attackers.hostile_agent`` or, with ``--orders``,
``tests.chaos.attackers.lying_agent``. It accepts the options of ``shoal join`` that
``tests.chaos.members`` passes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from peer.joining.link import find_run
from peer.trainer.loop import Stop, TrainerSettings, train
from peer.trainer.settings import JoinSettings
from peer.views.watch import JsonReporter


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("join", choices=["join"])
    parser.add_argument("link")
    for option in ("--directory", "--name", "--listen", "--announce", "--orders"):
        parser.add_argument(option)
    parser.add_argument("--pace", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--yes", action="store_true")
    given = parser.parse_args(arguments)
    directory = Path(given.directory)
    agent = ["tests.chaos.attackers.hostile_agent"]
    if given.orders is not None:
        agent = ["tests.chaos.attackers.lying_agent", given.orders]
    found = find_run(given.link)
    own = JoinSettings(
        directory=directory,
        name=given.name,
        seeds=tuple(str(address) for address in found.seeds),
        listen=(given.listen,),
        announce=() if given.announce is None else (given.announce,),
        pace_s=given.pace,
        agent_command=(sys.executable, "-m", *agent, str(directory / "hostile.jsonl")),
    )

    def say(text: str) -> None:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    with JsonReporter(say) as reporter, Stop().on_signals() as stop:
        train(
            found.run,
            own=own,
            settings=TrainerSettings(device="cpu", threads=given.threads),
            stop=stop,
            on_event=reporter.on_event,
            on_step=reporter.on_step,
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
