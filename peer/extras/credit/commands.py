"""``shoal credit``: who has contributed to a run, and how one's own work is shown."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from typer import Argument, Option

from dht.identity import Identity, PeerId, RunId, parse_peer_id
from peer.cli.application import SEE, Json, complain, json_text, start_logging
from peer.cli.finding import link_of, seen_by_peers
from peer.quantities import plural
from peer.storage.home import occupant_of, running_peers

if TYPE_CHECKING:
    from peer.contributors import Contributor

commands = typer.Typer()

SEARCH_S = 15.0


@commands.command(rich_help_panel=SEE)
def credit(
    where: Annotated[
        str | None,
        Argument(
            metavar="RUN_DIR|LINK",
            help="Folder of one peer, or shoal:// link or file of a run; by default your running "
            "peers, see `shoal status`.",
        ),
    ] = None,
    name: Annotated[
        str | None,
        Option(
            help="Show your work under this name; '' for no name. By default it is the --name of "
            "the peer."
        ),
    ] = None,
    also_mine: Annotated[
        list[str] | None,
        Option(
            "--also-mine",
            metavar="PEER",
            help="Id of another peer of yours: your work is counted together once that one has "
            "named this one, too. Repeatable; replaces the peers named before.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """List who has contributed to a run, by merged tokens, and choose how your own work is shown.

    Only work that the run has merged counts. The ids of your peers are in `shoal credit --json`.

    Example: shoal credit --name 'Ada of the Alps' --also-mine 12D3KooW...
    """
    from peer.events.names import printable

    rows: dict[str, list[Contributor]] = {}
    if where is not None and ("://" in where or Path(where).is_file()):
        if name is not None or also_mine:
            raise typer.BadParameter(
                "--name and --also-mine are about a peer of yours: give its folder, see `shoal "
                "status`"
            )
        rows[where] = _of_peers(where)
        own: dict[str, str] = {}
    else:
        folders = _folders(where)
        if name is not None or also_mine:
            _state(folders, name, also_mine or ())
            changed = plural(len(folders), "peer")
            complain(f"changed {changed}; the others know it within a minute of training")
        rows = {str(folder): _in_folder(folder) for folder in folders}
        own = {str(folder): _peer_of(folder) for folder in folders}
    if as_json:
        print(json_text({place: _record(rows[place], own.get(place)) for place in rows}))
        return
    from peer.extras.credit.accounting.contributors import lines

    for place, counted in rows.items():
        if len(rows) > 1:
            print(f"{place}:")
        print("\n".join(map(printable, lines(counted))))


def _record(rows: list[Contributor], own: str | None) -> dict[str, object]:
    from peer.contributors import plain

    return {"peer": own, "contributors": plain(rows)}


def _folders(where: str | None) -> list[Path]:
    folders = list(running_peers()) if where is None else [Path(where)]
    if not folders or not all((folder / "identity.key").exists() for folder in folders):
        raise typer.BadParameter(
            "none of your peers is running on this machine; name the folder of one, or a link"
            if where is None
            else f"{where} is not the folder of a peer: it has no identity.key"
        )
    return folders


def _peer_of(folder: Path) -> PeerId:
    return Identity.load(folder / "identity.key").peer_id


def _in_folder(folder: Path) -> list[Contributor]:
    """The contributors that a peer on this machine knows, as it last noted them."""
    from peer.extras.credit.accounting.tally import FRAGMENTS_MAX
    from peer.extras.credit.kept import contributors_in

    who = occupant_of(folder)
    if who is None:
        return []
    return contributors_in(folder, RunId(who.run_id), FRAGMENTS_MAX)


def _of_peers(where: str) -> list[Contributor]:
    """The contributors as the peers of a run on line tell."""
    start_logging(logging.ERROR)
    seen = seen_by_peers(link_of(where), timeout_s=SEARCH_S)
    seen.check_admitted()
    seen.check_answered()
    return list(seen.contributors)


def _state(folders: list[Path], name: str | None, also_mine: list[str] | tuple[()]) -> None:
    """Write how the work of these peers is shown; each reads it while it runs."""
    from peer.extras.credit.accounting.statements import Statement, problem_of
    from peer.extras.credit.kept import Wishes, read_wishes, write_wishes

    try:
        keys = tuple(parse_peer_id(text) for text in also_mine)
    except ValueError as error:
        raise typer.BadParameter(f"--also-mine: {error}") from error
    for folder in folders:
        before = read_wishes(folder) or Wishes()
        me = _peer_of(folder)
        wishes = msgspec.structs.replace(
            before,
            name=before.name if name is None else name,
            keys=tuple(key for key in keys if key != me) if keys else before.keys,
        )
        problem = problem_of(Statement(me, 0, wishes.name or "", wishes.keys))
        if problem is not None:
            raise typer.BadParameter(problem)
        write_wishes(folder, wishes)
