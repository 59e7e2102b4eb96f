"""Credentials of peers, and directives of a run's owner: formats, signatures, checks. Pure.

Everything is a signature by a key that follows from the run file's ``policy.owner``, so every peer
checks it off line:

    Delegation   the owner lets another key invite and ban, until a date
    Invite       the owner or a delegate vouches for a key pair: a role, until a date
    Credential   an invite, and the signature of a peer's id by the invite's key
    Directive    all keys that the owner or one delegate bans, and all orders of the owner
                 (``dht.membership.orders``), with a number

The private half of an invite travels in a link; a peer that has it signs its own peer id, so one
invite may admit many peers, and is banned as a whole. A ban names any of these keys: a peer's, an
invite's or a delegate's. No signature is valid for another run, another kind or another peer: each
is made over the kind, the run id and all fields. Dates are Unix times on the reader's clock.

A directive replaces the one before it of the same signer, so that only the last one has to be
known, and nothing has to be received in order.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from dht.decoding import UNDECODABLE
from dht.identity import (
    PUBLIC_KEY_BYTES,
    SIGNATURE_BYTES,
    Identity,
    PeerId,
    RunId,
    peer_id_of,
    public_key_of,
    verify,
)
from dht.membership import orders as owners_orders
from dht.membership.orders import Orders
from dht.records import CREDENTIAL_MAX_BYTES, DIRECTIVE_MAX_BYTES

VERSION = 1
BANS_MAX = 98
"""Limit of keys in one directive. An owner who needs more bans whole invites."""

NUMBER_MAX = 2**32
TEXT_MAX_CHARACTERS = 600

Role = Literal["learner", "keeper"]
Key = Annotated[bytes, Meta(min_length=PUBLIC_KEY_BYTES, max_length=PUBLIC_KEY_BYTES)]
Signature = Annotated[bytes, Meta(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)]
Moment = Annotated[int, Meta(ge=0, lt=2**40)]
Version = Annotated[int, Meta(ge=VERSION, le=VERSION)]


class _Signed(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, kw_only=True):
    """A message of fixed form whose last field is a signature over the others."""


class Delegation(_Signed, frozen=True, kw_only=True):
    """The owner lets ``key`` invite and ban. A delegate names no further delegates."""

    version: Version = VERSION
    key: Key
    expires_at: Moment
    signature: Signature = bytes(SIGNATURE_BYTES)


class Invite(_Signed, frozen=True, kw_only=True):
    """The public half of an invite; without ``delegation`` it is signed by the owner."""

    version: Version = VERSION
    key: Key
    role: Role
    expires_at: Moment
    delegation: Delegation | None = None
    signature: Signature = bytes(SIGNATURE_BYTES)

    @property
    def id(self) -> PeerId:
        """The name by which people ban it."""
        return peer_id_of(self.key)


class Credential(_Signed, frozen=True, kw_only=True):
    """Proof of one peer: an invite, and the signature of the peer's key by the invite's key."""

    invite: Invite
    signature: Signature


class Directive(_Signed, frozen=True, kw_only=True):
    """Every key that the owner, or the delegate in ``delegation``, bans, and the owner's orders."""

    version: Version = VERSION
    number: Annotated[int, Meta(ge=1, le=NUMBER_MAX)]
    bans: Annotated[tuple[Key, ...], Meta(max_length=BANS_MAX)]
    """Public keys in ascending order, each once."""

    delegation: Delegation | None = None
    orders: Orders = owners_orders.NONE
    """A delegate gives none."""

    signature: Signature = bytes(SIGNATURE_BYTES)


@dataclass(frozen=True, slots=True)
class Refused:
    """A message that is not believed, with the reason."""

    reason: str


@dataclass(frozen=True, slots=True)
class Signer:
    """A private key that may invite and ban: the owner's, or a delegate's with its delegation."""

    key: Identity
    run: RunId
    delegation: Delegation | None = None

    def invite(self, key: bytes, role: Role, expires_at: int) -> Invite:
        """Vouch for an invite's public key. ``expires_at`` is at most that of the delegation."""
        invite = Invite(key=key, role=role, expires_at=expires_at, delegation=self.delegation)
        return _sign(invite, self.key, self.run)

    def delegate(self, key: bytes, expires_at: int) -> Delegation:
        """Let another key invite and ban. Only the owner's is believed."""
        return _sign(Delegation(key=key, expires_at=expires_at), self.key, self.run)

    def directive(
        self, number: int, bans: frozenset[bytes], orders: Orders = owners_orders.NONE
    ) -> Directive:
        """Ban these keys and no others, and give these orders and no others.

        Raises ``ValueError`` for what no directive can hold.
        """
        if len(bans) > BANS_MAX:
            raise ValueError(
                f"{len(bans)} bans; a directive has at most {BANS_MAX}: ban whole invites instead"
            )
        if (problem := owners_orders.problem(orders)) is not None:
            raise ValueError(problem)
        directive = Directive(
            number=number, bans=tuple(sorted(bans)), delegation=self.delegation, orders=orders
        )
        try:
            signed = _sign(directive, self.key, self.run)
        except OverflowError as error:
            raise ValueError(f"a number is too large for a directive: {error}") from error
        if (size := len(encode(signed))) > DIRECTIVE_MAX_BYTES:
            raise ValueError(
                f"the directive has {size} bytes, {len(bans)} bans among them; at most "
                f"{DIRECTIVE_MAX_BYTES} are passed on: ban whole invites instead of peers"
            )
        if isinstance(read := _decode(encode(signed), Directive, DIRECTIVE_MAX_BYTES), Refused):
            raise ValueError(read.reason)
        return signed


def admit(invite: Invite, secret: Identity, peer: PeerId, run: RunId) -> Credential:
    """The credential of a peer. ``secret`` is the private half of the invite."""
    return Credential(invite=invite, signature=secret.sign(_of_peer(peer, run)))


T = TypeVar("T", Delegation, Invite, Directive)


def _sign(message: T, key: Identity, run: RunId) -> T:
    return msgspec.structs.replace(message, signature=key.sign(_signed_bytes(message, run)))


def _signed_bytes(message: Delegation | Invite | Directive, run: RunId) -> bytes:
    kind = type(message).__name__.lower().encode()
    fields = msgspec.structs.astuple(message)[:-1]
    return b"shoal %b\0%b\0%b" % (kind, run.encode(), msgspec.msgpack.encode(fields))


def _of_peer(peer: PeerId, run: RunId) -> bytes:
    return b"shoal credential\0%b\0%b" % (run.encode(), public_key_of(peer))


def encode(message: Delegation | Credential | Directive) -> bytes:
    return msgspec.msgpack.encode(message)


M = TypeVar("M", Delegation, Credential, Directive)


def _decode(data: bytes, kind: type[M], max_bytes: int) -> M | Refused:
    """The message, if these bytes are the only form in which it can be written."""
    name = kind.__name__.lower()
    if len(data) > max_bytes:
        return Refused(f"a {name} of {len(data)} bytes; at most {max_bytes}")
    try:
        message = msgspec.msgpack.decode(data, type=kind)
    except UNDECODABLE as error:
        return Refused(f"this is no {name}: {error}")
    if encode(message) != data:
        return Refused(f"a {name} that is not in its shortest form")
    return message


@lru_cache(maxsize=8192)
def read_credential(
    data: bytes, *, peer: PeerId, run: RunId, owner: PeerId
) -> Credential | Refused:
    """The credential of ``peer``, if its signatures lead to the owner. Dates are not looked at."""
    credential = _decode(data, Credential, CREDENTIAL_MAX_BYTES)
    if isinstance(credential, Refused):
        return credential
    invite = credential.invite
    signer = owner
    if invite.delegation is not None:
        if (refused := refuse_delegation(invite.delegation, run=run, owner=owner)) is not None:
            return refused
        if invite.expires_at > invite.delegation.expires_at:
            return Refused("the invite outlives the delegation of the key that signed it")
        signer = peer_id_of(invite.delegation.key)
    if not verify(signer, _signed_bytes(invite, run), invite.signature):
        return Refused(f"the invite is not signed by {signer} for this run")
    if not verify(invite.id, _of_peer(peer, run), credential.signature):
        return Refused(
            f"the credential is not that of peer {peer} in this run; whoever has lost the key that "
            "it was made for joins again with the link of an invite"
        )
    return credential


@lru_cache(maxsize=256)
def read_directive(data: bytes, *, run: RunId, owner: PeerId) -> Directive | Refused:
    """The directive, if its signatures lead to the owner. Dates are not looked at."""
    directive = _decode(data, Directive, DIRECTIVE_MAX_BYTES)
    if isinstance(directive, Refused):
        return directive
    if list(directive.bans) != sorted(set(directive.bans)):
        return Refused("the bans of the directive are not in ascending order")
    if (problem := owners_orders.problem(directive.orders)) is not None:
        return Refused(f"the orders of the directive contradict themselves: {problem}")
    if directive.delegation is not None:
        if directive.orders != owners_orders.NONE:
            return Refused("the directive of a delegate gives orders; only the owner does")
        refused = refuse_delegation(directive.delegation, run=run, owner=owner)
        if refused is not None:
            return refused
    signer = signer_of(directive, owner)
    if not verify(signer, _signed_bytes(directive, run), directive.signature):
        return Refused(f"the directive is not signed by {signer} for this run")
    return directive


def signer_of(directive: Directive, owner: PeerId) -> PeerId:
    """The key that must have signed this: the owner's or the delegate's."""
    delegation = directive.delegation
    return owner if delegation is None else peer_id_of(delegation.key)


def refuse_delegation(delegation: Delegation, *, run: RunId, owner: PeerId) -> Refused | None:
    """Reason why signatures under a delegation are not believed in a run."""
    if not verify(owner, _signed_bytes(delegation, run), delegation.signature):
        return Refused("the delegation is not signed by the owner of the run")
    return None


# --- texts that people pass on ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class InviteKey:
    """An invite with its private half: what a link carries. Secret."""

    invite: Invite
    secret: Identity

    def __str__(self) -> str:
        return _to_text(msgspec.msgpack.encode((self.invite, self.secret.to_bytes())))

    def __repr__(self) -> str:
        return f"InviteKey({self.invite.id})"


def parse_invite(text: str) -> InviteKey:
    """Read the text of an ``InviteKey``. Raises ``ValueError``; signatures are not checked."""
    try:
        invite, key = msgspec.msgpack.decode(_from_text(text), type=tuple[Invite, bytes])
        secret = Identity.from_bytes(key)
    except (*UNDECODABLE, ValueError) as error:
        raise ValueError(f"its invite is damaged ({error}); copy the whole link again") from None
    if secret.public_key != invite.key:
        raise ValueError("the two halves of its invite do not belong together")
    return InviteKey(invite, secret)


def parse_delegation(text: str) -> Delegation:
    """Read the text that ``shoal run delegate`` prints. Raises ``ValueError``."""
    try:
        return msgspec.msgpack.decode(_from_text(text), type=Delegation)
    except (*UNDECODABLE, ValueError) as error:
        raise ValueError(f"the delegation is damaged: {error}; copy the whole text again") from None


def delegation_text(delegation: Delegation) -> str:
    return _to_text(encode(delegation))


def _to_text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _from_text(text: str) -> bytes:
    if len(text) > TEXT_MAX_CHARACTERS:
        raise ValueError(f"{len(text)} characters; at most {TEXT_MAX_CHARACTERS}")
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(str(error)) from None
