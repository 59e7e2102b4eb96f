"""``python -m tests.integration.wan``: prints what faults of a wide-area network cost."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from pathlib import Path
from typing import TextIO

from peer.run_file.reading import parse, with_settings
from tests.integration.wan.experiment import conduct, table
from tests.processes import Processes
from tests.swarms.commands import load
from tests.swarms.topology import Nat, cannot_build
from tests.swarms.wide_area import FAULTS, sites


def happening(text: str) -> tuple[str, float]:
    """A fault as ``NAME`` or ``NAME=SECONDS``."""
    name, _, seconds = text.partition("=")
    if name not in FAULTS:
        raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(FAULTS)}")
    try:
        return name, float(seconds) if seconds else FAULTS[name].seconds
    except ValueError:
        raise argparse.ArgumentTypeError(f"{seconds!r} is no number of seconds") from None


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.integration.wan", description=__doc__)
    parser.add_argument(
        "happenings",
        nargs="*",
        type=happening,
        metavar="FAULT[=SECONDS]",
        help=f"what happens, in this order ({', '.join(FAULTS)}); by default all but narrow",
    )
    parser.add_argument("--run", type=Path, help="run file to train, with other seeds")
    parser.add_argument("--public", type=int, default=3, help="number of public peers")
    parser.add_argument(
        "--mbit", type=float, help="Mbit/s of each public peer; by default 50, 100, 20 in turn"
    )
    parser.add_argument(
        "--home",
        action="append",
        type=Nat,
        choices=list(Nat),
        help="kind of router of a home; repeatable; by default two that are port-restricted, "
        "and none with --run",
    )
    parser.add_argument("--loss", type=float, default=0.0, help="share of packets that are lost")
    parser.add_argument("--relay", help="rate at which the bootstrap host relays, such as 10M")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument(
        "--cycle", type=int, help="steps between merges; by default 200, with --run those of it"
    )
    parser.add_argument(
        "--cycle-max", type=int, help="longest cycle; by default cycles do not follow the lines"
    )
    parser.add_argument("--pace", type=float, default=0.05, help="least seconds of a step")
    parser.add_argument(
        "--heartbeat", type=float, default=2.0, help="seconds between heartbeats of the membership"
    )
    parser.add_argument(
        "--line-share", type=float, default=0.7, help="share of a line that rounds may take"
    )
    parser.add_argument("--folder", type=Path, help="keep the peers' files in this new folder")
    return parser.parse_args()


def say(line: str, where: TextIO) -> None:
    where.write(f"{line}\n")
    where.flush()


def main() -> int:
    options = arguments()
    if (reason := cannot_build()) is not None:
        sys.stderr.write(f"wide-area networks cannot be made here: {reason}\n")
        return 2
    # A time limit ends this process, and with it the network and all that runs there.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    usual = [(name, FAULTS[name].seconds) for name in FAULTS if name != "narrow"]
    happenings = options.happenings or usual
    homes = options.home or [Nat.PORT_RESTRICTED] * (0 if options.run else 2)
    run = None
    if options.run:
        changes = {} if options.cycle is None else {"outer.steps_per_cycle": options.cycle}
        run = with_settings(parse(options.run.read_text()), changes, source="--cycle")
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(exist_ok=True)
        with Processes(folder) as processes:
            outcome = conduct(
                sites(options.public, homes, public_mbit=options.mbit),
                happenings,
                processes,
                folder,
                loss=options.loss,
                relay=options.relay,
                pace_s=options.pace,
                tell=lambda line: say(line, sys.stderr),
                run=run,
                layers=options.layers,
                width=options.width,
                cycle=options.cycle or 200,
                line_share=options.line_share,
                outer=f"steps_per_cycle_max = {options.cycle_max}" if options.cycle_max else "",
                heartbeat_s=options.heartbeat,
                expiry_s=4 * options.heartbeat,
            )
    say(table(outcome), sys.stdout)
    say(f"{load()} at the end", sys.stdout)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
