"""How trainers of tests start the agent without a network (``tests.peer.agent.lone_agent``).

A process of its own takes 0.4 s of a processor until it has imported what it needs. So the fixture
``agent_threads`` (``tests/conftest.py``) has the same agent, with the same line, doorbell and
memory, run in a thread. What only a process shows, such as its death, starts ``PROCESS``.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from peer.bridge.agent_process import LineSettings
from tests.peer.agent import lone_agent

AGENT = (sys.executable, "-m", "tests.peer.agent.lone_agent")
"""A thread where ``agent_threads`` is used, and else a process."""

PROCESS = (sys.executable, "-u", "-m", "tests.peer.agent.lone_agent")
"""Always a process."""

QUICK = LineSettings(beat_s=0.05, silence_max_s=20.0, restart_first_s=0.05, restart_max_s=0.1)


class AgentThread:
    """A lone agent in a thread, with what a line does with a process."""

    pid = os.getpid()

    def __init__(self, handed: Sequence[int], log_path: Path) -> None:
        self.returncode: int | None = None
        self._log_path = log_path
        self._loop = asyncio.new_event_loop()
        # A process would inherit the descriptors, which are closed here once it has started.
        own = [os.dup(descriptor) for descriptor in handed]
        self._task = self._loop.create_task(lone_agent.main(*own))
        self._thread = threading.Thread(target=self._live, name="lone agent", daemon=True)
        self._thread.start()

    def _live(self) -> None:
        asyncio.set_event_loop(self._loop)
        code = 0
        try:
            self._loop.run_until_complete(self._task)
        except BaseException:
            code = 1
            with self._log_path.open("a") as log:
                traceback.print_exc(file=log)
        finally:
            self._loop.close()
            self.returncode = code

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._thread.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("lone agent", timeout or 0.0)
        return self.returncode

    def kill(self) -> None:
        self._loop.call_soon_threadsafe(self._task.cancel)


def in_threads(
    start: Callable[[Sequence[str], Sequence[int], Path], subprocess.Popen[bytes]],
) -> Callable[[Sequence[str], Sequence[int], Path], subprocess.Popen[bytes] | AgentThread]:
    """``peer.bridge.agent_process.start``, but ``AGENT`` becomes a thread."""

    def started(
        command: Sequence[str], handed: Sequence[int], log_path: Path
    ) -> subprocess.Popen[bytes] | AgentThread:
        if tuple(command) == AGENT:
            return AgentThread(handed, log_path)
        return start(command, handed, log_path)

    return started
