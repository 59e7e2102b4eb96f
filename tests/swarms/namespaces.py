"""Checks in network namespaces."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.swarms.topology import cannot_build


@pytest.fixture(autouse=True)
def needs_namespaces(request: pytest.FixtureRequest) -> None:
    """Skip a slow test where namespaces cannot be made."""
    if request.node.get_closest_marker("slow") and (reason := cannot_build()) is not None:
        pytest.skip(f"wide-area networks cannot be made here: {reason}")


def reaches(name: str, address: str) -> bool:
    probe = (
        "import socket, sys\n"
        "s = socket.socket(); s.settimeout(1)\n"
        "try: s.connect((sys.argv[1], 9))\n"
        "except ConnectionRefusedError: sys.exit(0)\n"  # a host answered
        "except OSError: sys.exit(1)\n"
    )
    command = ["ip", "netns", "exec", name, sys.executable, "-c", probe, address]
    return subprocess.run(command, check=False).returncode == 0
