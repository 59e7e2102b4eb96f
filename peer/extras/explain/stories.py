"""Stories from event logs: the summary of a run, a round, or a peer, in sentences."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from peer.errors import PeerError, Unusable
from peer.events.names import Names, short
from peer.events.sentences import Fields
from peer.events.table import OPENED, Audience, audience_of, in_story
from peer.extras.explain.logs import Log, timeline
from peer.extras.known_names import KnownNames
from peer.quantities import bytes_text, count_text, duration_text, plural

REASONS_MAX = 3
"""The most frequent reasons of each kind that a summary lists."""

ROUND_ID_MIN = 6
"""The fewest characters that name a round: of fewer, "9" could be a version, too."""


class NothingFound(PeerError):
    """The logs contain no such round or peer."""

    exit_code = 2
    wanted: str
    known: Sequence[str]

    def __str__(self) -> str:
        return f"nothing about {self.wanted} in these logs; they know {', '.join(self.known)}"


def names_in(logs: Sequence[Log]) -> KnownNames:
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
    return KnownNames(
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


def everything(logs: Sequence[Log]) -> list[Line]:
    """The timeline in sentences."""
    names = names_in(logs)
    return [
        Line(event["at"], log.name, in_story(event, names))
        for log, event in timeline(logs)
        if event["event"] != OPENED
    ]


# --- summary ----------------------------------------------------------------------------------


def overview(logs: Sequence[Log]) -> list[Line]:
    """A summary of the logs: rounds, directives in force, peers left out, frequent problems."""
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
    lines += [Line(begin, "", f"in force: {text}") for text in _in_force(events)]
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


def _in_force(events: Sequence[tuple[Log, Fields]]) -> list[str]:
    """The last directive of each signer, in words. A peer tells it again when it starts.

    A delegate's directive counts until its delegation ends or the owner bans the delegate.
    """
    newest: dict[str, Fields] = {}
    for _, event in events:
        if event["event"] == "directive":
            known = newest.get(event["signer"])
            if known is None or event["number"] >= known["number"]:
                newest[event["signer"]] = event
    end = events[-1][1]["at"]
    expires = {signer: event.get("expires_at") for signer, event in newest.items()}
    banned = {
        key
        for signer, event in newest.items()
        if expires[signer] is None
        for key in event.get("banned", "").split()
    }
    return [
        newest[signer]["text"]
        for signer, expires_at in sorted(expires.items())
        if signer not in banned and (expires_at is None or end < expires_at)
    ]


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

    ``wanted``: the beginning of its id, or FRAGMENT/VERSION. Raises ``Unusable`` or
    ``NothingFound``.
    """
    names = names_in(logs)
    fits = _round_filter(wanted)
    reports = [(log, e) for log, e in timeline(logs) if e["event"] == "round" and fits(e)]
    if not reports:
        newest = [e for _, e in timeline(logs) if e["event"] == "round"][-3:]
        known = [f"{e['fragment']}/{e['version']} ({e['round'][:8]})" for e in newest]
        raise NothingFound(f"round {wanted}", known or ["no round at all"])
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

    ``wanted``: its name, or the beginning or end of its id. Raises ``NothingFound`` or
    ``Unusable``.
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
        raise NothingFound(f"peer {wanted}", names.all())
    return _without_repeats(lines)


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
