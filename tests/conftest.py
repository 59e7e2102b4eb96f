"""Fixtures of all tests, and the rule that no process outlives its tests."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from inspect import iscoroutinefunction, signature
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from dht.memory import virtual_loop
from tests import seeds
from tests.processes import Processes, descendants, described, still_running

# A shell that starts pytest in the background makes it and its children ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Peers register in the data home and find each other's folders there; not in the user's.
DATA_HOME = tempfile.mkdtemp(prefix="shoal-tests-")
os.environ["XDG_DATA_HOME"] = DATA_HOME

# The workers of `make test` have work for a core each, and threads that wait for one another spin.
# Measurements run without workers, and use all cores.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# The deadline of hypothesis, 0.2 s per example, would test the load of the machine.
hypothesis.settings.register_profile("shoal", deadline=None)
hypothesis.settings.load_profile("shoal")

# While tests are collected little becomes garbage, and the collector of cycles looked again and
# again at all modules and items, for a fifth of the time.
gc.disable()


LONGEST = (
    "tests/averaging/virtual/test_storms.py",
    "tests/peer/trainer/test_session.py",
)
"""The longest modules. As the last ones they would leave the other worker without work."""


def pytest_configure(config: pytest.Config) -> None:
    seeds.soak_may_run = "not soak" not in config.getoption("markexpr")


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(DATA_HOME, ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest modules: workers take modules in the order of the tests."""
    first = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: first.get(item.nodeid.partition("::")[0], len(LONGEST)))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let the collector of cycles pass over what lives as long as the tests: modules and items.

    With the usual thresholds it took a sixth of the time of simulated swarms, whose many small
    values are rarely in cycles.
    """
    gc.freeze()
    gc.set_threshold(200_000, 20, 50)
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Give a test that is a coroutine to its ``runner``."""
    test = pyfuncitem.function
    if not iscoroutinefunction(test):
        return None
    values: dict[str, Any] = pyfuncitem.funcargs
    values["runner"](test(**{name: values[name] for name in signature(test).parameters}))
    return True


@pytest.fixture(autouse=True)
def runner() -> Callable[[Coroutine[Any, Any, None]], object]:
    """Runs the coroutines of tests: on virtual time, where a module or folder has no other."""
    return virtual_loop.run


@pytest.fixture(autouse=True)
def closed_swarms() -> Iterator[None]:
    """Closes the virtual swarms that a test leaves open: each has an event loop and tasks."""
    yield
    swarms = sys.modules.get("tests.averaging.virtual.swarm")
    while swarms is not None and swarms.open_swarms:
        swarms.open_swarms[-1].close()


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    """Starts processes for a test, ends them, and fails the test when one is left."""
    with Processes(tmp_path) as started:
        yield started


@pytest.fixture
def agent_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has agents without a network run in threads of the trainer's process."""
    from peer.bridge import agent_process
    from tests.peer.agent import lone_agents

    monkeypatch.setattr(agent_process, "start", lone_agents.in_threads(agent_process.start))


@pytest.fixture
def compiler_processes() -> Iterator[None]:
    """Ends the processes that torch's compiler keeps for later."""
    yield
    from torch._inductor.async_compile import shutdown_compile_workers  # slow to import

    shutdown_compile_workers()


@pytest.fixture(autouse=True, scope="module")
def _no_process_is_left() -> Iterator[None]:
    """Fails a module whose tests leave a process running."""
    before = set(descendants())
    yield
    if set(descendants()) - before:
        gc.collect()  # some end with the object that has started them
    left = still_running(set(descendants()) - before, timeout_s=30)
    text = described(left)
    for process in left:
        process.kill()
    assert not left, "processes were left behind:\n" + "\n".join(text)
