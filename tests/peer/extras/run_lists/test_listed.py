"""Lists of runs from strangers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dht.identity import Identity
from peer.errors import LinkError
from peer.extras.run_lists.listed import RUNS_MAX, ListedRun, NoRunList, decode, link_of, read_list

PEER = Identity.from_seed(bytes(32)).peer_id
RUN = f"shoal://{'ab' * 32}"
PUBLIC = f"/dns4/seed.example.org/tcp/7700/p2p/{PEER}"
NEAR = f"/ip4/192.168.1.5/tcp/7700/p2p/{PEER}"
SERVED = "https://example.org/runs.json"


def encoded(**fields: Any) -> bytes:
    return json.dumps({"runs": [fields]}).encode()


def test_a_list_has_runs_and_may_have_fields_of_its_own() -> None:
    data = json.dumps({"who": "me", "runs": [{"link": RUN, "stars": 5}, {"learners": 2}]})
    assert decode(data.encode()).runs == (ListedRun(link=RUN), ListedRun(learners=2))
    assert decode(b"{}").runs == ()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"<html>",
        b"[" * 100_000,
        b'{"runs": [{"link": 5}]}',
        b'{"runs": [{"name": "\xff"}]}',
        encoded(name="a" * 101),
        encoded(description="a" * 4001),
        encoded(learners=-1),
        encoded(tokens=1e300),
        encoded(tokens=True),
        json.dumps({"runs": [{}] * (RUNS_MAX + 1)}).encode(),
        b" " * 10_000_000,
    ],
    ids=lambda data: repr(data[:40]),
)
def test_what_is_no_list_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="a list of runs"):
        decode(data)


def test_a_file_that_is_none_is_told_with_its_place(tmp_path: Path) -> None:
    file = tmp_path / "runs.json"
    with pytest.raises(NoRunList, match=r"no list of runs at .*runs\.json: No such file"):
        read_list(str(file))
    file.write_bytes(b"{")
    with pytest.raises(NoRunList, match=r"no list of runs at .*runs\.json: not a list of runs"):
        read_list(str(file))
    with pytest.raises(NoRunList, match="use https"):
        read_list("http://example.org/runs.json")
    file.write_bytes(encoded(link=RUN))
    assert read_list(str(file)).runs == (ListedRun(link=RUN),)


def test_a_list_from_elsewhere_leads_to_no_address_of_this_network() -> None:
    both = ListedRun(link=f"{RUN}?seed={NEAR}&seed={PUBLIC}")
    near = ListedRun(link=f"{RUN}?seed={NEAR}")
    assert [str(seed) for seed in link_of(both, SERVED).seeds] == [PUBLIC]
    with pytest.raises(ValueError, match="no public address"):
        link_of(near, SERVED)
    assert [str(seed) for seed in link_of(near, "runs.json").seeds] == [NEAR], "one's own file"


def test_a_run_without_a_link_that_can_be_used_is_told_with_the_reason() -> None:
    with pytest.raises(ValueError, match="no link to it"):
        link_of(ListedRun(name="one"), SERVED)
    with pytest.raises(LinkError):
        link_of(ListedRun(link="shoal://x'; rm -rf ~'"), SERVED)
