"""Pages of runs at a bootstrap peer: what keepers publish, else what records say."""

from __future__ import annotations

import asyncio

import msgspec

from dht.addresses import with_peer
from dht.host import Host
from dht.identity import PeerId, RunId
from dht.membership.table import bucket_key
from dht.memory.host import MemoryNetwork, identity_of
from dht.memory.virtual_loop import run
from dht.presence.presence import Presence
from dht.presence.this_peer import Profile
from dht.records import PeerRecord, seal
from peer.extras.hosting.run_pages import (
    NO_FILE,
    NO_KEEPER,
    NOBODY,
    OWN_WORDS,
    RUNS_MAX,
    RunPages,
)
from peer.extras.site.run_page import CALL, RunPage
from peer.run_file.sections import RunFile
from tests.dht.presence.presence_swarm import until
from tests.peer.extras.site.example_pages import a_page

RUN = RunFile(name="ours", description="A run of tests.", licence="mit")


def test_a_page_is_what_a_keeper_publishes_and_otherwise_what_records_say() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        host = network.host("host")
        presence = Presence(host, identity_of("host"), Profile(None, role="bootstrap"))
        await presence.start()
        own = [with_peer(at, host.peer_id) for at in await host.addresses()]
        pages = RunPages(host, presence, own)
        await pages.look()
        assert pages.pages() == {}

        keeper = network.host("keeper")
        profile = Profile(RUN.run_id, role="keeper", name="kim", run_file=RUN.canonical())
        member = Presence(keeper, identity_of("keeper"), profile, seeds=own)
        await member.start()

        def page() -> RunPage | None:
            return pages.pages().get(RUN.run_id)

        async def look() -> RunPage:
            await pages.look()
            found = page()
            assert found is not None
            return found

        def is_met() -> bool:
            return any(member.run == RUN.run_id for member in presence.table)

        await until(is_met, within_s=60.0, what="the keeper is met")
        found = await look()
        assert (found.name, found.licence, found.keepers) == ("ours", "mit", 1)
        assert found.unknown == (NO_KEEPER, OWN_WORDS)
        assert str(own[0]) in found.link and found.contributors == ()

        asked: list[bytes] = []

        async def answer(peer: PeerId, request: bytes) -> bytes:
            asked.append(request)
            page = a_page(run=RUN.run_id, link="shoal://a keeper's own", homepage="https://evil")
            return CALL.encode(page)

        await keeper.serve_calls(CALL.protocol, answer, request_max_bytes=CALL.request_max_bytes)
        found = await look()
        assert asked == [CALL.request(RUN.run_id, "")]
        assert found.unknown == () and len(found.contributors) == 4
        assert str(own[0]) in found.link, "others join by this host"
        assert (found.name, found.homepage) == ("ours", ""), "the run file says it"
        assert found.model == a_page().model, "with the size, which the file does not have"
        assert found.latest is not None and found.latest.path == "", "no file is served here"

        await member.leave()
        await member.close()

        def is_gone() -> bool:
            return not presence.table.live(asyncio.get_running_loop().time())

        await until(is_gone, within_s=120.0, what="the keeper has left")
        found = await look()
        assert found.unknown == (NOBODY,) and found.link == "" and found.keepers == 0
        assert len(found.contributors) == 4, "what was known last"
        await presence.close()
        await host.close()
        await keeper.close()

    run(main())


def test_a_keeper_that_came_last_or_overstates_the_tokens_makes_no_page() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        host = network.host("host")
        presence = Presence(host, identity_of("host"), Profile(None, role="bootstrap"))
        await presence.start()
        own = [with_peer(at, host.peer_id) for at in await host.addresses()]
        pages = RunPages(host, presence, own)

        opened: list[Presence | Host] = []

        async def keep(name: str, tokens: int) -> None:
            keeper = network.host(name)

            async def answer(peer: PeerId, request: bytes) -> bytes:
                return CALL.encode(a_page(run=RUN.run_id, tokens=tokens))

            await keeper.serve_calls(
                CALL.protocol, answer, request_max_bytes=CALL.request_max_bytes
            )
            profile = Profile(RUN.run_id, role="keeper", run_file=RUN.canonical())
            member = Presence(keeper, identity_of(name), profile, seeds=own)
            await member.start()
            opened.extend((member, keeper))
            await asyncio.sleep(20.0)
            await pages.look()

        for number, tokens in enumerate((1000, 2**61, 1010, *[2**60] * 6)):
            await keep(f"keeper{number}", tokens)
        [found] = pages.pages().values()
        assert found.tokens == 1010
        for each in (*opened, presence, host):
            await each.close()

    run(main())


def test_runs_that_somebody_founds_by_the_hundred_leave_the_pages_of_older_ones() -> None:
    """Keys are cheap, and fifty runs of three keys each were larger than a run of two peers."""

    async def main() -> None:
        host = MemoryNetwork().host("host")
        presence = Presence(host, identity_of("host"), Profile(None, role="bootstrap"))
        await presence.start()
        pages = RunPages(host, presence, ())
        loop = asyncio.get_running_loop()

        def here(run_id: RunId, *names: str, ttl_s: float = 600.0) -> None:
            for name in names:
                record = PeerRecord(protocol=(1, 1), role="learner", incarnation=1, trains=True)
                key = bucket_key(run_id, "")
                sealed = seal(record, identity_of(name), key=key, sequence=1, ttl_s=ttl_s)
                assert presence.table.take(sealed, now=loop.time())

        here(RUN.run_id, "anna", "boris", ttl_s=60.0)
        await pages.look()
        assert set(pages.pages()) == {RUN.run_id}
        for number in range(2 * RUNS_MAX):
            here(RunId(f"{number:064x}"), *(f"key {number} {each}" for each in range(3)))
        for _ in range(3):
            await pages.look()
            assert pages.pages()[RUN.run_id].learners == 2
            assert len(pages.pages()) == RUNS_MAX

        await asyncio.sleep(70.0)
        assert not presence.table.is_live(identity_of("anna").peer_id, loop.time())
        for _ in range(3):
            await pages.look()
            assert pages.pages()[RUN.run_id].unknown == (NOBODY,), "what was known last"
        await presence.close()
        await host.close()

    run(main())


def test_a_keeper_that_answers_nonsense_is_no_keeper_that_publishes() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        host, keeper = network.host("host"), network.host("keeper")
        presence = Presence(host, identity_of("host"), Profile(None, role="bootstrap"))
        await presence.start()
        own = [with_peer(at, host.peer_id) for at in await host.addresses()]
        other = Profile(RunId("ab" * 32), role="keeper", run_file=b"{}")
        member = Presence(keeper, identity_of("keeper"), other, seeds=own)
        await member.start()

        async def answer(peer: PeerId, request: bytes) -> bytes:
            return msgspec.msgpack.encode({"run": "ab" * 32, "at": 0.0, "name": "x" * 10_000})

        await keeper.serve_calls(CALL.protocol, answer, request_max_bytes=CALL.request_max_bytes)
        await until(lambda: len(presence.table) > 0, within_s=60.0, what="the keeper is met")
        pages = RunPages(host, presence, own)
        await pages.look()
        [found] = pages.pages().values()
        assert found.unknown == (NO_KEEPER, OWN_WORDS, NO_FILE)
        for each in (member, presence):
            await each.close()
        await host.close()
        await keeper.close()

    run(main())
