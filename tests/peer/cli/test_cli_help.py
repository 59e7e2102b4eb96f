"""Every command has an example of itself and JSON for scripts, and shells can complete them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from peer import cli

SEED = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWGVBEgkHzjFQg5VNNCdTSh3MPQbYUsFKVpLLUwz3kk2fu"
LINK = f"shoal://{'0' * 64}?seed={SEED}"

WITHOUT_JSON = {
    "shoal run new": "prints a run file, which is TOML: a script can read that",
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


@pytest.mark.parametrize("option", ["--anew", "--weights"])
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


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "new", "--size", "3b"),
        ("run", "check", "nowhere.toml"),
        ("start", "nowhere.toml"),
        ("start", "nowhere.toml", "--page", "9100"),
        ("start", "examples/tiny_gpt/run.toml", "--micro-batch", "0"),
        ("join", LINK, "--device", "tpu"),
        ("keep", "nowhere.toml", "--until", "tomorrow"),
        ("keep", "nowhere.toml", "--run-page", "127.0.0.1:1"),
        ("limits", "--up", "fast"),
    ],
    ids=" ".join,
)
def test_a_mistake_is_told_before_torch_or_a_server_is_loaded(arguments: tuple[str, ...]) -> None:
    """Torch takes seconds to import, and ten on a busy machine; only the agent serves pages."""
    code = (
        "import sys; from peer import cli; code = cli.run(sys.argv[1:]); "
        "print(code, {'torch', 'aiohttp'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.splitlines()[-1] == "2 set()", done.stderr
