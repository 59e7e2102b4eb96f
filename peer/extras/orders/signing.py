"""The keys that sign for a run: who may use which, and the owner's name in a run file."""

from __future__ import annotations

import time
import tomllib
from pathlib import Path

from dht.identity import Identity, PeerId, RunId, peer_id_of
from dht.membership.credentials import Delegation, Signer, refuse_delegation
from peer.errors import PeerError
from peer.run_file.sections import RunFile
from peer.run_file.setting_rules import TomlLines


class NotOwner(PeerError):
    """A key may not invite or ban in a run."""

    exit_code = 4
    run: str
    path: str
    reason: str
    message = (
        "the key {path} cannot sign for run {run!r}: {reason}; name the "
        "owner's key with --key, or for shoal invite and run ban a delegate's, with --delegation"
    )


def load_signer(run: RunFile, path: Path, delegation: Delegation | None) -> Signer:
    """The key at ``path``, which may invite and ban in this run. Raises ``NotOwner``."""
    if run.policy.owner is None:
        raise NotOwner(run.name, str(path), "the run file names no owner (policy.owner)")
    if not path.exists():
        raise NotOwner(run.name, str(path), "there is no such file")
    key = Identity.load(path)
    if delegation is None:
        if key.peer_id != run.policy.owner:
            raise NotOwner(run.name, str(path), f"the owner is {run.policy.owner}")
    elif peer_id_of(delegation.key) != key.peer_id:
        raise NotOwner(run.name, str(path), f"the delegation is for {peer_id_of(delegation.key)}")
    elif delegation.expires_at <= time.time():
        raise NotOwner(run.name, str(path), "the delegation has expired")
    elif refused := refuse_delegation(delegation, run=run.run_id, owner=PeerId(run.policy.owner)):
        raise NotOwner(run.name, str(path), refused.reason)
    return Signer(key, run.run_id, delegation)


def own_directive_path(key: Path, run_id: RunId) -> Path:
    """Copy of the last directive that a key has signed for a run, beside the key."""
    return key.with_name(f"{key.stem}.{run_id[:16]}.directive")


def with_owner(text: str, owner: str) -> str:
    """The text of a run file with ``policy.owner`` set, which it does not have yet.

    All other bytes stay. Raises ``ValueError`` if the section is written in a form that a line
    cannot be added to.
    """
    line = TomlLines(text).of(("policy",))
    lines = text.splitlines(keepends=True)
    if line is None:
        end = "" if not text or text.endswith("\n") else "\n"
        changed = f'{text}{end}\n[policy]\nowner = "{owner}"\n'
    elif lines[line - 1].lstrip().startswith("["):
        head = lines[line - 1].rstrip("\n")
        lines[line - 1] = f'{head}\nowner = "{owner}"\n'
        changed = "".join(lines)
    else:
        lines.insert(line - 1, f'policy.owner = "{owner}"\n')
        changed = "".join(lines)
    try:
        written = tomllib.loads(changed)["policy"]["owner"]
    except (tomllib.TOMLDecodeError, KeyError, TypeError):
        written = None
    if written != owner:
        raise ValueError(f'write this into its section [policy] yourself: owner = "{owner}"')
    return changed
