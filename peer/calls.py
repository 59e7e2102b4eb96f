"""The questions that peers of a run ask each other: of each, its protocol, limits and codec.

A request is the run's id and, after a space, what is asked for in particular. Answers are claims of
strangers: they have a type, a largest size, and a check where a type does not say it all.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from dht.decoding import decoded
from dht.guarded_host import GuardedHost
from dht.host import Host
from dht.identity import PeerId, RunId

REQUEST_MAX_BYTES = 256

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Call(Generic[Answer]):
    """One question, and the type of its answers."""

    protocol: str
    type: Any
    what: str
    """The answer in words, such as ``a status``."""
    answer_max_bytes: int
    check: Callable[[Answer], None] = lambda answer: None
    """Raises ``ValueError`` for an answer that has the type and is none."""

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
        self, host: Host, peer: PeerId, run: RunId, detail: object = "", *, timeout_s: float
    ) -> Answer:
        """Raises ``DhtError``, or ``ValueError`` for an answer that is none."""
        request = f"{run} {detail}".rstrip().encode()
        return self.decode(await host.call(peer, self.protocol, request, timeout_s=timeout_s))

    async def serve(
        self,
        host: Host | GuardedHost,
        run: RunId,
        answer: Callable[[PeerId, str], Awaitable[bytes]],
    ) -> None:
        """Answer from now on; ``answer`` gets who asks, and for what in particular."""

        async def answered(peer: PeerId, request: bytes) -> bytes:
            return await answer(peer, detail_of(request, run))

        await host.serve_calls(self.protocol, answered, request_max_bytes=REQUEST_MAX_BYTES)


def detail_of(request: bytes, run: RunId) -> str:
    """What a request asks for in particular. Raises ``ValueError`` for one of another run."""
    asked, _, detail = bytes(request).decode("ascii", "replace").partition(" ")
    if asked != run:
        raise ValueError(f"this peer is in run {run}, not {asked[:64]!r}")
    return detail
