"""The proofs that a peer can show to others, and the verdicts, which outlive them.

A verdict takes some hundred bytes and is kept as long as there is place: first those about peers
that have worked the most. The bytes of a proof are in one place, in memory until they are in the
peer's folder, and take so much there and in memory together. Those about peers that have worked the
least are given up first, whatever is convicted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

from msgspec import Meta, Struct

from averaging.guard.rules.proofs import Guilty, Proof
from averaging.messages import Digest, Peer
from dht.bounded_mapping import BoundedMapping
from dht.identity import PeerId

PROOFS_MAX = 256
PROOFS_BYTES_MAX = 64 << 20
VERDICTS_MAX = 4096


class Verdict(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A peer that a proof convicts, and what it did."""

    peer: Peer
    what: Annotated[str, Meta(max_length=1024)]
    proof: Digest
    worth: Annotated[float, Meta(ge=0)]
    """How much the peer's work counted when it was convicted."""


class ProofShelf(Protocol):
    """Keeps proofs and verdicts over a restart. ``write`` and ``read`` are called in threads."""

    def verdicts(self) -> list[Verdict]: ...

    def sizes(self) -> Mapping[bytes, int]:
        """The size of each proof that is there, by name."""
        ...

    def write(
        self, verdicts: Iterable[Verdict], kept: Set[bytes], new: Mapping[bytes, Proof]
    ) -> None:
        """Remove all proofs but ``kept``, add the new ones, and write the verdicts. Raises
        ``OSError``."""
        ...

    def read(self, name: bytes) -> Proof | None:
        """A proof that was written; ``None`` if it cannot be read as it was."""
        ...


@dataclass(slots=True, eq=False)
class Kept:
    """A proof that can be shown."""

    about: PeerId
    size: int
    proof: Proof | None = None
    """``None``: it is on the shelf."""


class KeptProofs:
    """The proofs and verdicts of one peer in one run."""

    def __init__(
        self,
        worth: Callable[[PeerId], float],
        shelf: ProofShelf | None,
        spawn: Callable[[Coroutine[Any, Any, None], str], object],
        not_written: Callable[[PeerId, str], None],
    ) -> None:
        """``not_written`` hears whose proof could not be written, and why."""

        def worth_of(peer: PeerId) -> float:
            known = self.verdicts.get(peer)
            return max(worth(peer), 0.0 if known is None else known.worth)

        self.verdicts = BoundedMapping[PeerId, Verdict](
            "verdicts", VERDICTS_MAX, worth=lambda peer, _: worth_of(peer)
        )
        self.proofs = BoundedMapping[bytes, Kept](
            "proofs",
            PROOFS_MAX,
            worth=lambda _, kept: worth_of(kept.about),
            size=lambda _, kept: kept.size,
            bytes_max=PROOFS_BYTES_MAX,
        )
        """Proofs by their names."""
        self._worth = worth
        self._shelf = shelf
        self._spawn = spawn
        self._not_written = not_written
        self._unwritten: set[PeerId] = set()
        self._writing = False
        if shelf is not None:
            sizes = shelf.sizes()
            for each in shelf.verdicts():
                self.verdicts[each.peer] = each
                if each.proof in sizes:
                    self.proofs[each.proof] = Kept(each.peer, sizes[each.proof])

    def keep(self, guilty: Guilty, proof: Proof, *, shown: bool = True) -> None:
        """Keep a verdict, and the proof if it is to be shown to others and there is place."""
        peer, name = guilty.peer, proof.digest
        self.verdicts[peer] = Verdict(peer, guilty.what, name, self._worth(peer))
        if shown:
            size = len(proof.encode_head()) + memoryview(proof.data).nbytes
            self.proofs[name] = Kept(peer, size, proof)
        if self._shelf is not None:
            self._unwritten.add(peer)
            if not self._writing:
                self._writing = True
                self._spawn(self._write(self._shelf), "write proofs")

    async def _write(self, shelf: ProofShelf) -> None:
        try:
            while self._unwritten:
                peers, self._unwritten = self._unwritten, set()
                there = dict(self.proofs)
                new = {name: kept.proof for name, kept in there.items() if kept.proof is not None}
                verdicts = tuple(self.verdicts.values())
                try:
                    await asyncio.to_thread(shelf.write, verdicts, there.keys(), new)
                except OSError as error:  # they stay in memory, and are tried again with the next
                    for peer in sorted(peers):
                        self._not_written(peer, error.strerror or str(error))
                else:
                    for name in new:
                        there[name].proof = None
        finally:
            self._writing = False

    async def read(self, name: bytes) -> Proof | None:
        """A proof that can be shown; ``None``: it was given up, or there never was one."""
        kept = self.proofs.get(name)
        if kept is None or kept.proof is not None or self._shelf is None:
            return None if kept is None else kept.proof
        proof = await asyncio.to_thread(self._shelf.read, name)
        if proof is None:
            self.proofs.pop(name, None)
        return proof

    def has_convicted_by(self, name: bytes) -> bool:
        """True if a verdict rests on this proof, whether or not it can be shown."""
        return any(each.proof == name for each in self.verdicts.values())
