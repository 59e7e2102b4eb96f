"""The patches of hivemind, and the refusal of versions that they were not written for."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dht.libp2p import hivemind_patches
from dht.libp2p.hivemind_patches import (
    HivemindVersionError,
    SteadyControlClient,
    TimedStorage,
    check_source,
    check_version,
    varint,
)


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


def test_changed_code_is_refused_even_under_a_known_version() -> None:
    with pytest.raises(HivemindVersionError, match=r"source of TimedStorage\.get has changed"):
        check_source(TimedStorage.get, "0" * 16, found="1.1.12")


def test_the_patches_are_in_place() -> None:
    assert TimedStorage.store is hivemind_patches._store
    assert hivemind_patches.p2pclient.ControlClient is SteadyControlClient


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


@pytest.mark.parametrize(
    ("value", "encoded"), [(0, b"\0"), (127, b"\x7f"), (128, b"\x80\x01"), (300, b"\xac\x02")]
)
def test_lengths_are_written_as_the_daemon_reads_them(value: int, encoded: bytes) -> None:
    assert varint(value) == encoded
