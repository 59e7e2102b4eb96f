"""The checkpoints that a peer writes while it takes part."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from averaging.history.state import FragmentState, Pieces
from averaging.numbers.layout import Layout, TensorSpec
from dht.identity import PeerId
from peer.agent.saver import SAVE_EVERY_S, SAVE_FIRST_S, TIDY_EVERY_S, Saver
from peer.run_file.sections import RunFile
from peer.storage.checkpoint import CheckpointFolder, open_checkpoint
from peer.storage.outer_state import read_state

LAYOUT = Layout.build([TensorSpec("weight", (8,))], 1)


class Averager:
    """The states of a peer, as a saver sees them."""

    def __init__(self, peer: Peer) -> None:
        self.goes_back = False
        self._peer = peer

    @property
    def states(self) -> tuple[FragmentState | None]:
        return (self._peer.state,)

    def is_after(self, rollback: int) -> bool:
        return rollback == self._peer.gone_back_to


class Peer:
    """The methods that a saver needs of the peer around it."""

    def __init__(self, directory: Path) -> None:
        self.ledger: dict[str, Any] = {"pending": 3}
        self.state: FragmentState | None = self.made_at(0)
        self.log: list[str] = []
        self.told: list[tuple[str, str]] = []
        self.learners: list[PeerId] = []
        self.gone_back_to = 0
        self.folder = CheckpointFolder(directory / "outer")
        self.local = local = SimpleNamespace(
            layout=LAYOUT,
            run_file=RunFile(),
            folder=self.folder,
            good=None,
            directory=directory,
            role=SimpleNamespace(ledger=lambda: self.ledger),
            owner=SimpleNamespace(rollback=0),
            network=SimpleNamespace(directives=lambda: (), live_members=lambda: ()),
            guest=SimpleNamespace(disk=SimpleNamespace(inner=None)),
            log=SimpleNamespace(write=lambda name, fields: self.log.append(name), problem=""),
            event=lambda name, **fields: self.told.append((name, fields["text"])),
            versions=lambda: (),
            others_who_train=lambda: self.learners,
        )
        self.averager = Averager(self)
        self.saver = Saver(local, self.averager)  # type: ignore[arg-type]

    @staticmethod
    def made_at(value: int) -> FragmentState:
        theta = np.full(8, value, dtype=np.float32)
        return FragmentState.founded(LAYOUT.hash, 0, theta, 0)

    def save(self) -> int:
        asyncio.run(self.saver.save())
        return len(self.log)


def test_an_unchanged_state_is_not_written_again(tmp_path: Path) -> None:
    """A keeper that stays after the end wrote eight bytes for each parameter every minute."""
    peer = Peer(tmp_path)
    assert peer.save() == 1
    assert peer.save() == 1
    peer.ledger["pending"] = 4
    assert peer.save() == 2, "the trainer has gone on"
    peer.state = peer.made_at(1)
    assert peer.save() == 3, "a merge"
    assert peer.save() == 3


def test_no_states_that_are_taken_back_are_saved_with_the_directive_that_does_so(
    tmp_path: Path,
) -> None:
    """A checkpoint with the directive counts as one of after the rollback."""
    peer = Peer(tmp_path)
    peer.local.owner.rollback = 7
    assert peer.save() == 0
    peer.gone_back_to, peer.averager.goes_back = 7, True
    assert peer.save() == 0, "some fragments have gone back, others have yet to"
    peer.averager.goes_back = False
    assert peer.save() == 1


def test_a_checkpoint_that_was_removed_or_not_written_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = Peer(tmp_path)
    with monkeypatch.context() as full:
        full.setattr(peer.saver, "_tell_not_saved", lambda *told, **fields: None)
        full.setattr(peer.folder, "save", refuse)
        assert peer.save() == 0
    assert peer.save() == 1
    for folder in (tmp_path / "outer").iterdir():
        folder.rename(tmp_path / "elsewhere")
    assert peer.save() == 2


def refuse(*arguments: object, **settings: object) -> Path:
    raise OSError("no space left")


def test_checkpoints_that_stay_lie_versions_apart_and_the_newest_is_the_newest(
    tmp_path: Path,
) -> None:
    """Those of the last three minutes were often of one version, and their mean of no use."""
    peer = Peer(tmp_path)
    kept = []
    for version in (5, 5, 6, 7, 7, 8, 9, 10, 11, 3, 4):  # a rollback to version 3
        peer.ledger["pending"] += 1
        peer.state = replace(peer.made_at(0), version=version)
        peer.save()
        paths = map(peer.folder.path_of, peer.folder.numbers())
        metas = [read_state(open_checkpoint(path), 0, Pieces(8, 0)) for path in paths]
        kept.append([state.version for state in metas])
    assert kept == [
        *([5], [5, 5], [5, 6], [5, 7], [5, 7, 7], [5, 7, 8], [5, 7, 9]),
        *([7, 9, 10], [7, 9, 11], [9, 11, 3], [11, 3, 4]),
    ]


async def test_the_last_versions_are_saved_as_soon_as_the_last_learner_has_left(
    tmp_path: Path,
) -> None:
    """A keeper whose machine failed within a minute lost them, and they were nowhere else."""
    peer = Peer(tmp_path)
    peer.learners = [PeerId("anna"), PeerId("boris")]
    saving = asyncio.create_task(peer.saver.run())
    await asyncio.sleep(SAVE_FIRST_S + 1.0)
    assert len(peer.log) == 1
    for value, peer.learners in ((1, [PeerId("boris")]), (2, [])):
        peer.state = peer.made_at(value)
        assert len(peer.log) == 1
        await asyncio.sleep(5.0)
    assert len(peer.log) == 2
    await asyncio.sleep(SAVE_EVERY_S)
    assert len(peer.log) == 2, "nothing has changed since"
    saving.cancel()


async def test_a_newcomer_is_saved_as_soon_as_it_has_every_state(tmp_path: Path) -> None:
    """A download took longer than 2 s: its first checkpoint came a minute later. Killed until then
    it asked the peers for the run file, with a daemon of its own, and fetched all states again."""
    peer = Peer(tmp_path)
    whole, peer.state = peer.state, None
    saving = asyncio.create_task(peer.saver.run())
    await asyncio.sleep(10 * SAVE_FIRST_S)
    assert peer.log == []
    peer.state = whole
    await asyncio.sleep(1.5 * SAVE_FIRST_S)
    assert len(peer.log) == 1
    peer.state = peer.made_at(1)
    await asyncio.sleep(SAVE_EVERY_S / 2)
    assert len(peer.log) == 1
    saving.cancel()


def test_a_checkpoint_lets_go_of_what_it_has_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds replaced the states while a slow disk wrote them: 1300 MB where 1150 were promised."""
    peer = Peer(tmp_path)
    assert peer.state is not None
    old = [weakref.ref(peer.state.theta), weakref.ref(peer.state.momentum)]
    left: list[int] = []
    merged = threading.Event()

    def flush(descriptor: int) -> None:
        assert merged.wait(60)
        left.append(sum(each() is not None for each in old))

    async def merge_meanwhile() -> None:
        saving = asyncio.create_task(peer.saver.save())
        await asyncio.sleep(0)
        peer.state = peer.made_at(1)
        merged.set()
        await saving

    monkeypatch.setattr(os, "fsync", flush)
    asyncio.run(merge_meanwhile())  # on a real loop, which goes on while a thread writes
    assert left[0] == 0
    saved = peer.folder.load_latest()
    assert saved is not None
    with saved.tensors() as tensors:
        assert not tensors.get_tensor("theta.0").any(), "the state before the merge"


async def test_a_disk_that_became_read_only_does_not_end_the_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Old checkpoints that exceed the limit of the owner cannot be removed then."""
    peer = Peer(tmp_path)
    for value in (1, 2):
        peer.state = peer.made_at(value)
        await peer.saver.save()
    local: Any = peer.saver._peer
    local.guest.disk.logs = None
    local.log.keep_within = lambda allowed: None
    local.folder = CheckpointFolder(tmp_path / "outer", allowed_bytes=lambda: 1)

    def read_only(path: Path, target: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(Path, "rename", read_only)
    house = asyncio.create_task(peer.saver.tidy_folder())
    await asyncio.sleep(2 * TIDY_EVERY_S)
    assert not house.done() and len(local.folder.numbers()) == 2
    monkeypatch.undo()
    await asyncio.sleep(2 * TIDY_EVERY_S)
    assert len(local.folder.numbers()) == 1
    house.cancel()


async def test_the_logs_of_agent_and_ranks_are_kept_within_the_limit_together(
    tmp_path: Path,
) -> None:
    """Those of ranks grew for as long as the run lasted."""
    peer = Peer(tmp_path)
    local: Any = peer.saver._peer
    local.guest.disk.logs, local.log.keep_within = 1200, lambda allowed: None
    for name in ("agent.log", "rank-1.log", "rank-2.log"):
        (local.directory / name).write_bytes(b"a" * 1000)
    house = asyncio.create_task(peer.saver.tidy_folder())
    await asyncio.sleep(TIDY_EVERY_S)
    house.cancel()
    assert sum(each.stat().st_size for each in local.directory.glob("*.log*")) == 300
