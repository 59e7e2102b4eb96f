"""``shoal explain``: what happened, told from the event logs of one or several peers.

Logs become one timeline. Peers' clocks differ: rounds that two logs have in common show the
difference, and the times of all but the first log are shifted by it. Damaged lines are left out.
The stories are the summary of a run, a round, or a peer. Sentences, and who gets which event, are
those of ``peer.events``: the page of a peer shows the same.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Annotated, Any, TypeGuard

import typer
from typer import Argument, Option

from peer.cli.application import SEE, Json, show
from peer.errors import Unusable
from peer.events.names import Names, short
from peer.events.sentences import Fields
from peer.events.table import OPENED, Audience, audience_of, in_story
from peer.quantities import bytes_text, count_text, duration_text, plural
from peer.views.event_log import read_events

CLOCK_OFF_MIN_S = 1.0
"""Smaller offsets are not corrected: peers see the end of a round at slightly different moments."""

AT_MAX = 2.0**33
"""Latest accepted Unix time, in the 23rd century; ``datetime`` fails on much later ones."""


@dataclass(frozen=True, slots=True)
class Log:
    """One peer's events, oldest first."""

    peer: str
    """Id of the peer; the path of the log where its first line has no id."""
    name: str
    events: tuple[Fields, ...]
    clock_off_s: float = 0.0
    """Seconds added to the times of this log, to agree with the first one."""


def read_logs(events: Iterable[Fields], *, place: str) -> list[Log]:
    """The logs in one file: one for each peer that has written it, as the key of a folder changes
    with its key file. ``place`` is the name of one that does not say who it is."""
    owners: dict[str, str] = {}
    written: dict[str, list[Fields]] = {}
    early: list[Fields] = []
    mine = early
    for event in filter(_is_whole, events):
        if event["event"] == OPENED:
            peer = str(event.get("peer") or place)
            owners[peer] = str(event.get("name") or place)
            mine = written.setdefault(peer, [])
        mine.append(event)
    if early:
        # Files are deleted whole, so this is one whose first line was damaged.
        first = next(iter(owners), place)
        written[first] = [*early, *written.get(first, ())]
    return [Log(peer, owners.get(peer, place), tuple(own)) for peer, own in written.items()]


def aligned(logs: Sequence[Log]) -> list[Log]:
    """The logs, with the clocks of all but the first corrected by the rounds in common."""
    if not logs:
        return []
    done = [logs[0]]
    known = _round_times(logs[0])
    for log in logs[1:]:
        own = _round_times(log)
        apart = [known[round_id] - at for round_id, at in own.items() if round_id in known]
        off_s = median(apart) if apart else 0.0
        if abs(off_s) < CLOCK_OFF_MIN_S:
            off_s = 0.0
        moved = tuple({**event, "at": event["at"] + off_s} for event in log.events)
        done.append(replace(log, events=moved, clock_off_s=off_s))
        for round_id, at in own.items():
            known.setdefault(round_id, at + off_s)
    return done


def timeline(logs: Sequence[Log]) -> list[tuple[Log, Fields]]:
    """All events of all logs in the order of their times."""
    pairs = [(log, event) for log in logs for event in log.events]
    return sorted(pairs, key=lambda pair: (pair[1]["at"], pair[0].peer))


def _round_times(log: Log) -> dict[str, float]:
    return {
        event["round"]: event["at"]
        for event in log.events
        if event["event"] == "round" and event["outcome"] == "finished"
    }


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


_OF_A_ROUND: Mapping[str, type | tuple[type, ...]] = {
    "round": str,
    "fragment": int,
    "version": int,
    "outcome": str,
    "seconds": (int, float),
    "reason": str,
    "left_out": Mapping,
    "members": list,
    "contributors": list,
}


def _is_whole(event: Fields) -> bool:
    """``True`` if a line has the fields that stories read without a check."""
    at, name = event.get("at"), event.get("event")
    if not (_is_number(at) and 0 <= at < AT_MAX and isinstance(name, str)):
        return False
    return name != "round" or all(
        isinstance(event.get(key), kind) for key, kind in _OF_A_ROUND.items()
    )


REASONS_MAX = 3
"""The most frequent reasons of each kind that a summary lists."""

ROUND_ID_MIN = 6
"""The fewest characters that name a round: of fewer, "9" could be a version, too."""


def names_in(logs: Sequence[Log]) -> Names:
    """The names that occur in logs. Peers of the same name get a part of their id appended."""
    names: dict[str, str] = {}
    members: set[str] = set()
    for log in logs:
        for event in log.events:
            peer, name = event.get("peer"), event.get("name")
            if isinstance(peer, str) and isinstance(name, str) and name:
                names.setdefault(peer, name)
            if isinstance(event.get("members"), list):
                members.update(map(str, event["members"]))
        names[log.peer] = log.name
    for each in sorted(members):
        names.setdefault(each, short(each))
    often = Counter(names.values())
    return Names(
        {
            peer: f"{name} ({short(peer)})" if often[name] > 1 and name != peer else name
            for peer, name in names.items()
        }
    )


@dataclass(frozen=True, slots=True)
class Line:
    """One sentence of a story."""

    at: float
    who: str
    """The peer whose log has it; empty for a line about several logs."""
    text: str


# --- summary ----------------------------------------------------------------------------------


def overview(logs: Sequence[Log]) -> list[Line]:
    """A summary of the logs: rounds, peers left out, frequent problems."""
    events = timeline(logs)
    if not events:
        return []
    names = names_in(logs)
    lines = []
    begin, end = events[0][1]["at"], events[-1][1]["at"]
    rounds: dict[str, list[Fields]] = defaultdict(list)
    for _, event in events:
        if event["event"] == "round":
            rounds[event["round"]].append(event)
    finished = [s for s in rounds.values() if any(e["outcome"] == "finished" for e in s)]
    lines.append(
        Line(
            begin,
            "",
            f"{plural(len(logs), 'log')} of {duration_text(end - begin)}: "
            f"{plural(len(rounds), 'round')}, {len(finished)} of them finished",
        )
    )
    lines += [
        Line(
            begin,
            "",
            f"the clock of {log.name} was {abs(log.clock_off_s):.1f} s "
            f"{'behind' if log.clock_off_s > 0 else 'ahead'}; corrected",
        )
        for log in logs
        if log.clock_off_s
    ]
    left_out: Counter[str] = Counter()
    for seen in rounds.values():
        reasons = {who: why for event in seen for who, why in event["left_out"].items()}
        left_out.update(f"{names(who)}: {why}" for who, why in reasons.items())
    lines += [
        Line(begin, "", f"left out {_times(times)}: {names.within(what)}")
        for what, times in left_out.most_common(REASONS_MAX)
    ]
    for log in logs:
        lines += [Line(line.at, log.name, line.text) for line in _summary(log, names)]
    return lines


def _summary(log: Log, names: Names) -> list[Line]:
    """A summary of one peer's log."""
    if not log.events:
        return []
    at = log.events[0]["at"]
    rounds = [event for event in log.events if event["event"] == "round"]
    done = [event for event in rounds if event["outcome"] == "finished"]
    own = sum(bool(event.get("contributed")) for event in done)
    sent = sum(event.get("sent_bytes") or 0 for event in rounds)
    received = sum(event.get("received_bytes") or 0 for event in rounds)
    lines = [
        Line(
            at,
            "",
            f"{plural(len(done), 'round')} finished, {own} with its work; "
            f"{bytes_text(sent)} up, {bytes_text(received)} down",
        )
    ]
    troubles: Counter[str] = Counter()
    for event in log.events:
        given_up = event["event"] == "round" and event["outcome"] != "finished"
        if given_up or audience_of(event["event"]) & Audience.TROUBLE:
            troubles[in_story(event, names)] += 1
    lines += [
        Line(at, "", f"{_times(times)}: {text}")
        for text, times in troubles.most_common(REASONS_MAX)
    ]
    return lines


# --- a round ------------------------------------------------------------------------------------


def round_story(logs: Sequence[Log], wanted: str) -> list[Line]:
    """One round, as told by all logs.

    ``wanted``: the beginning of its id, or FRAGMENT/VERSION. Raises ``Unusable``.
    """
    names = names_in(logs)
    fits = _round_filter(wanted)
    reports = [(log, e) for log, e in timeline(logs) if e["event"] == "round" and fits(e)]
    if not reports:
        newest = [e for _, e in timeline(logs) if e["event"] == "round"][-3:]
        known = [f"{e['fragment']}/{e['version']} ({e['round'][:8]})" for e in newest]
        raise _nothing(f"round {wanted}", known or ["no round at all"])
    lines: list[Line] = []
    for round_id in dict.fromkeys(event["round"] for _, event in reports):
        own = [(log, event) for log, event in reports if event["round"] == round_id]
        lines += _one_round(own, names)
    return lines


def _codecs(event: Fields) -> str:
    """The codecs of a round: of uploads, and of merged slices if it is another one."""
    up, down = event["codec"], event.get("codec_down", event["codec"])
    return str(up) if up == down else f"{up} up, {down} down"


def _one_round(reports: Sequence[tuple[Log, Fields]], names: Names) -> list[Line]:
    done = [event for _, event in reports if event["outcome"] == "finished"]
    first = done[0] if done else reports[0][1]
    members = first["members"]
    begin = min(event["at"] - event["seconds"] for _, event in reports)
    headline = (
        f"round {first['round'][:8]}, fragment {first['fragment']}, for version "
        f"{first['version']} ({first['kind']}, {_codecs(first)}): led by "
        f"{names(first['leader'])}, {plural(len(members), 'member')}: "
        + ", ".join(names(peer) for peer in members)
    )
    lines: list[Line] = []
    for log, event in reports:
        lines += [
            Line(each["at"], log.name, in_story(each, names))
            for each in _steps_before(log, event)
            if audience_of(each["event"]) & Audience.ROUND
        ]
    if done:
        end = min(event["at"] for event in done)
        shares = zip(first["contributors"], first["weights"], strict=False)
        steps = first.get("marks", {})
        merged = ", ".join(f"{names(p)} {w:.0%}{_work_text(steps.get(p))}" for p, w in shares)
        lines.append(Line(end, "", f"merged: {merged or 'nobody'}"))
        lines += [
            Line(end, "", f"left out: {names(peer)}, because {names.within(why)}")
            for peer, why in sorted(first["left_out"].items())
        ]
    lines += [Line(event["at"], log.name, in_story(event, names)) for log, event in reports]
    here = {log.peer for log, _ in reports}
    silent = [names(peer) for peer in members if peer not in here]
    lines.sort(key=lambda line: line.at)
    lines.insert(0, Line(min(begin, lines[0].at), "", headline))
    if silent:
        lines.append(Line(lines[-1].at, "", f"no report of {', '.join(silent)} in these logs"))
    return lines


def _steps_before(log: Log, report: Fields) -> list[Fields]:
    """Events of the fragment in a log from the last time it was idle until the report."""
    steps: list[Fields] = []
    for event in log.events:
        if event is report:
            return steps
        if event.get("fragment") != report["fragment"]:
            continue
        if event["event"] in ("idle", "round"):
            steps = []
        else:
            steps.append(event)
    return steps


def _work_text(mark: Sequence[int] | None) -> str:
    """Steps and tokens of a contributor, from the field ``marks`` of a round."""
    if not mark or len(mark) < 4:
        return ""
    return f" ({plural(mark[2], 'step')}, {count_text(mark[3])} tokens)"


# --- a peer -------------------------------------------------------------------------------------


def peer_story(logs: Sequence[Log], wanted: str) -> list[Line]:
    """One peer in the run, from its own log and from what other logs say about it.

    ``wanted``: its name, or the beginning or end of its id. Raises ``Unusable``.
    """
    names = names_in(logs)
    peer = names.find(wanted)
    lines: list[Line] = []
    busy: list[Fields] = []

    def sum_up() -> None:
        if busy:
            own = sum(bool(event.get("contributed")) for event in busy)
            text = f"{plural(len(busy), 'round')} finished, {own} with its work"
            lines.append(Line(busy[-1]["at"], names(peer), text))
            busy.clear()

    for log, event in timeline(logs):
        name = event["event"]
        if log.peer == peer:
            if name == "round" and event["outcome"] == "finished" and not event["left_out"]:
                busy.append(event)
            elif audience_of(name) & Audience.PEER:
                sum_up()
                lines.append(Line(event["at"], log.name, in_story(event, names)))
        elif name == "round" and peer in event["left_out"]:
            why = names.within(event["left_out"][peer])
            text = f"round {event['fragment']}/{event['version']} left it out: {why}"
            sum_up()
            lines.append(Line(event["at"], log.name, text))
        elif event.get("peer") == peer and audience_of(name) & Audience.NAMED:
            sum_up()
            lines.append(Line(event["at"], log.name, in_story(event, names)))
    sum_up()
    if not lines:
        raise _nothing(f"peer {wanted}", names.all())
    return _without_repeats(lines)


def _nothing(wanted: str, known: Sequence[str]) -> Unusable:
    text = f"nothing about {wanted} in these logs; they know {', '.join(known)}"
    return Unusable(text, section="nothing-found")


def _without_repeats(lines: Sequence[Line]) -> list[Line]:
    """The lines, with equal consecutive ones merged into one."""
    kept: list[Line] = []
    times: list[int] = []
    for line in lines:
        if kept and (kept[-1].who, kept[-1].text) == (line.who, line.text):
            times[-1] += 1
        else:
            kept.append(line)
            times.append(1)
    return [
        replace(line, text=f"{line.text} ({_times(count)})") if count > 1 else line
        for line, count in zip(kept, times, strict=True)
    ]


def _round_filter(wanted: str) -> Callable[[Fields], bool]:
    if place := re.fullmatch(r"([0-9]{1,18})/([0-9]{1,18})", wanted):
        fragment, version = map(int, place.groups())
        return lambda event: (event["fragment"], event["version"]) == (fragment, version)
    if not re.fullmatch(f"[0-9a-f]{{{ROUND_ID_MIN},}}", wanted.lower()):
        raise Unusable(
            f"{wanted!r} names no round: it is FRAGMENT/VERSION such as 2/7, or the first "
            f"{ROUND_ID_MIN} or more characters of the round's id",
            section="no-round-name",
        )
    return lambda event: str(event["round"]).startswith(wanted.lower())


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


commands = typer.Typer()


@commands.command(rich_help_panel=SEE)
def explain(
    logs: Annotated[
        list[Path],
        Argument(metavar="LOG...", help="Event logs (events.jsonl), or folders of peers."),
    ],
    round_: Annotated[
        str | None,
        Option(
            "--round",
            help="FRAGMENT/VERSION, or the first 6 or more characters of a round id.",
            metavar="ROUND",
        ),
    ] = None,
    peer: Annotated[
        str | None, Option(help="Name of a peer, or the beginning or end of its id.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Explain event logs: what happened in a round, to a peer, or overall.

    Logs of several peers become one timeline, corrected for differences between clocks.

    Example: shoal explain anna/events.jsonl boris/events.jsonl --round 2/7
    """
    read = []
    for path in logs:
        file = path / "events.jsonl" if path.is_dir() else path
        if not file.is_file():
            raise typer.BadParameter(f"there is no event log at {file}")
        logs_in_file = read_logs(read_events(file), place=file.parent.name or str(file))
        if not logs_in_file:
            raise typer.BadParameter(f"there is no event in {file}; an event log is events.jsonl")
        read += logs_in_file
    known = aligned(read)
    if round_ is not None:
        story = round_story(known, round_)
    elif peer is not None:
        story = peer_story(known, peer)
    else:
        story = overview(known)
    width = max((len(line.who) for line in story), default=0)
    lines = (
        f"{datetime.fromtimestamp(line.at).isoformat(' ', 'milliseconds')}  "
        f"{line.who:{width}}  {line.text}"
        for line in story
    )
    show({"story": [asdict(line) for line in story]}, lines, as_json=as_json)
