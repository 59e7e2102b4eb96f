"""The door of a run that admits invited peers, and bans, on a virtual clock."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dht.errors import CallRefused, PeerUnreachable
from dht.host import Stream
from dht.identity import PeerId, public_key_of
from dht.membership import hello as wire
from dht.membership.admission import NO_INVITE
from dht.membership.credentials import InviteKey
from dht.memory.host import EPOCH, MemoryHost, identity_of
from dht.memory.network import CALM, Weather
from dht.presence.door import ASKS_FIRST_S, exchange_papers
from dht.presence.this_peer import PresenceSettings
from dht.wrapped_host import REFUSED, GuardedHost
from tests.dht.membership.signers import (
    DAY,
    DELEGATES,
    NOW,
    RUN,
    admission,
    banning,
    credential,
    invitation,
)
from tests.dht.memory.weather import STORM
from tests.dht.presence.presence_swarm import Peer, Swarm, simulate, until
from tests.seeds import seeds

assert NOW == EPOCH, "invites and the hosts' clocks begin at one moment"

STRAY = "/test/of-the-run/1"
WITHIN_S = 60.0
"""Time within which a ban holds at every peer."""


async def member(
    swarm: Swarm, name: str, *, by: InviteKey | None = None, kept: Path | None = None, **rest: Any
) -> Peer:
    """Start a peer with an invite; it serves one call and one stream to members only."""
    seeds = await swarm.seed_addresses(*list(swarm.peers)[:1])
    started = await swarm.start(
        name,
        seeds=seeds,
        run=RUN,
        admission=admission(),
        credential=credential(identity_of(name).peer_id, by),
        settings=replace(PresenceSettings(), directives_path=kept),
        **rest,
    )
    started.host.directory.keeper.judge = started.presence.door.judge
    guarded = GuardedHost(started.host, started.presence.door.refusal)

    async def answer(peer: PeerId, request: bytes) -> bytes:
        return b"hello"

    async def serve(stream: Stream) -> None:
        await stream.send(b"hello", timeout_s=1.0)
        await stream.receive(timeout_s=600.0)

    await guarded.serve_calls(STRAY, answer, request_max_bytes=10)
    await guarded.serve_streams(f"{STRAY}/stream", serve)
    return started


async def reply(asker: MemoryHost, peer: Peer) -> str:
    """The answer to a call that is for members only, or the reason of a refusal."""
    try:
        return (await ask(asker, peer, STRAY, b"")).decode()
    except CallRefused as error:
        return error.reason


async def ask(asker: MemoryHost, peer: Peer, protocol: str, request: bytes) -> bytes:
    """The answer to a call, however often calls are lost in a storm."""
    while True:
        with contextlib.suppress(PeerUnreachable):
            await asker.connect(peer.id, await peer.host.addresses(), timeout_s=5.0)
            return await asker.call(peer.id, protocol, request, timeout_s=20.0)


async def first_frame(asker: MemoryHost, peer: Peer) -> bytes | None:
    await asker.connect(peer.id, await peer.host.addresses(), timeout_s=5.0)
    stream = await asker.open_stream(peer.id, f"{STRAY}/stream", timeout_s=5.0)
    try:
        return await stream.receive(timeout_s=20.0)
    finally:
        stream.abort()


async def test_a_stranger_that_speaks_another_protocol_is_no_word_about_the_run(
    swarm: Swarm,
) -> None:
    """A founder took it for a member of its run, and refused to found it."""
    anna = await member(swarm, "anna")
    settings = PresenceSettings(protocol_versions=(1000, 1000))
    await swarm.start(
        "mallory", run=RUN, seeds=await swarm.seed_addresses("anna"), settings=settings
    )
    await asyncio.sleep(60.0)
    assert not anna.presence.misfits and not anna.told("hello_refused")
    assert anna.presence.table.rejected["unadmitted"] > 0


async def test_invited_peers_meet_and_a_stranger_is_neither_seen_nor_served(swarm: Swarm) -> None:
    invited = [await member(swarm, name) for name in ("anna", "boris", "clara")]
    stranger = await swarm.start(
        "mallory", run=RUN, seeds=await swarm.seed_addresses("anna", "boris")
    )
    await until(lambda: swarm.all_see(invited), within_s=60, what="members see each other")
    await asyncio.sleep(120.0)
    for peer in invited:
        assert stranger.id not in {each.peer for each in peer.presence.table}
        assert peer.presence.table.rejected["unadmitted"] > 0
        assert NO_INVITE in await reply(stranger.host, peer)
        assert await first_frame(stranger.host, peer) == REFUSED + NO_INVITE.encode()
        assert peer.host.directory.keeper.rejected["unadmitted"] > 0, "its records were stored"
    assert await reply(invited[0].host, invited[1]) == "hello"


async def test_members_open_no_stream_to_a_stranger(swarm: Swarm) -> None:
    anna = await member(swarm, "anna")
    mallory = await swarm.start("mallory", run=RUN)
    guarded = GuardedHost(anna.host, anna.presence.door.refusal)
    await anna.host.connect(mallory.id, await mallory.host.addresses(), timeout_s=5.0)
    with pytest.raises(PeerUnreachable, match="admits invited peers only"):
        await guarded.open_stream(mallory.id, STRAY, timeout_s=5.0)


async def test_a_peer_whose_record_is_unknown_is_asked_once(swarm: Swarm) -> None:
    anna = await member(swarm, "anna")
    newcomer, mallory = swarm.network.host("newcomer"), swarm.network.host("mallory")
    calls: Counter[PeerId] = Counter()

    def shows(host: MemoryHost, shown: bytes) -> Any:
        async def answer(peer: PeerId, request: bytes) -> bytes:
            calls[host.peer_id] += 1
            return wire.write(wire.Papers(run=RUN, credential=shown))

        return host.serve_calls(wire.PAPERS_PROTOCOL, answer, request_max_bytes=1 << 16)

    await shows(newcomer, credential(newcomer.peer_id))
    await shows(mallory, credential(newcomer.peer_id))  # another peer's
    answers = await asyncio.gather(*(reply(newcomer, anna) for _ in range(20)))
    assert set(answers) == {"hello"}
    answers = await asyncio.gather(*(reply(mallory, anna) for _ in range(20)))
    assert set(answers) == {NO_INVITE}
    assert calls == {newcomer.peer_id: 1, mallory.peer_id: 1}
    for host in (newcomer, mallory):
        await host.close()


async def test_a_keepers_invite_does_not_let_a_learner_in(swarm: Swarm) -> None:
    keepers = invitation(role="keeper")
    anna = await member(swarm, "anna")
    clara = await member(swarm, "clara", by=keepers, role="keeper")
    await member(swarm, "mallory", by=keepers)
    await asyncio.sleep(60.0)
    assert anna.sees() == {clara.id}


@pytest.mark.parametrize("weather", [CALM, STORM], ids=["calm", "storm"])
@pytest.mark.parametrize("seed", seeds(3, soak=50))
def test_a_ban_holds_everywhere_within_a_minute(
    seed: int, weather: Weather, tmp_path: Path
) -> None:
    async def story(swarm: Swarm) -> None:
        names = [f"p{number}" for number in range(8)]
        shared = invitation("shared")
        for name in names:
            by = shared if name in ("p6", "p7") else None
            await member(swarm, name, by=by, kept=tmp_path / name)
        await until(lambda: swarm.all_see(swarm.members()), within_s=300, what="all see each other")
        # One is off line when it is said, and comes back to a swarm without the peer that heard it.
        await swarm.stop("p5")
        banned = {swarm.peers["p4"].id, swarm.peers["p6"].id, swarm.peers["p7"].id}
        owner = swarm.network.host("the owner's visitor")
        told = swarm.peers["p1"]
        directive = banning(public_key_of(swarm.peers["p4"].id), shared.secret.public_key, number=7)
        request = wire.write(wire.Papers(run=RUN, directives=(directive,)))
        answer = wire.read(wire.Papers, await ask(owner, told, wire.PAPERS_PROTOCOL, request))
        assert answer.not_taken == ""

        def holds(peer: Peer) -> bool:
            in_force = peer.presence.door.admission.in_force(NOW)
            return [each.number for each in in_force.values()] == [7] and not peer.sees() & banned

        loyal = [swarm.peers[name] for name in ("p0", "p1", "p2", "p3")]
        took = await until(
            lambda: all(map(holds, loyal)), within_s=WITHIN_S, what="the ban holds at all"
        )
        assert took <= WITHIN_S
        for peer in loyal:
            assert "banned" in await reply(swarm.peers["p4"].host, peer)
            assert "is banned from the run by directive 7" in await reply(
                swarm.peers["p6"].host, peer
            )

        def knows(name: str) -> bool:
            return any("banned" in event.text for event in swarm.peers[name].told("not_admitted"))

        await until(lambda: knows("p4") and knows("p6"), within_s=WITHIN_S, what="they are told")
        await swarm.stop("p1")
        back = await member(swarm, "p5", kept=tmp_path / "p5")
        await until(lambda: holds(back), within_s=WITHIN_S, what="it holds at the one that was off")
        # A restart remembers it, before it has met anybody.
        await swarm.stop("p0")
        again = await member(swarm, "p0", kept=tmp_path / "p0")
        assert holds(again)
        await owner.close()

    simulate(story, weather=weather, seed=seed)


async def test_open_streams_of_a_banned_peer_are_cut(swarm: Swarm) -> None:
    anna, boris = await member(swarm, "anna"), await member(swarm, "boris")
    await until(lambda: swarm.all_see([anna, boris]), within_s=60, what="both see each other")
    stream = await boris.host.open_stream(anna.id, f"{STRAY}/stream", timeout_s=5.0)
    assert await stream.receive(timeout_s=5.0) == b"hello"
    anna.presence.door.take([banning(public_key_of(boris.id))])
    with pytest.raises(Exception, match="broke"):
        await stream.receive(timeout_s=10.0)


async def test_a_peer_that_is_proved_to_lie_is_cut_off_in_a_run_without_an_owner(
    swarm: Swarm,
) -> None:
    anna = await swarm.start("anna", run=RUN)
    boris = await swarm.start("boris", run=RUN, seeds=await swarm.seed_addresses("anna"))
    anna.host.directory.keeper.judge = anna.presence.door.judge
    await until(lambda: swarm.all_see([anna, boris]), within_s=60, what="both see each other")
    await anna.presence.door.ban(boris.id, "merged slice 0 falsely")
    assert anna.presence.table.get(boris.id) is None
    assert "falsely" in (await anna.presence.door.refusal(boris.id) or "")
    await asyncio.sleep(WITHIN_S)
    assert anna.presence.table.get(boris.id) is None, "its record is believed again"


async def invited_for_two_minutes(swarm: Swarm) -> tuple[Peer, Peer]:
    """Anna, and Boris with such an invite, who see each other."""
    anna = await member(swarm, "anna")
    boris = await member(swarm, "boris", by=invitation("short", days=120 / DAY))
    await until(lambda: anna.sees() == {boris.id}, within_s=60, what="anna sees boris")
    return anna, boris


async def test_an_invite_that_ends_turns_its_peer_out(swarm: Swarm) -> None:
    anna, boris = await invited_for_two_minutes(swarm)
    await asyncio.sleep(130.0 - asyncio.get_running_loop().time())
    assert anna.sees() == set()
    assert "expired" in boris.told("not_admitted")[0].text


async def test_the_end_of_an_invite_is_told_once_before_it_comes(swarm: Swarm) -> None:
    anna, boris = await invited_for_two_minutes(swarm)
    await asyncio.sleep(105.0 - asyncio.get_running_loop().time())
    assert not boris.told("invite_ends")
    await asyncio.sleep(14.5)
    (said,) = boris.told("invite_ends")
    assert said.fields == {"expires_at": NOW + 120}
    assert "shoal join" in said.text
    await asyncio.sleep(60.0)
    assert len(boris.told("invite_ends")) == 1
    assert not anna.told("invite_ends")


async def test_a_long_invite_is_told_of_a_day_before_its_end_where_one_is_needed(
    swarm: Swarm,
) -> None:
    peer = await member(swarm, "anna", by=invitation("long", days=30))
    await swarm.start("owner", run=RUN, admission=admission("open"))
    for passed, told in ((28.9, 0), (0.2, 1)):
        peer.host.wall_offset_s += passed * DAY
        await asyncio.sleep(30.0)
        assert len(peer.told("invite_ends")) == told
    assert not swarm.peers["owner"].told("invite_ends")


async def test_a_peer_whose_invite_has_ended_comes_back_with_a_later_one(swarm: Swarm) -> None:
    anna, boris = await invited_for_two_minutes(swarm)
    await asyncio.sleep(130.0 - asyncio.get_running_loop().time())
    assert anna.sees() == set()
    assert "expired" in await reply(boris.host, anna)
    await swarm.stop("boris")
    again = await member(swarm, "boris", by=invitation("later", days=1))
    await until(lambda: anna.sees() == {again.id}, within_s=60, what="anna sees boris again")
    assert await reply(again.host, anna) == "hello"


async def banned_and_gone(swarm: Swarm, kept: Path) -> Peer:
    """Anna. She has banned boris, who has heard it, keeps it in his folder, and is off line."""
    anna = await member(swarm, "anna")
    boris = await member(swarm, "boris", kept=kept)
    await until(lambda: swarm.all_see([anna, boris]), within_s=60, what="both see each other")
    anna.presence.door.take([banning(public_key_of(boris.id))])
    await until(lambda: bool(boris.told("not_admitted")), within_s=60, what="boris is told")
    await asyncio.sleep(1.0)  # it is written to his folder
    await swarm.stop("boris")
    return anna


async def test_a_peer_whose_ban_was_lifted_meanwhile_comes_back(
    tmp_path: Path, swarm: Swarm
) -> None:
    """Earlier, its own file of directives refused it at its start, before it could hear a newer
    one."""
    anna = await banned_and_gone(swarm, tmp_path / "boris")
    anna.presence.door.take([banning(number=2)])
    again = await member(swarm, "boris", kept=tmp_path / "boris")
    await until(lambda: anna.sees() == {again.id}, within_s=60, what="anna sees boris again")
    await asyncio.sleep(60.0)
    assert not again.told("not_admitted")
    assert await reply(again.host, anna) == "hello"


@pytest.mark.parametrize("anna_is_here", [True, False])
async def test_a_peer_that_is_banned_is_told_so_again_at_its_next_start(
    anna_is_here: bool, tmp_path: Path, swarm: Swarm
) -> None:
    await banned_and_gone(swarm, tmp_path / "boris")
    if not anna_is_here:
        await swarm.stop("anna")
    again = await member(swarm, "boris", kept=tmp_path / "boris")
    took_s = await until(
        lambda: bool(again.told("not_admitted")), within_s=60, what="boris is told again"
    )
    assert took_s < 15.0 if anna_is_here else took_s >= ASKS_FIRST_S


async def test_an_invite_that_is_renewed_in_time_is_never_felt(swarm: Swarm) -> None:
    anna, _ = await invited_for_two_minutes(swarm)
    await swarm.stop("boris")
    again = await member(swarm, "boris", by=invitation("later", days=1))
    await until(lambda: again.sees() == {anna.id}, within_s=60, what="boris is back")
    while asyncio.get_running_loop().time() < 300.0:
        await asyncio.sleep(5.0)
        assert anna.sees() == {again.id}
    assert not again.told("not_admitted")


@pytest.mark.parametrize("wrong_s", [-DAY, -3600.0, 3600.0, DAY])
async def test_a_member_whose_clock_is_set_stays_in_the_run(wrong_s: float, swarm: Swarm) -> None:
    """Silence is measured by monotonic clocks, and records are numbered upwards in any case."""
    peers = [await member(swarm, name) for name in ("anna", "boris", "clara")]
    await until(lambda: swarm.all_see(peers), within_s=60, what="all see each other")
    for wrong_by_s in (wrong_s, 0.0):
        peers[1].host.wall_offset_s = wrong_by_s
        for _ in range(60):
            await asyncio.sleep(5.0)
            assert swarm.all_see(peers)


async def test_a_lower_number_is_refused_and_told_with_the_directive_in_force(swarm: Swarm) -> None:
    anna = await member(swarm, "anna")
    anna.presence.door.take([banning(number=5), banning(number=2, signer=DELEGATES)])
    visitor = swarm.network.host("visitor")
    await visitor.connect(anna.id, await anna.host.addresses(), timeout_s=5.0)
    papers = wire.Papers(run=RUN, directives=(banning(number=4),))
    answer = await exchange_papers(visitor, anna.id, papers, timeout_s=5.0)
    assert "directive 5, which is in force" in answer.not_taken
    assert answer.directives == (banning(number=5), banning(number=2, signer=DELEGATES))
    assert answer.not_admitted == NO_INVITE
    await visitor.close()
