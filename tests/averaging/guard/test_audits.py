"""Live peers audit each other's merges: who lies is banned by all, and nobody else is."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from averaging import messages as said
from averaging.guard import auditing
from averaging.guard.auditing import (
    SERVED_MAX,
    SERVED_PER_PEER_MAX,
    AskProof,
    AskSources,
    AskUpload,
    Auditing,
    audit_protocol,
)
from averaging.guard.kept_proofs import Kept
from averaging.guard.rules.proofs import Guilty, Proof
from averaging.history.claims import Claim
from averaging.live.settings import AveragerSettings
from averaging.live.slices.evidence import Evidence, Uploads
from averaging.live.slices.parts import Parts
from averaging.live.streams.questions import NotHere, ask, next_data
from averaging.numbers import chunks
from averaging.numbers.arithmetic import Weighted
from averaging.rules.peer_view import PeerView
from averaging.rules.policy import ProbationPolicy, RoundPolicy
from averaging.rules.reputation import Ground
from dht.errors import PeerUnreachable, StreamBroken
from dht.host import Stream
from dht.identity import PeerId
from dht.memory.host import MemoryNetwork, identity_of
from dht.memory.virtual_loop import run
from peer.storage.proofs import ProofFolder
from tests.averaging.guard.guards import whole
from tests.averaging.guard.rules.audited_rounds import two_votes
from tests.averaging.live.quadratic import POLICY, RUN, Peer, Swarm, swarm

MALLORY = identity_of("mallory").peer_id
EVERYTHING = replace(POLICY, audit_rate=1.0)
HALF = replace(POLICY, audit_rate=0.5)


@pytest.fixture(autouse=True)
def several_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slices of this tiny model have several pieces, as those of larger ones do."""
    monkeypatch.setattr(chunks, "CHUNK_MIN_VALUES", 1)


async def honest(made: Swarm, policy: RoundPolicy, **facts: Any) -> list[Peer]:
    return [await made.add(name, policy=policy, **facts) for name in ("anna", "boris", "clara")]


def convicts(peers: list[Peer]) -> list[set[PeerId]]:
    return [set(peer.averager.guard.convicted) for peer in peers]


def audits_of(peers: list[Peer]) -> int:
    return sum(peer.averager.guard.counters["audits"] for peer in peers)


def reduce_falsely(monkeypatch: pytest.MonkeyPatch, who: PeerId) -> None:
    """A member takes the first contribution for the mean: within any bound of norms."""
    honestly = Parts._merge_chunks

    def lie(self: Parts, index: int, given: Weighted, *rest: Any) -> None:
        if self.me == who:
            first = 1.0, *[0.0] * (len(given.payloads) - 1)
            given = replace(given, weights=first)
        honestly(self, index, given, *rest)

    monkeypatch.setattr(Parts, "_merge_chunks", lie)


@pytest.mark.parametrize(("codec", "merge"), [("int8", "mean"), ("f32", "centered_clip")])
async def test_a_reducer_that_lies_within_all_bounds_is_banned_by_everybody(
    monkeypatch: pytest.MonkeyPatch, codec: str, merge: str
) -> None:
    if merge == "mean":
        reduce_falsely(monkeypatch, MALLORY)
    else:
        honestly = Parts._merge_chunks

        def lie(self: Parts, index: int, given: Weighted, *rest: Any) -> None:
            if self.me == MALLORY:
                given = replace(given, payloads=[given.payloads[0]] * len(given.payloads))
            honestly(self, index, given, *rest)

        monkeypatch.setattr(Parts, "_merge_chunks", lie)

    async with swarm(MemoryNetwork()) as made:
        policy = replace(HALF, codec=codec, merge=merge)
        peers = await honest(made, policy)
        await made.add("mallory", policy=policy)
        await made.until(lambda: convicts(peers) == [{MALLORY}] * 3, within_s=40.0)
        (event, *more) = peers[0].told("convicted")
        assert event["reason"].startswith("merged slice") and not more
        before = [peer.versions() for peer in peers]
        at = asyncio.get_running_loop().time()
        await made.live(30.0)
        assert [peer.versions() for peer in peers] > before
        later = [e for p in peers for t, n, e in p.events if n == "round" and t > at + 15.0]
        assert later and not any(MALLORY in each["members"] for each in later)
        made.check()


@pytest.mark.parametrize("asked_bytes", [auditing.ASKED_BYTES, 1])
async def test_a_member_is_asked_once_for_a_piece_of_all_slices_unless_they_are_large(
    monkeypatch: pytest.MonkeyPatch, asked_bytes: int
) -> None:
    monkeypatch.setattr(auditing, "ASKED_BYTES", asked_bytes)
    asked: Counter[int] = Counter()
    show = Auditing._show

    async def noting(self: Auditing, stream: Stream, request: AskUpload) -> None:
        asked[len(request.slices)] += 1
        await show(self, stream, request)

    monkeypatch.setattr(Auditing, "_show", noting)
    async with swarm(MemoryNetwork()) as made:
        peers = await honest(made, EVERYTHING)
        await made.live(30.0)
        assert audits_of(peers) > 10 and convicts(peers) == [set()] * 3
        assert max(asked) == (2 if asked_bytes > 1 else 1), "the auditor merged the third slice"


async def test_a_reducer_that_hides_its_sources_hides_no_other_reducers_lie(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chunks, "CHUNKS", 1)
    reduce_falsely(monkeypatch, MALLORY)
    answer = Auditing._answer

    async def hiding(self: Auditing, stream: Stream, request: Any) -> None:
        if isinstance(request, AskSources) and self._around.life.peer == peers[0].id:
            raise NotHere("not today")
        await answer(self, stream, request)

    audit = Auditing._audit

    async def of_others(self: Auditing, *what: Any) -> None:
        if self._around.life.peer != peers[0].id:
            await audit(self, *what)

    monkeypatch.setattr(Auditing, "_answer", hiding)
    monkeypatch.setattr(Auditing, "_audit", of_others)
    async with swarm(MemoryNetwork()) as made:
        peers = await honest(made, EVERYTHING)
        await made.add("mallory", policy=EVERYTHING)
        await made.until(lambda: convicts(peers) == [{MALLORY}] * 3, within_s=40.0)
        assert any(peer.told("audit_refused") for peer in peers[1:])


def test_bundles_of_a_site_are_audited_and_a_delegate_that_lies_is_banned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> list[set[PeerId]]:
        async with swarm(MemoryNetwork()) as made:
            peers = [await made.add(name, policy=EVERYTHING) for name in ("anna", "boris")]
            for name in ("mallory", "nora"):
                peers.append(await made.add(name, policy=EVERYTHING, site="attic"))
            await made.live(50.0)
            assert audits_of(peers) > 20
            delegates = {
                d for p in peers for e in p.told("round") for d in e.get("delegates", {}).values()
            }
            assert delegates
            made.check()
            return convicts(peers)

    assert run(main()) == [set()] * 4
    honestly = Parts._merge_chunks

    def lie(self: Parts, index: int, given: Weighted, *rest: Any) -> None:
        if given.again:
            given = replace(given, payloads=[given.payloads[0]] * len(given.payloads))
        honestly(self, index, given, *rest)

    monkeypatch.setattr(Parts, "_merge_chunks", lie)
    # Whoever is the delegate lies; riders and the other site find it.
    *others, liar = sorted(run(main()), key=len, reverse=True)
    assert others[0] in ({MALLORY}, {identity_of("nora").peer_id})
    assert others == [others[0]] * 3 and not liar


async def test_an_auditor_asks_a_delegate_once_for_a_piece_of_its_bundle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Asked again, for the audit of its bundle, a delegate could show another one than it had shown
    for the audit of the merged slice: nobody compared the two."""
    asked: Counter[tuple[PeerId, PeerId, bytes, int, int]] = Counter()
    show = Auditing._show

    async def noting(self: Auditing, stream: Stream, request: AskUpload) -> None:
        if not request.alone:
            who = self._host.peer_id, stream.remote
            asked.update((*who, request.round, index, request.piece) for index in request.slices)
        await show(self, stream, request)

    monkeypatch.setattr(Auditing, "_show", noting)
    async with swarm(MemoryNetwork()) as made:
        peers = await honest(made, EVERYTHING, site="attic")
        peers.append(await made.add("dora", policy=EVERYTHING))
        await made.live(40.0)
        assert any(e.get("delegates") for e in peers[0].told("round"))
        assert audits_of(peers) > 20 and max(asked.values()) == 1


async def test_a_reducer_that_makes_bundles_up_convicts_itself_and_costs_nobody_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It merged rightly, and said of every other member that it had sent a bundle. Each was asked
    for one, had none, and was taken for one that hides what it did."""
    claim = Evidence.claim_merged

    def lie(
        self: Evidence, index: int, members: Any, made: bytes, sources: Sequence[Claim]
    ) -> None:
        if self._me == MALLORY:
            own = self._entry
            sources = [
                source if source.by == own else msgspec.structs.replace(source, sources=b"x" * 32)
                for source in sources
            ]
        claim(self, index, members, made, sources)

    monkeypatch.setattr(Evidence, "claim_merged", lie)
    async with swarm(MemoryNetwork()) as made:
        peers = await honest(made, EVERYTHING)
        await made.add("mallory", policy=EVERYTHING)
        await made.until(lambda: convicts(peers) == [{MALLORY}] * 3, within_s=60.0)
        assert not [event for peer in peers for event in peer.told("audit_refused")]


async def test_a_peer_that_comes_later_is_shown_the_proof_and_one_that_restarts_has_kept_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    reduce_falsely(monkeypatch, MALLORY)

    async with swarm(MemoryNetwork()) as made:
        peers = await honest(made, HALF)
        await made.add("mallory", policy=HALF)
        await made.until(lambda: convicts(peers) == [{MALLORY}] * 3, within_s=40.0)
        late = await made.add("late", policy=HALF, shelf=ProofFolder(tmp_path, RUN))
        await made.until(lambda: convicts([late]) == [{MALLORY}], within_s=70.0)
        again = await made.add("again", policy=HALF, shelf=ProofFolder(tmp_path, RUN))
        await asyncio.sleep(0.1)
        assert convicts([again]) == [{MALLORY}]
        (name,) = whole(again.averager).kept_proofs.proofs
        assert await whole(again.averager).kept_proofs.read(name) is not None


async def test_a_proof_that_was_given_up_after_it_was_named_costs_its_teller_nothing() -> None:
    async with swarm(MemoryNetwork()) as made:
        anna, boris, _ = await honest(made, EVERYTHING)
        await made.add("mallory", policy=EVERYTHING)
        await made.live(30.0)
        kept = whole(anna.averager).kept_proofs
        proof = Proof(two_votes((0,), identity_of("mallory")))
        kept.keep(Guilty(MALLORY, "signed two seals in ballot 1"), proof)
        kept.proofs.clear()
        whole(boris.averager).heard_of(anna.id, said.Accused(0, proof.digest, MALLORY))
        await made.live(20.0)
        assert boris.averager.guard.counters["proofs_not_had"] == 1
        now = asyncio.get_running_loop().time()
        assert not boris.averager.reputation.count(anna.id, Ground.CONDUCT, now)


async def test_a_proof_that_proves_nothing_convicts_nobody_and_costs_its_sender() -> None:
    async with swarm(MemoryNetwork()) as made:
        peers = await honest(made, EVERYTHING)
        liar = await made.add("mallory", policy=EVERYTHING)
        await made.live(30.0)
        victim = peers[0].id
        invented = Proof(two_votes((0,), identity_of("anna"), forged=True))
        whole(liar.averager).kept_proofs.proofs[invented.digest] = Kept(victim, 99, invented)
        whole(liar.averager).spread()
        await made.live(20.0)
        assert convicts(peers) == [set()] * 3
        told = [fields for peer in peers for fields in peer.told("proof_refused")]
        assert told and all(fields["peer"] == liar.id for fields in told)
        now = asyncio.get_running_loop().time()
        assert peers[1].averager.reputation.count(liar.id, Ground.CONDUCT, now) > 0.9


@pytest.mark.parametrize("about_a_member", [False, True])
async def test_keys_that_nobody_has_met_convict_themselves_in_vain(about_a_member: bool) -> None:
    """Each cost every peer a file, a line of its log and a message to all others, without end."""
    async with swarm(MemoryNetwork()) as made:
        peers = await honest(made, EVERYTHING)
        liar = await made.add("mallory", policy=EVERYTHING)
        await made.live(30.0)
        for number in range(10):
            head = two_votes((0,), identity_of(f"invented {number}"))
            proof = Proof(head)
            named = peers[0].id if about_a_member else head.first.by
            whole(liar.averager).kept_proofs.proofs[proof.digest] = Kept(named, 99, proof)
        whole(liar.averager).spread()
        await made.live(20.0)
        assert convicts(peers) == [set()] * 3


async def test_a_key_that_never_counted_convicts_itself_without_anybody_being_told() -> None:
    """256 of them had each peer name 256 proofs to each key in view, once a minute for ever."""
    async with swarm(MemoryNetwork()) as made:
        policy = replace(EVERYTHING, probation=ProbationPolicy(rounds=4, seconds=10.0))
        anna, *others = await honest(made, policy)
        await made.live(60.0)
        guard = whole(anna.averager)
        for number in range(10):
            head = two_votes((0,), identity_of(f"cheap {number}"))
            guard.convict(Guilty(head.first.by, "signed two seals in ballot 1"), Proof(head))
            assert guard.lie_of(head.first.by)
        assert not guard.kept_proofs.proofs
        head = two_votes((0,), identity_of("boris"))
        guard.convict(Guilty(head.first.by, "signed two seals in ballot 1"), Proof(head))
        assert [kept.about for kept in guard.kept_proofs.proofs.values()] == [others[0].id]


async def test_a_proof_is_named_to_peers_that_have_a_link_here_or_count() -> None:
    """Each of thousands of keys in view was dialled for it, at the cost of honest peers' links."""
    async with swarm(MemoryNetwork()) as made:
        policy = replace(EVERYTHING, probation=ProbationPolicy(rounds=4, seconds=10.0))
        anna, *others = await honest(made, policy)
        mallory = await made.add("mallory", policy=policy)
        await made.live(60.0)
        keys = [identity_of(f"cheap {number}").peer_id for number in range(100)]
        for peer in keys:
            anna.view[peer] = PeerView(
                anna.now() - 100.0, anna.now(), reachable=False, trains=False
            )
        head = two_votes((0,), identity_of("mallory"))
        whole(anna.averager).convict(Guilty(mallory.id, "signed two seals"), Proof(head))
        await made.live(20.0)
        assert convicts(others) == [{mallory.id}] * 2
        assert not anna.averager.transport.counters["dials_failed"]


async def test_a_proof_is_named_whatever_the_clock_of_who_has_it_says() -> None:
    """Two honest peers of three followed a liar for minutes that the third one had convicted."""
    async with swarm(MemoryNetwork()) as made:
        anna, *others = await honest(made, EVERYTHING, clock_offset_s=-1e5)
        mallory = await made.add("mallory", policy=EVERYTHING)
        await made.live(30.0)
        head = two_votes((0,), identity_of("mallory"))
        whole(anna.averager).convict(Guilty(mallory.id, "signed two seals"), Proof(head))
        await made.live(20.0)
        assert convicts(others) == [{mallory.id}] * 2


async def test_who_is_established_takes_one_look_at_all_in_view(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """2500 keys in view took all of a keeper's time, as it asks that of each once a second."""
    async with swarm(MemoryNetwork()) as made:
        policy = replace(EVERYTHING, probation=ProbationPolicy(rounds=4, seconds=10.0))
        anna, boris, _ = await honest(made, policy)
        await made.live(60.0)
        electors, looks = anna.averager.electors, 0
        required_work = electors.required_work

        def counted(live: Iterable[PeerId], now: float) -> Any:
            nonlocal looks
            looks += 1
            return required_work(live, now)

        monkeypatch.setattr(electors, "required_work", counted)
        keys = [identity_of(f"cheap {number}").peer_id for number in range(100)]
        for peer in keys:
            anna.view[peer] = PeerView(anna.now() - 100.0, anna.now(), reachable=False)
        established = [peer for peer in anna.view if anna.averager.is_established(peer)]
        assert boris.id in established and not set(keys) & set(established)
        assert looks <= 1


async def test_a_peer_that_shows_auditors_nothing_is_not_banned_and_counts_for_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = Uploads.of

    def nothing(self: Uploads, index: int, *, alone: bool) -> Any:
        mine = self.evidence._me == MALLORY
        return None if mine else shown(self, index, alone=alone)

    monkeypatch.setattr(Uploads, "of", nothing)

    async with swarm(MemoryNetwork()) as made:
        peers = await honest(made, EVERYTHING)
        await made.add("mallory", policy=EVERYTHING)
        await made.live(90.0)
        assert convicts(peers) == [set()] * 3
        now = asyncio.get_running_loop().time()
        assert not all(peer.averager.reputation.has_power(MALLORY, now) for peer in peers)
        refused = [fields for peer in peers for fields in peer.told("audit_refused")]
        assert {fields["peer"] for fields in refused} == {MALLORY}


@pytest.mark.parametrize("drops", [True, pytest.param(False, marks=pytest.mark.slow)])
async def test_a_peer_that_answers_auditors_drop_by_drop_or_not_at_all_counts_for_less(
    monkeypatch: pytest.MonkeyPatch, drops: bool
) -> None:
    """Audits waited for it for as long as it liked, and it was held against nobody."""
    honestly = Auditing._tell_all

    async def drip(self: Auditing, stream: Stream, data: memoryview) -> None:
        if self._host.peer_id != MALLORY:
            await honestly(self, stream, data)
            return
        await asyncio.sleep(19.0)
        for at in range(len(data)):
            await (self._tell(stream, data[at : at + 1]) if drops else asyncio.sleep(19.0))
            await asyncio.sleep(19.0)

    monkeypatch.setattr(Auditing, "_tell_all", drip)
    async with swarm(MemoryNetwork()) as made:
        peers = await honest(made, EVERYTHING)
        await made.add("mallory", policy=EVERYTHING)
        known = [peer.averager.reputation for peer in peers]
        clock = asyncio.get_running_loop().time
        await made.until(
            lambda: not any(each.has_power(MALLORY, clock()) for each in known), within_s=120.0
        )
        made.check()
        now = clock()
        others = [peer.id for peer in peers]
        assert not any(each.count(one, Ground.CONDUCT, now) for each in known for one in others)


@pytest.mark.parametrize("uploads_bytes_max", [1000, 5000])
async def test_peers_whose_uploads_are_too_large_to_be_kept_hold_nothing_against_each_other(
    monkeypatch: pytest.MonkeyPatch, uploads_bytes_max: int
) -> None:
    """Of a large model each audit that was not made at once found nothing: after a minute every
    peer was out of favour with every other one. So it was where one round could be kept, and not
    those that ended before its audits were made."""
    audit = Auditing._audit

    async def later(self: Auditing, *what: Any) -> None:
        await asyncio.sleep(10.0)
        await audit(self, *what)

    monkeypatch.setattr(Auditing, "_audit", later)
    settings = AveragerSettings(uploads_bytes_max=uploads_bytes_max)
    async with swarm(MemoryNetwork()) as made:
        peers = await honest(made, EVERYTHING, settings=settings)
        await made.live(60.0)
        refused = [fields for peer in peers for fields in peer.told("audit_refused")]
        assert not refused, refused[0]


async def test_strangers_that_hold_all_places_of_a_peer_do_not_have_it_refuse_auditors() -> None:
    """Auditors took the refusal for a sign that it hides a lie."""
    async with swarm(MemoryNetwork()) as made:
        anna, boris, _ = await honest(made, EVERYTHING)
        await made.live(30.0)
        strangers = [made.memory.host(f"stranger {number}") for number in range(4)]
        for stranger in strangers:
            await stranger.connect(anna.id, await anna.host.addresses(), timeout_s=5.0)
            for _ in range(SERVED_PER_PEER_MAX):
                await stranger.open_stream(anna.id, audit_protocol(RUN), timeout_s=5.0)
        assert len(strangers) * SERVED_PER_PEER_MAX == SERVED_MAX
        await asyncio.sleep(0.1)
        with pytest.raises(NotHere, match="that proof is not kept here"):
            async with whole(boris.averager).stream(anna.id, 5.0) as (stream, _):
                await ask(stream, AskProof(bytes(32)))
                await next_data(stream)
        for stranger in strangers:
            await stranger.close()


@pytest.mark.slow  # strangers that hold all places are in the quick tests
async def test_members_that_hold_all_places_of_a_peer_have_it_struck_by_nobody() -> None:
    """They cost themselves strikes instead, at the peer whose places they hold."""
    async with swarm(MemoryNetwork()) as made:
        anna, *others = await honest(made, EVERYTHING)
        liars = [await made.add(f"liar{number}", policy=EVERYTHING) for number in range(4)]
        await made.live(35.0)
        assert all(anna.averager.is_established(liar.id) for liar in liars)
        taken = 0

        async def hold(liar: Peer) -> None:
            nonlocal taken
            while True:
                try:
                    stream = await liar.host.open_stream(
                        anna.id, audit_protocol(RUN), timeout_s=5.0, bulk=True
                    )
                    taken += 1
                    await stream.receive(timeout_s=60.0)
                    stream.abort()
                except (StreamBroken, PeerUnreachable, TimeoutError):
                    await asyncio.sleep(0.05)

        holding = [asyncio.create_task(hold(liar)) for liar in liars for _ in range(4)]
        await made.live(40.0)
        for task in holding:
            task.cancel()
        await asyncio.gather(*holding, return_exceptions=True)

        now = asyncio.get_running_loop().time()
        assert taken > SERVED_MAX, "liars have lost places and taken others"
        for peer in others:
            assert peer.averager.reputation.count(anna.id, Ground.CONDUCT, now) < 1.0
        reputation = anna.averager.reputation
        at_anna = [reputation.count(liar.id, Ground.CONDUCT, now) for liar in liars]
        assert max(at_anna) >= 1.0
