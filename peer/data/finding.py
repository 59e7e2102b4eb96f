"""The files of a data recipe: in the data folder, at an address, of a list, or of this Python."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

from peer.data.text.downloads import Downloads, checked_hash
from peer.data.text.formats import unusable
from peer.errors import DataUnavailable
from peer.run_file.places import (
    LIST_FORMAT,
    TEXT_FORMATS,
    TOKEN_FORMATS,
    Place,
    fault_of_place,
    place_of,
)
from peer.run_file.sections import FileSource, PythonStdlibData, TextData

FORMATS = (*TEXT_FORMATS, *TOKEN_FORMATS)

Located: TypeAlias = tuple[Place, Path | None]
"""A file with its path; ``None``: it is not on this machine."""

LIST_MAX_BYTES = 1 << 24

_NOT_STDLIB = frozenset(
    (
        "__pycache__",
        "dist-packages",
        "ensurepip",
        "idlelib",
        "lib2to3",
        "pydoc_data",
        "site-packages",
        "test",
        "tests",
        "turtledemo",
    )
)


def files_of(source: FileSource, data_dir: Path, downloads: Downloads | None) -> Iterator[Located]:
    """Every file of a source with its path, ``None`` for a download, sorted as in the run file.

    Without ``downloads`` lists at an address are left out.
    """
    for text in source.files:
        place = place_of(text)
        remote = place.is_url or place.is_on_hub
        for named, path in [(place, None)] if remote else _local(place, data_dir):
            if place.suffix == LIST_FORMAT:
                yield from _listed(named, path, data_dir, downloads)
            else:
                yield named, path


def _local(place: Place, data_dir: Path) -> Iterator[tuple[Place, Path]]:
    try:
        matches = sorted(data_dir.glob(place.name))
    except ValueError as error:
        raise unusable(f"{place.name!r} is no pattern: {error}") from error
    count = 0
    for match in matches:
        inside = sorted(match.rglob("*")) if match.is_dir() else [match]
        for path in inside:
            if path.is_file() and (path is match or path.suffix.lower() in FORMATS):
                count += 1
                yield Place(_name_of(path, data_dir), place.sha256), path
    if not count:
        raise unusable(
            f"no file in {data_dir.resolve()} matches {place.name!r}; "
            "put the files there or pass their folder with --data"
        )


def _name_of(path: Path, data_dir: Path) -> str:
    """The name of a file in the data folder, which messages and worker processes get as text."""
    name = path.relative_to(data_dir).as_posix()
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise unusable(
            f"the file name {name!a} in {data_dir.resolve()} is not UTF-8; rename the file"
        ) from error
    return name


def _listed(
    place: Place, path: Path | None, data_dir: Path, downloads: Downloads | None
) -> Iterator[Located]:
    if path is None:
        if downloads is None:
            return
        path = downloads.fetch(place)
    try:
        checked_hash([(path, place)])
        with path.open("rb") as file:
            content = file.read(LIST_MAX_BYTES + 1)
        if len(content) > LIST_MAX_BYTES:
            raise unusable(f"the list {place} is longer than {LIST_MAX_BYTES >> 20} MiB")
        lines = content.decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise unusable(f"the list {place} cannot be read: {error}") from error
    if not any(map(str.strip, lines)):
        raise unusable(f"the list {place} names no files; write it anew, or remove it")
    for number, line in enumerate(lines, 1):
        digest, _, name = line.partition(" ")
        if not line.strip():
            continue
        name = name.removeprefix(" ").removeprefix("*")  # text and binary mode of sha256sum
        below = Place(name, digest)
        fault = "it names no file beside the list" if below.is_url or not name else None
        fault = fault or fault_of_place(below, FORMATS)
        if fault is None and below.suffix not in FORMATS:
            fault = f"its format is none of {', '.join(FORMATS)}"
        if fault:
            raise unusable(
                f"the list {place}, line {number}: {line[:100]!r}: {fault}; write the list with "
                "sha256sum in the folder of the files"
            )
        listed = place.beside(name, digest)
        if listed.is_url:
            yield listed, None
        else:
            yield from _local(listed, data_dir)


def text_files(recipe: TextData | PythonStdlibData, data_dir: Path) -> list[tuple[Place, Path]]:
    """Files that are read as text, whatever they are called."""
    if isinstance(recipe, PythonStdlibData):
        files = stdlib_files()
    else:
        try:
            matching = [list(_local(Place(name), data_dir)) for name in recipe.files]
        except DataUnavailable as error:
            raise DataUnavailable("text", error.reason) from error
        files = [(place.name, path) for matches in matching for place, path in matches]
    return [(Place(name, format=".txt"), path) for name, path in sorted(set(files))]


def stdlib_files() -> list[tuple[str, Path]]:
    """The modules of the standard library that every installation has."""
    root = Path(sysconfig.get_paths()["stdlib"])
    modules = []
    for folder, folders, names in os.walk(root):
        folders[:] = [f for f in folders if f not in _NOT_STDLIB and not f.startswith("config-")]
        for name in names:
            if name.endswith(".py") and not name.startswith("_sysconfigdata"):
                path = Path(folder, name)
                modules.append((path.relative_to(root).as_posix(), path))
    if sum(path.stat().st_size for _, path in modules) < 1 << 20:
        raise DataUnavailable(
            "python_stdlib",
            f"{root} has too few source files ({len(modules)}); "
            "use a Python with its standard library as source, or the data recipe 'text'",
        )
    return modules
