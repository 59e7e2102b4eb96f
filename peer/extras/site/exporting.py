"""One export of a peer's newest checkpoint, in a process of its own, and its upload to the hub.

``python -m peer.extras.site.exporting JOB`` reads the peer's folder, and nothing of the network: so
a keeper stays as small as it is, and an export that fails, or needs much memory, ends nothing else.
JOB is a ``Job`` in JSON. Events are lines of JSON on standard output. Standard input is never
written to: when it ends, the parent is gone, and so is the process.

The token for the hub is that of huggingface_hub's own cache or environment (``hf auth login``); it
is neither read nor kept here.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from dht.errors import DhtError
from peer.errors import PeerError, one_line
from peer.extras.bases.base_models import base_folder
from peer.extras.export.card import facts_in_folder
from peer.extras.export.tokenizer import tokenizer_of
from peer.extras.site.shelf import Entry, Shelf
from peer.installed import hub_errors, needed
from peer.storage.checkpoint import CheckpointFolder
from peer.storage.home import OUTER
from peer.storage.outer_state import OuterState, load_outer

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)


class NotPushed(PeerError):
    """An export cannot be uploaded."""

    repository: str
    reason: str
    message = "not uploaded to {repository}: {reason}"


class NoRepository(NotPushed):
    """The name of a repository, or the token for it, is not there: nothing would be uploaded."""

    exit_code = 2


def check_repository(name: str) -> None:
    """Raise ``NoRepository`` for what is no name, or without a token; ``ExtraMissing``."""
    if not _REPOSITORY.fullmatch(name):
        raise NoRepository(repr(name[:200]), "it is not OWNER/NAME, such as my-name/my-model")
    hub = _hub()
    if hub.get_token() is None:
        raise NoRepository(name, "this user has no token for the hub; get one by `hf auth login`")


def address_of(repository: str) -> str:
    """The address of a repository for people."""
    return f"{_hub().constants.ENDPOINT}/{repository}"


def push(folder: Path, repository: str, *, message: str) -> str:
    """Upload an export; returns the address of the commit. Raises ``NotPushed``."""
    hub = _hub()
    try:
        hub.create_repo(repository, exist_ok=True)
        # Files of parameters that the new model does not have would be loaded with it.
        done = hub.upload_folder(
            repo_id=repository,
            folder_path=folder,
            commit_message=message,
            delete_patterns=["*.safetensors", "*.safetensors.index.json"],
        )
    except hub_errors() as error:
        raise NotPushed(repository, one_line(error)) from error
    return str(done.commit_url)


def _hub() -> Any:
    return needed("huggingface_hub", "--push")


@dataclass(frozen=True, slots=True, kw_only=True)
class Publishing:
    """Exports to make of a peer's checkpoints, and where to put them."""

    folder: Path
    """Folder to publish in."""
    every_s: float
    keep: int
    cache: Path
    """Folder of downloads of this user, for tokenizers."""
    repository: str | None = None
    """Repository on the hub to upload to."""


Tell = Callable[[str, dict[str, Any]], None]
"""Reports an event by its name and fields."""


def publish(what: Publishing, peer: Path, tell: Tell, *, now: float) -> None:
    """Publish the newest checkpoint, as far as that has not been done already.

    Raises what ``write_folder``, ``tokenizer_of``, ``base_folder`` and ``push`` raise.
    """
    checkpoints = CheckpointFolder(peer / OUTER, reads_only=True)
    numbers, outer = checkpoints.numbers(), load_outer(checkpoints)
    if outer is None:
        return
    shelf = Shelf(what.folder, outer.run, what.keep)
    shelf.check()
    with shelf.alone():
        if checkpoints.numbers() != numbers:
            # Newer ones were written during the wait. "latest" must not lead back to this one.
            del outer
            if (outer := load_outer(checkpoints)) is None:
                return
        entry = shelf.newest(outer.model) or _export(what, peer, shelf, outer, tell, now=now)
        if what.repository is not None and entry.uploaded_to != what.repository:
            url = push(shelf.folder / entry.name, what.repository, message=entry.summary)
            tell("pushed", {"url": url})
            shelf.note_upload(entry, what.repository)


def _export(
    what: Publishing, peer: Path, shelf: Shelf, outer: OuterState, tell: Tell, *, now: float
) -> Entry:
    # These import torch, which the checks before (is there anything new, can it be published) do
    # not need.
    from peer.extras.export.folder import Export, write_folder
    from peer.model.recipes import needs_base

    facts = facts_in_folder(peer, outer)
    data = peer / "data"
    tokenizer = tokenizer_of(outer.run, cache_dir=what.cache, data_dir=data)
    base = None
    if needs_base(outer.run, founds=False):  # adapters are added to it
        base = base_folder(outer.run, cache_dir=what.cache, data_dir=data)
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


NICE = 10
"""Others on this machine go first: nobody waits for an export."""


def main(arguments: Sequence[str]) -> int:
    peer = Path(arguments[0])
    what = msgspec.json.decode(
        arguments[1], type=Publishing, dec_hook=lambda kind, text: kind(text)
    )
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.nice(NICE)
    try:
        publish(what, peer, _tell, now=time.time())
    except (PeerError, DhtError, OSError, MemoryError) as error:
        _tell("publish_failed", {"text": str(error) or type(error).__name__})
        return 1
    return 0


def _tell(name: str, fields: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps({"event": name, **fields}) + "\n")
    sys.stdout.flush()


def _end_with_parent() -> None:
    # Not by way of sys.stdin, whose lock would not be free when this process has done its work.
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
