"""Seals: what opens, and everything that does not; tickets: whose, once, and for how long."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dht.identity import PeerId
from dht.libp2p.framing.sealing import (
    KEY_BYTES,
    NUMBER_BYTES,
    SEALED_MAX_BYTES,
    TAG_BYTES,
    BadSeal,
    Seal,
    Ticket,
    Tickets,
)

KEY = bytes(range(KEY_BYTES))
ANNA, BORIS = PeerId("anna"), PeerId("boris")


def opened(seal: Seal, header: bytes, sealed: bytes) -> bytes:
    content = bytearray(len(sealed) - TAG_BYTES)
    seal.open_into(header, memoryview(sealed), memoryview(content))
    return bytes(content)


@given(st.lists(st.tuples(st.binary(max_size=9), st.binary(max_size=300)), max_size=5))
def test_frames_open_in_their_order(frames: list[tuple[bytes, bytes]]) -> None:
    mine, theirs = Seal(KEY), Seal(KEY)
    for header, content in frames:
        assert opened(theirs, header, mine.close(header, content)) == content


def test_both_ways_of_sealing_are_the_same() -> None:
    target = bytearray(5 + TAG_BYTES)
    Seal(KEY).close_into(b"header", memoryview(b"bytes"), memoryview(target))
    assert bytes(target) == Seal(KEY).close(b"header", b"bytes")


def test_equal_frames_look_different() -> None:
    seal = Seal(KEY)
    assert seal.close(b"", b"the same") != seal.close(b"", b"the same")


def test_a_changed_bit_does_not_open() -> None:
    sealed = Seal(KEY).close(b"header", b"bytes")
    for bit in range(8 * len(sealed)):
        changed = bytearray(sealed)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(BadSeal):
            opened(Seal(KEY), b"header", bytes(changed))


def test_another_header_another_key_and_another_turn_do_not_open() -> None:
    first, second = (seal := Seal(KEY)).close(b"header", b"1"), seal.close(b"header", b"2")
    with pytest.raises(BadSeal):
        opened(Seal(KEY), b"headed", first)
    with pytest.raises(BadSeal):
        opened(Seal(bytes(KEY_BYTES)), b"header", first)
    with pytest.raises(BadSeal):
        opened(Seal(KEY), b"header", second)  # the first was left out
    reader = Seal(KEY)
    assert opened(reader, b"header", first) == b"1"
    with pytest.raises(BadSeal):
        opened(reader, b"header", first)  # said twice


def test_a_key_wears_out() -> None:
    seal = Seal(KEY)
    seal.sealed_bytes = SEALED_MAX_BYTES - 1
    assert not seal.worn
    seal.close(b"", b"1")
    assert seal.worn


TICKET = Ticket(bytes(NUMBER_BYTES), bytes(KEY_BYTES), KEY)


def test_the_ends_of_a_ticket_understand_each_other_and_a_frame_that_comes_back_is_no_answer() -> (
    None
):
    dials, listens = TICKET.seals(dialled=True), TICKET.seals(dialled=False)
    said = dials.mine.close(b"", b"hello")
    assert opened(listens.theirs, b"", said) == b"hello"
    assert opened(dials.theirs, b"", listens.mine.close(b"", b"welcome")) == b"welcome"
    with pytest.raises(BadSeal):
        opened(TICKET.seals(dialled=True).theirs, b"", said)


def test_a_ticket_is_good_once_and_until_its_time_is_over() -> None:
    tickets = Tickets(life_s=10.0, tickets_max=4)
    first, second = (tickets.issue(ANNA, now=100.0) for _ in range(2))
    assert tickets.redeem(bytes(NUMBER_BYTES), now=100.0) is None
    assert tickets.redeem(first.number, now=109.9) == (ANNA, first)
    assert tickets.redeem(first.number, now=109.9) is None
    assert tickets.redeem(second.number, now=110.0) is None


def test_a_peer_that_asks_for_many_tickets_spends_its_own() -> None:
    tickets = Tickets(life_s=10.0, tickets_max=3)
    issued = [tickets.issue(peer, now=0.0) for peer in (BORIS, ANNA, ANNA, ANNA, ANNA)]
    held = [n for n, each in enumerate(issued) if tickets.redeem(each.number, now=0.0) is not None]
    assert held == [0, 3, 4]


def test_of_too_many_tickets_the_oldest_give_way() -> None:
    tickets = Tickets(life_s=10.0, tickets_max=2)
    issued = [tickets.issue(PeerId(str(n)), now=float(n)) for n in range(3)]
    assert tickets.redeem(issued[0].number, now=2.0) is None
    assert tickets.redeem(issued[2].number, now=2.0) == (PeerId("2"), issued[2])


def test_a_flood_of_identities_does_not_drop_the_tickets_of_others() -> None:
    """128 identities with 8 tickets each dropped all that were issued before."""
    tickets = Tickets(life_s=30.0, tickets_max=1024)
    mine = tickets.issue(BORIS, now=0.0)
    for n in range(1, 2000):
        tickets.issue(PeerId(str(n % 200)), now=1.0)
    assert tickets.redeem(mine.number, now=2.0) == (BORIS, mine)


def test_a_ticket_does_not_show_its_keys() -> None:
    assert "\\x01" not in repr(TICKET)
