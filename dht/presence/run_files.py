"""Distribution of the run file between peers, for newcomers that hold only a link.

A peer serves the file of its own run to every peer that asks by run id, over a relay where it has
to. The caller checks the content that arrives: the hash of a run file is its run id.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from dht.errors import BUSY, CallRefused, HostClosed, PeerUnreachable, RunFileUnavailable
from dht.identity import PeerId
from dht.limits import Rate
from dht.membership import hello as wire
from dht.presence.dialler import Dialler
from dht.presence.this_peer import CALL_TIMEOUT_S, ThisPeer
from dht.records import RUN_FILE_MAX_BYTES

ASKED_AT_ONCE = 3
"""Parallel requests, so that a peer that does not answer does not delay the others."""

RETRY_FIRST_S, RETRY_MAX_S = 0.1, 1.0
"""Pause before all peers are asked again, and those that turned up meanwhile; it doubles."""


class RunFiles:
    """Both sides of the exchange on one host."""

    def __init__(self, this: ThisPeer, dialler: Dialler, budget: Rate[PeerId]) -> None:
        self._host = this.host
        self._run = this.profile.run
        self._content = this.profile.run_file
        self._dialler = dialler
        self._budget = budget

    async def serve(self) -> None:
        """Answer other peers from now on."""
        await self._host.serve_calls(
            wire.RUN_FILE_PROTOCOL, self._answer, request_max_bytes=wire.RUN_ID_MAX
        )

    async def fetch(
        self,
        peers: Callable[[], Sequence[PeerId]],
        matches: Callable[[bytes], bool],
        *,
        timeout_s: float,
    ) -> bytes:
        """The run file, from the first peer that has it. See ``Presence.fetch_run_file``."""
        assert self._run is not None, "a bootstrap peer has no run file to ask for"
        answers: dict[str, str] = {}
        pause_s = RETRY_FIRST_S
        try:
            async with asyncio.timeout(timeout_s):
                while (content := await self._ask_all(peers(), matches, answers)) is None:
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, RETRY_MAX_S)
                return content
        except TimeoutError:
            raise RunFileUnavailable(self._run, tuple(sorted(answers.items())), timeout_s) from None

    async def _ask_all(
        self, peers: Sequence[PeerId], matches: Callable[[bytes], bool], answers: dict[str, str]
    ) -> bytes | None:
        turns = asyncio.Semaphore(ASKED_AT_ONCE)

        async def ask(peer: PeerId) -> bytes | None:
            async with turns:
                return await self._ask(peer, matches, answers)

        asking = [asyncio.create_task(ask(peer)) for peer in peers]
        try:
            for answer in asyncio.as_completed(asking):
                content = await answer
                if content is not None:
                    return content
            return None
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)

    async def _ask(
        self, peer: PeerId, matches: Callable[[bytes], bool], answers: dict[str, str]
    ) -> bytes | None:
        assert self._run is not None
        try:
            await self._dialler.connect(peer, timeout_s=CALL_TIMEOUT_S)
            content = await self._host.call(
                peer,
                wire.RUN_FILE_PROTOCOL,
                self._run.encode(),
                timeout_s=CALL_TIMEOUT_S,
            )
        except (PeerUnreachable, CallRefused, HostClosed) as error:
            answers[peer] = error.reason
            return None
        if len(content) <= RUN_FILE_MAX_BYTES and matches(content):
            return content
        answers[peer] = "sent something else"
        return None

    async def _answer(self, peer: PeerId, request: bytes) -> bytes:
        if not self._budget.spend(peer, asyncio.get_running_loop().time()):
            raise ValueError(f"{BUSY} in this minute")
        asked = bytes(request).decode("ascii", errors="replace")
        if self._content is None:
            raise ValueError("this peer has no run file")
        if asked != self._run:
            raise ValueError(f"this peer takes part in run {self._run}, not in run {asked}")
        return self._content
