"""The commit that follows from joins, and what members hold against another one."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from averaging.round.gathering.roster import (
    SLACK,
    SLOWER_MAX,
    Leader,
    Load,
    compose,
    deadlines,
    recomposed,
)
from averaging.rules.policy import RoundPolicy
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


DEFAULTS = RoundPolicy()
MBIT = 1e6 / 8


def even(members: int, *, bytes_per_s: float = 0.0) -> list[Load]:
    return [Load(share=1 / members, members=members, bytes_per_s=bytes_per_s)] * members


def test_a_tiny_fragment_has_a_short_deadline() -> None:
    found = deadlines(DEFAULTS, encoded_bytes=1000, loads=even(4))

    assert DEFAULTS.upload_s < found.upload_s < DEFAULTS.upload_s + 0.1
    assert DEFAULTS.round_s < found.round_s < DEFAULTS.round_s + 0.1


def test_a_billion_parameters_over_ten_megabits_have_minutes() -> None:
    found = deadlines(DEFAULTS, encoded_bytes=500 << 20, loads=even(2, bytes_per_s=10 * MBIT))

    needed_s = (500 << 20) / (10 * MBIT)
    assert found.upload_s == DEFAULTS.upload_s + SLACK * needed_s
    assert found.round_s > 4 * needed_s


def test_the_slowest_member_sets_the_deadline_down_to_a_tenth_of_an_unknown_line() -> None:
    fast, slow = even(1, bytes_per_s=1e8)[0], Load(share=0.0, members=3, bytes_per_s=1e6)
    crawling = Load(share=0.0, members=3, bytes_per_s=1.0)

    def upload_s(*loads: Load) -> float:
        return deadlines(DEFAULTS, encoded_bytes=10**7, loads=loads).upload_s

    unknown = Load(share=0.0, members=3, bytes_per_s=0.0)

    assert upload_s(fast, slow) == DEFAULTS.upload_s + SLACK * 10.0
    assert upload_s(fast, unknown) == DEFAULTS.upload_s + SLACK * 1e7 / DEFAULTS.slow_link_bytes_s
    assert upload_s(fast, crawling) == (
        DEFAULTS.upload_s + SLACK * 1e7 / (DEFAULTS.slow_link_bytes_s / SLOWER_MAX)
    )


def test_a_reducer_of_everything_receives_from_all_others() -> None:
    lone = Load(share=1.0, members=16, bytes_per_s=1e6)

    found = deadlines(DEFAULTS, encoded_bytes=200_000, loads=[lone])

    assert found.upload_s == DEFAULTS.upload_s + SLACK * 15 * 0.2
