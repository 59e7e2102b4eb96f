"""``shoal keep``: keep a run's state without training."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from peer.cli.application import complain, log_to, start_logging
from peer.cli.finding import find_patiently
from peer.cli.learner_options import (
    Announce,
    Directory,
    Lane,
    Listen,
    Name,
    Page,
    Seeds,
    addresses_of,
    page_of,
    seeds_of,
)
from peer.cli.options import JsonLines, RelayBulk

if TYPE_CHECKING:
    from averaging.numbers.layout import Layout
    from peer.joining.link import FoundRun

commands = typer.Typer()

ANY_PORT = ("/ip4/0.0.0.0/tcp/0",)

Until = Annotated[
    str,
    Option(
        help="How long to keep the run: 'forever', 'end' (of the run), or a date and time such as "
        "2027-01-31T18:00.",
        metavar="forever|end|DATE",
    ),
]


@commands.command()
def keep(
    link: Annotated[
        str, Argument(help="shoal:// link, https address, or run file.", metavar="LINK")
    ],
    directory: Directory = None,
    seed: Seeds = None,
    name: Name = None,
    listen: Listen = None,
    announce: Announce = None,
    lane: Lane = "auto",
    relay_bulk: RelayBulk = None,
    page: Page = "auto",
    until: Until = "forever",
    as_json: JsonLines = False,
) -> int:
    """Keep the state of a run without training, so that it survives while no learner is online.

    It stays after the run's end and serves the final state: `shoal export LINK` fetches it there.

    Example: shoal keep 'shoal://RUN_ID?seed=/ip4/203.0.113.7/tcp/7700/p2p/12D3Koo...'
    """
    ends = _date(until)  # before libraries that take seconds to import

    import msgspec

    from dht.identity import Identity
    from peer.agent import keeper
    from peer.agent.local_peer import PeerSettings
    from peer.event_loop import run_until_stopped
    from peer.guest.enforcement import read_limits, write_limits
    from peer.joining.nickname import default_name
    from peer.rules.limits import parse_relay_rate
    from peer.storage.checkpoint import CheckpointFolder
    from peer.storage.credentials import own_credential
    from peer.storage.earlier import look_at_checkpoints
    from peer.storage.home import OUTER, keeper_directory, occupied
    from peer.trainer.parameters import recipe_layout
    from peer.trainer.preflight import check_keeper
    from peer.views.watch import sentence

    start_logging(logging.WARNING)
    found = find_patiently(link, directory)
    where = directory or keeper_directory(found.run.run_id)
    told = _told_layout(found, seeds_of(seed), where)
    check_keeper(found.run, where, told)
    for text in look_at_checkpoints(where).told:
        complain(text)
    layout = told or recipe_layout(found.run)

    def show(event: str, fields: Mapping[str, Any]) -> None:
        record = {**fields, "event": event}
        text = json.dumps(record, default=str) if as_json else sentence(record)
        if text:
            print(text, flush=True)

    with occupied(where, found.run, "keeper"):
        if relay_bulk is not None:
            rate = parse_relay_rate(relay_bulk)
            write_limits(where, msgspec.structs.replace(read_limits(where), relay_bytes_s=rate))
        log_to(where / "keeper.log")
        identity = Identity.load_or_create(where / "identity.key")
        credential = own_credential(where, identity, found.run, role="keeper", invite=found.invite)
        settings = PeerSettings(
            run=found.run,
            identity=identity,
            directory=where,
            name=name or default_name(identity.peer_id),
            role="keeper",
            seeds=(*seeds_of(seed), *(str(address) for address in found.seeds)),
            lane=lane,
            credential=credential,
            page=page_of(page),
            stays=until != "end",
            **{"listen": ANY_PORT, "announce": (), **addresses_of(listen, announce)},
        )
        ending = run_until_stopped(
            lambda stop: keeper.keep(settings, layout, stop, show, until=ends)
        )
    if not as_json:
        saved = CheckpointFolder(where / OUTER).numbers()
        kept = (
            f"the checkpoint is in {where}"
            if saved
            else "no checkpoint of this run on this machine"
        )
        print(f"{ending.reason}; {kept}", flush=True)
    return ending.exit_code


def _told_layout(found: FoundRun, seeds: Sequence[str], where: Path) -> Layout | None:
    """The layout of a model that only programs have: as it was kept, or as the run's peers tell.

    ``None`` if it is the run's own model. Raises ``NotDownloaded``, ``NobodyMet`` or ``DhtError``.
    """
    from multiaddr import Multiaddr

    from peer.event_loop import run_until_stopped, unless_stopped
    from peer.joining.link import Link
    from peer.run_file.sections import CustomModel
    from peer.storage.checkpoint import CheckpointFolder
    from peer.storage.download import layout_of_peers
    from peer.storage.home import OUTER
    from peer.storage.outer_state import load_outer

    run = found.run
    if not isinstance(run.model, CustomModel):
        return None
    kept = load_outer(CheckpointFolder(where / OUTER), run_id=run.run_id)
    if kept is not None:
        return kept.layout
    addresses = (*map(Multiaddr, seeds), *found.seeds)
    work = layout_of_peers(Link(run.run_id, addresses, found.invite), run)
    return run_until_stopped(lambda stop: unless_stopped(stop, work))


def _date(until: str) -> datetime | None:
    """The date of ``--until``; ``None`` for a word."""
    if until in ("forever", "end"):
        return None
    try:
        date = datetime.fromisoformat(until)
    except ValueError as error:
        raise typer.BadParameter(
            f"--until is {until!r}; it is 'forever', 'end' or a date such as 2027-01-31 or "
            "2027-01-31T18:00"
        ) from error
    return date.astimezone(UTC)
