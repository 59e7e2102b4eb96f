"""Signs the next directive of a key and gives it to the peers of a run.

Every command of an owner says what changes; bans and orders that are in force stay. A change that
makes no difference gets no new number: the directive in force is given to the peers once more.
"""

from __future__ import annotations

import logging
import shlex
import time
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import msgspec
from typer import Argument, Option

from dht import addresses
from dht.identity import Identity, PeerId, RunId, peer_id_of
from dht.membership.credentials import Delegation, Signer, refuse_delegation
from dht.membership.orders import NONE, Orders, words
from dht.whole_files import write_whole
from peer.cli.application import complain, json_text, report_if_slow, start_logging, usage_errors
from peer.cli.finding import find
from peer.errors import PeerError, RunOver
from peer.run_file.declaring import TomlLines
from peer.run_file.sections import RunFile
from peer.storage.address import with_own_peers

if TYPE_CHECKING:
    from dht.membership.credentials import Delegation, Directive, Signer
    from peer.calls import Kept
    from peer.joining.link import FoundRun
    from peer.joining.visit import RunStatus


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


FIND_WITHIN_S = 20.0

Where = Annotated[str, Argument(help="Run file or shoal:// link of the run.", metavar="RUN")]
KeyFile = Annotated[
    Path | None,
    Option(
        "--key",
        help="File of the key to sign with; by default your owner's key, which "
        "`shoal run sign` made.",
    ),
]
DelegationText = Annotated[
    str | None,
    Option(
        "--delegation", help="Text that `shoal run delegate` printed for your key.", metavar="TEXT"
    ),
]
Seeds = Annotated[
    list[str] | None,
    Option("--seed", help="Address of a peer of the run; repeatable.", metavar="MULTIADDR"),
]


@dataclass(frozen=True, slots=True)
class Before:
    """The run as a command finds it that changes something."""

    found: FoundRun
    bans: frozenset[bytes]
    orders: Orders
    number: int
    """Number of the directive that is to be signed."""
    seen: RunStatus
    kept: Mapping[PeerId, tuple[Kept, ...]]
    """The states that peers keep, if the command asks for them."""

    def with_orders(self, **changes: Any) -> Before:
        return replace(self, orders=msgspec.structs.replace(self.orders, **changes))

    @property
    def newest(self) -> int:
        """The newest version of any fragment.

        Raises ``ValueError`` if no peer tells its own.
        """
        newest = self.seen.newest_version
        if newest is None:
            why = self.seen.reasons or "none has a state yet"
            raise ValueError(
                f"no peer tells which version the run is at ({why}); "
                "--at would name one that may be over: try again when a peer does"
            )
        return newest


Change: TypeAlias = "Callable[[Before], Before]"
"""Returns the run with all its bans and orders from now on. Raises ``ValueError``."""


@dataclass(frozen=True, slots=True)
class Delivered:
    """A directive, and what the peers that were found said to it."""

    directive: Directive
    is_new: bool
    told: dict[PeerId, str]
    """The reason of each peer for not taking it; empty if it did."""
    waiting: list[str]
    """The version that it waits for, in words."""

    def report(self, *, as_json: bool) -> int:
        """Print the result in one line. Returns the exit code."""
        from dht.membership.admission import told

        taken = [peer for peer, reason in self.told.items() if not reason]
        refused = {peer: reason for peer, reason in self.told.items() if reason}
        number = self.directive.number
        if as_json:
            record = {
                "number": number,
                "bans": len(self.directive.bans),
                "orders": words(self.directive.orders),
                "taken": taken,
                "refused": refused,
                "waiting": self.waiting,
            }
            print(json_text(record))
        else:
            said = "" if self.is_new else ", as before"
            passed_on = "; ".join([f"{len(self.told)} peers, who pass it on", *self.waiting])
            print(
                f"directive {number}{said}: {told(self.directive)}: taken by {len(taken)} of "
                f"{passed_on}"
            )
            for peer, reason in refused.items():
                complain(f"{peer} did not take it: {reason}")
        return 0 if taken else 3


def direct(
    where: str,
    change: Change,
    *,
    key: Path | None,
    seeds: list[str] | None,
    as_json: bool,
    delegation: str | None = None,
    asks_kept: bool = False,
    to_ended: bool = False,
) -> int:
    """Sign the next directive of a key, give it to the peers on line, who pass it on, and report.

    ``asks_kept``: ask the peers for the states that they keep. ``to_ended``: to a run that has
    ended, too; raises ``RunOver`` otherwise. Returns the exit code.
    """
    from dht.membership.credentials import encode
    from peer.joining.link import Link
    from peer.joining.visit import visit, waiting
    from peer.rules.amendments import objection
    from peer.signals import run_unless_stopped
    from peer.storage.credentials import invite_from, owner_key_path

    start_logging(logging.ERROR)
    found_run = find(where)
    signer = signer_for(found_run, key, delegation)
    asked = (*found_run.seeds, *(addresses.parse_seed(text) for text in seeds or ()))
    copy = own_directive_path(key or owner_key_path(), found_run.run.run_id)
    # Peers tell versions and states only to whom the run admits.
    policy = found_run.run.policy
    invite = invite_from(signer) if policy.admission == "invited" else None
    # A peer that is listed may run with the owner's key: two with one key disturb each other.
    as_owner = policy.admission == "listed" and signer.key.peer_id not in policy.peers
    link = Link(found_run.run.run_id, with_own_peers(found_run.run.run_id, asked), invite)

    async def spread() -> Delivered:
        async with visit(link, signer.key if as_owner else None) as visitor:
            seen = await visitor.look(timeout_s=FIND_WITHIN_S)
            last = _last(copy, signer, found_run, seen.directives.get(signer.key.peer_id))
            bans = frozenset(last.bans) if last is not None else frozenset()
            orders = NONE if last is None else last.orders
            number = 1 if last is None else last.number + 1
            kept = await visitor.attestable() if asks_kept else {}
            with usage_errors():
                before = Before(found_run, bans, orders, number, seen, kept)
                if not to_ended:
                    _check_goes_on(where, before)
                after = change(before)
                waits = waiting(seen, after.orders)
                if last is not None and (after.bans, after.orders) == (bans, orders):
                    return Delivered(last, False, await visitor.deliver(encode(last)), waits)
                if (reason := objection(found_run.run, after.orders)) is not None:
                    raise ValueError(reason)
                directive = signer.directive(number, after.bans, after.orders)
            write_whole(copy, encode(directive))
            return Delivered(directive, True, await visitor.deliver(encode(directive)), waits)

    with report_if_slow("still searching for peers of the run (Ctrl-C to stop)"):
        delivered = run_unless_stopped(spread())
    return delivered.report(as_json=as_json)


def _check_goes_on(where: str, before: Before) -> None:
    """Raise ``RunOver`` if the run has ended: peers would take the order, and change nothing."""
    from peer.rules.amendments import effective
    from peer.rules.ending import ended
    from peer.storage.earlier import date_text

    run, orders, seen = before.found.run, before.orders, before.seen
    over = ended(
        effective(run, orders, seen.newest_version or 0).end,
        seen.peers,
        now=datetime.now(UTC),
        ordered=orders.end is not None,
    )
    if over is not None:
        raise RunOver(run.name, date_text(over[0]), over[1], shlex.quote(where))


def _last(copy: Path, signer: Signer, found: FoundRun, told: Directive | None) -> Directive | None:
    """The last directive of this key: the copy beside the key, or what the peers know."""
    from dht.membership.credentials import Directive, read_directive
    from dht.records import DIRECTIVE_MAX_BYTES

    kept = copy.read_bytes()[: DIRECTIVE_MAX_BYTES + 1] if copy.exists() else b""
    owner = PeerId(found.run.policy.owner or "")
    read = read_directive(kept, run=signer.run, owner=owner)
    own = [each for each in (read, told) if isinstance(each, Directive)]
    return max(own, key=lambda each: each.number, default=None)


def signer_for(found: FoundRun, key: Path | None, delegation: str | None) -> Signer:
    """The key to sign with. Raises ``NotOwner``."""
    from peer.storage.credentials import owner_key_path

    return load_signer(found.run, key or owner_key_path(), _delegation(delegation))


def _delegation(text: str | None) -> Delegation | None:
    from dht.membership.credentials import parse_delegation

    with usage_errors():
        return None if text is None else parse_delegation(text.strip())
