"""An owner, a delegate and peers with invites, for the tests of admission."""

from __future__ import annotations

from dht.identity import Identity, PeerId, RunId
from dht.membership.admission import Admission, Terms
from dht.membership.credentials import Delegation, InviteKey, Role, Signer, admit, encode
from dht.wrapped_host import Refusal

RUN = RunId("5f" * 32)
OTHER_RUN = RunId("6f" * 32)
NOW = 1_750_000_000
DAY = 86_400


def key(name: str) -> Identity:
    return Identity.from_seed(name.encode().ljust(32, b"."))


OWNER, DELEGATE = key("owner"), key("delegate")
OWNERS = Signer(OWNER, RUN)


def delegation(days: float = 10, run: RunId = RUN) -> Delegation:
    return Signer(OWNER, run).delegate(DELEGATE.public_key, int(NOW + days * DAY))


DELEGATES = Signer(DELEGATE, RUN, delegation())


def invitation(
    name: str = "invite", *, role: Role = "learner", days: float = 5, signer: Signer = OWNERS
) -> InviteKey:
    """An invite and its private half."""
    secret = key(name)
    return InviteKey(signer.invite(secret.public_key, role, int(NOW + days * DAY)), secret)


def credential(peer: PeerId, by: InviteKey | None = None, run: RunId = RUN) -> bytes:
    by = by or invitation()
    return encode(admit(by.invite, by.secret, peer, run))


def admission(mode: str = "invited", **terms: object) -> Admission:
    return Admission(Terms(**{"run": RUN, "mode": mode, "owner": OWNER.peer_id, **terms}))  # type: ignore[arg-type]


def only(*peers: PeerId) -> Refusal:
    """The guard of a run that lists these peers."""
    door = Admission(Terms(RUN, "listed", listed=frozenset(peers)))

    async def refusal(peer: PeerId) -> str | None:
        return door.refusal(peer, now=NOW)

    return refusal


def banning(*keys: bytes, number: int = 1, signer: Signer = OWNERS) -> bytes:
    return encode(signer.directive(number, frozenset(keys)))
