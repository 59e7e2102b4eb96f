"""Fetching a run file from the run's peers, given a link.

``python -m peer.joining.fetch LINK`` writes the canonical run file to standard output. It is a
process of its own for commands that have no network and should not wait for the imports of an
agent. A second argument is the descriptor of a pipe: the process ends when its other end is closed.
While it looks, it writes the reason why it has no file yet on standard error, in lines that begin
with ``MEANWHILE``; the last line without it is the error.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import blake3
import uvloop
from multiaddr import Multiaddr

from dht.addresses import peer_of
from dht.errors import DhtError, RunFileUnavailable
from dht.identity import Identity, PeerId
from dht.libp2p.hivemind_host import HivemindHost, HostSettings
from dht.presence.presence import Presence
from dht.presence.this_peer import Events, PresenceEvent, Profile
from peer.errors import NobodyMet, PeerError, RunNotFound, SeedsElsewhere
from peer.joining.link import ELSEWHERE, MEANWHILE, NOBODY_YET, Link, parse_link

FETCH_TIMEOUT_S = 60.0
LOOK_EVERY_S = 0.2
SEEDS_JUDGED_AFTER_S = 4.0
TOLD_AFTER_S = 2.0
"""Time from which on it is said that nobody has answered yet. What a seed answers is said at once.
"""


class SeedFailures:
    """The reason why no peer has answered yet, from the events of a presence."""

    text = ""

    def on_event(self, event: PresenceEvent) -> None:
        if event.name == "nobody_answered":
            self.text = event.text.replace("; still trying: ", "; ")
        elif event.name == "connected":
            self.text = ""


@asynccontextmanager
async def observer(
    link: Link, failures: SeedFailures, identity: Identity | None = None
) -> AsyncIterator[tuple[HivemindHost, Presence]]:
    """A host and presence, by default with a new key, which only observe. Raises ``DhtError``."""
    settings = HostSettings(listen=(Multiaddr("/ip4/0.0.0.0/tcp/0"),), serve_directory=False)
    identity = identity or Identity.generate()
    async with await HivemindHost.open(identity, settings) as host:
        presence = Presence(
            host,
            identity,
            Profile(link.run_id, observes=True),
            seeds=link.seeds,
            events=Events(failures.on_event),
        )
        await presence.start()
        try:
            yield host, presence
        finally:
            await presence.close()


async def fetch_run_file(
    link: Link, *, timeout_s: float, tell: Callable[[str], None] = lambda reason: None
) -> bytes:
    """The canonical run file behind a link with seeds. Raises ``RunNotFound`` or ``DhtError``.

    ``tell`` is called with each new reason why there is none yet: with what seeds have answered at
    once, and with others from ``TOLD_AFTER_S`` on.
    """
    failures = SeedFailures()
    told = ""
    async with observer(link, failures) as (_, presence):
        loop = asyncio.get_running_loop()
        began = loop.time()
        fetching = asyncio.ensure_future(
            presence.fetch_run_file(
                lambda content: blake3.blake3(content).hexdigest() == link.run_id,
                timeout_s=timeout_s,
            )
        )
        try:
            while not (await asyncio.wait((fetching,), timeout=LOOK_EVERY_S))[0]:
                waited_s = loop.time() - began
                check_seeds_run(link, presence, waited_s=waited_s)
                answered = who_answered(link, presence, now=loop.time())
                reason = answered or failures.text or NOBODY_YET
                if (answered or waited_s >= TOLD_AFTER_S) and reason != told:
                    tell(told := reason)
            return fetching.result()
        except RunFileUnavailable as error:
            reason = who_answered(link, presence, now=loop.time()) or (
                "" if error.answers else failures.text
            )
            if not reason:
                raise
            raise NobodyMet(f"run {link.run_id[:16]}...", reason) from error
        finally:
            fetching.cancel()
            await asyncio.wait((fetching,))


def who_answered(link: Link, presence: Presence, *, now: float) -> str:
    """The seeds that answered and lead to nobody of this run; empty: there is no such answer."""
    if presence.table.live(now):
        return ""  # they may have the run file
    elsewhere, hosts = _other_runs(link, presence), len(presence.bootstrap_seeds)
    reasons = [
        f"{peer} takes part in another run, {run[:16]}..." for peer, run in elsewhere.items()
    ]
    if hosts:
        who, them = (
            ("the bootstrap host", "it") if hosts == 1 else (f"{hosts} bootstrap hosts", "them")
        )
        reasons.append(
            f"{who} answered, no peer of this run is known to {them}; check the run id in the link"
        )
    return "; ".join(reasons)


def _other_runs(link: Link, presence: Presence) -> dict[PeerId, str]:
    """The seeds that take part in another run, and which."""
    peers = [peer for seed in link.seeds if (peer := peer_of(seed)) is not None]
    misfits = {peer: presence.misfits.get(peer) for peer in peers}
    return {
        peer: misfit.theirs for peer, misfit in misfits.items() if misfit and misfit.what == "run"
    }


def check_seeds_run(link: Link, presence: Presence, *, waited_s: float) -> None:
    """Raise ``SeedsElsewhere`` once all seeds of a link have answered, and none is in its run.

    Bootstrap peers, which are in no run, decide nothing. Not before ``SEEDS_JUDGED_AFTER_S``: a
    seed may know a peer of this run.
    """
    elsewhere = _other_runs(link, presence)
    runs = set(elsewhere.values())
    everybody = len(elsewhere) + len(presence.bootstrap_seeds) == len(link.seeds)
    if waited_s >= SEEDS_JUDGED_AFTER_S and everybody and len(runs) == 1:
        raise SeedsElsewhere(
            f"run {link.run_id[:16]}...",
            f"the link's seeds take part in run {runs.pop()[:16]}...; check that the link "
            "was copied completely, or ask for a new one",
        )


async def _fetch_until_closed(link: Link, pipe: int | None) -> bytes:
    task = asyncio.current_task()
    assert task is not None
    if pipe is not None:
        asyncio.get_running_loop().add_reader(pipe, task.cancel)
    return await fetch_run_file(link, timeout_s=FETCH_TIMEOUT_S, tell=_tell)


def _tell(reason: str) -> None:
    sys.stderr.write(f"{MEANWHILE}{reason}\n")
    sys.stderr.flush()


def main(arguments: Sequence[str]) -> int:
    logging.basicConfig(level=logging.ERROR)
    if len(arguments) not in (1, 2) or not all(text.isdigit() for text in arguments[1:]):
        sys.stderr.write("python -m peer.joining.fetch LINK: exactly one link of a run\n")
        return 2
    pipe = int(arguments[1]) if len(arguments) == 2 else None
    try:
        content = uvloop.run(_fetch_until_closed(parse_link(arguments[0]), pipe))
    except (PeerError, DhtError) as error:
        reason = error.reason if isinstance(error, RunNotFound) else error
        sys.stderr.write(f"{reason}\n")
        return ELSEWHERE if isinstance(error, SeedsElsewhere) else 3
    except asyncio.CancelledError:  # the asking process is gone
        return 130
    sys.stdout.buffer.write(content)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
