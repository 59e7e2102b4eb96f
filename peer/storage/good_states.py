"""Earlier states of each fragment, kept in case the run's owner takes the run back.

A peer keeps the last few of the versions that all peers keep, and the one that the owner has
attested until another one is. They use the disk space that two checkpoints leave of the allowed
one; states that do not fit are not kept, and a rollback then fetches them from a peer that has
them. A failing disk is told of with the checkpoints; here it costs nothing but these states.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from averaging.history.attested import numbers_digest, rolled_back
from averaging.history.state import FragmentState
from averaging.numbers.layout import Layout
from dht.membership.orders import Attested, Orders
from peer.attestable import Kept
from peer.errors import CheckpointDamaged, DiskFull, QuotaFull
from peer.storage.checkpoint import (
    CheckpointFolder,
    open_checkpoint,
    read_meta,
)
from peer.storage.home import folder_bytes
from peer.storage.outer_state import described, read_state, state_tensors

logger = logging.getLogger(__name__)

KEPT = 2
"""Versions of each fragment that are kept besides the attested one."""

CHECKPOINTS = 2
"""Checkpoints that have their space before any of these states."""

VALUE_BYTES = 8
"""A value of a fragment with its momentum."""


_Place: TypeAlias = tuple[CheckpointFolder, Path, Mapping[str, Any]]
"""The folder, the path and the meta of a kept state."""


class GoodStates:
    """The kept states of one peer. ``keep`` may be called in any thread."""

    def __init__(
        self,
        folder: Path,
        layout: Layout,
        *,
        allowed_bytes: Callable[[], float | None] = lambda: None,
    ) -> None:
        """``allowed_bytes()``: current limit for checkpoints and these states together."""
        self._layout = layout
        self._allowed_bytes = allowed_bytes
        self._recent = [
            CheckpointFolder(
                folder / "recent" / f"{part.index:04d}", keep=KEPT, allowed_bytes=self._left(index)
            )
            for index, part in enumerate(layout.fragments)
        ]
        self._attested = [
            CheckpointFolder(folder / "attested" / f"{part.index:04d}", keep=1)
            for part in layout.fragments
        ]
        self._wanted: Sequence[Attested] = ()
        """The attested states, by fragment."""

    def __repr__(self) -> str:
        return f"GoodStates({sum(len(each.numbers()) for each in self._recent)} recent)"

    def _left(self, fragment: int) -> Callable[[], float | None]:
        """The space of one fragment's recent states: its part of what the others leave."""

        def left() -> float | None:
            allowed = self._allowed_bytes()
            if allowed is None:
                return None
            whole = self._layout.size
            spare = allowed - CHECKPOINTS * VALUE_BYTES * whole
            share = spare * self._layout.fragments[fragment].size / whole
            return share - folder_bytes(self._attested[fragment].folder)

        return left

    @property
    def used_bytes(self) -> int:
        """Space on the disk that all of these states use."""
        return sum(folder_bytes(each.folder) for each in (*self._recent, *self._attested))

    def keep(self, state: FragmentState) -> None:
        """Write a state, if it fits; the oldest ones make room."""
        meta = {
            "kind": "good",
            "fragment": state.fragment,
            "state": described(state),
            "merged": state.merged.digest().hex(),
            "digest": numbers_digest(state).hex(),
            "tokens": state.merged.tokens,
        }
        folder = self._recent[state.fragment]
        try:
            try:
                folder.save(state_tensors(state), meta)
            except QuotaFull:
                folder.clear()  # unlike a checkpoint, the one before it may go first
                folder.save(state_tensors(state), meta)
            self._pin(state.fragment)
        except (DiskFull, OSError) as error:
            logger.info("state_not_kept fragment=%d reason=%s", state.fragment, error)

    def prune(self) -> None:
        """Make room after the disk limit has fallen; attested states go last."""
        for index, (recent, attested) in enumerate(zip(self._recent, self._attested, strict=True)):
            recent.prune()
            left = self._left(index)()
            if left is not None and left < folder_bytes(recent.folder):
                recent.clear()
            if left is not None and left < 0:
                attested.clear()

    def kept(self) -> tuple[Kept, ...]:
        """All states that are kept, as the owner of the run may attest them."""
        return tuple(
            Kept(
                fragment=meta["fragment"],
                version=meta["state"]["version"],
                history=bytes.fromhex(meta["state"]["history"]),
                merged=bytes.fromhex(meta["merged"]),
                digest=bytes.fromhex(meta["digest"]),
                tokens=meta["tokens"],
            )
            for fragment in range(len(self._layout.fragments))
            for _, _, meta in self._all(fragment)
        )

    def pin(self, attested: Sequence[Attested]) -> None:
        """Keep the attested states until others are attested, also those that come later."""
        self._wanted = attested[: len(self._recent)]
        for fragment in range(len(self._wanted)):
            try:
                self._pin(fragment)
            except OSError as error:
                logger.info("state_not_kept fragment=%d reason=%s", fragment, error)

    def _pin(self, fragment: int) -> None:
        for folder, path, _ in self._attested_of(fragment):
            if folder is not self._attested[fragment]:
                self._attested[fragment].take_over(path)
                return

    def forget_recent(self) -> None:
        """Forget the versions that were taken back: nobody may attest them any more.

        An attested one that the disk had no room to put beside them stays among them.
        """
        for fragment, folder in enumerate(self._recent):
            try:
                folder.clear(but=[path for _, path, _ in self._attested_of(fragment)])
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
        size = self._layout.fragments[fragment].size
        for _, path, meta in self._all(fragment):
            if not _is(meta, attested):
                continue
            try:
                state = read_state(open_checkpoint(path), fragment, size, meta["state"])
            except (CheckpointDamaged, FileNotFoundError, KeyError, ValueError) as error:
                logger.warning("good_state_damaged path=%s reason=%s", path, error)
                continue
            if numbers_digest(state) == attested.digest:
                return state
        return None

    def _attested_of(self, fragment: int) -> list[_Place]:
        """The attested state of a fragment, wherever it is kept."""
        wanted = self._wanted[fragment : fragment + 1]
        return [each for each in self._all(fragment) if any(_is(each[2], it) for it in wanted)]

    def _all(self, fragment: int) -> Iterator[_Place]:
        """Every kept state of a fragment with its meta, the newest first."""
        for folder in (self._recent[fragment], self._attested[fragment]):
            for number in reversed(folder.numbers()):
                path = folder.path_of(number)
                with contextlib.suppress(CheckpointDamaged, FileNotFoundError):
                    yield folder, path, read_meta(path)


def _is(meta: Mapping[str, Any], attested: Attested) -> bool:
    state = meta["state"]
    return (state["version"], state["lineage"], meta["digest"]) == (
        attested.version,
        attested.lineage.hex(),
        attested.digest.hex(),
    )
