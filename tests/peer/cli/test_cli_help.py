"""Every command has an example of itself and JSON for scripts, and shells can complete them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from dht.identity import Identity
from peer import cli
from peer.extras.doctor.this_machine import Finding
from peer.rules.limits import Limits
from peer.status import NOT_TOLD, PeerStatus
from tests.peer.run_file.whole import whole

SEED = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWGVBEgkHzjFQg5VNNCdTSh3MPQbYUsFKVpLLUwz3kk2fu"
LINK = f"shoal://{'0' * 64}?seed={SEED}"

WITHOUT_JSON = {
    "shoal run new": "prints a run file, which is TOML: a script can read that",
    "shoal docs": "prints a document, which is Markdown",
}


def commands(command: Any, name: str = "shoal") -> Iterator[tuple[str, Any]]:
    """Name and command each, those of groups included."""
    for word, child in sorted(getattr(command, "commands", {}).items()):
        if getattr(child, "commands", None):
            yield from commands(child, f"{name} {word}")
        else:
            yield f"{name} {word}", child


ALL = list(commands(cli.command()))


def test_there_are_commands() -> None:
    assert len(ALL) > 20


def test_every_command_stands_under_a_heading(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.command()(["--help"])
    shown = capsys.readouterr().out
    assert "Take part" in shown and "Use the model" in shown
    assert "Commands ─" not in shown  # where those without one would be


@pytest.mark.parametrize("option", ["--weights"])
def test_only_the_command_that_founds_runs_shows_options_of_founders(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for command, has in (("start", True), ("join", False)):
        with pytest.raises(SystemExit):
            cli.command()([command, "--help"])
        lines = capsys.readouterr().out.splitlines()
        assert has == any(line.startswith(f"│ {option} ") for line in lines), command


@pytest.mark.parametrize(("name", "command"), ALL, ids=[name for name, _ in ALL])
def test_every_command_has_an_example_of_itself(name: str, command: Any) -> None:
    _, found, example = " ".join((command.help or "").split()).partition("Example: ")
    assert found, f"{name} --help has no example"
    assert example.startswith(name), example


@pytest.mark.parametrize(("name", "command"), ALL, ids=[name for name, _ in ALL])
def test_the_help_of_a_command_is_filled_to_the_width_of_the_terminal(
    name: str, command: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "2000")
    monkeypatch.setenv("TERMINAL_WIDTH", "2000")
    with pytest.raises(SystemExit):
        cli.command()([*name.split()[1:], "--help"])
    shown = [line.strip() for line in capsys.readouterr().out.splitlines()]
    for paragraph in (command.help or "").split("\n\n"):
        text = " ".join(paragraph.replace("`", "").split())
        assert text in shown, (text, shown)


@pytest.mark.parametrize(("name", "command"), ALL, ids=[name for name, _ in ALL])
def test_an_argument_that_may_be_left_out_stands_in_one_pair_of_brackets(
    name: str, command: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.command()([*name.split()[1:], "--help"])
    usage = next(line for line in capsys.readouterr().out.splitlines() if "Usage:" in line)
    assert "[[" not in usage


@pytest.mark.parametrize("name", ["shoal", "shoal run", *(name for name, _ in ALL)])
def test_the_help_shows_no_value_behind_flags(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.command()([*name.split()[1:], "--help"])
    shown = capsys.readouterr().out
    assert "--help" in shown and "bool" not in shown.lower(), shown


@pytest.mark.parametrize("name", cli.FROM_ENVIRONMENT)
def test_options_are_taken_from_the_environment_and_the_help_says_how(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    cli.run([name, "--help"])
    shown = capsys.readouterr().out
    options = set(re.findall(r"│ --([a-z-]+)", shown)) - {"help"}
    assert len(options) > 8
    for option in options:
        assert f"[env var: SHOAL_{option.upper().replace('-', '_')}]" in shown
    monkeypatch.setenv("SHOAL_LANE", "none")
    assert cli.run([name, "--yes", LINK][: 1 if name == "bootstrap" else 3]) == 2
    assert "'--lane' (env var: 'SHOAL_LANE')" in capsys.readouterr().err


def test_the_link_of_a_run_is_taken_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHOAL_LINK", "shoal://abc")
    monkeypatch.setenv("SHOAL_YES", "1")
    for name in ("join", "keep"):
        assert cli.run([name]) == 2
        assert "'shoal://abc' is not a run link" in capsys.readouterr().err


def test_every_command_has_json_for_scripts() -> None:
    without = {
        name
        for name, command in ALL
        if not any("--json" in parameter.opts for parameter in command.params)
    }
    assert without == set(WITHOUT_JSON)


def test_a_shell_can_complete_commands() -> None:
    asked = {"_SHOAL_COMPLETE": "complete_bash", "COMP_WORDS": "shoal st", "COMP_CWORD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", "from peer.cli import main; main()"],
        env={**os.environ, **asked},
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.split() == ["start", "status"]


MISTAKES = (
    ("run", "new", "--size", "3b"),
    ("run", "check", "nowhere.toml"),
    ("start", "nowhere.toml"),
    ("start", "nowhere.toml", "--page", "9100"),
    ("start", "examples/tiny_gpt/run.toml", "--micro-batch", "0"),
    ("join", LINK, "--device", "tpu"),
    ("keep", "nowhere.toml", "--until", "tomorrow"),
    ("keep", "nowhere.toml", "--run-page", "127.0.0.1:1"),
    ("limits", "--up", "fast"),
)


def test_mistakes_are_told_before_torch_or_a_server_is_loaded() -> None:
    """Torch takes seconds to import, and ten on a busy machine; only the agent serves pages."""
    program = (
        "import json, sys; from peer import cli\n"
        "for arguments in json.loads(sys.argv[1]):\n"
        "    code, loaded = cli.run(arguments), {'torch', 'aiohttp'} & set(sys.modules)\n"
        "    print(f'\\nfound: {code} {loaded} {arguments}', flush=True)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(MISTAKES)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    found = [line for line in done.stdout.splitlines() if line.startswith("found: ")]
    assert found == [f"found: 2 set() {list(each)}" for each in MISTAKES], done.stderr


def documented() -> dict[str, set[str]]:
    """The words in backticks of each row of 'Output for scripts', by its commands."""
    guide = (Path(__file__).parents[3] / "docs/reference/output.md").read_text(encoding="utf-8")
    chapter = guide.partition("\n## ")[0]
    rows = [line.split(" | ", 1) for line in chapter.splitlines() if line.startswith("| ")]
    return {first.removeprefix("| "): set(re.findall("`(.*?)`", rest)) for first, rest in rows}


def test_the_guide_has_the_fields_of_each_command() -> None:
    rows = documented()
    named = " ".join(rows)
    for name, _ in ALL:
        words = name.removeprefix("shoal ").split()
        if name not in WITHOUT_JSON:
            assert any(f"`{word}" in named for word in (" ".join(words), words[-1], words[0])), name
    assert rows["its `peers`"] == set(PeerStatus.__struct_fields__) - NOT_TOLD.keys()
    limits = rows["`limits`, `pause`, `resume`, `leave`"]
    assert limits == {*Limits.__struct_fields__, "month_used_bytes", "disk_used_bytes"}
    assert rows["`doctor`"] == {"ok", "findings", *(each.name for each in fields(Finding))}


def test_the_guide_has_the_fields_that_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    good, bad, text = tmp_path / "good.toml", tmp_path / "bad.toml", tmp_path / "a.txt"
    good.write_text(whole("name = 'good'"), encoding="utf-8")
    bad.write_text("nam = 'bad'", encoding="utf-8")
    text.write_text("some words", encoding="utf-8")
    peer = Identity.from_seed(bytes(32)).peer_id
    rows = documented()
    for row, *arguments in (
        ("`run sign`", "run", "sign", str(good)),
        ("`run check`", "run", "check", str(good)),
        ("`run check`", "run", "check", str(bad)),
        ("`invite`", "invite", str(good)),
        ("`run delegate`", "run", "delegate", str(good), peer),
        ("`data prepare`", "data", "prepare", str(text), "--out", str(tmp_path / "shards")),
        ("`status` without a link, or with a folder", "status"),
    ):
        cli.run([*arguments, "--json"])
        printed = json.loads(capsys.readouterr().out)
        assert printed and printed.keys() <= rows[row], row
