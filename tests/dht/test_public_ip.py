from __future__ import annotations

import pytest

from dht.addresses import is_private, parse
from dht.libp2p.lane.wire import is_outer
from dht.public_ip import is_public
from peer.run_file.places import fault_of_place, place_of

INNER = ["127.0.0.1", "10.0.0.1", "169.254.169.254", "192.168.1.1", "100.64.0.1"]


@pytest.mark.parametrize(
    "ip",
    [
        *INNER,
        *(f"{prefix}{ip}" for prefix in ("::", "::ffff:", "64:ff9b::") for ip in INNER),
        *(
            "64:ff9b:1::7f00:1",
            "64:ff9b:1:7f00:0:100::",
            "64:ff9b:1::8.8.8.8",
        ),  # own NAT64
        *("2002:7f00:1::", "2002:a00:1::1", "2002:c0a8:101:1::9"),  # 6to4
        *("fec0::1", "fe80::1", "fe80::1%eth0", "fd00::1", "::", "::1", "2001:0:808:808::1"),
        *("224.0.0.1", "239.1.2.3", "ff02::1", "ff0e::1", "255.255.255.255", "0.0.0.0"),
        *("100::1", "5f00::1", "2001:db8::1", "example.org", ""),
    ],
)
def test_no_address_of_a_local_network_is_public_by_whatever_name(ip: str) -> None:
    assert not is_public(ip)
    assert not is_outer(ip)
    if ":" in ip and "%" not in ip:
        url = f"https://[{ip}]/a.jsonl#sha256={'0' * 64}"
        assert "is not a public host" in (fault_of_place(place_of(url), (".jsonl",)) or "")
        if ip not in ("::", "::1", "::ffff:127.0.0.1"):  # which have kinds of their own
            assert is_private(parse(f"/ip6/{ip}/tcp/1"))


@pytest.mark.parametrize(
    "ip", ["8.8.8.8", "2606:4700::1", "::ffff:8.8.8.8", "64:ff9b::8.8.8.8", "2002:808:808::1"]
)
def test_an_address_that_stands_for_a_public_one_is_public(ip: str) -> None:
    """Machines without IPv4 reach hosts that have no other by NAT64."""
    assert is_public(ip)
    assert is_outer(ip) == (ip in ("8.8.8.8", "2606:4700::1")), "one name of each is dialled"
