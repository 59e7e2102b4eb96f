"""What a keeper knows of its run for the public page."""

from __future__ import annotations

from pathlib import Path

import pytest

from peer.extras.site.keepers_page import Showing, ShownRun
from tests.peer.agent.example_keepers import keeper_online


async def test_a_run_page_does_not_claim_that_nobody_contributed_before_it_has_heard_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with keeper_online(tmp_path, monkeypatch) as (peer, _):
        assert ShownRun(peer, Showing(None, None)).page().contributors_total is None
