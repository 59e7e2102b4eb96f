"""Two peers that meet break no streams, and no daemon is started again for what they learn."""

from __future__ import annotations

import re

import pytest

from tests.processes import Processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def test_meetings_of_two_peers_break_no_stream_and_restart_no_daemon(processes: Processes) -> None:
    """How long they wait for each other depends on the machine: the program tells that."""
    command = ["-m", "tests.integration.meetings", "--meetings", "4", "--within", "300"]
    measuring = processes.python(*command)
    measuring.wait(timeout=390)
    output = processes.output_of(measuring)
    summary = re.search(r"^4 meetings: (\d+) broken .* (\d+) daemon restarts", output, re.MULTILINE)
    assert summary is not None, output
    assert summary.groups() == ("0", "0"), output
