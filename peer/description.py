"""Description of a peer's model, and the call that asks for it.

A peer whose model does not fit compares descriptions with a peer that is in the run, so that people
read which parameters differ. Tensors that peers exchange are described by name and shape, frozen
ones by a digest of their values as well. A description is a claim. A reader of a run whose model
only programs have makes the run's layout of it (``read_layout``), which its hash proves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Annotated, TypeAlias

import blake3
import msgspec
from msgspec import Meta, Struct

from averaging.numbers.layout import Kind, Layout, TensorSpec
from dht.host import Host
from dht.identity import PeerId, RunId
from peer.calls import Call

PAGE_BYTES = 256 << 10
PAGES_MAX = 64
"""Limit of the calls for one description, which is then cut off."""

VALUES_MAX = 1 << 40
"""Size of a model that a reader makes a layout for: its units take memory before anything else."""

ABSENT = "absent"

Difference: TypeAlias = tuple[str, str, str]
"""A tensor's name, and what it is here and there, in words."""


class Described(Struct, frozen=True, array_like=True):
    """One tensor of a model."""

    name: Annotated[str, Meta(max_length=1024)]
    shape: Annotated[tuple[Annotated[int, Meta(ge=0, lt=2**62)], ...], Meta(max_length=64)]
    digest: Annotated[str, Meta(max_length=64)] = ""
    """Hash of the values of a frozen tensor; empty for one that peers exchange."""
    kind: Kind | None = None
    """Kind of an exchanged tensor in the layout."""

    @property
    def words(self) -> str:
        return f"{self.shape}, frozen" if self.digest else f"{self.shape}"


def tensors_of(layout: Layout) -> tuple[Described, ...]:
    """The tensors that are exchanged, for ``layout_of``."""
    units = (unit for fragment in layout.fragments for unit in fragment.units)
    kinds = {unit.tensor: unit.kind for unit in units}
    return tuple(Described(s.name, s.shape, kind=kinds.get(s.name)) for s in layout.specs)


def layout_of(tensors: Iterable[Described], fragments: int) -> Layout:
    """The layout of the tensors that are exchanged, of all of a model's."""
    exchanged = [tensor for tensor in tensors if not tensor.digest]

    def named(kind: Kind) -> list[str]:
        return [tensor.name for tensor in exchanged if tensor.kind == kind]

    return Layout.build(
        [TensorSpec(tensor.name, tensor.shape) for tensor in exchanged],
        fragments,
        embeddings=named("embedding"),
        heads=named("head"),
        statistics=named("statistic"),
    )


@dataclass(frozen=True)
class Description:
    """The tensors of a model, sorted by name."""

    tensors: tuple[Described, ...]
    knows_frozen: bool = True
    """False if the frozen tensors are not here: a keeper's, or those of a distributed model."""

    @classmethod
    def of(cls, exchanged: Iterable[Described], frozen: Sequence[Described] | None) -> Description:
        """``frozen``: the frozen tensors; ``None`` if they are not known."""
        both = sorted((*exchanged, *(frozen or ())), key=lambda tensor: tensor.name)
        return cls(tuple(both), knows_frozen=frozen is not None)

    @cached_property
    def frozen_hash(self) -> str:
        """Hash of all frozen tensors; empty if they are not known."""
        if not self.knows_frozen:
            return ""
        frozen = [tensor for tensor in self.tensors if tensor.digest]
        return blake3.blake3(msgspec.msgpack.encode(frozen)).hexdigest()

    def differences(self, there: Description) -> tuple[Difference, ...]:
        """The tensors that are not the same here and there, by name."""
        both_know = self.knows_frozen and there.knows_frozen
        ours, theirs = (
            {each.name: each for each in side.tensors if both_know or not each.digest}
            for side in (self, there)
        )
        differing = []
        for name in sorted(ours.keys() | theirs.keys()):
            mine, other = ours.get(name), theirs.get(name)
            if mine and other and (mine.shape, mine.digest) == (other.shape, other.digest):
                continue
            words = [ABSENT if each is None else each.words for each in (mine, other)]
            if words[0] == words[1]:
                words = [f"{words[0]} with other values than there", words[1]]
            differing.append((name, words[0], words[1]))
        return tuple(differing)


def _check(told: tuple[bool, Sequence[Described]]) -> None:
    if not all(tensor.name.isprintable() for tensor in told[1]):  # they are shown on terminals
        raise ValueError("a description contains characters that cannot be printed")


CALL: Call[int, tuple[bool, Sequence[Described]]] = Call(
    "/shoal/model/1",
    tuple[bool, list[Described]],
    "a description",
    2 * PAGE_BYTES,
    _check,
    asks=Annotated[int, Meta(ge=0)],
)
"""The question of this call is the number of the first tensor."""


def page(description: Description, start: int) -> bytes:
    """An answer with the tensors from number ``start`` on, as many as it may have."""
    tensors: list[Described] = []
    size = 0
    for tensor in description.tensors[start:]:
        size += len(tensor.name.encode()) + 16 * (len(tensor.shape) + 3) + len(tensor.digest)
        if tensors and size > PAGE_BYTES:
            break
        tensors.append(tensor)
    return CALL.encode((description.knows_frozen, tensors))


async def ask(host: Host, peer: PeerId, run: RunId, *, timeout_s: float) -> Description:
    """Ask a peer for its description. Raises ``DhtError``, or ``ValueError``."""
    tensors: list[Described] = []
    knows_frozen = True
    for _ in range(PAGES_MAX):
        place = len(tensors)
        knows_frozen, more = await CALL.ask(host, peer, run, place, timeout_s=timeout_s)
        if not more:
            break
        tensors += more
    return Description(tuple(tensors), knows_frozen)


async def read_layout(
    host: Host, peer: PeerId, run: RunId, fragments: int, *, timeout_s: float
) -> Layout:
    """Make the layout of what a peer exchanges; its hash says whether it is the run's.

    Raises ``DhtError``, or ``ValueError``.
    """
    theirs = await ask(host, peer, run, timeout_s=timeout_s)
    values = sum(prod(each.shape) for each in theirs.tensors if not each.digest)
    if values > VALUES_MAX:
        raise ValueError(f"a model of {values} values; {VALUES_MAX} are the most")
    return layout_of(theirs.tensors, fragments)
