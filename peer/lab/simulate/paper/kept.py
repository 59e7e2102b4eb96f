"""Trainings that are done, a small file each: a long table can be broken off and gone on with.

A file is found by what was trained, not by the code that did it: whoever changes the code
starts with an empty folder.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from peer.lab.simulate.paper.training import Trained


class Folder:
    """Where finished trainings are kept."""

    def __init__(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.path = path

    def find(self, key: str) -> Trained | None:
        """What came of the job with this key. A file that is damaged counts as none."""
        try:
            return msgspec.json.decode(self._file(key).read_bytes(), type=Trained)
        except (FileNotFoundError, msgspec.DecodeError):
            return None

    def keep(self, key: str, trained: Trained) -> None:
        file = self._file(key)
        part = file.with_suffix(".part")
        part.write_bytes(msgspec.json.encode(trained))
        part.replace(file)

    def _file(self, key: str) -> Path:
        return self.path / f"{key}.json"
