"""``shoal bootstrap``: host a bootstrap peer. ``shoal host``: host all that a public run needs."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from dht import addresses
from peer.cli.application import (
    HOST,
    InstallService,
    Json,
    RelayBulk,
    RunPageAt,
    complain,
    given_words,
    json_text,
    start_logging,
)
from peer.cli.learner_options import setting
from peer.storage.home import data_home

commands = typer.Typer()


def _key_file(path: Path | None) -> Path | None:
    if path is not None and not path.exists():
        raise typer.BadParameter(
            f"there is no key at {path}: put the copy of your bootstrap peer's key there, or leave "
            "--identity out to use the key of the data folder, which is made if there is none"
        )
    return path


NOT_OF_SERVICES = ("data_dir", "as_json", "install_service")
"""Parameters that a service has none of: its folder is systemd's."""


@commands.command(rich_help_panel=HOST)
def bootstrap(
    context: typer.Context,
    port: Annotated[int, Option(help="TCP port to listen on.")] = 7700,
    announce: Annotated[
        list[str] | None,
        Option(help="Address to announce to other peers; repeatable.", metavar="HOST|MULTIADDR"),
    ] = None,
    listen: Annotated[
        list[str] | None,
        Option(
            callback=setting("listen"),
            help="Address to listen at, instead of --port on all interfaces; repeatable.",
            metavar="MULTIADDR",
        ),
    ] = None,
    identity: Annotated[
        Path | None,
        Option(
            callback=_key_file,
            help="Key file; by default that of the data folder, which is made if there is none.",
        ),
    ] = None,
    data_dir: Annotated[Path | None, Option(help="Folder for the key and the known peers.")] = None,
    seed: Annotated[
        list[str] | None,
        Option(
            callback=setting("seeds"),
            help="Address of another bootstrap peer; repeatable.",
            metavar="MULTIADDR",
        ),
    ] = None,
    page: Annotated[
        str,
        Option(help="HOST:PORT of a web page with /healthz, /readyz and /metrics; or 'off'."),
    ] = "127.0.0.1:9100",
    run_page: RunPageAt = None,
    relay_bulk: RelayBulk = None,
    lane: Annotated[
        int | None,
        Option(help="TCP port for --relay-bulk; by default the one after --port."),
    ] = None,
    as_json: Json = False,
    install_service: InstallService = False,
) -> None:
    """Host a bootstrap peer: a stable address through which peers find each other.

    Example: shoal bootstrap --port 7700 --announce seed1.example.org
    """
    from peer.events.sentences import page_text
    from peer.extras.hosting import bootstrap as seeding
    from peer.rules.limits import parse_relay_rate
    from peer.signals import run_until_stopped
    from peer.views.page_address import parse_page

    start_logging()
    settings = seeding.BootstrapSettings(
        port=port,
        listen=tuple(addresses.parse(text) for text in listen or ()),
        announce=tuple(seeding.announced(text, port=port) for text in announce or ()),
        identity_path=identity,
        data_directory=data_dir or data_home(os.environ) / "bootstrap",
        seeds=tuple(addresses.parse_seed(text) for text in seed or ()),
        page=None if page == "off" else parse_page(page),
        run_page=None if run_page is None else parse_page(run_page, "--run-page"),
        relay_bytes_s=parse_relay_rate(relay_bulk),
        lane_port=lane,
        notify_socket=os.environ.get("NOTIFY_SOCKET"),
    )
    if install_service:
        _install_service(
            (
                *given_words(context, *NOT_OF_SERVICES, "identity"),
                *(() if identity is None else ("--identity", "%d/identity.key")),
            ),
            {} if identity is None else {"identity.key": identity},
            description="Shoal bootstrap peer",
            stop_s=seeding.END_WITHIN_S,
        )
        return

    def show(started: seeding.Bootstrap) -> None:
        if as_json:
            print(
                json_text(
                    {
                        "peer_id": started.peer_id,
                        "address": str(started.address),
                        "addresses": [str(address) for address in started.addresses],
                        "page": started.page_url,
                        "run_page": started.run_page_url,
                        "data_dir": str(settings.data_directory),
                    }
                ),
                flush=True,
            )
        else:
            print(started.address, flush=True)
            print(f'in a run file: seeds = ["{started.address}"]', file=sys.stderr, flush=True)
            if started.page_url is not None:
                print(f"page: {page_text(started.page_url)}", file=sys.stderr, flush=True)
            if started.run_page_url is not None:
                pages = page_text(started.run_page_url)
                print(f"pages of runs: {pages}", file=sys.stderr, flush=True)

    run_until_stopped(lambda stop: seeding.serve(settings, stop=stop, on_ready=show))


@commands.command(rich_help_panel=HOST)
def host(
    context: typer.Context,
    run: Annotated[str, Argument(help="Run file, shoal:// link or https address.", metavar="RUN")],
    domain: Annotated[
        str | None,
        Option(help="Name or number at which others reach this machine.", metavar="HOST"),
    ] = None,
    port: Annotated[int, Option(help="First of four TCP ports in a row to listen on.")] = 7700,
    data_dir: Annotated[
        Path | None, Option(help="Folder for keys, the run's state and its exports.")
    ] = None,
    relay_rate: Annotated[
        str, Option("--relay-bulk", help="Rate of the relay, in bytes per second.", metavar="RATE")
    ] = "2M",
    run_page: Annotated[
        str, Option(help="HOST:PORT of the public page of the run, safe behind a proxy.")
    ] = "127.0.0.1:7780",
    page: Annotated[
        str, Option(help="HOST:PORT of a web page with /healthz and /readyz of all parts.")
    ] = "127.0.0.1:9100",
    as_json: Json = False,
    install_service: InstallService = False,
) -> None:
    """Host a public run: a bootstrap peer, a relay, and a keeper that publishes the run.

    Example: shoal host my.run.toml --domain run.example.org
    """
    from peer.cli.finding import link_of
    from peer.extras.hosting import bootstrap as seeding
    from peer.extras.hosting import group
    from peer.joining.link import Link
    from peer.rules.limits import parse_relay_rate
    from peer.signals import run_until_stopped
    from peer.views.page_address import parse_page

    start_logging()
    parse_relay_rate(relay_rate)  # refuses what is no rate
    link = link_of(run)
    if domain is not None:
        seeding.announced(domain, port=port)  # refuses what nobody can dial
    settings = group.GroupSettings(
        run=run,
        data_directory=data_dir or data_home(os.environ) / "hosting" / link.run_id[:16],
        domain=domain,
        port=port,
        relay_rate=relay_rate,
        run_page=parse_page(run_page, "--run-page"),
        page=parse_page(page),
        notify_socket=os.environ.get("NOTIFY_SOCKET"),
    )
    if install_service:
        file = Path(run) if Path(run).is_file() else None
        _install_service(
            [*given_words(context, *NOT_OF_SERVICES, "run"), "%d/run.toml" if file else run],
            {} if file is None else {"run.toml": file},
            description="Shoal host of a run",
            # Its parts end at the same time, and what is left of them is killed.
            stop_s=group.END_WITHIN_S + seeding.END_WITHIN_S,
        )
        return

    def show(seeds: Sequence[str], health: str) -> None:
        joins = str(Link(link.run_id, tuple(map(addresses.parse, seeds))))
        if as_json:
            record = {"link": joins, "address": seeds[0], "page": health}
            record |= {"run_page": settings.run_page.url, "exports": str(settings.exports)}
            print(json_text(record | {"ports": list(settings.ports)}), flush=True)
            return
        print(joins, flush=True)
        for line in settings.advice(seeds, health):
            print(line, file=sys.stderr, flush=True)

    run_until_stopped(lambda stop: group.serve(settings, stop=stop, on_ready=show))


def _install_service(
    arguments: Sequence[str],
    credentials: Mapping[str, Path],
    *,
    description: str,
    stop_s: float,
) -> None:
    from peer.extras.hosting import service

    installation = service.own_installation()
    unit = service.service_unit(
        Path(sys.executable).absolute(),
        arguments,
        description=description,
        stop_s=stop_s,
        credentials=credentials,
        installation=installation,
    )
    print(unit, end="")
    try:
        service.check_seen(installation)
    except service.ServiceCannotRun as error:  # the unit may be for another machine
        complain(str(error))
