"""``shoal doctor``: what works on this machine, what does not, and what to do about it.

Each check ends in a ``Finding``. Those about the machine need nothing but the machine; those
about the network run over a ``Host``, in the order in which one failure explains the next.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import psutil
from multiaddr import Multiaddr

from dht import addresses
from dht.errors import AddressError, DhtError, PeerUnreachable
from dht.host import Host
from dht.identity import Identity, PeerId, RunId
from dht.presence import Presence
from dht.records import PeerRecord, seal
from peer.errors import PeerError

if TYPE_CHECKING:
    from dht.hivemind_host import HivemindHost

State = Literal["ok", "warning", "failed", "skipped"]

DISK_FREE_WISHED_BYTES = 5 << 30
DISK_FREE_MIN_BYTES = 512 << 20
MEMORY_WISHED_BYTES = 4 << 30
MEMORY_MIN_BYTES = 1 << 30
CLOCK_WISHED_S = 2.0
SEED_TIMEOUT_S = 10.0
REACHABILITY_TIMEOUT_S = 25.0
RELAY_TIMEOUT_S = 10.0
RUN_FILE_TIMEOUT_S = 15.0
DIRECTORY_TIMEOUT_S = 10.0
COUNT_TIMEOUT_S = 10.0
LANE_TRIES = 3
COUNT_QUIET_S = 1.0
TORCH_TIMEOUT_S = 120.0
OLDEST_TIME = 1_735_689_600.0
"""2025-01-01. No right clock shows less: this program did not exist then."""

END_WITH_PARENT = """
import ctypes, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
"""
"""A driver that hangs would keep the process that asks it for ever. Python in it may be stuck as
well, so that only the kernel can end it."""

ASK_TORCH = """
import json, torch
found = {"version": torch.__version__, "device": "cpu", "name": "", "memory": 0}
if torch.cuda.is_available():
    torch.zeros(1, device="cuda").add_(1).item()
    properties = torch.cuda.get_device_properties(0)
    found |= {"device": "cuda", "name": properties.name, "memory": properties.total_memory}
elif torch.backends.mps.is_available():
    torch.zeros(1, device="mps").add_(1).item()
    found |= {"device": "mps"}
found["threads"] = torch.get_num_threads()
found["built_for_cuda"] = torch.version.cuda or ""
print(json.dumps(found))
"""


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found."""

    check: str
    state: State
    text: str
    remedy: str | None = None
    """What to do about it, where there is something to do."""

    took_s: float | None = None
    """How long the answer took, where that says something."""

    def __str__(self) -> str:
        mark = {"ok": "ok", "warning": "warn", "failed": "FAIL", "skipped": "-"}[self.state]
        line = f"{mark:<5} {self.check:<14} {self.text}"
        return line if self.remedy is None else f"{line}\n{'':<20} -> {self.remedy}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to examine."""

    data_directory: Path
    port: int = 0
    seeds: tuple[Multiaddr, ...] = ()
    run: RunId | None = None
    """Of the link, if there was one."""


class TargetError(PeerError):
    """Something to examine is neither a link, nor a run file, nor an address of a peer."""

    exit_code = 2

    def __init__(self, target: str, reason: str) -> None:
        super().__init__(target, reason)
        self.target = target
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.target!r} cannot be tried: {self.reason}"


def plan(targets: Sequence[str], *, port: int, data_directory: Path) -> Plan:
    """Read what is to be examined. Raises ``TargetError``, ``LinkError`` and the like."""
    from peer.link import find_run, parse_link

    if not 0 <= port < 65536:
        raise TargetError(f"--port {port}", "ports go from 1 to 65535; 0 means any")
    seeds: list[Multiaddr] = []
    run: RunId | None = None
    for target in targets:
        if target.strip().lower().startswith("shoal://"):
            link = parse_link(target)
            run, found = link.run_id, link.seeds
        elif target.lower().startswith("https://") or Path(target).is_file():
            there = find_run(target, ask_peers=_nobody)
            run, found = there.run.run_id, there.seeds
        else:
            found = (_seed(target),)
        seeds.extend(address for address in found if address not in seeds)
    return Plan(data_directory=data_directory, port=port, seeds=tuple(seeds), run=run)


def _seed(text: str) -> Multiaddr:
    try:
        address = addresses.parse(text)
    except AddressError as error:
        if text.startswith("/"):
            raise
        raise TargetError(
            text,
            "it is neither a link (shoal://...), nor the file of a run, nor the address of a "
            "peer (/ip4/203.0.113.7/tcp/7700/p2p/12D3Koo...)",
        ) from error
    if addresses.peer_of(address) is None:
        raise TargetError(
            text,
            "it does not say whose address it is: it has to end in /p2p/12D3Koo..., "
            "as `shoal bootstrap` prints it",
        )
    return address


def _nobody(link: object) -> bytes:
    raise AssertionError("files and https addresses need no peers")


async def examine(plan: Plan, *, on_finding: Callable[[Finding], None]) -> list[Finding]:
    """Make every check, and tell each finding as soon as it is there."""
    findings: list[Finding] = []
    async for finding in _all_checks(plan):
        findings.append(finding)
        on_finding(finding)
    return findings


async def _all_checks(plan: Plan) -> AsyncIterator[Finding]:
    yield check_disk(plan.data_directory)
    yield check_memory()
    yield await check_torch()
    listening = check_port(plan.port)
    yield listening
    identity = Identity.generate()  # a stranger: the real key may be in use on this machine
    port = plan.port if listening.state == "ok" else 0
    try:
        async with _host(identity, port) as (host, took_s):
            assert host.lane is not None
            yield Finding("libp2p daemon", "ok", f"started in {took_s:.1f} s", took_s=took_s)
            async for finding in examine_network(
                host,
                identity,
                plan,
                open_fresh=_fresh,
                open_hidden=_hidden,
                try_lane=host.lane.reach,
            ):
                yield finding
    except DhtError as error:
        yield Finding(
            "libp2p daemon",
            "failed",
            str(error),
            "try it again; if it stays so, reinstall with `pip install --force-reinstall hivemind`",
        )


@asynccontextmanager
async def _host(identity: Identity, port: int) -> AsyncIterator[tuple[HivemindHost, float]]:
    from dht.hivemind_daemon import DaemonSettings
    from dht.hivemind_host import HivemindHost, HostSettings
    from dht.lane import LaneSettings

    started = time.monotonic()
    daemon = DaemonSettings(listen=(Multiaddr(f"/ip4/0.0.0.0/tcp/{port}"),))
    # No place in the directory: it would be gone in a minute, with the records that it was given.
    settings = HostSettings(daemon=daemon, serve_directory=False, lane=LaneSettings())
    async with await HivemindHost.open(identity, settings) as host:
        yield host, time.monotonic() - started


@asynccontextmanager
async def _fresh() -> AsyncIterator[Host]:
    """A host that has met nobody yet, to dial from."""
    from dht.hivemind_daemon import DaemonSettings
    from dht.hivemind_host import HivemindHost, HostSettings

    settings = HostSettings(daemon=DaemonSettings(listen=()), serve_directory=False)
    async with await HivemindHost.open(Identity.generate(), settings) as host:
        yield host


@asynccontextmanager
async def _hidden(relays: Sequence[Multiaddr]) -> AsyncIterator[Host]:
    """A host that nobody can dial but through these relays."""
    from dht.hivemind_daemon import DaemonSettings
    from dht.hivemind_host import HivemindHost, HostSettings

    daemon = DaemonSettings(listen=(), relays=tuple(relays), reachability="private")
    settings = HostSettings(daemon=daemon, serve_directory=False)
    async with await HivemindHost.open(Identity.generate(), settings) as host:
        yield host


# This machine.


def check_disk(path: Path) -> Finding:
    """Room for checkpoints, and permission to write them."""
    place = path
    while not place.exists() and place != place.parent:
        place = place.parent
    if not os.access(place, os.W_OK | os.X_OK) or not place.is_dir():
        return Finding(
            "disk",
            "failed",
            f"{path} cannot be written by this user",
            f"`sudo chown {os.getuid()} {place}`, or choose another folder with --data-dir",
        )
    free = shutil.disk_usage(place).free
    text = f"{_size(free)} free in {path}"
    if free < DISK_FREE_MIN_BYTES:
        remedy = "free some space or choose another folder with --data-dir: checkpoints go there"
        return Finding("disk", "failed", text, remedy)
    if free < DISK_FREE_WISHED_BYTES:
        remedy = "enough for small models only: a checkpoint takes 12 bytes per parameter"
        return Finding("disk", "warning", text, remedy)
    return Finding("disk", "ok", text)


def check_memory(limit_path: Path = Path("/sys/fs/cgroup/memory.max")) -> Finding:
    """Memory that is free now, within the limit of a container."""
    memory = psutil.virtual_memory()
    available, total, where = memory.available, memory.total, ""
    try:
        limit = int(limit_path.read_text())
    except (OSError, ValueError):  # no such limit, or "max"
        limit = total
    if limit < total:
        total, where = limit, ", the limit of this container"
        used = _used_in_container(limit_path.with_name("memory.current"))
        available = min(available, max(0, limit - used))
    text = f"{_size(available)} available of {_size(total)}{where}"
    if available < MEMORY_MIN_BYTES:
        return Finding("memory", "failed", text, "close other programs, or give it more memory")
    if available < MEMORY_WISHED_BYTES:
        return Finding("memory", "warning", text, "enough for small models and bootstrap peers")
    return Finding("memory", "ok", text)


def _used_in_container(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0


async def check_torch(script: str = ASK_TORCH) -> Finding:
    """What torch would train on. In a process of its own: a broken driver may crash or hang it."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        END_WITH_PARENT + script,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(TORCH_TIMEOUT_S):
            output, complaint = await process.communicate()
    except TimeoutError:
        return Finding(
            "torch",
            "failed",
            f"no answer from the device in {TORCH_TIMEOUT_S:g} s",
            "the driver hangs: see `nvidia-smi`, and restart the machine",
        )
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        lines = complaint.decode(errors="replace").strip().splitlines()
        reason = lines[-1] if lines else f"it ended with {process.returncode}"
        remedy = "reinstall it for this machine, see https://pytorch.org/get-started/locally"
        return Finding("torch", "failed", f"torch cannot be used: {reason}", remedy)
    return _judge_torch(json.loads(output.decode().strip().splitlines()[-1]))


def _judge_torch(found: dict[str, object]) -> Finding:
    version = f"torch {found['version']}"
    if found["device"] == "cuda":
        memory = _size(int(str(found["memory"])))
        return Finding("torch", "ok", f"{version} on {found['name']} with {memory}")
    if found["device"] == "mps":
        return Finding("torch", "ok", f"{version} on Apple's GPU (mps)")
    text = f"{version} on the CPU, {found['threads']} threads"
    if shutil.which("nvidia-smi"):
        remedy = (
            "the GPU is not used: update its driver (`nvidia-smi` shows it)"
            if found["built_for_cuda"]
            else "the GPU is not used: this torch was built without CUDA, install one with it"
        )
        return Finding("torch", "warning", text, remedy)
    return Finding("torch", "ok", text)


def check_port(port: int) -> Finding:
    """Whether this user may listen at all, and at this port."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("0.0.0.0", port))
            probe.listen(1)
            got = probe.getsockname()[1]
    except OSError as error:
        remedy = (
            f"`ss -ltnp 'sport = :{port}'` names the program that has it; choose another --port"
            if port
            else "this user or container may open no port: allow it to listen"
        )
        reason = error.strerror or str(error)
        return Finding("listening port", "failed", f"TCP port {port}: {reason}", remedy)
    text = f"TCP port {port} is free" if port else f"TCP ports can be opened (got {got})"
    return Finding("listening port", "ok", text)


# The network.


OpenFresh = Callable[[], AbstractAsyncContextManager[Host]]
OpenHidden = Callable[[Sequence[Multiaddr]], AbstractAsyncContextManager[Host]]
TryLane = Callable[[PeerId], Awaitable[str | None]]
"""Open a direct connection with this peer; or say why there is none."""


async def examine_network(
    host: Host,
    identity: Identity,
    plan: Plan,
    *,
    open_fresh: OpenFresh,
    open_hidden: OpenHidden | None = None,
    try_lane: TryLane | None = None,
) -> AsyncIterator[Finding]:
    """Check everything that needs other peers, over this host, and take part in nothing.

    ``open_fresh`` opens a host that has met nobody. ``open_hidden`` opens one that only
    relays lead to, where there are relays. ``try_lane`` is that of ``host``, if it has one.
    """
    met: dict[PeerId, Multiaddr] = {}
    tried: set[PeerId] = set()
    for address in plan.seeds:
        peer = addresses.peer_of(address)
        assert peer is not None
        if peer in tried:
            # Who knows another address of this peer, or is connected to it, would use that.
            async with open_fresh() as fresh:
                finding = await check_seed(fresh, address)
        else:
            finding = await check_seed(host, address)
        tried.add(peer)
        if finding.state == "ok":
            met.setdefault(peer, address)
        yield finding
    if not met:
        reason = "no seed answered" if plan.seeds else "no link or address of a peer was given"
        remedy = None if plan.seeds else "`shoal doctor LINK` tries them too"
        for name in ("clock", "DHT", "reachability"):
            alone = _check_clock_alone(host) if name == "clock" else None
            yield alone or Finding(name, "skipped", reason, remedy)
        return
    for peer, address in met.items():
        with suppress(PeerUnreachable):  # it answered a moment ago; what follows tells
            await host.connect(peer, [address], timeout_s=SEED_TIMEOUT_S)
    yield await check_directory(host, identity)
    seeds = tuple(met.values())
    presence = Presence(host, identity, plan.run, seeds=seeds, observes=plan.run is not None)
    await presence.start()
    try:
        if plan.run is not None:
            yield await check_run(presence, plan.run)
            if try_lane is not None:
                yield await check_lane(presence, try_lane)
        yield await check_reachability(presence)
        if open_hidden is not None:
            yield await check_relay(host, seeds, open_hidden)
        yield check_clock(presence)
    finally:
        await presence.close()


async def check_seed(host: Host, address: Multiaddr) -> Finding:
    """Dial one seed at one address, from a host that has not dialled this peer before."""
    peer = addresses.peer_of(address)
    assert peer is not None
    loop = asyncio.get_running_loop()
    name = _name_in(address)
    if name is not None:
        try:
            async with asyncio.timeout(SEED_TIMEOUT_S):
                await loop.getaddrinfo(name, None)
        except (OSError, TimeoutError) as error:
            text = f"{address}: the name {name} leads nowhere ({str(error) or 'no answer'})"
            remedy = "check its spelling and this machine's DNS"
            return Finding("seed", "failed", text, remedy)
    started = loop.time()
    try:
        await host.connect(peer, [address], timeout_s=SEED_TIMEOUT_S)
    except PeerUnreachable as error:
        text = f"{address}: {error.reason}"
        return Finding("seed", "failed", text, _seed_remedy(error.reason))
    took_s = loop.time() - started
    text = f"{address} answered in {took_s * 1000:.0f} ms"
    return Finding("seed", "ok", text, took_s=took_s)


def _name_in(address: Multiaddr) -> str | None:
    """The DNS name in an address, if it has one."""
    _, kind, host, *_ = str(address).split("/")
    return host if kind.startswith("dns") else None


def _seed_remedy(reason: str) -> str:
    lower = reason.lower()
    if "peer id mismatch" in lower or "another peer" in lower:
        return "another peer lives there now: ask its host for the new address"
    if "refused" in lower:
        return "the machine is up, but nothing listens: its host has to start `shoal bootstrap`"
    if "negotiate" in lower:
        return "something else answers there, perhaps a proxy: compare host and port"
    return (
        "it may be down, or a firewall on the way drops the packets: try from another network, "
        "and see 'No peer answers' in BOOTSTRAP.md"
    )


async def check_directory(host: Host, identity: Identity) -> Finding:
    """Store a record with other peers, and read it back."""
    key = "doctor/peers/0"
    content = PeerRecord(protocol=(1, 1), role="learner", incarnation=1, name="doctor")
    sealed = seal(content, identity, key=key, sequence=int(host.wall_time()), ttl_s=30.0)
    loop = asyncio.get_running_loop()
    started = loop.time()
    stored = await host.directory.publish(key, sealed, ttl_s=30.0, timeout_s=DIRECTORY_TIMEOUT_S)
    found = await host.directory.look_up(key, timeout_s=DIRECTORY_TIMEOUT_S)
    took_s = loop.time() - started
    if not stored or found.get(identity.peer_id) != sealed:
        return Finding(
            "DHT",
            "failed",
            f"a record was stored on {stored} peers and could not be read back",
            "the seeds answer but keep no records: update shoal here and there",
        )
    text = f"stored on {stored} peers and read back in {took_s * 1000:.0f} ms"
    return Finding("DHT", "ok", text, took_s=took_s)


async def check_run(presence: Presence, run: RunId) -> Finding:
    """Whether the run of the link is alive: its file can be had, and who is there."""
    from peer.errors import RunFileError
    from peer.run_file import from_canonical

    def matches(content: bytes) -> bool:
        try:
            from_canonical(content, run)
        except RunFileError:
            return False
        return True

    try:
        content = await presence.fetch_run_file(matches, timeout_s=RUN_FILE_TIMEOUT_S)
    except DhtError as error:
        return Finding(
            "run",
            "failed",
            str(error),
            "nobody of this run is online, or the link is old: ask whoever gave it to you",
        )
    name = from_canonical(content, run).name
    live = await _count_live(presence)
    return Finding("run", "ok", f"{name!r}: got its run file; {live} peers are live")


async def check_lane(presence: Presence, try_lane: TryLane) -> Finding:
    """Whether what is large can go past the daemon, to one of the run's peers."""
    live = sorted(presence.table.live(asyncio.get_running_loop().time()), key=lambda m: m.peer)
    if not live:
        return Finding("direct lane", "skipped", "no peer of the run is live")
    reasons = []
    for member in live[:LANE_TRIES]:
        try:
            await presence.connect(member.peer, timeout_s=SEED_TIMEOUT_S)
            reason = await try_lane(member.peer)
        except DhtError as error:
            reason = str(error)
        if reason is None:
            return Finding("direct lane", "ok", f"open to {member.peer}")
        reasons.append(reason)
    return Finding(
        "direct lane",
        "warning",
        f"open to none of {len(reasons)} peers; the last one: {reasons[-1]}",
        "nothing to do here; what is large goes to them through the daemon, more slowly",
    )


async def _count_live(presence: Presence) -> int:
    """How many members there are, once no further one turns up."""
    loop = asyncio.get_running_loop()
    give_up_at = loop.time() + COUNT_TIMEOUT_S
    live, since = 0, loop.time()
    while loop.time() < give_up_at and (not live or loop.time() - since < COUNT_QUIET_S):
        await asyncio.sleep(0.05)
        found = len(presence.table.live(loop.time()))
        if found != live:
            live, since = found, loop.time()
    return live


async def check_reachability(presence: Presence) -> Finding:
    """Whether others can dial this machine: they were asked to."""
    loop = asyncio.get_running_loop()
    give_up_at = loop.time() + REACHABILITY_TIMEOUT_S
    while presence.reachable is None and loop.time() < give_up_at:
        if presence.observes:  # an observer is not dialled unless its owner asks for it
            await presence.check_reachability()
        await asyncio.sleep(0.1)
    known = ", ".join(str(address) for address in presence.addresses) or "no address"
    relayed = any(addresses.is_relayed(address) for address in presence.addresses)
    if presence.reachable:
        return Finding("reachability", "ok", f"others can dial this machine at {known}")
    if presence.reachable is None:
        text = f"nobody could say: {presence.reachability_reason}"
        return Finding("reachability", "warning", text, "try again when more peers are online")
    how = "reached over a relay and over its own connections" if relayed else "dial-out only"
    return Finding(
        "reachability",
        "warning",
        f"{how}: {presence.reachability_reason} (tried {known})",
        "this machine is a full member all the same; to lead rounds too, forward a TCP port to it "
        "and name the outer address with --announce",
    )


async def check_relay(host: Host, seeds: Sequence[Multiaddr], open_hidden: OpenHidden) -> Finding:
    """Whether the seeds relay: reach a host through them that has no other way in."""
    loop = asyncio.get_running_loop()
    remedy = (
        "only peers that cannot be dialled miss it; its host should run a recent `shoal bootstrap`"
    )
    async with open_hidden(seeds) as hidden:
        for seed in seeds:
            peer = addresses.peer_of(seed)
            assert peer is not None
            with suppress(PeerUnreachable):  # it answered a moment ago; the dial below tells
                await hidden.connect(peer, [seed], timeout_s=SEED_TIMEOUT_S)
        places = await _places_at_relays(hidden)
        if not places:
            text = f"no seed offered a place within {RELAY_TIMEOUT_S:g} s"
            return Finding("relay", "warning", text, remedy)
        give_up_at = loop.time() + RELAY_TIMEOUT_S
        while True:
            started = loop.time()
            try:
                await host.connect(hidden.peer_id, places, timeout_s=RELAY_TIMEOUT_S)
                break
            except PeerUnreachable as error:
                # A place is told as soon as it was asked for, a moment before the relay grants it.
                if loop.time() >= give_up_at:
                    text = f"nobody can be reached through the seeds: {error.reason}"
                    return Finding("relay", "warning", text, remedy)
            await asyncio.sleep(0.5)
        took_s = loop.time() - started
    text = f"a peer behind a router can be reached through the seeds, in {took_s * 1000:.0f} ms"
    return Finding("relay", "ok", text, took_s=took_s)


async def _places_at_relays(hidden: Host) -> tuple[Multiaddr, ...]:
    loop = asyncio.get_running_loop()
    give_up_at = loop.time() + RELAY_TIMEOUT_S
    while True:
        places = tuple(a for a in await hidden.addresses() if addresses.is_relayed(a))
        if places or loop.time() >= give_up_at:
            return places
        await asyncio.sleep(0.1)


def check_clock(presence: Presence) -> Finding:
    """How far this clock is from the others'."""
    estimate = presence.clock
    if estimate is None:
        return Finding("clock", "warning", "no peer told its time", "try it again")
    text = (
        f"{abs(estimate.offset_s):.2f} s {'behind' if estimate.offset_s > 0 else 'ahead of'} "
        f"the others' ({estimate.peers} asked, give or take {estimate.error_s:.2f} s)"
    )
    if abs(estimate.offset_s) > CLOCK_WISHED_S + estimate.error_s:
        remedy = "switch time synchronization on: `sudo timedatectl set-ntp true`"
        return Finding("clock", "warning", text, remedy)
    return Finding("clock", "ok", text)


def _check_clock_alone(host: Host) -> Finding | None:
    """Without anybody to compare with, only nonsense can be told."""
    now = host.wall_time()
    if now >= OLDEST_TIME:
        return None
    shown = time.strftime("%Y-%m-%d %H:%M", time.gmtime(now))
    remedy = "set it: `sudo timedatectl set-ntp true`"
    return Finding("clock", "failed", f"it shows {shown} UTC, which has long passed", remedy)


# What comes of it.


def exit_code(findings: Iterable[Finding]) -> int:
    """0: nothing failed; 3: the network is in the way; 2: this machine is."""
    failed = {finding.check for finding in findings if finding.state == "failed"}
    seeds = [finding.state for finding in findings if finding.check == "seed"]
    if "seed" in failed and "ok" in seeds:
        failed.discard("seed")  # one that answers is enough to take part
    if not failed:
        return 0
    return 3 if failed <= {"seed", "DHT", "run", "reachability"} else 2


def as_json(findings: Sequence[Finding]) -> dict[str, object]:
    """For scripts: stable names, one entry per finding."""
    return {
        "ok": exit_code(findings) == 0,
        "findings": [asdict(finding) for finding in findings],
    }


def _size(size_bytes: float) -> str:
    return f"{size_bytes / 2**30:.1f} GiB"
