"""What happened, from event logs: the story of a run, of a round, or of a peer, in sentences.

Pure: events in, sentences out. Several peers' logs become one timeline; as their clocks differ,
each log is shifted by what the rounds that it shares with the first one tell of its clock.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, TypeGuard

from peer.errors import PeerError
from peer.quantities import bytes_text, count_text, duration_text
from peer.views.event_log import OPENED

Event = Mapping[str, Any]

CLOCK_OFF_MIN_S = 1.0
"""Less is not corrected: peers see the end of a round at slightly different moments."""

NAMES_MAX = 4096

AT_MAX = 2.0**33
"""A date that calendars have, in the 23rd century."""

REASONS_MAX = 3
"""Of each kind in a summary: the most frequent ones."""


@dataclass(frozen=True, slots=True)
class Log:
    """One peer's events, oldest first."""

    peer: str
    """Its id; where the log does not say it, the log's place."""
    name: str
    events: tuple[Event, ...]
    clock_off_s: float = 0.0
    """By so much its times were moved to agree with those of the first log."""


@dataclass(frozen=True, slots=True)
class Line:
    """One sentence of a story."""

    at: float
    who: str
    """The peer whose log says so; empty for what several say."""
    text: str


class NothingFound(PeerError):
    """No such round or peer in these logs."""

    exit_code = 2

    def __init__(self, wanted: str, known: Sequence[str]) -> None:
        super().__init__(wanted, known)
        self.wanted = wanted
        self.known = known

    def __str__(self) -> str:
        return f"nothing about {self.wanted} in these logs; they know {', '.join(self.known)}"


def read_log(events: Iterable[Event], *, place: str) -> Log:
    """One log. ``place`` names it if its own first line does not."""
    kept = tuple(event for event in events if _is_whole(event))
    opened = next((event for event in kept if event["event"] == OPENED), {})
    peer = str(opened.get("peer") or place)
    return Log(peer, str(opened.get("name") or place), kept)


def aligned(logs: Sequence[Log]) -> list[Log]:
    """The logs, the clocks of all but the first corrected by the rounds they have in common."""
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


def timeline(logs: Sequence[Log]) -> list[tuple[Log, Event]]:
    """All events of all logs in the order of their times."""
    told = [(log, event) for log in logs for event in log.events]
    return sorted(told, key=lambda pair: (pair[1]["at"], pair[0].peer))


def everything(logs: Sequence[Log]) -> list[Line]:
    """The timeline in words."""
    names = Names.of(logs)
    return [
        Line(event["at"], log.name, told(event, names))
        for log, event in timeline(logs)
        if event["event"] != OPENED
    ]


# --- the whole ----------------------------------------------------------------------------------


def overview(logs: Sequence[Log]) -> list[Line]:
    """What these logs are about, and what went wrong in them."""
    told = timeline(logs)
    if not told:
        return []
    names = Names.of(logs)
    lines = []
    begin, end = told[0][1]["at"], told[-1][1]["at"]
    rounds: dict[str, list[Event]] = defaultdict(list)
    for _, event in told:
        if event["event"] == "round":
            rounds[event["round"]].append(event)
    finished = [s for s in rounds.values() if any(e["outcome"] == "finished" for e in s)]
    lines.append(
        Line(
            begin,
            "",
            f"{_count(len(logs), 'log')} of {duration_text(end - begin)}: "
            f"{_count(len(rounds), 'round')}, {len(finished)} of them finished",
        )
    )
    lines += [
        Line(begin, "", f"the clock of {log.name} was {_off(log.clock_off_s)}; corrected here")
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
        lines += [Line(line.at, log.name, line.text) for line in _part_of(log, names)]
    return lines


def _part_of(log: Log, names: Names) -> list[Line]:
    """One peer's part in a run, summed up."""
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
            f"{_count(len(done), 'round')} finished, {own} with its work; "
            f"{bytes_text(sent)} up, {bytes_text(received)} down",
        )
    ]
    troubles: Counter[str] = Counter()
    for event in log.events:
        if event["event"] in _TROUBLES or _is_given_up(event):
            troubles[told(event, names)] += 1
    lines += [
        Line(at, "", f"{_times(times)}: {text}")
        for text, times in troubles.most_common(REASONS_MAX)
    ]
    return lines


# --- a round ------------------------------------------------------------------------------------


def round_story(logs: Sequence[Log], wanted: str) -> list[Line]:
    """One round as everybody whose log is here lived it.

    ``wanted``: the beginning of its id, or FRAGMENT/VERSION. Raises ``NothingFound``.
    """
    names = Names.of(logs)
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


def _one_round(reports: Sequence[tuple[Log, Event]], names: Names) -> list[Line]:
    done = [event for _, event in reports if event["outcome"] == "finished"]
    first = done[0] if done else reports[0][1]
    members = first["members"]
    begin = min(event["at"] - event["seconds"] for _, event in reports)
    headline = (
        f"round {first['round'][:8]}, fragment {first['fragment']}, for version "
        f"{first['version']} ({first['kind']}, {first['codec']}): led by "
        f"{names(first['leader'])}, {_count(len(members), 'member')}: "
        + ", ".join(names(peer) for peer in members)
    )
    lines: list[Line] = []
    for log, event in reports:
        lines += [
            Line(each["at"], log.name, told(each, names))
            for each in _before(log, event)
            if each["event"] not in BY_THE_WAY
        ]
    if done:
        end = min(event["at"] for event in done)
        shares = zip(first["contributors"], first["weights"], strict=False)
        steps = first.get("marks", {})
        merged = ", ".join(f"{names(p)} {w:.0%}{_work(steps.get(p))}" for p, w in shares)
        lines.append(Line(end, "", f"merged: {merged or 'nobody'}"))
        lines += [
            Line(end, "", f"left out: {names(peer)}, because {names.within(why)}")
            for peer, why in sorted(first["left_out"].items())
        ]
    lines += [Line(event["at"], log.name, told(event, names)) for log, event in reports]
    here = {log.peer for log, _ in reports}
    silent = [names(peer) for peer in members if peer not in here]
    lines.sort(key=lambda line: line.at)
    lines.insert(0, Line(min(begin, lines[0].at), "", headline))
    if silent:
        lines.append(Line(lines[-1].at, "", f"no report of {', '.join(silent)} in these logs"))
    return lines


def _before(log: Log, report: Event) -> list[Event]:
    """What happened to the fragment at this peer since the last time that it was idle."""
    steps: list[Event] = []
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


def _work(mark: Sequence[int] | None) -> str:
    """(incarnation, mark, steps, tokens), as a round tells of a contributor."""
    if not mark or len(mark) < 4:
        return ""
    return f" ({_count(mark[2], 'step')}, {count_text(mark[3])} tokens)"


# --- a peer -------------------------------------------------------------------------------------


def peer_story(logs: Sequence[Log], wanted: str) -> list[Line]:
    """One peer's life in the run, by its own log and by what others say of it.

    ``wanted``: its name, or the beginning or end of its id. Raises ``NothingFound``.
    """
    names = Names.of(logs)
    peer = names.find(wanted)
    lines: list[Line] = []
    busy: list[Event] = []

    def sum_up() -> None:
        if busy:
            own = sum(bool(event.get("contributed")) for event in busy)
            text = f"{_count(len(busy), 'round')} finished, {own} with its work"
            lines.append(Line(busy[-1]["at"], names(peer), text))
            busy.clear()

    for log, event in timeline(logs):
        name = event["event"]
        if log.peer == peer:
            if name == "round" and event["outcome"] == "finished" and not event["left_out"]:
                busy.append(event)
            elif name not in BY_THE_WAY and name not in EVERY_ROUND:
                sum_up()
                lines.append(Line(event["at"], log.name, told(event, names)))
        elif name == "round" and peer in event["left_out"]:
            why = names.within(event["left_out"][peer])
            text = f"round {event['fragment']}/{event['version']} left it out: {why}"
            sum_up()
            lines.append(Line(event["at"], log.name, text))
        elif event.get("peer") == peer and name in _OF_OTHERS:
            sum_up()
            lines.append(Line(event["at"], log.name, told(event, names)))
    sum_up()
    if not lines:
        raise NothingFound(f"peer {wanted}", names.all())
    return _without_repeats(lines)


def _without_repeats(lines: Sequence[Line]) -> list[Line]:
    """What three peers note, or one notes ten times in a row, is said once."""
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


# --- words --------------------------------------------------------------------------------------

EVERY_ROUND = frozenset(
    [
        "gathering",
        "joining",
        "came_when_called",
        "entered",
        "closed",
        "sealed",
        "learned_seal",
        "applying",
        "finished",
        "redirected",
        "caught_up",
        "merged_slice_handed_over",
        "told_closed",
        "handed_over",
    ]
)
"""The ordinary course of a round: told in its story, not in a peer's."""

BY_THE_WAY = frozenset(
    ["log", "idle", "heard_finished", "redirect", "told_behind", "checkpoint", "held"]
)
"""Told by nobody: what others did is in their logs."""

_TROUBLES = frozenset(
    [
        "no_quorum",
        "refused",
        "not_a_commit",
        "upload_failed",
        "upload_refused",
        "not_taken",
        "leader_silent",
        "silent",
        "passed_over",
        "too_late",
        "took_over",
        "reassigned",
        "ballot_without_majority",
        "gave_up",
        "void",
        "catch_up_failed",
        "replay_failed",
        "fetch_failed",
        "work_lost",
        "written_off",
        "not_finite",
        "disk_full",
        "checkpoint_failed",
        "clock_off",
        "nobody_answered",
        "trainer_rests",
        "discarded",
        "declined_by",
        "peer_lost",
        "paused",
    ]
)

_OF_OTHERS = frozenset(
    [
        "peer_joined",
        "peer_left",
        "peer_lost",
        "refused",
        "not_a_commit",
        "upload_refused",
        "declined_by",
        "link_lost",
    ]
)

_SENTENCES: Mapping[str, str] = {
    "agent_started": "started",
    "agent_ended": "ended: {reason}",
    "founded": "began the run",
    "phase": "{name}: {text}",
    "gathering": "called the others of its group: the fragment is due",
    "found": "called others who had come into sight: {peers}",
    "came_when_called": "came when {leader} called",
    "joining": "offered its work to {leader}",
    "redirect": "sent {peer} on to {to}",
    "redirected": "{by} sent it on to {to}",
    "turned_away": "{by} turned it away: {reason}",
    "closed": "closed the roster with {members} of {live}: {reason} (after {waited_s:.1f} s)",
    "no_quorum": "gave the round up: {reason}",
    "entered": "took part; slices that it reduces: {slices}",
    "sealed": "sealed {contributors} contributions: {reason}",
    "learned_seal": "learned the seal of {contributors} contributions",
    "applying": "had everything and took the outer step",
    "finished": "stands at version {version}",
    "upload_failed": "could not send slice {slice} to {to}: {reason}",
    "upload_refused": "refused slice {slice} of {peer}: {reason}",
    "not_taken": "{by} could not take its slice {slice}: {reason}",
    "refused": "refused {peer}: {reason}",
    "not_a_commit": "could not read a commit of {peer}, so its rounds come to nothing: {reason}",
    "reassigned": "gave slice {slice} to {to}: {reason}",
    "took_slice": "took slice {slice} over from a reducer that is gone",
    "took_over": "led on in the place of a leader that is gone",
    "leader_silent": "heard nothing of the leader {leader}",
    "silent": "{peer} answered about no fragment for {seconds:.0f} s, and others did",
    "next_leader": "turned to {leader}, the next in rank",
    "changed_leader": "turned to {to}",
    "passed_over": "passed {leader} over: {reason}",
    "too_late": "came too late: {leader} had closed the roster",
    "declined_by": "{peer} declined: {reason}",
    "gave_up": "gave up: {reason}",
    "void": "the round came to nothing: {reason}",
    "folded": "alone, folded its own work into version {version} of fragment {fragment}",
    "behind": "fragment {fragment} is behind: {source} has version {version}",
    "state_adopted": "caught up with version {version} of fragment {fragment} by {how}",
    "state_fetched": "downloaded fragment {fragment} at version {version}",
    "caught_up": "is up to date with version {version}",
    "catch_up_failed": "could not catch up with fragment {fragment}: {reason}",
    "replay_failed": "could not replay: {reason}",
    "fetch_failed": "could not download: {reason}",
    "rebase": "apart from {source}, which has more: took its state, kept its own work",
    "melded": "averaged two histories",
    "kept": "kept what its trainer has of version {version} of fragment {fragment}, "
    "which nobody else has",
    "work_lost": "lost {tokens} tokens of work: {reason}",
    "written_off": "wrote {tokens} tokens off: {reason}",
    "discarded": "discarded its work: {reason}",
    "skipped": "skipped fragment {fragment}: {in_flight} rounds are under way",
    "link_lost": "lost its link with {peer}: {reason}",
    "measured": "held-out loss {loss:.4f}, measured by {peer}",
    "exported": "wrote the model to {path}",
    "left_apart": "ended the run apart from others: {text}",
    "trainer_rests": "its trainer makes no steps",
    "trainer_steps_again": "its trainer steps again",
}


def told(event: Event, names: Names) -> str:
    """An event in words; of an unknown one its fields."""
    name = event["event"]
    if name == "round":
        return _round_told(event, names)
    sentence = _SENTENCES.get(name)
    if sentence is not None:
        try:
            return names.within(sentence.format_map(event))
        except (KeyError, ValueError, TypeError):
            pass  # a log of another version: say what there is
    if isinstance(event.get("text"), str):
        return names.within(event["text"])
    fields = [f"{k} {v}" for k, v in event.items() if k not in ("at", "event", "run")]
    return names.within(", ".join([name.replace("_", " "), *fields]))


def _round_told(event: Event, names: Names) -> str:
    where = f"fragment {event['fragment']} version {event['version']}"
    traffic = (
        f"{bytes_text(event.get('sent_bytes') or 0)} up, "
        f"{bytes_text(event.get('received_bytes') or 0)} down"
    )
    if event["outcome"] != "finished":
        why = names.within(event["reason"])
        return f"{where}: gave the round up after {event['seconds']:.1f} s, work kept ({why})"
    part = "with its work" if event.get("contributed") else "without its work"
    return f"{where}: done in {event['seconds']:.1f} s {part}; {traffic}"


class Names:
    """What to call peers: the names in the logs instead of the ids."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = dict(names)

    @classmethod
    def of(cls, logs: Sequence[Log]) -> Names:
        """What the logs call them. Two of the same name are told apart."""
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
            names.setdefault(each, _short(each))
        often = Counter(names.values())
        return cls(
            {
                peer: f"{name} ({_short(peer)})" if often[name] > 1 and name != peer else name
                for peer, name in names.items()
            }
        )

    def learn(self, peer: str, name: str) -> None:
        """At most ``NAMES_MAX``: a swarm of months meets many."""
        if len(self._names) < NAMES_MAX or peer in self._names:
            self._names[peer] = name

    def __call__(self, peer: str) -> str:
        return self._names.get(peer) or _short(peer)

    def within(self, text: str) -> str:
        """``text`` with every known id in it replaced."""
        if "12D3" in text or any(peer in text for peer in self._names if len(peer) > 16):
            for peer, name in self._names.items():
                text = text.replace(peer, name) if len(peer) > 16 else text
        return text

    def find(self, wanted: str) -> str:
        """The one peer that is meant. Raises ``NothingFound``."""
        fits = [peer for peer, name in self._names.items() if wanted in (peer, name)]
        if not fits:
            fits = [
                peer
                for peer, name in self._names.items()
                if peer.startswith(wanted) or peer.endswith(wanted) or name.startswith(wanted)
            ]
        if len(fits) != 1:
            raise NothingFound(f"exactly one peer {wanted}", self.all())
        return fits[0]

    def all(self) -> list[str]:
        return sorted(self._names.values())


def _round_filter(wanted: str) -> Callable[[Event], bool]:
    fragment, slash, version = wanted.partition("/")
    if slash and f"{fragment}{version}".isascii() and fragment.isdigit() and version.isdigit():
        place = (int(fragment), int(version))
        return lambda event: place == (event["fragment"], event["version"])
    return lambda event: str(event["round"]).startswith(wanted.lower())


def _round_times(log: Log) -> dict[str, float]:
    return {
        event["round"]: event["at"]
        for event in log.events
        if event["event"] == "round" and event["outcome"] == "finished"
    }


def _is_given_up(event: Event) -> bool:
    return bool(event["event"] == "round" and event["outcome"] != "finished")


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


def _is_whole(event: Event) -> bool:
    """Whether it has what is told of it: a log may be damaged, or come from anybody."""
    at, name = event.get("at"), event.get("event")
    if not (_is_number(at) and 0 <= at < AT_MAX and isinstance(name, str)):
        return False
    return name != "round" or all(
        isinstance(event.get(key), kind) for key, kind in _OF_A_ROUND.items()
    )


def _short(peer: str) -> str:
    return peer[-6:] if peer.startswith("12D3") else peer


def _count(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _off(seconds: float) -> str:
    return f"{abs(seconds):.1f} s {'behind' if seconds > 0 else 'ahead'}"
