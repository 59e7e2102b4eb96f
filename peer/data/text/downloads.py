"""Files of a run that are downloaded over https, and the hashes of files.

A download is named by the hash that the run file demands, and gets its name when its content has
that hash. It continues where it was interrupted. Any number of processes may share the folder.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial as partial_of
from pathlib import Path

from blake3 import blake3

from dht.public_ip import is_public
from dht.whole_files import write_whole
from peer.data.text.token_cache import FOLDER_MAX_BYTES, keep_below
from peer.errors import DataUnavailable
from peer.https import answers_checked, https_opener, reason_of
from peer.quantities import bytes_text
from peer.run_file.places import Place

logger = logging.getLogger(__name__)

READ_BYTES = 1 << 20
READ_TIMEOUT_S = 30.0
SIZE_TIMEOUT_S = 10.0
PAUSES_S = (1.0, 4.0, 15.0, 60.0)
"""Pauses before the next attempt, after attempts that brought nothing."""


PART = ".part"

FULL = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
"""Errors of a disk, or of a user's share of it, that has no room for more."""

Tell = Callable[[int, int], None]
"""Gets the bytes that have arrived of a file, and those of the whole file."""

TellOf = Callable[[Place, int, int], None]
"""Gets the same of any file, in the thread that downloads it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A host that this machine's user is known to, and not only the author of a run file."""

    headers: Mapping[str, str] = field(default_factory=dict)
    """Headers of requests to it, which no redirect passes on to another host."""
    remedies: Mapping[int, str] = field(default_factory=dict)
    """Remedy for an answer with this status."""
    is_chosen: bool = False
    """True if the user has set its address, which may then be http and of any network."""


class Downloads:
    """The folder of downloaded files; beside it their hashes are remembered.

    ``opener`` and ``pause`` are for tests.

    ``folder_bytes_max``: the least recently used files are removed to keep the folder below it;
    ``None``: none is removed, and none is larger than the disk.
    """

    def __init__(
        self,
        folder: Path,
        *,
        file_bytes_max: int = FOLDER_MAX_BYTES,
        folder_bytes_max: int | None = FOLDER_MAX_BYTES,
        host: Host | None = None,
        opener: urllib.request.OpenerDirector | None = None,
        pause: Callable[[float], None] = time.sleep,
        tell: TellOf = lambda place, done, whole: None,
    ) -> None:
        self._folder = folder
        self.hashes = KnownHashes(folder.with_name("hashes"))
        self._file_bytes_max = file_bytes_max
        self._folder_bytes_max = folder_bytes_max
        self._host = host or Host()
        if opener is None and self._host.is_chosen:
            opener = urllib.request.build_opener()
        self._opener = opener or https_opener(allowed=is_public)
        self._pause = pause
        self._tell = tell

    def fetch(self, place: Place, *, tell: Tell | None = None) -> Path:
        """The file at an address, downloaded unless it is there, or if it has changed on the disk.

        Raises ``DataUnavailable``.
        """
        path = self._fetched(place, tell)
        with suppress(DataUnavailable):
            self.hashes.of([(path, place)])
            return path
        path.unlink(missing_ok=True)
        path = self._fetched(place, tell)
        self.hashes.of([(path, place)])
        return path

    def _fetched(self, place: Place, tell: Tell | None) -> Path:
        """The file at an address, downloaded unless one is there."""
        assert place.sha256 is not None
        path = self._folder / place.sha256
        try:
            if not path.exists():
                self._fetch_to(path, place, tell or partial_of(self._tell, place))
        except OSError as error:
            raise self._failed(place, error) from error
        with suppress(OSError):  # another user may own it
            stat = path.stat()
            os.utime(path, ns=(time.time_ns(), stat.st_mtime_ns))  # KnownHashes go by the change
        return path

    def _fetch_to(self, path: Path, place: Place, tell: Tell) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(PART).open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # another process may be downloading it
            partial = Path(file.name)
            if path.exists():
                partial.unlink(missing_ok=True)
                return
            if self._folder_bytes_max is not None:
                keep_below(self._folder, self._folder_bytes_max)
            self._complete(place, partial, tell)
            os.fsync(file.fileno())  # before a power cut could leave the name alone
            partial.rename(path)

    def _failed(self, place: Place, error: OSError) -> DataUnavailable:
        if error.errno in FULL:
            reason = f"{self._folder} takes no more of it ({error.strerror}); free some space, and "
            return _unusable(place, reason + "try again: the bytes that have arrived are kept")
        if error.filename is not None:
            reason = (
                f"{error.filename}: {error.strerror}; downloads are kept there: make the folder"
            )
            return _unusable(place, f"{reason} writable for this user")
        return _unusable(
            place, f"{reason_of(error)}; check the address and this machine's connection"
        )

    def size_bytes(self, place: Place) -> int | None:
        """The size of the file at an address; ``None`` if its server does not tell it."""
        request, within_s = self._request(place, method="HEAD"), SIZE_TIMEOUT_S
        with (
            suppress(OSError),
            answers_checked(),
            self._opener.open(request, timeout=within_s) as answer,
        ):
            return int(answer.headers["Content-Length"] or "none")
        return None

    def _complete(self, place: Place, partial: Path, tell: Tell) -> None:
        """Download until all is there, or no attempt brings anything more; then check the hash."""
        content = _Content(partial, tell)
        resumed = content.size > 0
        pauses = iter(PAUSES_S)
        while True:
            before = content.size
            try:
                self._attempt(place, content)
            except _Refused as refused:
                raise _unusable(place, f"{refused}; ask the author of the run") from refused
            except OSError as error:
                if error.errno in FULL:
                    raise
                if content.size > before:
                    pauses = iter(PAUSES_S)
                    logger.info("download_continues url=%s reason=%s", place, reason_of(error))
                elif (pause_s := next(pauses, None)) is None:
                    raise
                else:
                    logger.warning(
                        "download_failed url=%s reason=%s again_in_s=%.0f",
                        *(place, reason_of(error), pause_s),
                    )
                    self._pause(pause_s)
                continue
            digest = content.sha256
            if digest == place.sha256:
                return
            content.cut()
            if not resumed:
                raise _unusable(
                    place,
                    f"its content has the sha256 {digest}, the run file demands {place.sha256}: it "
                    "was changed, or damaged on the way; try again, then ask the run's author",
                )
            resumed = False  # the part that was there may be the damaged one

    @answers_checked()
    def _attempt(self, place: Place, content: _Content) -> None:
        request = self._request(place)
        if content.size:
            request.add_header("Range", f"bytes={content.size}-")
        try:
            response = self._opener.open(request, timeout=READ_TIMEOUT_S)
        except urllib.error.HTTPError as error:
            with error:
                if content.size and error.code == 416:  # there is no more; the hash decides
                    return
                if (remedy := self._host.remedies.get(error.code)) is not None:
                    text = f"the server answered {error.code} {error.reason}; {remedy}"
                    raise _unusable(place, text) from error
                if error.code < 500 and error.code != 429:
                    raise _Refused(f"the server answered {error.code} {error.reason}") from error
                raise OSError(f"the server answered {error.code} {error.reason}") from error
        with response:
            if response.status != 206:
                content.cut()  # the server sends the file from its beginning
            rest = response.length or 0  # None if the server does not tell it
            whole = content.size + rest
            self._check_room(place, whole, rest)
            # Without a buffer: bytes that the disk refuses must not be counted as written.
            with content.path.open("ab", buffering=0) as file:
                while piece := response.read(READ_BYTES):
                    unwritten = memoryview(piece)
                    while unwritten:
                        written = file.write(unwritten)
                        content.add(unwritten[:written], whole)
                        unwritten = unwritten[written:]
                    self._check_room(place, content.size, 0)
            if content.size < whole:
                raise TimeoutError(f"the connection ended after {content.size} of {whole} bytes")

    def _request(self, place: Place, *, method: str = "GET") -> urllib.request.Request:
        request = urllib.request.Request(place.name, headers={"User-Agent": "shoal"}, method=method)
        for name, value in self._host.headers.items():
            request.add_unredirected_header(name, value)
        return request

    def _check_room(self, place: Place, size: int, more: int) -> None:
        if size > self._file_bytes_max:
            raise _Refused(
                f"it has more than {bytes_text(self._file_bytes_max)}, the limit for one file"
            )
        free = shutil.disk_usage(self._folder).free
        if more > free:
            raise _unusable(
                place,
                f"it needs {bytes_text(more)} and {self._folder} has {bytes_text(free)} free; "
                "free some space",
            )


class _Refused(Exception):
    """An offer of a server is not taken."""


class _Content:
    """The part of a file that is there, with the hash that it has so far."""

    def __init__(self, path: Path, tell: Tell) -> None:
        self.path = path
        self._tell = tell
        with path.open("rb") as file:
            self._hash = hashlib.file_digest(file, "sha256")
        self.size = path.stat().st_size

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()

    def add(self, piece: memoryview, whole: int) -> None:
        self._hash.update(piece)
        self.size += len(piece)
        self._tell(self.size, whole)

    def cut(self) -> None:
        """Begin anew."""
        os.truncate(self.path, 0)
        self._hash = hashlib.sha256()
        self.size = 0


def _unusable(place: Place, reason: str) -> DataUnavailable:
    return DataUnavailable("files", f"{place}: {reason}")


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class KnownHashes:
    """Hashes of local files, remembered as long as a file keeps its size and time of change."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[Path, str] = {}
        """Those of this process: the folder may be one that cannot be written."""

    def of(self, files: Sequence[tuple[Path, Place]]) -> str:
        """One hash of the content of all files. Raises ``DataUnavailable`` for a wrong one."""
        stats = [(str(path.resolve()), path.stat()) for path, _ in files]
        key = [[name, s.st_size, s.st_mtime_ns, s.st_ino] for name, s in stats]
        demanded = [place.sha256 for _, place in files]
        memory = self._folder / blake3(json.dumps([key, demanded]).encode()).hexdigest()
        known = self._known.get(memory, "")
        with suppress(OSError):
            known = known or memory.read_text(errors="replace")
        if not re.fullmatch(r"[0-9a-f]{64}", known):
            known = checked_hash(files)
            with suppress(OSError):  # remembering saves time, no more
                write_whole(memory, known.encode())
        self._known[memory] = known
        return known


def checked_hash(files: Sequence[tuple[Path, Place]]) -> str:
    """One hash of the content of all files. Raises ``DataUnavailable`` for a wrong one."""
    hashes = [file_sha256(path) for path, _ in files]
    for (path, place), digest in zip(files, hashes, strict=True):
        if place.sha256 not in (None, digest):
            raise _unusable(
                place,
                f"{path} has the sha256 {digest}, the run file demands {place.sha256}: replace it "
                "with the file that the run's author used",
            )
    return hashes[0] if len(hashes) == 1 else blake3("".join(hashes).encode()).hexdigest()
