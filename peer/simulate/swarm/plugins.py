"""Plugins: a user's Python files that register merge rules, codecs or groupings by name.

They run with all rights of this process. Only files named on the command line of a simulation are
loaded, never a file that came from a peer.
"""

from __future__ import annotations

import runpy
from collections.abc import Iterable
from pathlib import Path

from averaging.numbers.arrays import Float32s
from averaging.numbers.codecs import register as register_codec
from averaging.numbers.layout import Kind
from averaging.numbers.merge import Contributions
from averaging.numbers.merge import register as register_merge_rule
from averaging.rules.grouping import register as register_grouping
from dht.identity import PeerId
from peer.errors import PeerError

__all__ = [
    "BadPlugin",
    "Contributions",
    "Float32s",
    "Kind",
    "PeerId",
    "load",
    "register_codec",
    "register_grouping",
    "register_merge_rule",
]
"""``load`` with its error, and the names that a plugin needs."""


class BadPlugin(PeerError):
    """A plugin could not be loaded."""

    exit_code = 2
    path: str
    problem: str
    message = "--plugin {path}: {problem}"


_loaded: set[Path] = set()


def load(paths: Iterable[Path]) -> None:
    """Run these files, each once per process. Raises ``BadPlugin``."""
    for path in paths:
        whole = path.resolve()
        if whole in _loaded:
            continue
        if not whole.is_file():
            raise BadPlugin(str(path), "there is no such file")
        try:
            runpy.run_path(str(whole))
        except (SyntaxError, ImportError, TypeError, ValueError) as error:
            raise BadPlugin(str(path), f"{type(error).__name__}: {error}") from error
        _loaded.add(whole)
