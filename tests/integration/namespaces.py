"""Checks in network namespaces."""

from __future__ import annotations

import subprocess
import sys


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
