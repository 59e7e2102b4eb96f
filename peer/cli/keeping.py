"""``shoal keep``: keep a run's state without training."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from multiaddr import Multiaddr
from typer import Argument, Option

from dht.bounded_mapping import ALL, PROCESS_BYTES_MAX
from dht.identity import Identity
from peer.cli.application import (
    TAKE_PART,
    JsonLines,
    RelayBulk,
    RunPageAt,
    complain,
    json_text,
    log_to,
    print_summary,
    say,
    start_logging,
)
from peer.cli.finding import check_somebody_to_ask, find_patiently
from peer.cli.learner_options import (
    Announce,
    Directory,
    Lane,
    Listen,
    Name,
    Page,
    Seeds,
    StateOnDisk,
    Yes,
    check_answerable,
    chosen,
    page_of,
)
from peer.errors import ExitCode
from peer.installed import extra
from peer.run_file.sections import CustomModel
from peer.storage.home import OUTER, keeper_directory, occupied

if TYPE_CHECKING:
    from averaging.numbers.layout import Layout
    from peer.joining.link import FoundRun

commands = typer.Typer()


@commands.command(rich_help_panel=TAKE_PART)
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
    state_on_disk: StateOnDisk = "auto",
    relay_bulk: RelayBulk = None,
    page: Page = "auto",
    until: Annotated[
        str,
        Option(
            help="How long to keep the run: 'forever', 'end' (of the run), or a date and time such "
            "as 2027-01-31T18:00; one that is past is refused (exit code 2).",
            metavar="forever|end|DATE",
        ),
    ] = "forever",
    publish: Annotated[
        Path | None,
        Option(
            file_okay=False,
            help="Write the run's model to this folder from time to time, each time complete or "
            "not at all, with a link 'latest', for any web server to serve.",
            metavar="FOLDER",
        ),
    ] = None,
    every: Annotated[
        str | None,
        Option(
            help="With --publish: time between two exports, such as 30m, 6h or 1d. [default: 1h]"
        ),
    ] = None,
    keep_exports: Annotated[
        int | None,
        Option(
            help="With --publish: number of exports that stay; older ones are removed. "
            "[default: 3]",
            min=1,
        ),
    ] = None,
    push: Annotated[
        str | None,
        Option(
            help="With --publish: upload each export to this repository on the hub of Hugging "
            "Face, too. The token is that of `hf auth login`.",
            metavar="OWNER/NAME",
        ),
    ] = None,
    run_page: RunPageAt = None,
    as_json: JsonLines = False,
    yes: Yes = False,
) -> int:
    """Keep the state of a run without training, so that it survives while no learner is online.

    It stays after the run's end and serves the final state: `shoal export LINK` fetches it there.

    Example: shoal keep 'shoal://RUN_ID?seed=/ip4/203.0.113.7/tcp/7700/p2p/12D3Koo...'
    """
    ends = _date(until)  # before libraries that take seconds to import
    options = {
        "publish": publish,
        "every": every,
        "keep_exports": keep_exports,
        "push": push,
        "run_page": run_page,
    }
    is_public = any(value is not None for value in options.values())
    public = extra("site.keeping").asked_for(**options) if is_public else None
    check_answerable(yes)
    start_logging(logging.WARNING)
    found_run = find_patiently(link, directory)

    from peer.agent import keeper
    from peer.agent.services import Seat
    from peer.bridge.settings import PeerSettings
    from peer.guest.enforcement import read_limits, write_limits
    from peer.rules.limits import parse_relay_rate
    from peer.signals import run_until_stopped
    from peer.storage.checkpoint import CheckpointFolder
    from peer.storage.credentials import own_credential
    from peer.storage.earlier import look_at_files
    from peer.trainer.parameters import recipe_layout
    from peer.trainer.preflight import check_keeper
    from peer.trainer.settings import with_public_ports
    from peer.views.watch import Sentences

    where = directory or keeper_directory(found_run.run.run_id)
    seeds = (*(seed or ()), *map(str, found_run.seeds))
    check_somebody_to_ask(found_run, link, seeds, where)
    told_layout = _told_layout(found_run, seeds, where)
    lines = check_keeper(found_run.run, where, told_layout)
    if public is not None:
        public.check(found_run.run)
    for text in look_at_files(where).told:
        complain(text)
    if not yes:
        print_summary(lines)
        if not typer.confirm("Take part?", default=True):
            return ExitCode.REFUSED
    layout = told_layout or recipe_layout(found_run.run)

    sentence = Sentences()

    def show(event: str, fields: Mapping[str, Any]) -> None:
        record = {**fields, "event": event}
        text = json_text(record) if as_json else sentence(record)
        if text:
            say(text)

    with occupied(where, found_run.run, "keeper"):
        if relay_bulk is not None:
            rate = parse_relay_rate(relay_bulk)
            write_limits(where, msgspec.structs.replace(read_limits(where), relay_bytes_s=rate))
        log_to(where / "keeper.log")
        identity = Identity.load_or_create(where / "identity.key")
        credential = own_credential(
            where, identity, found_run.run, role="keeper", invite=found_run.invite
        )
        seat = Seat(
            run=found_run.run,
            identity=identity,
            directory=where,
            settings=with_public_ports(
                PeerSettings(
                    name=name,
                    seeds=seeds,
                    lane=lane,
                    state_on_disk=state_on_disk,
                    page=page_of(page),
                    **chosen(listen=listen, announce=announce),
                ),
                tell=complain,
            ),
            role="keeper",
            credential=credential,
            stays=until != "end",
            services=() if public is None else public.services(),
        )
        ALL.bytes_max = PROCESS_BYTES_MAX
        ending = run_until_stopped(lambda stop: keeper.keep(seat, layout, stop, show, until=ends))
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
    from peer.joining.link import Link
    from peer.joining.visit import LOOK_S, visit
    from peer.signals import run_unless_stopped
    from peer.storage.checkpoint import CheckpointFolder
    from peer.storage.credentials import owners_invite
    from peer.storage.outer_state import load_outer

    run = found.run
    if not isinstance(run.model, CustomModel):
        return None
    kept = load_outer(CheckpointFolder(where / OUTER), run_id=run.run_id)
    if kept is not None:
        return kept.layout
    link = Link(run.run_id, tuple(map(Multiaddr, seeds)), found.invite)

    async def told() -> Layout:
        async with visit(link, own_invite=owners_invite) as visitor:
            seen = await visitor.look(timeout_s=LOOK_S)
            seen.check_admitted()
            return await visitor.told_layout([each for each in seen.peers if each.versions], run)

    return run_unless_stopped(told())


def _date(until: str) -> datetime | None:
    """The date of ``--until``; ``None`` for a word."""
    if until in ("forever", "end"):
        return None
    try:
        date = datetime.fromisoformat(until).astimezone(UTC)
    except (ValueError, OverflowError) as error:
        raise typer.BadParameter(
            f"--until is {until!r}; it is 'forever', 'end' or a date such as 2027-01-31 or "
            "2027-01-31T18:00"
        ) from error
    if date <= datetime.now(UTC):
        raise typer.BadParameter(f"--until is {until!r}, which is past")
    return date
