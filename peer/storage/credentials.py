"""Files that prove who may take part in a run: the owner's key, and each peer's credential."""

from __future__ import annotations

import os
import time
from pathlib import Path

from dht.identity import Identity, PeerId
from dht.membership.admission import Admission, Terms
from dht.membership.credentials import (
    InviteKey,
    Role,
    Signer,
    admit,
    encode,
)
from dht.records import CREDENTIAL_MAX_BYTES
from dht.whole_files import write_whole
from peer.errors import NotAdmitted
from peer.rules.amendments import objection
from peer.run_file.sections import RunFile
from peer.storage.home import data_home

CREDENTIAL_FILE = "credential"
DIRECTIVES_FILE = "directives"

OWN_INVITE_S = 10 * 365 * 86_400
"""Time for which an owner invites the own peer, with the key at hand."""


def admission_terms(run: RunFile) -> Terms:
    """The rules of admission in a run file."""
    policy = run.policy
    return Terms(
        run.run_id,
        policy.admission,
        None if policy.owner is None else PeerId(policy.owner),
        frozenset(PeerId(peer) for peer in policy.peers),
    )


def owner_key_path() -> Path:
    """The key with which this user owns runs."""
    return data_home(os.environ) / "owner.key"


def own_credential(
    folder: Path, identity: Identity, run: RunFile, *, role: Role, invite: InviteKey | None
) -> bytes:
    """The credential of the peer in ``folder``: by an invite, or by an earlier one, which is kept.

    In a run of this user's the owner's key is an invite. Raises ``NotAdmitted``.
    """
    path = folder / CREDENTIAL_FILE
    credential = path.read_bytes()[: CREDENTIAL_MAX_BYTES + 1] if path.exists() else b""
    if run.policy.admission == "invited":
        if invite is None and not _is_good(run, identity.peer_id, credential, role):
            invite = owners_invite(run)
        if invite is not None:
            peer = identity.peer_id
            credential = encode(admit(invite.invite, invite.secret, peer, run.run_id))
    check_admitted(run, identity.peer_id, credential, role)
    if invite is not None:
        write_whole(path, credential)
    return credential


def check_admitted(run: RunFile, peer: PeerId, credential: bytes, role: str) -> Admission:
    """The admission of a run. Raises ``NotAdmitted`` if it does not admit ``peer``."""
    admission = Admission(admission_terms(run), lambda orders: objection(run, orders))
    now = time.time()
    refusal = admission.show(peer, credential, now=now)
    refusal = refusal or admission.refusal(peer, now=now, role=role)
    if refusal is not None:
        raise NotAdmitted(run.name, refusal)
    return admission


def _is_good(run: RunFile, peer: PeerId, credential: bytes, role: Role) -> bool:
    try:
        check_admitted(run, peer, credential, role)
    except NotAdmitted:
        return False
    return True


def owners_invite(run: RunFile) -> InviteKey | None:
    """An invite for this machine, if the key of the run's owner is on it and the run needs one."""
    path = owner_key_path()
    if run.policy.admission != "invited" or not path.exists():
        return None
    owner = Identity.load(path)
    return invite_from(Signer(owner, run.run_id)) if owner.peer_id == run.policy.owner else None


def invite_from(signer: Signer) -> InviteKey:
    """An invite for the holder of the signer's key."""
    secret = Identity.generate()
    until = int(time.time()) + OWN_INVITE_S
    return InviteKey(signer.invite(secret.public_key, "learner", until), secret)
