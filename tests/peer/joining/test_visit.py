"""What `shoal status` says of a run to somebody who is no part of it."""

from __future__ import annotations

import pytest

from peer import status
from peer.joining.visit import RunStatus, status_lines
from tests.peer.statuses import a_status


def test_who_rests_says_why_and_what_its_owner_allows() -> None:
    resting = a_status(
        name="anna",
        rest="paused; continue with `shoal resume`",
        limits=("paused", "up 2 MB/s", "12.3 GB of 200 GB a month"),
    )
    heard = status.decode(status.encode(resting))
    lines = status_lines(RunStatus("ab" * 32, (heard, a_status(name="boris")), {}))
    told = [line for line in lines if "resting" in line or "limits" in line]
    assert told == [
        "  resting: paused; continue with `shoal resume`; limits: paused, up 2 MB/s, "
        "12.3 GB of 200 GB a month"
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"rest": "\x1b[2J"},
        {"limits": ("up 2 MB/s", "\x07")},
        {"limits": ("x" * 65,)},
        {"limits": ("x",) * 17},
    ],
)
def test_what_a_stranger_says_of_its_limits_does_nothing_to_a_terminal(
    changes: dict[str, object],
) -> None:
    with pytest.raises(ValueError, match="status"):
        status.decode(status.encode(a_status(**changes)))
