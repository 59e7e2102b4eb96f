"""Where this user's programs keep their data."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from dht.identity import RunId
from peer.errors import FolderInUse, FolderUnusable


def data_home(environment: Mapping[str, str]) -> Path:
    """The folder for keys, checkpoints and logs, by the rules of the XDG base directories."""
    home = environment.get("XDG_DATA_HOME")
    return (Path(home) if home else Path.home() / ".local" / "share") / "shoal"


def default_directory(run_id: RunId) -> Path:
    """For key, checkpoints and logs of a peer that trains."""
    return data_home(os.environ) / "runs" / run_id[:16]


def keeper_directory(run_id: RunId) -> Path:
    """Another one: a keeper may run beside a learner of the same run."""
    return data_home(os.environ) / "keepers" / run_id[:16]


def has_been_there(folder: Path) -> bool:
    """Whether the peer of this folder has been in its run: it knows others, or has a state."""
    return (folder / "peers.json").exists() or (folder / "outer").exists()


@contextmanager
def only_process(folder: Path) -> Iterator[None]:
    """Two processes with one key and one folder of checkpoints would take each other for
    themselves. Raises ``FolderInUse``. The end of the process, however it comes, gives it free."""
    descriptor = os.open(folder / "in_use", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise FolderInUse(str(folder)) from error
        yield
    finally:
        os.close(descriptor)


def is_in_use(folder: Path) -> bool:
    """Whether some process is the peer of this folder now."""
    try:
        with only_process(folder):
            return False
    except FolderInUse:
        return True


@contextmanager
def peer_folder(folder: Path) -> Iterator[None]:
    """Make a peer's folder for what is first written there. Raises ``FolderUnusable``."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise FolderUnusable(str(folder), error.strerror or str(error)) from error
