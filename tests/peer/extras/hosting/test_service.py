"""The systemd unit, and notifications to systemd."""

from __future__ import annotations

import plistlib
import shutil
import socket
import subprocess
import sys
from configparser import ConfigParser
from functools import partial
from pathlib import Path

import pytest

from peer import cli
from peer.extras.hosting import group, service
from peer.extras.hosting.service import (
    ServiceNotifier,
    check_seen,
    service_unit,
)

PYTHON = Path("/opt/shoal/bin/python")
unit_of = partial(service_unit, description="A part of Shoal", stop_s=20.0)


def line_of(unit: str, name: str) -> str:
    (line,) = [line for line in unit.splitlines() if line.startswith(f"{name}=")]
    return line.removeprefix(f"{name}=")


def test_the_unit_runs_the_same_command_with_the_data_in_systemds_folder(
    capsys: pytest.CaptureFixture[str],
) -> None:
    announce = "seed.example.org"
    assert (
        cli.run(["bootstrap", "--install-service", "--port", "7701", "--announce", announce]) == 0
    )
    unit = capsys.readouterr().out
    command = line_of(unit, "ExecStart")
    assert " -P -m peer.cli bootstrap --port 7701 " in command
    assert "--announce seed.example.org" in command
    assert command.endswith("--data-dir %S/%N")
    assert line_of(unit, "StateDirectory") == "%N"
    assert line_of(unit, "Description") == "Shoal bootstrap peer"
    assert line_of(unit, "TimeoutStopSec") == "20"


def test_words_are_quoted_for_systemd_and_the_key_is_a_credential() -> None:
    words = ["50%", "$HOME", 'a "b"', "--identity", "%d/identity.key"]
    unit = unit_of(PYTHON, words, credentials={"identity.key": Path("/etc/my.key")})
    assert '50%% $$HOME "a \\"b\\""' in line_of(unit, "ExecStart")
    assert "--identity %d/identity.key" in line_of(unit, "ExecStart")
    assert line_of(unit, "LoadCredential") == "identity.key:/etc/my.key"
    assert "LoadCredential" not in unit_of(PYTHON, ["bootstrap"])


def test_the_unit_of_a_hosted_run_has_the_run_file_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "my.run.toml"
    assert cli.run(["run", "new", str(file)]) == 0
    capsys.readouterr()
    assert cli.run(["host", str(file), "--domain", "run.example.org", "--install-service"]) == 0
    unit = capsys.readouterr().out
    command = line_of(unit, "ExecStart")
    assert command.endswith(
        " -P -m peer.cli host --domain run.example.org %d/run.toml --data-dir %S/%N"
    )
    assert line_of(unit, "LoadCredential") == f"run.toml:{file}"
    assert line_of(unit, "Description") == "Shoal host of a run"


def test_the_service_of_a_hosted_run_is_not_killed_before_its_keeper_may_be(
    capsys: pytest.CaptureFixture[str],
) -> None:
    link = f"shoal://{'ab' * 32}"
    assert cli.run(["host", link, "--install-service"]) == 0
    stop_s = float(line_of(capsys.readouterr().out, "TimeoutStopSec"))
    assert stop_s > group.END_WITHIN_S


def test_a_python_in_a_home_folder_is_not_hidden_from_its_own_service() -> None:
    assert line_of(unit_of(PYTHON, []), "ProtectHome") == "yes"
    assert line_of(unit_of(Path("/home/me/bin/python"), []), "ProtectHome") == "read-only"


def test_a_unit_for_an_installation_that_it_could_not_see_is_printed_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(service, "TEMPORARY", (tmp_path / "tmp",))
    tmp_path.chmod(0o755)
    for folder, mode in (("tmp", 0o755), ("closed", 0o700), ("open", 0o755)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "python").touch()
        (tmp_path / folder / "python").chmod(0o755)
        (tmp_path / folder).chmod(mode)
    command = ["bootstrap", "--install-service"]
    monkeypatch.setattr(service, "own_installation", lambda: (tmp_path / "tmp" / "python",))
    assert cli.run(command) == 0
    assert "another, empty folder for a service (PrivateTmp)" in capsys.readouterr().err
    monkeypatch.setattr(service, "own_installation", lambda: (tmp_path / "closed" / "python",))
    assert cli.run(command) == 0  # printed, perhaps for another machine
    printed = capsys.readouterr()
    assert printed.out.startswith("[Unit]")
    assert "is closed to other users; install shoal where every user" in printed.err


def test_an_installation_that_everybody_may_read_is_seen_by_a_service() -> None:
    check_seen([Path("/usr/bin/env"), Path("/nowhere/python")])


def test_a_library_in_a_home_folder_is_not_hidden_from_the_service() -> None:
    unit = unit_of(PYTHON, [], installation=[Path("/home/me/.pyenv/versions/3.12")])
    assert line_of(unit, "ProtectHome") == "read-only"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd here")
def test_systemd_accepts_the_unit_and_rates_it_safe(tmp_path: Path) -> None:
    path = tmp_path / "shoal-bootstrap.service"
    # systemd checks that the command exists.
    path.write_text(unit_of(Path("/bin/true"), ["bootstrap"]))
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(path)],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "shoal-bootstrap" not in checked.stderr, checked.stderr
    judged = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=20", str(path)],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert judged.returncode == 0, judged.stdout  # an exposure of 2.0 or less, of 10


def test_systemd_is_notified_of_each_state(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(5)
        notifier = ServiceNotifier(str(tmp_path / "notify"))
        notifier.say("READY=1")
        assert systemd.recv(100) == b"READY=1"
    notifier.say("WATCHDOG=1")  # nobody listens any more
    ServiceNotifier(None).say("READY=1")


# --- learners ------------------------------------------------------------------------------------

LAUNCH = Path(__file__).parents[4] / "examples/launch"
LINK = f"shoal://{'ab' * 32}"


def learner_service(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[str, str]:
    assert cli.run(["join", *words, "--install-service"]) == 0
    printed = capsys.readouterr()
    return printed.out, printed.err


def sections_of(unit: str) -> dict[str, dict[str, str]]:
    parser = ConfigParser(interpolation=None)
    parser.read_string(unit)
    return {name: dict(parser[name]) for name in parser.sections()}


def test_the_unit_of_a_learner_is_that_of_the_example_for_this_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("SHOAL_PACE", "0.5")
    monkeypatch.chdir(tmp_path)
    unit, told = learner_service(capsys, LINK, "--directory", "mine", "--patience", "60")
    command = line_of(unit, "ExecStart")
    for words in ("--pace 0.5", f"--directory {tmp_path}/mine", "--patience 60.0"):
        assert words in command
    assert f" join {LINK} " in command and command.endswith(" --plain --yes")
    assert line_of(unit, "TimeoutStopSec") == "90"
    assert "systemctl --user enable" in told and "invite" not in told
    ours, theirs = (
        sections_of(learner_service(capsys, LINK)[0]),
        sections_of((LAUNCH / "shoal-learner.service").read_text()),
    )
    for section in (ours["Service"], theirs["Service"]):
        for name in ("execstart", "environment", "environmentfile"):
            section.pop(name, None)
    assert ours == theirs


def test_the_agent_of_a_learner_on_a_mac_is_that_of_the_example(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    ours = plistlib.loads(learner_service(capsys, LINK)[0].encode())
    theirs = plistlib.loads((LAUNCH / "org.shoal.learner.plist").read_bytes())
    del theirs["EnvironmentVariables"]
    assert ours.pop("ProgramArguments")[-4:] == ["join", LINK, "--plain", "--yes"]
    assert theirs.pop("ProgramArguments")[-2:] == ["join", "--plain"]
    assert ours == theirs


def test_whoever_puts_an_invite_into_a_service_is_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, told = learner_service(capsys, f"{LINK}?invite=abc")
    assert "let nobody else read the file" in told


def test_a_service_is_for_one_run_that_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["join", "--install-service"]) == 2
    assert "name it by its link" in capsys.readouterr().err
    assert cli.run(["start", "my.run.toml", "--install-service"]) == 2
    assert "`shoal join`: a service must not found a run" in capsys.readouterr().err
