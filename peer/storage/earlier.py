"""Faults and changes in a peer's folder, told to a person before anything starts.

A damaged checkpoint is replaced by an older one, a lost key by a new one, and an edited run file
makes another run. None of it is an error, and each may cost work that nobody meant to lose.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from peer.errors import CheckpointDamaged
from peer.run_file.sections import RunFile
from peer.run_file.writing import differences
from peer.storage.checkpoint import CheckpointFolder, open_checkpoint
from peer.storage.home import KEY, OUTER, data_home, has_been_there
from peer.storage.outer_state import kept_run

DIFFERENCES_SHOWN = 4


@dataclass(frozen=True, slots=True)
class Earlier:
    """Sentences about the files of a peer."""

    told: tuple[str, ...]
    lost: bool
    """True if there are checkpoints, and none of them is intact."""


def look_at_files(folder: Path) -> Earlier:
    """Look for the key in a peer's folder, and verify its checkpoints."""
    earlier = _look_at_checkpoints(folder)
    if (folder / KEY).exists() or not has_been_there(folder):
        return earlier
    no_key = (
        f"{folder} has no {KEY}, so this peer gets a new one and is a new peer to the others; its "
        "earlier work counts for the old key. If there is a copy of that, stop this peer and put "
        "the copy there"
    )
    return Earlier((no_key, *earlier.told), lost=earlier.lost)


def _look_at_checkpoints(folder: Path) -> Earlier:
    """Verify the checkpoints in a peer's folder, the newest first, until one is intact."""
    outer = CheckpointFolder(folder / OUTER)
    damaged: list[CheckpointDamaged] = []
    for number in reversed(outer.numbers()):
        try:
            intact = open_checkpoint(outer.path_of(number))
        except CheckpointDamaged as error:
            damaged.append(error)
        except FileNotFoundError:  # a peer that runs here removed it: it will say so itself
            continue
        else:
            return Earlier(
                tuple(f"{error}; going on from {intact.path.name}, before it" for error in damaged),
                lost=False,
            )
    if not damaged and not outer.were_set_aside():
        return Earlier((), lost=False)
    why = f" ({damaged[0].reason})" if damaged else ""
    lost = (
        f"no checkpoint in {outer.folder} is intact{why}: the other peers give this one their "
        "state, and if there is none the run begins again with its first weights"
    )
    return Earlier((lost,), lost=True)


def told_if_edited(run: RunFile, folder: Path) -> str | None:
    """A sentence if this run has no state here, and another one of the same name has."""
    own = kept_run(folder)
    if own is not None and own.run_id == run.run_id:
        return None
    others = [
        (outer.stat().st_mtime, home, before)
        for home in {folder, *(data_home(os.environ) / "runs").glob("*/")}
        if (outer := home / OUTER).is_dir()
        and (before := kept_run(home)) is not None
        and before.name == run.name
        and before.run_id != run.run_id
    ]
    if not others:
        return None
    _, home, before = max(others, key=lambda each: each[0])
    changed = differences(before, run)
    more = len(changed) - DIFFERENCES_SHOWN
    shown = "; ".join(changed[:DIFFERENCES_SHOWN]) + (f"; {more} more" if more > 0 else "")
    return (
        f"the run {run.name!r} that has a checkpoint in {home} had other settings: {shown}. With "
        "them this is another run, which begins with its first weights; undo the changes to go on "
        "with the earlier one"
    )
