"""One export of the newest checkpoint of a peer.

It is what ``python -m peer.extras.site.publishing JOB`` does. It reads the peer's folder, and
nothing of the network: so a keeper stays as small as it is, and an export that fails, or needs much
memory, ends nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from peer.extras.bases.base_models import base_folder
from peer.extras.export.facts import facts_in_folder
from peer.extras.export.tokenizer import tokenizer_of
from peer.extras.site.publishing.hub import push
from peer.extras.site.publishing.shelf import Entry, Shelf
from peer.storage.checkpoint import CheckpointFolder
from peer.storage.home import OUTER
from peer.storage.outer_state import OuterState, load_outer


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


Tell = Callable[[str, dict[str, Any]], None]
"""Reports an event by its name and fields."""


def publish(job: Job, tell: Tell, *, now: float) -> None:
    """Publish the newest checkpoint, as far as that has not been done already.

    Raises what ``write_folder``, ``tokenizer_of``, ``base_folder`` and ``push`` raise.
    """
    checkpoints = CheckpointFolder(Path(job.peer) / OUTER, reads_only=True)
    numbers, outer = checkpoints.numbers(), load_outer(checkpoints)
    if outer is None:
        return
    shelf = Shelf(Path(job.shelf), outer.run, job.keep)
    shelf.check()
    with shelf.alone():
        if checkpoints.numbers() != numbers:
            # Newer ones were written during the wait. "latest" must not lead back to this one.
            del outer
            if (outer := load_outer(checkpoints)) is None:
                return
        entry = shelf.newest(outer.model) or _export(job, shelf, outer, tell, now=now)
        if job.repository is not None and entry.uploaded_to != job.repository:
            url = push(shelf.folder / entry.name, job.repository, message=entry.summary)
            tell("pushed", {"url": url})
            shelf.note_upload(entry, job.repository)


def _export(job: Job, shelf: Shelf, outer: OuterState, tell: Tell, *, now: float) -> Entry:
    # These import torch, which the checks before (is there anything new, can it be published) do
    # not need.
    from peer.extras.export.folder import Export, write_folder
    from peer.model.recipes import needs_base

    folder = Path(job.peer)
    facts = facts_in_folder(folder, outer)
    cache, data = Path(job.cache), folder / "data"
    tokenizer = tokenizer_of(outer.run, cache_dir=cache, data_dir=data)
    base = None
    if needs_base(outer.run, founds=False):  # adapters are added to it
        base = base_folder(outer.run, cache_dir=cache, data_dir=data)
    export = Export(outer=outer, facts=facts, tokenizer=tokenizer, dtype="bf16", base=base)
    entry = shelf.add(
        outer.model,
        outer.global_tokens,
        facts.measured[-1] if facts.measured else None,
        lambda out: write_folder(export, out),
        now=now,
    )
    path = str(shelf.folder / entry.name)
    tell("published", {"path": path, "tokens": entry.tokens, "model": entry.model})
    return entry
