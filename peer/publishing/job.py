"""A job for the process that exports: what to publish, and where."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

Dtype: TypeAlias = Literal["fp32", "bf16"]


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """An export to make, and where to put it."""

    peer: str
    """Folder of the peer."""
    shelf: str
    """Folder to publish in."""
    cache: str
    """Folder of downloads of this user, for tokenizers."""
    keep: int
    repository: str | None = None
    """Repository on the hub to upload to."""
    dtype: Dtype = "fp32"
