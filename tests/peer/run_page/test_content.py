"""The page of a run as bytes that a bootstrap peer takes from a keeper."""

from __future__ import annotations

import msgspec
import pytest

from dht.identity import RunId
from peer.run_page.content import PAGE_MAX_BYTES, decode, elsewhere, encode
from tests.peer.run_page.example_pages import OTHER, RUN, a_page


def test_a_page_is_what_it_was_before_it_was_encoded() -> None:
    page = a_page()
    data = encode(page)
    assert decode(data, RunId(RUN)) == page
    assert len(data) < PAGE_MAX_BYTES


def test_a_page_of_another_run_is_refused() -> None:
    with pytest.raises(ValueError, match="the page of run 5f5f"):
        decode(encode(a_page()), RunId(OTHER))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80",
        encode(a_page())[:-1],
        msgspec.msgpack.encode({"run": RUN, "at": 1.0, "more": 1}),
        encode(a_page(link="x" * 3000)),
        encode(a_page(losses=a_page().losses * 2)),
    ],
)
def test_bytes_that_are_no_page_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="not the page of a run"):
        decode(data, RunId(RUN))


def test_a_host_without_the_exports_does_not_link_to_them() -> None:
    page = elsewhere(a_page())
    assert page.latest is not None and page.latest.path == "" and page.latest.url
    assert elsewhere(a_page(latest=None)).latest is None
