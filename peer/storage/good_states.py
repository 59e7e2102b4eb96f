"""Earlier states of each fragment, kept in case the run's owner takes the run back.

A peer keeps the last few of the versions that all peers keep, and the one that the owner has
attested until another one is. They use the disk space that two checkpoints leave of the allowed
one; states that do not fit are not kept, and a rollback then fetches them from a peer that has
them. A failing disk is told of with the checkpoints; here it costs nothing but these states.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec

from averaging.history.manifest import numbers_digest, rolled_back
from averaging.history.state import FragmentState, Pieces, value_bytes
from averaging.numbers.layout import Layout
from dht.membership.orders import Attested, Orders
from peer.calls import Kept
from peer.errors import CheckpointDamaged, DiskFull, QuotaFull
from peer.storage.checkpoint import (
    CheckpointFolder,
    open_checkpoint,
    read_meta,
)
from peer.storage.home import folder_bytes
from peer.storage.outer_state import read_state, state_tensors

logger = logging.getLogger(__name__)

KEPT = 2
"""Versions of each fragment that are kept besides the attested one."""

CHECKPOINTS = 2
"""Checkpoints that have their space before any of these states."""


class GoodStates:
    """The kept states of one peer. ``keep`` may be called in any thread."""

    def __init__(
        self,
        folder: Path,
        layout: Layout,
        mu: float,
        *,
        allowed_bytes: Callable[[], float | None] = lambda: None,
    ) -> None:
        """``mu``: the run's outer momentum.

        ``allowed_bytes()``: current limit for checkpoints and these states together.
        """
        self._layout = layout
        self._mu = mu
        self._allowed_bytes = allowed_bytes
        self._folders = [
            CheckpointFolder(
                folder / f"{part.index:04d}",
                keep=KEPT,
                allowed_bytes=partial(self._share, index),
                spares=partial(self._is_attested, index),
            )
            for index, part in enumerate(layout.fragments)
        ]
        self.attested: Sequence[Attested] = ()
        """The attested states, by fragment: they stay until others are attested."""

    def __repr__(self) -> str:
        return f"GoodStates({sum(len(each.numbers()) for each in self._folders)} states)"

    def _share(self, fragment: int) -> float | None:
        """The space of one fragment's states: its part of what the checkpoints leave."""
        allowed, whole = self._allowed_bytes(), self._layout.size
        if allowed is None:
            return None
        spare = allowed - CHECKPOINTS * value_bytes(self._mu) * whole
        return spare * self._layout.fragments[fragment].size / whole

    def _is_attested(self, fragment: int, path: Path) -> bool:
        with contextlib.suppress(CheckpointDamaged, FileNotFoundError):
            kept = _kept(path)
            return any(_is(kept, each) for each in self.attested[fragment : fragment + 1])
        return False

    @property
    def used_bytes(self) -> int:
        """Space on the disk that all of these states use."""
        return sum(folder_bytes(each.folder) for each in self._folders)

    def keep(self, state: FragmentState) -> None:
        """Write a state, if it fits; the oldest ones make room."""
        kept = Kept(
            fragment=state.fragment,
            version=state.version,
            history=state.history,
            merged=state.merged.digest(),
            digest=numbers_digest(state),
            tokens=state.merged.tokens,
        )
        meta = {"kind": "good", "kept": msgspec.to_builtins(kept)}
        folder = self._folders[state.fragment]
        try:
            try:
                folder.save(state_tensors(state), meta)
            except QuotaFull:
                folder.clear()  # unlike a checkpoint, the one before it may go first
                folder.save(state_tensors(state), meta)
        except (DiskFull, OSError) as error:
            logger.info("state_not_kept fragment=%d reason=%s", state.fragment, error)

    def prune(self) -> None:
        """Make room after the disk limit has fallen; attested states go last."""
        for folder in self._folders:
            folder.prune()
            for spared in (False, True):
                if not folder.fits():
                    folder.clear(spared=spared)

    def kept(self) -> tuple[Kept, ...]:
        """All states that are kept, as the owner of the run may attest them."""
        fragments = range(len(self._folders))
        return tuple(kept for fragment in fragments for _, kept in self._all(fragment))

    def forget_recent(self) -> None:
        """Forget the versions that were taken back: nobody may attest them any more."""
        for folder in self._folders:
            try:
                folder.clear()
            except OSError as error:
                logger.info("states_not_removed path=%s reason=%s", folder.folder, error)

    def roots(self, orders: Orders) -> list[FragmentState | None]:
        """The states with which the run goes on after a rollback, as far as this peer has them."""
        rollback = orders.rollback
        assert rollback is not None
        roots: list[FragmentState | None] = [None] * len(self._layout.fragments)
        for fragment, (root, each) in enumerate(zip(rollback.roots, orders.attested, strict=False)):
            state = self._load(fragment, each)
            if state is not None:
                made = rolled_back(state, rollback.number)
                if (made.version, made.lineage) == (root.version, root.lineage):
                    roots[fragment] = made
        return roots

    def _load(self, fragment: int, attested: Attested) -> FragmentState | None:
        pieces = Pieces.of(self._layout.fragments[fragment], self._mu)
        for path, kept in self._all(fragment):
            if not _is(kept, attested):
                continue
            try:
                state = read_state(open_checkpoint(path), fragment, pieces)
            except (CheckpointDamaged, FileNotFoundError, KeyError, ValueError) as error:
                logger.warning("good_state_damaged path=%s reason=%s", path, error)
                continue
            if numbers_digest(state) == attested.digest:
                return state
        return None

    def _all(self, fragment: int) -> Iterator[tuple[Path, Kept]]:
        """The path of every kept state of a fragment, the newest first."""
        folder = self._folders[fragment]
        for path in map(folder.path_of, reversed(folder.numbers())):
            with contextlib.suppress(CheckpointDamaged, FileNotFoundError):
                yield path, _kept(path)


def _kept(path: Path) -> Kept:
    return msgspec.convert(read_meta(path)["kept"], Kept)


def _is(kept: Kept, attested: Attested) -> bool:
    told = attested.version, attested.lineage, attested.digest
    return (kept.version, kept.lineage, kept.digest) == told
