"""Where this user's programs keep their data."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def data_home(environment: Mapping[str, str]) -> Path:
    """The folder for keys, checkpoints and logs, by the rules of the XDG base directories."""
    home = environment.get("XDG_DATA_HOME")
    return (Path(home) if home else Path.home() / ".local" / "share") / "shoal"
