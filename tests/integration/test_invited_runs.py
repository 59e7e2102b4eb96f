"""A run for invited peers, with the real commands: invite, join, refusal, status and ban."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from dht.identity import Identity
from tests.processes import Processes
from tests.swarms.commands import Swarm, answer, run_text, shoal, tell, until

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]

REFUSED = 4
INVITED = '\n[policy]\nadmission = "invited"\n'


def test_an_invited_run_admits_refuses_and_bans(processes: Processes, tmp_path: Path) -> None:
    swarm, home = Swarm(processes, tmp_path), tmp_path / "data"
    anna = swarm.start("anna", run_text() + INVITED)
    link = anna.link()
    anna.ready()
    key = home / "shoal" / "owner.key"
    assert key.stat().st_mode & 0o777 == 0o600
    assert str(key) in anna.output
    assert "keep a copy of it in a safe place" in anna.output
    assert Identity.load(key).peer_id in (tmp_path / "anna.toml").read_text()

    # Without an invite the join is refused in one sentence, with the remedy.
    elsewhere = ["env", f"XDG_DATA_HOME={tmp_path / 'another machine'}"]
    stranger = swarm.join("mallory", link, prefix=elsewhere)
    swarm.learners.remove(stranger)
    assert stranger.wait(timeout_s=90.0) == REFUSED
    assert "the run admits invited peers only; ask its owner for an invite" in stranger.output
    assert "shoal invite" in stranger.output
    refused = shoal("status", link, home=tmp_path / "elsewhere")
    assert refused.returncode == REFUSED, "its status is for invited peers too"
    assert "the run admits invited peers only" in refused.stderr

    # The owner's key is an invite.
    assert [peer["name"] for peer in answer("status", link, home=home)["peers"]] == ["anna"]
    assert answer("export", link, str(tmp_path / "exported.safetensors"), home=home)

    # With an invite a peer joins and merges; it needs no second invite to come back.
    invited = answer("invite", link, "--days", "1", home=home)
    boris = swarm.join("boris", invited["link"], prefix=elsewhere)
    boris.ready()
    until(lambda: bool(boris.own_rounds()), "boris merged", timeout_s=120.0)
    seen = answer("status", invited["link"], home=home)
    assert {peer["name"] for peer in seen["peers"]} == {"anna", "boris"}
    boris.kill()
    boris.come_back(link)
    boris.ready()
    until(lambda: bool(boris.own_rounds()), "boris merged again", timeout_s=120.0)
    assert boris.progress()["peers"] == 2

    # A ban of the invite ends its peer within a minute, and is shown by status.
    began = time.monotonic()
    banned = answer("run", "ban", link, invited["invite"], home=home)
    assert banned["number"] == 1
    assert banned["taken"], banned
    assert boris.wait(timeout_s=60.0) == REFUSED
    took_s = time.monotonic() - began
    assert "is banned from the run by directive 1 of its owner" in boris.output
    until(lambda: anna.progress()["peers"] == 1, "anna is alone", timeout_s=60.0)
    output = shoal("status", link, home=home).stdout
    assert "directive 1 of" in output
    assert invited["invite"] in output
    swarm.learners.remove(boris)
    boris.come_back(link)
    assert boris.wait(timeout_s=90.0) == REFUSED, "it does not come back"
    swarm.end()
    tell(f"the banned peer ended {took_s:.1f} s after the command began")


@pytest.mark.parametrize("admission", ["invited", "listed"])
def test_the_owner_of_a_run_that_is_not_open_is_told_its_versions_and_states(
    admission: str, processes: Processes, tmp_path: Path
) -> None:
    """Without them `run end --at +N` counted from version 0, which ended the run at once."""
    home = tmp_path / "data"
    key = home / "shoal" / "owner.key"
    key.parent.mkdir(parents=True)
    owner = Identity.load_or_create(key).peer_id
    listed = Identity.load_or_create(tmp_path / "anna" / "identity.key").peer_id
    policy = f'\n[policy]\nadmission = "{admission}"\nowner = "{owner}"\n'
    if admission == "listed":
        policy += f'peers = ["{listed}"]\n'
    swarm = Swarm(processes, tmp_path)
    anna = swarm.start("anna", run_text(cycle=8, fragments=2) + policy, pace_s=0.02)
    link = anna.link()
    anna.ready()
    until(lambda: anna.progress().get("global_tokens", 0) > 0, "anna has merged", timeout_s=60.0)

    ordered = answer("run", "end", link, "--at", "+100000", home=home)["orders"]
    assert len(ordered) == 1 and int(ordered[0].split()[-1]) > 100_000, ordered
    amended = shoal("run", "amend", link, "--set", "end.tokens=9", "--at", "1", home=home)
    assert (amended.returncode, "already" in amended.stderr) == (2, True), amended.stderr
    assert anna.process.poll() is None, "the run goes on"
    swarm.end()
