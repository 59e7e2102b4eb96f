"""Network distance of members."""

from __future__ import annotations

from dataclasses import replace

import msgspec
from multiaddr import Multiaddr

from dht.addresses import Scope, pack
from dht.identity import PeerId, RunId
from dht.membership.reachability import Proximity
from dht.membership.table import Member
from dht.records import PeerRecord

OWN = Multiaddr("/ip4/192.168.1.2/tcp/7700")


def member(*addresses: str) -> Member:
    return Member(
        run=RunId("run"),
        peer=PeerId("12D3KooWBoris"),
        record=PeerRecord(
            protocol=(1, 1),
            role="learner",
            incarnation=1,
            addresses=tuple(pack(Multiaddr(address)) for address in addresses),
        ),
        sequence=1,
        sealed=b"",
        depth=0,
        first_seen=1.0,
        record_seen_at=2.0,
        expires_at=9.0,
    )


def test_a_member_in_a_network_like_ours_that_does_not_answer_is_in_another_home() -> None:
    near = Proximity()
    near.own = (OWN,)

    def scope(one: Member) -> Scope | None:
        return near.scope_that_counts([one], now=3.0, count_connected=False)

    for address, guess in ((OWN, Scope.MACHINE), ("/ip4/192.168.1.3/tcp/7700", Scope.NETWORK)):
        alike = member(str(address), "/ip4/127.0.0.1/tcp/7700")
        assert scope(alike) is guess
        assert scope(replace(alike, failed_at=2.5)) is Scope.INTERNET
        hidden = msgspec.structs.replace(alike.record, reachable=False)
        assert scope(replace(alike, record=hidden)) is Scope.INTERNET
    here = member("/ip4/127.0.0.1/tcp/7700")
    assert scope(replace(here, failed_at=2.5)) is Scope.MACHINE, "loopback is no private network"
