"""hivemind is imported without torch, and another version than was read is refused."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dht.libp2p.hivemind_imports import HivemindVersionError, check_version


def python(script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.strip()


def test_a_version_that_nobody_has_read_is_refused() -> None:
    check_version("1.1.12")
    for other in ("1.1.11", "1.1.13", "1.2.0"):
        with pytest.raises(HivemindVersionError, match=other):
            check_version(other)


def test_importing_the_host_brings_no_torch_and_changes_nobodys_logging() -> None:
    loaded = python(
        "import logging, sys\n"
        "before = list(logging.getLogger().handlers)\n"
        "import dht.libp2p.hivemind_host\n"
        "assert logging.getLevelName(logging.WARNING) == 'WARNING'\n"
        "assert logging.getLogger().handlers == before\n"
        "assert not logging.getLogger('hivemind').handlers\n"
        "print(*sorted({'torch', 'hivemind.averaging', 'hivemind.dht.dht'} & set(sys.modules)))"
    )
    assert loaded == ""


@pytest.mark.slow  # it imports torch
def test_the_rest_of_hivemind_is_there_for_whoever_asks_for_it() -> None:
    """The benchmark against hivemind's own averager does."""
    pytest.importorskip("torch")
    shown = python(
        "import dht.libp2p.hivemind_host\n"
        "import hivemind\n"
        "from hivemind.dht import DHT\n"
        "from hivemind.utils import nested_flatten\n"
        "print(hivemind.DHT is DHT, hivemind.__version__)"
    )
    assert shown == "True 1.1.12"
