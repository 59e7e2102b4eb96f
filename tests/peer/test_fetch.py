"""Getting a run file by a link, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

from peer import fetch

RUN = "ab" * 32


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
