"""Getting a run file by a link, in a process of its own."""

from __future__ import annotations

import socket
import subprocess
import sys
import time

import pytest

from dht.identity import Identity
from peer import fetch
from tests.processes import Processes, descendants, described, still_running

RUN = "ab" * 32
ASK = """
import sys
from peer.find import ask_peers
from peer.link import parse_link
ask_peers(parse_link(sys.argv[1]))
"""


def test_a_link_that_names_nobody_to_ask_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert fetch.main([f"shoal://{RUN}"]) == 3
    assert "no seed" in capsys.readouterr().err


def test_what_is_no_link_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert fetch.main(["shoal://"]) == 3
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert fetch.main([]) == 2


def test_who_joins_waits_for_neither_the_agent_nor_torch_to_be_imported() -> None:
    script = "import sys, peer.fetch; print(*sorted(sys.modules))"
    shown = subprocess.run(
        [sys.executable, "-P", "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    modules = set(shown.stdout.split())
    assert "dht.hivemind_host" in modules
    assert not modules & {"torch", "peer.agent", "averaging", "aiohttp", "rich"}


def test_who_asks_for_it_takes_the_asking_process_along_when_it_is_killed(
    processes: Processes,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes calls, and never says a word
        port = silent.getsockname()[1]
        peer = Identity.generate().peer_id
        link = f"shoal://{RUN}?seed=/ip4/127.0.0.1/tcp/{port}/p2p/{peer}"
        asking = processes.python("-c", ASK, link)
        deadline = time.monotonic() + 60
        while len(descendants(asking.pid)) < 2:  # the fetching process, and its daemon
            assert asking.poll() is None, processes.output_of(asking)
            assert time.monotonic() < deadline
            time.sleep(0.05)
        children = processes.kill_hard(asking)
        left = still_running(children, timeout_s=20.0)
        assert not left, described(left)
