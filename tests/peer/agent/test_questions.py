"""A peer whose program draws the same batches as another one's says so once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from peer.agent.questions import Questions
from tests.peer.statuses import BORIS, CLARA, a_status


@pytest.mark.parametrize(
    ("kind", "how"), [("batch", "the first batch is the same"), ("seed", "the random seed is")]
)
def test_the_first_peer_with_the_same_batches_is_reported_and_no_other(kind: str, how: str) -> None:
    told: list[tuple[str, dict[str, str]]] = []
    me: Any = SimpleNamespace(
        _told_batches=False, tell=lambda name, /, **fields: told.append((name, fields))
    )

    def hear(peer: str, digest: str, ours: str) -> None:
        answer = a_status(peer=peer, name=f"name of {peer}", batches=digest)
        Questions._tell_same_batches(me, answer, ours)

    hear(BORIS, "", "")  # both draw in an order of their own
    ours = f"{kind} 0011"
    hear(BORIS, "", ours)
    hear(BORIS, f"{kind} 2233", ours)
    assert not told
    hear(CLARA, ours, ours)
    hear(BORIS, ours, ours)
    ((name, fields),) = told
    assert name == "same_batches" and fields.pop("how").startswith(how)
    assert fields == {"peer": CLARA, "name": f"name of {CLARA}"}
