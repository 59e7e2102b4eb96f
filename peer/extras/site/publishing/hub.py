"""Uploading an export to the hub of Hugging Face, as one commit that replaces the model before it.

The token is that of huggingface_hub's own cache or environment (``hf auth login``); it is neither
read nor kept here.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from peer.errors import PeerError, one_line
from peer.installed import hub_errors, needed

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
