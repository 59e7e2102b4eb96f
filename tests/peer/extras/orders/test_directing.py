"""The owner's orders from the command line: what is refused before any peer is asked."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from dht.identity import Identity, PeerId, RunId
from dht.membership.credentials import Signer
from dht.membership.orders import NONE, End, Orders
from peer import cli
from peer.calls import Kept
from peer.extras.orders.directing import chosen, nothing_to_attest, version_of
from peer.extras.orders.directives import Before, Delivered
from peer.extras.orders.owning import banned
from peer.joining.link import run_at
from peer.joining.visit import RunStatus, Silent
from peer.run_file.reading import parse
from tests.peer.run_file.whole import whole
from tests.peer.statuses import a_status


def kept(fragment: int, version: int, bits: bytes = b"a") -> Kept:
    return Kept(fragment, version, bytes(32), bytes(32), bits * 32, 100 * version)


def test_the_newest_state_that_most_hold_alike_is_chosen() -> None:
    anna = [kept(0, 8), kept(0, 16), kept(1, 8)]
    boris = [kept(0, 8), kept(0, 16), kept(1, 8)]
    clara = [kept(0, 8), kept(0, 24), kept(1, 8, b"x")]
    assert chosen([anna, boris, clara], 2) == ((kept(0, 16), 2), (kept(1, 8), 2))


def test_a_state_that_one_of_several_peers_reports_is_not_attested() -> None:
    assert chosen([[kept(0, 8)], [kept(0, 8, b"x")]], 1) is None
    assert chosen([[kept(0, 8)] * 5, [kept(0, 16)]], 1) is None, "said five times by one"
    assert chosen([[kept(0, 8)]], 1) == ((kept(0, 8), 1),)
    assert chosen([], 1) is None
    assert chosen([[kept(0, 8)]], 2) is None, "no state of fragment 1"


SEED = "/ip4/203.0.113.7/tcp/7700/p2p/12D3KooWC5mVdyoGeyBP9WU6nAFGbDLfFfsYbZwbZJRmLYeNSJwB"
OPEN = f'schema = 1\nname = "ours"\nseeds = ["{SEED}"]\n'


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "ours.toml"
    path.write_text(whole(OPEN), encoding="utf-8")
    return path


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = cli.run(arguments)
    return code, capsys.readouterr().err


def test_another_key_than_the_owners_is_refused(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said(capsys, "run", "sign", str(file), "--key", str(tmp_path / "ours.key"))
    said(capsys, "run", "sign", str(tmp_path / "none"), "--key", str(tmp_path / "other.key"))
    code, errors = said(capsys, "run", "pause", str(file))
    assert code == 4 and "there is no such file" in errors


class Ended:
    """A visitor of a run whose peers say that it has ended."""

    tokens = 5_000_000
    versions = (3, 4)

    async def look(self, *, timeout_s: float) -> RunStatus:
        told = a_status(ended_at=86_400.0, global_tokens=self.tokens, versions=self.versions)
        return RunStatus("run", (told,), {})

    async def attestable(self) -> dict[PeerId, tuple[Kept, ...]]:
        return {}

    async def deliver(self, directive: bytes) -> dict[PeerId, str]:
        return {PeerId("anna"): ""}


@pytest.fixture
def ended(file: Path, monkeypatch: pytest.MonkeyPatch) -> type[Ended]:
    """The run of ``file``, with an owner, a budget of tokens, and peers that tell of its end."""

    @asynccontextmanager
    async def visit(*arguments: object, **settings: object) -> AsyncIterator[Ended]:
        yield Ended()

    file.write_text(whole(f"{OPEN}\n[end]\ntokens = 5_000_000\n"), encoding="utf-8")
    assert cli.run(["run", "sign", str(file)]) == 0
    monkeypatch.setattr("peer.joining.visit.visit", visit)
    return Ended


@pytest.mark.parametrize(
    "order",
    [
        ("amend", "--set", "inner.learning_rate=1e-3"),
        ("pause",),
        ("pause", "--lift"),
        ("attest",),
        ("rollback",),
    ],
)
def test_a_run_that_has_ended_takes_no_orders(
    order: tuple[str, ...],
    home: Path,
    file: Path,
    ended: type[Ended],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """They were signed, all peers took them, and nothing changed."""
    before = sorted(home.rglob("*"))
    command, *options = order
    code, errors = said(capsys, "run", command, str(file), *options)
    assert code == 4
    assert "has ended on 1970-01-02 00:00 UTC at 5,000,000 tokens; `shoal export" in errors
    assert sorted(home.rglob("*")) == before


def test_a_run_that_has_ended_can_be_ended_once_more(
    file: Path, ended: type[Ended], capsys: pytest.CaptureFixture[str]
) -> None:
    """A peer that missed the first order gets it."""
    assert said(capsys, "run", "end", str(file))[0] == 0
    code, errors = said(capsys, "run", "pause", str(file), "--lift")
    assert code == 4 and "has ended on" in errors


def test_an_end_that_nothing_bears_out_keeps_no_owner_from_its_run(
    file: Path,
    ended: type[Ended],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ended, "tokens", 4_999_999)
    assert said(capsys, "run", "pause", str(file))[0] == 0
    # With fewer tokens for the run they do.
    monkeypatch.setattr(ended, "tokens", 3_000_000)
    assert said(capsys, "run", "amend", str(file), "--set", "end.tokens=4_000_000")[0] == 0
    monkeypatch.setattr(ended, "tokens", 4_000_000)
    assert (
        said(capsys, "run", "pause", str(file), "--lift")[0] == 0
    )  # the amendment is for later versions
    monkeypatch.setattr(ended, "versions", (30, 30))
    assert said(capsys, "run", "pause", str(file))[0] == 4


def test_a_version_is_one_to_come() -> None:
    assert version_of("+20", 100) == 120
    assert version_of("+0", 100) == 101
    assert version_of("101", 100) == 101
    for over in ("100", "7"):
        with pytest.raises(ValueError, match=f"--at is {over}, and the run is at version 100"):
            version_of(over, 100)


def test_no_version_is_guessed_where_no_peer_tells_its_own(file: Path) -> None:
    """Counted from 0, `end --at +10` would end a run at once."""
    silent = {PeerId("anna"): Silent("anna", "learner", None, "the run admits invited peers only")}
    seen = RunStatus(parse(OPEN).run_id, (), silent)
    before = Before(run_at(str(file)), frozenset(), NONE, 1, seen, {})
    with pytest.raises(ValueError, match=r"no peer tells .*the run admits invited peers only"):
        version_of("+10", before.newest)


def test_the_owner_is_not_banned(
    home: Path, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No peer heeds such a ban: the command said that all had taken it."""
    said(capsys, "run", "sign", str(file))
    found = run_at(str(file))
    other, owner = Identity.generate(), Identity.load(home / "owner.key")
    seen = RunStatus(found.run.run_id, (), {})
    before = Before(found, frozenset([b"one"]), NONE, 1, seen, {})
    assert banned(before, frozenset([other.public_key])) == {b"one", other.public_key}
    with pytest.raises(ValueError, match=f"{owner.peer_id} is the key of the run's owner"):
        banned(before, frozenset([other.public_key, owner.public_key]))


def test_the_reason_why_nothing_can_be_attested_names_the_peers_that_keep_states() -> None:
    assert nothing_to_attest(0).startswith("no peer keeps a good state")
    assert nothing_to_attest(3).startswith("most of the 3 peers that keep good states")


def test_an_order_says_for_what_it_waits(capsys: pytest.CaptureFixture[str]) -> None:
    """It was taken by every peer, and for ten minutes nothing happened and nothing said why."""
    signer = Signer(Identity.from_seed(bytes(32)), RunId("ab" * 32))
    directive = signer.directive(8, frozenset(), Orders(end=End(version=12)))
    waits = "waits for a merge: anna merges by itself from 12:04 on"
    given = Delivered(directive, True, {PeerId("anna"): ""}, [waits])
    assert given.report(as_json=False) == 0
    taken = "directive 8: ends at version 12: taken by 1 of 1 peers, who pass it on"
    assert capsys.readouterr().out == f"{taken}; {waits}\n"
    given.report(as_json=True)
    assert json.loads(capsys.readouterr().out)["waiting"] == [waits]
