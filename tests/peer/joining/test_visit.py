"""``shoal status`` of a run."""

from __future__ import annotations

import pytest

from peer import status
from peer.joining.visit import RunStatus, status_lines
from tests.peer.statuses import a_status


def test_a_resting_peer_tells_the_reason_and_its_limits() -> None:
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
def test_control_characters_in_a_status_are_refused(
    changes: dict[str, object],
) -> None:
    with pytest.raises(ValueError, match="status"):
        status.decode(status.encode(a_status(**changes)))
