"""What all tests share: fixtures, and the rule that no process outlives its tests."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests.processes import Processes, descendants, described, still_running

# A shell that starts us in the background has us ignore Ctrl-C, and our children with us.
signal.signal(signal.SIGINT, signal.default_int_handler)

# hypothesis fails an example that takes over 0.2 s: that tests how busy the machine is.
hypothesis.settings.register_profile("shoal", deadline=None)
hypothesis.settings.load_profile("shoal")


IN_VIRTUAL_TIME = ("averaging", "peer/lab/chaos", "peer/lab/simulate")
"""Folders whose tests start no process and wait for no clock."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """For ``make test``, which has two workers: one for the tests that start processes, as these
    would disturb each other, the other for whatever only computes, module by module."""
    here = Path(__file__).parent
    for item in items:
        where = item.path.relative_to(here).as_posix()
        alone = where.startswith(IN_VIRTUAL_TIME)
        item.add_marker(pytest.mark.xdist_group(where if alone else "processes"))


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    """Starts processes for a test, ends them, and fails the test when one is left."""
    with Processes(tmp_path) as started:
        yield started


@pytest.fixture(autouse=True, scope="module")
def _no_process_is_left() -> Iterator[None]:
    """Fails the module whose tests leave a process running. Each test need not ask for it."""
    before = set(descendants())
    yield
    left = still_running(set(descendants()) - before, timeout_s=30)
    text = described(left)
    for process in left:
        process.kill()
    assert not left, "processes were left behind:\n" + "\n".join(text)
