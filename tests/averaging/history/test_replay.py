"""Replaying rounds, refusing entries that do not follow, and the log of a peer's last rounds."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from averaging import messages
from averaging.errors import BadPayload, LineageBroken
from averaging.history.replay import ReplayEntry, ReplayHead, ReplayLog, advance
from averaging.history.standing import Standing
from averaging.history.state import FragmentState
from averaging.messages import Commit
from averaging.numbers.codec import Scratch
from tests.averaging.history.replayed_rounds import (
    PEERS,
    SIZES,
    founded,
    lived,
    round_after,
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


@pytest.mark.parametrize("codec", ["f32", "f16", "int8", "int4"])
def test_replaying_gives_the_bits_of_a_member(codec: str) -> None:
    first, last, log = lived(12, codec)
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
    small = ReplayLog(bytes_max=3 * each + 10, version=0, lineage=first.lineage)
    for entry, link in zip(log.since(0, first.lineage) or (), last.chain.since(0), strict=True):
        small.append(entry, link.lineage)
        assert small.size_bytes <= small.bytes_max

    assert len(small) == 3
    assert small.since(0, first.lineage) is None
    second = last.chain.since(1)[0]
    assert [entry.version for entry in small.since(2, second.lineage) or ()] == [3, 4, 5]


def test_a_log_of_no_bytes_keeps_nothing_and_knows_its_state() -> None:
    first, last, log = lived(2)
    empty = ReplayLog(bytes_max=0, version=0, lineage=first.lineage)
    for entry, link in zip(log.since(0, first.lineage) or (), last.chain.since(0), strict=True):
        empty.append(entry, link.lineage)

    assert (len(empty), empty.size_bytes) == (0, 0)
    assert empty.since(2, last.lineage) == ()
    assert empty.since(0, first.lineage) is None


def test_nothing_leads_across_a_restart() -> None:
    first, last, log = lived(2)
    log.restart(9, bytes(32))

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
    log = ReplayLog(bytes_max=1 << 20, version=first.version, lineage=first.lineage)
    state = first
    for version in range(1, 5):
        before, state = state, replace(state, version=version, lineage=bytes([version]) * 32)
        log.fold(before, state, versions_max=3)
        kept = log.theta_at(first.version, first.lineage)
        assert (kept is first.theta) == (version <= 3)
        assert log.theta_at(before.version, before.lineage) is (kept if version == 1 else None)
        assert log.since(before.version, before.lineage) is None, "a fold cannot be replayed"

    log.restart(state.version, state.lineage)
    after = replace(state, version=5, lineage=bytes([5]) * 32)
    log.fold(state, after, versions_max=3)
    assert log.theta_at(state.version, state.lineage) is state.theta
