"""What trainer and agent say to each other, and how it is cut into frames.

Each message is a msgpack array whose first element is the name of its class, behind its length as
a little-endian 32-bit number. Both processes are of one version, because a trainer starts its agent
from its own installation.
"""

from __future__ import annotations

import struct
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta, Struct

from peer.errors import PeerError

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
decode_from_trainer = msgspec.msgpack.Decoder[FromTrainer](FromTrainer).decode
decode_from_agent = msgspec.msgpack.Decoder[FromAgent](FromAgent).decode


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


class Frames:
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
