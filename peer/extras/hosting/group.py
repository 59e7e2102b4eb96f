"""All that a public run needs of a host, as one group of processes: a bootstrap peer, which relays
for homes behind routers, and a keeper, which publishes the model and shows the run's page.

Each part is the command that it would be by itself, so a fault in one of them leaves the other
alone. A part that ends is started again; one that says that no start would help ends the group.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from peer.cli.listening import all_interfaces
from peer.errors import ExitCode, Unusable
from peer.extras.hosting.service import ServiceNotifier
from peer.joining.link import SHORT_SEEDS
from peer.views.page_address import PageAddress
from peer.views.pages import Check, serve_pages

_logger = logging.getLogger("peer.extras.hosting.group")

PORTS = ("bootstrap peer", "its relay", "keeper", "the keeper's bulk transfers")
"""The listeners at the first port of a group and at those after it."""

LOOK_EVERY_S = 10.0
ANSWER_WITHIN_S = 5.0
STEADY_S = 600.0
"""A part that ran for so long is started again at once; others after ever longer pauses."""

PAUSE_MAX_S = 60.0
END_WITHIN_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSettings:
    """Settings of a group."""

    run: str
    """The run file, link or web address of the run."""

    data_directory: Path
    domain: str | None = None
    """Name or number at which others reach this machine; ``None``: what it knows of itself."""

    port: int
    relay_rate: str
    run_page: PageAddress
    page: PageAddress
    notify_socket: str | None = None

    @property
    def ports(self) -> range:
        """The ports to open in the firewall."""
        return range(self.port, self.port + len(PORTS))

    @property
    def exports(self) -> Path:
        return self.data_directory / "exports"

    @property
    def bootstrap_page(self) -> PageAddress:
        """The page of the bootstrap peer, for this machine only."""
        return PageAddress("127.0.0.1", self.page.port + 1)

    @property
    def keeper_page(self) -> PageAddress:
        """The page of the keeper, for this machine only."""
        return PageAddress("127.0.0.1", self.page.port + 2)

    def advice(self, seeds: Sequence[str], health: str) -> Iterator[str]:
        """Steps that are left to whoever hosts the run. ``seeds``: addresses of the group's
        bootstrap peer."""
        if self.domain is None:
            yield "others dial this machine as above; give its name with --domain, if it has one"
        what = ", ".join(f"{port} {name}" for port, name in zip(self.ports, PORTS, strict=True))
        yield f"open to everybody, TCP: {what}"
        yield f'in the run file: seeds = ["{seeds[0]}"]'
        yield f"page of the run, for a web server to pass on: {self.run_page.url}"
        yield f"exports of the model, for a web server to serve: {self.exports}"
        yield f"health: {health}readyz"

    def bootstrap(self) -> list[str]:
        announce = () if self.domain is None else ("--announce", self.domain)
        return [
            *("bootstrap", "--port", str(self.port), *announce, "--relay-bulk", self.relay_rate),
            *("--data-dir", str(self.data_directory / "bootstrap"), "--json"),
            *("--page", str(self.bootstrap_page)),
        ]

    def keeper(self, seeds: Sequence[str]) -> list[str]:
        """``seeds``: the addresses of the group's bootstrap peer.

        Without a domain it announces nothing, so what it knows of itself, as the bootstrap peer
        does: all addresses of this machine, in IPv4 and IPv6.
        """
        before, _, after = seeds[0].partition(f"/tcp/{self.port}/")
        named = self.domain is not None and after
        listen = all_interfaces(self.ports[2])
        return [
            *("keep", self.run, "--yes", "--relay-bulk", self.relay_rate),
            *(word for seed in seeds for word in ("--seed", seed)),
            *(word for address in listen for word in ("--listen", str(address))),
            *(("--announce", f"{before}/tcp/{self.ports[2]}") if named else ()),
            *("--lane", str(self.ports[3]), "--page", str(self.keeper_page)),
            *("--directory", str(self.data_directory / "keeper")),
            *("--publish", str(self.exports), "--run-page", str(self.run_page)),
        ]


START = """
import ctypes, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 15)  # PR_SET_PDEATHSIG, SIGTERM: nobody is left to start it again
from peer.cli import main
main()
"""


FINAL = frozenset(int(code) for code in ExitCode if code.is_final)


@dataclass(slots=True)
class Part:
    """One process of the group, which is started again whenever it ends."""

    name: str
    arguments: Sequence[str]
    page: str
    """URL of its page."""

    heard: Callable[[str], None] = lambda line: None
    """Hears of each line of its output. Its log goes where the group's goes."""

    starts: int = 0
    trouble: str = "it has not answered yet"
    """Why it is not ready; empty if it is."""

    async def run(self) -> None:
        """Run it until this is cancelled, which ends it in order. Raises ``Unusable``."""
        pause_s = 1.0
        while True:
            started = time.monotonic()
            code = await self._run_once()
            if code in FINAL:
                raise Unusable(
                    f"the {self.name} has ended with code {code}; its own words are above",
                    section="part-ended",
                )
            self.trouble = f"it ended with code {code}"
            steady = time.monotonic() - started > STEADY_S
            pause_s = 1.0 if steady else min(2 * pause_s, PAUSE_MAX_S)
            _logger.warning("part_ended part=%s code=%s again_in_s=%g", self.name, code, pause_s)
            await asyncio.sleep(pause_s)

    async def _run_once(self) -> int:
        self.starts += 1
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-c", START, *self.arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            env={name: value for name, value in os.environ.items() if name != "NOTIFY_SOCKET"},
            start_new_session=True,  # a terminal's Ctrl-C comes once, from the group
        )
        try:
            assert process.stdout is not None
            async for line in process.stdout:
                self.heard(line.decode(errors="replace").rstrip())
            return await process.wait()
        finally:
            await self._end(process)

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        if process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(END_WITHIN_S):
                await process.communicate()
        except TimeoutError:
            process.kill()
            await process.wait()

    async def look(self, client: aiohttp.ClientSession) -> None:
        """Ask its page whether it is ready."""
        try:
            async with client.get(f"{self.page}readyz") as response:
                found = json.loads(await response.text())
        except (aiohttp.ClientError, TimeoutError, ValueError, OSError):
            self.trouble = self.trouble or "its page does not answer"
            return
        failed = [check for check in found["checks"] if not check["ok"]]
        self.trouble = "; ".join(f"{check['name']}: {check['reason']}" for check in failed)

    def check(self) -> Check:
        """Its line in ``/readyz`` of the group."""
        times = "" if self.starts <= 1 else f", started {self.starts} times"
        return Check(self.name, not self.trouble, f"{self.trouble or 'ready'}{times}; {self.page}")


async def serve(
    settings: GroupSettings, *, stop: asyncio.Event, on_ready: Callable[[Sequence[str], str], None]
) -> None:
    """Run the group until ``stop`` is set. ``on_ready(addresses, page)`` is called once its
    bootstrap peer has addresses. Raises ``Unusable`` or ``PageError``."""
    notifier = ServiceNotifier(settings.notify_socket)
    addresses: asyncio.Future[Sequence[str]] = asyncio.get_running_loop().create_future()

    def heard(line: str) -> None:
        if not addresses.done():
            addresses.set_result(json.loads(line)["addresses"][:SHORT_SEEDS])

    first = Part("bootstrap peer", settings.bootstrap(), settings.bootstrap_page.url, heard)
    parts = [first]

    async def keep() -> None:
        seeds = await addresses
        on_ready(seeds, url)
        notifier.say("READY=1")
        keeper = Part("keeper", settings.keeper(seeds), settings.keeper_page.url, _pass_on)
        parts.append(keeper)
        await keeper.run()

    pages = serve_pages(
        settings.page, checks=lambda: [part.check() for part in parts], metrics=lambda: ()
    )
    async with pages as url:
        endless = (first.run(), keep(), _watch(parts, notifier), stop.wait())
        tasks = [asyncio.ensure_future(work) for work in endless]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            notifier.say("STOPPING=1")
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _watch(parts: Sequence[Part], notifier: ServiceNotifier) -> None:
    timeout = aiohttp.ClientTimeout(total=ANSWER_WITHIN_S)
    async with aiohttp.ClientSession(timeout=timeout) as client:
        while True:
            await asyncio.gather(*(part.look(client) for part in parts))
            notifier.say("WATCHDOG=1")
            await asyncio.sleep(LOOK_EVERY_S)


def _pass_on(line: str) -> None:
    sys.stderr.write(f"keeper: {line}\n")
