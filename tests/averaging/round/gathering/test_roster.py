"""The commit that follows from joins, and what members hold against another one."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from averaging.round.gathering.roster import Leader, compose, recomposed
from dht.identity import PeerId
from tests.averaging.round.machines import ANNA, BORIS, ME, POLICY, TOPIC, join, standing


@pytest.mark.parametrize(
    ("peers", "eta", "other"), [((ME, ANNA), 0.7, 1.0), ((ME, ANNA, BORIS), 1.0, 0.7)]
)
def test_a_round_of_two_steps_by_its_own_learning_rate_and_no_other_is_accepted(
    peers: tuple[PeerId, ...], eta: float, other: float
) -> None:
    policy = replace(POLICY, eta=1.0, eta_of_two=0.7)
    commit = compose(
        Leader(peer=ME, incarnation=1, topic=TOPIC, fragment=0, nonce=1),
        [(peer, join(standing("start"))) for peer in peers],
        policy,
        encoded_bytes=lambda codec: 1 << 20,
    )
    assert commit.eta == eta

    changed = msgspec.structs.replace(commit, eta=other)
    assert recomposed(changed, policy, encoded_bytes=lambda codec: 1 << 20) == commit
