"""``shoal doctor``: check this machine and the network around it."""

from __future__ import annotations

import logging
import os
from typing import Annotated

import typer
from typer import Argument, Option

from peer.cli.application import SEE, Json, json_text, start_logging
from peer.storage.home import data_home

commands = typer.Typer()


@commands.command(rich_help_panel=SEE)
def doctor(
    targets: Annotated[
        list[str] | None,
        Argument(metavar="LINK|MULTIADDR...", help="Run links or bootstrap peers to test."),
    ] = None,
    port: Annotated[int, Option(help="TCP port to test listening on; 0: any free port.")] = 0,
    as_json: Json = False,
) -> int:
    """Check this machine and its network, and print what to do about each problem.

    Example: shoal doctor /dns4/seed1.example.org/tcp/7700/p2p/12D3Koo...
    """
    from peer.extras.doctor.examination import examine
    from peer.extras.doctor.network import plan_of
    from peer.extras.doctor.this_machine import Finding, as_record, exit_code
    from peer.signals import run_unless_stopped

    start_logging(logging.ERROR)
    plan = plan_of(targets or (), port=port, data_directory=data_home(os.environ))

    def show(finding: Finding) -> None:
        if not as_json:
            print(finding, flush=True)

    findings = run_unless_stopped(examine(plan, on_finding=show))
    if as_json:
        print(json_text(as_record(findings), indent=1))
    return exit_code(findings)
