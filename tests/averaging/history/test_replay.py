"""Replaying rounds, refusing entries that do not follow, and the log of a peer's last rounds."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from averaging import messages
from averaging.errors import BadPayload, LineageBroken
from averaging.history.adoption import Parting
from averaging.history.chain import Chain
from averaging.history.replay import (
    ReplayEntry,
    ReplayHead,
    ReplayLog,
    advance,
    rewound,
    shared_version,
)
from averaging.history.standing import Standing
from averaging.history.state import FragmentState
from averaging.messages import Commit, Link
from averaging.numbers.arrays import Float32s
from averaging.numbers.codec import Scratch
from averaging.rules.peer_view import PeerView
from dht.memory.host import MemoryNetwork
from tests.averaging.history.replayed_rounds import (
    MU,
    PEERS,
    SIZES,
    founded,
    lived,
    round_after,
)
from tests.averaging.live.quadratic import (
    POLICY,
    Peer,
    QuadraticLearner,
    Swarm,
    check_tokens,
    swarm,
)


def replayed(state: FragmentState, entries: Sequence[ReplayEntry]) -> FragmentState:
    scratch = Scratch()
    for entry in entries:
        entry.check(SIZES, scratch)
        state = advance(state, entry, SIZES, scratch)
    return state


def over_the_wire(entry: ReplayEntry) -> ReplayEntry:
    head, payload = entry.to_wire()
    received = ReplayHead.decode(head)
    assert received.payload_size(SIZES) == len(payload)
    return ReplayEntry(received, bytes(payload))


@pytest.mark.parametrize("mu", [MU, 0.0])
@pytest.mark.parametrize("codec", ["f32", "f16", "int8", "int4"])
def test_replaying_gives_the_bits_of_a_member(codec: str, mu: float) -> None:
    first, last, log = lived(12, codec, mu)
    entries = log.since(first.version, first.lineage)
    assert entries is not None
    late = replayed(first, [over_the_wire(entry) for entry in entries])

    assert late.version == 12
    assert late.lineage == last.lineage
    assert np.array_equal(late.theta, last.theta)
    assert np.array_equal(late.momentum, last.momentum)
    assert late.merged == last.merged
    assert list(late.chain) == list(last.chain)
    assert late.digest() == last.digest()


def test_merged_work_is_in_the_state() -> None:
    _, state, _ = lived(3)

    assert state.merged.tokens == 3 * (1000 + 1002)
    assert state.merged.covers(PEERS[0], 1, 72)
    assert PEERS[1] not in state.merged
    assert state.chain.tip.tokens == state.merged.tokens


def test_advancing_does_not_change_the_old_state() -> None:
    before = founded()
    theta = before.theta.copy()
    entry = round_after(before)
    after = advance(before, entry, SIZES, Scratch())
    assert np.array_equal(before.theta, theta)
    assert not before.momentum.any()
    assert advance(before, entry, SIZES, Scratch()).digest() == after.digest()


def test_the_digest_covers_every_part() -> None:
    state = lived(2)[1]
    digests = {state.digest()}
    for vector in ("theta", "momentum"):
        changed = getattr(state, vector).copy()
        changed.view(np.uint32)[7] ^= 1
        digests.add(replace(state, **{vector: changed}).digest())
    digests.add(replace(state, lineage=bytes(32)).digest())
    digests.add(replace(state, merged=state.merged.with_work(PEERS[1], 1, 1, 1)).digest())

    assert len(digests) == 5


def test_without_momentum_a_state_is_theta_alone_and_its_digest_half_as_long() -> None:
    _, plain, _ = lived(3, mu=0.0)
    _, state, _ = lived(3)
    assert plain.momentum.size == 0 and plain.vectors == (plain.theta,)
    assert 2 * len(plain.piece_digests()) == len(state.piece_digests())
    assert 2 * plain.pieces.size_bytes == state.pieces.size_bytes
    assert plain.digest() != state.digest()


@pytest.mark.parametrize("mu", [MU, 0.0])
def test_a_round_with_the_momentum_of_another_run_is_refused(mu: float) -> None:
    state = founded(mu)
    other = round_after(founded(MU - mu))
    with pytest.raises(LineageBroken, match="its mu is"):
        advance(state, other, SIZES, Scratch())


def test_an_entry_for_another_state_is_refused_and_changes_nothing() -> None:
    first, last, log = lived(3)
    before = first.digest()
    for entry in (log.since(1, last.chain.since(0)[0].lineage) or ())[:1]:
        with pytest.raises(LineageBroken, match="it starts from"):
            advance(first, entry, SIZES, Scratch())
    assert first.digest() == before


@pytest.mark.parametrize("seal", [(), (2, 0), (0, 0), (0, 3)])
def test_an_impossible_seal_is_refused(seal: tuple[int, ...]) -> None:
    state = founded()
    with pytest.raises(LineageBroken, match="its seal"):
        advance(state, round_after(state, seal=seal), SIZES, Scratch())


def test_a_mix_cannot_be_replayed() -> None:
    state = founded()
    with pytest.raises(LineageBroken, match="a meld cannot be replayed"):
        advance(state, round_after(state, melds=True), SIZES, Scratch())


def test_any_changed_byte_is_noticed() -> None:
    entry = round_after(founded())
    for seed in range(30):
        rng = random.Random(seed)
        payload = bytearray(entry.payload)
        payload[rng.randrange(len(payload))] ^= 1 << rng.randrange(8)
        with pytest.raises(BadPayload):
            ReplayEntry(entry.head, bytes(payload)).check(SIZES, Scratch())
    with pytest.raises(BadPayload, match="the layout says"):
        ReplayEntry(entry.head, bytes(entry.payload) + b"x").check(SIZES, Scratch())


def test_a_lie_about_a_round_leads_to_another_lineage() -> None:
    """Eta, mu, marks and seal are under the lineage, so a peer that knows its target notices."""
    state = founded()
    honest = round_after(state)
    target = advance(state, honest, SIZES, Scratch()).lineage
    commit = honest.head.commit
    fields = {name: getattr(commit, name) for name in commit.__struct_fields__}
    for lie in ({"eta": 0.1}, {"mu": 0.1}, {"members": commit.members[::-1]}):
        forged = messages.encode_commit(Commit(**{**fields, **lie}))
        entry = ReplayEntry(replace_head(honest.head, forged), honest.payload)
        assert advance(state, entry, SIZES, Scratch()).lineage != target
    fewer = ReplayEntry(ReplayHead(honest.head.encoded_commit, (0,), honest.head.digests), b"")
    assert fewer.head.after(Standing.of(state)).lineage != target


def replace_head(head: ReplayHead, commit: bytes) -> ReplayHead:
    return ReplayHead(commit, head.seal, head.digests)


def test_a_codec_that_this_peer_lacks_is_refused() -> None:
    state = founded()
    entry = round_after(state)
    fields = {n: getattr(entry.head.commit, n) for n in entry.head.commit.__struct_fields__}
    forged = messages.encode_commit(Commit(**{**fields, "codec": "int5"}))
    with pytest.raises(BadPayload, match="unknown codec"):
        advance(state, ReplayEntry(replace_head(entry.head, forged), b""), SIZES, Scratch())


# The log


def test_the_log_leads_from_any_state_it_knows() -> None:
    first, last, log = lived(5)

    assert [entry.version for entry in log.since(0, first.lineage) or ()] == [1, 2, 3, 4, 5]
    third = last.chain.since(2)[0]
    assert [entry.version for entry in log.since(3, third.lineage) or ()] == [4, 5]
    assert log.since(5, last.lineage) == ()
    assert log.since(3, bytes(32)) is None


def test_the_log_keeps_within_its_bytes_and_forgets_the_oldest() -> None:
    first, last, log = lived(5)
    each = log.size_bytes // 5
    small = ReplayLog(bytes_max=3 * each + 10, lineage=first.lineage)
    for entry, link in zip(log.since(0, first.lineage) or (), last.chain.since(0), strict=True):
        small.append(entry, link.lineage)
        assert small.size_bytes <= small.bytes_max

    assert len(small) == 3
    assert small.since(0, first.lineage) is None
    second = last.chain.since(1)[0]
    assert [entry.version for entry in small.since(2, second.lineage) or ()] == [3, 4, 5]


def test_a_log_of_no_bytes_keeps_nothing_and_knows_its_state() -> None:
    first, last, log = lived(2)
    empty = ReplayLog(bytes_max=0, lineage=first.lineage)
    for entry, link in zip(log.since(0, first.lineage) or (), last.chain.since(0), strict=True):
        empty.append(entry, link.lineage)

    assert (len(empty), empty.size_bytes) == (0, 0)
    assert empty.since(2, last.lineage) == ()
    assert empty.since(0, first.lineage) is None


def test_nothing_leads_across_a_restart() -> None:
    first, last, log = lived(2)
    log.restart(bytes(32))

    assert log.since(0, first.lineage) is None
    assert log.since(2, last.lineage) is None
    assert log.since(9, bytes(32)) == ()


def test_an_entry_that_does_not_follow_restarts_the_log() -> None:
    first, _, log = lived(2)
    entries = log.since(0, first.lineage) or ()
    log.append(entries[0], b"\1" * 32)

    assert len(log) == 0
    assert log.since(1, b"\1" * 32) == ()


def test_folds_leave_the_theta_that_they_began_with_while_it_is_recent() -> None:
    """A peer that trained alone offers its work since then again, if it gives way."""
    first = founded()
    log = ReplayLog(bytes_max=1 << 20, lineage=first.lineage)
    state = first
    for version in range(1, 5):
        before, state = state, replace(state, version=version, lineage=bytes([version]) * 32)
        log.fold(before, state, versions_max=3)
        kept = log.theta_at(first.version, first.lineage)
        assert (kept is first.theta) == (version <= 3)
        assert log.theta_at(before.version, before.lineage) is (kept if version == 1 else None)
        assert log.since(before.version, before.lineage) is None, "a fold cannot be replayed"

    log.restart(state.lineage)
    after = replace(state, version=5, lineage=bytes([5]) * 32)
    log.fold(state, after, versions_max=3)
    assert log.theta_at(state.version, state.lineage) is state.theta


# Rebase: the side of a fork that gives way offers again its work since the fork.


@pytest.mark.parametrize("codec", ["f32", "f16", "int8", "int4"])
@pytest.mark.parametrize(("rounds", "mu"), [(1, MU), (3, MU), (8, MU), (8, 0.0)])
def test_rewinding_rounds_restores_theta_except_for_rounding(
    codec: str, rounds: int, mu: float
) -> None:
    first, last, log = lived(rounds, codec, mu)
    entries = log.since(first.version, first.lineage)
    assert entries is not None
    before = last.momentum.copy()

    found = rewound(last, entries, SIZES, Scratch())

    assert found is not None
    moved = np.abs(last.theta - first.theta).max()
    assert np.abs(found - first.theta).max() < 1e-4 * moved
    assert np.array_equal(last.momentum, before), "the state is only read"


def test_a_result_that_would_be_mostly_rounding_is_withheld() -> None:
    first, last, log = lived(20)
    entries = log.since(first.version, first.lineage)
    assert entries is not None

    assert rewound(last, entries, SIZES, Scratch()) is None
    assert rewound(last, entries[-14:], SIZES, Scratch()) is not None


def chain(*names: str) -> Chain:
    return Chain(
        Link(index, name.encode().ljust(32), 100 * index) for index, name in enumerate(names)
    )


def test_the_parting_is_the_last_common_version_if_it_is_recent() -> None:
    mine = chain("start", "one", "left two", "left three")
    theirs = chain("start", "one", *(f"right {index}" for index in range(8)))

    shared = shared_version(mine, theirs, versions_max=8)

    assert shared is not None and shared.version == 1
    assert shared_version(mine, theirs, versions_max=7) is None, "eight versions ago is too long"
    assert shared_version(chain("another start"), theirs, versions_max=8) is None


SLOW_S = 4.0


async def apart_and_together(
    made: Swarm, network: MemoryNetwork, *, stale_max: int = POLICY.stale_max
) -> list[Peer]:
    """Run three fast peers and two slow ones together, apart, and together again."""
    policy = replace(POLICY, stale_max=stale_max)
    quick = [await made.add(name, policy=policy) for name in ("anna", "boris", "clara")]
    slow = [await made.add(name, policy=policy, step_time_s=SLOW_S) for name in ("emil", "fanny")]
    await made.live(30.0)
    network.partition([[peer.id for peer in side] for side in (quick, slow)])
    for side, others in ((quick, slow), (slow, quick)):
        for peer in side:
            for other in others:
                del peer.view[other.id]
    await made.live(30.0)
    made.check()
    network.heal()
    now = asyncio.get_running_loop().time()
    for side, others in ((quick, slow), (slow, quick)):
        for peer in side:
            for other in others:
                peer.view[other.id] = PeerView(
                    first_seen=now - 100.0,
                    heard_at=now,
                    step_time_s=SLOW_S if other in slow else 1.0,
                )
                await peer.host.connect(other.id, await other.host.addresses(), timeout_s=10.0)
    await made.live(60.0)
    made.check()
    return slow


def rebases(peers: list[Peer]) -> list[Mapping[str, Any]]:
    return [fields for peer in peers for fields in peer.told("state_adopted") if fields["rebased"]]


def watch_rebases(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return by how much each learner's displacement since the fork changes by the rebase."""
    thetas: dict[tuple[int, int], Float32s] = {}
    off: list[float] = []
    adopt, rebase = QuadraticLearner.adopt, QuadraticLearner.rebase

    def remember(
        self: QuadraticLearner, fragment: int, state: FragmentState, *, contained: int | None
    ) -> None:
        if self.step_time_s == SLOW_S:
            thetas[fragment, state.version] = state.theta.copy()
        adopt(self, fragment, state, contained=contained)

    def compare(
        self: QuadraticLearner, fragment: int, state: FragmentState, parted: Parting
    ) -> int | None:
        origin = thetas[fragment, parted.version]
        before = self.parameters(fragment) - origin
        again = rebase(self, fragment, state, parted)
        off.append(float(np.abs(self.parameters(fragment) - state.theta - before).max()))
        return again

    monkeypatch.setattr(QuadraticLearner, "adopt", remember)
    monkeypatch.setattr(QuadraticLearner, "rebase", compare)
    return off


async def test_a_light_side_that_parted_lately_offers_all_its_work_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The learners of that side end as if they had trained alone since the fork."""
    off = watch_rebases(monkeypatch)

    network = MemoryNetwork()
    async with swarm(network) as made:
        slow = await apart_and_together(made, network)
        found = rebases(slow)
        assert found and all(fields["parted_at"] is not None for fields in found), found
        assert sum(f["tokens"] for peer in slow for f in peer.told("regained")) > 0
        assert len(off) == len(found) and max(off) < 1e-4
        for peer in slow:
            assert not peer.told("written_off")
            assert peer.learner is not None
            for fragment in range(len(made.layout.fragments)):
                assert peer.learner.discarded(fragment) == 0
        check_tokens(made.peers)


async def test_a_light_side_that_parted_long_ago_writes_off_its_merged_work() -> None:
    """The work of that side is too old by the versions of the other one."""
    network = MemoryNetwork()
    async with swarm(network) as made:
        slow = await apart_and_together(made, network, stale_max=1)
        found = rebases(slow)
        assert found and all(fields["parted_at"] is None for fields in found), found
        assert any(peer.told("written_off") for peer in slow)
        check_tokens(made.peers)
