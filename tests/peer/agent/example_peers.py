"""An example of a member of a run, as others see it."""

from __future__ import annotations

from dht.identity import PeerId
from dht.membership.table import Member
from dht.records import PeerRecord

BORIS = PeerId("12D3KooWBoris")


def member(**facts: object) -> Member:
    said = {"role": "learner", **facts}
    record = PeerRecord(protocol=(1, 1), incarnation=1, **said)  # type: ignore[arg-type]
    return Member(
        peer=BORIS,
        record=record,
        sequence=1,
        sealed=b"",
        depth=0,
        first_seen=1.0,
        record_seen_at=2.0,
        expires_at=9.0,
    )
