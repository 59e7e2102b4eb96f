"""Deadlines of a round follow its bytes."""

from __future__ import annotations

from averaging.rules.deadlines import SLACK, SLOWER_MAX, Load, deadlines
from averaging.rules.policy import RoundPolicy

POLICY = RoundPolicy()
MBIT = 1e6 / 8


def even(members: int, *, bytes_per_s: float = 0.0) -> list[Load]:
    return [Load(share=1 / members, members=members, bytes_per_s=bytes_per_s)] * members


def test_a_tiny_fragment_has_a_short_deadline() -> None:
    found = deadlines(POLICY, encoded_bytes=1000, loads=even(4))

    assert POLICY.upload_s < found.upload_s < POLICY.upload_s + 0.1
    assert POLICY.round_s < found.round_s < POLICY.round_s + 0.1


def test_a_billion_parameters_over_ten_megabits_have_minutes() -> None:
    found = deadlines(POLICY, encoded_bytes=500 << 20, loads=even(2, bytes_per_s=10 * MBIT))

    needed_s = (500 << 20) / (10 * MBIT)
    assert found.upload_s == POLICY.upload_s + SLACK * needed_s
    assert found.round_s > 4 * needed_s


def test_the_slowest_member_sets_the_deadline_down_to_a_tenth_of_an_unknown_line() -> None:
    fast, slow = even(1, bytes_per_s=1e8)[0], Load(share=0.0, members=3, bytes_per_s=1e6)
    crawling = Load(share=0.0, members=3, bytes_per_s=1.0)

    def upload_s(*loads: Load) -> float:
        return deadlines(POLICY, encoded_bytes=10**7, loads=loads).upload_s

    unknown = Load(share=0.0, members=3, bytes_per_s=0.0)

    assert upload_s(fast, slow) == POLICY.upload_s + SLACK * 10.0
    assert upload_s(fast, unknown) == POLICY.upload_s + SLACK * 1e7 / POLICY.slow_link_bytes_s
    assert upload_s(fast, crawling) == (
        POLICY.upload_s + SLACK * 1e7 / (POLICY.slow_link_bytes_s / SLOWER_MAX)
    )


def test_a_reducer_of_everything_receives_from_all_others() -> None:
    lone = Load(share=1.0, members=16, bytes_per_s=1e6)

    found = deadlines(POLICY, encoded_bytes=200_000, loads=[lone])

    assert found.upload_s == POLICY.upload_s + SLACK * 15 * 0.2
