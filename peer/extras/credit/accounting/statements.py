"""Statements of peers about themselves for the list of contributors: name, the owner's other keys.

A name is shown because its peer has signed that it may be; a peer that has signed none is shown by
the beginning of its id. Keys belong together when each has named the other, so nobody can adopt
another's work, or press its own on somebody. A statement is of one run. The newest of a peer
counts, by a sequence number that the peer itself chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta, Struct

from averaging.messages import Count, Peer, Signature
from dht.identity import Identity, PeerId, RunId, verify

NAME_MAX = 40
KEYS_MAX = 32
"""Other keys of an owner that one key names."""

Verify: TypeAlias = Callable[[PeerId, bytes, bytes], bool]


class Statement(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One peer's word on itself, signed."""

    peer: Peer
    sequence: Count
    name: Annotated[str, Meta(max_length=NAME_MAX)] = ""
    """Empty: it wants to be shown without a name."""
    keys: Annotated[tuple[Peer, ...], Meta(max_length=KEYS_MAX)] = ()
    """Peers of the same owner, as this one says."""
    signature: Signature = b""

    @property
    def rank(self) -> tuple[int, bytes]:
        """The order of one peer's statements; that of the bytes if it used a number twice."""
        return self.sequence, msgspec.msgpack.encode(self)


def state(
    identity: Identity, run: RunId, sequence: int, name: str, keys: Iterable[PeerId] = ()
) -> Statement:
    """Sign a statement. Raises ``ValueError`` for a name or keys that others would not take."""
    own = Statement(identity.peer_id, sequence, name, tuple(sorted(set(keys))))
    if (problem := problem_of(own)) is not None:
        raise ValueError(problem)
    return msgspec.structs.replace(own, signature=identity.sign(_claim(own, run)))


def problem_of(statement: Statement) -> str | None:
    """Reason why a statement is not taken, apart from its signature; ``None`` if there is none."""
    if len(statement.name) > NAME_MAX or not statement.name.isprintable():
        return f"a name has at most {NAME_MAX} printable characters, not {statement.name[:80]!r}"
    if len(statement.keys) > KEYS_MAX or statement.peer in statement.keys:
        return f"a peer names at most {KEYS_MAX} other keys, and not its own"
    return None


def is_signed(statement: Statement, run: RunId, check: Verify = verify) -> bool:
    """True if the peer itself has made this statement for this run."""
    return problem_of(statement) is None and check(
        statement.peer, _claim(statement, run), statement.signature
    )


def _claim(statement: Statement, run: RunId) -> bytes:
    plain = (run, statement.peer, statement.sequence, statement.name, statement.keys)
    return b"shoal credit statement 1 " + msgspec.msgpack.encode(plain)


def owners(
    peers: Iterable[PeerId], statements: Mapping[PeerId, Statement]
) -> dict[PeerId, frozenset[PeerId]]:
    """Map from each of these peers to all keys of its owner that are among them, itself included.

    Two keys belong together if each names the other, or by way of a third one that both belong to.
    """
    there = set(peers)
    owned: dict[PeerId, frozenset[PeerId]] = {}
    for peer in sorted(there):
        if peer in owned:
            continue
        group, ahead = {peer}, [peer]
        while ahead:
            mutual = _mutual(ahead.pop(), statements) & there - group
            group |= mutual
            ahead += mutual
        for each in group:
            owned[each] = frozenset(group)
    return owned


def _mutual(peer: PeerId, statements: Mapping[PeerId, Statement]) -> set[PeerId]:
    own = statements.get(peer)
    if own is None:
        return set()
    others = {key: statements[key] for key in own.keys if key in statements}
    return {key for key, other in others.items() if peer in other.keys}
