"""``shoal status LINK``: the status of a run's peers, without joining the run.

A visitor uses a key of its own, finds the run's peers through the seeds of the link, asks each for
its status, and leaves. For peers behind routers it asks those that they are connected with. It
stores nothing and publishes no record.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import msgspec
from blake3 import blake3

from averaging.live.states.fetcher import Fetcher
from averaging.live.streams.threads import Threads
from averaging.numbers.layout import Layout
from dht.errors import CallRefused, DhtError, PeerUnreachable, RunFileUnavailable
from dht.host import Host
from dht.identity import Identity, PeerId
from dht.membership.admission import Admission, Terms, banned_names
from dht.membership.credentials import Directive, InviteKey, admit, encode
from dht.membership.hello import Papers
from dht.membership.orders import Orders, words
from dht.membership.reachability import in_words
from dht.membership.table import Member
from dht.presence.door import exchange_papers
from dht.presence.presence import Presence
from dht.records import PeerRecord
from peer import status
from peer.calls import ATTESTABLE, Kept
from peer.contributors import Contributor, plain, sentence
from peer.description import read_layout
from peer.errors import NobodyMet, NotAdmitted, PeerError
from peer.events.names import printable
from peer.installed import extras
from peer.joining.fetch import SeedFailures, check_seeds_run, observer
from peer.joining.link import Link
from peer.quantities import bytes_text, count_text, duration_text, fates_text, peers_text, plural
from peer.rules.others import heaviest
from peer.run_file.reading import from_canonical
from peer.run_file.sections import RunFile

FOLLOWING = ("learner", "keeper")
"""Roles of peers that have a status to tell; a bootstrap peer belongs to no run."""

LEARNER = "learner"

ASKED_AT_ONCE = 16
OTHERS_ASKED_MAX = 3
"""Number of peers that are asked for the status of one that is out of reach."""

ASK_TIMEOUT_S = 3.0
FILE_TIMEOUT_S = 10.0
LOOK_S = 15.0
"""Time to find peers that have the run's state."""

LOOK_EVERY_S = 0.05
QUIET_S = 0.4
"""The search for peers ends when no further one has been found for this long, ..."""

SEARCH_S = 5.0
"""... and so long after the first one in any case: new keys may appear at each moment."""

ASKED_WITHIN_S = 30.0
"""Members that had no turn to be asked by then are not asked: thousands may never answer."""

NOT_ASKED = "it was not asked, as many others did not answer"

COUNTED_WITHIN_S = 3.0
"""The search goes on for up to this long while an answer counts more peers than are found."""

T = TypeVar("T")

Answer: TypeAlias = status.PeerStatus | DhtError | NotAdmitted | ValueError
"""The status of a peer, or why it did not give it."""

OwnInvite: TypeAlias = Callable[[RunFile], InviteKey | None]
"""The invite of this user's own to a run, such as that of its owner; ``None``: there is none."""


class NotDownloaded(PeerError):
    """No peer that is on line gives the parameters of the run."""

    exit_code = 3
    run: str
    reason: str
    message = (
        "the parameters of run {run!r} cannot be downloaded: {reason}; the part that "
        "is here is kept: run the command again"
    )


@dataclass(frozen=True, slots=True)
class Silent:
    """A live member that did not answer, as its record describes it."""

    name: str
    role: str
    step_time_s: float | None
    reason: str
    """The reason why it could not be asked, in words."""
    refuses: bool = False
    """True if it answered that the run does not admit the visitor."""


@dataclass(frozen=True, slots=True)
class RunStatus:
    """A run as its peers describe it at one moment."""

    run_id: str
    peers: tuple[status.PeerStatus, ...]
    silent: Mapping[PeerId, Silent]
    """Members whose status nobody could give."""
    directives: Mapping[PeerId, Directive] = field(default_factory=dict)
    """The directives in force, by signer."""
    contributors: tuple[Contributor, ...] = ()
    """All whose work is merged, the largest first."""
    members: Mapping[PeerId, PeerRecord] = field(default_factory=dict)
    """The records of all members, whether or not they answered."""

    @property
    def names(self) -> dict[str, str]:
        """The names of all peers that are here, and of all whose work is merged, by peer id."""
        names: dict[str, str] = {each.peer: each.shown for each in self.contributors}
        return names | {peer: record.name for peer, record in self.members.items()}

    def check_admitted(self) -> None:
        """Raise ``NotAdmitted`` if the peers refuse the visitor: they have told nothing."""
        refusals = [silent.reason for silent in self.silent.values() if silent.refuses]
        if refusals and not self.peers:
            raise NotAdmitted(f"{self.run_id[:16]}...", refusals[0])

    @property
    def reasons(self) -> str:
        """The reasons of those that did not answer, with their names."""
        return "; ".join(
            sorted({f"{each.name or peer}: {each.reason}" for peer, each in self.silent.items()})
        )

    def check_answered(self) -> None:
        """Raise ``NobodyMet`` if peers were found and none of them answered."""
        if self.silent and not self.peers:
            names = ", ".join(each.name or peer for peer, each in self.silent.items())
            raise NobodyMet(
                f"run {self.run_id[:16]}...",
                f"{plural(len(self.silent), 'peer')} found ({names}), and none answered; a peer "
                "that has just ended is forgotten within a minute: ask again then",
            )

    @property
    def not_found(self) -> tuple[str, int] | None:
        """The peer that counts most peers, and how many of those were not found, if any."""
        most = max(self.peers, key=lambda peer: peer.peers, default=None)
        if most is None:
            return None
        missing = most.peers - len(self.peers) - len(self.silent)
        return (most.name, missing) if missing > 0 else None

    @property
    def step_times_s(self) -> list[float]:
        """The step times of all learners, those included that only their records speak for."""
        times = [peer.step_time_s for peer in self.peers if peer.role == LEARNER]
        return times + [s.step_time_s or 0.0 for s in self.silent.values() if s.role == LEARNER]

    @property
    def ended_at(self) -> float | None:
        """Wall-clock time at which the run ended, if all peers with a state say so."""
        dates = [peer.ended_at for peer in self.peers if peer.versions]
        times = [at for at in dates if at is not None]
        return min(times) if times and len(times) == len(dates) else None

    @property
    def is_ordered_to_end(self) -> bool:
        """True if the run's owner has ended it, or has said at which version it ends."""
        return any(directive.orders.end is not None for directive in self.directives.values())

    @property
    def global_tokens(self) -> int:
        return told_by_two([peer.global_tokens for peer in self._holders])

    @property
    def newest_version(self) -> int | None:
        """The newest version of any fragment; ``None`` if no peer tells its own."""
        versions = [max(peer.versions) for peer in self._holders]
        return told_by_two(versions) if versions else None

    @property
    def fragments(self) -> int:
        """Number of fragments of the run, as most of its peers tell it; 0: none tells."""
        counts = Counter(len(peer.versions) for peer in self._holders)
        return max(counts, key=lambda count: (counts[count], count), default=0)

    @property
    def _holders(self) -> list[status.PeerStatus]:
        """The answers of the peers that have the run's state."""
        return [peer for peer in self.peers if peer.versions]

    @property
    def held_out(self) -> status.HeldOut | None:
        """The newest held-out loss that any peer knows, after tokens that the run has merged."""
        losses = [peer.held_out for peer in self.peers if peer.held_out is not None]
        known = [each for each in losses if each.tokens <= self.global_tokens]
        return max(known, key=lambda held_out: held_out.tokens, default=None)

    def plain(self) -> dict[str, Any]:
        """A dictionary for ``--json``."""
        return {
            "run_id": self.run_id,
            "global_tokens": self.global_tokens,
            "ended_at": self.ended_at,
            "held_out": None if self.held_out is None else _named(self.held_out),
            "peers": [
                {
                    **{n: v for n, v in _named(peer).items() if n not in status.NOT_TOLD},
                    "held_out": peer.held_out and _named(peer.held_out),
                }
                for peer in self.peers
            ],
            "silent": {peer: silent.reason for peer, silent in self.silent.items()},
            "not_found": 0 if self.not_found is None else self.not_found[1],
            "contributors": plain(self.contributors),
            "releases": {
                peer: {"release": record.release, "protocol": list(record.protocol)}
                for peer, record in sorted(self.members.items())
            },
            "directives": [
                {
                    "signer": signer,
                    "number": each.number,
                    "bans": list(banned_names(each)),
                    "orders": words(each.orders),
                }
                for signer, each in self.directives.items()
            ],
        }


def told_by_two(values: Iterable[int]) -> int:
    """The largest value that two peers reach: where more than one answers, one may say anything.

    Of two, the smaller value counts: a peer that lags behind understates it for a short time.
    """
    ranked = sorted(values, reverse=True)
    return ranked[1] if len(ranked) > 1 else max(ranked, default=0)


def _named(struct: msgspec.Struct) -> dict[str, Any]:
    """Fields by name; on the wire these are arrays."""
    return msgspec.structs.asdict(struct)


class Visitor:
    """A host outside the run, which asks the run's peers for their status."""

    def __init__(
        self,
        host: Host,
        presence: Presence,
        link: Link,
        failures: SeedFailures,
        own_invite: OwnInvite,
    ) -> None:
        self._told: set[bytes] = set()
        """Directives that peers have told of."""
        self._host = host
        self._presence = presence
        self._link = link
        self._failures = failures
        self._own_invite = own_invite
        self._papers = self._papers_with(link.invite)
        self._run: RunFile | None = None
        """The run file, once its peers have given it: its hash is the run's id."""

    async def look(self, *, timeout_s: float) -> RunStatus:
        """Ask every member once. Raises ``NobodyMet`` if none is found in time."""
        members = await self._members(timeout_s)
        answers = await _each(members, self._ask)
        refused = [isinstance(why, CallRefused | NotAdmitted) for why in answers.values()]
        if any(refused) and await self._admitted():
            answers = await _each(members, self._ask)
        await self._ask_those_counted(members, answers)
        reasons = {peer: why for peer, why in answers.items() if isinstance(why, Exception)}
        reasons |= {
            peer: PeerUnreachable(peer, NOT_ASKED) for peer in members.keys() - answers.keys()
        }
        statuses = [answer for answer in answers.values() if isinstance(answer, status.PeerStatus)]
        # Peers that can be dialled have connections with those that cannot.
        able = sorted(statuses, key=lambda answer: (answer.reachable is not True, answer.peer))

        async def ask_others(peer: PeerId) -> status.PeerStatus | None:
            return await self._ask_others([PeerId(a.peer) for a in able[:OTHERS_ASKED_MAX]], peer)

        passed_on = await _each(reasons, ask_others)
        silent = {}
        for peer in sorted(reasons):
            if (passed := passed_on.get(peer)) is not None:
                statuses.append(passed)
                continue
            record, why = members[peer].record, reasons[peer]
            refuses = isinstance(why, NotAdmitted)
            reason = why.reason if isinstance(why, NotAdmitted) else str(why)
            if isinstance(why, PeerUnreachable):
                reason = in_words(record.reachable, why.reason)
            if able:
                reason += "; no peer that answered could ask it either"
            silent[peer] = Silent(record.name, record.role, record.step_time_s, reason, refuses)
        statuses.sort(key=lambda answer: (answer.name, answer.peer))
        in_force = await self._directives_in_force()
        rows: list[Contributor] = []
        for credit in extras("credit.reading"):
            able_peers = [PeerId(answer.peer) for answer in able]
            rows = await credit.contributors_told(self._host, self._link.run_id, able_peers)
        records = {peer: member.record for peer, member in members.items()}
        return RunStatus(self._link.run_id, tuple(statuses), silent, in_force, tuple(rows), records)

    async def _ask_those_counted(
        self, members: dict[PeerId, Member], answers: dict[PeerId, Answer]
    ) -> None:
        """Ask members that turn up later, while a peer that answered counts more than are found.

        A busy machine finds the second peer later than ``QUIET_S`` after the first one.
        """

        def counting_more() -> list[PeerId]:
            statuses = [
                answer for answer in answers.values() if isinstance(answer, status.PeerStatus)
            ]
            return [PeerId(each.peer) for each in statuses if each.peers > len(answers)]

        loop = asyncio.get_running_loop()
        deadline = loop.time() + COUNTED_WITHIN_S
        await self._presence.greet(counting_more()[:OTHERS_ASKED_MAX])  # they pass records on
        while counting_more() and loop.time() < deadline:
            present = self._found()
            members.update(present)
            answers.update(await _each(sorted(present.keys() - answers.keys()), self._ask))
            await asyncio.sleep(LOOK_EVERY_S)

    async def _admitted(self) -> bool:
        """Show an invite of this user's own instead of the link's. Returns whether there is one."""
        run = await self._run_file()
        invite = None if run is None else self._own_invite(run)
        if invite is not None:
            self._papers = self._papers_with(invite)
        return invite is not None

    def _papers_with(self, invite: InviteKey | None) -> Papers:
        run_id = self._link.run_id
        if invite is None:
            return Papers(run=run_id)
        credential = encode(admit(invite.invite, invite.secret, self._host.peer_id, run_id))
        return Papers(run=run_id, credential=credential)

    def fetcher(self, threads: Threads) -> Fetcher:
        """Fetches parameters from peers that ``look`` has found, as one that catches up does."""
        return Fetcher(self._host, self._link.run_id, threads, parameters_alone=True)

    async def told_layout(self, holders: Sequence[status.PeerStatus], run: RunFile) -> Layout:
        """The layout of a model that only programs have, as one of these peers describes it.

        They have a state of the run; its heaviest founding counts. Raises ``NotDownloaded``.
        """
        founding = heaviest(holders)
        reasons = []
        for each in holders:
            if each.founding != founding or run.model.layout_hash not in (None, each.layout):
                continue
            try:
                layout = await read_layout(
                    self._host,
                    PeerId(each.peer),
                    self._link.run_id,
                    run.outer.fragments,
                    timeout_s=FILE_TIMEOUT_S,
                )
            except (DhtError, ValueError) as error:
                reasons.append(f"{each.name}: {error}")
                continue
            if layout.hash.hex() == each.layout:
                return layout
            reasons.append(f"{each.name}: its description does not give its layout")
        problems = "; ".join(reasons) or "none is here that has its state"
        raise NotDownloaded(run.name, f"no peer describes the model ({problems})")

    async def attestable(self) -> dict[PeerId, tuple[Kept, ...]]:
        """The states that each member found keeps for the owner to attest; none if it is silent."""

        async def ask(peer: PeerId) -> tuple[Kept, ...]:
            try:
                await self._presence.connect(peer, timeout_s=ASK_TIMEOUT_S)
                return await ATTESTABLE.ask(
                    self._host, peer, self._link.run_id, "", timeout_s=ASK_TIMEOUT_S
                )
            except (DhtError, ValueError):
                return ()

        return await _each(await self._members(0.0), ask)

    async def deliver(self, directive: bytes) -> dict[PeerId, str]:
        """Give a directive to every member found: the reason of each, empty if it was taken."""
        papers = msgspec.structs.replace(self._papers, directives=(directive,))
        members = await self._members(0.0)

        async def give(peer: PeerId) -> str:
            try:
                await self._presence.connect(peer, timeout_s=ASK_TIMEOUT_S)
                return (await self._show(peer, papers)).not_taken
            except PeerUnreachable as error:
                return in_words(members[peer].record.reachable, error.reason)
            except (DhtError, ValueError) as error:
                return str(error)

        return await _each(members, give)

    async def _show(self, peer: PeerId, papers: Papers) -> Papers:
        """Show papers to a peer, and get its own. Raises ``DhtError`` or ``ValueError``."""
        return await exchange_papers(self._host, peer, papers, timeout_s=ASK_TIMEOUT_S)

    async def _directives_in_force(self) -> Mapping[PeerId, Directive]:
        """The directives that peers have told of, as far as the run's owner vouches for them.

        Peers that lie can only leave some out.
        """
        directives = sorted(self._told)
        if not directives or (run := await self._run_file()) is None:
            return {}
        owner = None if run.policy.owner is None else PeerId(run.policy.owner)
        admission, now = Admission(Terms(self._link.run_id, owner=owner)), time.time()
        for data in directives:
            admission.take(data, now=now)
        return admission.in_force(now)

    async def _run_file(self) -> RunFile | None:
        """The run file, from its peers; ``None`` if none of them gives it."""
        if self._run is not None:
            return self._run
        try:
            content = await self._presence.fetch_run_file(
                lambda data: blake3(data).hexdigest() == self._link.run_id,
                timeout_s=FILE_TIMEOUT_S,
            )
        except RunFileUnavailable:
            return None
        self._run = from_canonical(content, self._link.run_id)
        return self._run

    async def _ask(self, peer: PeerId) -> Answer:
        """The status of a peer, or the error because of which it could not be asked directly."""
        try:
            await self._presence.connect(peer, timeout_s=ASK_TIMEOUT_S)
            with suppress(CallRefused):  # an older version
                shown = await self._show(peer, self._papers)
                self._told.update(shown.directives)
                if shown.not_admitted:
                    return NotAdmitted(self._link.run_id, shown.not_admitted)
            return await status.ask(self._host, peer, self._link.run_id, timeout_s=ASK_TIMEOUT_S)
        except (DhtError, ValueError) as error:
            return error

    async def _ask_others(self, others: Sequence[PeerId], peer: PeerId) -> status.PeerStatus | None:
        """The status of a peer that is out of reach, from the first other one that can ask it."""
        for other in others:
            with suppress(DhtError, ValueError):
                return await status.ask(
                    self._host, other, self._link.run_id, timeout_s=ASK_TIMEOUT_S, about=peer
                )
        return None

    def _found(self) -> dict[PeerId, Member]:
        """The members that are known now, those included that a call has not reached."""
        members = self._presence.table.present(asyncio.get_running_loop().time())
        return {each.peer: each for each in members if each.record.role in FOLLOWING}

    async def _members(self, timeout_s: float) -> dict[PeerId, Member]:
        loop = asyncio.get_running_loop()
        began = loop.time()
        deadline = began + timeout_s
        known: dict[PeerId, Member] = {}
        since = found_at = began
        while not known or loop.time() < min(since + QUIET_S, found_at + SEARCH_S):
            now = loop.time()
            present = self._found()
            if not known:
                found_at = now
            if present.keys() != known.keys():
                since = now
            known = present
            if not known:
                check_seeds_run(self._link, self._presence, waited_s=now - began)
            if now > deadline and not known:
                tried = ", ".join(str(seed) for seed in self._link.seeds)
                reason = self._failures.text or (
                    f"no peer of it was found within {timeout_s:g} s; tried {tried}; it may be "
                    "over, or its peers have new addresses: ask one of them for a newer link"
                )
                raise NobodyMet(f"run {self._link.run_id[:16]}...", reason)
            await asyncio.sleep(LOOK_EVERY_S)
        return known


async def _each(peers: Iterable[PeerId], ask: Callable[[PeerId], Awaitable[T]]) -> dict[PeerId, T]:
    """The answers of all peers that had a turn to be asked in time, a few at once.

    In an order that nobody knows beforehand: keys are cheap, and thousands may never answer.
    """
    loop = asyncio.get_running_loop()
    waiting, answers = list(peers), dict[PeerId, T]()
    random.shuffle(waiting)
    ends_at = loop.time() + ASKED_WITHIN_S

    async def ask_some() -> None:
        while waiting and loop.time() < ends_at:
            peer = waiting.pop()
            answers[peer] = await ask(peer)

    await asyncio.gather(*(ask_some() for _ in range(ASKED_AT_ONCE)))
    return answers


@asynccontextmanager
async def visit(
    link: Link, identity: Identity | None = None, own_invite: OwnInvite = lambda run: None
) -> AsyncIterator[Visitor]:
    """Open a visitor, by default with a new key.

    ``own_invite``: an invite to a run that refuses the visitor with that of the link or without.

    Raises ``DhtError``, or ``NobodyMet`` for a link without a seed.
    """
    if not link.seeds:
        raise NobodyMet(
            f"run {link.run_id[:16]}...", "the link has no seed to ask; ask for a link with one"
        )
    failures = SeedFailures()
    async with observer(link, failures, identity) as (host, presence):
        yield Visitor(host, presence, link, failures, own_invite)


def status_lines(seen: RunStatus, *, ids: bool = False) -> list[str]:
    """The status as lines of text, of about 80 columns. ``ids``: with the id of each peer."""
    held_out = "" if seen.held_out is None else f"   held-out loss {seen.held_out}"
    lines = [
        f"run {seen.run_id[:16]}...   {count_text(seen.global_tokens)} tokens merged   "
        f"{peers_text(len(seen.peers))}{held_out}",
        f"{'peer':18} {'state':10} {'steps':>7} {'s/step':>7} {'loss':>7} "
        f"{'version':>8} {'behind':>6} {'merged':>8}",
    ]
    for peer in seen.peers:
        shown = [f"  id {peer.peer}"] if ids else []
        lines += [_row(peer), *shown, *(f"  {note}" for note in _notes(peer))]
    if seen.contributors:
        lines.append(printable(sentence(seen.contributors)))
    for peer_id, silent in seen.silent.items():
        name = f"{silent.name[:18]} ({peer_id})" if ids else silent.name[:18] or peer_id
        lines.append(f"{name}: no answer: {printable(silent.reason)}")
    if seen.not_found is not None:
        name, missing = seen.not_found
        lines.append(f"{plural(missing, 'peer')} that {name} counts: not found in time; ask again")
    for signer, directive in seen.directives.items():
        banned = ", ".join(banned_names(directive))
        orders = words(directive.orders)
        parts = [f"banned: {banned or 'nobody'}"] if banned or not orders else []
        said = "; ".join([*parts, *orders, *waiting(seen, directive.orders)])
        lines.append(f"directive {directive.number} of {signer}: {said}")
        for peer in seen.peers if directive.delegation is None else ():
            if peer.directive != directive.number:
                old = f"still follows directive {peer.directive}"
                lines.append(f"  {peer.name} {old if peer.directive else 'follows none yet'}")
    return lines


def waiting(seen: RunStatus, orders: Orders) -> list[str]:
    """The merge that orders wait for, if they name a version and all who train wait for others."""
    newest = seen.newest_version or 0
    versions = [each.version for each in orders.amendments]
    if orders.end is not None and orders.end.version is not None:
        versions.append(orders.end.version)
    training = [peer for peer in seen.peers if peer.role == LEARNER and peer.rest is None]
    times = [peer.alone_until for peer in training if peer.alone_until is not None]
    if not times or len(times) < len(training) or max(versions, default=0) <= newest:
        return []
    first = min(training, key=lambda peer: peer.alone_until or 0.0)
    return [f"waits for a merge: {printable(first.name)} {status.merges_alone_from(min(times))}"]


def _row(peer: status.PeerStatus) -> str:
    """A peer's line of the table."""
    trains = peer.role == LEARNER
    state = peer.state
    steps = str(peer.steps) if trains else "-"
    step_time = f"{peer.step_time_s:.2f}" if peer.step_time_s else "-"
    loss = "-" if peer.loss is None else f"{peer.loss:.3f}"
    version = str(min(peer.versions)) if peer.versions else "-"
    merged = count_text(peer.fates.get("merged", 0.0)) if trains else "-"
    return (
        f"{peer.name[:18]:18} {state[:10]:10} {steps:>7} {step_time:>7} {loss:>7} "
        f"{version:>8} {peer.staleness:6} {merged:>8}"
    )


def _notes(peer: status.PeerStatus) -> Iterator[str]:
    """Yield the lines below a peer's row."""
    if peer.rest is not None or peer.limits:
        resting = [] if peer.rest is None else [f"resting: {peer.rest}"]
        allowed = [f"limits: {', '.join(peer.limits)}"] if peer.limits else []
        yield "; ".join(resting + allowed)
    if peer.alone_until is not None:
        yield f"alone: {status.merges_alone_from(peer.alone_until)}"
    if peer.banned:
        yield f"banned by proof: {', '.join(peer.banned)}"
    if peer.jumps_judged:
        yield (
            f"loss gate: {plural(peer.jumps_judged, 'jump')} to states of others judged, "
            f"{peer.jumps_refused} taken back"
        )
    if peer.merging:
        yield f"merges {peer.merging}"
    if any(peer.paths.values()):
        paths = ", ".join(f"{count} {name}" for name, count in peer.paths.items() if count)
        passed = f"; passed on {bytes_text(peer.relayed_bytes)}" * bool(peer.relayed_bytes)
        yield f"bulk data: {paths}{passed}"
    online = f"online for {duration_text(peer.up_s)}, sent {bytes_text(peer.bytes_sent)}"
    if peer.role == LEARNER:
        online += f", blocked {peer.blocked_s:.1f} s; tokens: {fates_text(peer.fates)}"
    yield online
