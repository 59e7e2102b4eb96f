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
- *Together* is the time from the end of the fault, or from the command that starts a killed learner
  again, until one round merges the work of all learners. It has a bar for each fault, and so has
  the share of missed member-rounds.
- *Lost tokens* were discarded for good, by reason, over the whole run.
- *Sent* is what a learner's site sent per round with all headers, beside the prediction of
  ``examples/paper/bandwidth``: in an all-reduce each sends a fragment's values twice, except its
  own share.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

import msgspec

from dht.identity import Identity, PeerId
from examples.paper.bandwidth.run import Setting, gbit_s
from peer.run_file.reading import parse
from peer.run_file.sections import RunFile
from peer.run_file.writing import to_toml
from peer.trainer.needs import needs_of
from tests.integration.wan import accounting
from tests.integration.wan.accounting import Events, Uploading, Used, sent_for, watched, why_missed
from tests.processes import Processes
from tests.swarms.commands import run_text
from tests.swarms.hurt_internet import hurt_internet
from tests.swarms.topology import Site
from tests.swarms.wide_area import FAULTS, PORT, Trial


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
    mended_at: float = 0.0


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
    together_s: float = inf
    """Time from the end of what happened until all learners were in one round."""

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
    predicted_bytes: float
    """Bytes that a learner sends per round, without headers and all that is not a merge."""

    def sent_bytes(self, row: Row) -> float:
        """Bytes that a learner's site sent per round, with all headers."""
        return row.wire_bytes / len(self.fates) / max(1, row.rounds)

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
    logs: Mapping[str, Events],
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
                missed[why_missed(logs[name], each.fragment, since, each.at)] += 1
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
        next(
            (
                each.at - phase.mended_at
                for each in rounds
                if each.at >= phase.mended_at and each.contributors >= set(learners.values())
            ),
            inf,
        ),
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


def bars(row: Row) -> str:
    """Say whether a phase kept to what its fault may cost."""
    fault = FAULTS.get(row.phase)
    if fault is None:
        return ""
    above = []
    if row.together_s > fault.together_s:
        above.append(f"{fault.together_s:g} s")
    if row.missed_share > fault.missed_max:
        above.append(f"{fault.missed_max:.0%}")
    return f"MISSED: {', '.join(above)}" if above else "held"


def table(outcome: Outcome) -> str:
    """The figures as text."""
    lines = [
        f"{'phase':10} {'seconds':>7} {'rounds':>6} {'member-rounds':>13} {'missed':>6} "
        f"{'share':>6} {'payload':>9} {'packed':>9} {'extra':>6} {'sent (predicted)':>18} "
        f"{'together':>8}  bars"
    ]
    lines += [
        f"{each.phase:10} {each.seconds:7.0f} {each.rounds:6} {each.member_rounds:13} "
        f"{each.missed:6} {each.missed_share:6.1%} {each.payload_bytes / 1e6:6.1f} MB "
        f"{each.packed_bytes / 1e6:6.1f} MB {each.extra_share:6.1%} "
        f"{outcome.sent_bytes(each) / 1e6:7.3f} ({outcome.predicted_bytes / 1e6:.3f}) MB "
        f"{each.together_s:6.1f} s  {bars(each)}"
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
        steps = self._steps()
        with watched(self.trial.net) as seen:
            yield
        ended, after = time.time(), self._sent_bytes()
        used_now = Used.now()
        self.tell(f"{name}: processors in use: {used_now.since(used)}")
        computing = (self._steps() - steps) * self.trial.pace_s / (ended - began)
        self.tell(f"{name}: computing {computing / len(self.trial.learners):.0%} of the time")
        by_kind = self._counted() - counted
        sent = ", ".join(f"{kind} {count / 1e6:.2f} MB" for kind, count in by_kind.items())
        self.tell(f"{name}: sent: {sent}")
        self.phases.append(
            Phase(
                name,
                began,
                ended,
                sum(before.values()),
                sum(after.values()),
                by_kind["lane_empty"] + by_kind["daemon_empty"],
                used_now.by_kind.get("agents", 0.0) - used.by_kind.get("agents", 0.0),
                self.trial.mended_at,
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

    def _steps(self) -> int:
        """Steps of all trainers, by their last reports."""
        return sum(each.progress().get("steps", 0) for each in self.trial.learners.values())

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
    run: RunFile | None = None,
    **changes: Any,
) -> Outcome:
    """Train on these sites while this happens: names of ``FAULTS``, and seconds.

    Every fault is followed by a phase ``after ...`` that lasts until all learners merge again, for
    180 s at most. ``tell`` gets lines about each phase. What is trained is ``run``, with other
    seeds, or a tiny model: ``changes`` are those of ``run_text``.
    """
    trained = run or parse(run_text(**changes))

    def text(seed: str) -> str:
        return to_toml(msgspec.structs.replace(trained, seeds=[seed]))

    with hurt_internet(where, loss=loss) as net:
        accounting.count_by_port(net, PORT)
        trial = Trial(net, processes, directory, text, relay, pace_s)
        trial.wait_until_all_merge()
        course = _Course(trial, tell)
        for name, seconds in happenings:
            tell(f"{name}: {seconds:g} s")
            with course.phase(name):
                FAULTS[name].happens(trial, seconds)
            if name != "quiet":
                with course.phase(f"after {name}"[:10]):
                    trial.wait_until_all_merge()
        fates = trial.end()
    learners = {
        name: Identity.load(learner.directory / "identity.key").peer_id
        for name, learner in trial.learners.items()
    }
    logs = trial.logs()
    rounds = finished_rounds(logs.values())
    rows = tuple(row(phase, rounds, learners, trial.absent, logs) for phase in course.phases)
    for phase, each in zip(course.phases, rows, strict=True):
        sent = sent_for(logs.values(), phase.began, phase.ended)
        tell(spent(phase, each, sent, trained.policy.audits))
    return Outcome(rows, fates, predicted_bytes(trained, len(learners), pace_s))


def predicted_bytes(run: RunFile, learners: int, step_s: float) -> float:
    """Bytes that each learner sends per round of one fragment."""
    outer = run.outer
    setting = Setting(
        parameters=needs_of(run).parameters,
        step_s=step_s,
        learners=learners,
        codec="/".join(outer.codecs),
        steps_per_cycle=outer.steps_per_cycle,
        fragments=outer.fragments,
    )
    return gbit_s("shoal", setting) * 1e9 / 8 * outer.steps_per_cycle * step_s / outer.fragments
