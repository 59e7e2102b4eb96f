"""Presence on real hosts: libp2p daemons on the loopback interface."""

import asyncio
from collections.abc import Callable

import pytest
from multiaddr import Multiaddr

from dht.addresses import parse
from dht.identity import Identity, RunId
from dht.presence.presence import Presence
from dht.presence.this_peer import Events, PresenceEvent, Profile

RUN = RunId("5f" * 32)
RUN_FILE = b"name = 'ours'"

pytestmark = pytest.mark.slow


async def until(condition: Callable[[], bool], *, within_s: float, what: str) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within_s
    while not condition():
        assert loop.time() < deadline, f"not within {within_s:g} s: {what}"
        await asyncio.sleep(0.1)


def sees(presence: Presence) -> int:
    return len(presence.table.present(asyncio.get_running_loop().time()))


def test_real_peers_meet_are_dialled_back_lose_their_seed_and_find_it_again() -> None:
    from dht.libp2p.hivemind_host import HivemindHost, HostSettings

    events: list[tuple[str, PresenceEvent]] = []
    open_hosts: list[HivemindHost] = []
    open_presences: list[Presence] = []

    async def start(
        name: str, run: RunId | None, seeds: list[Multiaddr], listen: str = "/ip4/127.0.0.1/tcp/0"
    ) -> tuple[HivemindHost, Presence]:
        identity = Identity.from_seed(name.encode().ljust(32, b"\0"))
        settings = HostSettings(listen=(parse(listen),))
        host = await HivemindHost.open(identity, settings)
        open_hosts.append(host)
        presence = Presence(
            host,
            identity,
            Profile(
                run,
                role="learner" if run else "bootstrap",
                name=name,
                run_file=RUN_FILE if name == "anna" else None,
            ),
            seeds=seeds,
            events=Events(lambda event: events.append((name, event))),
        )
        await presence.start()
        open_presences.append(presence)
        return host, presence

    async def main() -> None:
        seed_host, seed = await start("seed", None, [])
        seeds = list(await seed_host.addresses())
        members = [(await start(name, RUN, seeds))[1] for name in ("anna", "boris", "clara")]
        await until(lambda: all(sees(m) == 2 for m in members), within_s=20, what="they meet")
        await until(
            lambda: all(m.reachable is True for m in members), within_s=60, what="dialled back"
        )
        fetched = await members[2].fetch_run_file(lambda c: c == RUN_FILE, timeout_s=20)
        assert fetched == RUN_FILE
        assert all(m.clock is not None and abs(m.clock.offset_s) < 1 for m in members)

        await seed.close()
        await seed_host.close()
        await asyncio.sleep(5)
        assert all(sees(m) == 2 for m in members), "they need no seed"
        port = str(seeds[0]).split("/")[4]
        _, seed = await start("seed", None, [], f"/ip4/127.0.0.1/tcp/{port}")
        await until(
            lambda: all(m.connected & {seed_host.peer_id} for m in members),
            within_s=30,
            what="all find the seed that came back",
        )
        await members[0].leave()
        await until(lambda: sees(members[1]) == 1, within_s=5, what="the goodbye is heard")
        assert ("clara", "peer_left") in [(name, event.name) for name, event in events]
        assert not [event.text for _, event in events if event.name == "peer_lost"]

    async def main_then_close() -> None:
        try:
            await main()
        finally:
            for presence in open_presences:
                await presence.close()
            for host in open_hosts:
                await host.close()

    asyncio.run(main_then_close())
