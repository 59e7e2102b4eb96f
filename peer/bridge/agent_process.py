"""The trainer's end of the line: the agent as a child process, replaced when it dies.

Three descriptors are handed to the agent when it is started: a unix socket for messages
(``peer.bridge.messages``, both ways), a pipe into which the trainer drops a byte when it has passed
a slot on (``peer.bridge.shared_memory``), and the shared memory itself. None of them has a name in
the file system, so none can be left behind, and the end of either process closes the socket of the
other one.

``AgentProcess`` does its work in a thread of its own: a trainer deep in a kernel keeps its agent,
and a dead agent is replaced without the training loop. The training loop never waits here.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from peer.bridge.messages import (
    Beat,
    Begin,
    Frames,
    FromAgent,
    FromTrainer,
    Leave,
    LineBroken,
    Over,
    decode_from_agent,
    pack,
)
from peer.bridge.shared_memory import SharedTensors
from peer.processes import child_environment, keep_from_children, release

logger = logging.getLogger(__name__)

COMMAND = (sys.executable, "-P", "-m", "peer.agent")
HEALTHY_AFTER_S = 60.0
"""Lifetime of an agent after which the pause before a restart begins at its least again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineSettings:
    """Timing of signs of life and of restarts."""

    beat_s: float = 1.0
    silence_max_s: float = 60.0
    """Time without a message after which an agent is killed and replaced."""
    restart_first_s: float = 0.5
    restart_max_s: float = 60.0
    """Longest pause before a restart; the pause doubles from one to the next."""
    end_patience_s: float = 10.0
    """Time for an agent to save and say goodbye after the line is closed; then it is killed."""

    def __post_init__(self) -> None:
        if self.silence_max_s < 3 * self.beat_s:
            raise ValueError(
                f"silence_max_s is {self.silence_max_s}; it must outlast 3 beats of {self.beat_s} s"
            )


def start(command: Sequence[str], handed: Sequence[int], log_path: Path) -> subprocess.Popen[bytes]:
    """Start an agent with the descriptors that it is handed."""
    with log_path.open("ab") as log:
        return subprocess.Popen(
            [*command, *(str(descriptor) for descriptor in handed)],
            pass_fds=handed,
            env=child_environment(os.environ),
            # Ctrl-C at the terminal is for the trainer, which tells the agent to leave.
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )


class _Running:
    """One running agent."""

    def __init__(
        self, command: Sequence[str], memory: SharedTensors, log_path: Path, *, silence_max_s: float
    ) -> None:
        ours, theirs = socket.socketpair()
        bell_read, self.bell = os.pipe()
        os.set_blocking(self.bell, False)
        handed = (theirs.fileno(), bell_read, memory.descriptor)
        try:
            self.process = start(command, handed, log_path)
        except BaseException:
            ours.close()
            os.close(self.bell)
            raise
        finally:
            theirs.close()
            os.close(bell_read)
        keep_from_children(ours.fileno())
        self.socket = ours
        # It imports for seconds before it reads a large layout; an agent that never reads it hangs.
        self.socket.settimeout(silence_max_s)
        self.frames = Frames()
        self.since = self.heard_at = self.beat_at = time.monotonic()

    def send(self, message: FromTrainer) -> None:
        self.socket.sendall(pack(message))

    def end(self, *, patience_s: float) -> int:
        """Close the line, which ends the agent, or kill it. Returns its exit code."""
        release(self.socket.fileno())
        self.socket.close()
        with contextlib.suppress(OSError):
            os.close(self.bell)
        try:
            return self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


class AgentProcess:
    """Starts the agent, listens to it, and starts it again when it dies.

    ``hear`` is called on this object's own thread with each message, and ``died(exit_code,
    restart_in_s)`` after each unexpected end. Both must not block.
    """

    def __init__(
        self,
        begin: Begin,
        memory: SharedTensors,
        *,
        log_path: Path,
        hear: Callable[[FromAgent], None],
        died: Callable[[int, float], None] = lambda code, pause: None,
        settings: LineSettings | None = None,
        command: Sequence[str] = COMMAND,
    ) -> None:
        self._begin = begin
        self._memory = memory
        self._log_path = log_path
        self._hear = hear
        self._died = died
        self._settings = settings or LineSettings()
        self._command = tuple(command)
        self._running: _Running | None = None
        self._outbox: deque[FromTrainer] = deque(maxlen=1024)
        self._wake_read, self._wake = socket.socketpair()
        self._wake.setblocking(False)
        self._wake_read.setblocking(False)
        self._leaving_until: float | None = None
        self._thread = threading.Thread(target=self._live, name="agent line", daemon=True)
        self.restarts = 0
        self.over: Over | None = None
        """The last message of an agent that has ended for good."""

    def __repr__(self) -> str:
        return f"AgentProcess(pid={self.pid}, restarts={self.restarts}, over={self.over})"

    @property
    def pid(self) -> int | None:
        running = self._running
        return None if running is None else running.process.pid

    @property
    def alive(self) -> bool:
        running = self._running
        return running is not None and running.process.poll() is None

    def start(self) -> None:
        self._thread.start()

    def ring(self) -> None:
        """Tell the agent that a slot was passed on. Never waits: a full pipe has rung already."""
        running = self._running
        if running is not None:
            with contextlib.suppress(BlockingIOError, BrokenPipeError, OSError):
                os.write(running.bell, b"\1")

    def send(self, message: FromTrainer) -> None:
        """Queue a message to the agent, or to the next one if none is running."""
        self._outbox.append(message)
        self._poke()

    def leave(self, timeout_s: float, *, patience_s: float = 0.0) -> None:
        """Ask the agent to finish and end; ``join`` waits for it.

        It has ``timeout_s``, and ``patience_s`` more where pending work needs it to be merged.
        """
        if self._leaving_until is None:
            self._leaving_until = time.monotonic() + timeout_s + patience_s
            self.send(Leave(timeout_s, patience_s))

    def stop(self) -> None:
        """End the agent now. It saves what it can in a few seconds."""
        self._leaving_until = time.monotonic()
        self._poke()

    def join(self, timeout_s: float) -> bool:
        """Wait until the agent has ended after ``leave`` or ``stop``."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _poke(self) -> None:
        with contextlib.suppress(OSError):  # it is full, or the thread has ended
            self._wake.send(b"\1")

    def _live(self) -> None:
        pause_s = self._settings.restart_first_s
        try:
            while self._leaving_until is None:
                since = time.monotonic()
                code = self._run_once()
                if self.over is not None or self._leaving_until is not None:
                    break
                if time.monotonic() - since > HEALTHY_AFTER_S:
                    pause_s = self._settings.restart_first_s
                logger.warning("agent_died code=%s restart_in_s=%.1f", code, pause_s)
                self._died(code, pause_s)
                self._sleep(pause_s)
                pause_s = min(2 * pause_s, self._settings.restart_max_s)
                self.restarts += 1
        finally:
            running, self._running = self._running, None
            if running is not None:
                running.end(patience_s=0.0)
            self._wake_read.close()
            self._wake.close()

    def _run_once(self) -> int:
        begin = msgspec.structs.replace(self._begin, restarts=self.restarts)
        try:
            self._running = running = _Running(
                self._command,
                self._memory,
                self._log_path,
                silence_max_s=self._settings.silence_max_s,
            )
        except OSError as error:
            logger.warning("agent_not_started reason=%s", error)
            return -1
        try:
            running.send(begin)
            while self._talk(running):
                pass
        except (OSError, LineBroken, msgspec.DecodeError) as error:
            # After its last message nothing is to be heard: it may leave a beat unread.
            if self.over is None:
                logger.warning("agent_line_broke reason=%s", error)
        self._running = None
        return running.end(patience_s=self._settings.end_patience_s)

    def _talk(self, running: _Running) -> bool:
        """Exchange messages once. Returns ``False`` when this agent is to end."""
        settings = self._settings
        readable = _readable(running.socket, self._wake_read, within_s=settings.beat_s / 2)
        if self._wake_read.fileno() in readable:
            with contextlib.suppress(BlockingIOError):
                self._wake_read.recv(4096)
        now = time.monotonic()
        if running.socket.fileno() in readable:
            data = running.socket.recv(1 << 16)
            if not data:
                return False
            running.heard_at = now
            for frame in running.frames.feed(data):
                message = decode_from_agent(frame)
                if isinstance(message, Over):
                    self.over = message
                self._hear(message)
        while self._outbox:
            running.send(self._outbox.popleft())
        if now - running.beat_at >= settings.beat_s:
            running.beat_at = now
            running.send(Beat())
        if now - running.heard_at > settings.silence_max_s:
            logger.warning("agent_hangs silent_s=%.0f", now - running.heard_at)
            running.process.kill()
            return False
        return self._leaving_until is None or now < self._leaving_until

    def _sleep(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while self._leaving_until is None and (left := until - time.monotonic()) > 0:
            _readable(self._wake_read, within_s=left)
            with contextlib.suppress(BlockingIOError):
                self._wake_read.recv(4096)


def _readable(*sockets: socket.socket, within_s: float) -> set[int]:
    """The descriptors of those sockets that have something to read, or are at their end.

    A trainer may have thousands of files open, and ``select`` takes no descriptor above 1023.
    """
    poll = select.poll()
    for each in sockets:
        poll.register(each, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(max(0.0, 1000 * within_s))}
