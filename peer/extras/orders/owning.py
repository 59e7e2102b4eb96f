"""``shoal invite``, ``run sign``, ``run delegate`` and ``run ban``: decide who may take part."""

from __future__ import annotations

import os
import shlex
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import Argument, Option

from dht import addresses
from dht.identity import Identity, PeerId, parse_peer_id, peer_id_of, public_key_of
from dht.records import name_problem
from dht.whole_files import write_whole
from peer.cli.application import (
    OWN_A_RUN,
    Json,
    complain,
    json_text,
    show,
    usage_errors,
)
from peer.cli.finding import find
from peer.errors import Fault, NotWritten, RunFileError
from peer.extras.orders.directives import (
    Before,
    DelegationText,
    KeyFile,
    NotOwner,
    Seeds,
    Where,
    direct,
    signer_for,
    with_owner,
)
from peer.run_file.sections import SEEDS_MAX
from peer.storage.address import with_own_peers

commands = typer.Typer()
runs = typer.Typer()

DAY_S = 86_400


@commands.command(rich_help_panel=OWN_A_RUN)
def invite(
    where: Where,
    role: Annotated[
        Literal["learner", "keeper"],
        Option(help="A learner trains; a keeper only holds the state and serves it."),
    ] = "learner",
    days: Annotated[
        int, Option(help="Days until the invite, and all that it admits, ends.", min=1, max=3650)
    ] = 30,
    key: KeyFile = None,
    delegation: DelegationText = None,
    seed: Seeds = None,
    as_json: Json = False,
) -> None:
    """Print a link that admits its holder to a run for invited peers. Pass it on in private.

    Example: shoal invite my.run.toml --days 7
    """
    from dht.membership.credentials import InviteKey
    from peer.joining.link import Link, only_from

    found_run = find(where)
    signer = signer_for(found_run, key, delegation)
    if found_run.run.policy.admission != "invited":
        complain("nobody needs this invite: the run's policy.admission is not 'invited'")
    until = int(time.time()) + days * DAY_S
    if signer.delegation is not None:
        until = min(until, signer.delegation.expires_at)
    secret = Identity.generate()
    signed = InviteKey(signer.invite(secret.public_key, role, until), secret)
    asked = (*found_run.seeds, *(addresses.parse_seed(text) for text in seed or ()))
    seeds = with_own_peers(found_run.run.run_id, asked)[:SEEDS_MAX]
    link = str(Link(found_run.run.run_id, seeds, signed))
    ends = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(until))
    if as_json:
        record = {"link": link, "invite": signed.invite.id, "role": role, "expires_at": until}
        print(json_text(record))
        return
    print(f"shoal {'join' if role == 'learner' else 'keep'} '{link}'")
    name = signed.invite.id
    back = f"shoal run ban {shlex.quote(where)} {name}"
    complain(f"invite {name} for a {role}, until {ends}; to take it back: {back}")
    if not seeds:
        complain("the link names no peer to ask; pass --seed, or the link that a peer shows")
    elif (limit := only_from(link)) is not None:
        complain(limit)


@runs.command("sign")
def sign(
    file: Annotated[Path, Argument(help="Run file to own.", metavar="FILE")],
    key: KeyFile = None,
    as_json: Json = False,
) -> None:
    """Become the owner of a new run: write your public key into its file (policy.owner).

    The file's run id changes, so sign it before you start the run. Makes a key if there is none.

    Example: shoal run sign my.run.toml
    """
    from peer.joining.link import read_text
    from peer.run_file.reading import parse_whole
    from peer.storage.credentials import owner_key_path

    path = key or owner_key_path()
    named = _policy(file).get("owner")
    if named is None:
        owner = _own(file, path).peer_id
    elif not path.exists() or (owner := Identity.load(path).peer_id) != named:
        raise NotOwner(file.name, str(path), f"the owner in the file is {named}")
    run = parse_whole(read_text(file), source=str(file))
    record = {"owner": owner, "run_id": run.run_id, "key": str(path)}
    show(record, (f"{name}: {value}" for name, value in record.items()), as_json=as_json)


def sign_if_owner_is_missing(file: Path) -> None:
    """Own a run for invited peers that has no owner yet: ``shoal start`` is its first start."""
    from peer.storage.credentials import owner_key_path

    if file.is_file():  # otherwise the reader of the file reports it
        policy = _policy(file)
        if policy.get("admission") == "invited" and "owner" not in policy:
            _own(file, owner_key_path())
            complain(f"{file}: the owner of the run is your key {owner_key_path()} (policy.owner)")


def _policy(file: Path) -> dict[str, Any]:
    """The section of a run file that may have other faults. Raises ``RunFileError``: no TOML."""
    import tomllib

    from peer.joining.link import read_text
    from peer.run_file.reading import parse_whole

    text = read_text(file)
    try:
        policy = tomllib.loads(text).get("policy")
    except (tomllib.TOMLDecodeError, RecursionError):
        policy = parse_whole(text, source=str(file))  # says where it is no TOML
    return policy if isinstance(policy, dict) else {}


def _own(file: Path, path: Path) -> Identity:
    """Write the public half of the key at ``path`` into a run file; a new key is made.

    A file with faults stays as it is, and no key is made for it. Raises ``RunFileError``.
    """
    is_new = not path.exists()
    if not os.access(file.parent, os.W_OK):
        raise NotWritten(str(file), "its folder is read-only")
    if is_new:
        _owned_by(file, Identity.generate().peer_id)
    key = Identity.load_or_create(path)
    if is_new:
        complain(
            f"made the owner's key {path}: keep a copy of it in a safe place, and show it to "
            "nobody; its holder can invite and ban, and nobody can without it"
        )
    write_whole(file, _owned_by(file, key.peer_id).encode())
    return key


def _owned_by(file: Path, owner: PeerId) -> str:
    """The text of a run file with its owner. Raises ``RunFileError``."""
    from peer.joining.link import read_text
    from peer.run_file.reading import parse_whole

    try:
        changed = with_owner(read_text(file), owner)
    except ValueError as error:
        raise RunFileError(str(file), [Fault("policy.owner", str(error))]) from error
    parse_whole(changed, source=str(file))
    return changed


@runs.command("delegate")
def delegate(
    where: Where,
    peer: Annotated[
        str,
        Argument(
            help="Public key of the delegate: the id of one of its peers (shoal credit --json).",
            metavar="KEY",
        ),
    ],
    days: Annotated[int, Option(help="Days until it ends.", min=1, max=3650)] = 30,
    key: KeyFile = None,
    as_json: Json = False,
) -> None:
    """Let another key invite and ban in your run, and print the text that proves it.

    The delegate passes the text to `shoal invite` and `shoal run ban` with --delegation, and its
    own key file with --key. Its signatures end with the delegation.

    Example: shoal run delegate my.run.toml 12D3KooW... --days 90
    """
    from dht.membership.credentials import delegation_text
    from peer.storage.earlier import date_text

    with usage_errors():
        name = parse_peer_id(peer)
    signer = signer_for(find(where), key, None)
    until = int(time.time()) + days * DAY_S
    text = delegation_text(signer.delegate(public_key_of(name), until))
    complain(
        f"for {name}, until {date_text(until)}: with its own --key and this as --delegation it may "
        "use shoal invite and shoal run ban"
    )
    show({"delegation": text, "key": name, "expires_at": until}, [text], as_json=as_json)


@runs.command("ban")
def ban(
    where: Where,
    names: Annotated[
        list[str],
        Argument(
            help="Peers by name, by the end of their id as the screen shows it, or by their id "
            "(`shoal status LINK --ids`); invites and delegates by their id.",
            metavar="PEER...",
        ),
    ],
    lift: Annotated[bool, Option("--lift", help="Lift these bans instead.")] = False,
    key: KeyFile = None,
    delegation: DelegationText = None,
    seed: Seeds = None,
    as_json: Json = False,
) -> int:
    """Ban peers from your run, or everybody whom an invite or a delegate has admitted.

    The peers that are on line get the ban from this command, and others from them.

    Example: shoal run ban my.run.toml boris
    """
    with usage_errors():
        for name in names:
            if name_problem(name) is not None:  # too long for a name
                parse_peer_id(name)

    def change(before: Before) -> Before:
        keys = frozenset(public_key_of(_peer_called(name, before)) for name in names)
        return replace(before, bans=before.bans - keys if lift else banned(before, keys))

    return direct(
        where,
        change,
        key=key,
        seeds=seed,
        delegation=delegation,
        to_ended=True,
        as_json=as_json,
    )


def _peer_called(wanted: str, before: Before) -> PeerId:
    """The peer with this name or id. Raises ``Unusable``."""
    from peer.events.names import Names, short

    try:
        return parse_peer_id(wanted)
    except ValueError:
        known: dict[str, str] = {peer: short(peer) for peer in map(peer_id_of, before.bans)}
        return PeerId(Names(known | before.seen.names).find(wanted))


def banned(before: Before, keys: frozenset[bytes]) -> frozenset[bytes]:
    """All bans, with those of these keys. Raises ``ValueError`` for the key that no ban holds."""
    owner = before.found.run.policy.owner
    if owner is not None and public_key_of(PeerId(owner)) in keys:
        raise ValueError(f"{owner} is the key of the run's owner, which cannot be banned")
    return before.bans | keys
