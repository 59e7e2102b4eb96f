"""Trains real peers on a wide-area network, lets faults happen to it, and counts what they cost.

The figures of each phase come from the peers' event logs and from the byte counters of the sites'
lines, at the end:

- A *member-round* is one finished round and one learner whose process ran when the round finished.
  It is *missed* if the round merged no work of that learner, whatever the reason.
- *Payload* is what the members of finished rounds received in them: all of it is there when a
  member has the new version, while what it sends as a reducer may still be on its way to others.
  On the line it is packed. A round that began before a phase or ends after it counts for the share
  of its time in the phase.
- *Extra bytes* are what the sites sent beyond the packed payload, as a share of it: headers,
  membership, audits, replays, states for those who fell behind, failed rounds.
- *Lost tokens* were discarded for good, by reason, over the whole run.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dht.identity import Identity, PeerId
from peer.views.event_log import read_events
from tests.integration.swarm_processes import Command, Learner, Swarm, address_of, run_text, until
from tests.integration.wan import accounting, causes
from tests.integration.wan.accounting import Used
from tests.integration.wan.network import HurtInternet, hurt_internet
from tests.integration.wan.uplinks import Uploading, watched
from tests.processes import Processes
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


def sites(public: int, homes: Sequence[Nat], *, up_mbit: float = HOME_UP_MBIT) -> list[Site]:
    """A bootstrap host, public machines, and homes behind routers of these kinds.

    ``up_mbit``: rate of each home's line outwards.
    """
    distances = [DISTANCES_MS[index % len(DISTANCES_MS)] for index in range(public + len(homes))]
    found = [Site(BOOTSTRAP, one_way_ms=MEMBERSHIP_MS)]
    for index in range(public):
        mbit = PUBLIC_MBIT[index % len(PUBLIC_MBIT)]
        found.append(
            Site(f"public{index}", one_way_ms=distances[index], up_mbit=mbit, down_mbit=mbit)
        )
    for index, nat in enumerate(homes):
        found.append(
            Site(
                f"home{index}",
                nat,
                one_way_ms=distances[public + index],
                up_mbit=up_mbit,
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
        text: str,
        relay: str | None = None,
        pace_s: float = 0.05,
    ) -> None:
        """``text``: a run file without seeds, as from ``run_text``.

        ``relay``: rate at which the bootstrap host relays bulk data, as for ``--relay-bulk``.
        ``pace_s``: least time of a step.
        """
        self.net = net
        self.swarm = Swarm(processes, directory)
        at = net.address(BOOTSTRAP)
        self.bootstrap: Command = self.swarm.bootstrap(
            listen=f"/ip4/{at}/tcp/{PORT}",
            prefix=net.at(BOOTSTRAP),
            options=() if relay is None else ("--relay-bulk", relay),
        )
        text = text.replace("seeds = []", f'seeds = ["{address_of(self.bootstrap)}"]')
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
                self.learners[name] = self.swarm.start(name, text, **settings)
                self.link = self.learners[name].link()
        for learner in self.learners.values():
            learner.ready(timeout_s=START_WITHIN_S)
        self.absent: list[tuple[str, float, float]] = []
        """Learners whose process did not run, with the times of its end and return."""

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
"""Makes a fault happen, waits this many seconds, and ends it."""


def cable(trial: Trial, seconds: float) -> None:
    """The line of a home is dead."""
    end = trial.net.cut((trial.homes or trial.public)[0])
    time.sleep(seconds)
    end()


def address(trial: Trial, seconds: float) -> None:
    """The provider of a home gives it another public address."""
    trial.net.readdress((trial.homes or trial.public)[0])
    time.sleep(seconds)


def forget(trial: Trial, seconds: float) -> None:
    """The router of a home forgets its connections."""
    trial.net.forget((trial.homes or trial.public)[0])
    time.sleep(seconds)


def bootstrap(trial: Trial, seconds: float) -> None:
    """The bootstrap host is killed, and started again."""
    trial.bootstrap.kill()
    time.sleep(seconds)
    trial.bootstrap.again()
    address_of(trial.bootstrap)


def slow(trial: Trial, seconds: float) -> None:
    """A line drops to ``SLOW_MBIT`` in both directions."""
    end = trial.net.slow_down((trial.public or trial.homes)[-1], SLOW_MBIT)
    time.sleep(seconds)
    end()


def narrow(trial: Trial, seconds: float) -> None:
    """The lines of all homes drop to ``SLOW_MBIT`` outwards, and stay there."""
    for home in trial.homes:
        trial.net.slow_down(home, SLOW_MBIT, only_up=True)
    time.sleep(seconds)


def split(trial: Trial, seconds: float) -> None:
    """The internet falls into two halves."""
    names = list(trial.learners)
    end = trial.net.split(names[: len(names) // 2])
    time.sleep(seconds)
    end()


def kill(trial: Trial, seconds: float) -> None:
    """A learner is killed with SIGKILL, and comes back half the time later."""
    name = list(trial.learners)[-1]
    learner = trial.learners[name]
    learner.kill()
    killed = time.time()
    time.sleep(seconds / 2)
    learner.come_back(trial.link)
    learner.ready(timeout_s=START_WITHIN_S)
    trial.absent.append((name, killed, time.time()))
    time.sleep(seconds / 2)


def quiet(trial: Trial, seconds: float) -> None:
    """Nothing happens."""
    time.sleep(seconds)


FAULTS: Mapping[str, tuple[Happening, float]] = {
    "quiet": (quiet, 60.0),
    "cable": (cable, 60.0),
    "address": (address, 60.0),
    "forget": (forget, 60.0),
    "bootstrap": (bootstrap, 60.0),
    "slow": (slow, 180.0),
    "narrow": (narrow, 120.0),
    "split": (split, 90.0),
    "kill": (kill, 60.0),
}
"""The faults by name, each with its usual duration in seconds."""


# --- figures -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Phase:
    """A period with or without a fault, and the bytes that all sites had sent at both ends."""

    name: str
    began: float
    ended: float
    began_bytes: int
    ended_bytes: int
    empty_bytes: int = 0
    """In packets without content."""
    agents_s: float = 0.0
    """Processor time of all agents."""


@dataclass(slots=True)
class Round:
    """A finished round, as the logs of its members describe it."""

    at: float
    fragment: int
    contributors: frozenset[PeerId]
    received: list[tuple[float, float, int, int]] = field(default_factory=list)
    """For each member, when it began and ended, its received bytes, and those on the line."""

    def received_within(self, began: float, ended: float) -> tuple[float, float]:
        """Bytes that all members received in a period, as if at an even rate, and on the line."""
        payload = packed = 0.0
        for since, until_, size, line_size in self.received:
            share = max(0.0, min(until_, ended) - max(since, began)) / (until_ - since)
            payload, packed = payload + share * size, packed + share * line_size
        return payload, packed


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of one phase."""

    phase: str
    seconds: float
    rounds: int
    member_rounds: int
    missed: int
    payload_bytes: float
    packed_bytes: float
    wire_bytes: int
    missed_by: Mapping[str, int] = field(default_factory=dict)
    """The missed member-rounds by cause."""

    @property
    def missed_share(self) -> float:
        return self.missed / self.member_rounds if self.member_rounds else 0.0

    @property
    def extra_share(self) -> float:
        """``inf`` if nothing was merged at all."""
        return self.wire_bytes / self.packed_bytes - 1 if self.packed_bytes else float("inf")


@dataclass(frozen=True, slots=True)
class Outcome:
    """All figures of a trial."""

    rows: tuple[Row, ...]
    fates: Mapping[str, Mapping[str, float]]
    """Tokens by fate, of each learner."""

    @property
    def lost_tokens(self) -> Counter[str]:
        """Discarded tokens of all learners, by reason."""
        lost: Counter[str] = Counter()
        for fates in self.fates.values():
            for reason, tokens in fates.items():
                if reason not in ("processed", "merged", "pending") and tokens:
                    lost[reason] += round(tokens)
        return lost


def finished_rounds(logs: Iterable[Iterable[Mapping[str, Any]]]) -> list[Round]:
    """The finished rounds of all logs, each once, with the bytes of all its members."""
    found: dict[str, Round] = {}
    for log in logs:
        for event in log:
            if event["event"] != "round" or event["outcome"] != "finished":
                continue
            known = found.setdefault(
                event["round"],
                Round(event["at"], event["fragment"], frozenset(event["contributors"])),
            )
            known.at = min(known.at, event["at"])
            began = event["at"] - max(event["seconds"], 1e-3)
            sizes = event["received_bytes"], event["received_line_bytes"]
            known.received.append((began, event["at"], *sizes))
    return sorted(found.values(), key=lambda each: each.at)


def row(
    phase: Phase,
    rounds: Iterable[Round],
    learners: Mapping[str, PeerId],
    absent: Sequence[tuple[str, float, float]],
    logs: Mapping[str, causes.Events],
) -> Row:
    """Count what happened during one phase."""
    rounds = list(rounds)
    inside = [each for each in rounds if phase.began <= each.at < phase.ended]
    members, missed = 0, Counter[str]()
    for each in inside:
        away = {name for name, since, until_ in absent if since <= each.at < until_}
        there = {name: peer for name, peer in learners.items() if name not in away}
        members += len(there)
        earlier = [r.at for r in rounds if r.fragment == each.fragment and r.at < each.at]
        for name, peer in there.items():
            if peer not in each.contributors:
                since = max(earlier, default=0.0)
                missed[causes.why_missed(logs[name], each.fragment, since, each.at)] += 1
    received = [each.received_within(phase.began, phase.ended) for each in rounds]
    return Row(
        phase.name,
        phase.ended - phase.began,
        len(inside),
        members,
        missed.total(),
        sum(payload for payload, _ in received),
        sum(packed for _, packed in received),
        phase.ended_bytes - phase.began_bytes,
        missed,
    )


def spent(phase: Phase, row: Row, sent_for: Mapping[str, int], audits: float) -> str:
    """The use of the bytes of a phase, as shares of the packed payload, and the time of agents.

    ``audits``: the share of the merged pieces that are audited. To audit a piece moves the uploads
    of it, half of what a round moves.
    """
    if not row.packed_bytes or not row.member_rounds:
        return f"{phase.name}: no finished rounds"
    streams = sum(sent_for.values())
    parts = {
        "audits": sent_for.get("audit", 0),
        f"of which at their rate of {audits:g}": audits / 2 * row.packed_bytes,
        "replays and states": sent_for.get("fetch", 0),
        "bulk beyond finished rounds": sent_for.get("bulk", 0) - row.packed_bytes,
        "messages of rounds": sent_for.get("control", 0),
        "packets without content": phase.empty_bytes,
        "headers, calls and membership": row.wire_bytes - phase.empty_bytes - streams,
    }
    agents_ms = 1e3 * phase.agents_s / row.member_rounds
    shares = ", ".join(f"{what} {size / row.packed_bytes:.1%}" for what, size in parts.items())
    missed = ", ".join(f"{why} {count}" for why, count in sorted(row.missed_by.items()))
    return (
        f"{phase.name}: {row.wire_bytes / 1e6:.1f} MB on the wire, of the packed payload: {shares}"
        f"\n{phase.name}: missed by cause: {missed or 'none'}"
        f"\n{phase.name}: agents {agents_ms:.0f} ms of processor time"
        " per peer and round"
    )


def table(outcome: Outcome) -> str:
    """The figures as text."""
    lines = [
        f"{'phase':10} {'seconds':>7} {'rounds':>6} {'member-rounds':>13} {'missed':>6} "
        f"{'share':>6} {'payload':>9} {'packed':>9} {'extra':>6}"
    ]
    lines += [
        f"{each.phase:10} {each.seconds:7.0f} {each.rounds:6} {each.member_rounds:13} "
        f"{each.missed:6} {each.missed_share:6.1%} {each.payload_bytes / 1e6:6.1f} MB "
        f"{each.packed_bytes / 1e6:6.1f} MB {each.extra_share:6.1%}"
        for each in outcome.rows
    ]
    for name, fates in outcome.fates.items():
        parts = ", ".join(f"{fate} {tokens:.0f}" for fate, tokens in fates.items() if tokens)
        lines.append(f"tokens of {name}: {parts}")
    lost = outcome.lost_tokens
    reasons = ", ".join(f"{reason} {tokens}" for reason, tokens in sorted(lost.items()))
    lines.append(f"tokens lost: {lost.total()}" + (f" ({reasons})" if reasons else ""))
    return "\n".join(lines)


@dataclass(slots=True)
class _Course:
    """The phases of a trial so far."""

    trial: Trial
    tell: Callable[[str], None]
    phases: list[Phase] = field(default_factory=list)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began, before, used, counted = time.time(), self._sent_bytes(), Used.now(), self._counted()
        segments = accounting.segments(self.trial.net)
        with watched(self.trial.net) as seen:
            yield
        ended, after = time.time(), self._sent_bytes()
        used_now = Used.now()
        self.tell(f"{name}: processors in use: {used_now.since(used)}")
        by_kind = self._counted() - counted
        sent = ", ".join(f"{kind} {count / 1e6:.2f} MB" for kind, count in by_kind.items())
        segments = accounting.segments(self.trial.net) - segments
        self.tell(f"{name}: sent: {sent}; {segments['again']} of {segments['sent']} segments again")
        self.phases.append(
            Phase(
                name,
                began,
                ended,
                sum(before.values()),
                sum(after.values()),
                by_kind["lane_empty"] + by_kind["daemon_empty"],
                used_now.by_kind.get("agents", 0.0) - used.by_kind.get("agents", 0.0),
            )
        )
        uplinks = [
            f"{8e-6 * (after[name] - before[name]) / (ended - began) / site.up_mbit:.0%} of {name}"
            for name, site in self.trial.net.lines.items()
            if site.up_mbit is not None
        ]
        self.tell(f"{name}: uplinks in use: {', '.join(uplinks)}")
        self.tell(f"{name}: uplinks while uploading: {', '.join(self._uploading(seen))}")

    def _uploading(self, seen: Sequence[tuple[float, Mapping[str, int]]]) -> Iterator[str]:
        for name, site in self.trial.net.lines.items():
            if site.up_mbit is not None:
                counts = [(at, counts[name]) for at, counts in seen]
                found = Uploading.of(counts, site.up_mbit * 125_000)
                yield f"{found.line_share:.0%} of {name} in {found.time_share:.0%} of the time"

    def _counted(self) -> Counter[str]:
        return accounting.counted(self.trial.net)

    def _sent_bytes(self) -> dict[str, int]:
        return {site: self.trial.net.sent_bytes(site) for site in self.trial.net.sites}


def conduct(
    where: Sequence[Site],
    happenings: Sequence[tuple[str, float]],
    processes: Processes,
    directory: Path,
    *,
    loss: float = 0.0,
    relay: str | None = None,
    pace_s: float = 0.05,
    tell: Callable[[str], None] = lambda _: None,
    audits: float = 0.1,
    **changes: Any,
) -> Outcome:
    """Train on these sites while this happens: names of ``FAULTS``, and seconds.

    Every fault is followed by a phase ``after ...`` that lasts until all learners merge again, for
    180 s at most. ``changes`` are those of ``run_text``. ``tell`` gets lines about each phase.
    ``audits``: the run's share of audited pieces.
    """
    changes["policy"] = f"\n[policy]\naudit_rate = {audits}\n"
    with hurt_internet(where, loss=loss) as net:
        accounting.count_by_port(net, PORT)
        trial = Trial(net, processes, directory, run_text(**changes), relay, pace_s)
        trial.wait_until_all_merge()
        course = _Course(trial, tell)
        for name, seconds in happenings:
            tell(f"{name}: {seconds:g} s")
            with course.phase(name):
                FAULTS[name][0](trial, seconds)
            if name != "quiet":
                with course.phase(f"after {name}"[:10]):
                    trial.wait_until_all_merge()
        fates = trial.end()
    learners = {
        name: Identity.load(learner.directory / "identity.key").peer_id
        for name, learner in trial.learners.items()
    }
    logs = {
        name: list(read_events(learner.directory / "events.jsonl"))
        for name, learner in trial.learners.items()
    }
    rounds = finished_rounds(logs.values())
    rows = tuple(row(phase, rounds, learners, trial.absent, logs) for phase in course.phases)
    for phase, each in zip(course.phases, rows, strict=True):
        sent = causes.sent_for(logs.values(), phase.began, phase.ended)
        tell(spent(phase, each, sent, audits))
    return Outcome(rows, fates)
