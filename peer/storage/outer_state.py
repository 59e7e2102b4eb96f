"""An agent's checkpoint: all fragments with their history, the ledger, run file and layout.

A checkpoint is self-contained: it has the run file and the shapes of the tensors, so that
``export`` can write a file of named parameters without the code of the model.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from blake3 import blake3
from msgspec import Struct

from averaging.history.chain import Chain
from averaging.history.lineage import Lineage
from averaging.history.merged_map import Mark, MergedMap
from averaging.history.state import FragmentState, Pieces
from averaging.messages import Link
from averaging.numbers.arrays import Float32s, uninitialised_floats
from averaging.numbers.layout import Layout
from dht.identity import PeerId
from dht.whole_files import new_file
from peer.description import Described, layout_of, tensors_of
from peer.errors import CheckpointDamaged, FolderOfAnotherRun, NotWritten, PeerError, RunFileError
from peer.run_file.reading import from_canonical
from peer.run_file.sections import RunFile
from peer.storage.checkpoint import Checkpoint, CheckpointFolder
from peer.storage.tensor_file import Tensor, write_safetensors


class NothingToExport(PeerError):
    """The folder has no usable checkpoint."""

    exit_code = 2
    folder: str
    message = (
        "there is no usable checkpoint in {folder}; pass the folder of a peer, which has "
        "one some minutes after it has come into its run"
    )


class NoSuchFolder(NothingToExport):
    """The folder of a peer that a command was given does not exist."""

    message = (
        "there is no folder {folder!r}; name the folder of a peer, or the link or the file of a run"
    )


@dataclass(frozen=True, slots=True)
class OuterState:
    """An agent's checkpoint, read back."""

    run: RunFile
    layout: Layout
    states: tuple[FragmentState, ...]
    ledger: Mapping[str, Any] | None
    """Argument for ``Ledger.from_plain``."""
    path: Path
    directives: tuple[bytes, ...] = ()
    """The directives that the peer knew; each of them proves itself."""
    averaged: int = 1
    """Number of checkpoints of which the parameters are the mean."""

    @property
    def global_tokens(self) -> int:
        return global_tokens(self.states)

    @property
    def model(self) -> str:
        return model_name(self.states)


def outer_content(
    *,
    run: RunFile,
    layout: Layout,
    states: Sequence[FragmentState],
    ledger: Mapping[str, Any] | None = None,
    directives: Sequence[bytes] = (),
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the meta of a checkpoint of every fragment, for ``CheckpointFolder.save``.

    Fragments may be of different versions: each is whole in itself. The arrays are written without
    a copy, must not change until then, and are let go of one by one.
    """
    if [state.fragment for state in states] != list(range(len(layout.fragments))):
        raise ValueError("a checkpoint needs every fragment of the layout once, in order")
    tensors: dict[str, Tensor] = {}
    for state in states:
        tensors |= state_tensors(state)
    meta = {
        "kind": "outer",
        "run_id": run.run_id,
        "run": run.canonical().decode(),
        "layout_hash": layout.hash.hex(),
        "layout": msgspec.to_builtins(tensors_of(layout)),
        "ledger": ledger,
        "directives": [data.hex() for data in directives],
    }
    return tensors, meta


class _Standing(Struct, frozen=True, array_like=True):
    """A fragment's state without its numbers."""

    version: int
    lineage: bytes
    history: bytes
    chain: tuple[Link, ...]
    merged: dict[PeerId, Mark]


_decoder = msgspec.msgpack.Decoder(_Standing)


def state_tensors(state: FragmentState) -> dict[str, Tensor]:
    """One fragment's state, to be written into one checkpoint."""
    index, chain, merged = state.fragment, tuple(state.chain), dict(state.merged)
    standing = _Standing(state.version, state.lineage, state.history, chain, merged)
    return {
        f"theta.{index}": Tensor.once(state.theta),
        f"momentum.{index}": Tensor.once(state.momentum),
        f"standing.{index}": Tensor.of(np.frombuffer(msgspec.msgpack.encode(standing), np.uint8)),
    }


def load_outer(
    folder: CheckpointFolder,
    *,
    run_id: str | None = None,
    layout_hash: bytes | None = None,
    floats: Callable[[int], Float32s] = uninitialised_floats,
) -> OuterState | None:
    """The newest usable checkpoint; damaged ones are set aside.

    ``floats(count)``: memory for the numbers of the states.
    Raises ``FolderOfAnotherRun`` if the checkpoint belongs to another run or model.
    """
    while (checkpoint := folder.load_latest()) is not None:
        try:
            outer = _read(checkpoint, floats)
        except (CheckpointDamaged, KeyError, ValueError, TypeError, RunFileError):
            # The digests match but the content is invalid: another program wrote it.
            folder.set_aside(checkpoint.path)
            continue
        if run_id is not None and outer.run.run_id != run_id:
            what = f"the run of the checkpoint in {checkpoint.path}"
            raise FolderOfAnotherRun(what, run_id, outer.run.run_id)
        if layout_hash is not None and outer.layout.hash != layout_hash:
            kept, wanted = outer.layout.hash.hex(), layout_hash.hex()
            what = f"the layout of the checkpoint in {checkpoint.path}"
            raise FolderOfAnotherRun(what, wanted, kept)
        return outer
    return None


def merged_of(states: Iterable[FragmentState | None]) -> MergedMap:
    """Merged work of all peers: entry by entry the maximum over the fragments."""
    merged = MergedMap()
    for state in states:
        if state is not None:
            merged = merged.united(state.merged)
    return merged


def global_tokens(states: Iterable[FragmentState | None]) -> int:
    """Merged tokens of all peers."""
    return merged_of(states).tokens


def model_name(states: Iterable[FragmentState]) -> str:
    """Name of the parameters: equal names mean equal histories, hence equal bits."""
    return blake3(b"".join(state.lineage for state in states)).hexdigest()[:16]


def founding_name(states: Iterable[FragmentState]) -> str:
    """Name of the founder's first weights, which all peers of one history share.

    Empty if the history of a fragment is too long to reach back to them.
    """
    roots = [state.chain.root for state in states]
    if not roots or None in roots:
        return ""
    return blake3(b"".join(root.lineage for root in roots if root is not None)).hexdigest()[:16]


def export(folder: CheckpointFolder, out: Path, *, apart: str = "") -> OuterState:
    """Write the newest checkpoint's parameters, by name and in fp32, as one safetensors file.

    ``apart``: a note, kept in the file, about peers that ended the run with other parameters.
    The file is complete or absent. Raises ``NothingToExport`` or ``NotWritten``.
    """
    outer = load_outer(folder)
    if outer is None:
        raise NothingToExport(str(folder.folder))
    write_model(outer, out, apart=apart)
    return outer


def write_model(
    outer: OuterState,
    out: Path,
    *,
    apart: str = "",
    cast: Callable[[Tensor], Tensor] = lambda tensor: tensor,
) -> None:
    """Write parameters by name as one safetensors file, in fp32 unless ``cast`` says otherwise.

    Raises ``NotWritten``.
    """
    metadata = export_metadata(outer) | ({"shoal_apart": apart} if apart else {})
    tensors = {name: cast(each) for name, each in named_tensors(outer.layout, outer.states).items()}
    try:
        with new_file(out) as temporary, temporary.open("xb") as file:
            write_safetensors(file, tensors, metadata=metadata)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise NotWritten(str(out), error.strerror or str(error)) from error


def export_metadata(outer: OuterState) -> dict[str, str]:
    """Facts of the run in the header of a file of weights."""
    return {
        "format": "pt",
        "shoal_run": outer.run.name,
        "shoal_run_id": outer.run.run_id,
        "shoal_global_tokens": str(outer.global_tokens),
        "shoal_model": outer.model,
        "shoal_versions": ",".join(str(state.version) for state in outer.states),
        **({} if outer.averaged == 1 else {"shoal_averaged": str(outer.averaged)}),
    }


def named_tensors(layout: Layout, states: Sequence[FragmentState]) -> dict[str, Tensor]:
    """Every parameter under its own name, as views of the fragments."""
    units = [
        (unit.tensor, unit.start, state.theta[unit.values])
        for fragment, state in zip(layout.fragments, states, strict=True)
        for unit in fragment.units
    ]
    units.sort(key=lambda entry: entry[:2])
    pieces = {
        name: tuple(values for _, _, values in group)
        for name, group in itertools.groupby(units, key=lambda entry: entry[0])
    }
    return {
        spec.name: Tensor("F32", spec.shape, pieces.get(spec.name, ())) for spec in layout.specs
    }


def _read(checkpoint: Checkpoint, floats: Callable[[int], Float32s]) -> OuterState:
    meta = checkpoint.meta
    run = from_canonical(meta["run"].encode(), meta["run_id"])
    layout = layout_of(msgspec.convert(meta["layout"], list[Described]), run.outer.fragments)
    if layout.hash.hex() != meta["layout_hash"]:
        raise CheckpointDamaged(str(checkpoint.path), "its layout does not have its hash")
    with checkpoint.tensors() as tensors:
        states = tuple(
            _state(tensors, fragment.index, Pieces.of(fragment, run.outer.momentum), floats)
            for fragment in layout.fragments
        )
    directives = tuple(map(bytes.fromhex, meta.get("directives", ())))
    return OuterState(run, layout, states, meta["ledger"], checkpoint.path, directives)


def read_state(checkpoint: Checkpoint, index: int, pieces: Pieces) -> FragmentState:
    """One fragment's state. Raises ``CheckpointDamaged``, or for invalid content ``ValueError``."""
    with checkpoint.tensors() as tensors:
        return _state(tensors, index, pieces, uninitialised_floats)


def read_place(tensors: Any, index: int) -> tuple[int, Lineage]:
    """Version and lineage of one fragment in the tensors of a checkpoint."""
    standing = _standing(tensors, index)
    return standing.version, standing.lineage


def read_theta(tensors: Any, index: int) -> Float32s:
    """The parameters of one fragment in the tensors of a checkpoint."""
    theta: Float32s = tensors.get_tensor(f"theta.{index}")
    return theta


def _standing(tensors: Any, index: int) -> _Standing:
    return _decoder.decode(tensors.get_tensor(f"standing.{index}").tobytes())


def _state(
    tensors: Any, index: int, pieces: Pieces, floats: Callable[[int], Float32s]
) -> FragmentState:
    def vector(name: str, size: int) -> Float32s:
        values, into = tensors.get_tensor(f"{name}.{index}"), floats(size)
        if (values.dtype, values.shape) != (into.dtype, into.shape):
            raise ValueError(f"the {name} of fragment {index} has another size")
        np.copyto(into, values)
        return into

    standing = _standing(tensors, index)
    return FragmentState(
        fragment=index,
        version=standing.version,
        lineage=standing.lineage,
        chain=Chain(standing.chain),
        theta=vector("theta", pieces.theta),
        momentum=vector("momentum", pieces.momentum),
        merged=MergedMap(standing.merged),
        history=standing.history,
    )
