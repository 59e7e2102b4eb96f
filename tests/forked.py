"""Test modules in processes that are forked from one which has imported what they need.

``pytest --forks 3`` collects nothing itself: it imports what most modules need (``PRELOADED``),
forks a process for each test module, at most three at a time, and shows their reports as if it had
run them. Only that process collects the module. So nothing is imported, collected or compiled
twice, the memory of a module is given back with its process, and processes that wait for others
leave the processor to the rest.

The first process has one thread and has run no test when it forks. It imports and computes nothing:
threads of numerical libraries would not exist in its children.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

FIRST = (
    "tests/integration/test_chaos.py",
    "tests/test_examples.py",
    "tests/integration/",
    "tests/averaging/live/test_",
    "tests/averaging/simulated/test_",
)
"""Modules that take longest, so that none of them is the last one."""

PRELOADED = (
    ("tests/", ("numpy", "hypothesis.strategies", "dht.libp2p.hivemind_host")),
    ("tests/averaging/", ("averaging.live.averager",)),
    ("tests/peer/", ("torch._dynamo", "peer.trainer.session", "peer.agent.agent", "peer.cli")),
    ("tests/peer/model/", ("transformers.models.llama.modeling_llama", "peft")),
)
"""What is imported before the first module in a folder is run."""

INTERRUPT_PATIENCE_S = 30.0
"""Time for processes to release their fixtures after Ctrl-C or a failure with ``-x``."""


def pytest_addoption(parser: pytest.Parser) -> None:
    what = "Run test modules in processes of their own, that many at a time."
    parser.addoption("--forks", type=int, default=0, metavar="COUNT", help=what)


def pytest_configure(config: pytest.Config) -> None:
    if count := config.getoption("--forks"):
        # Processes have work for a core each, and threads that wait for one another spin.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        config.pluginmanager.register(ForkedModules(config, count))


@dataclass(eq=False)
class _Running:
    """A process that runs one test module."""

    module: str
    pid: int
    pipe: int
    log: Path
    received: bytearray = field(default_factory=bytearray)


class ForkedModules:
    """The plugin of ``--forks``."""

    def __init__(self, config: pytest.Config, count: int) -> None:
        self._config = config
        self._count = count
        self._to_preload = list(PRELOADED)
        self._log_dir = Path()
        self._started = 0

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> bool:
        """Collect nothing here: each module is collected where it runs."""
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        waiting = deque(_modules(self._config))
        # One base for all: the names of folders in it are made by ``mkdir``, so they never clash.
        self._log_dir = self._config._tmp_path_factory.mktemp("output")  # type: ignore[attr-defined]
        running: set[_Running] = set()
        with selectors.DefaultSelector() as selector:
            try:
                while waiting or running:
                    while waiting and len(running) < self._count:
                        started = self._start(session, waiting.popleft())
                        running.add(started)
                        selector.register(started.pipe, selectors.EVENT_READ, started)
                    for key, _ in selector.select():
                        job: _Running = key.data
                        if data := os.read(job.pipe, 1 << 16):
                            job.received += data
                            continue
                        selector.unregister(job.pipe)
                        running.remove(job)
                        self._end(session, job)
                    if session.shouldfail:
                        raise session.Failed(session.shouldfail)
            finally:
                _interrupt(running)
        return True

    def _start(self, session: pytest.Session, module: str) -> _Running:
        self._preload(module)
        self._started += 1
        own = self._log_dir / f"{self._started}-{Path(module).stem}"
        own.mkdir()
        log = own / "output.txt"
        assert threading.active_count() == 1, "a thread would be missing in the new process"
        read, write = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            status = 70
            try:
                os.close(read)
                status = self._run(session, module, write, log)
            finally:
                os._exit(status)
        os.close(write)
        return _Running(module, pid, read, log)

    def _preload(self, module: str) -> None:
        now = [entry for entry in self._to_preload if module.startswith(entry[0])]
        for entry in now:
            self._to_preload.remove(entry)
            for name in entry[1]:
                with contextlib.suppress(ImportError):  # of an extra that is not installed
                    importlib.import_module(name)
        if now:
            _read_constants()
            gc.collect()
            gc.freeze()  # a collection would write to the pages that processes share

    # -- in the process of a module -------------------------------------------------------------

    def _run(self, session: pytest.Session, module: str, pipe: int, log: Path) -> int:
        """Collect and run one module; returns the status of the process."""
        config = self._config
        os.environ["XDG_DATA_HOME"] = str(log.parent)  # where peers of one machine find each other
        capture = config.pluginmanager.getplugin("capturemanager")
        capture.stop_global_capturing()
        with log.open("wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        capture.start_global_capturing()
        capture.suspend_global_capture()
        config.pluginmanager.unregister(self)
        config.pluginmanager.register(_Sender(config, pipe))
        config.args = [str(config.rootpath / module)]
        session.testsfailed = 0  # pytest runs nothing after failures that it takes for its own
        try:
            config.hook.pytest_collection(session=session)
            config.hook.pytest_runtestloop(session=session)
        except (session.Failed, session.Interrupted):
            pass  # the reports say why
        except BaseException:
            traceback.print_exc()
            return 71
        finally:
            session._setupstate.teardown_exact(None)
            sys.stdout.flush()
            sys.stderr.flush()
        return 0

    # -- in the first process -------------------------------------------------------------------

    def _end(self, session: pytest.Session, job: _Running) -> None:
        os.close(job.pipe)
        _, status = os.waitpid(job.pid, 0)
        last, left = job.module, 0
        hook = self._config.hook
        for kind, data in map(json.loads, job.received.splitlines()):
            if kind == "start":
                last = data[0]
                hook.pytest_runtest_logstart(nodeid=data[0], location=tuple(data[1]))
            elif kind == "finish":
                last, left = job.module, left - 1
                hook.pytest_runtest_logfinish(nodeid=data[0], location=tuple(data[1]))
            elif kind == "collected":
                session.testscollected += data
                left += data
            elif kind == "deselected":
                hook.pytest_deselected(items=[SimpleNamespace()] * data)  # they are counted
            else:
                report = hook.pytest_report_from_serializable(config=self._config, data=data)
                if isinstance(report.longrepr, list):  # a place and a reason: JSON has no tuples
                    report.longrepr = tuple(report.longrepr)
                if kind == "module":
                    hook.pytest_collectreport(report=report)
                else:
                    hook.pytest_runtest_logreport(report=report)
        stopped_early = left != 0 and not self._config.getoption("maxfail")
        if status != 0 or stopped_early:
            code = os.waitstatus_to_exitcode(status)
            text = f"the process of {job.module} ended with {code}, {left} tests before its end; "
            text += "it said:\n"
            text += job.log.read_text(errors="replace")[-10_000:]
            hook.pytest_runtest_logreport(report=_crashed(last, text))


class _Sender:
    """Sends the reports of a module to the first process."""

    def __init__(self, config: pytest.Config, pipe: int) -> None:
        self._config = config
        self._pipe = pipe

    def _send(self, kind: str, data: Any) -> None:
        line = memoryview(json.dumps([kind, data]).encode() + b"\n")
        while line:
            line = line[os.write(self._pipe, line) :]

    def _serialized(self, report: Any) -> Any:
        return self._config.hook.pytest_report_to_serializable(config=self._config, report=report)

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        self._send("start", (nodeid, location))

    def pytest_runtest_logfinish(self, nodeid: str, location: Any) -> None:
        self._send("finish", (nodeid, location))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._send("test", self._serialized(report))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if not report.passed:
            self._send("module", self._serialized(report))

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        self._send("deselected", len(items))

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._send("collected", len(session.items))


def _modules(config: pytest.Config) -> Iterator[str]:
    """Names of all test modules among the arguments, relative to the root, longest first."""
    patterns = config.getini("python_files")
    found: set[str] = set()
    for argument in config.args:
        path, _, inner = argument.partition("::")
        where = config.invocation_params.dir / path
        files = [where]
        if where.is_dir():
            files = [file for pattern in patterns for file in where.rglob(pattern)]
        names = [str(file.relative_to(config.rootpath)) for file in files]
        found |= {f"{name}::{inner}" if inner else name for name in names}

    def place(name: str) -> int:
        return next((n for n, first in enumerate(FIRST) if name.startswith(first)), len(FIRST))

    return iter(sorted(found, key=lambda name: (place(name), name)))


def _read_constants() -> None:
    """Let hypothesis read the constants of all imported modules once, and not in each process."""
    from hypothesis import given, settings
    from hypothesis import strategies as st

    @settings(max_examples=1, database=None)
    @given(st.none())
    def nothing(_: None) -> None:
        pass

    nothing()


def _crashed(nodeid: str, text: str) -> pytest.TestReport:
    location = (nodeid.partition("::")[0], None, nodeid)
    return pytest.TestReport(nodeid, location, {}, "failed", text, "call")


def _interrupt(running: set[_Running]) -> None:
    """End all processes: with SIGINT, so that they release their fixtures, or else with SIGKILL."""
    for job in running:
        os.kill(job.pid, signal.SIGINT)
        os.close(job.pipe)
    deadline = time.monotonic() + INTERRUPT_PATIENCE_S
    for job in running:
        while os.waitpid(job.pid, os.WNOHANG)[0] == 0:
            if time.monotonic() > deadline:
                os.kill(job.pid, signal.SIGKILL)
                os.waitpid(job.pid, 0)
                break
            time.sleep(0.05)
