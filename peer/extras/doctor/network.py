"""Checks of the network, which need other peers.

They run in an order in which one failure explains those that follow.
"""

from __future__ import annotations

import asyncio
import pathlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass

from multiaddr import Multiaddr

from dht import addresses
from dht.errors import AddressError, DhtError, PeerUnreachable
from dht.host import Host
from dht.identity import Identity, PeerId, RunId
from dht.libp2p.lane.connection import Path
from dht.libp2p.lane.observers import RouterView
from dht.libp2p.lane.punching import is_near
from dht.libp2p.lane.relaying import MEMBERS_ONLY
from dht.membership.reachability import in_words
from dht.membership.table import Member
from dht.presence.presence import Presence
from dht.presence.this_peer import Profile
from dht.records import PeerRecord, seal
from peer.errors import Unusable
from peer.extras.doctor.this_machine import Finding
from peer.quantities import peers_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Folder, port, seeds and run to examine."""

    data_directory: pathlib.Path
    port: int = 0
    seeds: tuple[Multiaddr, ...] = ()
    run: RunId | None = None
    """Id of the run, if a link or run file was given."""


def plan_of(targets: Sequence[str], *, port: int, data_directory: pathlib.Path) -> Plan:
    """The plan for some targets. Raises ``Unusable`` and what ``find_run`` raises."""
    from peer.joining.link import parse_link, run_at

    if not 0 <= port < 65536:
        text = f"'--port {port}' cannot be examined: ports go from 1 to 65535; 0 means any"
        raise Unusable(text, section="target-error")
    seeds: list[Multiaddr] = []
    run: RunId | None = None
    for target in targets:
        if target.strip().lower().startswith("shoal://"):
            link = parse_link(target)
            run, found = link.run_id, link.seeds
        elif target.lower().startswith("https://") or pathlib.Path(target).is_file():
            there = run_at(target)
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
        raise Unusable(
            f"{text!r} cannot be examined: it is neither a link (shoal://...), nor a run file, "
            "nor the address of a peer (/ip4/203.0.113.7/tcp/7700/p2p/12D3Koo...)",
            section="target-error",
        ) from error
    if addresses.peer_of(address) is None:
        raise Unusable(
            f"{text!r} cannot be examined: the peer id is missing: it has to end in "
            "/p2p/12D3Koo..., as `shoal bootstrap` prints it",
            section="target-error",
        )
    return address


CLOCK_WISHED_S = 2.0
SEED_TIMEOUT_S = 10.0
REACHABILITY_TIMEOUT_S = 25.0
RUN_FILE_TIMEOUT_S = 15.0
DIRECTORY_TIMEOUT_S = 10.0
COUNT_TIMEOUT_S = 10.0
LANE_TRIES = 3
COUNT_QUIET_S = 1.0
OLDEST_TIME = 1_735_689_600.0
"""2025-01-01. This program is newer, so that a clock that shows less is wrong."""

OpenFresh = Callable[[], AbstractAsyncContextManager[Host]]
TryLane = Callable[[PeerId], Awaitable[Path | str]]
"""Opens a connection for bulk data to a peer; returns its path, or the reason if it fails."""

ExamineRouter = Callable[[], Awaitable[RouterView]]


async def examine_network(
    host: Host,
    identity: Identity,
    plan: Plan,
    *,
    open_fresh: OpenFresh,
    try_lane: TryLane | None = None,
    examine_router: ExamineRouter | None = None,
) -> AsyncIterator[Finding]:
    """Run every check that needs other peers, over ``host``. It joins no run.

    ``open_fresh`` opens a host that knows no peer. Checks whose function is ``None`` are left out.
    """
    met: dict[PeerId, Multiaddr] = {}
    tried: set[PeerId] = set()
    for address in plan.seeds:
        peer = addresses.peer_of(address)
        assert peer is not None
        if peer in tried:
            # ``host`` would reuse its connection, or another address of this peer.
            async with open_fresh() as fresh:
                finding = await check_seed(fresh, address)
        else:
            finding = await check_seed(host, address)
        tried.add(peer)
        if finding.state == "ok":
            met.setdefault(peer, address)
        yield finding
    if not met:
        reason, remedy = _why_nobody(plan)
        for name in ("clock", "DHT", "reachability"):
            alone = _check_clock_alone(host) if name == "clock" else None
            yield alone or Finding(name, "skipped", reason, remedy)
        return
    for peer, address in met.items():
        with suppress(PeerUnreachable):  # it answered a moment ago; a later check reports it
            await host.connect(peer, [address], timeout_s=SEED_TIMEOUT_S)
    yield await check_directory(host, identity)
    seeds = tuple(met.values())
    profile = Profile(plan.run, observes=plan.run is not None)
    presence = Presence(host, identity, profile, seeds=seeds)
    await presence.start()
    try:
        if plan.run is not None:
            yield await check_run(presence, plan.run)
            if try_lane is not None:
                elsewhere = await members_elsewhere(host, presence)
                yield await check_lane(presence, elsewhere, try_lane)
                yield await check_meetings(presence, elsewhere, try_lane)
            if examine_router is not None:
                yield await check_router(examine_router)
        yield await check_reachability(presence)
        yield check_clock(presence)
    finally:
        await presence.close()


def _why_nobody(plan: Plan) -> tuple[str, str | None]:
    """Why no other peer can be asked, and what to do about it."""
    if plan.seeds:
        return "no seed answered", None
    if plan.run is not None:
        return (
            "the run was given without an address of a peer (seeds)",
            "give the link that a peer of the run shows: `shoal doctor LINK`",
        )
    return (
        "no link or address of a peer was given",
        "give a link to check this too: `shoal doctor LINK`",
    )


async def check_seed(host: Host, address: Multiaddr) -> Finding:
    """Check that a seed answers at an address. ``host`` has not dialled this peer before."""
    peer = addresses.peer_of(address)
    assert peer is not None
    loop = asyncio.get_running_loop()
    started = loop.time()
    try:
        await host.connect(peer, [address], timeout_s=SEED_TIMEOUT_S)
    except PeerUnreachable as error:
        text = f"{address}: {error.reason}"
        return Finding("seed", "failed", text, _seed_remedy(error.reason))
    took_s = loop.time() - started
    text = f"{address} answered in {took_s * 1000:.0f} ms"
    return Finding("seed", "ok", text, took_s=took_s)


def _seed_remedy(reason: str) -> str:
    lower = reason.lower()
    if "cannot be resolved" in lower:
        return "check the spelling of the name and this machine's DNS"
    if "peer id mismatch" in lower or "another peer" in lower:
        return "another peer has this address now: ask the operator of the seed for the new one"
    if "refused" in lower:
        return (
            "the machine is up, but nothing listens: a learner or keeper may have left, which does "
            "no harm while another address answers; the operator of a bootstrap peer must start "
            "`shoal bootstrap`"
        )
    if "negotiate" in lower:
        return "another program answers there, perhaps a proxy: check host and port"
    return (
        "it is down, or a firewall drops the packets: try from another network, "
        "and see 'shoal docs no-peer-answers'"
    )


async def check_directory(host: Host, identity: Identity) -> Finding:
    """Check that a record can be stored in the DHT and read back."""
    key = "doctor/peers/0"
    content = PeerRecord(protocol=(1, 1), role="learner", incarnation=1, name="doctor")
    sealed = seal(content, identity, key=key, sequence=int(host.wall_time()), ttl_s=30.0)
    loop = asyncio.get_running_loop()
    started = loop.time()
    stored = await host.directory.publish(key, sealed, timeout_s=DIRECTORY_TIMEOUT_S)
    record = await host.directory.look_up(key, timeout_s=DIRECTORY_TIMEOUT_S)
    took_s = loop.time() - started
    if not stored or record.get(identity.peer_id) != sealed:
        return Finding(
            "DHT",
            "failed",
            f"a record was stored on {peers_text(stored)} and could not be read back",
            "the seeds answer but store no records: update shoal on this machine and on theirs",
        )
    text = f"stored on {peers_text(stored)} and read back in {took_s * 1000:.0f} ms"
    return Finding("DHT", "ok", text, took_s=took_s)


async def check_run(presence: Presence, run: RunId) -> Finding:
    """Check that the run file can be fetched from a peer, and count the live peers."""
    from peer.errors import RunFileError
    from peer.run_file.reading import from_canonical

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
            "no peer of this run is online, or the link is outdated: ask for a new one",
        )
    name = from_canonical(content, run).name
    live = await _count_live(presence)
    return Finding("run", "ok", f"{name!r}: run file fetched; live: {peers_text(live)}")


async def members_elsewhere(host: Host, presence: Presence) -> list[Member]:
    """The live members on other machines, by peer id.

    A connection to one on this machine proves nothing about the network. Many homes have the same
    private addresses, so a member that has one of this machine's is here if a connection shows it.
    """
    own = presence.addresses

    def is_here(address: Multiaddr) -> bool:
        return addresses.scope_seen(address, own) is addresses.Scope.MACHINE

    async def connect(member: Member) -> None:
        with suppress(DhtError):  # then it is elsewhere
            await presence.connect(member.peer, timeout_s=SEED_TIMEOUT_S)

    live = sorted(presence.table.live(asyncio.get_running_loop().time()), key=lambda m: m.peer)
    await asyncio.gather(
        *(
            connect(member)
            for member in live
            if any(is_here(at) for at in member.addresses if not addresses.is_loopback(at))
        )
    )
    here = {c.peer for c in await host.connections() if not c.relayed and is_here(c.address)}
    return [member for member in live if member.peer not in here]


async def check_lane(presence: Presence, live: Sequence[Member], try_lane: TryLane) -> Finding:
    """Check that a direct connection for bulk transfers opens to one of the run's peers."""
    if not live:
        return Finding("direct lane", "skipped", "no peer of the run is live on another machine")
    reasons = []
    for member in live[:LANE_TRIES]:
        path = await _try(presence, member, try_lane, reachable=member.reachable)
        if isinstance(path, Path):
            return Finding("direct lane", "ok", f"opened to {member.peer} ({path.name.lower()})")
        reasons.append(path)
    return Finding(
        "direct lane",
        "warning",
        f"did not open to any of {len(reasons)} peers; the last one: {reasons[-1]}",
        "nothing to do: bulk transfers to them go through the libp2p daemon, which is slower",
    )


async def check_meetings(presence: Presence, live: Sequence[Member], try_lane: TryLane) -> Finding:
    """Check that direct connections open to peers of the run that can only dial out."""
    hidden = [member for member in live if member.reachable is False][:LANE_TRIES]
    if not hidden:
        text = "no live peer of the run on another machine is behind a router"
        return Finding("meeting", "skipped", text)
    return describe_meetings(
        [
            (
                member.record.name or str(member.peer),
                await _try(presence, member, try_lane, reachable=None),
            )
            for member in hidden
        ]
    )


def describe_meetings(paths: Sequence[tuple[str, Path | str]]) -> Finding:
    """Say to how many peers a direct connection opened.

    ``paths``: names, each with the path or the reason why there is none. A relay serves members of
    the run, so it refuses a machine that only examines it.
    """
    opened = relayed = later = 0
    failed: dict[str, list[str]] = {}
    for name, path in paths:
        if path is Path.RELAYED:
            relayed += 1
        elif isinstance(path, Path):
            opened += 1
        elif MEMBERS_ONLY in path:
            later += 1
        else:
            failed.setdefault(path, []).append(name)
    text = f"direct connections open to {opened} of {len(paths)} peers behind routers"
    if relayed:
        text += f", and to {relayed} through a relay, which is slower"
    if later:
        text += f", and {later} can be met through a relay, which is slower, by a member of the run"
    if not failed:
        return Finding("meeting", "ok", text)
    return Finding(
        "meeting",
        "warning",
        "; ".join([text, *(f"not to {', '.join(names)}: {why}" for why, names in failed.items())]),
        "nothing to do while somebody in the run can be dialled; otherwise forward a TCP port, run "
        "`shoal keep` on a machine that others can dial, or ask the host of the bootstrap peer for "
        "`--relay-bulk`",
    )


async def _try(
    presence: Presence, member: Member, try_lane: TryLane, *, reachable: bool | None
) -> Path | str:
    """The path of a connection to a member, or the reason why there is none.

    ``reachable``: whether it should answer at its address, for the words of the reason.
    """
    try:
        await presence.connect(member.peer, timeout_s=SEED_TIMEOUT_S)
        return await try_lane(member.peer)
    except PeerUnreachable as error:
        return in_words(reachable, error.reason)
    except DhtError as error:
        return str(error)


async def check_router(examine_router: ExamineRouter) -> Finding:
    """Find out what the router in front of this machine does with ports."""
    try:
        view = await examine_router()
    except DhtError as error:
        return Finding("router", "skipped", str(error))
    # Not the announced ones: those of the router are among them, once the daemon has learnt them.
    return describe_router(view, [ip for ip, _ in view.seen if is_near(ip)])


def describe_router(view: RouterView, own_ips: Sequence[str]) -> Finding:
    """The kind of router, from what peers outside see of it."""
    if not view.seen:
        text = "no connected peer outside has a direct lane, which shows what the router does"
        remedy = (
            "members that can be dialled have one, and bootstrap peers that run with `--relay-bulk`"
        )
        return Finding("router", "skipped", text, remedy)
    (ip, port), asked = view.seen[0], f"{len(view.seen)} peers asked"
    if len(view.seen) == 1:
        asked = "one peer asked"
    if ip in own_ips:
        return Finding("router", "ok", f"none: {ip} is this machine's own ({asked})")
    if len(set(view.seen)) > 1 or (len(view.seen) == 1 and port != view.port):
        text = f"symmetric: it gives every connection another port ({asked})"
        if len(view.seen) == 1:
            text = f"it changed port {view.port} to {port}, and may be symmetric ({asked})"
        unless = " unless the peers there have IPv6, as this machine does" * view.has_ipv6
        return Finding(
            "router",
            "warning",
            text,
            "direct connections with other symmetric or port-restricted routers do not open"
            f"{unless}: somebody in the run must be dialled or relay bulk data, or forward a TCP "
            "port to this machine",
        )
    kept = "keeps" if port == view.port else "changes"
    text = f"it {kept} the number of a port, and uses one port for all connections from it"
    return Finding("router", "ok", f"cone: {text} ({asked})")


async def _count_live(presence: Presence) -> int:
    """Number of live members, once it has not changed for ``COUNT_QUIET_S``."""
    loop = asyncio.get_running_loop()
    give_up_at = loop.time() + COUNT_TIMEOUT_S
    live, since = 0, loop.time()
    while loop.time() < give_up_at and (not live or loop.time() - since < COUNT_QUIET_S):
        await asyncio.sleep(0.05)
        count = len(presence.table.live(loop.time()))
        if count != live:
            live, since = count, loop.time()
    return live


async def check_reachability(presence: Presence) -> Finding:
    """Ask other peers to dial this machine, and report the result."""
    loop = asyncio.get_running_loop()
    give_up_at = loop.time() + REACHABILITY_TIMEOUT_S
    while presence.reachable is None and loop.time() < give_up_at:
        if presence.profile.observes:  # an observer is not dialled unless its owner asks for it
            await presence.check_reachability()
        await asyncio.sleep(0.1)
    known = ", ".join(str(address) for address in presence.addresses) or "no address"
    relayed = any(addresses.is_relayed(address) for address in presence.addresses)
    if presence.reachable:
        text = f"others can dial this machine at {known}: {presence.reachability_reason}"
        return Finding("reachability", "ok", text)
    if presence.reachable is None:
        text = f"unknown: {presence.reachability_reason}"
        return Finding("reachability", "warning", text, "try again when more peers are online")
    how = "reachable through a relay" if relayed else "dial-out only"
    return Finding(
        "reachability",
        "warning",
        f"{how}: {presence.reachability_reason} (tried {known})",
        "this machine can take full part all the same; to lead rounds even where no direct "
        "connections through routers open, forward a TCP port to it and give the outer address "
        "with --announce",
    )


def check_clock(presence: Presence) -> Finding:
    """Compare the clock of this machine with those of other peers."""
    estimate = presence.clock
    if estimate is None:
        return Finding("clock", "warning", "no peer answered with its time", "try again")
    text = (
        f"{abs(estimate.offset_s):.2f} s {'behind' if estimate.offset_s > 0 else 'ahead of'} "
        f"the clocks of others ({estimate.peers} asked, +-{estimate.error_s:.2f} s)"
    )
    if abs(estimate.offset_s) > CLOCK_WISHED_S + estimate.error_s:
        remedy = "turn time synchronization on: `sudo timedatectl set-ntp true`"
        return Finding("clock", "warning", text, remedy)
    return Finding("clock", "ok", text)


def _check_clock_alone(host: Host) -> Finding | None:
    """A finding if the clock shows a time before this program existed."""
    now = host.wall_time()
    if now >= OLDEST_TIME:
        return None
    shown = time.strftime("%Y-%m-%d %H:%M", time.gmtime(now))
    remedy = "set it: `sudo timedatectl set-ntp true`"
    return Finding("clock", "failed", f"shows {shown} UTC, which is in the past", remedy)
