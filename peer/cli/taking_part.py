"""``shoal start`` and ``join``: train in a run."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from multiaddr import Multiaddr
from typer import Argument

from dht.errors import DhtError
from dht.identity import Identity
from peer.cli.application import (
    TAKE_PART,
    complain,
    log_to,
    print_summary,
    report_if_slow,
    start_logging,
    usage_errors,
)
from peer.cli.finding import (
    check_new,
    check_somebody_to_ask,
    find_patiently,
    link_in,
    run_to_start,
    seen_by_peers,
)
from peer.cli.learner_options import Options, check_answerable, trains
from peer.errors import ExitCode, FolderInUse, PeerError, RunOver
from peer.installed import extra, extras
from peer.quantities import plural
from peer.run_file.sections import FilesData, HfData, RunFile, TextData
from peer.storage.address import LOOKS_FIRST_S, peers_here, with_own_peers
from peer.storage.home import (
    OUTER,
    PEERS,
    check_folder,
    claim,
    data_cache,
    default_directory,
    free_directory,
    has_been_there,
    is_in_use,
    peer_folder,
)

if TYPE_CHECKING:
    from peer.joining.link import FoundRun
    from peer.joining.visit import RunStatus
    from peer.rules.limits import Manners
    from peer.trainer.loop import TrainerSettings
    from peer.trainer.settings import JoinSettings

commands = typer.Typer()


@commands.command(rich_help_panel=TAKE_PART)
@trains(Argument(help="Run file; see `shoal run new`.", metavar="FILE"), founds=True)
def start(file: str, options: Options) -> int:
    """Start a run, print the command with which others join it, and train.

    In the folder of an earlier start it goes on from there. A run that has existed and has no
    checkpoint there is founded anew only after a question, or with --yes.

    Example: shoal start my.run.toml
    """
    from peer.storage.earlier import told_if_edited

    for owning in extras("orders.owning"):
        owning.sign_if_owner_is_missing(Path(file))
    found = run_to_start(file)
    check_answerable(options.yes)
    _check_machine(options)
    if found.run.policy.admission == "invited":
        complain("the run admits invited peers only; for each, or for all: shoal invite LINK")
    where = options.directory or default_directory(found.run.run_id)
    is_here = bool(peers_here(found.run.run_id))
    if not is_here and not _may_found(found.run, where, options):
        return ExitCode.REFUSED
    if (edited := told_if_edited(found.run, where)) is not None:
        complain(edited)
    _check_first_start(found, file, options, where)
    has_friends = bool(found.seeds or options.seed or is_here or (where / PEERS).exists())
    own = options.settings(found, seeds=(), found_after_s=LOOKS_FIRST_S if has_friends else 0.0)
    return _take_part(found, _in_free_folder(own, found.run), options)


def _may_found(run: RunFile, where: Path, options: Options) -> bool:
    """Ask about a run that existed and of which nothing is here.

    Raises ``RunOver`` for a run that has ended and whose model is here.
    """
    from peer.storage.checkpoint import CheckpointFolder
    from peer.storage.earlier import date_text, recall

    known = recall(run.run_id, [where])
    has_checkpoint = bool(CheckpointFolder(where / OUTER).numbers())
    if known is not None and known.ended_at is not None and has_checkpoint:
        raise RunOver(run.name, date_text(known.ended_at), known.tokens, str(where))
    if known is None or has_checkpoint:
        return True
    complain(
        f"the run {run.name!r} has existed: {known.sentence}; `shoal join` goes on with it and "
        "waits for its peers; `shoal start --yes` founds it anew, from first weights, and of two "
        "histories only the one with more tokens goes on"
    )
    return options.yes or typer.confirm("Found it anew?", default=False)


def _check_first_start(found: FoundRun, file: str, options: Options, where: Path) -> None:
    """Find mistakes in the run file, and read its data, before anything of a new run starts."""
    from peer.data.files import hosts_of
    from peer.data.sources import read_once

    if has_been_there(where):
        return
    check_new(found, file)
    data = found.run.data
    # Downloads of files take as long as they will: they are for a run that is under way.
    if isinstance(data, TextData | HfData) or (isinstance(data, FilesData) and not hosts_of(data)):
        with report_if_slow("still reading the data"):
            read_once(
                found.run,
                cache_dir=data_cache(),
                data_dir=options.data or found.folder or where / "data",
            )


@commands.command(rich_help_panel=TAKE_PART)
@trains(
    Argument(
        help="shoal:// link, https address, or run file; without one you choose from the list of "
        "SHOAL_RUNS, see `shoal runs`.",
        metavar="LINK",
    ),
    founds=False,
)
def join(link: str, options: Options) -> int:
    """Join a training run and help train it.

    It never founds the run: while nobody is on line it keeps looking, and joins when somebody
    comes. With a checkpoint of an earlier participation it goes on from there.

    Ctrl-C hands over the pending work, saves and leaves: usually in less than half a minute, on a
    slow line in up to 5 minutes (--patience). A second Ctrl-C leaves the rest of the work behind
    and stops at once.

    Example: shoal join 'shoal://RUN_ID?seed=/ip4/203.0.113.7/tcp/7700/p2p/12D3Koo...'
    """
    from peer.storage.checkpoint import CheckpointFolder
    from peer.storage.earlier import date_text, recall

    link_in(link)
    check_answerable(options.yes)
    _check_machine(options)
    found = find_patiently(link, options.directory)
    seeds = with_own_peers(found.run.run_id, found.seeds)
    own = options.settings(found, seeds=[str(seed) for seed in seeds])
    where = own.directory or default_directory(found.run.run_id)
    known = recall(found.run.run_id, [where])
    if known is not None and known.ended_at is not None:
        source = str(where) if CheckpointFolder(where / OUTER).numbers() else f"'{link}'"
        raise RunOver(found.run.name, date_text(known.ended_at), known.tokens, source)
    check_somebody_to_ask(found, link, own.seeds, where)
    return _take_part(found, _in_free_folder(own, found.run), options)


def _in_free_folder(own: JoinSettings, run: RunFile) -> JoinSettings:
    """Settings with the usual folder, or another one if a peer of this machine holds that."""
    if own.directory is not None:
        return own
    folder = free_directory(run.run_id)
    if folder != default_directory(run.run_id):
        complain(
            f"another peer of yours takes part in run {run.name!r} on this machine (`shoal "
            f"status`); this one is a second one, with the folder {folder}"
        )
    return replace(own, directory=folder)


def _check_machine(options: Options) -> None:
    """Check early that this machine has what the options name. Raises ``BadParameter``.

    Where they name nothing, torch is imported later: to look for a run needs none.
    """
    if options.is_torch_asked:
        _devices(options)


def _devices(options: Options) -> tuple[str, ...]:
    """The devices to train on. Raises ``BadParameter``."""
    from peer.island.training import choose_devices
    from peer.trainer.loop import TrainerSettings, check_wishes

    with usage_errors():
        devices = choose_devices(options.devices_wished())
        check_wishes(TrainerSettings(device=devices[0], wishes=options.wishes()))
    return devices


def _for_batch(devices: tuple[str, ...], run: RunFile) -> tuple[str, ...]:
    """Return at most one device for each sequence of a batch, and say so where some are left."""
    size = run.inner.batch_size
    if len(devices) > size:
        complain(
            f"{size} of {len(devices)} devices train: a batch of run {run.name!r} has "
            f"{plural(size, 'sequence')} (inner.batch_size), and a device trains on one at least"
        )
    return devices[:size]


def _manners() -> Manners:
    """The manners of training on this machine, where the options name none."""
    import psutil

    from peer.guest.machine import container_processors
    from peer.rules.limits import manners

    return manners(
        desktop=_is_desktop(),
        cores=psutil.cpu_count(logical=False) or 1,
        container=container_processors(),
    )


def _trainer_settings(devices: Sequence[str], options: Options, *, founds: bool) -> TrainerSettings:
    from peer.trainer.loop import TrainerSettings

    threads = options.threads or _manners().threads
    if len(devices) > 1:
        threads = max(1, (threads or os.cpu_count() or 1) // len(devices))
    return TrainerSettings(
        device=devices[0],
        wishes=options.wishes(),
        threads=threads,
        steps_max=options.steps,
        founds=founds,
        weights=options.weights,
    )


def _take_part(found: FoundRun, own: JoinSettings, options: Options) -> int:
    from peer.cli.training import Training, look_at
    from peer.data.sources import check_cache, check_data
    from peer.model.recipes import needs_base
    from peer.storage.credentials import own_credential
    from peer.storage.earlier import look_at_files

    start_logging(logging.WARNING)
    os.nice(_manners().niceness if options.nice is None else options.nice)
    where = own.directory or default_directory(found.run.run_id)
    check_folder(where, found.run)
    if is_in_use(where):
        raise FolderInUse(str(where))  # before measurements and questions; `occupied` decides
    data_directory = own.data_directory or where / "data"
    with report_if_slow("still checking the data"):
        check_cache(found.run, data_cache())
        check_data(found.run, data_directory, cache_dir=data_cache())
    earlier = look_at_files(where)
    for text in earlier.told:
        complain(text)
    if earlier.lost and not options.yes and not typer.confirm("Go on without them?"):
        return ExitCode.REFUSED
    if found.run.policy.admission != "open":  # nobody waits long to be told that it is refused
        with peer_folder(where):
            identity = Identity.load_or_create(where / "identity.key")
            own_credential(where, identity, found.run, role="learner", invite=own.invite)
    devices = _for_batch(_devices(options), found.run)  # with torch: other faults need none
    settings = _trainer_settings(devices, options, founds=bool(own.found))
    if needs_base(found.run, founds=settings.founds):
        bases = extra("bases.commands")
        if not (options.yes or bases.may_fetch(found.run)):
            return ExitCode.REFUSED
        base = bases.fetched_base(
            found.run, founds=settings.founds, data_dir=data_directory, quiet=options.as_json
        )
        settings = replace(settings, base=base)
    # There are peers to ask, which answer a visitor: it has a key of its own, which no list has.
    answers = bool(own.seeds) and not own.found and found.run.policy.admission != "listed"
    asks = answers and not options.as_json
    seen = _look_at_run(found, own.seeds) if asks else None
    with report_if_slow("still building the model"):
        look = look_at(
            found.run, settings, devices=len(devices), pace_s=own.pace_s, directory=where
        )
    if not options.as_json:
        expected = () if seen is None else (_expectation(seen, look.step_time_s),)
        print_summary((*look.lines, *expected))
    if not options.yes and not typer.confirm("Take part?", default=True):
        return ExitCode.REFUSED
    if options.directory is None and own.directory is not None and is_in_use(where):
        # Another learner has taken it since: `shoal join` was typed twice, and answered later.
        own = _in_free_folder(replace(own, directory=None), found.run)
        where = own.directory or where
    claim(where, found.run)
    log_to(where / "trainer.log")
    training = Training(own, options, settings, look)
    return training.here() if look.engine is not None else training.on_devices(devices)


def _is_desktop() -> bool:
    """Return whether a graphical session is open."""
    return sys.platform == "darwin" or any(
        os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY")
    )


def _look_at_run(found: FoundRun, seeds: Sequence[str]) -> RunStatus | str:
    """The run as its peers report it, or why that is not known. Raises ``RunOver``."""
    from peer.joining.link import Link
    from peer.rules.ending import ended
    from peer.storage.earlier import date_text

    link = Link(found.run.run_id, tuple(Multiaddr(seed) for seed in seeds))
    try:
        seen = seen_by_peers(replace(link, invite=found.invite), timeout_s=10.0)
    except (PeerError, DhtError) as error:
        return str(error)
    over = ended(found.run.end, seen.peers, now=datetime.now(UTC), ordered=seen.is_ordered_to_end)
    if over is not None:
        raise RunOver(found.run.name, date_text(over[0]), over[1], f"'{link}'")
    return seen


def _expectation(seen: RunStatus | str, step_time_s: float) -> str:
    """The share of the run's speed that this machine would add, as its peers report theirs."""
    from peer.trainer.preflight import expected_share

    if isinstance(seen, str):
        return f"Expect   unknown: {seen}"
    if not seen.peers:  # without an invite in the link it is told nothing
        return f"Expect   unknown: {seen.reasons}"
    training = seen.step_times_s
    share = expected_share(step_time_s, training)
    loss = "" if seen.held_out is None else f", held-out loss {seen.held_out}"
    others = "1 peer trains" if len(training) == 1 else f"{len(training)} peers train"
    return f"Expect   {others}{loss}; this machine adds about {share:.0%} of the speed"
