"""The published model that a run begins from, as its run file names it.

Its files have hashes in the run file, and so in the run's id: every peer that needs them verifies
them, wherever they come from. The hash is sha256, as of all files that are downloaded: the hub
tells it of every file, so that the author of a run hashes nothing, and ``sha256sum`` prints it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from peer.run_file.places import Place, fault_of_place, place_of
from peer.run_file.sections import HUB_COMMIT, OWNED_HUB_NAME, CustomModel, GptModel, Model

WEIGHTS_FORMAT = ".safetensors"


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
        return (name, commit) if at and not self.is_url else None

    @property
    def is_url(self) -> bool:
        return Place(self.source).is_url

    @property
    def text(self) -> str:
        """The source, for people: a commit has 40 digits."""
        return self.source if self.hub is None else f"{self.hub[0]}@{self.hub[1][:12]}"

    def place(self, file: Place) -> Place:
        """The place of a file that is not on the hub: an address, or a name in the data folder."""
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
    if base.is_url:
        if not base.source.endswith("/"):
            return "the address of a folder ends in '/'"
        return fault_of_place(
            Place(f"{base.source}model{WEIGHTS_FORMAT}", "0" * 64), (WEIGHTS_FORMAT,)
        )
    return fault_of_place(Place(base.source), ())


def _fault_of_file(file: Place) -> str | None:
    if file.sha256 is None:
        return "it needs the hash of its content: append #sha256=HASH, as sha256sum prints it"
    if "/" in file.name or "\\" in file.name or file.name.startswith("."):
        return "it must be the name of a file at model.base, without a folder"
    if file.suffix != WEIGHTS_FORMAT:
        return f"only {WEIGHTS_FORMAT} files are read: weights in other formats can run code"
    return fault_of_place(Place(f"base/{file.name}", file.sha256), ())
