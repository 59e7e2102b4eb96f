"""Real peers on a wide-area network: a learner at each site, and faults that happen to them.

Sites are data (``topology.Site``): public machines, regions, and homes behind routers. Faults are
``FAULTS``, by name. What a trial shows is counted by its user, ``tests.integration.wan``.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from peer.views.event_log import read_events
from tests.processes import Processes, signal_family
from tests.swarms.commands import Command, Learner, Record, Swarm, address_of, until
from tests.swarms.hurt_internet import HurtInternet
from tests.swarms.topology import Nat, Site

BOOTSTRAP = "bootstrap"
PORT = 7700
PUBLIC_MBIT = (50.0, 100.0, 20.0)
HOME_UP_MBIT, HOME_DOWN_MBIT = 20.0, 50.0
SLOW_MBIT = 1.0
DISTANCES_MS = (10.0, 35.0, 20.0, 30.0, 15.0, 25.0)
"""One way to the middle: pairs of sites are 40 to 140 ms apart, there and back."""

MEMBERSHIP_MS = 10.0
START_WITHIN_S = 240.0
"""Time for all learners to start at once, on a machine with a few cores that others use too."""


def sites(public: int, homes: Sequence[Nat], *, public_mbit: float | None = None) -> list[Site]:
    """A bootstrap host, public machines, and homes behind routers of these kinds.

    ``public_mbit``: rate of each public machine's line; ``None``: ``PUBLIC_MBIT`` in turn.
    """
    distances = [DISTANCES_MS[index % len(DISTANCES_MS)] for index in range(public + len(homes))]
    found = [Site(BOOTSTRAP, one_way_ms=MEMBERSHIP_MS)]
    for index in range(public):
        mbit = public_mbit or PUBLIC_MBIT[index % len(PUBLIC_MBIT)]
        found.append(
            Site(f"public{index}", one_way_ms=distances[index], up_mbit=mbit, down_mbit=mbit)
        )
    for index, nat in enumerate(homes):
        found.append(
            Site(
                f"home{index}",
                nat,
                one_way_ms=distances[public + index],
                up_mbit=HOME_UP_MBIT,
                down_mbit=HOME_DOWN_MBIT,
            )
        )
    return found


class Trial:
    """One learner on each site but the bootstrap host's."""

    def __init__(
        self,
        net: HurtInternet,
        processes: Processes,
        directory: Path,
        text: Callable[[str], str],
        relay: str | None = None,
        pace_s: float = 0.05,
    ) -> None:
        """``text``: the run file with this seed.

        ``relay``: rate at which the bootstrap host relays bulk data, as for ``--relay-bulk``.
        ``pace_s``: least time of a step.
        """
        self.net = net
        self.pace_s = pace_s
        self.swarm = Swarm(processes, directory)
        at = net.address(BOOTSTRAP)
        self.bootstrap: Command = self.swarm.bootstrap(
            listen=f"/ip4/{at}/tcp/{PORT}",
            prefix=net.at(BOOTSTRAP),
            options=() if relay is None else ("--relay-bulk", relay),
        )
        self.learners: dict[str, Learner] = {}
        self.link = ""
        for name in net.sites:
            if name == BOOTSTRAP:
                continue
            settings: dict[str, Any] = {
                "listen": f"/ip4/0.0.0.0/tcp/{PORT}",
                "prefix": net.at(name),
                "options": ["--page", "off"],
                "pace_s": pace_s,
            }
            if self.learners:
                self.learners[name] = self.swarm.join(name, self.link, **settings)
            else:
                run = text(address_of(self.bootstrap))
                self.learners[name] = self.swarm.start(name, run, **settings)
                self.link = self.learners[name].link()
        for learner in self.learners.values():
            learner.ready(timeout_s=START_WITHIN_S)
        self.absent: list[tuple[str, float, float]] = []
        """Learners whose process did not run, with the times of its end and return."""
        self.mended_at = 0.0
        """Time from which on all learners can be in one round again after the last fault."""

    def wait_until_all_merge(self, *, timeout_s: float = 180.0) -> None:
        """Wait until each learner has had its work merged once more."""
        before = {name: len(learner.own_rounds()) for name, learner in self.learners.items()}
        waiting = set(before)

        def have_merged() -> bool:
            for name in list(waiting):
                if len(self.learners[name].own_rounds()) > before[name]:
                    waiting.remove(name)
            return not waiting

        until(have_merged, "all learners merge again", timeout_s=timeout_s)

    @property
    def homes(self) -> list[str]:
        return [site.name for site in self.net.sites.values() if site.nat is not None]

    @property
    def public(self) -> list[str]:
        return [name for name in self.learners if name not in self.homes]

    def logs(self) -> dict[str, list[Record]]:
        """The event logs of all learners so far."""
        return {
            name: list(read_events(learner.directory / "events.jsonl"))
            for name, learner in self.learners.items()
        }

    def end(self) -> dict[str, Mapping[str, float]]:
        """Let all learners leave; returns the fates of their tokens."""
        fates = {record["name"]: record["fates"] for record in self._leave()}
        self.bootstrap.stop()
        self.bootstrap.wait()
        return fates

    def _leave(self) -> Iterator[dict[str, Any]]:
        for learner, record in zip(self.swarm.learners, self.swarm.end(), strict=True):
            yield {**record, "name": learner.name}


# --- faults ------------------------------------------------------------------------------------

Happening = Callable[[Trial, float], None]
"""Makes a fault happen, waits this many seconds, and ends it. It sets ``Trial.mended_at``."""


def cable(trial: Trial, seconds: float) -> None:
    """The line of a home is dead."""
    end = trial.net.cut((trial.homes or trial.public)[0])
    time.sleep(seconds)
    end()
    trial.mended_at = time.time()


def address(trial: Trial, seconds: float) -> None:
    """The provider of a home gives it another public address."""
    trial.net.readdress((trial.homes or trial.public)[0])
    trial.mended_at = time.time()
    time.sleep(seconds)


def forget(trial: Trial, seconds: float) -> None:
    """The router of a home forgets its connections."""
    trial.net.forget((trial.homes or trial.public)[0])
    trial.mended_at = time.time()
    time.sleep(seconds)


def sleep(trial: Trial, seconds: float) -> None:
    """A laptop at home sleeps. Its router forgets it, and who had a connection to it gives up.

    Unlike those of a suspended machine, the monotonic clocks of its processes go on.
    """
    name = (trial.homes or trial.public)[0]
    slept, process = time.time(), trial.learners[name].process
    wake = trial.net.cut(name)
    signal_family(process, signal.SIGSTOP)
    time.sleep(seconds)
    trial.net.forget(name)
    wake()
    signal_family(process, signal.SIGCONT)
    trial.mended_at = time.time()
    trial.absent.append((name, slept, trial.mended_at))


def bootstrap(trial: Trial, seconds: float) -> None:
    """The bootstrap host is killed, and started again."""
    trial.bootstrap.kill()
    time.sleep(seconds)
    trial.bootstrap.again()
    address_of(trial.bootstrap)
    trial.mended_at = time.time()


def slow(trial: Trial, seconds: float) -> None:
    """A line drops to ``SLOW_MBIT`` in both directions."""
    end = trial.net.slow_down((trial.public or trial.homes)[-1], SLOW_MBIT)
    time.sleep(seconds)
    end()
    trial.mended_at = time.time()


def narrow(trial: Trial, seconds: float) -> None:
    """The lines of all homes drop to ``SLOW_MBIT`` outwards, and stay there."""
    for home in trial.homes:
        trial.net.slow_down(home, SLOW_MBIT, only_up=True)
    trial.mended_at = time.time()
    time.sleep(seconds)


def split(trial: Trial, seconds: float) -> None:
    """The internet falls into two halves."""
    names = list(trial.learners)
    end = trial.net.split(names[: len(names) // 2])
    time.sleep(seconds)
    end()
    trial.mended_at = time.time()


def kill(trial: Trial, seconds: float) -> None:
    """A learner is killed with SIGKILL, and comes back half the time later."""
    name = list(trial.learners)[-1]
    learner = trial.learners[name]
    learner.kill()
    killed = time.time()
    time.sleep(seconds / 2)
    trial.mended_at = time.time()
    learner.come_back(trial.link)
    learner.ready(timeout_s=START_WITHIN_S)
    trial.absent.append((name, killed, time.time()))
    time.sleep(seconds / 2)


def quiet(trial: Trial, seconds: float) -> None:
    """Nothing happens."""
    trial.mended_at = time.time()
    time.sleep(seconds)


class Fault(NamedTuple):
    """What happens, for how long it usually does, and what it may cost."""

    happens: Happening
    seconds: float
    together_s: float
    """Bar: time until all learners are in one round again."""
    missed_max: float = 1.0
    """Bar: share of the member-rounds that may be missed meanwhile."""


FAULTS: Mapping[str, Fault] = {
    "quiet": Fault(quiet, 60.0, 15.0, 0.01),
    "cable": Fault(cable, 60.0, 15.0),
    "address": Fault(address, 60.0, 10.0, 0.05),
    "forget": Fault(forget, 60.0, 10.0, 0.05),
    "sleep": Fault(sleep, 120.0, 30.0),
    "bootstrap": Fault(bootstrap, 60.0, 15.0, 0.01),
    "slow": Fault(slow, 180.0, 45.0, 0.12),
    "narrow": Fault(narrow, 120.0, 30.0),
    "split": Fault(split, 90.0, 15.0),
    "kill": Fault(kill, 60.0, 15.0),
}
