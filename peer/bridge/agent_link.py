"""The line between a trainer and its agent: messages, a doorbell, heartbeats, restarts.

Three descriptors are handed to the agent when it is started: a unix socket for
messages (length-prefixed msgpack, both ways), a pipe into which the trainer
drops a byte when it has passed on a slot's turn (``peer.bridge.shared_memory``), and the
shared memory itself. None has a name in the file system, so none can be left behind, and the end
of either process is the end of the socket at the other one.

The trainer's part (``AgentProcess``) runs in a thread of its own, so that a trainer deep
in a kernel keeps its agent, and a dead agent is replaced without the trainer's doing. The
trainer's thread itself never waits here. The agent's part (``TrainerLine``) is asyncio.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta, Struct

import peer
from peer.bridge.shared_memory import SharedTensors
from peer.errors import PeerError

logger = logging.getLogger(__name__)

VERSION = 1
MESSAGE_MAX_BYTES = 16 << 20
"""Both ends are ours; this only catches a torn stream. A layout of 10 000 tensors takes 1 MB."""

_LENGTH = struct.Struct("<I")

Value: TypeAlias = str | int | float | bool | list[str | int | float] | None


class _Message(Struct, frozen=True, array_like=True, tag=True):
    """Anything said on the line."""


class Tensor(Struct, frozen=True, array_like=True):
    """A parameter to be exchanged."""

    name: str
    shape: tuple[int, ...]
    dtype: str


class Begin(_Message, frozen=True, kw_only=True):
    """Trainer: all that an agent has to know. The first message."""

    version: int = VERSION
    run: bytes
    """The run file in canonical form; its hash is the run's id."""
    seeds: tuple[str, ...]
    directory: str
    """For checkpoints, known peers and the event log of this peer in this run."""
    identity: str
    """The key file."""
    name: str
    site: str | None = None
    """Who says the same is near (``averaging.rules.sites``)."""
    tensors: tuple[Tensor, ...]
    embeddings: tuple[str, ...]
    heads: tuple[str, ...]
    listen: tuple[str, ...]
    announce: tuple[str, ...]
    lane: str = "auto"
    """Where to listen for the direct lane (``dht.libp2p.lane.parse_lane``)."""
    found_after_s: float | None
    """Alone for so long at the start, go on as the run's founder; ``None``: never by itself."""
    page: str | None
    """Where to serve the local page, HOST:PORT."""
    started_at: float
    """When the trainer was, by its wall clock: a wish to leave may be older than its agent."""
    earlier_tokens: int
    """Processed by this peer's trainers before this one."""
    ended_cleanly: bool
    """How the last of them ended."""
    restarts: int = 0
    """Of the agent, under this trainer."""


class Beat(_Message, frozen=True):
    """Both: I am alive."""


class Leave(_Message, frozen=True):
    """Trainer: finish what is under way, save, say goodbye and end, within so many seconds."""

    timeout_s: float


class Due(_Message, frozen=True):
    """Trainer of a synchronous run: I wait for this fragment's round."""

    fragment: int


class Measured(_Message, frozen=True, kw_only=True):
    """Trainer: the held-out loss that was asked for."""

    version: int
    loss: float
    sequences: int


class Phase(_Message, frozen=True, kw_only=True):
    """Agent: where it is on the way into the run."""

    name: Annotated[str, Meta(pattern="^(connecting|fetching|founding|ready|leaving)$")]
    text: str
    done: float
    """Of this phase, between 0 and 1."""


class Other(_Message, frozen=True, kw_only=True):
    """Another peer of the run, for people to look at."""

    name: str
    state: str
    step_time_s: float | None
    version: int | None
    share: float
    """Of all merged tokens."""
    behind: int | None = None
    """Its fragments, at most, in versions."""
    last: str = ""
    """What became of its last offer."""


class Facts(_Message, frozen=True, kw_only=True):
    """Agent: the run as it sees it. Said when it changes, at most once a second or so."""

    peer_id: str
    link: str
    """What others paste to join."""
    merged_tokens: int
    """Of all peers."""
    global_tokens: int
    """With this peer's own that are still on their way."""
    versions: tuple[int, ...]
    peers: int
    """Live ones, with this peer."""
    held_out_loss: float | None
    fates: dict[str, float]
    """Of this peer's tokens: processed, merged, pending, discarded.<reason>."""
    rounds: int
    rounds_missed: int
    bytes_sent: int
    bytes_received: int
    synchronous: bool
    """A round with others is possible: a synchronous trainer should wait for it."""
    rest: str | None = None
    """Why the trainer should make no steps for now."""
    cpu_share: float = 1.0
    """How much of the time the trainer may work ..."""
    accelerator_share: float = 1.0
    """... and where an accelerator does."""
    threads: int | None = None
    """How many CPU threads it may have."""
    inner_bytes: float | None = None
    """What its checkpoints may take."""
    limits: tuple[str, ...] = ()
    """What the machine's owner allows, in words."""
    others: tuple[Other, ...] = ()
    """The largest contributors among the other peers."""
    in_flight: tuple[str, ...] = ()
    """Fragments, and what is done about them just now."""
    staleness: int = 0
    """By how many versions the trainer's parameters are behind, at most."""
    last: str = ""
    """What became of its own last offer, in two words."""


class Happened(_Message, frozen=True):
    """Agent: an event, for ``run.on``."""

    name: str
    fields: dict[str, Value]


class Measure(_Message, frozen=True):
    """Agent: it is this peer's turn to measure the held-out loss of the run."""

    version: int


class Over(_Message, frozen=True):
    """Agent: it ends for good, and need not be started again."""

    reason: str
    exit_code: int
    finished: bool
    """The run itself is over; not just this peer's part in it."""


FromTrainer: TypeAlias = Begin | Beat | Leave | Due | Measured
FromAgent: TypeAlias = Beat | Phase | Facts | Happened | Measure | Over

_encoder = msgspec.msgpack.Encoder()
_from_trainer: msgspec.msgpack.Decoder[FromTrainer] = msgspec.msgpack.Decoder(FromTrainer)
_from_agent: msgspec.msgpack.Decoder[FromAgent] = msgspec.msgpack.Decoder(FromAgent)


class LineBroken(PeerError):
    """What came over the line is no message: the other side runs another version, or is damaged."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"trainer and agent do not understand each other: {self.reason}"


def pack(message: FromTrainer | FromAgent) -> bytes:
    body = _encoder.encode(message)
    if len(body) > MESSAGE_MAX_BYTES:
        raise ValueError(f"a message has {len(body)} bytes; at most {MESSAGE_MAX_BYTES}")
    return _LENGTH.pack(len(body)) + body


class _Frames:
    """Cuts a stream of bytes into messages."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        self._data += data
        frames = []
        while len(self._data) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._data)
            if size > MESSAGE_MAX_BYTES:
                raise LineBroken(f"a message of {size} bytes was announced")
            if len(self._data) < _LENGTH.size + size:
                break
            frames.append(bytes(self._data[_LENGTH.size : _LENGTH.size + size]))
            del self._data[: _LENGTH.size + size]
        return frames


# --- the trainer's end ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LineSettings:
    """When the other side counts as dead, and how soon it is replaced."""

    beat_s: float = 1.0
    silence_max_s: float = 60.0
    """An agent that says nothing for so long hangs: it is killed and replaced."""
    restart_first_s: float = 0.5
    restart_max_s: float = 60.0
    """The pause before a restart doubles up to this."""
    end_patience_s: float = 10.0
    """For saving and saying goodbye once the line is closed; then it is killed."""
    healthy_after_s: float = 60.0
    """An agent that lived so long has earned an immediate restart."""

    def __post_init__(self) -> None:
        if self.silence_max_s < 3 * self.beat_s:
            raise ValueError(
                f"silence_max_s is {self.silence_max_s}; it must outlast 3 beats of {self.beat_s} s"
            )


def agent_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """No accelerator, one thread per library: an agent must not take from its trainer."""
    package = str(Path(peer.__file__).resolve().parent.parent)
    path = [package, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    return {
        **environment,
        "PYTHONPATH": os.pathsep.join(path),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }


class _Running:
    """One life of an agent."""

    def __init__(
        self, command: Sequence[str], memory: SharedTensors, log_path: Path, *, silence_max_s: float
    ) -> None:
        ours, theirs = socket.socketpair()
        bell_read, self.bell = os.pipe()
        os.set_blocking(self.bell, False)
        handed = (theirs.fileno(), bell_read, memory.descriptor)
        try:
            with log_path.open("ab") as log:
                self.process = subprocess.Popen(
                    [*command, *(str(descriptor) for descriptor in handed)],
                    pass_fds=handed,
                    env=agent_environment(os.environ),
                    # Ctrl-C at the terminal is for the trainer, which tells the agent to leave.
                    start_new_session=True,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
        except BaseException:
            ours.close()
            os.close(self.bell)
            raise
        finally:
            theirs.close()
            os.close(bell_read)
        self.socket = ours
        # It is importing while a large layout waits for it; one that never takes it hangs.
        self.socket.settimeout(silence_max_s)
        self.frames = _Frames()
        self.since = self.heard_at = self.beat_at = time.monotonic()
        self.over: Over | None = None

    def send(self, message: FromTrainer) -> None:
        self.socket.sendall(pack(message))

    def end(self, *, patience_s: float) -> int:
        """Hang up, which an agent takes as its end, and make sure of it."""
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

    ``hear`` is called on this object's own thread, with each message; it must not block.
    ``died(exit_code, restart_in_s)`` likewise, after each unexpected end.
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
        command: Sequence[str] = (sys.executable, "-P", "-m", "peer.agent"),
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
        self._wake_read, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(self._wake_read, False)
        self._leaving_until: float | None = None
        self._thread = threading.Thread(target=self._live, name="agent line", daemon=True)
        self.restarts = 0
        self.over: Over | None = None
        """Why the agent ended for good, once it has."""

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
        """A slot's turn was passed on. Never waits: a full pipe has rung already."""
        running = self._running
        if running is not None:
            with contextlib.suppress(BlockingIOError, BrokenPipeError, OSError):
                os.write(running.bell, b"\1")

    def send(self, message: FromTrainer) -> None:
        """Say something to the agent, if there is one."""
        self._outbox.append(message)
        self._poke()

    def leave(self, timeout_s: float) -> None:
        """Ask the agent to finish and end; ``join`` waits for it."""
        if self._leaving_until is None:
            self._leaving_until = time.monotonic() + timeout_s
            self.send(Leave(timeout_s))

    def stop(self) -> None:
        """End it now. It saves what it can in a few seconds."""
        self._leaving_until = time.monotonic()
        self._poke()

    def join(self, timeout_s: float) -> bool:
        """Wait until the agent has ended after ``leave`` or ``stop``."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _poke(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            os.write(self._wake, b"\1")

    def _live(self) -> None:
        pause_s = self._settings.restart_first_s
        try:
            while self._leaving_until is None:
                since = time.monotonic()
                code = self._one_life()
                if self.over is not None or self._leaving_until is not None:
                    break
                if time.monotonic() - since > self._settings.healthy_after_s:
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

    def _one_life(self) -> int:
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
            # After its last word there is nothing to hear: it leaves a beat of ours unread.
            if running.over is None:
                logger.warning("agent_line_broke reason=%s", error)
        self.over = running.over
        self._running = None
        return running.end(patience_s=self._settings.end_patience_s)

    def _talk(self, running: _Running) -> bool:
        """One turn of the line. ``False``: this life is over."""
        settings = self._settings
        readable, _, _ = select.select(
            [running.socket.fileno(), self._wake_read], [], [], settings.beat_s / 2
        )
        if self._wake_read in readable:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_read, 4096)
        now = time.monotonic()
        if running.socket.fileno() in readable:
            data = running.socket.recv(1 << 16)
            if not data:
                return False
            running.heard_at = now
            for frame in running.frames.feed(data):
                message = _from_agent.decode(frame)
                if isinstance(message, Over):
                    running.over = message
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
            select.select([self._wake_read], [], [], left)
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_read, 4096)


# --- the agent's end ----------------------------------------------------------------------------


class TrainerLine:
    """The agent's end of the line, in its event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.heard_at = asyncio.get_running_loop().time()

    @classmethod
    async def open(cls, descriptor: int) -> TrainerLine:
        line = socket.socket(fileno=descriptor)
        reader, writer = await asyncio.open_unix_connection(sock=line)
        return cls(reader, writer)

    def say(self, message: FromAgent) -> None:
        """Never waits. A trainer that does not listen misses news, not state."""
        transport = self._writer.transport
        if not transport.is_closing() and transport.get_write_buffer_size() < MESSAGE_MAX_BYTES:
            self._writer.write(pack(message))

    async def messages(self) -> AsyncIterator[FromTrainer]:
        """What the trainer says, until it is gone."""
        frames = _Frames()
        while True:
            try:
                data = await self._reader.read(1 << 16)
            except ConnectionError:
                return
            if not data:
                return
            self.heard_at = asyncio.get_running_loop().time()
            for frame in frames.feed(data):
                try:
                    yield _from_trainer.decode(frame)
                except msgspec.DecodeError as error:
                    raise LineBroken(str(error)) from error

    async def beat(self, every_s: float = 1.0) -> None:
        """Tell the trainer for ever that this process is alive."""
        while True:
            self.say(Beat())
            await asyncio.sleep(every_s)

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()


def hear_doorbell(descriptor: int, rang: Callable[[], None]) -> Callable[[], None]:
    """Call ``rang`` whenever the trainer rings. Returns what stops it."""
    loop = asyncio.get_running_loop()
    os.set_blocking(descriptor, False)

    def on_readable() -> None:
        try:
            data = os.read(descriptor, 4096)
        except BlockingIOError:
            return
        if data:
            rang()
        else:  # the trainer is gone; the line says so too
            loop.remove_reader(descriptor)

    loop.add_reader(descriptor, on_readable)

    def stop() -> None:
        loop.remove_reader(descriptor)
        os.close(descriptor)

    return stop
