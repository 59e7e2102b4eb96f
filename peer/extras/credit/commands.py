"""``shoal credit``: who has contributed to a run."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument

from dht.identity import Identity, RunId
from peer.cli.application import SEE, Json, json_text, start_logging
from peer.cli.finding import link_of, seen_by_peers
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
    as_json: Json = False,
) -> None:
    """List who has contributed to a run, by merged tokens.

    Only work that the run has merged counts. Your own is shown under the --name of your peer; its
    id is in `shoal credit --json`.

    Example: shoal credit 'shoal://RUN_ID?seed=...'
    """
    from peer.events.names import printable

    own: dict[str, str] = {}
    if where is not None and ("://" in where or Path(where).is_file()):
        rows = {where: _of_peers(where)}
    else:
        folders = _folders(where)
        rows = {str(folder): _in_folder(folder) for folder in folders}
        own = {str(f): Identity.load(f / "identity.key").peer_id for f in folders}
    if as_json:
        print(json_text({place: _record(rows[place], own.get(place)) for place in rows}))
        return
    from peer.extras.credit.accounting.tally import lines

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


def _in_folder(folder: Path) -> list[Contributor]:
    """The contributors that a peer on this machine knows, as it last noted them."""
    from peer.extras.credit.reading import contributors_in

    who = occupant_of(folder)
    return [] if who is None else contributors_in(folder, RunId(who.run_id))


def _of_peers(where: str) -> list[Contributor]:
    """The contributors as the peers of a run on line tell."""
    start_logging(logging.ERROR)
    seen = seen_by_peers(link_of(where), timeout_s=SEARCH_S)
    seen.check_admitted()
    seen.check_answered()
    return list(seen.contributors)
