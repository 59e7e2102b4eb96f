"""``shoal bootstrap`` and ``shoal doctor`` as users start them; the commands for hosts."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import pytest
import yaml

from peer import cli
from peer.extras.hosting.bootstrap import DEFAULT_PORT
from tests.processes import Child, Processes, descendants, free_port, still_running

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "bootstrap_host"
SHOAL = (sys.executable, "-m", "peer.cli")
WAIT_S = 60.0


@dataclass
class Server:
    """``shoal bootstrap`` as a process, with separate stdout and stderr."""

    child: Child
    errors: Path

    def line(self) -> str:
        line = self.child.line()
        assert line, self.errors.read_text()
        return line

    def stop(self, number: signal.Signals, *, group: bool = False) -> tuple[int, str]:
        """Signal it or, like a terminal, its group; returns its exit code and remaining output."""
        kill = os.killpg if group else os.kill
        kill(self.child.pid, number)
        return self.end()

    def end(self) -> tuple[int, str]:
        """Its exit code and remaining output."""
        rest = self.child.rest()
        return self.child.wait(WAIT_S), rest


@pytest.fixture
def start(tmp_path: Path) -> Iterator[object]:
    with ExitStack() as stack:

        def starter(*arguments: str, program: Sequence[str] = SHOAL) -> Server:
            errors = tmp_path / f"errors-{len(list(tmp_path.glob('errors-*')))}.txt"
            with errors.open("w") as file:
                child = Child(
                    *("bootstrap", "--data-dir", str(tmp_path / "data"), *arguments),
                    program=program,
                    stderr=file,
                    start_new_session=True,
                )
            return Server(stack.enter_context(child), errors)

        yield starter


def local(port: int) -> tuple[str, ...]:
    return ("--listen", f"/ip4/127.0.0.1/tcp/{port}", "--page", "off")


def shoal(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Run a command in this process, which has imported most of it. Exit code and output."""
    capfd.readouterr()
    code = cli.run(arguments)
    return code, *capfd.readouterr()


@pytest.mark.slow  # tests/peer/hosting; test_daemon.py: after SIGKILL nothing is left
def test_a_bootstrap_peer_from_its_first_line_to_kill_minus_9_and_the_next_start(
    start: object, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One life of one peer: each start of the command takes three seconds of processor time."""
    assert callable(start)
    port, page = free_port(), free_port()
    server = start(*local(port))
    address = server.line()
    assert re.fullmatch(rf"/ip4/127\.0\.0\.1/tcp/{port}/p2p/12D3KooW\w+", address)
    a_second_one_on_the_same_port_says_so(start(*local(port)), port)
    assert server.child.process.poll() is None, "the second one has disturbed it"
    the_doctor_finds_the_seed_that_is_up(capfd, address, port)
    assert server.stop(signal.SIGINT, group=True) == (0, "")
    log = server.errors.read_text()
    assert "bootstrap_up" in log
    assert "bootstrap_stops" in log
    assert "daemon_lost" not in log, "the daemon heard the terminal's Ctrl-C"
    assert "Traceback" not in log

    killed = start(*local(port))
    assert killed.line() == address
    below = descendants(killed.child.pid)
    assert below, "a daemon runs below it"
    killed.stop(signal.SIGKILL)
    assert not still_running(below, timeout_s=WAIT_S), "the daemon outlived its owner"

    again = start("--listen", f"/ip4/127.0.0.1/tcp/{port}", "--page", f"127.0.0.1:{page}", "--json")
    found = json.loads(again.line())
    assert found["address"] == found["addresses"][0] == address
    assert found["address"].endswith(found["peer_id"])
    assert found["data_dir"] == str(tmp_path / "data")
    for path, says in (("healthz", "alive"), ("readyz", "daemon"), ("metrics", "shoal_peers 0.0")):
        with urllib.request.urlopen(found["page"] + path, timeout=WAIT_S) as response:
            assert says in response.read().decode()
    assert again.stop(signal.SIGTERM) == (0, "")
    assert "bootstrap_stops" in again.errors.read_text()


def a_second_one_on_the_same_port_says_so(second: Server, port: int) -> None:
    assert second.end() == (2, "")
    complaint = second.errors.read_text()
    assert complaint.count("\n") == 1
    assert f"port {port} is taken" in complaint


def the_doctor_finds_the_seed_that_is_up(
    capfd: pytest.CaptureFixture[str], address: str, port: int
) -> None:
    gone = address.replace(f"/tcp/{port}/", f"/tcp/{free_port()}/")
    _, output, errors = shoal(capfd, "doctor", address, gone, "--json")
    assert errors == ""
    findings = json.loads(output)["findings"]
    seeds = {finding["text"].split()[0].rstrip(":"): finding for finding in findings[6:8]}
    assert seeds[address]["state"] == "ok"
    assert seeds[address]["took_s"] > 0
    names = [finding["check"] for finding in findings]
    assert names == [
        *("disk", "memory", "torch", "codecs", "listening port", "libp2p daemon"),
        *("seed", "seed", "DHT", "reachability", "clock"),
    ]
    states = {finding["check"]: finding["state"] for finding in findings}
    assert states["DHT"] == states["clock"] == "ok"


WITHOUT_THE_REST = f"""
import importlib.metadata, re, sys
from importlib.machinery import PathFinder
from pathlib import Path

listed = Path({str(EXAMPLE / "requirements.txt")!r}).read_text().splitlines()
listed = {{"shoal", *(line for line in listed if line and not line.startswith("#"))}}
plain = lambda name: re.sub("[-_.]+", "-", name).lower()
origin = importlib.metadata.packages_distributions()

class Listed(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        packages = origin.get(name.partition(".")[0], ["shoal"])
        there = listed & set(map(plain, packages))
        return super().find_spec(name, path, target) if there else None

sys.meta_path[sys.meta_path.index(PathFinder)] = Listed
from peer.cli import run
sys.exit(run(sys.argv[1:]))
"""
"""The command line where only the packages of a host are installed."""


@pytest.mark.slow  # that no command loads torch unasked: tests/peer/cli/test_cli.py
def test_a_host_needs_the_packages_of_its_list_and_no_torch(start: object, tmp_path: Path) -> None:
    assert callable(start)

    def without(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", WITHOUT_THE_REST, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)

    server = start(*local(free_port()), program=(sys.executable, "-c", WITHOUT_THE_REST))
    found = json.loads(without("doctor", server.line(), "--json").stdout)["findings"]
    states = {finding["check"]: finding["state"] for finding in found}
    assert states["seed"] == states["DHT"] == "ok"
    refused = without("demo")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "needs torch" in refused.stderr
    assert server.stop(signal.SIGTERM) == (0, "")


# BOOTSTRAP.md and the pages for hosts.

TEXT = "\n".join(
    (ROOT / name).read_text(encoding="utf-8")
    for name in ("BOOTSTRAP.md", "docs/host/looking-after.md", "docs/host/monitoring.md")
)


@dataclass(frozen=True)
class Command:
    """A command of the text, and the first line of the output shown below it, if any."""

    text: str
    shows: str | None


def commands(text: str) -> list[Command]:
    """The commands of all ``console`` blocks: lines that begin with ``$ ``."""
    found: list[Command] = []
    for block in re.findall(r"^```console\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        lines = block.splitlines()
        for line, following in zip(lines, [*lines[1:], None], strict=True):
            if line.startswith("$ "):
                shows = following if following and not following.startswith("$ ") else None
                found.append(Command(line.removeprefix("$ "), shows))
    return found


class Reader:
    """Runs the commands of the text with free ports and loopback addresses."""

    def __init__(self, processes: Processes, home: Path) -> None:
        self._processes = processes
        self._home = home
        self._server: subprocess.Popen[bytes] | None = None
        self._peer_id = ""
        self._ports = {"7700": str(free_port()), "9100": str(free_port())}
        bin_folder = home / "bin"
        bin_folder.mkdir()
        script = bin_folder / "shoal"
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m peer.cli "$@"\n')
        script.chmod(0o755)
        self._environment = {
            "HOME": str(home),
            "XDG_DATA_HOME": "",
            "PATH": f"{bin_folder}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
        }

    def here(self, text: str) -> str:
        for port, free in self._ports.items():
            text = text.replace(port, free)
        text = text.replace("seed1.example.org", "localhost").replace("203.0.113.7", "127.0.0.1")
        return text.replace("12D3KooW...", self._peer_id) if self._peer_id else text

    def do(self, command: Command) -> None:
        serves = command.text.startswith("shoal bootstrap") and "--install" not in command.text
        if serves:
            self._serve(command)
            return
        done = subprocess.run(
            ["bash", "-c", self.here(command.text)],
            cwd=self._home,
            env={**os.environ, **self._environment},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, f"{command.text}: {done.stdout}{done.stderr}"

    def _serve(self, command: Command) -> None:
        self.stop()
        text = self.here(command.text)
        # On loopback only: a test opens no port to the network.
        text += f" --listen /ip4/127.0.0.1/tcp/{self._ports['7700']}"
        text += f" --page 127.0.0.1:{self._ports['9100']}"
        self._server = self._processes.start(
            ["bash", "-c", f"cd {self._home} && exec {text}"], environment=self._environment
        )
        line = self._processes.wait_for_line(self._server, "/", timeout_s=WAIT_S)
        peer_id = line.rpartition("/")[2]
        assert self._peer_id in ("", peer_id), "the address changed over a restart"
        self._peer_id = peer_id
        assert command.shows is not None
        assert line == self.here(command.shows)

    def stop(self) -> None:
        if self._server is not None:
            self._server.send_signal(signal.SIGINT)
            assert self._server.wait(WAIT_S) == 0
            self._server = None


@pytest.mark.skipif(shutil.which("curl") is None, reason="the text uses curl")
@pytest.mark.slow
def test_every_command_of_the_text_works_in_the_order_of_the_text(
    processes: Processes, tmp_path: Path
) -> None:
    todo = commands(TEXT)
    assert len(todo) > 8
    reader = Reader(processes, tmp_path)
    for command in todo:
        reader.do(command)
    reader.stop()
    assert (tmp_path / "shoal-bootstrap.service").read_text().startswith("[Unit]")
    assert (tmp_path / "seed1.key").stat().st_mode & 0o777 == 0o600


def logged_events(*modules: str) -> set[str]:
    """Events that these modules log at INFO or above, or report to the owner of a presence."""
    pattern = r'(?:_logger\.(?:info|warning|error)|events\.tell)\(\s*f?"(\w+)[ "]'
    return {
        event for module in modules for event in re.findall(pattern, (ROOT / module).read_text())
    }


def test_the_text_explains_every_line_that_can_be_logged() -> None:
    events = logged_events(
        *(str(path.relative_to(ROOT)) for path in (ROOT / "dht" / "presence").glob("*.py")),
        "dht/libp2p/hivemind_host.py",
        "dht/libp2p/hivemind_daemon.py",
        "dht/libp2p/hivemind_directory.py",
        "peer/extras/hosting/bootstrap.py",
    )
    assert len(events) > 12
    assert [event for event in sorted(events) if f"`{event}`" not in TEXT] == []


def test_the_text_explains_every_metric() -> None:
    source = (ROOT / "peer/extras/hosting/bootstrap.py").read_text()
    for name in re.findall(r'"(shoal_\w+)"', source):
        assert re.search(rf"`{name}(_total)?(\{{\w+\}})?`", TEXT), name


@pytest.mark.parametrize("name", ["Dockerfile", "compose.yaml", "prometheus.yml", "README.md"])
def test_the_example_host_has_what_its_text_lists(name: str) -> None:
    assert (EXAMPLE / name).is_file()
    assert f"`{name}`" in (EXAMPLE / "README.md").read_text() or name == "README.md"


def test_the_unit_of_the_example_is_the_one_that_the_command_prints(
    capfd: pytest.CaptureFixture[str],
) -> None:
    shown = (EXAMPLE / "shoal-bootstrap.service").read_text()
    arguments = ("bootstrap", "--install-service", "--announce", "seed1.example.org")
    code, printed, _ = shoal(capfd, *arguments)
    assert code == 0
    printed = printed.replace(str(Path(sys.executable).absolute()), "/opt/shoal/bin/python")
    # Where shoal is installed in a home folder, as it may be here, its service reads that.
    assert shown == printed.replace("ProtectHome=read-only", "ProtectHome=yes")


def instructions(name: str) -> list[str]:
    """The arguments of each line of the Dockerfile with this instruction, in order."""
    text = (EXAMPLE / "Dockerfile").read_text()
    return re.findall(rf"^{name} (.+)$", re.sub(r"\\\n\s*", "", text), re.MULTILINE)


def entry_words() -> Sequence[str]:
    (entry,) = instructions("ENTRYPOINT")
    words: Sequence[str] = json.loads(entry)
    assert words[:2] == ["shoal", "bootstrap"]
    return words[1:]


def test_the_container_is_built_from_what_there_is_without_torch_and_runs_without_root() -> None:
    for copied in instructions("COPY"):
        if not copied.startswith("--from="):
            assert all((ROOT / source).exists() for source in copied.split()[:-1]), copied
    packed = tomllib.loads((ROOT / "pyproject.toml").read_text())
    documents = chain(*packed["tool"]["setuptools"]["data-files"].values())
    copied_files = " ".join(instructions("COPY")).split()
    missing = [name for name in documents if name.partition("/")[0] not in copied_files]
    assert missing == [], "pip would end with: can't copy"
    (install,) = (line for line in instructions("RUN") if "pip install" in line)
    assert "--no-deps" in install and "--requirement requirements.txt" in install
    assert "--constraint constraints.txt" in install
    (user,) = instructions("USER")
    assert any("useradd" in line and f"--uid {user} " in line for line in instructions("RUN"))
    assert instructions("STOPSIGNAL") == ["SIGTERM"]  # which is tested above
    (check,) = instructions("HEALTHCHECK")
    page = entry_words()[entry_words().index("--page") + 1]
    assert f"http://127.0.0.1:{page.rpartition(':')[2]}/healthz" in check


def test_the_container_and_the_additions_of_compose_are_a_command_that_exists(
    capfd: pytest.CaptureFixture[str],
) -> None:
    host = yaml.safe_load((EXAMPLE / "compose.yaml").read_text())["services"]["bootstrap"]
    added = [
        re.sub(r"\$\{SEED_NAME:[^}]*\}", "seed1.example.org", word) for word in host["command"]
    ]
    # Parses every option, and starts nothing.
    words = [*entry_words(), *added, "--install-service"]
    code, printed, errors = shoal(capfd, *words)
    assert code == 0, errors
    assert "--announce seed1.example.org " in printed
    assert shoal(capfd, *words, "--anounce", "x")[0] == 2, "a check that any option passes"


def test_compose_publishes_and_keeps_what_the_container_uses() -> None:
    services = yaml.safe_load((EXAMPLE / "compose.yaml").read_text())["services"]
    host = services["bootstrap"]
    assert (EXAMPLE / host["build"]["context"] / host["build"]["dockerfile"]).samefile(
        EXAMPLE / "Dockerfile"
    )
    words = entry_words()
    data, page = (words[words.index(option) + 1] for option in ("--data-dir", "--page"))
    page_port = page.rpartition(":")[2]
    (listening,) = instructions("EXPOSE")
    assert listening == f"{DEFAULT_PORT}/tcp"
    assert host["ports"] == [
        f"{DEFAULT_PORT}:{listening}",
        f"127.0.0.1:{page_port}:{page_port}/tcp",
    ]
    assert instructions("VOLUME") == [data]
    assert [volume.partition(":")[2] for volume in host["volumes"]] == [data]
    assert host["read_only"] and host["cap_drop"] == ["ALL"]
    assert host["tmpfs"] == ["/tmp"], "the daemon's sockets lie there"
    asked = yaml.safe_load((EXAMPLE / "prometheus.yml").read_text())["scrape_configs"]
    assert [job["static_configs"] for job in asked] == [[{"targets": [f"bootstrap:{page_port}"]}]]
    *mounted, _ = (each.partition(":")[0] for each in services["prometheus"]["volumes"])
    assert mounted == ["./prometheus.yml", "./rules.yml"]
