"""What needs the hub says in one line that it cannot be reached."""

from __future__ import annotations

from pathlib import Path

import pytest

from peer.extras.bases.base_models import BaseUnavailable, published
from peer.extras.site.exporting import NotPushed, push
from tests.peer.hub_server import leave_hub_out_of_reach


def test_a_base_and_a_repository_are_not_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub's HTTP library has errors of its own, which ended `shoal run new` in a traceback."""
    leave_hub_out_of_reach(monkeypatch)
    with pytest.raises(BaseUnavailable, match="refused"):
        published("a/b")
    with pytest.raises(NotPushed, match="refused"):
        push(tmp_path, "a/b", message="an export")
