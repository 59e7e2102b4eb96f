"""Each command of ``SKILL.md`` does what the skill says, in the order in which it stands there."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.processes import Processes, free_port
from tests.swarms.commands import ANY_LOOPBACK_PORT, Command, is_ready

SKILL = Path(__file__).parents[2] / "examples/launch/agent/shoal/SKILL.md"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STAYS = ("join", "start", "bootstrap", "keep")
"""Commands that run until they are asked to end."""

WANTED = re.compile(r"shoal://RUN_ID\?seed=\.\.\.")


def sections() -> dict[str, list[list[str]]]:
    """The commands below each heading, as words without ``shoal``."""
    found: dict[str, list[list[str]]] = {}
    for part in re.split(r"^## ", SKILL.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        blocks = re.findall(r"^```bash\n(.*?)^```$", part, re.MULTILINE | re.DOTALL)
        lines = [shlex.split(line, comments=True) for line in "".join(blocks).splitlines()]
        assert all(words[0] == "shoal" for words in lines)
        found[part.partition("\n")[0]] = [words[1:] for words in lines]
    return found


def said_by(command: Command) -> dict[str, Any]:
    """The JSON object that it printed, whatever else went to stderr."""
    text = command.output
    printed: dict[str, Any] = json.JSONDecoder().raw_decode(text, text.index("{"))[0]
    return printed


class Agent:
    """Carries out the commands of a skill on a machine of its own."""

    def __init__(self, processes: Processes, home: Path) -> None:
        home.mkdir()
        self._processes, self._home = processes, home
        self.stay: dict[str, Command] = {}

    def run(self, words: list[str], link: str = "") -> Command:
        words = [WANTED.sub(link, word).replace("~", str(self._home)) for word in words]
        if words[0] == "bootstrap":  # a port that others of this machine may have
            words[words.index("--port") + 1] = str(free_port())
        environment = {
            "HOME": str(self._home),
            "XDG_DATA_HOME": str(self._home / "data"),
            "OMP_NUM_THREADS": "1",
            "SHOAL_LISTEN": "" if words[0] == "bootstrap" else ANY_LOOPBACK_PORT,
            "SHOAL_PAGE": "off",
        }
        with contextlib.chdir(self._home):
            command = Command(self._processes, words, environment=environment)
        if words[0] in STAYS:
            self.stay[words[0]] = command
            return command
        assert command.wait(timeout_s=120) == 0, f"{words}\n{command.output}"
        if "--json" in words:
            assert said_by(command), words
        return command

    def ready(self, name: str) -> Command:
        command = self.stay[name]
        command.wait_for(is_ready, f"`shoal {name}` is ready", timeout_s=180)
        return command


@pytest.fixture
def agents(processes: Processes, tmp_path: Path) -> Iterator[dict[str, Agent]]:
    yield {name: Agent(processes, tmp_path / name) for name in ("founder", "joiner")}


def test_every_command_of_the_skill_runs(agents: dict[str, Agent]) -> None:
    found = sections()
    founder, joiner = agents["founder"], agents["joiner"]
    link = ""
    for words in found.pop("Start a run"):
        if words[0] == "status":
            founder.ready("start")
        if words[0] in ("bootstrap", "keep"):
            continue  # for a machine with a public name: below
        printed = founder.run(words)
        if words[0] == "status":
            (shown,) = said_by(printed)["peers"]
            link = shown["link"]
    for words in found.pop("Join a run"):
        joiner.run(words, link)
        if words[0] == "join":
            joiner.ready("join")
    assert joiner.stay["join"].wait(timeout_s=120) == 0, "it has left as it was asked to"
    for words in sections()["Start a run"]:
        if words[0] in ("bootstrap", "keep"):
            joiner.run(words, link)
    joiner.stay["bootstrap"].wait_for(lambda record: "address" in record, "an address")
    joiner.ready("keep")
    for name in ("Look at a run, and take the model out", "When it ends"):
        for words in found.pop(name):
            joiner.run(words, link)
    assert not found, "a section of the skill that no test carries out"
    for command in (*joiner.stay.values(), *founder.stay.values()):
        if command.process.poll() is None:
            command.stop()
            command.wait(timeout_s=120)
