"""All checks of the doctor, in order, with the hosts that they need."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from multiaddr import Multiaddr

from dht.errors import DhtError
from dht.identity import Identity, PeerId
from peer.extras.doctor.network import Plan, examine_network
from peer.extras.doctor.this_machine import (
    Finding,
    check_codecs,
    check_container,
    check_disk,
    check_memory,
    check_port,
    check_torch,
)
from peer.rules.rented import container_of
from peer.storage.address import is_free

if TYPE_CHECKING:
    from dht.libp2p.hivemind_host import HivemindHost
    from dht.libp2p.lane.connection import Path
    from dht.libp2p.lane.lane import Lane


async def examine(plan: Plan, *, on_finding: Callable[[Finding], None]) -> list[Finding]:
    """Run every check. ``on_finding`` is called as soon as a check is done."""
    findings: list[Finding] = []
    async for finding in _all_checks(plan):
        findings.append(finding)
        on_finding(finding)
    return findings


async def _all_checks(plan: Plan) -> AsyncIterator[Finding]:
    yield check_disk(plan.data_directory)
    yield check_memory()
    yield await check_torch()
    yield await check_codecs()
    container, port = container_of(os.environ), plan.port
    if container is not None:
        yield check_container(container)
        port = port or next(filter(is_free, container.usable), 0)
    listening = check_port(port)
    yield listening
    identity = Identity.generate()  # the real key may be in use on this machine
    port = port if listening.state == "ok" else 0
    announce = container.announced([port]) if container is not None else ()
    try:
        async with _open_host(identity, port, announce) as (host, took_s):
            assert host.lane is not None and host.meetings is not None
            yield Finding("libp2p daemon", "ok", f"started in {took_s:.1f} s", took_s=took_s)
            async for finding in examine_network(
                host,
                identity,
                plan,
                open_fresh=host.stranger,
                try_lane=partial(_try_lane, host.lane),
                examine_router=host.meetings.observers.examine_router,
            ):
                yield finding
    except DhtError as error:
        yield Finding(
            "libp2p daemon",
            "failed",
            str(error),
            "try again; if it fails again: `pip install --force-reinstall hivemind`",
        )


async def _try_lane(lane: Lane, peer: PeerId) -> Path | str:
    reason = await lane.reach(peer)
    return lane.paths()[peer] if reason is None else reason


@asynccontextmanager
async def _open_host(
    identity: Identity, port: int, announce: Sequence[str]
) -> AsyncIterator[tuple[HivemindHost, float]]:
    from dht.libp2p.hivemind_host import HivemindHost, HostSettings
    from dht.libp2p.lane.connection import LaneSettings

    started = time.monotonic()
    settings = HostSettings(
        listen=(Multiaddr(f"/ip4/0.0.0.0/tcp/{port}"),),
        announce=tuple(map(Multiaddr, announce)),
        # Not part of the directory: records stored here would be lost within a minute.
        serve_directory=False,
        lane=LaneSettings(),
    )
    async with await HivemindHost.open(identity, settings) as host:
        yield host, time.monotonic() - started
