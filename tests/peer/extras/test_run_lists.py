"""Lists of runs: what a list may hold, and the commands that read one."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dht.identity import Identity
from peer import cli
from peer.errors import LinkError, NobodyMet
from peer.extras.run_lists import (
    RUNS_MAX,
    ListedRun,
    NoRunList,
    chosen_link,
    decode,
    link_of,
    read_list,
)
from peer.joining.link import Link

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


SEED = f"/ip4/192.168.1.5/tcp/7700/p2p/{Identity.from_seed(bytes(32)).peer_id}"
FIRST, SECOND = (f"shoal://{digits * 32}?seed={SEED}" for digits in ("ab", "cd"))
RUNS = [
    {
        "link": FIRST,
        "name": "tiny\x1b[2Jstories",
        "description": "Stories\nfor all.",
        "model": "gpt, 124 M parameters",
        "needs": "8 GB of memory",
        "tokens": 5_000_000,
        "tokens_goal": 10**9,
    },
    {"link": SECOND, "learners": 3},
    {"name": "of a private network"},
]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A list, of whose runs the first one answers."""

    async def who_trains(link: Link) -> Mapping[str, Any]:
        if str(link) == SECOND:
            raise NobodyMet("run cd", "no peer of it was found")
        return {"training": ["anna", "boris"], "held_out": 2.5}

    monkeypatch.setattr("peer.extras.run_lists._who_trains", who_trains)
    path = tmp_path / "runs.json"
    path.write_text(json.dumps({"runs": RUNS}))
    return path


def test_runs_are_shown_with_what_they_train_who_trains_and_what_a_machine_needs(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["runs", str(file)]) == 0
    shown = capsys.readouterr().out.partition("\n 2  ")[0]
    assert shown.splitlines() == [
        " 1  tiny\ufffd[2Jstories   gpt, 124 M parameters",
        "    Stories for all.",
        "    trains now: 2 peers (anna and boris), held-out loss 2.500; 5 M of 1 G tokens merged, "
        "by the list",
        "    needs: 8 GB of memory",
        f"    shoal join '{FIRST}'",
    ]
    assert cli.run(["runs", str(file), "--json"]) == 0
    first, second, third = json.loads(capsys.readouterr().out)["runs"]
    assert (first["training"], first["reason"]) == (["anna", "boris"], None)
    assert second["training"] is None and "no peer of it was found" in second["reason"]
    assert (third["link"], third["reason"]) == ("", "the list has no link to it")


def test_no_list_is_fetched_that_nobody_has_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("SHOAL_RUNS", raising=False)
    assert cli.run(["runs"]) == 2
    assert cli.run(["join", "--yes"]) == 2
    assert "set SHOAL_RUNS to a list of runs" in capsys.readouterr().err


def test_join_without_a_link_asks_which_run_of_the_list(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHOAL_RUNS", str(file))
    with pytest.raises(Exception, match="no terminal to ask at"):
        chosen_link()
    terminal = io.StringIO("0\n3\n2\n")
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", terminal)
    assert chosen_link() == SECOND
    shown = capsys.readouterr().out
    assert "Which one, 1 to 2" in shown and "of a private network" not in shown
    assert "not known, run cd" in shown and "3 by the list" in shown
