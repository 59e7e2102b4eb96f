"""The page of a run as bytes that a bootstrap peer takes from a keeper."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from dht.identity import PeerId, RunId
from peer.extras.site.run_page.content import CALL, PAGE_MAX_BYTES, ask, elsewhere
from tests.peer.extras.site.run_page.example_pages import OTHER, RUN, a_page


def test_a_page_is_what_it_was_before_it_was_encoded() -> None:
    page = a_page()
    data = CALL.encode(page)
    assert CALL.decode(data) == page
    assert len(data) < PAGE_MAX_BYTES


def test_a_page_of_another_run_is_refused() -> None:
    class Keeper:
        async def call(self, *args: object, **options: object) -> bytes:
            return CALL.encode(a_page())

    keeper: Any = Keeper()
    with pytest.raises(ValueError, match="the page of run 5f5f"):
        asyncio.run(ask(keeper, PeerId("anna"), RunId(OTHER), timeout_s=1.0))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80",
        CALL.encode(a_page())[:-1],
        msgspec.msgpack.encode({"run": RUN, "at": 1.0, "more": 1}),
        CALL.encode(a_page(link="x" * 3000)),
        CALL.encode(a_page(losses=a_page().losses * 2)),
    ],
)
def test_bytes_that_are_no_page_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="not the page of a run"):
        CALL.decode(data)


def test_a_host_without_the_exports_does_not_link_to_them() -> None:
    page = elsewhere(a_page())
    assert page.latest is not None and page.latest.path == "" and page.latest.url
    assert elsewhere(a_page(latest=None)).latest is None
