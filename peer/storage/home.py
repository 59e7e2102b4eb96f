"""The folders in which this user's peers keep their files, and the locks on them.

The file ``in_use`` marks a folder as a peer's: the process that takes part holds a lock on it, and
it names the run. A folder with other files in it is refused, so that nothing is ever written into
a source tree or a home folder. While a peer takes part, a link in the data home leads to its
folder: this is how ``shoal pause`` and others find the peers of the machine.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Literal

import msgspec

from dht.identity import RunId
from dht.whole_files import read_json, remove_unfinished
from peer.errors import (
    FolderInUse,
    FolderOfAnotherRun,
    Unusable,
)
from peer.processes import keep_from_children, release
from peer.run_file.sections import RunFile

KEY = "identity.key"
"""The file of a peer's private key."""

IN_USE = "in_use"
"""The file that a peer locks while it runs."""

MARKS = frozenset((IN_USE, KEY))
"""Files by which a folder is known to be a peer's. The first is in all, the second is older."""

LEARNERS_MAX = 64
"""Number of learners of one run on one machine that find a folder by themselves."""

LOOKED_AT_S = 0.5
"""Time for which a folder counts as free although it is locked: a process that looks whether it is
in use locks it for a moment."""

OUTER = "outer"
"""The folder of the checkpoints of the run's state, inside a peer's folder."""

GOOD = "good"
"""The folder of earlier states, for an owner who takes the run back, inside a peer's folder."""

PEERS = "peers.json"
"""The file of the peers that a peer has met."""

LIMITS = "limits.json"
"""Limits may be set before the peer starts (``peer.guest.enforcement``)."""

DATA = "data"
"""The user's part of a peer's folder: it may be there before the peer is."""


class Occupant(msgspec.Struct, frozen=True, kw_only=True):
    """The last process that took part with the files of a folder."""

    run_id: str
    run_name: str
    role: Literal["learner", "keeper"]
    pid: int
    since: float


def data_home(environment: Mapping[str, str]) -> Path:
    """The folder for keys, checkpoints and logs (XDG Base Directory Specification).

    The specification has relative paths ignored. Raises ``Unusable``.
    """
    home = Path(environment.get("XDG_DATA_HOME", ""))
    if home.is_absolute():
        return home / "shoal"
    try:
        return Path.home() / ".local" / "share" / "shoal"
    except RuntimeError as error:  # a user of a container, say, without HOME and without account
        raise Unusable(
            "this user has no home folder for keys and checkpoints (HOME is not set, and there is "
            "no account of this user); set HOME, or XDG_DATA_HOME to the absolute path of a folder "
            "that this user may write",
            section="home-unknown",
        ) from error


def data_cache() -> Path:
    """The folder for tokens and downloads of all runs of this user."""
    return data_home(os.environ) / "data"


def default_directory(run_id: RunId) -> Path:
    """The folder for key, checkpoints and logs of a learner of this run."""
    return data_home(os.environ) / "runs" / run_id[:16]


def free_directory(run_id: RunId) -> Path:
    """The folder for one more learner of this run on this machine.

    It is the default one unless another peer holds that now.
    """
    first = default_directory(run_id)
    for number in range(1, LEARNERS_MAX + 1):
        folder = first if number == 1 else first.with_name(f"{first.name}-{number}")
        if not folder.exists() or not is_in_use(folder):
            return folder
    return first


def keeper_directory(run_id: RunId) -> Path:
    """The folder of a keeper, which may run beside a learner of the same run."""
    return data_home(os.environ) / "keepers" / run_id[:16]


def has_been_there(folder: Path) -> bool:
    """Return whether the peer of this folder has been in its run: it knows peers or has a state."""
    return (folder / PEERS).exists() or (folder / OUTER).exists()


def check_folder(folder: Path, run: RunFile) -> None:
    """Check that a folder is new, empty, or of a peer of this run.

    Raises ``Unusable`` or ``FolderOfAnotherRun``.
    """
    if not folder.exists():
        return
    check_no_other_files(folder)
    earlier = occupant_of(folder)
    if earlier is not None and earlier.run_id != run.run_id:
        raise FolderOfAnotherRun(
            f"the run of folder {folder}",
            f"{run.name!r} ({run.run_id[:16]})",
            f"{earlier.run_name!r} ({earlier.run_id[:16]})",
        )


def check_no_other_files(folder: Path) -> None:
    """Check that a folder is empty or a peer's. Raises ``Unusable``."""
    with peer_folder(folder):
        names = {entry.name for entry in folder.iterdir()}
    if not names & MARKS and (others := sorted(names - {DATA, LIMITS})):
        raise Unusable(
            f"{folder} is not a peer's folder: it has other files in it, such as {others[0]!r}; "
            "pass a new or an empty folder with --directory",
            section="folder-not-empty",
        )


def claim(folder: Path, run: RunFile) -> None:
    """Create a peer's folder for processes that will occupy it and keep other files there.

    Raises what ``check_folder`` raises.
    """
    check_folder(folder, run)
    with peer_folder(folder):
        (folder / IN_USE).touch()


@contextmanager
def occupied_free(run: RunFile) -> Iterator[Path]:
    """Hold the folder for one more learner of this run. Raises what ``occupied`` raises."""
    with ExitStack() as stack:
        tried: set[Path] = set()
        while True:
            folder = free_directory(run.run_id)
            try:
                stack.enter_context(occupied(folder, run, "learner"))
            except FolderInUse:  # by a learner that starts at the same moment
                if folder in tried:
                    raise
                tried.add(folder)
            else:
                break
        yield folder


@contextmanager
def occupied(folder: Path, run: RunFile, role: Literal["learner", "keeper"]) -> Iterator[None]:
    """Create a peer's folder, and hold it for this process.

    Raises ``FolderInUse``, and what ``check_folder`` raises. The folder is released at the end of
    the process, however it ends.
    """
    check_folder(folder, run)
    with peer_folder(folder):
        descriptor = _locked(folder)
    try:
        with peer_folder(folder):
            occupant = Occupant(
                run_id=run.run_id,
                run_name=run.name,
                role=role,
                pid=os.getpid(),
                since=time.time(),
            )
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, msgspec.json.encode(occupant), 0)
        remove_unfinished(folder)
        with _registered(folder):
            yield
    finally:
        _unlock(descriptor)


def is_in_use(folder: Path) -> bool:
    """Return whether a process holds this peer's folder, without making it one."""
    try:
        descriptor = os.open(folder / IN_USE, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return False
    keep_from_children(descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        _unlock(descriptor)


def running_peers() -> dict[Path, Occupant]:
    """The folders of all peers of this user that run now, wherever they are, sorted."""
    running: dict[Path, Occupant] = {}
    for link in _registry().glob("*"):
        # A peer that just ends has removed its link, and one of another user is not to be read.
        with suppress(OSError):
            folder = link.readlink()
            if is_in_use(folder):
                occupant = occupant_of(folder)
                if occupant is not None:
                    running[folder] = occupant
            else:  # its process was killed
                link.unlink(missing_ok=True)
    return dict(sorted(running.items()))


def occupant_of(folder: Path) -> Occupant | None:
    """The last process in a folder; ``None`` if it was never held or by an older version."""
    return read_json(folder / IN_USE, Occupant)


@contextmanager
def peer_folder(folder: Path) -> Iterator[None]:
    """Create a peer's folder for the first files in it. Raises ``Unusable``."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise Unusable(
            f"this peer's folder {folder} cannot be used: {error.strerror or error}; make it "
            "writable for this user and free some space, or pass another one with --directory",
            section="folder-unusable",
        ) from error


def folder_bytes(folder: Path) -> int:
    """Size of all files in a folder; files renamed or removed meanwhile may be missed."""
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += (Path(where) / name).lstat().st_size
    return total


def _locked(folder: Path) -> int:
    """The descriptor of a folder's lock, which it holds until it is closed."""
    descriptor = os.open(folder / IN_USE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    keep_from_children(descriptor)
    try:
        _lock(descriptor)
    except BlockingIOError as error:
        _unlock(descriptor)
        raise FolderInUse(str(folder)) from error
    except OSError:  # the file system has no locks
        _unlock(descriptor)
        raise
    return descriptor


def _lock(descriptor: int) -> None:
    deadline = time.monotonic() + LOOKED_AT_S
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.01)


def _unlock(descriptor: int) -> None:
    release(descriptor)
    os.close(descriptor)


def _registry() -> Path:
    return data_home(os.environ) / "running"


@contextmanager
def _registered(folder: Path) -> Iterator[None]:
    """Keep a link to a folder in the data home, as long as a process holds the folder."""
    whole = folder.absolute()
    link = _registry() / hashlib.blake2b(bytes(whole), digest_size=8).hexdigest()
    # A data home that cannot be written to is no reason not to train: commands need --directory.
    with suppress(OSError):
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(whole)
    try:
        yield
    finally:
        with suppress(OSError):
            link.unlink(missing_ok=True)
