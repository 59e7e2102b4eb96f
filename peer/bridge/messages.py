"""Messages between trainer and agent, and their framing on a stream.

Each message is a msgpack array whose first element is the name of its class, behind its length as
a little-endian 32-bit number. A trainer starts its agent from its own installation, so both are of
one release, unless the installation was upgraded while the trainer ran: the next agent is then of
the newer one, and refuses a first message with a protocol number that it does not speak
(``dht.protocol``).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta, Struct

from averaging.history.readings import Reading
from dht import protocol
from peer.bridge.settings import PeerSettings
from peer.description import Described
from peer.errors import PeerError
from peer.rules.limits import Limits
from peer.status import PeerRow, PeerStatus, Training

MESSAGE_MAX_BYTES = 16 << 20
"""Limit that detects a damaged stream. A layout of 10 000 tensors takes 1 MB."""

_LENGTH = struct.Struct("<I")

Value: TypeAlias = str | int | float | bool | list[str | int | float] | None
Fields: TypeAlias = Mapping[str, Value]
"""The fields of an event."""


class _Message(Struct, frozen=True, array_like=True, tag=True):
    """A message of either side."""


class Begin(_Message, frozen=True, kw_only=True):
    """Trainer, first message: everything that an agent has to know."""

    version: Annotated[int, Meta(ge=protocol.OLDEST, le=protocol.NEWEST)] = protocol.NEWEST
    run: bytes
    """The run file in canonical form; its hash is the run's id."""
    directory: str
    """Folder for key, checkpoints, known peers and the event log of this peer in this run."""
    settings: PeerSettings
    """All its seeds are in them, also those of the run file."""
    tensors: tuple[Described, ...]
    """All that are exchanged."""
    frozen: tuple[Described, ...] | None = None
    """Parameters that are not exchanged; ``None`` if no process has them whole."""
    allow_frozen_differences: bool = False
    credential: bytes = b""
    """Proof that the run admits this peer (``dht.membership.credentials``)."""
    found_after_s: float | None
    """Time without meeting anybody after which to found the run; ``None``: never found it."""
    started_at: float
    """Wall-clock time at which the trainer started: an older wish to leave is not for it."""
    earlier_tokens: int
    """Tokens that earlier trainers of this peer processed."""
    ended_cleanly: bool
    """True if the last earlier trainer ended in order."""
    restarts: int = 0
    """Number of earlier agents of this trainer."""


class Beat(_Message, frozen=True):
    """Both: a sign of life."""


class Leave(_Message, frozen=True):
    """Trainer: finish exchanges in flight, save, say goodbye and end, within ``timeout_s``.

    Where the line needs longer for the pending work, it may take ``patience_s`` more.
    """

    timeout_s: float
    patience_s: float = 0.0


class Due(_Message, frozen=True):
    """Trainer of a synchronous run: it waits for a round of this fragment."""

    fragment: int


class Restore(_Message, frozen=True):
    """Trainer: overwrite its parameters by the run's newest ones."""


BATCH, SEED = "batch", "seed"


class Batches(_Message, frozen=True):
    """Trainer, after its first step: what its program trains on."""

    digest: str
    """Equal at peers that draw the same batches, and its first word says of what it is: ``BATCH``
    or ``SEED``. Empty: the program draws them in an order of its own."""


class Measured(_Message, frozen=True, kw_only=True):
    """Trainer: the held-out loss that ``Measure`` asked for."""

    asked: Measure
    loss: float
    sequences: int
    """0: it cannot measure, and the loss says nothing."""


class Phase(_Message, frozen=True, kw_only=True):
    """Agent: the phase that it is in on the way into the run and out of it."""

    name: Annotated[str, Meta(pattern="^(connecting|waiting|fetching|founding|ready|leaving)$")]
    text: str
    done: float
    """Completed part of this phase, between 0 and 1."""


class Report(_Message, frozen=True, kw_only=True):
    """Agent, about once a second: the run as it sees it, and what the trainer may do."""

    status: PeerStatus = PeerStatus()
    rows: tuple[PeerRow, ...] = ()
    """This peer and the largest contributors among the others."""
    scheduled_tokens: int = 0
    """Merged tokens of all peers, plus this peer's own that are not merged yet."""
    others_train: bool = True
    """False if the other live peers only keep the run, or rest."""
    amended: dict[str, int | float | str] = {}
    """Settings of the run that its owner has changed, as the trainer should follow them now."""
    gone_back: int = 0
    """Number of the directive with which the run's owner took it back last; tokens fall then."""
    limits: Limits = Limits()
    """Those of the machine's owner."""
    inner_bytes: float | None = None
    """Disk space that the trainer's checkpoints may take."""


class Happened(_Message, frozen=True):
    """Agent: an event, for ``run.on``. Trainer: one of its own, for the event log."""

    name: str
    fields: dict[str, Value]


class Measure(_Message, frozen=True):
    """Agent: it is this peer's turn to measure the held-out loss of the run."""

    version: int
    tokens: int = 0
    """Merged tokens of all peers at this version."""
    gate: int = 0
    """Number of a question of the loss gate, which is always answered; 0: it is none."""


class Over(_Message, frozen=True):
    """Agent: it ends for good and is not to be started again."""

    reason: str
    exit_code: int
    finished: bool
    """True if the run itself is over, and not just this peer's part in it."""
    kind: str = ""
    """Name of the error that ended it, if the trainer can raise the same (``errors.REFUSALS``)."""
    arguments: tuple[Any, ...] = ()
    """Arguments of that error, plain values."""


class Progress(_Message, frozen=True):
    """Trainer: what it knows of its training, about once a second."""

    training: Training


class HasRead(_Message, frozen=True):
    """Trainer, in a run with spot checks: what it has read before its last steps."""

    steps: dict[int, Reading | None]
    judges: bool = False
    """True if it can try contributions of others."""


class Try(_Message, frozen=True, kw_only=True):
    """Agent, in a run with spot checks: compare two states of a fragment on another one's data."""

    number: int
    path: str
    """File with both states in fp32, one after the other."""
    fragment: int
    author: str
    reading: Reading


class Tried(_Message, frozen=True, kw_only=True):
    """Trainer: the answer to ``Try``. Without losses it cannot tell."""

    number: int
    losses: tuple[float, float] | None = None
    """Mean losses of the author's sequences, with the first state and with the second one."""
    seconds: float = 0.0
    """Time for which training waited."""
    other_data: bool = False
    """True if the learner reads other sequences there than the author says."""


FromTrainer: TypeAlias = (
    Begin
    | Beat
    | Leave
    | Due
    | Measured
    | Progress
    | Restore
    | Batches
    | Happened
    | HasRead
    | Tried
)
FromAgent: TypeAlias = Beat | Phase | Report | Happened | Measure | Over | Try

_encoder = msgspec.msgpack.Encoder()
decode_from_trainer = msgspec.msgpack.Decoder[FromTrainer](FromTrainer).decode
decode_from_agent = msgspec.msgpack.Decoder[FromAgent](FromAgent).decode


class LineBroken(PeerError):
    """Messages or shared memory cannot be read: of another release, or damaged."""

    reason: str
    message = (
        "trainer and agent do not understand each other: {reason}; if Shoal was installed anew "
        "while the trainer ran, start the trainer again"
    )


def pack(message: FromTrainer | FromAgent) -> bytes:
    body = _encoder.encode(message)
    if len(body) > MESSAGE_MAX_BYTES:
        raise ValueError(f"a message has {len(body)} bytes; at most {MESSAGE_MAX_BYTES}")
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Cuts a stream of bytes into encoded messages."""

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
