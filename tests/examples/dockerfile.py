"""A reader of Dockerfiles that carries their steps out in a folder, where no engine is.

It knows the instructions of our two files. A stage is a copy of the base folder, in which a step
runs by ``chroot``, with the network, the processes and the devices of this machine.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path


def instructions_of(path: Path) -> Iterator[tuple[str, str]]:
    """Each instruction with its arguments."""
    text = re.sub(r"^#.*\n", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    for line in re.sub(r"\\\n", "", text).splitlines():
        if line.strip():
            word, _, rest = line.partition(" ")
            yield word, rest.strip()


MOUNTED = """
for place in proc dev; do mount --rbind /$place "$0/$place"; done
user=$1; shift; exec chroot --userspec="$user:$user" "$0" "$@"
"""
"""Ends with the process: its mounts are its own."""


@dataclass(slots=True)
class Image:
    """The last stage of a Dockerfile."""

    root: Path
    environment: dict[str, str] = field(default_factory=dict)
    folder: str = "/"
    user: str = "0"
    entry: list[str] = field(default_factory=list)
    health: list[str] = field(default_factory=list)
    """What asks whether it is well."""

    def command(self, words: list[str]) -> list[str]:
        """What runs words in it, as its user and with its variables."""
        named = [f"{name}={value}" for name, value in self.environment.items()]
        there = ["unshare", "--mount", "sh", "-ec", MOUNTED, str(self.root), self.user]
        return [*there, "env", *named, "sh", "-c", 'cd "$0" && exec "$@"', self.folder, *words]

    def run(self, line: str, variables: Mapping[str, str]) -> None:
        own = [f"{name}={value}" for name, value in variables.items()]
        subprocess.run(self.command(["env", *own, "sh", "-ec", line]), check=True, timeout=900)


def build(
    path: Path, context: Path, base: Path, where: Path, arguments: Mapping[str, str]
) -> Image:
    """Carry out the instructions. ``base``: what every FROM stands for."""
    stages: dict[str, Image] = {}
    image = Image(base)
    variables: dict[str, str] = {}
    for word, rest in instructions_of(path):
        match word:
            case "FROM":
                name = rest.partition(" AS ")[2] or "last"
                image = stages[name] = Image(where / name)
                subprocess.run(["cp", "-a", str(base), str(image.root)], check=True)
                image.environment = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"}
            case "ARG":
                name, _, usual = rest.partition("=")
                variables[name] = arguments.get(name, usual)
            case "ENV":
                for pair in shlex.split(rest):
                    name, _, value = pair.partition("=")
                    image.environment[name] = value.replace("$PATH", image.environment["PATH"])
            case "WORKDIR":
                image.folder = rest
                (image.root / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
            case "COPY":
                _copy(rest, context, stages, image)
            case "RUN":
                image.run(rest, variables)
            case "USER":
                image.user = rest
            case "ENTRYPOINT":
                image.entry = json.loads(rest)
            case "HEALTHCHECK":
                image.health = json.loads(rest.partition(" CMD ")[2])
            case "VOLUME" | "STOPSIGNAL" | "EXPOSE":
                continue
            case _:
                raise ValueError(f"{path}: this reader does not know {word}")
    return image


def _copy(rest: str, context: Path, stages: Mapping[str, Image], image: Image) -> None:
    *sources, target = rest.split()
    source_root = context
    if sources[0].startswith("--from="):
        source_root = stages[sources.pop(0).removeprefix("--from=")].root
    to = image.root / Path(image.folder, target).as_posix().lstrip("/")
    for source in sources:
        there = source_root / source.lstrip("/")
        if there.is_dir():
            shutil.copytree(there, to, symlinks=True, dirs_exist_ok=True)
        elif target.endswith("/"):
            shutil.copy(there, to / there.name)
        else:
            shutil.copy(there, to)
