"""Owning a run from the command line: key, run file, invites and delegations. No network."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from multiaddr import Multiaddr

from dht.identity import Identity, PeerId, public_key_of
from dht.membership.credentials import Credential, admit, encode, read_credential
from peer import cli
from peer.cli import taking_part
from peer.errors import NobodyMet, RunFileError, Unusable
from peer.extras.orders.owning import _peer_called
from peer.joining.link import Link, find_run, parse_link
from peer.run_file.reading import parse
from peer.run_file.sections import RunFile
from peer.storage.address import keep_link
from peer.storage.home import occupied
from tests.peer.run_file.whole import whole

SEED = "/ip4/203.0.113.7/tcp/7700/p2p/12D3KooWC5mVdyoGeyBP9WU6nAFGbDLfFfsYbZwbZJRmLYeNSJwB"
OWNER = Identity.from_seed(bytes(32)).peer_id
INVITED = f'schema = 1\nname = "ours"\nseeds = ["{SEED}"]\n\n[policy]\nadmission = "invited"\n'


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "ours.toml"
    path.write_text(whole(INVITED), encoding="utf-8")
    return path


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.run(arguments)
    output, errors = capsys.readouterr()
    return code, output, errors


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    code, output, errors = said(capsys, *arguments, "--json")
    assert code == 0, errors
    found = json.loads(output)
    assert isinstance(found, dict)
    return found


def believed(link: str, run: RunFile) -> Credential:
    """The credential that a peer makes of a link, if the run believes it."""
    invite = parse_link(link).invite
    assert invite is not None and run.policy.owner is not None
    peer = Identity.generate().peer_id
    data = encode(admit(invite.invite, invite.secret, peer, run.run_id))
    verdict = read_credential(data, peer=peer, run=run.run_id, owner=run.policy.owner)
    assert isinstance(verdict, Credential), verdict
    return verdict


def test_signing_makes_a_key_once_and_writes_its_public_half_into_the_file(
    home: Path, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, output, errors = said(capsys, "run", "sign", str(file))
    assert code == 0
    key = home / "owner.key"
    assert key.stat().st_mode & 0o777 == 0o600
    assert "keep a copy of it in a safe place" in errors
    run = parse(file.read_text())
    assert run.policy.owner == Identity.load(key).peer_id
    assert run.run_id in output
    before = file.read_bytes()
    code, _, errors = said(capsys, "run", "sign", str(file))
    assert (code, errors, file.read_bytes()) == (0, "", before)


def test_a_file_of_another_owner_is_not_signed(
    home: Path, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = Identity.generate().peer_id
    file.write_text(whole(f'{INVITED}owner = "{other}"\n'))
    for has_key in (False, True):
        code, _, errors = said(capsys, "run", "sign", str(file))
        assert code == 4
        assert f"the owner in the file is {other}" in errors
        assert (home / "owner.key").exists() is has_key, "no key is made for nothing"
        Identity.load_or_create(home / "owner.key")


def test_a_file_with_a_fault_stays_as_it_is_and_no_key_is_made_for_it(
    home: Path, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for text, fault in ((f"nam = 'x'\n{INVITED}", "did you mean 'name'"), ("{", "line 1")):
        file.write_text(text)
        code, _, errors = said(capsys, "run", "sign", str(file))
        assert code == 2
        assert fault in errors
        assert file.read_text() == text
        assert not home.exists()


def test_no_key_is_made_for_a_file_that_cannot_be_written(
    home: Path, file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: path != file.parent)
    code, _, errors = said(capsys, "run", "sign", str(file))
    assert code == 2 and f"cannot write {file}: its folder is read-only" in errors
    assert not home.exists()


def test_a_run_file_for_invited_peers_needs_an_owner() -> None:
    with pytest.raises(RunFileError, match=r"line 5: .*`shoal run sign FILE`"):
        parse(INVITED)


def test_the_first_start_of_a_run_for_invited_peers_makes_its_owner(
    home: Path,
    file: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started = []
    monkeypatch.setattr(
        taking_part, "_take_part", lambda found, own, options: started.append(found)
    )
    _, _, errors = said(capsys, "start", str(file), "--yes")
    owner = Identity.load(home / "owner.key").peer_id
    assert started[0].run.policy.owner == owner
    assert str(home / "owner.key") in errors
    said(capsys, "start", str(file), "--yes")
    assert started[1].run.run_id == started[0].run.run_id


def test_an_open_run_is_started_as_it_is(
    home: Path,
    file: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(taking_part, "_take_part", lambda found, own, options: 0)
    text = whole('schema = 1\nname = "ours"\n')
    file.write_text(text)
    assert said(capsys, "start", str(file), "--yes")[0] == 0
    assert file.read_text() == text
    assert not home.exists()


def test_an_invite_is_a_link_that_the_run_believes(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said(capsys, "run", "sign", str(file))
    run = parse(file.read_text())
    printed = told(capsys, "invite", str(file), "--role", "keeper", "--days", "3")
    invite = believed(printed["link"], run).invite
    assert invite.role == "keeper"
    assert invite.id == printed["invite"]
    assert abs(invite.expires_at - time.time() - 3 * 86_400) < 100
    assert [str(seed) for seed in parse_link(printed["link"]).seeds] == [SEED]
    code, output, errors = said(capsys, "invite", str(file))
    assert code == 0
    assert output.startswith("shoal join 'shoal://")
    assert f"to take it back: shoal run ban {file} 12D3KooW" in errors


def test_a_delegate_invites_with_its_own_key_and_never_for_longer(
    tmp_path: Path, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said(capsys, "run", "sign", str(file))
    run = parse(file.read_text())
    path = tmp_path / "delegate.key"
    delegate = Identity.load_or_create(path)
    granted = told(capsys, "run", "delegate", str(file), delegate.peer_id, "--days", "2")
    _, output, errors = said(capsys, "run", "delegate", str(file), delegate.peer_id)
    assert len(output.split()) == 1, "scripts take the proof from there"
    assert delegate.peer_id in errors and "--delegation" in errors
    with_key = ["--key", str(path)]
    proof = ["--delegation", granted["delegation"]]
    printed = told(capsys, "invite", str(file), "--days", "30", *with_key, *proof)
    assert believed(printed["link"], run).invite.expires_at == granted["expires_at"]
    for arguments, reason in (
        (with_key, "the owner is"),
        (proof, "the delegation is for"),
        (["--key", str(tmp_path / "none")], "there is no such file"),
    ):
        code, _, errors = said(capsys, "invite", str(file), *arguments)
        assert code == 4
        assert reason in errors
    code, _, errors = said(capsys, "invite", str(file), *with_key, "--delegation", "x")
    assert code == 2
    assert "damaged" in errors
    other = tmp_path / "other.toml"
    other.write_text(file.read_text().replace("ours", "other"))
    code, output, errors = said(capsys, "invite", str(other), *with_key, *proof)
    assert (code, output) == (4, ""), "no peer would believe an invite with that of another run"
    assert "the delegation is not signed by the owner of the run" in errors


def test_a_peer_is_banned_by_its_name_or_by_the_end_of_its_id() -> None:
    """Bans needed an id of 52 characters, which no text output showed."""
    anna, boris, clara, gone = (Identity.from_seed(bytes([n]) * 32).peer_id for n in range(4))
    seen = SimpleNamespace(names={anna: "anna", boris: "boris", clara: "boris"})
    before = SimpleNamespace(seen=seen, bans=frozenset((public_key_of(gone),)))

    def called(wanted: str) -> PeerId:
        return _peer_called(wanted, before)  # type: ignore[arg-type]

    assert [called("anna"), called(boris[-6:]), called(clara)] == [anna, boris, clara]
    assert called(gone[-6:]) == gone, "a ban is lifted of a peer that is not there"
    with pytest.raises(Unusable) as caught:
        called("boris")
    assert (
        str(caught.value)
        == "'boris' may be one of "
        + ", ".join(f"boris -> {peer}" for peer in sorted((boris, clara)))
        + "; name one by its id"
    )
    with pytest.raises(Unusable, match=f"no peer 'dora' is known here; known are .*anna -> {anna}"):
        called("dora")


def test_the_private_half_of_an_invite_does_not_leave_for_the_search(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said(capsys, "run", "sign", str(file))
    run = parse(file.read_text())
    link = told(capsys, "invite", str(file))["link"]
    asked: list[Link] = []

    def ask(wanted: Link, tell: object) -> bytes:
        asked.append(wanted)
        return run.canonical()

    monkeypatch.setattr("peer.joining.link.ask_peers", ask)
    found = find_run(link)
    assert found.invite is not None
    assert asked[0].invite is None


def test_an_invite_names_the_owners_own_peer_which_no_file_can_name(
    home: Path, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = SEED.replace("113.7", "113.9")
    file.write_text(whole(INVITED.replace(f'"{SEED}"', "")))
    said(capsys, "run", "sign", str(file))
    run = parse(file.read_text())
    folder = home / "runs" / "ours"
    with occupied(folder, run, "learner"):
        keep_link(folder, str(Link(run.run_id, tuple(map(Multiaddr, (own, SEED))))))
        link = told(capsys, "invite", str(file))["link"]
    assert [str(seed) for seed in parse_link(link).seeds] == [own, SEED]
    assert parse_link(told(capsys, "invite", str(file))["link"]).seeds == (), "it has left"


def test_the_links_of_two_runs_on_one_machine_are_told_apart(
    home: Path, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two lines of 150 characters said nothing of their runs."""
    links = {}
    with ExitStack() as stack:
        for name in ("ours", "theirs"):
            run = parse(INVITED.replace('"ours"', f'"{name}"') + f'owner = "{OWNER}"\n')
            folder = home / "runs" / name
            stack.enter_context(occupied(folder, run, "learner"))
            links[name] = str(Link(run.run_id, (Multiaddr(SEED),)))
            keep_link(folder, links[name])
        code, output, _ = said(capsys, "status")
    assert code == 0
    lines = [line.strip() for line in output.splitlines()]
    for name, link in links.items():
        where = lines.index(link)
        assert lines[where - 1].endswith(str(home / "runs" / name))
        assert lines[where - 2].startswith(f"{name}, learner")


@pytest.mark.parametrize(
    "command", ["status FILE", "credit FILE", "export FILE OUT.safetensors", "run pause FILE"]
)
def test_commands_with_the_file_ask_the_owners_own_peer_which_the_file_does_not_name(
    command: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Earlier, these commands said that the link has no seed to ask, while `shoal invite` found the
    peer."""
    monkeypatch.chdir(tmp_path)
    asked: list[Link] = []

    def visit(link: Link, *_: object, **__: object) -> None:
        asked.append(link)
        raise NobodyMet("run", "nobody is asked in this test")

    # In this order: an import of an earlier one after a change of the last would keep the change.
    for module in (
        "peer.extras.export.download",
        "peer.joining.visit",
    ):
        monkeypatch.setattr(f"{module}.visit", visit)
    file = tmp_path / "ours.toml"
    file.write_text(whole(INVITED.replace(f'seeds = ["{SEED}"]\n', "")), encoding="utf-8")
    assert said(capsys, "run", "sign", str(file))[0] == 0
    run = parse(file.read_text())
    arguments = [str(file) if each == "FILE" else each for each in command.split()]
    folder = tmp_path / "own peer"
    with occupied(folder, run, "learner"):
        keep_link(folder, str(Link(run.run_id, (Multiaddr(SEED),))))
        assert said(capsys, *arguments)[0] == 3
    assert [link.seeds for link in asked] == [(Multiaddr(SEED),)]
    said(capsys, *arguments)
    assert [link.seeds for link in asked[1:]] == [()], "a peer that does not run is not asked"
