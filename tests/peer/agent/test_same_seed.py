"""A peer whose program draws the same batches as another one's says so once."""

from __future__ import annotations

from types import SimpleNamespace

from peer.agent.online_peer import OnlinePeer
from tests.peer.statuses import BORIS, CLARA, a_status


def test_the_first_peer_with_the_same_seed_is_reported_and_no_other() -> None:
    told: list[tuple[str, dict[str, str]]] = []
    local = SimpleNamespace(seeded="", event=lambda name, /, **fields: told.append((name, fields)))
    me = SimpleNamespace(_told_seed=False, local=local)

    def hear(peer: str, digest: str) -> None:
        answer = a_status(peer=peer, name=f"name of {peer}", seeded=digest)
        OnlinePeer._tell_same_seed(me, answer)  # type: ignore[arg-type]

    hear(BORIS, "")  # neither of them sets one
    local.seeded = "0011"
    hear(BORIS, "")
    hear(BORIS, "2233")
    assert not told
    hear(CLARA, "0011")
    hear(BORIS, "0011")
    assert told == [("same_seed", {"peer": CLARA, "name": f"name of {CLARA}"})]
