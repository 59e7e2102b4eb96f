"""Files that a peer keeps while it takes part: checkpoints, the model, and its logs."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from averaging.history.state import FragmentState
from averaging.live.averager import Averager
from peer.agent.peer import Peer
from peer.errors import DiskFull, PeerError
from peer.guest.enforcement import trim_log
from peer.storage.checkpoint import CheckpointFolder
from peer.storage.earlier import NAMES_MAX, LastSeen, save_last_seen
from peer.storage.outer_state import export, global_tokens, outer_content

SAVE_EVERY_S = 60.0
"""Time between two checkpoints; more where saving takes long. Other peers have the state, too."""

SAVE_FIRST_S = 2.0
"""Time between two looks whether there is a first state to save."""
APART = 2
"""Versions of each fragment between the checkpoints that stay. Their mean is a better model than
the newest one (``peer.extras.export.averages``); a mean of the last minutes gains little, and one
with four versions between them less than this, just after the second has been written
(results-training.md in docs/research)."""
LOOK_EVERY_S = 1.0
"""Time between two looks whether the last other learner has left."""
TIDY_EVERY_S = 5.0


class Saver:
    """The files of one peer that has states."""

    def __init__(self, peer: Peer, averager: Averager) -> None:
        self._peer = peer
        self._averager = averager
        guest = peer.guest
        self._inner_folder = CheckpointFolder(
            peer.directory / "inner", allowed_bytes=lambda: guest.disk.inner
        )
        """The trainer's checkpoints."""
        self._saved: object = None
        """The content of the last checkpoint: unchanged content is not written again."""
        self._stays: Sequence[int] = ()
        """The versions of the last checkpoint that stays when the next one is there."""
        self._is_close = False
        """The newest checkpoint is less than ``APART`` versions after that one."""
        self._not_saved = ""
        """The reason why the last checkpoint could not be written."""
        self._had_company = False
        """Another peer trained when this one looked last."""

    async def run(self) -> None:
        """Write checkpoints for ever."""
        pause_s = SAVE_FIRST_S
        while True:
            await self._rest(pause_s)
            began = time.monotonic()
            if None in self._averager.states:
                continue  # it is still fetching
            await self.save()
            pause_s = max(SAVE_EVERY_S, 20 * (time.monotonic() - began))

    async def _rest(self, pause_s: float) -> None:
        """Wait so long, or until the last other learner has left: the versions that it has made
        last are in memory here, and perhaps on no disk."""
        loop = asyncio.get_running_loop()
        until = loop.time() + pause_s
        while (left_s := until - loop.time()) > 0:
            await asyncio.sleep(min(LOOK_EVERY_S, left_s))
            had_company = self._had_company
            self._had_company = bool(self._peer.others_who_train())
            if had_company and not self._had_company:
                return

    async def _note_seen(self) -> None:
        """Keep what is known of the run for the time when nobody of it is on line."""
        peer = self._peer
        if not peer.versions():
            return
        others = sorted(m.record.name for m in peer.network.live_members() if m.record.name)
        seen = LastSeen(
            run=peer.run_file.canonical().decode(),
            at=time.time(),
            tokens=global_tokens(peer.states),
            names=tuple(others[:NAMES_MAX]),
            ended_at=peer.ending.ended_at,
        )
        with contextlib.suppress(OSError):  # a full disk is reported with the checkpoint
            await asyncio.to_thread(save_last_seen, peer.directory, seen)

    async def save(self) -> None:
        """Write a checkpoint, if there is a state of every fragment and something has changed."""
        peer = self._peer
        await self._note_seen()
        averager = self._averager
        try:
            if averager.goes_back or not averager.is_after(peer.owner.rollback):
                return  # some states are about to be taken back, and the directive is known
            ledger = peer.role.ledger()  # as of these states
            states = [state for state in averager.states if state is not None]
            directives = peer.network.directives()
            content = ([s.lineage for s in states], copy.deepcopy(ledger), directives)
            is_whole = len(states) == len(peer.layout.fragments)
            if not is_whole or (content == self._saved and peer.folder.numbers()):
                return
            versions = [state.version for state in states]
            path = await asyncio.to_thread(self._write, states, ledger, directives)
        except DiskFull as error:
            self._tell_not_saved("disk_full", str(error), needed_bytes=error.needed_bytes)
        except OSError as error:
            self._tell_not_saved("checkpoint_failed", f"{peer.folder.folder}: {error}")
        else:
            self._saved, self._not_saved = content, ""
            self._is_close = is_close(self._stays, versions)
            if not self._is_close:
                self._stays = versions
            peer.log.write("checkpoint", {"path": path, "versions": versions})

    def _write(
        self,
        states: list[FragmentState],
        ledger: Mapping[str, Any] | None,
        directives: Sequence[bytes],
    ) -> Path:
        """Write a checkpoint. ``states`` is emptied: rounds replace them while a slow disk writes,
        and each array is let go of when it is written."""
        peer = self._peer
        tensors, meta = outer_content(
            run=peer.run_file,
            layout=peer.layout,
            states=states,
            ledger=ledger,
            directives=directives,
        )
        states.clear()
        return peer.folder.save(tensors, meta, in_place_of_newest=self._is_close)

    def _tell_not_saved(self, name: str, text: str, **fields: Any) -> None:
        """Report the first failure of several: saving is tried again every minute."""
        if not self._not_saved:
            self._peer.event(name, text=text, **fields)
        self._not_saved = text

    async def tidy_folder(self) -> None:
        """Keep logs and checkpoints within the owner's limits, which may change at any time."""
        peer = self._peer
        while True:
            allowed = peer.guest.disk.logs
            peer.log.keep_within(allowed and allowed / 2)
            # The second one is of each other process of an island.
            logs = [peer.directory / "agent.log", *sorted(peer.directory.glob("rank-*.log"))]
            for log in logs:
                await asyncio.to_thread(trim_log, log, allowed and allowed / 2 / len(logs))
            prunes: list[Callable[[], None]] = [peer.folder.prune, self._inner_folder.prune]
            if peer.good is not None:
                prunes.insert(0, peer.good.prune)
            for prune in prunes:
                with contextlib.suppress(OSError):  # a failing disk is told with the checkpoint
                    await asyncio.to_thread(prune)
            await asyncio.sleep(TIDY_EVERY_S)

    async def export(self, *, apart: str) -> None:
        """Write the final model. ``apart``: peers that ended the run elsewhere, and how."""
        peer = self._peer
        out = peer.directory / "model.safetensors"
        try:
            await asyncio.to_thread(export, peer.folder, out, apart=apart)
        except (PeerError, OSError) as error:
            peer.event("export_failed", text=str(error))
        else:
            peer.event("exported", path=str(out), versions=list(peer.versions()), model=peer.model)


def is_close(before: Sequence[int], versions: Sequence[int]) -> bool:
    """Return whether a fragment has made fewer than ``APART`` versions since ``before``. Versions
    that are lower were made after a rollback, and are not close."""
    made = [now - old for now, old in zip(versions, before, strict=False)]
    return bool(made) and 0 <= min(made) < APART
