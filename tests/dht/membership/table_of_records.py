"""A peer table that is fed with signed records, for tests of membership."""

from __future__ import annotations

from dht.identity import Identity, PeerId, RunId
from dht.membership.table import MembershipSettings, PeerTable, bucket_key, bucket_of
from dht.records import PeerRecord, seal

ME = Identity.from_seed(b"m" * 32)
ANNA = Identity.from_seed(b"a" * 32)
BORIS = Identity.from_seed(b"b" * 32)
RUN = RunId("5f" * 32)


class TableOfRecords:
    """Feeds a table the way ``dht.presence`` does."""

    def __init__(self, me: PeerId = ME.peer_id, **settings: float) -> None:
        self.table = PeerTable(RUN, me, MembershipSettings(**settings))  # type: ignore[arg-type]

    def record(
        self,
        identity: Identity,
        now: float,
        *,
        sequence: int,
        incarnation: int = 1,
        reachable: bool | None = True,
        leaving: bool = False,
        trains: bool = False,
        depth: int = 0,
        addresses: tuple[bytes, ...] = (),
    ) -> bool:
        record = PeerRecord(
            protocol=(1, 1),
            role="learner",
            incarnation=incarnation,
            reachable=reachable,
            leaving=leaving,
            trains=trains,
            addresses=addresses,
            name="n",
        )
        key = bucket_key(RUN, bucket_of(identity.peer_id, depth))
        data = seal(record, identity, key=key, sequence=sequence, ttl_s=30)
        taken = self.table.take(data, now=now)
        assert self.table.rejected.keys() <= {"full", "replayed"}
        return taken is not None

    def live(self, now: float) -> list[PeerId]:
        return [member.peer for member in self.table.live(now)]

    def established(self, now: float) -> list[PeerId]:
        return [member.peer for member in self.table.established(now)]
