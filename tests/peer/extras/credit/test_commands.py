"""``shoal credit``: the contributors that a peer's folder knows, and how its work is shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dht.identity import Identity
from peer.extras.credit.accounting import wire
from peer.extras.credit.reading import save_tally
from peer.run_file.sections import RunFile
from peer.storage.home import occupied
from tests.peer.commands_said import said
from tests.peer.extras.credit.accounting.books import a_tally

RUN = RunFile(name="ours")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a peer that has been in a run of two contributors."""
    where = tmp_path / "peer"
    with occupied(where, RUN, "keeper"):
        Identity.load_or_create(where / "identity.key")
        save_tally(where, wire.encode(a_tally(run=RUN.run_id)))
    return where


def test_contributors_are_listed_with_their_share(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, output, _ = said(["credit", str(folder)], capsys)
    assert code == 0
    assert [line.split()[:3] for line in output.splitlines()[1:]] == [
        ["anna", "11", "68.8%"],
        ["boris", "5", "31.2%"],
    ]
    record = json.loads(said(["credit", str(folder), "--json"], capsys)[1])[str(folder)]
    assert record["peer"] == Identity.load(folder / "identity.key").peer_id
    assert [row["tokens"] for row in record["contributors"]] == [11, 5]


def test_a_folder_that_is_no_peers_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, errors = said(["credit", str(tmp_path)], capsys)
    assert code == 2 and "is not the folder of a peer" in errors
