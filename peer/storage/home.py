"""The folders in which this user's peers keep their files, and the locks on them."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from dht.identity import RunId
from peer.errors import FolderInUse, FolderUnusable


def data_home(environment: Mapping[str, str]) -> Path:
    """The folder for keys, checkpoints and logs (XDG Base Directory Specification)."""
    home = environment.get("XDG_DATA_HOME")
    return (Path(home) if home else Path.home() / ".local" / "share") / "shoal"


def cache_home(environment: Mapping[str, str]) -> Path:
    """The folder for what can be measured or downloaded again (same specification)."""
    home = environment.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "shoal"


def default_directory(run_id: RunId) -> Path:
    """The folder for key, checkpoints and logs of a learner of this run."""
    return data_home(os.environ) / "runs" / run_id[:16]


def keeper_directory(run_id: RunId) -> Path:
    """The folder of a keeper, which may run beside a learner of the same run."""
    return data_home(os.environ) / "keepers" / run_id[:16]


def has_been_there(folder: Path) -> bool:
    """Return whether the peer of this folder has been in its run: it knows peers or has a state."""
    return (folder / "peers.json").exists() or (folder / "outer").exists()


@contextmanager
def only_process(folder: Path) -> Iterator[None]:
    """Lock a peer's folder for this process. Raises ``FolderInUse``.

    Two processes with the same key would both appear as the same peer. The lock is released at
    the end of the process, however it ends.
    """
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
    """Return whether a process has locked this peer's folder."""
    try:
        with only_process(folder):
            return False
    except FolderInUse:
        return True


@contextmanager
def peer_folder(folder: Path) -> Iterator[None]:
    """Create a peer's folder for the first files in it. Raises ``FolderUnusable``."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise FolderUnusable(str(folder), error.strerror or str(error)) from error
