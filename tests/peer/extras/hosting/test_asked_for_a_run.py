"""A bootstrap host that a newcomer asks for a run."""

from __future__ import annotations

from pathlib import Path

import pytest
import uvloop
from multiaddr import Multiaddr

from peer.extras.hosting.bootstrap import BootstrapSettings, open_bootstrap
from peer.joining import fetch
from peer.joining.link import parse_link

RUN = "ab" * 32


def test_a_bootstrap_host_that_knows_nobody_of_the_run_is_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong digit in the run id left people with "still searching" for a minute."""

    class Enough(Exception):
        pass

    def tell(reason: str) -> None:
        raise Enough(reason)

    async def told() -> str:
        settings = BootstrapSettings(
            data_directory=tmp_path, listen=(Multiaddr("/ip4/127.0.0.1/tcp/0"),)
        )
        async with open_bootstrap(settings) as host:
            link = parse_link(f"shoal://{RUN}?seed={host.address}")
            with pytest.raises(Enough) as reason:
                await fetch.fetch_run_file(link, timeout_s=60.0, tell=tell)
        return str(reason.value)

    monkeypatch.setattr(fetch, "TOLD_AFTER_S", 120.0)  # such an answer does not wait
    assert uvloop.run(told()) == (
        "the bootstrap host answered, no peer of this run is known to it; "
        "check the run id in the link"
    )
