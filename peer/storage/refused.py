"""Histories that this peer has gone back from, kept in its folder: they outlive a restart.

The file says nothing that another peer could use. One that is damaged is as good as none: then the
loss is measured once more.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from averaging.rules.loss_gate import Refusals, Refused
from dht.whole_files import read_json, write_whole

FILE = "refused.json"


class _Kept(msgspec.Struct, frozen=True, kw_only=True):
    in_a_row: dict[int, int]
    refused: tuple[Refused, ...]


def keep_refusals(folder: Path, refusals: Refusals) -> None:
    """Write the refusals. Raises ``OSError``."""
    kept = _Kept(in_a_row=refusals.in_a_row, refused=refusals.all)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / FILE, msgspec.json.encode(kept))


def kept_refusals(folder: Path) -> Refusals:
    """Read the refusals; none if there is no file that can be read."""
    kept = read_json(folder / FILE, _Kept)
    return Refusals() if kept is None else Refusals(kept.refused, in_a_row=kept.in_a_row)
