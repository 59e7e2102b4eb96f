"""Settings that the daemon gets at its start."""

from __future__ import annotations

import asyncio

import pytest

from dht.libp2p.hivemind_daemon import processors
from dht.libp2p.hivemind_host import STRANGER, HivemindHost
from dht.memory.host import identity_of


@pytest.mark.parametrize(("has", "may_use"), [(1, 1), (2, 1), (3, 1), (4, 2), (64, 2)])
def test_the_daemon_leaves_processors_to_whoever_trains(has: int, may_use: int) -> None:
    assert processors(has) == may_use


async def test_a_host_whose_closing_is_cut_off_leaves_no_folder() -> None:
    """A peer that ended while it closed the stranger of a dial-back left one."""
    host = await HivemindHost.open(identity_of("anna"), STRANGER)
    folder = host._run_directory.path
    assert folder.exists()
    closing = asyncio.create_task(host.close())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.gather(closing, return_exceptions=True)
    await host.close()
    assert not folder.exists()
