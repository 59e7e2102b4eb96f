"""The door of a run: peers show their credentials here, and the owner's directives spread.

``dht.wrapped_host`` asks ``refusal`` before a protocol of the run answers. A member's credential is
known from its record; any other peer is asked for it, once.

A directive is passed on to every connected member as soon as it is known. Once in a while each peer
compares with another one, and always with one that is new to it, so that a peer that was off line,
or the other half of a split swarm, hears of it too. All of it is kept in a file.

A run without an owner has neither credentials nor directives: nothing is sent for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable

import msgspec

from dht.bounded_mapping import BoundedMapping, by_age
from dht.errors import BUSY, DhtError, HostClosed
from dht.host import Host
from dht.identity import PeerId
from dht.limits import Rate
from dht.membership import hello as wire
from dht.membership.admission import Admission, banned_names, role_of, told
from dht.membership.credentials import Refused, signer_of
from dht.presence.dialler import Dialler
from dht.presence.this_peer import CALL_TIMEOUT_S, KeptFile, ThisPeer
from dht.records import Sealed

SPREAD_EVERY_S = 10.0
ASKED_AT_ONCE = 32
ASK_AGAIN_S = 5.0
"""Pause before a peer without a valid credential is asked for one again."""

NOT_ASKED_MAX = 1024
WARNING_MAX_S = 86_400.0
WARNING_SHARE = 0.1
"""The end of the own invite is told of by this share of the time that was left at the start, and by
``WARNING_MAX_S``, before it comes. Invites say when they end, and not when they began."""

ASKS_FIRST_S = 30.0
"""Time that a peer which its own file of directives refuses has to hear whether that still holds:
the ban may have been lifted while it was away."""

FILE_MAX_BYTES = 64 * 1024

_directives = msgspec.msgpack.Decoder(tuple[bytes, ...])


class Door:
    """One peer's admission, asked and kept up to date over its host."""

    def __init__(
        self, this: ThisPeer, dialler: Dialler, admission: Admission, budget: Rate[PeerId]
    ) -> None:
        self.admission = admission
        self._this = this
        self._budget = budget
        self._dialler = dialler
        path, events = this.settings.directives_path, this.events
        self._file = KeptFile(path, "the owner's directives", events, max_bytes=FILE_MAX_BYTES)
        self._asking: dict[PeerId, asyncio.Event] = {}
        self._not_before = BoundedMapping[PeerId, float](
            "credentials not asked for", NOT_ASKED_MAX, worth=by_age
        )
        """Time before which a peer is not asked for its credential again."""

        self._let_in: set[PeerId] = set()
        """Peers whose streams may be open: a ban disconnects them."""

        self._compared: set[PeerId] = set()
        """Connected members whose directives have been compared with ours."""

        self._news = asyncio.Event()
        self._reported = ""
        self._refused_from = 0.0
        """Time from which a refusal of this peer itself is told, and not only looked into."""
        self._warn_at: float | None = None
        """Unix time at which to say that the own invite is about to end, unless that is said."""

    @property
    def _has_owner(self) -> bool:
        return self.admission.terms.owner is not None

    def _wall(self) -> float:
        return self._this.host.wall_time()

    def check(self, peer: PeerId) -> str | None:
        """Reason why a peer is refused, as far as is known without asking it."""
        return self.admission.refusal(peer, now=self._wall())

    def judge(self, sealed: Sealed) -> str | None:
        """Reason why a record is neither stored nor believed (``RecordKeeper.judge``)."""
        return self.admission.judge_record(sealed, now=self._wall())

    async def refusal(self, peer: PeerId) -> str | None:
        """Reason why a peer is refused; ``None`` if the run admits it. May ask the peer once."""
        reason = self.check(peer)
        if reason is not None and not self.admission.is_shown(peer):
            await self._ask(peer)
            reason = self.check(peer)
        if reason is None and self._has_owner:
            self._let_in.add(peer)
        return reason

    # --- life -----------------------------------------------------------------------------------

    async def open(self) -> None:
        """Show the own credential, remember the directives in the file, and answer from now on."""
        this = self._this
        now = self._wall()
        self.admission.show(this.id, this.facts.credential, now=now)
        ends_at = self.admission.ends_at(this.id)
        if ends_at is not None and this.profile.is_member:
            self._warn_at = ends_at - min(WARNING_MAX_S, WARNING_SHARE * (ends_at - now))
        if (kept := await self._file.read(_directives.decode)) is not None:
            self._refused_from = this.now() + ASKS_FIRST_S
            self.take(kept)
            if self._own_refusal() is None:
                self._refused_from = 0.0
        await this.host.serve_calls(
            wire.PAPERS_PROTOCOL, self._answer, request_max_bytes=wire.PAPERS_MAX_BYTES
        )

    async def run(self) -> None:
        """Spread directives and act on them, for ever."""
        if not self._has_owner:
            return
        while True:
            has_news = self._news.is_set()
            self._news.clear()
            self._warn()
            if has_news:
                await self._file.write(
                    msgspec.msgpack.encode(self.admission.to_pass_on(self._wall()))
                )
            with contextlib.suppress(HostClosed):  # its daemon is being restarted
                await self._turn_out()
                await self._compare(has_news=has_news)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SPREAD_EVERY_S * (0.9 + 0.2 * self._this.rng.random())):
                    await self._news.wait()

    def take(self, directives: Iterable[bytes]) -> str:
        """Take directives from anywhere. Returns why one of them was refused, or nothing."""
        refused = ""
        for data in directives:
            verdict = self.admission.take(data, now=self._wall())
            if isinstance(verdict, Refused):
                refused = verdict.reason
            elif verdict is not None:
                directive, delegation = verdict, verdict.delegation
                assert self.admission.terms.owner is not None, "its directive was believed"
                signer = signer_of(directive, self.admission.terms.owner)
                self._news.set()
                self._remove_refused()
                self._this.events.tell(
                    "directive",
                    f"directive {directive.number} of {self.admission.title(signer)}: "
                    f"{told(directive)}",
                    signer=signer,
                    number=directive.number,
                    bans=len(directive.bans),
                    banned=" ".join(banned_names(directive)),
                    expires_at=None if delegation is None else delegation.expires_at,
                )
        return refused

    def _warn(self) -> None:
        """Say once that the own invite is about to end: another one takes its owner's time."""
        ends_at, now = self.admission.ends_at(self._this.id), self._wall()
        if self._warn_at is None or ends_at is None or not self._warn_at <= now < ends_at:
            return
        self._warn_at = None
        until = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(ends_at))
        command = "join" if self._this.facts.role == "learner" else "keep"
        text = (
            f"the invite of this peer ends at {until}; ask the owner of the run for another one "
            f"(shoal invite) before that, and come back with it: shoal {command} LINK"
        )
        self._this.events.tell("invite_ends", text, expires_at=ends_at)

    # --- who is refused -------------------------------------------------------------------------

    async def ban(self, peer: PeerId, what: str) -> None:
        """Refuse a peer that is proved to have lied, from now on and for good, and cut it off.

        ``what``: its deed, as the rest of a sentence about the peer.
        """
        self.admission.convicted[peer] = what
        self._remove_refused()
        with contextlib.suppress(HostClosed):
            await self._this.host.disconnect(peer)

    def _remove_refused(self) -> None:
        """Forget members whom the run no longer admits, and report if this peer is one."""
        table, now = self._this.table, self._wall()
        for member in table:
            role = role_of(member.record)
            refusal = self.admission.refusal(member.peer, now=now, role=role)
            if refusal is not None:
                table.remove(member.peer)
        if self._this.now() < self._refused_from:
            return
        own = self._own_refusal()
        if own is not None and own != self._reported and self._this.profile.is_member:
            self._this.events.tell("not_admitted", own)
        self._reported = own or ""

    def _own_refusal(self) -> str | None:
        """Reason why this peer itself is refused, as far as it knows."""
        this = self._this
        return self.admission.refusal(this.id, now=self._wall(), role=this.facts.role)

    async def _turn_out(self) -> None:
        """Cut the connections of peers that were let in and are refused now."""
        self._remove_refused()
        connected = {each.peer for each in await self._this.host.connections()}
        self._let_in &= connected
        refused = sorted(peer for peer in self._let_in if self.check(peer) is not None)
        self._let_in.difference_update(refused)
        async with asyncio.TaskGroup() as group:
            for peer in refused:
                group.create_task(self._turn_out_one(peer))

    async def _turn_out_one(self, peer: PeerId) -> None:
        # It learns the reason: it may be an honest peer whose invite has been shared too widely.
        await self._call(peer, self.admission.to_pass_on(self._wall()))
        with contextlib.suppress(HostClosed):
            await self._this.host.disconnect(peer)

    async def _ask(self, peer: PeerId) -> None:
        """Ask a peer for its credential, unless it was asked just now."""
        asked_by_another = self._asking.get(peer)
        if asked_by_another is not None:
            await asked_by_another.wait()
            return
        now = self._this.now()
        if len(self._asking) >= ASKED_AT_ONCE or now < self._not_before.get(peer, now):
            return
        answered = self._asking[peer] = asyncio.Event()
        try:
            await self._call(peer)
        finally:
            del self._asking[peer]
            self._not_before.renew(peer, now + ASK_AGAIN_S)
            answered.set()

    # --- papers ---------------------------------------------------------------------------------

    def _papers(self, directives: tuple[bytes, ...] = ()) -> wire.Papers:
        assert self._this.profile.run is not None
        return wire.Papers(
            run=self._this.profile.run,
            credential=self._this.facts.credential,
            digest=self.admission.digest(self._wall()) if self._has_owner else b"",
            directives=directives,
        )

    async def _call(self, peer: PeerId, directives: tuple[bytes, ...] = ()) -> wire.Papers | None:
        """Exchange papers with a peer, and take what it shows; ``None`` if it does not answer."""
        this = self._this
        try:
            reply = await exchange_papers(
                this.host, peer, self._papers(directives), timeout_s=CALL_TIMEOUT_S
            )
        except (DhtError, ValueError):
            return None
        self.admission.show(peer, reply.credential, now=self._wall())
        self.take(reply.directives)
        if reply.not_admitted and self._refused_from:
            self._refused_from = 0.0
            self._remove_refused()
        return reply

    async def _answer(self, peer: PeerId, request: bytes) -> bytes:
        run = self._this.profile.run
        if not self._budget.spend(peer, self._this.now()):
            raise ValueError(f"{BUSY} in this minute")
        asked = wire.read(wire.Papers, request, max_bytes=wire.PAPERS_MAX_BYTES)
        if asked.run != run:
            raise ValueError(f"this peer takes part in run {run}, not in run {asked.run}")
        damaged = self.admission.show(peer, asked.credential, now=self._wall())
        not_taken = self.take(asked.directives)
        own = self._papers()
        differs = self._has_owner and asked.digest != own.digest
        reply = msgspec.structs.replace(
            own,
            directives=self.admission.to_pass_on(self._wall()) if differs else (),
            not_admitted=(damaged or self.check(peer) or "")[: wire.REASON_MAX],
            not_taken=not_taken[: wire.REASON_MAX],
        )
        return wire.write(reply)

    # --- spreading ------------------------------------------------------------------------------

    async def _compare(self, *, has_news: bool) -> None:
        """Compare with every connected member after news, else with one, and with new ones."""
        connected = set(self._dialler.connected)
        members = sorted(peer for peer in connected if self._this.table.get(peer) is not None)
        self._compared &= connected
        chosen = [peer for peer in members if has_news or peer not in self._compared]
        if not chosen and members:
            chosen = [members[int(self._this.rng.integers(len(members)))]]
        async with asyncio.TaskGroup() as group:
            for peer in chosen:
                group.create_task(self._compare_with(peer))

    async def _compare_with(self, peer: PeerId) -> None:
        reply = await self._call(peer)
        if reply is None:
            return
        self._compared.add(peer)
        now = self._wall()
        if reply.digest != self.admission.digest(now):
            await self._call(peer, self.admission.to_pass_on(now))


async def exchange_papers(
    host: Host, peer: PeerId, papers: wire.Papers, *, timeout_s: float
) -> wire.Papers:
    """Show papers to a peer and get its own. Raises ``DhtError``, or ``ValueError``."""
    data = await host.call(peer, wire.PAPERS_PROTOCOL, wire.write(papers), timeout_s=timeout_s)
    reply = wire.read(wire.Papers, data, max_bytes=wire.PAPERS_MAX_BYTES)
    if reply.run != papers.run:
        raise ValueError(f"{peer} takes part in run {reply.run}, not in run {papers.run}")
    return reply
