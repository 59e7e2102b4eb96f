"""A peer whose program draws the same batches as another one's says so once."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from peer.agent.online_peer import OnlinePeer
from tests.peer.statuses import BORIS, CLARA, a_status


@pytest.mark.parametrize(
    ("kind", "how"), [("batch", "the first batch is the same"), ("seed", "the random seed is")]
)
def test_the_first_peer_with_the_same_batches_is_reported_and_no_other(kind: str, how: str) -> None:
    told: list[tuple[str, dict[str, str]]] = []
    local = SimpleNamespace(batches="", event=lambda name, /, **fields: told.append((name, fields)))
    me = SimpleNamespace(_told_batches=False, local=local)

    def hear(peer: str, digest: str) -> None:
        answer = a_status(peer=peer, name=f"name of {peer}", batches=digest)
        OnlinePeer._tell_same_batches(me, answer)  # type: ignore[arg-type]

    hear(BORIS, "")  # both draw in an order of their own
    local.batches = f"{kind} 0011"
    hear(BORIS, "")
    hear(BORIS, f"{kind} 2233")
    assert not told
    hear(CLARA, f"{kind} 0011")
    hear(BORIS, f"{kind} 0011")
    ((name, fields),) = told
    assert name == "same_batches" and fields.pop("how").startswith(how)
    assert fields == {"peer": CLARA, "name": f"name of {CLARA}"}
