"""``shoal status`` of a run."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from multiaddr import Multiaddr

from dht.errors import PeerUnreachable
from dht.identity import Identity, PeerId, RunId
from dht.membership.admission import NO_INVITE, Admission
from dht.membership.credentials import InviteKey, Signer, admit, encode
from dht.membership.orders import End, Orders
from dht.membership.reachability import in_words
from dht.membership.table import bucket_key
from dht.memory.host import EPOCH, identity_of
from dht.presence.presence import Presence
from dht.records import PeerRecord, seal
from dht.wrapped_host import GuardedHost
from peer import status
from peer.contributors import Contributor
from peer.errors import NobodyMet, NotAdmitted
from peer.joining.fetch import SeedFailures
from peer.joining.link import Link
from peer.joining.visit import (
    COUNTED_WITHIN_S,
    QUIET_S,
    OwnInvite,
    RunStatus,
    Silent,
    Visitor,
    status_lines,
    waiting,
)
from peer.rules.ending import ended
from peer.run_file import sections
from peer.run_file.reading import parse
from peer.run_file.sections import RunFile
from peer.storage.credentials import admission_terms, owner_key_path, owners_invite
from tests.dht.presence.presence_swarm import RUN, Peer, Swarm, simulate
from tests.peer.statuses import BORIS, CLARA, a_status


def test_one_peer_alone_tells_neither_tokens_nor_versions_nor_a_loss_of_the_run() -> None:
    """An order for twenty versions from now was one for never, and states had no right number."""
    honest = [
        a_status(name=name, versions=(3, version), global_tokens=tokens)
        for name, version, tokens in (("anna", 3, 990), ("boris", 4, 1000))
    ]
    liar = a_status(
        name="mallory",
        versions=(2**60,) * 4096,
        global_tokens=2**61,
        held_out=status.HeldOut(2**60, 0.01, BORIS, 2**60),
    )
    newcomer = a_status(name="nina", versions=(), global_tokens=0, held_out=None)
    seen = RunStatus("ab" * 32, (liar, newcomer, *honest), {})
    assert (seen.global_tokens, seen.newest_version, seen.fragments) == (1000, 4, 2)
    assert seen.held_out == status.HeldOut(3, 2.4, BORIS, 900)
    of_two = RunStatus("ab" * 32, (liar, newcomer, honest[1]), {})
    assert (of_two.global_tokens, of_two.newest_version) == (1000, 4)
    assert of_two.held_out == status.HeldOut(3, 2.4, BORIS, 900)
    alone = RunStatus("ab" * 32, (newcomer, honest[1]), {})
    assert (alone.global_tokens, alone.newest_version, alone.fragments) == (1000, 4, 2)
    nobody = RunStatus("ab" * 32, (newcomer,), {})
    assert (nobody.newest_version, nobody.fragments, nobody.held_out) == (None, 0, None)


def test_an_order_that_waits_for_the_merge_of_a_peer_that_is_alone_says_so() -> None:
    """`run end --at +1` was taken, and for ten minutes nothing happened and nothing said why."""
    noon = datetime(2025, 3, 14, 12, 3, 30).timestamp()
    from_then = "merges by itself from 12:04 of 2025-03-14 on"
    alone = a_status(name="anna", alone_until=noon)
    seen = RunStatus("ab" * 32, (alone, a_status(name="keep", role="keeper")), {})
    assert f"  alone: {from_then}" in status_lines(seen)
    ends = Orders(end=End(version=5))
    assert waiting(seen, ends) == [f"waits for a merge: anna {from_then}"]
    assert not waiting(seen, Orders(end=End(version=4))), "it has come to that version"
    assert not waiting(seen, Orders(paused=True))
    together = RunStatus("ab" * 32, (alone, a_status(name="boris")), {})
    assert not waiting(together, ends), "boris has somebody to merge with"


def test_a_resting_peer_tells_the_reason_and_its_limits() -> None:
    resting = a_status(
        name="anna",
        rest="paused; continue with `shoal resume`",
        limits=("paused", "up 2 MB/s", "12.3 GB of 200 GB a month"),
    )
    heard = status.CALL.decode(status.CALL.encode(resting))
    lines = status_lines(RunStatus("ab" * 32, (heard, a_status(name="boris")), {}))
    told = [line for line in lines if "resting:" in line or "limits" in line]
    assert told == [
        "  resting: paused; continue with `shoal resume`; limits: paused, up 2 MB/s, "
        "12.3 GB of 200 GB a month"
    ]


def test_a_peer_whose_loss_gate_has_judged_says_so() -> None:
    judged = status.CALL.decode(status.CALL.encode(a_status(jumps_judged=3, jumps_refused=1)))
    lines = status_lines(RunStatus("ab" * 32, (judged, a_status(name="boris")), {}))
    told = [line for line in lines if "loss gate" in line]
    assert told == ["  loss gate: 3 jumps to states of others judged, 1 taken back"]


def test_members_that_do_not_answer_are_named_in_words_and_count_as_training() -> None:
    silent = {
        BORIS: Silent("boris", "learner", 0.25, in_words(False, "dial tcp4 127.0.0.1:38821")),
        CLARA: Silent("clara", "keeper", None, in_words(None, "connect: connection refused")),
    }
    seen = RunStatus("ab" * 32, (a_status(name="anna", step_time_s=0.5),), silent)
    assert seen.step_times_s == [0.5, 0.25], "a keeper does not train"
    lines = [line for line in status_lines(seen) if "no answer" in line]
    assert lines == [
        "boris: no answer: it is behind a router or firewall that lets no connection in",
        "clara: no answer: its machine is up, but nothing listens at its address "
        "(connection refused)",
    ]
    assert not any("dial tcp" in line for line in lines)


def test_the_owners_orders_are_shown_with_the_peers_that_do_not_follow_them_yet() -> None:
    signer = Signer(Identity.from_seed(bytes(32)), RunId("ab" * 32))
    directive = signer.directive(5, frozenset(), Orders(paused=True))
    told = (
        a_status(name="anna", directive=5),
        a_status(name="boris"),
        a_status(name="clara", directive=4),
    )
    seen = RunStatus("ab" * 32, told, {}, {BORIS: directive})
    assert status_lines(seen)[-3:] == [
        f"directive 5 of {BORIS}: paused",
        "  boris follows none yet",
        "  clara still follows directive 4",
    ]
    assert seen.plain()["directives"][0]["orders"] == ["paused"]
    assert not seen.is_ordered_to_end


def test_a_run_that_its_owner_has_ended_is_known_to_be_over_from_outside() -> None:
    """`shoal join` tried to fetch its state where only a keeper was left."""
    signer = Signer(Identity.from_seed(bytes(32)), RunId("ab" * 32))
    directive = signer.directive(6, frozenset(), Orders(end=End(at=1)))
    left = a_status(name="keeper", ended_at=2.0, versions=(1, 1), global_tokens=500)
    seen = RunStatus("ab" * 32, (left,), {}, {BORIS: directive})

    over = ended(sections.End(), seen.peers, now=datetime.now(UTC), ordered=seen.is_ordered_to_end)
    assert over == (2.0, 500)


@pytest.mark.parametrize(
    "changes",
    [
        {"rest": "\x1b[2J"},
        {"limits": ("up 2 MB/s", "\x07")},
        {"limits": ("x" * 301,)},
        {"limits": ("x",) * 17},
    ],
)
def test_control_characters_in_a_status_are_refused(
    changes: dict[str, object],
) -> None:
    with pytest.raises(ValueError, match="status"):
        status.CALL.decode(status.CALL.encode(a_status(**changes)))


def test_the_largest_contributors_are_named_with_their_share() -> None:
    rows = (
        Contributor(PeerId("anna"), "anna", 10, 667),
        Contributor(PeerId("boris"), "boris", 5, 333),
    )
    seen = RunStatus("ab" * 32, (a_status(name="anna"),), {}, contributors=rows)
    assert "contributors: anna 66.7%, boris 33.3%" in status_lines(seen)
    told = seen.plain()["contributors"]
    assert [(row["name"], row["tokens"]) for row in told] == [("anna", 10), ("boris", 5)]
    alone = RunStatus("ab" * 32, (a_status(name="anna"),), {})
    assert not any(line.startswith("contributors") for line in status_lines(alone))


async def with_status(
    swarm: Swarm, name: str, *, counts: int = 1, seeds: Sequence[Multiaddr] = (), **options: Any
) -> Peer:
    """A peer that tells a status to whom the run admits. ``counts``: live peers, as it says."""
    peer = await swarm.start(name, seeds=seeds, **options)

    async def answer(asker: PeerId, asked: str) -> bytes:
        return status.CALL.encode(a_status(peer=peer.id, name=name, peers=counts))

    guarded = GuardedHost(peer.host, peer.presence.door.refusal)
    await status.CALL.serve(guarded, options.get("run", RUN), answer)
    return peer


async def visitor_of(
    swarm: Swarm,
    run: RunId,
    *names: str,
    invite: InviteKey | None = None,
    own_invite: OwnInvite = lambda run: None,
) -> Visitor:
    seeds = await swarm.seed_addresses(*names)
    outside = await swarm.start("outside", run=run, seeds=seeds, observes=True)
    link = Link(run, tuple(seeds), invite)
    return Visitor(outside.host, outside.presence, link, SeedFailures(), own_invite)


OWNER = Identity.from_seed(bytes(31) + b"o")
INVITED = parse(
    f'schema = 1\nname = "ours"\n[policy]\nadmission = "invited"\nowner = "{OWNER.peer_id}"\n'
)


def an_invite(signer: Identity, *, ends_in_s: int = 900) -> InviteKey:
    secret = Identity.generate()
    ends_at = int(EPOCH) + ends_in_s
    invite = Signer(signer, INVITED.run_id).invite(secret.public_key, "learner", ends_at)
    return InviteKey(invite, secret)


async def invited_peer(swarm: Swarm, name: str, run: RunFile, invite: InviteKey) -> Peer:
    peer = identity_of(name).peer_id
    return await with_status(
        swarm,
        name,
        run=run.run_id,
        run_file=run.canonical(),
        admission=Admission(admission_terms(run)),
        credential=encode(admit(invite.invite, invite.secret, peer, run.run_id)),
    )


@pytest.mark.parametrize(
    ("invite", "told"),
    [
        (None, NO_INVITE),
        (an_invite(OWNER, ends_in_s=9), "the invite has expired"),
        (an_invite(Identity.generate()), "the invite is not signed by"),
    ],
    ids=["none", "expired", "forged"],
)
def test_a_visitor_that_all_peers_refuse_learns_why(invite: InviteKey | None, told: str) -> None:
    """`shoal status` said "0 tokens merged, 0 peers", and that all was well."""

    async def story(swarm: Swarm) -> RunStatus:
        await invited_peer(swarm, "anna", INVITED, an_invite(OWNER))
        await asyncio.sleep(10.0)
        visitor = await visitor_of(swarm, INVITED.run_id, "anna", invite=invite)
        return await visitor.look(timeout_s=60.0)

    seen = simulate(story)
    assert not seen.peers
    with pytest.raises(NotAdmitted) as refused:
        seen.check_admitted()
    assert told in refused.value.reason
    assert refused.value.exit_code == 4


def test_a_visitor_that_one_peer_answers_is_not_refused() -> None:
    silent = {BORIS: Silent("boris", "learner", 0.25, NO_INVITE, refuses=True)}
    RunStatus("ab" * 32, (a_status(name="anna"),), silent).check_admitted()
    RunStatus("ab" * 32, (), {BORIS: Silent("boris", "learner", 0.25, "no")}).check_admitted()


def test_peers_that_are_found_and_do_not_answer_are_a_run_that_was_not_reached() -> None:
    """`shoal status` listed them, said "0 tokens merged", and ended as if all were well."""
    boris = {BORIS: Silent("boris", "learner", 0.25, "connection refused")}
    with pytest.raises(NobodyMet) as unmet:
        RunStatus("ab" * 32, (), boris).check_answered()
    assert unmet.value.exit_code == 3
    assert "1 peer found (boris), and none answered" in str(unmet.value)
    RunStatus("ab" * 32, (a_status(name="anna"),), boris).check_answered()
    RunStatus("ab" * 32, (), {}).check_answered()


def test_a_reason_names_the_peer_that_it_is_of() -> None:
    """`shoal export` said "nothing answers at its address", and not whose."""
    gone = Silent("", "learner", 0.25, "nothing answers at its address")
    seen = RunStatus("ab" * 32, (), {BORIS: Silent("boris", "keeper", None, "no"), CLARA: gone})
    assert seen.reasons == f"{CLARA}: nothing answers at its address; boris: no"


def test_a_peer_that_comes_into_sight_late_is_asked_since_others_count_it() -> None:
    """On a busy machine one of two live peers was shown, and nothing was said of the other."""

    async def story(swarm: Swarm) -> RunStatus:
        await with_status(swarm, "anna", counts=2)
        visitor = await visitor_of(swarm, RUN, "anna")
        looking = asyncio.create_task(visitor.look(timeout_s=60.0))
        await asyncio.sleep(0.3)
        seeds = await swarm.seed_addresses("anna")
        await asyncio.sleep(QUIET_S)
        await with_status(swarm, "boris", counts=2, seeds=seeds)
        return await looking

    seen = simulate(story)
    assert [peer.name for peer in seen.peers] == ["anna", "boris"]
    assert seen.not_found is None


def test_peers_that_others_count_and_that_are_not_found_are_told_of() -> None:
    async def story(swarm: Swarm) -> tuple[RunStatus, float]:
        await with_status(swarm, "anna", counts=3)
        visitor = await visitor_of(swarm, RUN, "anna")
        began = asyncio.get_running_loop().time()
        seen = await visitor.look(timeout_s=60.0)
        return seen, asyncio.get_running_loop().time() - began

    seen, took_s = simulate(story)
    assert took_s < COUNTED_WITHIN_S + 2.0
    assert "2 peers that anna counts: not found in time; ask again" in status_lines(seen)
    assert seen.plain()["not_found"] == 2


def test_a_look_ends_at_once_where_all_that_are_counted_have_answered() -> None:
    async def story(swarm: Swarm) -> tuple[RunStatus, float]:
        await with_status(swarm, "anna", counts=2)
        await with_status(swarm, "boris", counts=2, seeds=await swarm.seed_addresses("anna"))
        await asyncio.sleep(30.0)
        visitor = await visitor_of(swarm, RUN, "anna")
        began = asyncio.get_running_loop().time()
        seen = await visitor.look(timeout_s=60.0)
        return seen, asyncio.get_running_loop().time() - began

    seen, took_s = simulate(story)
    assert [peer.name for peer in seen.peers] == ["anna", "boris"]
    assert took_s < 2.0


def test_keys_that_appear_each_moment_do_not_keep_a_look_from_its_end() -> None:
    """The search began anew with each of them: `shoal status` and `shoal runs` never ended."""

    async def story(swarm: Swarm) -> tuple[RunStatus, float]:
        await with_status(swarm, "anna")
        visitor = await visitor_of(swarm, RUN, "anna")
        outside = swarm.peers["outside"]

        async def appear() -> None:
            for number in count():
                cheap = identity_of(f"cheap {number}")
                record = PeerRecord(protocol=(1, 1), role="learner", incarnation=1)
                key = bucket_key(RUN, "")
                now = asyncio.get_running_loop().time()
                sealed = seal(record, cheap, key=key, sequence=1, ttl_s=600)
                assert outside.presence.table.take(sealed, now=now)
                await asyncio.sleep(QUIET_S / 2)

        async with asyncio.TaskGroup() as tasks:
            appearing = tasks.create_task(appear())
            began = asyncio.get_running_loop().time()
            async with asyncio.timeout(600.0):
                seen = await visitor.look(timeout_s=60.0)
            took_s = asyncio.get_running_loop().time() - began
            appearing.cancel()
        return seen, took_s

    seen, took_s = simulate(story)
    assert [peer.name for peer in seen.peers] == ["anna"]
    assert took_s < 120.0


def test_a_member_that_no_call_reaches_is_named() -> None:
    """Earlier, it was left out, like a peer that has left, once the visitor's own hello had
    failed."""

    async def story(swarm: Swarm) -> RunStatus:
        await with_status(swarm, "anna")
        boris = await with_status(swarm, "boris", seeds=await swarm.seed_addresses("anna"))
        await asyncio.sleep(30.0)
        swarm.network.simulated.pause(boris.id)
        visitor = await visitor_of(swarm, RUN, "anna")
        await asyncio.sleep(20.0)
        return await visitor.look(timeout_s=60.0)

    seen = simulate(story)
    assert [silent.name for silent in seen.silent.values()] == ["boris"]


def test_an_order_that_reaches_no_peer_says_so_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """`shoal run pause` said "12D3... did not take it: peer 12D3... cannot be reached: dial
    backoff"."""

    async def unreachable(presence: Presence, peer: PeerId, *, timeout_s: float) -> None:
        raise PeerUnreachable(peer, "dial backoff")

    async def story(swarm: Swarm) -> dict[PeerId, str]:
        await with_status(swarm, "anna")
        visitor = await visitor_of(swarm, RUN, "anna")
        await visitor.look(timeout_s=60.0)
        monkeypatch.setattr(Presence, "connect", unreachable)
        return await visitor.deliver(b"")

    (reason,) = simulate(story).values()
    assert reason == in_words(None, "dial backoff")


@pytest.mark.parametrize("has_key", [True, False])
def test_the_owner_needs_no_invite_to_ask_about_an_invited_run(
    has_key: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`shoal status FILE` answered its owner, and `shoal status LINK` refused it."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    owner = Identity.load_or_create(owner_key_path())
    policy = f'[policy]\nadmission = "invited"\nowner = "{owner.peer_id}"\n'
    run = parse(f'schema = 1\nname = "ours"\n{policy}')
    if not has_key:
        owner_key_path().unlink()
    secret = Identity.generate()
    signed = Signer(owner, run.run_id).invite(secret.public_key, "learner", int(EPOCH) + 9)

    async def story(swarm: Swarm) -> RunStatus:
        await invited_peer(swarm, "anna", run, InviteKey(signed, secret))
        visitor = await visitor_of(swarm, run.run_id, "anna", own_invite=owners_invite)
        return await visitor.look(timeout_s=60.0)

    seen = simulate(story)
    assert [peer.name for peer in seen.peers] == (["anna"] if has_key else [])
    assert [NO_INVITE in each.reason for each in seen.silent.values()] == [True] * (not has_key)
