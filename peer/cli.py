"""The ``shoal`` command: reads the command line, calls what does the work, prints, exits.

One small function per command: load, run, report. What a command needs is imported
inside of it, so that ``shoal --help`` need not wait for torch. An expected error
becomes one line on stderr here, and nowhere else; a bug keeps its traceback.

Exit codes: 0 done, 2 bad usage or run file, 3 could not reach the run, 4 refused,
130 interrupted.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeAlias

import typer
from typer import Argument, Option
from typer.models import ArgumentInfo

from dht.errors import AddressError, DhtError, KeyFileError
from peer.errors import PeerError
from peer.home import data_home

if TYPE_CHECKING:
    from peer.link import FoundRun
    from peer.run import JoinSettings
    from peer.simulate.report import Section
    from peer.simulate.training import Kept
    from peer.watch import Reporter

if TYPE_CHECKING:
    from peer.bootstrap import BootstrapSettings

EXIT_USAGE = 2
EXIT_UNREACHABLE = 3
EXIT_REFUSED = 4
EXIT_INTERRUPTED = 130

WATCH_EVERY_S = 5.0
ANY_PORT = ("/ip4/0.0.0.0/tcp/0",)

# typer carries its own copy of click since 0.16, and shows this class only by its child.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]

app = typer.Typer(
    name="shoal",
    help="Train one model on many machines that come and go.",
    add_completion=True,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def shoal(
    context: typer.Context,
    version: Annotated[bool, Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        from importlib.metadata import version as installed

        print(f"shoal {installed('shoal')}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def bootstrap(
    port: Annotated[int, Option(help="TCP port to listen on.")] = 7700,
    announce: Annotated[
        list[str] | None,
        Option(help="Host name, IP address or multiaddr to tell others; again for several."),
    ] = None,
    listen: Annotated[
        list[str] | None, Option(help="Multiaddr to listen at, instead of --port everywhere.")
    ] = None,
    identity: Annotated[
        Path | None, Option(help="Key file, made when missing; by default in the data folder.")
    ] = None,
    data_dir: Annotated[
        Path | None, Option(help="Folder for the key and the peers met.", show_default=False)
    ] = None,
    seed: Annotated[
        list[str] | None, Option(help="Multiaddr of another bootstrap peer; again for several.")
    ] = None,
    page: Annotated[
        str,
        Option(help="Where to serve a page for people, /healthz, /readyz and /metrics; or 'off'."),
    ] = "127.0.0.1:9100",
    as_json: Annotated[bool, Option("--json", help="Print the address as JSON.")] = False,
    install_service: Annotated[
        bool, Option("--install-service", help="Print a systemd unit for this command instead.")
    ] = False,
    service_file: Annotated[
        Path | None, Option(help="With --install-service: write the unit to this file.")
    ] = None,
) -> None:
    """Host a bootstrap peer, at whose address others find each other.

    Example: shoal bootstrap --port 7700 --announce seed1.example.org
    """
    from dht import addresses
    from peer import bootstrap as seeding
    from peer.loop import run_until_stopped
    from peer.pages import parse_page

    start_logging()
    settings = seeding.BootstrapSettings(
        port=port,
        listen=tuple(addresses.parse(text) for text in listen or ()),
        announce=tuple(seeding.announced(text, port=port) for text in announce or ()),
        identity_path=identity,
        data_directory=data_dir or data_home(os.environ) / "bootstrap",
        seeds=tuple(addresses.parse(text) for text in seed or ()),
        page=None if page == "off" else parse_page(page),
        notify_socket=os.environ.get("NOTIFY_SOCKET"),
    )
    if install_service or service_file is not None:
        _install_service(settings, service_file)
        return

    def show(started: seeding.Bootstrap) -> None:
        if as_json:
            print(
                json.dumps(
                    {
                        "peer_id": started.peer_id,
                        "address": str(started.address),
                        "addresses": [str(address) for address in started.addresses],
                        "page": started.page_url,
                        "data_dir": str(settings.data_directory),
                    }
                ),
                flush=True,
            )
        else:
            print(started.address, flush=True)
            if started.page_url is not None:
                print(f"page: {started.page_url}", file=sys.stderr, flush=True)

    run_until_stopped(lambda stop: seeding.serve(settings, stop=stop, on_ready=show))


def _install_service(settings: BootstrapSettings, path: Path | None) -> None:
    from peer.service import lies_in_a_home, service_unit, write_service

    python = Path(sys.executable).absolute()
    unit = service_unit(python, settings.arguments(), identity_path=settings.identity_path)
    if lies_in_a_home(python):
        _complain(f"the service runs as its own user, who may not read {python}: install to /opt")
    if path is None:
        print(unit, end="")
        return
    write_service(path, unit)
    print(f"wrote {path}; next: systemctl daemon-reload && systemctl enable --now {path.stem}")


@app.command()
def doctor(
    targets: Annotated[
        list[str] | None,
        Argument(metavar="[LINK | MULTIADDR]...", help="Run links or bootstrap peers to try."),
    ] = None,
    port: Annotated[int, Option(help="TCP port to try to listen on; 0: any.")] = 0,
    data_dir: Annotated[
        Path | None, Option(help="Folder to check for space.", show_default=False)
    ] = None,
    as_json: Annotated[bool, Option("--json", help="Print the findings as JSON.")] = False,
) -> int:
    """Say what works on this machine and what does not, and what to do about it.

    Example: shoal doctor /dns4/seed1.example.org/tcp/7700/p2p/12D3Koo...
    """
    from peer import doctor as surgery
    from peer.loop import run_until_stopped

    start_logging(logging.ERROR)
    plan = surgery.plan(targets or (), port=port, data_directory=data_dir or data_home(os.environ))

    def show(finding: surgery.Finding) -> None:
        if not as_json:
            print(finding, flush=True)

    findings = run_until_stopped(lambda stop: surgery.examine(plan, stop=stop, on_finding=show))
    if as_json:
        print(json.dumps(surgery.as_json(findings), indent=1))
    return surgery.exit_code(findings)


Directory = Annotated[
    Path | None,
    Option(help="This peer's folder for key, checkpoints and logs.", show_default=False),
]
Json = Annotated[bool, Option("--json", help="One JSON object per line.")]
Plain = Annotated[bool, Option("--plain", help="One line per event instead of a screen.")]
Yes = Annotated[bool, Option("--yes", help="Do not ask; for scripts.")]
Seeds = Annotated[
    list[str] | None, Option("--seed", help="Multiaddr of a bootstrap or other peer; repeatable.")
]
Name = Annotated[str | None, Option(help="What others see; made up by default.")]


def _site(name: str | None) -> str | None:
    from dht.records import site_problem

    if name is not None and (problem := site_problem(name)) is not None:
        raise typer.BadParameter(problem)
    return name


Site = Annotated[
    str | None,
    Option(
        callback=_site,
        help="A name for this place (a rack, a lab, a home): peers that say the same one reduce "
        "among themselves first, and one of them crosses the slow link.",
    ),
]
Listen = Annotated[
    list[str] | None, Option(help="Multiaddr to listen at; by default any port, IPv4.")
]
Announce = Annotated[list[str] | None, Option(help="Multiaddr to tell others; repeatable.")]
Device = Annotated[str, Option(help="cpu, cuda, cuda:1, mps, or auto.")]
Threads = Annotated[
    int | None,
    Option(
        help="CPU threads for training; by default all cores, on a desktop all but one.",
        min=1,
        show_default=False,
    ),
]
Nice = Annotated[
    int | None,
    Option(
        help="How far training stands back behind other programs; by default 10 on a desktop, 0 "
        "elsewhere.",
        min=0,
        max=19,
        show_default=False,
    ),
]
Pace = Annotated[float, Option(help="Least seconds per step.", min=0.0)]
Weights = Annotated[
    Path | None,
    Option(
        help="Begin a run with these weights: a safetensors file, or a transformers checkpoint's "
        "folder.",
        show_default=False,
    ),
]
Steps = Annotated[int | None, Option(help="Leave after so many steps.", min=1)]
TensorBoard = Annotated[
    Path | None,
    Option(
        help="Write curves for TensorBoard into this folder; needs the extra 'tensorboard'.",
        metavar="FOLDER",
        show_default=False,
    ),
]
Wandb = Annotated[
    str | None,
    Option(
        help="Send curves to this project of Weights & Biases; needs the extra 'wandb'.",
        metavar="PROJECT",
        show_default=False,
    ),
]


Page = Annotated[
    str,
    Option(
        help="Where to show a page: HOST:PORT, 'off', or 'auto': this machine only, from port 7777 "
        "on. Elsewhere than on this machine it asks for a token.",
        metavar="ADDRESS",
    ),
]
DataFolder = Annotated[
    Path | None,
    Option(
        "--data",
        help="Where the patterns of a `text` recipe begin; by default in the run file's folder.",
        show_default=False,
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What whoever trains may say on the command line; everything else is the run's."""

    directory: Path | None
    data: Path | None
    seed: list[str] | None
    name: str | None
    site: str | None
    listen: list[str] | None
    announce: list[str] | None
    page: str | None
    device: str
    threads: int | None
    nice: int | None
    pace: float
    steps: int | None
    weights: Path | None
    tensorboard: Path | None
    wandb: str | None
    as_json: bool
    plain: bool
    yes: bool

    def settings(
        self, found: FoundRun, *, seeds: Sequence[str], found_after_s: float | None
    ) -> JoinSettings:
        from peer.run import JoinSettings

        return JoinSettings(
            directory=self.directory,
            data_directory=self.data or found.folder,
            name=self.name,
            site=self.site,
            seeds=(*(self.seed or ()), *seeds),
            found_after_s=found_after_s,
            page=self.page,
            pace_s=self.pace,
            **_addresses(self.listen, self.announce),
        )


def trains(
    argument: ArgumentInfo,
) -> Callable[[Callable[[str, Options], int]], Callable[..., int]]:
    """Make a command of one argument that has, beside it, the options of whoever trains."""

    def made(command: Callable[[str, Options], int]) -> Callable[..., int]:
        def with_options(
            where: str,
            directory: Directory = None,
            data: DataFolder = None,
            seed: Seeds = None,
            name: Name = None,
            site: Site = None,
            listen: Listen = None,
            announce: Announce = None,
            page: Page = "auto",
            device: Device = "auto",
            threads: Threads = None,
            nice: Nice = None,
            pace: Pace = 0.0,
            steps: Steps = None,
            weights: Weights = None,
            tensorboard: TensorBoard = None,
            wandb: Wandb = None,
            as_json: Json = False,
            plain: Plain = False,
            yes: Yes = False,
        ) -> int:
            options = Options(
                directory=directory,
                data=data,
                seed=seed,
                name=name,
                site=site,
                listen=listen,
                announce=announce,
                page=_page(page),
                device=device,
                threads=threads,
                nice=nice,
                pace=pace,
                steps=steps,
                weights=weights,
                tensorboard=tensorboard,
                wandb=wandb,
                as_json=as_json,
                plain=plain,
                yes=yes,
            )
            return command(where, options)

        with_options.__annotations__["where"] = Annotated[str, argument]
        with_options.__name__, with_options.__doc__ = command.__name__, command.__doc__
        return with_options

    return made


@app.command()
@trains(Argument(help="The run file; see `shoal run new`.", metavar="FILE"))
def start(file: str, options: Options) -> int:
    """Start a run, print the line that others paste to join it, and train.

    Example: shoal start examples/tiny_gpt/run.toml
    """
    from peer.link import find_run

    found = find_run(file, ask_peers=_no_peers)
    own = options.settings(found, seeds=(), found_after_s=0.0)
    return _take_part(found, own, options)


@app.command()
@trains(Argument(help="shoal:// link, https address, or run file.", metavar="LINK"))
def join(link: str, options: Options) -> int:
    """Join a training run and help train it.

    Example: shoal join 'shoal://RUN_ID?seed=/ip4/203.0.113.7/tcp/7700/p2p/12D3Koo...'
    """
    from peer.find import ask_peers
    from peer.link import find_run

    found = find_run(link, ask_peers=ask_peers)
    own = options.settings(found, seeds=[str(seed) for seed in found.seeds], found_after_s=None)
    return _take_part(found, own, options)


@app.command()
def keep(
    link: Annotated[
        str, Argument(help="shoal:// link, https address, or run file.", metavar="LINK")
    ],
    directory: Directory = None,
    seed: Seeds = None,
    name: Name = None,
    listen: Listen = None,
    announce: Announce = None,
    page: Page = "auto",
    as_json: Json = False,
) -> int:
    """Keep a run's state, without training: the run survives while no learner is on line.

    Example: shoal keep 'shoal://RUN_ID?seed=/ip4/203.0.113.7/tcp/7700/p2p/12D3Koo...'
    """
    from dht.identity import Identity
    from peer import keeper
    from peer.find import ask_peers
    from peer.learner import recipe_layout
    from peer.link import find_run
    from peer.loop import run_until_stopped
    from peer.run import default_name, keeper_directory
    from peer.station import StationSettings
    from peer.watch import sentence

    start_logging(logging.WARNING)
    found = find_run(link, ask_peers=ask_peers)
    where = directory or keeper_directory(found.run.run_id)
    layout = recipe_layout(found.run)
    where.mkdir(parents=True, exist_ok=True)
    identity = Identity.load_or_create(where / "identity.key")
    settings = StationSettings(
        run=found.run,
        identity=identity,
        directory=where,
        name=name or default_name(identity.peer_id),
        role="keeper",
        seeds=(*(seed or ()), *(str(address) for address in found.seeds)),
        page=_page(page),
        **{"listen": ANY_PORT, "announce": (), **_addresses(listen, announce)},
    )

    def show(event: str, fields: Mapping[str, Any]) -> None:
        record = {**fields, "event": event}
        text = json.dumps(record, default=str) if as_json else sentence(record)
        if text:
            print(text, flush=True)

    ending = run_until_stopped(lambda stop: keeper.keep(settings, layout, stop, show))
    if not as_json:
        print(f"{ending.reason}; the run's state is in {where}", flush=True)
    return ending.exit_code if ending.finished else EXIT_INTERRUPTED


def _page(address: str) -> str | None:
    """Checked while the mistake is still on the screen."""
    from peer.pages import parse_page

    if address == "off":
        return None
    parse_page(address)
    return address


def _no_peers(link: object) -> bytes:
    raise typer.BadParameter("a run is started from a file; to take part in one: shoal join LINK")


def _addresses(listen: list[str] | None, announce: list[str] | None) -> dict[str, Any]:
    """Settings only where the user gave some, checked while the mistake is still on the screen."""
    from dht import addresses

    given = {"listen": listen, "announce": announce}
    return {
        key: tuple(str(addresses.parse(text)) for text in texts)
        for key, texts in given.items()
        if texts
    }


def _take_part(found: FoundRun, own: JoinSettings, options: Options) -> int:
    import psutil

    from peer.limits import manners
    from peer.preflight import examine
    from peer.run import Run, default_directory
    from peer.sinks import open_curves
    from peer.trainer import Stop, TrainerSettings, prepare_torch, train

    start_logging(logging.WARNING)
    usual = manners(desktop=_is_desktop(), cores=psutil.cpu_count(logical=False) or 1)
    os.nice(usual.niceness if options.nice is None else options.nice)
    settings = TrainerSettings(
        device=options.device,
        threads=options.threads or usual.threads,
        steps_max=options.steps,
        weights=options.weights,
    )
    try:
        chosen = prepare_torch(settings)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    where = own.directory or default_directory(found.run.run_id)
    look = examine(found.run, device=chosen, pace_s=own.pace_s, directory=where)
    if not options.as_json:
        print("\n".join(look.lines), flush=True)
        if own.seeds and own.found_after_s is None:  # there is a swarm to ask
            print(_expectation(found, look.step_time_s), flush=True)
    if look.problems:
        _complain(f"this machine cannot take part: {look.problems[0]}")
        return EXIT_REFUSED
    if not options.yes and sys.stdin.isatty() and not typer.confirm("Take part?", default=True):
        return EXIT_REFUSED
    with (
        open_curves(
            tensorboard=options.tensorboard,
            wandb_project=options.wandb,
            name=own.name or where.name,
            directory=where,
        ) as curves,
        _reporter(as_json=options.as_json, plain=options.plain) as reporter,
        Stop().on_signals() as stop,
    ):

        def on_step(run: Run) -> None:
            reporter.on_step(run)
            curves.on_step(run)

        outcome = train(
            found.run,
            own=own,
            settings=settings,
            stop=stop,
            on_event=reporter.on_event,
            on_step=on_step,
        )
        reporter.done(outcome)
    return EXIT_INTERRUPTED if outcome.stopped and not outcome.finished else 0


def _is_desktop() -> bool:
    """Whether somebody may sit before this machine: a graphical session is open."""
    return sys.platform == "darwin" or any(
        os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY")
    )


def _expectation(found: FoundRun, step_time_s: float) -> str:
    """What this machine would add, as the run's peers say how fast they are."""
    from peer.link import Link
    from peer.loop import run_until_stopped
    from peer.preflight import expected_share
    from peer.visit import RunStatus, visit

    async def look(stop: asyncio.Event) -> RunStatus:
        async with visit(Link(found.run.run_id, found.seeds)) as visitor:
            return await visitor.look(timeout_s=10.0)

    try:
        seen = run_until_stopped(look)
    except (PeerError, DhtError) as error:
        return f"Expect   unknown: {error}"
    share = expected_share(step_time_s, [peer.step_time_s for peer in seen.peers])
    loss = "" if seen.held_out is None else f", held-out loss {seen.held_out.loss:.3f}"
    training = [peer for peer in seen.peers if peer.role == "learner"]
    others = "1 peer trains" if len(training) == 1 else f"{len(training)} peers train"
    return f"Expect   {others}{loss}; you add about {share:.0%} of the speed"


def _reporter(*, as_json: bool, plain: bool) -> Reporter:
    from peer.watch import JsonReporter, PlainReporter, ScreenReporter

    def say(text: str) -> None:
        print(text, flush=True)

    if as_json:
        return JsonReporter(say)
    if plain or not sys.stdout.isatty():
        return PlainReporter(say)
    return ScreenReporter()


@app.command()
def demo(
    peers: Annotated[int, Option(help="Learners.", min=2, max=16)] = 4,
    steps: Annotated[int, Option(help="Of each learner, on average.", min=48)] = 240,
    kill: Annotated[bool, Option(help="Kill one learner on the way.")] = True,
    directory: Annotated[
        Path | None, Option(help="Where logs and plots go; by default a new folder in /tmp.")
    ] = None,
    as_json: Annotated[bool, Option("--json", help="The last line is one JSON object.")] = False,
    plain: Plain = False,
) -> int:
    """Show a whole swarm on this machine in two or three minutes, with a kill -9 on the way.

    Example: shoal demo --peers 4
    """
    import tempfile

    from rich.live import Live

    from peer import demo_report
    from peer.demo import Demo, DemoSettings, summary, summary_text
    from peer.simulate.figures import new_figure

    start_logging(logging.WARNING)
    new_figure()  # what the plot at the end needs is missed now, not after three minutes
    where = directory or Path(tempfile.mkdtemp(prefix="shoal-demo-"))
    where.mkdir(parents=True, exist_ok=True)
    settings = DemoSettings(peers=peers, steps=steps, kill=kill, directory=where.resolve())
    with Demo(settings) as swarm:
        if plain or as_json or not sys.stdout.isatty():
            told = 0

            def look() -> None:
                nonlocal told
                for line in swarm.news[told:]:
                    print(f"{swarm.elapsed_s:6.1f} s  {line}", flush=True)
                told = len(swarm.news)

            result = swarm.run(look)
        else:
            from peer.screen import draw

            with Live(draw(swarm.view()), auto_refresh=False) as live:
                result = swarm.run(lambda: live.update(draw(swarm.view()), refresh=True))
    compared = demo_report.compare(settings, result)
    record = summary(settings, result, compared)
    demo_report.write(settings.directory, result, compared, record)
    print(json.dumps(record) if as_json else summary_text(record), flush=True)
    return 0 if record["ok"] else 1


@app.command("status")
def show_status(
    link: Annotated[str, Argument(help="shoal:// link of the run.")],
    watch: Annotated[bool, Option("--watch", help="Look again every few seconds.")] = False,
    timeout: Annotated[float, Option(help="Seconds to look for peers.", min=1.0)] = 15.0,
    as_json: Json = False,
) -> int:
    """Ask a run's peers how they are doing, without taking part.

    Example: shoal status 'shoal://RUN_ID?seed=...' --watch
    """
    from peer.link import parse_link
    from peer.loop import run_until_stopped
    from peer.visit import status_lines, visit

    start_logging(logging.ERROR)
    wanted = parse_link(link)

    async def look(stop: asyncio.Event) -> int:
        async with visit(wanted) as visitor:
            while True:
                seen = await visitor.look(timeout_s=timeout)
                text = json.dumps(seen.plain()) if as_json else "\n".join(status_lines(seen))
                print(text, flush=True)
                if not watch:
                    return 0
                with suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), WATCH_EVERY_S)
                    return EXIT_INTERRUPTED

    return run_until_stopped(look)


Folder = Annotated[
    Path | None,
    Option(
        "--directory",
        help="The folder of one peer; by default those of all your runs.",
        show_default=False,
    ),
]


@app.command()
def pause(directory: Folder = None) -> None:
    """Let this machine's peers rest: they offer what they have, then train no more; nobody waits.

    Example: shoal pause; later: shoal resume
    """
    _change_limits(directory, paused=True)


@app.command()
def resume(directory: Folder = None) -> None:
    """Let this machine's peers train again, after `shoal pause`.

    Example: shoal resume
    """
    _change_limits(directory, paused=False)


@app.command()
def leave(directory: Folder = None) -> None:
    """Let this machine's peers finish what is under way, save, say goodbye and end.

    Example: shoal leave --directory ~/.local/share/shoal/runs/0123456789abcdef
    """
    import time

    _change_limits(directory, leave_at=time.time())


@app.command()
def limits(
    directory: Folder = None,
    up: Annotated[str | None, Option(help="Bytes to send per second, such as 500K or 2M.")] = None,
    down: Annotated[str | None, Option(help="Bytes to receive per second.")] = None,
    quota: Annotated[str | None, Option(help="Bytes a month, both ways, such as 200G.")] = None,
    hours: Annotated[str | None, Option(help="When to train, such as 22-7 or 21:30-6:15.")] = None,
    cpu: Annotated[str | None, Option(help="Share of the time to train, such as 50%.")] = None,
    gpu: Annotated[str | None, Option(help="The same for an accelerator's time.")] = None,
    threads: Annotated[str | None, Option(help="CPU threads for training, such as 4.")] = None,
    idle_only: Annotated[
        str | None,
        Option(help="Train only while others use less of the processors, such as 25%."),
    ] = None,
    disk: Annotated[
        str | None, Option(help="Bytes in a peer's folder: checkpoints and logs, such as 20G.")
    ] = None,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show or change what this machine's peers may use; running ones obey within a second.

    'off' takes a limit away. Rates and volume count rounds and states, not the few kB/s of
    heartbeats. Each counts for one peer; in detail: ARCHITECTURE.md, 'Limits are a file'.
    Example: shoal limits --up 2M --quota 200G --hours 22-7 --cpu 50% --idle-only 25% --disk 20G
    """
    from peer import limits as rules

    changes: dict[str, Any] = {}
    if up is not None:
        changes["up_bytes_s"] = None if up == "off" else rules.parse_rate("--up", up)
    if down is not None:
        changes["down_bytes_s"] = None if down == "off" else rules.parse_rate("--down", down)
    if quota is not None:
        changes["month_bytes"] = None if quota == "off" else rules.parse_size("--quota", quota)
    if hours is not None:
        changes["hours"] = None if hours == "off" else rules.parse_hours(hours)
    if cpu is not None:
        changes["cpu_share"] = 1.0 if cpu == "off" else rules.parse_share("--cpu", cpu)
    if gpu is not None:
        changes["gpu_share"] = 1.0 if gpu == "off" else rules.parse_share("--gpu", gpu)
    if threads is not None:
        changes["threads"] = None if threads == "off" else rules.parse_threads(threads)
    if idle_only is not None:
        share = None
        if idle_only != "off":
            share = rules.parse_share("--idle-only", idle_only, most=99)
        changes["idle_below"] = share
    if disk is not None:
        changes["disk_bytes"] = None if disk == "off" else rules.parse_disk(disk)
    _change_limits(directory, as_json=as_json, **changes)


def _change_limits(directory: Path | None, *, as_json: bool = False, **changes: Any) -> None:
    """Of one peer or of all, and say what holds now."""
    import msgspec

    from peer.guest import folder_bytes, read_limits, used_this_month, write_limits

    home = data_home(os.environ)
    of_all = [*sorted(home.glob("runs/*/")), *sorted(home.glob("keepers/*/"))]
    folders = of_all if directory is None else [directory]
    if not folders or not all(folder.is_dir() for folder in folders):
        raise typer.BadParameter(
            f"there is no peer's folder at {directory or home / 'runs'}; "
            "name one with --directory, as it was given to `shoal join`"
        )
    told: dict[str, Any] = {}
    for folder in folders:
        allowed = msgspec.structs.replace(read_limits(folder), **changes)
        if changes:
            write_limits(folder, allowed)
        used = {
            "month_used_bytes": used_this_month(folder),
            "disk_used_bytes": folder_bytes(folder),
        }
        told[str(folder)] = {**msgspec.to_builtins(allowed), **used}
        if not as_json:
            leaving = ["is asked to leave"] if "leave_at" in changes else []
            print(f"{folder}: {', '.join(allowed.words(**used) + leaving) or 'no limits'}")
    if as_json:
        print(json.dumps(told))


@app.command()
def explain(
    logs: Annotated[
        list[Path], Argument(metavar="LOG...", help="Event logs (events.jsonl), or peers' folders.")
    ],
    round_: Annotated[
        str | None,
        Option("--round", help="FRAGMENT/VERSION, or how its id begins.", metavar="ROUND"),
    ] = None,
    peer: Annotated[str | None, Option(help="A name, or how an id begins or ends.")] = None,
    timeline: Annotated[bool, Option("--timeline", help="Every event of all logs.")] = False,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Tell from event logs, in sentences, what became of a round or of a peer; or sum them up.

    Logs of several peers become one timeline, corrected for clocks that differ.
    Example: shoal explain anna/events.jsonl boris/events.jsonl --round 2/7
    """
    from datetime import datetime

    from peer import explain as telling
    from peer.telemetry import read_events

    read = []
    for path in logs:
        file = path / "events.jsonl" if path.is_dir() else path
        if not file.is_file():
            raise typer.BadParameter(f"there is no event log at {file}")
        read.append(telling.read_log(read_events(file), place=file.parent.name or str(file)))
    known = telling.aligned(read)
    if round_ is not None:
        story = telling.round_story(known, round_)
    elif peer is not None:
        story = telling.peer_story(known, peer)
    else:
        story = telling.everything(known) if timeline else telling.overview(known)
    if as_json:
        print(json.dumps({"story": [asdict(line) for line in story]}))
        return
    width = max((len(line.who) for line in story), default=0)
    for line in story:
        at = datetime.fromtimestamp(line.at).isoformat(" ", "milliseconds")
        print(f"{at}  {line.who:{width}}  {line.text}")


@app.command()
def export(
    folder: Annotated[Path, Argument(metavar="RUN_DIR", help="A peer's folder of a run.")],
    out: Annotated[Path, Argument(metavar="OUT.safetensors", help="The file to write.")],
) -> None:
    """Write a run's newest parameters, by name and in fp32, as one safetensors file.

    Example: shoal export ~/.local/share/shoal/runs/0123456789abcdef out.safetensors
    """
    from peer.checkpoint import CheckpointFolder
    from peer.outer_state import export as write

    outer = write(CheckpointFolder(folder / "outer"), out)
    print(
        f"wrote {out}: run {outer.run.name}, {outer.global_tokens} tokens, model {outer.model} "
        "(the same name at another peer: the same bits)"
    )


runs = typer.Typer(help="Write and check run files.", no_args_is_help=True)
app.add_typer(runs, name="run")


@runs.command("new")
def run_new() -> None:
    """Print a run file with every setting, its default and what it means.

    Example: shoal run new > my.run.toml
    """
    from peer.run_file import template

    print(template(), end="")


@runs.command("check")
def run_check(
    file: Annotated[Path, Argument(help="The run file.")],
    as_json: Annotated[bool, Option("--json", help="Print what was found as JSON.")] = False,
) -> int:
    """Check a run file: every fault with its line and rule, or the run's id and size.

    Example: shoal run check my.run.toml
    """
    from peer.errors import RunFileError
    from peer.learner import recipe_layout
    from peer.link import find_run
    from peer.run_file import CustomModel

    try:
        run = find_run(str(file), ask_peers=_no_peers).run
    except RunFileError as error:
        if as_json:
            faults = [{"line": f.line, "setting": f.setting, "fault": str(f)} for f in error.faults]
            print(json.dumps({"ok": False, "faults": faults}))
        else:
            for fault in error.faults:
                _complain(f"{file}: {fault}")
        return error.exit_code
    found: dict[str, Any] = {"ok": True, "name": run.name, "run_id": run.run_id}
    if not isinstance(run.model, CustomModel):
        layout = recipe_layout(run)
        found["parameters"] = layout.size
        found["fragments"] = len(layout.fragments)
        found["layout_hash"] = layout.hash.hex()
    print(json.dumps(found) if as_json else "\n".join(f"{k}: {v}" for k, v in found.items()))
    return 0


benches = typer.Typer(help="Measurements on this machine.", no_args_is_help=True)
app.add_typer(benches, name="bench")


@benches.command("averaging")
def bench_averaging(
    values: Annotated[str, Option(help="Values to average, such as 30e6.")] = "30e6",
    peers: Annotated[str, Option(help="Group sizes, one after the other.")] = "2",
    codec: Annotated[str, Option(help="Our codecs to measure.")] = "f32,f16,int8,int4",
    vs: Annotated[str, Option(help="Whom to compare with; empty for nobody.")] = "hivemind,gloo",
    rounds: Annotated[int, Option(help="Measured rounds of each.", min=1)] = 7,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure a round of averaging against other systems, in one run, taking turns.

    Every peer is a process on this machine, with a libp2p daemon of its own where the system has
    one. "seconds" is from the closed group to the new state, "forming" includes forming the group.

    Example: shoal bench averaging --values 30e6 --peers 2,4 --codec int4
    """
    from peer.bench import AveragingBench, BenchFailed, run_averaging_bench, table

    try:
        bench = AveragingBench(
            values=int(float(values)),
            peers=tuple(int(count) for count in peers.split(",")),
            codecs=tuple(codec.split(",")),
            against=tuple(name for name in vs.split(",") if name),
            rounds=rounds,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    progress: Callable[[str], None] = lambda line: print(line, file=sys.stderr)  # noqa: E731
    try:
        found = run_averaging_bench(bench, tell=progress)
    except BenchFailed as error:
        _complain(str(error))
        raise typer.Exit(1) from error
    print(json.dumps(found) if as_json else table(found["rows"]))


chaos = typer.Typer(help="Hurt a swarm on this machine, and judge it.", no_args_is_help=True)
app.add_typer(chaos, name="chaos")


@chaos.command("run")
def chaos_run(
    scenarios: Annotated[
        list[str] | None,
        Argument(
            metavar="[SCENARIO]...", help="kill, leader, seeds, ...; or all.", show_default=False
        ),
    ] = None,
    peers: Annotated[int, Option(help="Learners.", min=2, max=32)] = 4,
    minutes: Annotated[float, Option(help="Of each scenario.", min=0.4)] = 2.0,
    seed: Annotated[int, Option(help="Of the schedule.", min=0)] = 0,
    pace: Annotated[float, Option(help="Least seconds per step.", min=0.01)] = 0.2,
    control: Annotated[bool, Option(help="Run a swarm without faults first, to compare.")] = True,
    directory: Annotated[
        Path | None, Option(help="Where logs go. [default: a new folder in /tmp]")
    ] = None,
    as_json: Annotated[bool, Option("--json", help="The last line is one JSON object.")] = False,
) -> int:
    """Start a swarm of real processes, hurt it on a seeded schedule, and judge what it promised.

    Exit status 1 if a promise is broken. Scenarios: kill, leader, seeds, freeze, slow,
    partition, agent, disk, clock, poison, flood, churn (everything at random), all.
    Example: shoal chaos run churn --peers 4 --minutes 2 --seed 7
    """
    import tempfile

    from peer.chaos import report
    from peer.chaos.run import ChaosSettings, Watcher, run_chaos, summary
    from peer.chaos.scenarios import chosen

    start_logging(logging.WARNING)
    try:
        wanted = chosen(tuple(scenarios or ("churn",)))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    where = directory or Path(tempfile.mkdtemp(prefix="shoal-chaos-run-"))
    try:
        settings = ChaosSettings(
            scenarios=wanted,
            directory=where.resolve(),
            peers=peers,
            minutes=minutes,
            seed=seed,
            control=control,
            pace_s=pace,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    outcome = run_chaos(settings, Watcher(lambda text: print(text, flush=True)))
    page = report.write(settings.directory, outcome)
    record = summary(outcome)
    print(json.dumps(record) if as_json else report.text(record, page), flush=True)
    return 0 if record["ok"] else 1


@chaos.command("goodput")
def chaos_goodput(
    learners: Annotated[int, Option(help="How many.", min=2, max=32)] = 8,
    minutes: Annotated[float, Option(help="Of each of the two swarms.", min=1.0)] = 10.0,
    recovery: Annotated[str, Option(help="From a failure to the next step.")] = "60s",
    load: Annotated[
        float, Option(help="Failures of all learners in the time one takes to recover.", min=0.1)
    ] = 2.7,
    pace: Annotated[float, Option(help="Least seconds per step.", min=0.01)] = 0.4,
    only: Annotated[
        str | None, Option(help="Of the two swarms: shoal or synchronous.", show_default=False)
    ] = None,
    seed: Annotated[int, Option(help="Of the failures.", min=0)] = 0,
    directory: Annotated[
        Path | None, Option(help="Where logs go. [default: a new folder in /tmp]")
    ] = None,
    as_json: Annotated[bool, Option("--json", help="The last line is one JSON object.")] = False,
) -> int:
    """Measure, with real processes, how much work failures leave, and what they leave at best.

    Let the failures of all learners come at the rate r of their training, and one take R to
    recover. A synchronous run trains 1/(1 + r R) of the time, M learners that do not wait for
    each other at best 1/(1 + r R/M): 27.0% and, for 8, 74.8% with r R = 2.7.

    Example: shoal chaos goodput
    """
    import tempfile

    from peer.chaos.goodput import GoodputSettings, figures_text, measure

    start_logging(logging.WARNING)
    swarms = {"shoal": False, "synchronous": True}
    if only is not None and only not in swarms:
        raise typer.BadParameter(f"--only is {only!r}; it is one of {', '.join(swarms)}")
    where = directory or Path(tempfile.mkdtemp(prefix="shoal-goodput-"))
    found = []
    for synchronous in swarms.values() if only is None else (swarms[only],):
        try:
            settings = GoodputSettings(
                directory=where.resolve(),
                learners=learners,
                minutes=minutes,
                recovery_s=_seconds(recovery),
                load=load,
                pace_s=pace,
                synchronous=synchronous,
                seed=seed,
            )
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
        found.append(measure(settings, lambda text: print(text, flush=True)))
        if not as_json:
            print(figures_text(found[-1]), flush=True)
    if as_json:
        print(json.dumps({"swarms": found, "directory": str(where)}))
    return 0


simulations = typer.Typer(help="Experiments in virtual time.", no_args_is_help=True)
app.add_typer(simulations, name="simulate")

Out = Annotated[Path | None, Option(help="Folder for CSV, PNG and an HTML page.")]
OutKept = Annotated[
    Path | None,
    Option(help="Folder for CSV, PNG, an HTML page and what is trained: that is not done again."),
]
PairedSeeds = Annotated[int, Option(help="Paired seeds of each row.", min=1)]
FirstSeed = Annotated[int, Option(help="The first of them.", min=0)]
Workers = Annotated[int, Option(help="Processes that share the work.", min=1, max=64)]
Settings = Annotated[
    list[str] | None,
    Option("--set", help="A setting of every swarm, such as outer.momentum=0.7; again for more."),
]


@simulations.command("goodput")
def simulate_goodput(
    seeds: Annotated[int, Option(help="Independent simulations of each cell.", min=1)] = 3,
    parameters: Annotated[
        Path | None, Option(help="Another parameter file than the calibrated one.")
    ] = None,
    learners: Annotated[int | None, Option(help="Your own swarm: how many machines.")] = None,
    mtbf: Annotated[str, Option(help="Your own: time between failures of one machine.")] = "9h",
    rejoin: Annotated[str, Option(help="Your own: how long a machine stays away.")] = "4m",
    calibrate: Annotated[
        bool, Option("--calibrate", help="Repeat the search that gave the shipped pauses.")
    ] = False,
    out: Out = None,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """How much of the time do failures leave for training? The reported table, or your own swarm.

    Assumes Poisson failures, one per chip and year, in slices of chips that are away for about half
    an hour; after a failure and at returns all chips of a job pause. The pauses are calibrated
    on the five elastic cells (and one rigid cell) of the reported table; all decoupled cells are
    predictions. Example: shoal simulate goodput --learners 12 --mtbf 9h --rejoin 4m
    """
    from peer.simulate import figures, goodput
    from peer.simulate.report import write_csv, write_html

    if learners is not None:
        own = goodput.swarm(
            learners=learners, mtbf_s=_seconds(mtbf), rejoin_s=_seconds(rejoin), seed=0
        )
        if as_json:
            print(json.dumps({"swarm": [asdict(row) for row in own]}))
        else:
            for row in own:
                print(
                    f"{row.system:10}  goodput {row.goodput:6.2f}%  "
                    f"somebody trains {row.uptime:6.2f}%"
                )
        return
    model = goodput.ClusterModel.load(parameters)
    numbers = tuple(range(seeds))
    with _progress("simulating", quiet=as_json) as advance:
        if calibrate:
            print(goodput.calibrate(model, seeds=numbers, progress=advance))
            return
        cells = goodput.table(model, seeds=numbers, progress=advance)
    section = figures.goodput_section(cells) if out is not None or not as_json else None
    if out is not None and section is not None:
        out.mkdir(parents=True, exist_ok=True)
        write_csv(out / "goodput.csv", cells)
        (out / "goodput.png").write_bytes(section.picture_png or b"")
        command = f"shoal simulate goodput --seeds {seeds}"
        write_html(out / "goodput.html", title="Goodput", command=command, sections=[section])
    if as_json:
        keys = ("system", "learners", "chips", "goodput", "reported", "standard_error", "uptime")
        print(json.dumps({"cells": [{key: getattr(c, key) for key in keys} for c in cells]}))
    elif section is not None:
        _print_section(section)


@simulations.command("bandwidth")
def simulate_bandwidth(
    params: Annotated[float, Option(help="Parameters of the model.")] = 5e9,
    step: Annotated[str, Option(help="Time of one training step.")] = "1s",
    sites: Annotated[int, Option(help="Learners, or sites of one learner each.", min=2)] = 8,
    cycle: Annotated[int, Option("--cycle", "-H", help="H: steps per cycle.", min=1)] = 24,
    fragments: Annotated[int, Option("--fragments", "-P", help="P.", min=1)] = 24,
    tau: Annotated[int, Option(help="Steps an exchange may overlap.", min=0)] = 2,
    up: Annotated[str | None, Option(help="Your link, such as 20Mbit: what can it train?")] = None,
    out: Out = None,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """What link does each learner need, or what can your link train?

    Assumes that data parallel sends bf16 gradients in a ring and hides them behind the backward
    pass, two thirds of a step; that DiLoCo waits for its exchange; that streaming overlaps tau
    steps and waits for the rest; that decoupled and shoal never wait. The reported fall from 198 to
    0.84 Gbit/s is at 95%. Example: shoal simulate bandwidth --up 20Mbit --params 1.2e9
    """
    from peer.simulate import bandwidth, figures
    from peer.simulate.report import write_csv, write_html

    try:
        setting = bandwidth.Setting(
            parameters=params,
            step_s=_seconds(step),
            learners=sites,
            steps_per_cycle=cycle,
            fragments=fragments,
            overlap_steps=tau,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if up is not None:
        link = _bits_per_second(up) / 1e9
        largest = {
            method: bandwidth.largest_model(method, setting, link_gbit_s=link)
            for method in bandwidth.METHODS
        }
        if as_json:
            print(json.dumps({"link_gbit_s": link, "largest_model": largest, "asked": params}))
        else:
            for method, size in largest.items():
                verdict = "enough" if size >= params else "not enough"
                print(f"{method:14} up to {size / 1e6:12,.1f} M parameters: {verdict}")
        return
    rows = bandwidth.needs(
        setting, utilisations=(0.5, 0.8, 0.9, 0.95, 0.99), codecs=("f16", "int8", "int4")
    )
    section = figures.bandwidth_section(rows) if out is not None or not as_json else None
    if out is not None and section is not None:
        out.mkdir(parents=True, exist_ok=True)
        write_csv(out / "bandwidth.csv", rows)
        (out / "bandwidth.png").write_bytes(section.picture_png or b"")
        command = f"shoal simulate bandwidth --params {params:g} --step {step} --sites {sites}"
        write_html(out / "bandwidth.html", title="Bandwidth", command=command, sections=[section])
    if as_json:
        print(json.dumps({"rows": [asdict(row) for row in rows]}))
    elif section is not None:
        _print_section(section)


@simulations.command("swarm")
def simulate_swarm(
    experiment: Annotated[
        Path | None, Argument(help="An experiment's TOML file; without one, the defaults.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        Option("--set", help="key=v1,v2: one swarm for each value; again for all combinations."),
    ] = None,
    seeds: PairedSeeds = 1,
    seed: FirstSeed = 0,
    workers: Workers = 1,
    out: Annotated[
        Path | None, Option(help="Folder for CSV, event logs, plots and an HTML page.")
    ] = None,
    plugin: Annotated[
        list[Path] | None,
        Option(help="A Python file of yours that registers merge rules, codecs or groupings."),
    ] = None,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """A swarm of any size in virtual time: your own merge rule, weather and peers.

    Rounds, grouping, codecs, merging and catching up are the live peer's own code; training is real
    (a small model, or a quadratic problem for thousands of peers); network, time and membership
    are simulated. Same seed, same result, to the last bit. Every setting and its default is in
    peer/simulate/swarm_experiment.py; examples/swarm.toml is a start. Example:
    shoal simulate swarm --set peers.count=64 --set mixing.every=0,1,4 --seeds 3 --out results
    """
    from peer.simulate import swarm_report
    from peer.simulate.plugins import load
    from peer.simulate.report import write_csv, write_html
    from peer.simulate.swarm_experiment import BadExperiment, Experiment, parse, sweep

    load(plugin or ())
    try:
        chosen = parse(experiment.read_text(encoding="utf-8")) if experiment else Experiment()
    except OSError as error:
        raise BadExperiment(f"{experiment} cannot be read: {error.strerror}") from error
    todo = swarm_report.cells(chosen, sweep(settings or []), _seeds(seeds, seed))
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    with _progress("simulating", quiet=as_json) as advance:
        results = swarm_report.simulate(
            todo, workers=workers, out=out, plugins=tuple(plugin or ()), progress=advance
        )
    rows = swarm_report.rows(todo, results)
    command = " ".join(
        ["shoal simulate swarm", *([str(experiment)] if experiment else [])]
        + [f"--set {setting}" for setting in settings or []]
        + [f"--seeds {seeds} --seed {seed}"]
    )
    if out is not None:
        write_csv(out / "swarm.csv", rows)
        write_csv(out / "swarm-curves.csv", swarm_report.point_rows(todo, results))
        parts = swarm_report.sections(todo, results)
        for part in parts:
            if part.picture_png is not None:
                name = part.heading.lower().replace(" ", "-")
                (out / f"swarm-{name}.png").write_bytes(part.picture_png)
        title = f"Simulated swarm: {chosen.name}"
        write_html(out / "swarm.html", title=title, command=command, sections=parts)
    if as_json:
        print(json.dumps({"command": command, "rows": [asdict(row) for row in rows]}))
    else:
        _print_section(swarm_report.table(todo, results))


@simulations.command("heterogeneous")
def simulate_heterogeneous(
    seeds: PairedSeeds = 3,
    seed: FirstSeed = 0,
    cycles: Annotated[float, Option(help="Cycles of a learner of speed 1.", min=1)] = 50,
    quick: Annotated[bool, Option("--quick", help="One seed and 15 cycles: a first look.")] = False,
    only: Annotated[
        str, Option(help="Only mixes of speeds that begin so, such as one.", metavar="MIX")
    ] = "",
    workers: Workers = 2,
    settings: Settings = None,
    out: OutKept = None,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """What do rounds lose that wait for slow peers, and what do those that do not?

    Assumes eight learners of a small byte-level model (200 000 parameters, the sources of the
    Python standard library), half of them 18% slower, steps that vary by 10%, fast links; then
    speeds that differ by 4, then a peer that is awake in every tenth cycle only. The rounds are the
    live peer's own code, in virtual time. K = 2 stands for K = 1: our rounds never have fewer, and
    keep what came too late, which a learner of the paper drops: that is a row of its own. Goodput
    counts steps, not their worth; losses are compared when equally many tokens are processed.

    Example: shoal simulate heterogeneous --quick --out results
    """
    from peer.simulate import heterogeneous

    chosen, length = _seeds(1 if quick else seeds, seed), 15.0 if quick else cycles
    parts = tuple(part for part in heterogeneous.PARTS if part.startswith(only))
    if not parts:
        raise typer.BadParameter(f"no mix is called {only!r}: {'; '.join(heterogeneous.PARTS)}")

    def train(kept: Kept | None, advance: Callable[[float], None]) -> Shown:
        rows, trained = heterogeneous.table(
            seeds=chosen,
            cycles=length,
            parts=parts,
            workers=workers,
            kept=kept,
            changes=_changes(settings),
            progress=advance,
        )
        return rows, lambda: heterogeneous.section(rows, trained)

    command = f"heterogeneous --seeds {len(chosen)} --seed {seed} --cycles {length:g}"
    _train_and_show(command, train, only=only, settings=settings, out=out, as_json=as_json)


@simulations.command("quality")
def simulate_quality(
    seeds: PairedSeeds = 3,
    seed: FirstSeed = 0,
    cycles: Annotated[float, Option(help="Cycles of each training.", min=1)] = 40,
    quick: Annotated[
        bool, Option("--quick", help="One seed, 15 cycles, two and four learners: a first look.")
    ] = False,
    learners: Annotated[
        str, Option(help="How many, where methods are compared.", metavar="M,M,...")
    ] = "2,4,8,16",
    only: Annotated[
        str, Option(help="Only factors that begin so, such as codec.", metavar="FACTOR")
    ] = "",
    workers: Workers = 2,
    settings: Settings = None,
    out: OutKept = None,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """What does each choice cost in loss, at equal tokens? One factor at a time.

    Assumes a small byte-level model (200 000 parameters, the sources of the Python standard
    library), AdamW with a rate that rises and falls within the run, H = 24, P = 4, equally
    fast peers on fast links, four of them unless the table says otherwise, and the settings of a
    new run. Data parallel takes the mean gradient of all peers at every step. Rounds, codecs and
    merges are the live peer's own code, in virtual time. Small models in short runs: directions,
    not laws. A bar counts as missed when it is by more than two standard errors.

    Example: shoal simulate quality --quick --only codec
    """
    from peer.simulate import quality

    chosen, length = _seeds(1 if quick else seeds, seed), 15.0 if quick else cycles
    try:
        counts = (2, 4) if quick else tuple(int(count) for count in learners.split(","))
    except ValueError as error:
        raise typer.BadParameter(f"--learners {learners!r} is not a list of numbers") from error

    def train(kept: Kept | None, advance: Callable[[float], None]) -> Shown:
        rows = quality.table(
            seeds=chosen,
            learners=counts,
            cycles=length,
            workers=workers,
            only=only,
            kept=kept,
            changes=_changes(settings),
            progress=advance,
        )
        return rows, lambda: quality.section(rows, seeds=len(chosen))

    command = (
        f"quality --seeds {len(chosen)} --seed {seed} --cycles {length:g} "
        f"--learners {','.join(str(count) for count in counts)}"
    )
    _train_and_show(command, train, only=only, settings=settings, out=out, as_json=as_json)


@simulations.command("compare")
def simulate_compare(
    params: Annotated[float, Option(help="Parameters of the model.")] = 3e8,
    step: Annotated[
        str, Option(help="Time of one step, such as 1s; or measured here and scaled up.")
    ] = "measured",
    learners: Annotated[int, Option(help="Learners.", min=2)] = 8,
    loss: Annotated[
        float | None,
        Option(
            help="To be reached; unset: data parallel's after three quarters of its tokens.",
            show_default=False,
        ),
    ] = None,
    link: Annotated[str, Option(help="Links to compare.")] = "100Mbit,1Gbit,5Gbit",
    latency: Annotated[str, Option(help="One way, in milliseconds.")] = "20,100",
    cycles: Annotated[float, Option(help="Length of the training.", min=2)] = 40,
    seeds: PairedSeeds = 1,
    seed: FirstSeed = 0,
    workers: Workers = 2,
    settings: Settings = None,
    out: OutKept = None,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """How long until a given loss over slow links: data parallel against shoal?

    Assumes the learning of a small byte-level model, and the time and traffic of one of --params
    parameters: steps take as long as measured here for the small one, times the ratio of their
    sizes, and links are as much slower. Data parallel sends bf16 gradients through a ring at
    every step, hidden behind two thirds of it. Equally fast peers, no failures.

    Example: shoal simulate compare --params 3e8 --link 100Mbit --latency 20 --out results
    """
    from peer.simulate import compare

    try:
        setting = compare.Setting(
            parameters=params,
            step_s=None if step == "measured" else _seconds(step),
            learners=learners,
            loss=loss,
            cycles=cycles,
        )
        links = [_bits_per_second(text) / 1e6 for text in link.split(",")]
        latencies = [_milliseconds(text) for text in latency.split(",")]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error

    def train(kept: Kept | None, advance: Callable[[float], None]) -> Shown:
        rows, _ = compare.table(
            setting,
            seeds=_seeds(seeds, seed),
            links_mbit=links,
            latencies_s=latencies,
            workers=workers,
            kept=kept,
            changes=_changes(settings),
            progress=advance,
        )
        return rows, lambda: compare.section(rows, setting)

    command = (
        f"compare --params {params:g} --step {step} --learners {learners} --link {link} "
        f"--latency {latency} --cycles {cycles:g} --seeds {seeds} --seed {seed}"
    )
    _train_and_show(command, train, settings=settings, out=out, as_json=as_json)


def _seeds(count: int, first: int) -> tuple[int, ...]:
    return tuple(range(first, first + count))


def _changes(settings: Sequence[str] | None) -> dict[str, Any]:
    from peer.simulate.swarm_experiment import BadExperiment, sweep

    combinations = list(sweep(settings or []))
    if len(combinations) > 1:
        raise BadExperiment("--set takes one value for each setting here; sweep with `swarm`")
    return combinations[0]


Shown: TypeAlias = "tuple[Sequence[Any], Callable[[], Section]]"
"""Rows of an experiment, and how they are drawn."""


def _train_and_show(
    command: str,
    train: Callable[[Kept | None, Callable[[float], None]], Shown],
    *,
    only: str = "",
    settings: Sequence[str] | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Make an experiment's trainings, but for those that are in ``out`` already, and show them.

    ``command`` begins with the name of the experiment, and is how to repeat it.
    """
    from peer.simulate.kept import Folder

    kept = None if out is None else Folder(out / "trainings")
    try:
        with _progress("training", quiet=as_json) as advance:
            rows, draw = train(kept, advance)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    chosen = ["--only", only] if only else []
    for setting in settings or ():
        chosen += ["--set", setting]
    whole = shlex.join(["shoal", "simulate", *command.split(), *chosen])
    name = command.split()[0]
    _present(name, whole, rows, draw, out=out, as_json=as_json)


def _present(
    name: str,
    command: str,
    rows: Sequence[Any],
    draw: Callable[[], Section],
    *,
    out: Path | None,
    as_json: bool,
) -> None:
    """An experiment's rows: on the screen or as JSON, and in a folder if one is given."""
    section = draw() if out is not None or not as_json else None
    if out is not None and section is not None:
        from peer.simulate.report import write_csv, write_html

        out.mkdir(parents=True, exist_ok=True)
        write_csv(out / f"{name}.csv", rows)
        (out / f"{name}.png").write_bytes(section.picture_png or b"")
        title = section.heading
        write_html(out / f"{name}.html", title=title, command=command, sections=[section])
    if as_json:
        print(json.dumps({"command": command, "rows": [asdict(row) for row in rows]}))
    elif section is not None:
        _print_section(section)


def _print_section(section: Section) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=section.heading, caption=section.text)
    for index, column in enumerate(section.columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    for row in section.rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 140).print(table)


@contextmanager
def _progress(what: str, *, quiet: bool) -> Iterator[Callable[[float], None]]:
    """A bar with the remaining time on stderr, where there is a terminal to see it."""
    if quiet or not sys.stderr.isatty():
        yield lambda share: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=1.0)
        yield lambda share: bar.update(task, completed=share)


_TIME_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_RATE_UNITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def _seconds(text: str) -> float:
    return _quantity(text, _TIME_UNITS, "a time such as 90s, 4m, 9h or 2d")


def _milliseconds(text: str) -> float:
    return _quantity(f"{text.strip()}s", _TIME_UNITS, "a time in milliseconds") / 1e3


def _bits_per_second(text: str) -> float:
    return _quantity(text.removesuffix("/s"), _RATE_UNITS, "a rate such as 20Mbit or 1Gbit")


def _quantity(text: str, units: dict[str, float], example: str) -> float:
    number = text.rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
    unit = units.get(text[len(number) :].lower())
    try:
        value = float(number)
    except ValueError:
        value = -1.0
    if unit is None or not value > 0:
        raise typer.BadParameter(f"{text!r} is not {example}")
    return value * unit


def start_logging(level: int = logging.INFO) -> None:
    """Log to stderr, one line per event. stdout belongs to what a command was asked for."""
    logging.basicConfig(
        level=level,
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
        datefmt="%Y-%m-%dT%H:%M:%S%z",
    )


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code."""
    try:
        code = app(args=list(arguments), prog_name="shoal", standalone_mode=False)
    except UsageError as error:
        message = _message(error)
        _complain(f"{message}{'' if message.endswith('?') else ';'} see `{_command(error)} --help`")
        return EXIT_USAGE
    except PeerError as error:
        _complain(str(error))
        return error.exit_code
    except DhtError as error:
        _complain(str(error))
        return EXIT_USAGE if isinstance(error, KeyFileError | AddressError) else EXIT_UNREACHABLE
    except (KeyboardInterrupt, typer.Abort):
        _complain("interrupted")
        return EXIT_INTERRUPTED
    return code if isinstance(code, int) else 0


def main() -> NoReturn:
    """What the ``shoal`` command calls."""
    try:
        code = run(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code)


def _complain(text: str) -> None:
    print("shoal: " + " ".join(text.split()), file=sys.stderr)


def _message(error: Exception) -> str:
    text: str = error.format_message()  # type: ignore[attr-defined]
    return text.strip().rstrip(".")


def _command(error: Exception) -> str:
    context = getattr(error, "ctx", None)
    return context.command_path if context is not None else "shoal"


if __name__ == "__main__":
    main()
