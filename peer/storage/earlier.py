"""Facts of earlier times, as the folders of this user's peers have them.

**A run whose peers are not on line**: when it was last seen, by whom, how far. A peer keeps this
beside its checkpoints. ``shoal join`` reads the run file from it when nobody can be asked, ``shoal
start`` finds out that a run has existed, and a run that has ended is known to.

**Faults and changes in a peer's folder**, told to a person before anything starts. A damaged
checkpoint is replaced by an older one, a lost key by a new one, and an edited run file makes
another run. None of it is an error, and each may cost work that nobody meant to lose.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3

from dht.identity import RunId
from dht.whole_files import read_json, write_whole
from peer.errors import CheckpointDamaged, RunFileError
from peer.quantities import count_text, listed
from peer.run_file.reading import from_canonical
from peer.run_file.sections import RunFile
from peer.run_file.writing import differences
from peer.storage.checkpoint import CheckpointFolder, open_checkpoint
from peer.storage.home import (
    KEY,
    OUTER,
    data_home,
    default_directory,
    has_been_there,
    keeper_directory,
)

FILE = "last_seen.json"
STATE_FILE = "state.json"
NAMES_MAX = 8


class LastSeen(msgspec.Struct, frozen=True, kw_only=True):
    """A run as one peer of this machine knew it last."""

    run: str
    """The run file in canonical form."""
    at: float
    """Wall-clock time."""
    tokens: int | None = None
    """Merged tokens of all peers."""
    names: tuple[str, ...] = ()
    """Names of other peers that were there."""
    ended_at: float | None = None
    """Wall-clock time at which the run ended; ``None`` if it has not, as far as is known."""

    @property
    def sentence(self) -> str:
        """``last seen here on 2026-11-22 20:41 UTC at 1.2 M tokens, with anna and boris``."""
        reached = "" if self.tokens is None else f" at {count_text(self.tokens)} tokens"
        company = f", with {listed(self.names)}" if self.names else ""
        return f"last seen here on {date_text(self.at)}{reached}{company}"

    @property
    def run_file(self) -> RunFile | None:
        """The run file; ``None`` if it is one of another version, or damaged."""
        data = self.run.encode()
        try:
            return from_canonical(data, blake3(data).hexdigest())
        except RunFileError:
            return None


class KeptState(msgspec.Struct, frozen=True):
    """Phase and figures of a peer, for commands of its owner."""

    name: str
    """The phase that it is in."""
    text: str
    at: float
    """Wall-clock time at which it entered the phase."""
    figures: Mapping[str, Any] | None = None
    """``PeerStatus.figures``."""
    figures_at: float = 0.0
    """Wall-clock time at which these were its figures."""


def save_state(folder: Path, state: KeptState) -> None:
    """Replace what is kept in a peer's folder. Raises ``OSError``."""
    write_whole(folder / STATE_FILE, msgspec.json.encode(state))


def load_state(folder: Path) -> KeptState | None:
    """The last state that a peer has kept."""
    return read_json(folder / STATE_FILE, KeptState)


def date_text(at: float) -> str:
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M} UTC"


def save_last_seen(folder: Path, seen: LastSeen) -> None:
    """Replace what is kept in a peer's folder. Raises ``OSError``."""
    write_whole(folder / FILE, msgspec.json.encode(seen))


def kept_run(folder: Path) -> RunFile | None:
    """The run that the peer of this folder was in last; ``None`` if it never was in any."""
    seen = read_json(folder / FILE, LastSeen)
    return None if seen is None else seen.run_file


def load_last_seen(folder: Path, run_id: RunId) -> LastSeen | None:
    """The memory of the peer of this folder; ``None`` if it never was in the run."""
    run = kept_run(folder)
    return None if run is None or run.run_id != run_id else read_json(folder / FILE, LastSeen)


def recall(run_id: RunId, folders: Iterable[Path | None] = ()) -> LastSeen | None:
    """The newest that is known of a run on this machine: in ``folders`` and the usual ones."""
    usual = (default_directory(run_id), keeper_directory(run_id))
    places = {folder for folder in (*folders, *usual) if folder is not None}
    known = [seen for folder in sorted(places) if (seen := load_last_seen(folder, run_id))]
    return max(known, key=lambda seen: seen.at, default=None)


def remembered(run_id: RunId, folder: Path | None) -> str:
    """The facts of a run that this machine knows, in words."""
    seen = recall(run_id, [folder])
    return "never seen from this machine" if seen is None else seen.sentence


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
