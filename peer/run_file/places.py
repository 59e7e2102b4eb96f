"""Names of files in a run file, and the published model that a run begins from.

The author of a run file is a stranger. A name leads into the data folder or to a public host, and
data from a host has a hash in the run file, and so in the run's id. The hash is sha256: the hub
tells it of every file, so that the author of a run hashes nothing, and ``sha256sum`` prints it.
"""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from dht.public_ip import is_public
from peer.run_file.sections import HUB_COMMIT, OWNED_HUB_NAME, CustomModel, GptModel, Model

TEXT_FORMATS = (".txt", ".jsonl", ".parquet")
TOKEN_FORMATS = (".bin", ".npy")
LIST_FORMAT = ".sha256"
WEIGHTS_FORMAT = ".safetensors"

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
    name, pin, digest = text.rpartition(_PIN)
    return Place(name, digest) if pin else Place(text)


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


# --- the published model that a run begins from -------------------------------------------------


@dataclass(frozen=True, slots=True)
class BaseModel:
    """A published model."""

    source: str
    files: tuple[Place, ...]
    """Its files of weights, by their names at the source."""

    @property
    def hub(self) -> tuple[str, str] | None:
        """Name and commit on the hub."""
        name, at, commit = self.source.partition("@")
        return (name, commit) if at and not Place(self.source).is_url else None

    @property
    def text(self) -> str:
        """The source, for people: a commit has 40 digits."""
        return self.source if self.hub is None else f"{self.hub[0]}@{self.hub[1][:12]}"

    def place(self, file: Place) -> Place:
        """The place of a file that is not on the hub: a name in the data folder."""
        between = "" if self.source.endswith("/") else "/"
        return Place(f"{self.source}{between}{file.name}", file.sha256)


def base_of(model: Model) -> BaseModel | None:
    """The base of a run's model; ``None``: its first weights are drawn."""
    if isinstance(model, GptModel | CustomModel) or model.base is None:
        return None
    return BaseModel(model.base, tuple(place_of(name) for name in model.base_files or ()))


def base_problems(model: Model) -> Iterator[tuple[str, str]]:
    """Names of settings, and the rules that their values break."""
    if isinstance(model, GptModel | CustomModel):
        return
    base = base_of(model)
    if base is None:
        if model.base_files is not None:
            yield "model.base", "is unset; model.base_files are files of a base"
        if model.lora is not None:
            yield (
                "model.base",
                "is unset; [model.lora] adapts a published model: `shoal run new --base NAME` "
                "writes one with its hashes",
            )
        return
    if fault := _fault_of_source(base):
        yield "model.base", f"is {base.source!r}: {fault}"
    elif not base.files:
        yield (
            "model.base_files",
            "is unset; it must list the .safetensors files of model.base with their hashes: "
            "`shoal run new --base` writes them",
        )
    names = [file.name for file in base.files]
    for file in base.files:
        if fault := _fault_of_file(file):
            yield "model.base_files", f"has {file.name!r}: {fault}"
        elif names.count(file.name) > 1:
            yield "model.base_files", f"has {file.name!r} twice"


def _fault_of_source(base: BaseModel) -> str | None:
    if base.hub is not None:
        name, commit = base.hub
        if re.fullmatch(OWNED_HUB_NAME, name) and re.fullmatch(HUB_COMMIT, commit):
            return None
        return "a model on the hub is 'owner/name@' and a commit, 40 hex digits"
    if Place(base.source).is_url:
        return "it is a model on the hub, 'owner/name@COMMIT', or a folder in the data folder"
    return fault_of_place(Place(base.source), ())


def _fault_of_file(file: Place) -> str | None:
    if file.sha256 is None:
        return "it needs the hash of its content: append #sha256=HASH, as sha256sum prints it"
    if "/" in file.name or "\\" in file.name or file.name.startswith("."):
        return "it must be the name of a file at model.base, without a folder"
    if file.suffix != WEIGHTS_FORMAT:
        return f"only {WEIGHTS_FORMAT} files are read: weights in other formats can run code"
    return fault_of_place(Place(f"base/{file.name}", file.sha256), ())
