"""Where this user's programs keep their data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from peer.errors import FolderUnusable


def data_home(environment: Mapping[str, str]) -> Path:
    """The folder for keys, checkpoints and logs, by the rules of the XDG base directories."""
    home = environment.get("XDG_DATA_HOME")
    return (Path(home) if home else Path.home() / ".local" / "share") / "shoal"


@contextmanager
def peer_folder(folder: Path) -> Iterator[None]:
    """Make a peer's folder for what is first written there. Raises ``FolderUnusable``."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise FolderUnusable(str(folder), error.strerror or str(error)) from error
