"""``shoal start``, ``join`` and ``keep``: take part in a run."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option
from typer.models import ArgumentInfo

from dht.errors import DhtError
from peer.cli.application import EXIT_INTERRUPTED, EXIT_REFUSED, patience, start_logging
from peer.cli.options import JsonLines, Plain
from peer.errors import PeerError

if TYPE_CHECKING:
    from peer.joining.link import FoundRun
    from peer.trainer.settings import JoinSettings
    from peer.views.watch import Reporter

commands = typer.Typer()


def _name(name: str | None) -> str | None:
    from dht.records import name_problem

    if name is not None and (problem := name_problem(name)) is not None:
        raise typer.BadParameter(problem)
    return name


def _site(name: str | None) -> str | None:
    from dht.records import site_problem

    if name is not None and (problem := site_problem(name)) is not None:
        raise typer.BadParameter(problem)
    return name


def _lane(text: str) -> str:
    from multiaddr import Multiaddr

    from dht.libp2p.lane import parse_lane
    from peer.hosting.listening import try_to_listen

    try:
        lane = parse_lane(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if lane is not None and lane.port:
        # A lane that cannot listen is done without, but who names a port wants that one.
        try_to_listen(Multiaddr(f"/ip4/0.0.0.0/tcp/{lane.port}"), option="--lane")
    return text


SEARCHING = "still asking for the run file (Ctrl-C ends it)"
ANY_PORT = ("/ip4/0.0.0.0/tcp/0",)

Directory = Annotated[
    Path | None,
    Option(help="This peer's folder for key, checkpoints and logs.", show_default=False),
]
Yes = Annotated[bool, Option("--yes", help="Do not ask; for scripts.")]
Seeds = Annotated[
    list[str] | None, Option("--seed", help="Multiaddr of a bootstrap or other peer; repeatable.")
]
Name = Annotated[str | None, Option(callback=_name, help="What others see; made up by default.")]

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
Lane = Annotated[
    str,
    Option(
        callback=_lane,
        help="TCP port for direct connections, over which what is large goes faster: PORT, "
        "PORT:OUTER_PORT behind a router, 'auto': any, or 'off'.",
        metavar="PORT",
    ),
]
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
    lane: str
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
        from peer.trainer.settings import JoinSettings

        return JoinSettings(
            directory=self.directory,
            data_directory=self.data or found.folder,
            name=self.name,
            site=self.site,
            seeds=(*_seeds(self.seed), *seeds),
            found_after_s=found_after_s,
            lane=self.lane,
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
            lane: Lane = "auto",
            page: Page = "auto",
            device: Device = "auto",
            threads: Threads = None,
            nice: Nice = None,
            pace: Pace = 0.0,
            steps: Steps = None,
            weights: Weights = None,
            tensorboard: TensorBoard = None,
            wandb: Wandb = None,
            as_json: JsonLines = False,
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
                lane=lane,
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


@commands.command()
@trains(Argument(help="The run file; see `shoal run new`.", metavar="FILE"))
def start(file: str, options: Options) -> int:
    """Start a run, print the line that others paste to join it, and train.

    Example: shoal start examples/tiny_gpt/run.toml
    """
    from peer.joining.link import find_run

    found = find_run(file, ask_peers=no_peers)
    own = options.settings(found, seeds=(), found_after_s=0.0)
    return _take_part(found, own, options)


@commands.command()
@trains(Argument(help="shoal:// link, https address, or run file.", metavar="LINK"))
def join(link: str, options: Options) -> int:
    """Join a training run and help train it.

    Example: shoal join 'shoal://RUN_ID?seed=/ip4/203.0.113.7/tcp/7700/p2p/12D3Koo...'
    """
    from peer.errors import NobodyToAsk
    from peer.joining.find import ask_peers
    from peer.joining.link import find_run
    from peer.storage.home import default_directory, has_been_there

    with patience(SEARCHING):
        found = find_run(link, ask_peers=ask_peers)
    own = options.settings(found, seeds=[str(seed) for seed in found.seeds], found_after_s=None)
    if not own.seeds and not has_been_there(own.directory or default_directory(found.run.run_id)):
        # Alone it would found the run once more, and split it.
        raise NobodyToAsk(found.run.name, link)
    return _take_part(found, own, options)


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
    page: Page = "auto",
    as_json: JsonLines = False,
) -> int:
    """Keep a run's state, without training: the run survives while no learner is on line.

    Example: shoal keep 'shoal://RUN_ID?seed=/ip4/203.0.113.7/tcp/7700/p2p/12D3Koo...'
    """
    from dht.identity import Identity
    from peer.agent import keeper
    from peer.agent.local_peer import PeerSettings
    from peer.event_loop import run_until_stopped
    from peer.joining.find import ask_peers
    from peer.joining.link import find_run
    from peer.joining.nickname import default_name
    from peer.storage.checkpoint import CheckpointFolder
    from peer.storage.home import keeper_directory, only_process, peer_folder
    from peer.trainer.parameters import recipe_layout
    from peer.trainer.preflight import check_keeper
    from peer.views.watch import sentence

    start_logging(logging.WARNING)
    with patience(SEARCHING):
        found = find_run(link, ask_peers=ask_peers)
    where = directory or keeper_directory(found.run.run_id)
    check_keeper(found.run, where)
    layout = recipe_layout(found.run)
    with peer_folder(where):
        identity = Identity.load_or_create(where / "identity.key")
    settings = PeerSettings(
        run=found.run,
        identity=identity,
        directory=where,
        name=name or default_name(identity.peer_id),
        role="keeper",
        seeds=(*_seeds(seed), *(str(address) for address in found.seeds)),
        lane=lane,
        page=_page(page),
        **{"listen": ANY_PORT, "announce": (), **_addresses(listen, announce)},
    )

    def show(event: str, fields: Mapping[str, Any]) -> None:
        record = {**fields, "event": event}
        text = json.dumps(record, default=str) if as_json else sentence(record)
        if text:
            print(text, flush=True)

    with only_process(where):
        ending = run_until_stopped(lambda stop: keeper.keep(settings, layout, stop, show))
    if not as_json:
        had = f"is in {where}" if CheckpointFolder(where / "outer").numbers() else "never came here"
        print(f"{ending.reason}; the run's state {had}", flush=True)
    return ending.exit_code


def _page(address: str) -> str | None:
    """Checked while the mistake is still on the screen."""
    from peer.views.pages import parse_page

    if address == "off":
        return None
    parse_page(address)
    return address


def no_peers(link: object) -> bytes:
    raise typer.BadParameter("a run is started from a file; to take part in one: shoal join LINK")


def _addresses(listen: list[str] | None, announce: list[str] | None) -> dict[str, Any]:
    """Settings only where the user gave some, checked while the mistake is still on the screen."""
    from multiaddr import Multiaddr

    from peer.hosting.listening import try_to_listen

    given = {"listen": _parsed(listen), "announce": _parsed(announce)}
    for address in given["listen"]:
        try_to_listen(Multiaddr(address), option="--listen")
    return {key: texts for key, texts in given.items() if texts}


def _seeds(texts: list[str] | None) -> tuple[str, ...]:
    from dht import addresses

    return tuple(str(addresses.parse_seed(text)) for text in texts or ())


def _parsed(texts: list[str] | None) -> tuple[str, ...]:
    from dht import addresses

    return tuple(str(addresses.parse(text)) for text in texts or ())


def _take_part(found: FoundRun, own: JoinSettings, options: Options) -> int:
    import psutil

    from peer.data.sources import check_data
    from peer.model.weights import check_there
    from peer.rules.limits import manners
    from peer.storage.home import default_directory
    from peer.trainer.loop import Stop, TrainerSettings, prepare_torch, train
    from peer.trainer.preflight import examine
    from peer.trainer.session import Run
    from peer.views.sinks import open_curves

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
    if options.weights is not None:
        check_there(options.weights)
    check_data(found.run, own.data_directory or where / "data")
    with patience("still measuring what this machine can do"):
        look = examine(found.run, device=chosen, pace_s=own.pace_s, directory=where)
    if not options.as_json:
        print("\n".join(look.lines), flush=True)
        if own.seeds and own.found_after_s is None:  # there is a swarm to ask
            print(_expectation(found, own.seeds, look.step_time_s), flush=True)
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
        Stop(heard=reporter.interrupted).on_signals() as stop,
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
    if outcome.lost is not None:
        raise outcome.lost
    return EXIT_INTERRUPTED if outcome.stopped and not outcome.finished else 0


def _is_desktop() -> bool:
    """Whether somebody may sit before this machine: a graphical session is open."""
    return sys.platform == "darwin" or any(
        os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY")
    )


def _expectation(found: FoundRun, seeds: Sequence[str], step_time_s: float) -> str:
    """What this machine would add, as the run's peers say how fast they are."""
    from multiaddr import Multiaddr

    from peer.event_loop import run_until_stopped, unless_stopped
    from peer.joining.link import Link
    from peer.joining.visit import RunStatus, visit
    from peer.trainer.preflight import expected_share

    async def look() -> RunStatus:
        wanted = Link(found.run.run_id, tuple(Multiaddr(seed) for seed in seeds))
        async with visit(wanted) as visitor:
            return await visitor.look(timeout_s=10.0)

    try:
        seen = run_until_stopped(lambda stop: unless_stopped(stop, look()))
    except (PeerError, DhtError) as error:
        return f"Expect   unknown: {error}"
    share = expected_share(step_time_s, [peer.step_time_s for peer in seen.peers])
    loss = "" if seen.held_out is None else f", held-out loss {seen.held_out.loss:.3f}"
    training = [peer for peer in seen.peers if peer.role == "learner"]
    others = "1 peer trains" if len(training) == 1 else f"{len(training)} peers train"
    return f"Expect   {others}{loss}; you add about {share:.0%} of the speed"


def _reporter(*, as_json: bool, plain: bool) -> Reporter:
    from peer.views.watch import JsonReporter, PlainReporter, ScreenReporter

    def say(text: str) -> None:
        print(text, flush=True)

    if as_json:
        return JsonReporter(say)
    if plain or not sys.stdout.isatty():
        return PlainReporter(say)
    return ScreenReporter()
