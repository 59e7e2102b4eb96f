"""A bootstrap peer: a well-known address through which peers find each other.

It belongs to no run and does not train. It stores records of the DHT, introduces peers of the same
run to each other, dials peers back that ask whether they can be reached, and relays control
messages for those that cannot; with the consent of its host it passes their bulk data on, too. A
run needs one to start, should have several, and continues without any.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import resource
import shutil
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from multiaddr import Multiaddr
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from dht import addresses
from dht.errors import AddressError
from dht.identity import Identity, PeerId
from dht.libp2p.hivemind_daemon import BOOTSTRAP_CONNECTIONS
from dht.libp2p.hivemind_host import HivemindHost, HostSettings
from dht.libp2p.lane.connection import LaneSettings
from dht.libp2p.lane.relaying import MEMBERS_ONLY, Relay
from dht.presence.presence import Presence
from dht.presence.this_peer import Events, PresenceEvent, PresenceSettings, Profile
from peer.cli.listening import USUAL_PORT, all_interfaces, try_to_listen
from peer.errors import Unusable
from peer.events.board import Board
from peer.events.names import Names
from peer.extras.hosting.run_pages import RunPages, served_run_pages
from peer.extras.hosting.service import ServiceNotifier
from peer.quantities import plural
from peer.storage.home import PEERS
from peer.views.page_address import PageAddress
from peer.views.pages import Check, Content, serve_pages

_logger = logging.getLogger("peer.extras.hosting.bootstrap")

DEFAULT_PORT = USUAL_PORT
FILES_PER_CONNECTION = 2
CLOCK_OFF_MAX_S = 2.0
DISK_FREE_MIN_BYTES = 50 << 20
RUNS_SHOWN_MAX = 200
WATCHDOG_PERIOD_S = 10.0
END_WITHIN_S = 20.0

WARNINGS = {"nobody_answered", "clock_off", "identity_in_use", "cache_unreadable"}
"""Events of the presence that an operator may have to act on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BootstrapSettings:
    """Settings of a bootstrap peer."""

    data_directory: Path
    port: int = DEFAULT_PORT
    listen: tuple[Multiaddr, ...] = ()
    """Empty: ``port`` on every IPv4 and IPv6 address of this machine."""

    announce: tuple[Multiaddr, ...] = ()
    """Addresses to announce in place of those that this machine knows."""

    identity_path: Path | None = None
    """``None``: ``identity.key`` in the data folder, which is made if there is none."""

    seeds: tuple[Multiaddr, ...] = ()
    """Other bootstrap peers to stay connected to."""

    relay_bytes_s: float | None = None
    """Rate of bulk data that it passes on between peers of one run; ``None``: it does not.

    The default: a bootstrap peer costs its host next to nothing, and anybody may found a run.
    """

    lane_port: int | None = None
    """TCP port for that; ``None``: the one after ``port``."""

    page: PageAddress | None = None
    run_page: PageAddress | None = None
    """Address of the public pages of runs; ``None``: there are none."""

    notify_socket: str | None = None
    """Socket for notifications to systemd."""

    def __post_init__(self) -> None:
        if not 0 < self.port < 65536:
            raise Unusable(
                f"--port: {self.port} is no port for a bootstrap peer, whose address must not "
                f"change: choose one from 1 to 65535, such as {DEFAULT_PORT}",
                section="setting-error",
            )
        if self.lane_port is not None and not 0 < self.lane_port < 65536:
            text = f"--lane: {self.lane_port} is no port; choose one up to 65535"
            raise Unusable(text, section="setting-error")

    @property
    def lane(self) -> LaneSettings | None:
        """The lane through which it relays; ``None`` if it does not."""
        if self.relay_bytes_s is None:
            return None
        return LaneSettings(port=self.lane_port or self.port % 65535 + 1)

    @property
    def key_file(self) -> Path:
        return self.identity_path or self.data_directory / "identity.key"


def announced(text: str, *, port: int) -> Multiaddr:
    """Parse an address to announce: a multiaddr, a host name, or an IP address.

    Raises ``AddressError`` or ``Unusable``.
    """
    address = _parsed(text, port=port)
    if not addresses.is_dialable(address):
        raise Unusable(
            f"--announce: nobody can dial {text!r}; name the host or the number at which others "
            "reach this machine, and a port if it is another one there",
            section="setting-error",
        )
    return address


def _parsed(text: str, *, port: int) -> Multiaddr:
    if text.startswith("/"):
        return addresses.parse(text)
    host, _, last = text.rpartition(":")
    if host and last.isascii() and last.isdigit() and (":" not in host or host.endswith("]")):
        port, text = int(last), host
    text = text.removeprefix("[").removesuffix("]")
    try:
        kind = "ip4" if ipaddress.ip_address(text).version == 4 else "ip6"
    except ValueError:
        kind = "dns4"
    try:
        return addresses.parse(f"/{kind}/{text}/tcp/{port}")
    except AddressError as error:
        raise Unusable(
            f"--announce: {text!r} is neither a host name, nor an IP address, nor an address such "
            f"as /dns4/seed.example.org/tcp/{port} ({error.reason})",
            section="setting-error",
        ) from error


@dataclass(slots=True)
class Bootstrap:
    """A running bootstrap peer."""

    settings: BootstrapSettings
    host: HivemindHost
    presence: Presence
    board: Board
    addresses: tuple[Multiaddr, ...]
    """Addresses, best first, each ending in /p2p/PEER. The first is the one to publish."""

    page_url: str | None = None
    """URL of the page, with the token if it has one."""

    run_page_url: str | None = None
    """URL of the public pages of runs."""

    @property
    def address(self) -> Multiaddr:
        return self.addresses[0]

    @property
    def peer_id(self) -> PeerId:
        return self.host.peer_id

    def checks(self) -> list[Check]:
        """The checks of ``/readyz``."""
        return [
            self._check_daemon(),
            self._check_reachable(),
            self._check_seeds(),
            self._check_clock(),
            self._check_disk(),
        ]

    def _check_daemon(self) -> Check:
        pid = self.host.daemon_pid
        if pid is None:
            return Check("daemon", False, "the libp2p daemon is restarting; see the log")
        return Check("daemon", True, f"running as process {pid}, {self.host.restarts} restarts")

    def _check_reachable(self) -> Check:
        reachable, reason = self.presence.reachable, self.presence.reachability_reason
        if reachable is False:
            advice = "open its port in the firewall and see 'shoal docs others-cannot-dial'"
            return Check(
                "reachable", False, f"others cannot dial {self.address}: {reason}; {advice}"
            )
        return Check("reachable", True, reason)

    def _check_seeds(self) -> Check:
        seeds = self.presence.seeds
        if not seeds:
            return Check("seeds", True, "no other bootstrap peer was given with --seed")
        up = sum(is_connected for _, is_connected in seeds)
        if up:
            return Check("seeds", True, f"connected to {up} of {len(seeds)} other bootstrap peers")
        tried = "; ".join(f"{seed.address}: {seed.reason or 'not tried yet'}" for seed, _ in seeds)
        return Check("seeds", False, f"no other bootstrap peer answers; {tried}")

    def _check_clock(self) -> Check:
        estimate = self.presence.clock
        if estimate is None:
            return Check("clock", True, "no peer has been asked yet")
        offset_s = round(estimate.offset_s, 1) + 0.0  # not -0.0
        offset = f"{offset_s:+.1f} s from the median of {plural(estimate.peers, 'peer')}"
        if abs(estimate.offset_s) > CLOCK_OFF_MAX_S + estimate.error_s:
            return Check("clock", False, f"{offset}; turn NTP on")
        return Check("clock", True, offset)

    def _check_disk(self) -> Check:
        path = self.settings.data_directory
        try:
            free = shutil.disk_usage(path).free
        except OSError as error:
            return Check("disk", False, f"{path}: {error.strerror or error}")
        room = f"{free / 1e9:.1f} GB free in {path}"
        if free < DISK_FREE_MIN_BYTES:
            return Check("disk", False, f"{room}; known peers cannot be saved, free some space")
        return Check("disk", True, room)

    def content(self) -> Mapping[str, Any]:
        """Content of the page, for ``/state.json``."""
        now = asyncio.get_running_loop().time()
        runs: list[dict[str, Any]] = []
        for run, live in self.presence.table.live_by_run(now).items():
            runs.append(
                {
                    "run": run,
                    "peers": len(live),
                    "training": sum(member.record.trains for member in live),
                    "tokens": sum(member.record.counters.tokens for member in live),
                }
            )
        ready = all(check.ok for check in self.checks())
        return {
            "schema": 1,
            "kind": "bootstrap",
            "now": self.host.wall_time(),
            "title": "Shoal bootstrap peer",
            "phase": "ready" if ready else "not ready",
            "who": f"peers connected: {len(self.presence.connected)}",
            "link": str(self.address),
            "figures": {
                "peers": sum(run["peers"] for run in runs),
                "connections": len(self.presence.connected),
            },
            "checks": [asdict(check) for check in self.checks()],
            "runs": sorted(runs, key=lambda run: -run["peers"])[:RUNS_SHOWN_MAX],
            "events": self.board.search(""),
        }

    def metrics(self) -> Iterator[Metric]:
        """Figures for Prometheus. The number of series does not depend on peers or runs."""
        now = asyncio.get_running_loop().time()
        live = [len(members) for members in self.presence.table.live_by_run(now).values()]
        estimate, stats = self.presence.clock, self.presence.stats
        records, nan = self.host.directory, float("nan")
        relay = Relay() if self.host.lane is None else self.host.lane.relay
        reachable = {True: 1.0, False: 0.0, None: nan}[self.presence.reachable]
        gauges: dict[str, tuple[str, float]] = {
            "connections": ("Peers connected.", len(self.presence.connected)),
            "runs": ("Runs with live peers.", len(live)),
            "peers": ("Live peers of all runs.", sum(live)),
            "directory_stored_bytes": ("Size of the DHT records stored.", records.stored_bytes),
            "directory_neighbours": ("Routing table.", records.neighbours),
            "reachable": (
                "1: other peers can dial this peer; 0: they cannot; NaN: unknown.",
                reachable,
            ),
            "clock_offset_seconds": (
                "Offset from this clock to those of others; NaN: unknown.",
                nan if estimate is None else estimate.offset_s,
            ),
            "relay_circuits": ("Connections relayed now.", relay.circuits),
        }
        counters: dict[str, tuple[str, float]] = {
            "hellos_received": ("Hellos received.", stats.hellos_received),
            "calls_refused": ("Hellos refused.", stats.refused),
            "relayed_bytes": ("Bulk data passed on for others.", relay.counters["bytes"]),
            "relay_refused": ("Connections not relayed.", relay.counters["refused"]),
            "daemon_restarts": ("Daemon restarts.", self.host.restarts),
        }
        if (pid := self.host.daemon_pid) is not None:
            with suppress(psutil.Error):
                daemon = psutil.Process(pid)
                spent, memory = daemon.cpu_times(), daemon.memory_info().rss
                gauges["daemon_resident_memory_bytes"] = ("Memory of the libp2p daemon.", memory)
                counters["daemon_cpu_seconds"] = (
                    "Processor time of the libp2p daemon.",
                    spent.user + spent.system,
                )
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"shoal_{name}", text, value=value)
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(f"shoal_{name}", text, value=value)
        rejected = CounterMetricFamily(
            "shoal_records_rejected", "DHT records rejected, by reason.", labels=["reason"]
        )
        for reason, count in sorted(self.host.keeper.rejected.items()):
            rejected.add_metric([reason], count)
        yield rejected


@asynccontextmanager
async def open_bootstrap(settings: BootstrapSettings) -> AsyncIterator[Bootstrap]:
    """Run a bootstrap peer while the block runs.

    Raises ``KeyFileError``, ``Unusable``, ``PageError`` and
    ``HostClosed``.
    """
    _prepare_folder(settings.data_directory)
    is_new = settings.identity_path is None and not settings.key_file.exists()
    load = Identity.load_or_create if settings.identity_path is None else Identity.load
    identity = load(settings.key_file)
    if is_new:
        _logger.info("key_made path=%s peer=%s", settings.key_file, identity.peer_id)
    listen = settings.listen or all_interfaces(settings.port)
    for address in listen:
        try_to_listen(address, option="--port")
    if settings.lane is not None:
        try_to_listen(Multiaddr(f"/ip4/0.0.0.0/tcp/{settings.lane.port}"), option="--lane")
    _allow_many_files()
    host_settings = HostSettings(
        listen=listen,
        announce=tuple(addresses.without_peer(address) for address in settings.announce),
        is_bootstrap=True,
        lane=settings.lane,
    )
    board = Board(Names({}))

    def tell(event: PresenceEvent) -> None:
        board.note(
            {**event.fields, "at": host.wall_time(), "event": event.name, "text": event.text}
        )
        if event.name in WARNINGS:
            _logger.warning("%s %s", event.name, event.text)

    async with await HivemindHost.open(identity, host_settings) as host:
        presence = Presence(
            host,
            identity,
            Profile(None, role="bootstrap"),
            PresenceSettings(cache_path=settings.data_directory / PEERS),
            seeds=settings.seeds,
            events=Events(tell),
        )
        await presence.start()
        if host.lane is not None:
            # It takes no part in runs: its lane is for circuits, and to show peers their ports.
            host.lane.relay.judge = partial(_judge_members, presence)
            host.lane.relay.set_rate(settings.relay_bytes_s)
        try:
            bootstrap = Bootstrap(settings, host, presence, board, await host.addresses())
            async with AsyncExitStack() as stack:
                if settings.page is not None:
                    bootstrap.page_url = await stack.enter_async_context(
                        serve_pages(
                            settings.page,
                            checks=bootstrap.checks,
                            metrics=bootstrap.metrics,
                            content=Content(
                                state=bootstrap.content,
                                events=board.search,
                                token_file=settings.data_directory / "page.token",
                            ),
                        )
                    )
                if settings.run_page is not None:
                    pages = RunPages(host, presence, bootstrap.addresses)
                    bootstrap.run_page_url = await stack.enter_async_context(
                        served_run_pages(settings.run_page, pages)
                    )
                yield bootstrap
        finally:
            await presence.close()


async def _judge_members(presence: Presence, peer: PeerId, other: PeerId) -> str | None:
    """Reason why nothing is relayed between two peers; ``None`` for live members of one run."""
    now, table = asyncio.get_running_loop().time(), presence.table
    one, two = table.get(peer), table.get(other)
    both_live = table.is_live(peer, now) and table.is_live(other, now)
    if one is not None and two is not None and one.run == two.run and both_live:
        return None
    return f"{MEMBERS_ONLY}, and does not know both as such"


async def serve(
    settings: BootstrapSettings, *, stop: asyncio.Event, on_ready: Callable[[Bootstrap], None]
) -> None:
    """Run a bootstrap peer until ``stop`` is set. ``on_ready`` is called once it runs."""
    notifier = ServiceNotifier(settings.notify_socket)
    async with open_bootstrap(settings) as bootstrap:
        _logger.info(
            "bootstrap_up peer=%s addresses=%s page=%s",
            bootstrap.peer_id,
            ",".join(map(str, bootstrap.addresses)),
            settings.page,
        )
        if not any(_is_public(address) for address in bootstrap.addresses):
            _logger.warning(
                "no_public_address peers in other networks cannot dial %s; "
                "behind a router or in a container, use --announce HOST",
                bootstrap.address,
            )
        notifier.say("READY=1")
        on_ready(bootstrap)
        stopped = asyncio.create_task(stop.wait(), name="stop")
        broken = asyncio.create_task(bootstrap.presence.watch(), name="presence ended")
        try:
            while not stopped.done():
                notifier.say("WATCHDOG=1")
                await asyncio.wait(
                    {stopped, broken},
                    timeout=WATCHDOG_PERIOD_S,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if broken.done():
                    broken.result()  # raises: only a bug ends the presence
                    break
        finally:
            stopped.cancel()
            broken.cancel()
            notifier.say("STOPPING=1")
            _logger.info("bootstrap_stops peer=%s", bootstrap.peer_id)


def _prepare_folder(path: Path) -> None:
    """Make sure that the data folder exists and is writable."""
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        probe = path / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise Unusable(
            f"the data folder {path} cannot be used: {error.strerror or error}; make it writable "
            "for this user, or choose another with --data-dir",
            section="data-directory-error",
        ) from error


def _allow_many_files() -> None:
    """Raise the limit of open files, as each connection of the daemon is one."""
    wanted = BOOTSTRAP_CONNECTIONS[1] * FILES_PER_CONNECTION
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


def _is_public(address: Multiaddr) -> bool:
    return not (
        addresses.is_loopback(address)
        or addresses.is_private(address)
        or addresses.is_relayed(address)
    )
