import pytest
from hypothesis import given
from hypothesis import strategies as st
from multiaddr import Multiaddr

from dht.addresses import (
    deduplicate,
    is_dialable,
    is_loopback,
    is_private,
    is_relayed,
    network_of,
    pack,
    parse,
    peer_of,
    rank,
    unpack,
    unpack_all,
    with_peer,
    without_peer,
)
from dht.errors import AddressError
from dht.identity import Identity

ANNA = Identity.from_seed(b"a" * 32).peer_id
RELAY = Identity.from_seed(b"r" * 32).peer_id

hosts = st.one_of(
    st.ip_addresses(v=4).map(lambda ip: f"/ip4/{ip}"),
    st.ip_addresses(v=6).map(lambda ip: f"/ip6/{ip}"),
    st.sampled_from(["/dns4/example.org", "/dns6/seed-1.shoal.example", "/dns4/localhost"]),
)
endings = st.sampled_from(
    ["", f"/p2p/{ANNA}", f"/p2p/{RELAY}/p2p-circuit", f"/p2p/{RELAY}/p2p-circuit/p2p/{ANNA}"]
)
addresses = st.builds(
    lambda host, port, ending: parse(f"{host}/tcp/{port}{ending}"),
    hosts,
    st.integers(0, 65535),
    endings,
)


@pytest.mark.parametrize(
    ("text", "component", "hint"),
    [
        ("", "", "does not begin with '/'"),
        ("/ip4/1.2.3.4/tpc/1", "tpc", "did you mean tcp"),
        ("/ip4/1.2.3.4/tcp/1" + "/p2p" * 200, "", "over 512"),
    ],
)
def test_a_wrong_address_is_refused_with_the_component_that_is_wrong(
    text: str, component: str, hint: str
) -> None:
    """``tests/golden/refused/addresses.txt`` has many."""
    with pytest.raises(AddressError) as caught:
        parse(text)
    assert caught.value.component == component
    assert hint in str(caught.value)


@given(addresses)
def test_an_address_comes_back_from_text_and_from_bytes(address: Multiaddr) -> None:
    assert parse(str(address)) == address
    assert unpack(pack(address)) == address


def test_a_truncated_binary_address_is_refused_where_the_library_would_fill_in_zeros() -> None:
    whole = pack(parse("/ip4/203.0.113.7/tcp/7700"))
    assert str(Multiaddr(b"\x04")) == "/ip4/0.0.0.0"
    for cut in (b"\x04", b"\x04\x06\x1e\x14", *(whole[:size] for size in range(len(whole)))):
        with pytest.raises(AddressError):
            unpack(cut)


def test_bad_hints_are_skipped_and_the_good_ones_keep_their_order() -> None:
    one, two = parse("/ip4/1.2.3.4/tcp/1"), parse("/ip4/1.2.3.5/tcp/1")
    assert unpack_all([pack(two), b"junk", b"", pack(one)]) == (two, one)


@given(addresses)
def test_adding_and_removing_a_peer_are_inverse(address: Multiaddr) -> None:
    bare = without_peer(address)
    assert peer_of(bare) is None
    assert peer_of(with_peer(bare, ANNA)) == ANNA
    assert without_peer(with_peer(bare, ANNA)) == bare
    assert is_relayed(bare) == is_relayed(address)


def test_an_address_of_another_peer_does_not_become_ours() -> None:
    address = parse(f"/ip4/1.2.3.4/tcp/1/p2p/{RELAY}")
    assert with_peer(address, RELAY) == address
    with pytest.raises(ValueError, match="leads to peer"):
        with_peer(address, ANNA)


def test_a_relays_id_is_not_the_peers() -> None:
    assert peer_of(parse(f"/ip4/1.2.3.4/tcp/1/p2p/{RELAY}/p2p-circuit")) is None


@pytest.mark.parametrize(
    ("host", "loopback", "private"),
    [
        ("ip4/127.0.0.1", True, False),
        ("ip4/127.9.9.9", True, False),
        ("ip6/::1", True, False),
        ("ip6/::ffff:127.0.0.1", True, False),
        ("dns4/localhost", True, False),
        ("ip4/10.0.0.1", False, True),
        ("ip4/192.168.1.2", False, True),
        ("ip4/172.31.0.1", False, True),
        ("ip4/169.254.0.1", False, True),
        ("ip4/100.64.0.1", False, True),
        ("ip6/fe80::1", False, True),
        ("ip6/fd00::1", False, True),
        ("ip6/::ffff:10.0.0.1", False, True),
        ("dns4/nas.local", False, True),
        ("ip4/172.32.0.1", False, False),
        ("ip4/8.8.8.8", False, False),
        ("ip6/2a00::1", False, False),
        ("dns4/example.org", False, False),
    ],
)
def test_loopback_and_private_networks_are_told_apart(
    host: str, loopback: bool, private: bool
) -> None:
    address = parse(f"/{host}/tcp/1")
    assert (is_loopback(address), is_private(address)) == (loopback, private)


@pytest.mark.parametrize(
    ("text", "network"),
    [
        ("/ip4/203.0.113.7/tcp/1", "203.0.113.0/24"),
        ("/ip4/127.0.3.7/tcp/1", "127.0.3.0/24"),
        ("/ip6/2001:db8:1:2::3/tcp/1", "2001:db8:1::/48"),
        ("/ip6/::ffff:203.0.113.9/tcp/1", "203.0.113.0/24"),
        (f"/ip4/203.0.113.7/tcp/1/p2p/{RELAY}/p2p-circuit", "203.0.113.0/24"),
        ("/ip4/10.1.2.3/tcp/1", None),
        ("/ip4/100.64.1.2/tcp/1", None),
        ("/ip6/fd00::1/tcp/1", None),
        ("/dns4/seed.example.org/tcp/1", None),
    ],
)
def test_strangers_have_networks_and_neighbours_have_none(text: str, network: str | None) -> None:
    assert network_of(parse(text)) == network


@pytest.mark.parametrize("text", ["/ip4/0.0.0.0/tcp/1", "/ip6/::/tcp/1", "/ip4/1.2.3.4/tcp/0"])
def test_an_address_to_listen_on_is_none_to_dial(text: str) -> None:
    assert not is_dialable(parse(text))


def test_addresses_are_ranked_public_private_loopback_relayed() -> None:
    public = parse("/ip4/8.8.8.8/tcp/1")
    named = parse("/dns4/example.org/tcp/1")
    private = parse("/ip4/10.0.0.1/tcp/1")
    loopback = parse("/ip4/127.0.0.1/tcp/1")
    relayed = parse(f"/ip4/8.8.8.8/tcp/1/p2p/{RELAY}/p2p-circuit")

    assert rank([relayed, loopback, private, named, public]) == (
        named,
        public,
        private,
        loopback,
        relayed,
    )


@given(st.lists(addresses, max_size=8))
def test_each_address_is_kept_once_where_it_first_stood(many: list[Multiaddr]) -> None:
    kept = deduplicate(many + many)
    assert list(kept) == [a for i, a in enumerate(many) if a not in many[:i]]


def test_an_address_that_no_parser_of_ours_saw_is_refused_however_often_it_is_asked() -> None:
    foreign = Multiaddr("/ip4/1.2.3.4/udp/1")
    for _ in range(2):
        with pytest.raises(AddressError, match="over /tcp only"):
            is_private(foreign)


def test_an_address_is_written_as_text_once_and_not_for_ever_remembered() -> None:
    written: list[bytes] = []

    class Counted(Multiaddr):  # type: ignore[misc]  # the package is untyped
        def __str__(self) -> str:
            written.append(self.to_bytes())
            return str(super().__str__())

        __hash__ = Multiaddr.__hash__

    address = Counted("/ip4/1.2.3.9/tcp/4242")
    assert not is_private(address) and is_dialable(address) and not is_relayed(address)
    assert peer_of(with_peer(address, ANNA)) == ANNA
    assert written == [address.to_bytes()]

    for port in range(1, 6000):  # a swarm whose peers have other addresses every day
        is_private(Counted(f"/ip4/1.2.3.9/tcp/{port}"))
    written.clear()
    is_private(Counted("/ip4/1.2.3.9/tcp/1"))
    assert len(written) == 1, "the oldest was not forgotten"
