"""The questions that peers of a run ask each other: of each, its protocol, limits and types.

A request is the run's id and what is asked for in particular. Requests and answers are claims of
strangers: they have a type, a largest size, and a check where a type does not say it all.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import GenericAlias
from typing import Annotated, Any, Generic, TypeVar

import msgspec
from msgspec import Meta, Struct

from averaging.history.lineage import bound
from averaging.messages import Count, Digest, Index
from dht.decoding import decoded
from dht.host import Messaging
from dht.identity import PeerId, RunId

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Call(Generic[Asked, Answer]):
    """One question, what may be asked for in particular, and the type of its answers."""

    protocol: str
    type: Any
    what: str
    """The answer in words, such as ``a status``."""
    answer_max_bytes: int
    check: Callable[[Answer], None] = lambda answer: None
    """Raises ``ValueError`` for an answer that has the type and is none."""
    asks: Any = str
    """The type of what is asked for in particular; an empty text: of nothing."""
    request_max_bytes: int = 256

    def request(self, run: RunId, asked: Asked) -> bytes:
        return msgspec.msgpack.encode((run, asked))

    def asked(self, request: bytes, run: RunId) -> Asked:
        """The question in a request. Raises ``ValueError``, also for one of another run."""

        def read(content: bytes) -> Any:
            return msgspec.msgpack.decode(content, type=expected)

        expected: Any = GenericAlias(tuple, (str, self.asks))
        theirs, asked = decoded(request, read, "a question", max_bytes=self.request_max_bytes)
        if theirs != run:
            raise ValueError(f"this peer is in run {run}, not {theirs[:64]!r}")
        particular: Asked = asked
        return particular

    def encode(self, answer: Answer) -> bytes:
        return msgspec.msgpack.encode(answer)

    def decode(self, data: bytes) -> Answer:
        """Decode an answer of any peer. Raises ``ValueError``."""

        def read(content: bytes) -> Any:
            return msgspec.msgpack.decode(content, type=self.type)

        answer: Answer = decoded(data, read, self.what, max_bytes=self.answer_max_bytes)
        self.check(answer)
        return answer

    async def ask(
        self, host: Messaging, peer: PeerId, run: RunId, asked: Asked, *, timeout_s: float
    ) -> Answer:
        """Raises ``DhtError``, or ``ValueError`` for an answer that is none."""
        request = self.request(run, asked)
        return self.decode(await host.call(peer, self.protocol, request, timeout_s=timeout_s))

    async def serve(
        self,
        host: Messaging,
        run: RunId,
        answer: Callable[[PeerId, Asked], Awaitable[bytes]],
    ) -> None:
        """Answer from now on; ``answer`` gets who asks, and for what in particular."""

        async def answered(peer: PeerId, request: bytes) -> bytes:
            return await answer(peer, self.asked(request, run))

        await host.serve_calls(self.protocol, answered, request_max_bytes=self.request_max_bytes)


# --- the states that a peer keeps for the run's owner to attest ---------------------------------

# Every peer of a run with an owner keeps the same few versions of each fragment. The owner's
# command asks all peers, and signs what most of them hold alike. A state that a peer does not have,
# or other bits, cannot be taken from it later: the digest would not be that of the others.

STATES_MAX = 256


class Kept(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One fragment's state at one version, without its numbers."""

    fragment: Index
    version: Count
    history: Digest
    merged: Digest
    """Digest of the merged map: lineage is ``bound(history, merged)``."""

    digest: Digest
    """Digest of the numbers (``averaging.history.manifest``)."""

    tokens: Count

    @property
    def lineage(self) -> bytes:
        return bound(self.history, self.merged)


ATTESTABLE: Call[str, tuple[Kept, ...]] = Call(
    "/shoal/attestable/1",
    Annotated[tuple[Kept, ...], Meta(max_length=STATES_MAX)],
    "a list of kept states",
    48 << 10,
)
