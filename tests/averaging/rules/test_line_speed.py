"""Peers measure their lines, and those on slow lines get smaller slices or none."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace

import pytest

from averaging.live.settings import AveragerSettings
from averaging.live.slices.exchange import Exchange
from averaging.live.streams.buffers import GrowingBytes
from averaging.live.streams.bulk import FIRST, Bulk, TransportSettings, Uplink
from averaging.messages import Commit
from averaging.numbers.layout import Layout, TensorSpec
from averaging.round.gathering.roster import slice_shares
from averaging.rules.line_speed import CARRIED_MIN_BYTES, LineSpeed, paired
from dht.identity import PeerId
from dht.memory.host import MemoryNetwork
from dht.wrapped_host import Gate, ThrottledHost
from tests.averaging.live.links import introduce, linked
from tests.averaging.live.quadratic import POLICY, swarm

MB = 1_000_000
ANNA, BORIS, CLARA = PeerId("anna"), PeerId("boris"), PeerId("clara")


def test_the_speed_is_unknown_before_a_large_transfer() -> None:
    line = LineSpeed()
    assert line.bytes_per_s is None

    line.transferred(ANNA, CARRIED_MIN_BYTES - 1, began=0.0, ended=1.0)
    line.transferred(ANNA, MB, began=1.0, ended=1.0)
    assert line.bytes_per_s is None

    line.transferred(ANNA, MB, began=1.0, ended=1.5)
    assert line.bytes_per_s == 2 * MB


def test_transfers_at_the_same_time_share_the_line_and_those_after_each_other_do_not() -> None:
    together, in_turn = LineSpeed(), LineSpeed()
    for number in range(3):
        together.transferred(ANNA, MB, began=0.0, ended=3.0)
        in_turn.transferred(ANNA, MB, began=number, ended=number + 0.99)

    assert together.bytes_per_s == pytest.approx(MB)
    assert in_turn.bytes_per_s == pytest.approx(MB / 0.99)


def test_a_smaller_transfer_is_load_beside_a_larger_one() -> None:
    """An upload to two reducers, in slices of 182 and 124 KB: without the smaller one the line
    would be known for 60% of its speed."""
    line, rate = LineSpeed(), 143_000.0
    for number in range(12):
        line.transferred(
            ANNA, 124_000, began=10.0 * number, ended=10.0 * number + 2 * 124_000 / rate
        )
        line.transferred(ANNA, 182_000, began=10.0 * number, ended=10.0 * number + 306_000 / rate)

    assert line.bytes_per_s == pytest.approx(rate, rel=0.1)


def test_small_transfers_that_fill_the_line_together_tell_its_speed() -> None:
    """A peer on a line of 0.4 Mbit/s led and reduced for two minutes: each slice was of 90 KB."""
    line, rate = LineSpeed(), 50_000.0
    line.transferred(ANNA, 90_000, began=0.0, ended=0.3)
    assert line.bytes_per_s is None
    for partner in (ANNA, BORIS):
        line.transferred(partner, 90_000, began=10.0, ended=10.0 + 2 * 90_000 / rate)

    assert line.bytes_per_s == pytest.approx(rate)


def test_fetches_of_others_are_load_beside_a_transfer_and_no_measurement() -> None:
    line, rate = LineSpeed(), 143_000.0
    line.carried(2 * MB, began=0.0, ended=0.001)
    assert line.bytes_per_s is None

    line.carried(MB, began=10.0, ended=10.0 + 2 * MB / rate)
    line.transferred(ANNA, MB, began=10.0, ended=10.0 + 2 * MB / rate)
    assert line.bytes_per_s == pytest.approx(rate)


def test_bytes_that_pass_a_buffer_at_once_add_no_more_than_themselves() -> None:
    line = LineSpeed()
    for number in range(12):
        line.transferred(ANNA, MB, began=number, ended=number + 0.99)
        line.transferred(ANNA, 50_000, began=number + 0.5, ended=number + 0.500001)

    assert line.bytes_per_s == pytest.approx(1.05 * MB / 0.99)


def test_slow_partners_do_not_lower_the_speed_and_an_outlier_does_not_raise_it() -> None:
    line = LineSpeed()
    for number in range(30):
        rate = 10 * MB if number % 3 == 0 else MB
        line.transferred(ANNA, MB, began=number, ended=number + MB / rate)
    line.transferred(ANNA, MB, began=40.0, ended=40.000001)

    assert line.bytes_per_s == pytest.approx(10 * MB)


def test_downloads_are_mostly_as_slow_as_their_sources() -> None:
    up, down = paired()
    for number in range(24):
        seconds = 1.0 if number % 6 == 0 else 4.0
        up.transferred(ANNA, MB, began=10.0 * number, ended=10.0 * number + 2.0)
        down.transferred(ANNA, MB, began=10.0 * number, ended=10.0 * number + seconds)

    assert up.bytes_per_s == pytest.approx(MB / 2)
    assert down.bytes_per_s == pytest.approx(MB)


def test_one_slow_partner_does_not_make_the_line_slow() -> None:
    """One of five peers had a line of 1 Mbit/s. The others' last transfers were with it, so all
    took their lines for slow, and the slow one led and reduced as before."""
    for line in paired():
        for number in range(6):
            line.transferred(ANNA, MB, began=number, ended=number + 0.1)
            line.transferred(BORIS, MB, began=number + 0.5, ended=number + 0.6)
        for number in range(12):
            line.transferred(CLARA, MB, began=10.0 + 9 * number, ended=18.0 + 9 * number)

        assert line.bytes_per_s == pytest.approx(10 * MB)


def test_a_line_that_is_slow_with_everybody_is_soon_known_for_it() -> None:
    up, _ = paired()
    partners = (ANNA, BORIS, CLARA)
    for number in range(30):
        up.transferred(partners[number % 3], MB, began=number, ended=number + 0.1)
    for number in range(9):
        up.transferred(partners[number % 3], MB, began=100.0 + 8 * number, ended=108.0 + 8 * number)

    assert up.bytes_per_s == pytest.approx(MB / 8)


def test_a_partner_that_is_gone_says_no_more_how_fast_the_line_is() -> None:
    up, _ = paired()
    up.transferred(ANNA, MB, began=0.0, ended=0.1)
    for number in range(24):
        up.transferred(BORIS, MB, began=10.0 * number, ended=10.0 * number + 8.0)

    assert up.bytes_per_s == pytest.approx(MB / 8)


def test_old_transfers_are_forgotten() -> None:
    line = LineSpeed()
    for number in range(100):
        line.transferred(ANNA, MB, began=number, ended=number + (0.1 if number < 50 else 0.5))

    assert line.bytes_per_s == pytest.approx(2 * MB)


def test_uploads_of_a_line_that_has_recovered_since_are_forgotten() -> None:
    """A peer on a slow line takes part in one version of eight: its few uploads said for several
    cycles that the line was slow, while it downloaded fast."""
    up, down = paired()
    for number in range(12):
        for line in (up, down):
            line.transferred(ANNA, MB, began=8.0 * number, ended=8.0 * number + 7.0)
    assert up.bytes_per_s == down.bytes_per_s == pytest.approx(MB / 7)

    for number in range(4):
        down.transferred(ANNA, MB, began=100.0 + number, ended=100.0 + number + 0.5)
    assert down.bytes_per_s == pytest.approx(2 * MB)
    assert up.bytes_per_s is None

    up.transferred(ANNA, MB, began=110.0, ended=110.5)
    assert up.bytes_per_s == pytest.approx(2 * MB)


def test_a_line_that_is_slow_in_one_direction_only_stays_known_for_it() -> None:
    up, down = paired()
    for number in range(40):
        down.transferred(ANNA, MB, began=number, ended=number + (0.1 if number % 3 else 0.2))
        if number % 8 == 0:
            up.transferred(ANNA, MB, began=number, ended=number + 7.0)
        if number > 8:
            assert up.bytes_per_s == pytest.approx(MB / 7)


async def test_a_transfer_that_was_cut_counts_with_the_bytes_that_passed() -> None:
    """Both directions: a line may have become too slow for its rounds' deadlines."""
    cut_after_s = 4.0

    async def take(bulk: Bulk, header: bytes) -> None:
        async with asyncio.timeout(cut_after_s):
            await bulk.receive_growing(GrowingBytes(memoryview(bytearray(10 * MB))))

    network = MemoryNetwork()
    hosts = network.host("anna"), network.host("boris")
    await introduce(*hosts)
    gate = Gate()
    gate.set_rate(MB / 2)
    async with linked(ThrottledHost(hosts[0], up=gate, down=Gate()), hosts[1], bulk=take) as (
        anna,
        boris,
    ):
        bulk = await anna.transport.open_bulk(boris.peer, b"header")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(cut_after_s - 1.0):
                await bulk.send(bytes(10 * MB))
        bulk.abort()
        await asyncio.sleep(cut_after_s)
        for line in (anna.transport.up, boris.transport.down):
            assert line.bytes_per_s is not None
            assert MB / 4 < line.bytes_per_s < MB
    for host in hosts:
        await host.close()


async def test_an_upload_measures_the_line_of_a_peer_that_answers_no_requests() -> None:
    async def take(bulk: Bulk, header: bytes) -> None:
        await bulk.receive_into(memoryview(bytearray(MB)))
        await bulk.received()
        await asyncio.sleep(30.0)  # the others are late
        bulk.grant()
        await bulk.send_frame(b"the answer")

    network = MemoryNetwork()
    hosts = network.host("anna"), network.host("boris")
    await introduce(*hosts)
    gate = Gate()
    gate.set_rate(MB / 10)
    async with linked(ThrottledHost(hosts[0], up=gate, down=Gate()), hosts[1], bulk=take) as (
        anna,
        boris,
    ):
        bulk = await anna.transport.open_bulk(boris.peer, b"header")
        await bulk.send(bytes(MB))
        assert await bulk.granted(timeout_s=60.0) == ""
        bulk.abort()
        line = anna.transport.up.bytes_per_s
        assert line is not None and MB / 12 < line < MB / 5
    for host in hosts:
        await host.close()


async def test_an_answer_that_waits_for_its_turn_does_not_look_like_a_slow_line() -> None:
    """Three homes that answer each other took their downlinks for a tenth of their uplinks."""
    answers = Uplink(lambda: MB / 10)

    async def answer(bulk: Bulk, header: bytes) -> None:
        bulk._uplink = answers
        bulk.grant()
        await bulk.send(bytes(MB))
        await bulk.finish()

    async def busy() -> None:
        async with answers.turn(MB, since=FIRST):
            await asyncio.sleep(8.0)

    network = MemoryNetwork()
    hosts = network.host("anna"), network.host("boris")
    await introduce(*hosts)
    gate = Gate()
    gate.set_rate(MB / 10)
    async with linked(hosts[0], ThrottledHost(hosts[1], up=gate, down=Gate()), bulk=answer) as (
        anna,
        boris,
    ):
        other = asyncio.ensure_future(busy())
        await asyncio.sleep(0.1)
        bulk = await anna.transport.open_bulk(boris.peer, b"header")
        assert await bulk.granted(timeout_s=60.0) == ""
        await bulk.receive_growing(GrowingBytes(memoryview(bytearray(MB))))
        bulk.abort()
        await other
        line = anna.transport.down.bytes_per_s
        assert line is not None and MB / 12 < line < MB / 5
    for host in hosts:
        await host.close()


async def test_an_answer_is_granted_in_the_turn_of_its_first_bytes() -> None:
    """It was granted in a turn of its own, after which another transfer went first."""
    answers = Uplink(lambda: MB / 10)

    async def answer(bulk: Bulk, header: bytes) -> None:
        bulk._uplink = answers
        bulk.grant()
        await bulk.send(bytes(MB // 2))
        await bulk.finish()

    async def other() -> None:
        async with answers.turn(MB, since=math.inf):
            await asyncio.sleep(8.0)

    network = MemoryNetwork()
    hosts = network.host("anna"), network.host("boris")
    await introduce(*hosts)
    async with linked(*hosts, bulk=answer) as (anna, boris):
        others = [asyncio.ensure_future(other())]
        await asyncio.sleep(0.1)
        bulk = await anna.transport.open_bulk(boris.peer, b"header")
        await asyncio.sleep(0.1)
        others.append(asyncio.ensure_future(other()))
        assert await bulk.granted(timeout_s=60.0) == ""
        async with asyncio.timeout(1.0):
            await bulk.receive_into(memoryview(bytearray(MB // 2)))
        bulk.abort()
        await asyncio.gather(*others)
    for host in hosts:
        await host.close()


async def test_the_peer_on_the_slow_line_reduces_nothing_and_rounds_get_shorter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layout = Layout.build([TensorSpec(f"block.{i}", (25, 1000)) for i in range(40)], 1)
    due = replace(POLICY.due, fragments=1, cycle_steps=5)
    policy = replace(POLICY, codec="f16", due=due, slice_bytes_min=256 << 10)
    fast, slow_rate = 2 * MB, MB // 5
    # A throttled line lets a first frame pass at once: with larger ones it looks faster than it is.
    transport = TransportSettings(piece_bytes=64 << 10)
    commits: dict[bytes, Commit] = {}
    init = Exchange.__init__

    def noted(self: Exchange, *args: object, **kwargs: object) -> None:
        init(self, *args, **kwargs)  # type: ignore[arg-type]
        commits[self.parts.round] = self.parts.commit

    monkeypatch.setattr(Exchange, "__init__", noted)

    async with swarm(MemoryNetwork(), layout=layout) as made:
        for name in ("anna", "boris", "clara", "slow"):
            rate = slow_rate if name == "slow" else fast
            up, down = Gate(), Gate()
            up.set_rate(rate)
            down.set_rate(rate)
            await made.add(
                name,
                policy=policy,
                settings=AveragerSettings(progress_s=1.0, transport=transport),
                step_time_s=4.0,
                wrap=lambda host, up=up, down=down: ThrottledHost(host, up=up, down=down),  # type: ignore[misc]
            )
        await made.live(100.0)
        made.check()
        slow = made.peers[-1]
        for peer in made.peers:
            rate = slow_rate if peer is slow else fast
            assert rate / 3 < peer.averager.bytes_per_s < 3 * rate, peer.name
        whole = [told["round"] for told in slow.told("round") if len(told["contributors"]) == 4]
        first, last = (commits[bytes.fromhex(whole[at])] for at in (0, -1))
        assert set(first.shares) == {1}
        assert slow.id in first.reducers and slow.id not in last.reducers
        # The others wait for what the slow one sends, as a member and as a reducer.
        waited = [
            max(
                told["seconds"]
                for peer in made.peers[:-1]
                for told in peer.told("round")
                if told["round"] == round_id
            )
            for round_id in (whole[0], whole[-1])
        ]
        assert waited[1] < 0.9 * waited[0]
        slow.averager.around = replace(slow.averager.around, line_max=lambda: 1000.0)
        assert slow.averager.bytes_per_s == 1000.0


def test_lines_of_similar_speed_get_equal_slices() -> None:
    measured = [6.2e7, 4.6e7, 6.1e7, 5.3e7, 0.0, 5.4e7, 4.1e7, 5.0e7]
    assert len(set(slice_shares(measured))) == 1
    slow, *others = slice_shares([5e6, *measured])
    assert len(set(others)) <= 2 and min(others) >= slow
    assert max(others) >= 10 * slow
    assert slice_shares([1e6, 1e7]) == (100, 1000)
