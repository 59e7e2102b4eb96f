"""The status of a peer that has been training for a minute."""

from __future__ import annotations

import msgspec

from dht.identity import PeerId
from peer.status import HeldOut, PeerStatus

ME, BORIS, CLARA = PeerId("12D3KooWMe"), PeerId("12D3KooWBoris"), PeerId("12D3KooWClara")


def a_status(**changes: object) -> PeerStatus:
    plain = PeerStatus(
        peer=ME,
        name="calm-otter",
        role="learner",
        phase="ready",
        steps=10,
        tokens=100,
        step_time_s=0.5,
        loss=2.5,
        held_out=HeldOut(3, 2.4, BORIS, 900),
        global_tokens=1000,
        versions=(3, 4),
        staleness=1,
        peers=2,
        fates={"processed": 100.0, "merged": 90.0, "pending": 10.0},
        rounds=7,
        rounds_missed=1,
        bytes_sent=123,
        bytes_received=456,
        blocked_s=0.25,
        up_s=60.0,
        reachable=True,
    )
    return msgspec.structs.replace(plain, **changes)
