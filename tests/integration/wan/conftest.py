"""Skips tests of wide-area networks where namespaces cannot be made."""

from __future__ import annotations

import pytest

from peer.lab.network.topology import cannot_build


@pytest.fixture(autouse=True)
def _namespaces(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("slow") and (reason := cannot_build()) is not None:
        pytest.skip(f"wide-area networks cannot be made here: {reason}")
