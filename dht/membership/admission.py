"""The peers that a run admits: one decision for every door of a peer. Pure.

``Admission`` holds the terms of the run file, the directives of its owner and delegates, and the
credentials that peers have shown. ``refusal`` is asked before any protocol of the run answers a
peer (``dht.wrapped_host``), before its record is stored or believed (``dht.records``), and by the
simulator. It looks at bans and dates at each call, so that a new directive takes effect at once;
only the signatures of a credential are checked once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from blake3 import blake3

from dht.bounded_mapping import BoundedMapping, by_age
from dht.identity import PeerId, RunId, peer_id_of, public_key_of
from dht.membership.credentials import (
    Credential,
    Directive,
    Refused,
    encode,
    read_credential,
    read_directive,
    signer_of,
)
from dht.membership.orders import NONE, Orders, words
from dht.records import DIRECTIVES_MAX, PeerRecord, Sealed

Mode = Literal["open", "invited", "listed"]

SHOWN_MAX = 8192
"""Number of credentials that are kept. The longest unused one of the invite that admitted the most
of these peers gives way."""

DELEGATES_MAX = DIRECTIVES_MAX - 1
"""Limit of delegates whose directives are kept beside the owner's."""

NO_INVITE = "the run admits invited peers only; ask its owner for an invite (shoal invite)"


@dataclass(frozen=True, slots=True)
class Terms:
    """The run file's rules of admission."""

    run: RunId
    mode: Mode = "open"
    owner: PeerId | None = None
    """Without an owner there are no invites and no directives."""

    listed: frozenset[PeerId] = frozenset()


class Admission:
    """One peer's knowledge about who may take part. ``now`` is always the own Unix time."""

    def __init__(
        self, terms: Terms, judge_orders: Callable[[Orders], str | None] = lambda orders: None
    ) -> None:
        """``judge_orders``: reason why this peer cannot follow the owner's orders."""
        self.terms = terms
        self._judge_orders = judge_orders
        self._directives: dict[PeerId, Directive] = {}
        self._shown = BoundedMapping[PeerId, Credential](
            "credentials",
            SHOWN_MAX,
            worth=by_age,
            # A link admits any number of keys.
            author=lambda _, credential: credential.invite.key,
        )
        self.convicted: dict[PeerId, str] = {}
        """Peers that this one has seen proved to lie, and what each did."""

    # --- peers ----------------------------------------------------------------------------------

    def refusal(self, peer: PeerId, *, now: float, role: str = "keeper") -> str | None:
        """Reason why a peer may not take part in this role; ``None`` if it may.

        Every invite is good for a keeper's role, which only reads; ``learner`` needs an invite for
        learners.
        """
        terms = self.terms
        if peer in self.convicted:
            return f"peer {peer} is banned: it was proved that it {self.convicted[peer]}"
        if terms.owner is not None:
            if peer == terms.owner:
                return None
            if (by := self._banned_by(public_key_of(peer), now)) is not None:
                return f"peer {peer} is banned from the run by {by}"
        if terms.mode == "open":
            return None
        if terms.mode == "listed":
            if peer in terms.listed:
                return None
            return f"the run admits only the peers it lists, and {peer} is none"
        credential = self._shown.get(peer)
        if credential is None:
            return NO_INVITE
        self._shown.renew(peer, credential)
        return self._refusal_of(credential, role, now)

    def _refusal_of(self, credential: Credential, role: str, now: float) -> str | None:
        invite = credential.invite
        if now >= invite.expires_at:
            return "the invite has expired; ask the owner of the run for another one"
        if (by := self._banned_by(invite.key, now)) is not None:
            return f"the invite {invite.id} is banned from the run by {by}"
        if invite.delegation is not None and self._revoked(invite.delegation.key):
            return "the owner of the run has banned the delegate that signed the invite"
        if role == "learner" and invite.role != "learner":
            return f"the invite is for a {invite.role}, not for a {role}"
        return None

    def ends_at(self, peer: PeerId) -> int | None:
        """The date at which a peer's invite ends; ``None`` if it needs none, or has none."""
        if self.terms.mode != "invited" or (credential := self._shown.get(peer)) is None:
            return None
        return credential.invite.expires_at

    def vouches_for(self, peer: PeerId, *, now: float) -> bool:
        """True for the owner and for delegates whose directives are in force."""
        directive = self._directives.get(peer)
        by_delegation = directive is not None and self._counts(directive, now)
        return peer == self.terms.owner or by_delegation

    def is_shown(self, peer: PeerId) -> bool:
        """Say whether a peer need not be asked for its credential (any more)."""
        return self.terms.mode != "invited" or peer in self._shown or peer == self.terms.owner

    def show(self, peer: PeerId, data: bytes, *, now: float) -> str | None:
        """Take a peer's credential from anywhere. Returns why it is not believed.

        A peer may have several, seen in any order: one that admits it is kept, and of two such the
        one that allows more.
        """
        owner = self.terms.owner
        if self.terms.mode != "invited" or owner is None or not data:
            return None
        credential = read_credential(data, peer=peer, run=self.terms.run, owner=owner)
        if isinstance(credential, Refused):
            return credential.reason
        known = self._shown.get(peer)
        if known is None or self._worth(credential, now) > self._worth(known, now):
            known = credential
        self._shown.renew(peer, known)
        return None

    def judge_record(self, sealed: Sealed, *, now: float) -> str | None:
        """Reason why a peer's record is neither stored nor believed; ``None`` if it is."""
        record, terms = sealed.record, self.terms
        if sealed.run != terms.run:
            return None
        refused = self.show(sealed.peer, record.credential, now=now)
        return refused or self.refusal(sealed.peer, now=now, role=role_of(record))

    def _worth(self, credential: Credential, now: float) -> tuple[bool, bool, int, bytes]:
        invite = credential.invite
        admits = self._refusal_of(credential, invite.role, now) is None
        return admits, invite.role == "learner", invite.expires_at, encode(credential)

    # --- directives -----------------------------------------------------------------------------

    def take(self, data: bytes, *, now: float) -> Directive | Refused | None:
        """Take a directive from anywhere. It is returned if it is news: in force now, and to be
        passed on. A lower number than the last one's is refused.
        """
        owner = self.terms.owner
        if owner is None:
            return Refused("the run has no owner")
        directive = read_directive(data, run=self.terms.run, owner=owner)
        if isinstance(directive, Refused):
            return directive
        signer = signer_of(directive, owner)
        known = self._directives.get(signer)
        if known == directive:
            return None
        if known is not None and _order(directive) < _order(known):
            return Refused(
                f"directive {directive.number} of {signer} does not replace its directive "
                f"{known.number}, which is in force; a later one needs a higher number"
            )
        if (objection := self._judge_orders(directive.orders)) is not None:
            return Refused(f"directive {directive.number} cannot be followed: {objection}")
        if not self._counts(directive, now):
            return Refused(f"{signer} is no delegate of the owner any more")
        if known is None and signer != owner and not self._has_room(now):
            return Refused(f"{DELEGATES_MAX} delegates have directives in force already")
        self._directives[signer] = directive
        return directive

    def in_force(self, now: float) -> dict[PeerId, Directive]:
        """The last directive of each signer whose word counts now."""
        found = sorted(self._directives.items())
        return {signer: each for signer, each in found if self._counts(each, now)}

    def is_outdated(self, data: bytes) -> bool:
        """True if ``data`` is no directive, or an older one of the owner's than is known here."""
        known, owner = self.owners_directive, self.terms.owner
        if known is None or owner is None:
            return False
        directive = read_directive(data, run=self.terms.run, owner=owner) if data else None
        if isinstance(directive, Refused):
            return False
        return directive is None or _order(directive) < _order(known)

    @property
    def owners_directive(self) -> Directive | None:
        """The owner's last directive; ``None`` if there is none."""
        owner = self.terms.owner
        return None if owner is None else self._directives.get(owner)

    @property
    def orders(self) -> Orders:
        """The owner's orders in force."""
        directive = self.owners_directive
        return NONE if directive is None else directive.orders

    def to_pass_on(self, now: float) -> tuple[bytes, ...]:
        """The directives in force as bytes, the owner's first."""
        force = self.in_force(now)
        order = sorted(force, key=lambda signer: (signer != self.terms.owner, signer))
        return tuple(encode(force[signer]) for signer in order)

    def digest(self, now: float) -> bytes:
        """Equal at two peers that know the same directives."""
        return blake3(b"".join(self.to_pass_on(now))).digest(16)

    def _counts(self, directive: Directive, now: float) -> bool:
        """A delegate's directives count until its delegation ends or the owner bans it."""
        delegation = directive.delegation
        return delegation is None or (
            now < delegation.expires_at and not self._revoked(delegation.key)
        )

    def _has_room(self, now: float) -> bool:
        delegates = [signer for signer in self._directives if signer != self.terms.owner]
        if len(delegates) < DELEGATES_MAX:
            return True
        for signer in delegates:
            if not self._counts(self._directives[signer], now):
                del self._directives[signer]
                return True
        return False

    def _revoked(self, key: bytes) -> bool:
        """Only the owner takes a delegation back."""
        directive = self.owners_directive
        return directive is not None and key in directive.bans

    def _banned_by(self, key: bytes, now: float) -> str | None:
        for signer, directive in self._directives.items():
            if key in directive.bans and self._counts(directive, now):
                return f"directive {directive.number} of {self.title(signer)}"
        return None

    def title(self, signer: PeerId) -> str:
        """A signer in words."""
        return "its owner" if signer == self.terms.owner else f"the delegate {signer}"


def role_of(record: PeerRecord) -> str:
    """The role that a record claims: rounds wait for every peer that says that it trains."""
    return "learner" if record.trains else record.role


def _order(directive: Directive) -> tuple[int, bytes]:
    """Two directives with one number are a mistake of the owner's: all peers choose the same."""
    return directive.number, encode(directive)


def parts_told(directive: Directive) -> list[str]:
    """A directive for people: bans by their number, and orders in words."""
    count = len(directive.bans)
    bans = [f"{count} ban{'s' * (count != 1)}"] if count else []
    return [*bans, *words(directive.orders)]


def told(directive: Directive) -> str:
    """``parts_told`` in one line."""
    return "; ".join(parts_told(directive)) or "0 bans"


def banned_names(directive: Directive) -> tuple[PeerId, ...]:
    """The banned keys as people name them."""
    return tuple(peer_id_of(key) for key in directive.bans)
