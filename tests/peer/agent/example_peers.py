"""Examples of a member of a run: as others see it, and as its agent holds it."""

from __future__ import annotations

from pathlib import Path

from averaging.numbers.layout import Layout, TensorSpec
from dht.identity import Identity, PeerId, RunId
from dht.membership.table import Member
from dht.records import PeerRecord
from peer.agent.peer import Peer
from peer.agent.services import Role, Seat
from peer.bridge.settings import PeerSettings
from peer.guest.enforcement import Guest
from peer.run_file.sections import RunFile

BORIS = PeerId("12D3KooWBoris")


def member(**facts: object) -> Member:
    said = {"role": "learner", **facts}
    record = PeerRecord(protocol=(1, 1), incarnation=1, **said)  # type: ignore[arg-type]
    return Member(
        run=RunId("run"),
        peer=BORIS,
        record=record,
        sequence=1,
        sealed=b"",
        depth=0,
        first_seen=1.0,
        record_seen_at=2.0,
        expires_at=9.0,
    )


def peer_in(folder: Path, role: Role, run: RunFile | None = None) -> Peer:
    """A learner of one small fragment, without a network."""
    seat = Seat(
        run=run or RunFile(),
        identity=Identity.from_seed(bytes(32)),
        directory=folder,
        role="learner",
        settings=PeerSettings(name="anna", listen=(), page=None),
    )
    layout = Layout.build([TensorSpec("w", (4, 4), "float32")], 1)
    return Peer(seat, layout, Guest(folder), role)
