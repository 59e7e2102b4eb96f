"""Names of files in a run file: in the peer's data folder, or at an https address.

The author of a run file is a stranger. A name leads into the data folder or to a public host,
and data from a host has a hash in the run file.
"""

from __future__ import annotations

import re
import urllib.parse
from dataclasses import dataclass
from pathlib import PurePosixPath

from dht.public_ip import is_public

TEXT_FORMATS = (".txt", ".jsonl", ".parquet")
TOKEN_FORMATS = (".bin", ".npy")
LIST_FORMAT = ".sha256"

HUB_FILE = "hf://"
"""Begins the name of a file of the hub, with its commit. No run file has one: its dataset does."""

_PIN = "#sha256="
_HEX_64 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Place:
    """A file, a folder or a pattern, or the address of a file."""

    name: str
    """Without the hash."""
    sha256: str | None = None
    """The hash of the content that the run file demands."""
    format: str | None = None
    """The format of a file whose name need not say it."""

    def __str__(self) -> str:
        return self.name

    @property
    def is_url(self) -> bool:
        return self.name.lower().startswith("https://")

    @property
    def is_on_hub(self) -> bool:
        return self.name.startswith(HUB_FILE)

    @property
    def is_pattern(self) -> bool:
        return not self.is_url and any(mark in self.name for mark in "*?[")

    @property
    def suffix(self) -> str:
        if self.format is not None:
            return self.format
        path = urllib.parse.urlsplit(self.name).path if self.is_url else self.name
        return PurePosixPath(path).suffix.lower()

    def beside(self, name: str, sha256: str) -> Place:
        """The place of a file that a list at this place names, below the folder of the list."""
        if self.is_url:
            return Place(urllib.parse.urljoin(self.name, urllib.parse.quote(name)), sha256)
        return Place((PurePosixPath(self.name).parent / name).as_posix(), sha256)


def place_of(text: str) -> Place:
    name, found, digest = text.rpartition(_PIN)
    return Place(name, digest) if found else Place(text)


def pinned(name: str, sha256: str) -> str:
    """The name of a file with the hash of its content, for a run file."""
    return f"{name}{_PIN}{sha256}"


def leaves_folder(name: str) -> bool:
    parts = name.replace("\\", "/").split("/")
    return name.startswith(("/", "\\", "~")) or ":" in name or ".." in parts


def fault_of_place(place: Place, formats: tuple[str, ...]) -> str | None:
    """The rule that a place breaks, and the remedy; ``None``: it may be read."""
    if not place.name:
        return "it names no file"
    if place.sha256 is not None and not _HEX_64.fullmatch(place.sha256):
        return f"{_PIN}HASH needs 64 lower-case hex digits, as sha256sum prints them"
    if place.is_url:
        if fault := _fault_of_url(place.name):
            return fault
        if place.sha256 is None:
            return f"a URL needs the hash of the file: append {_PIN}HASH, as sha256sum prints it"
        if place.suffix not in formats:
            return f"the address must end in {' or '.join(formats)}, which is the file's format"
    elif place.name.lower().startswith("http://"):
        return "http is not protected against eavesdropping and modification; use https"
    elif leaves_folder(place.name):
        return "it must stay inside the data folder, or be an https URL"
    elif place.is_pattern and place.sha256 is not None:
        return "a pattern stands for several files and has no hash; name the files, or list them"
    return None


def _fault_of_url(url: str) -> str | None:
    try:
        parts = urllib.parse.urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        return f"it is not a URL: {error}"
    if not host or "@" in parts.netloc:
        return "it needs a host, and no user name or password"
    is_ip = ":" in host or host.rpartition(".")[2].isdigit()
    is_named = "." in host and not host.rstrip(".").endswith((".localhost", ".local", ".internal"))
    public = is_public(host) if is_ip else is_named
    return None if public else f"{host} is not a public host; put the file into the data folder"
