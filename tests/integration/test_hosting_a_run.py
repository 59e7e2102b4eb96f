"""``shoal host``: a killed part comes back, and all of it ends together."""

from __future__ import annotations

import contextlib
import json
import signal
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from peer import cli
from tests.processes import Processes, descendants, free_port, still_running
from tests.swarms.commands import until

pytestmark = pytest.mark.timeout(300)

WAIT_S = 120.0


def get(url: str) -> Mapping[str, Any] | None:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            answer: Mapping[str, Any] = json.load(response)
    except urllib.error.HTTPError as error:
        answer = json.load(error)
    except OSError:
        return None
    return answer


def part(group: psutil.Process, command: str) -> psutil.Process | None:
    for child in group.children():
        with contextlib.suppress(psutil.ZombieProcess):
            if command in child.cmdline():
                return child
    return None


@pytest.mark.slow  # three processes that import torch
def test_a_run_is_hosted_by_one_command(processes: Processes, tmp_path: Path) -> None:
    run_file = tmp_path / "my.run.toml"
    shoal = ("-m", "peer.cli")
    assert cli.run(["run", "new", str(run_file)]) == 0
    port, page = free_port(), free_port()
    hosting = processes.python(
        *(*shoal, "host", str(run_file), "--domain", "127.0.0.1", "--port", str(port)),
        *("--page", f"127.0.0.1:{page}", "--run-page", f"127.0.0.1:{free_port()}"),
        *("--data-dir", str(tmp_path / "host")),
    )
    link = processes.wait_for_line(hosting, "shoal://", timeout_s=WAIT_S)
    assert f"/ip4/127.0.0.1/tcp/{port}/" in link
    health = f"http://127.0.0.1:{page}/readyz"

    learner = processes.python(
        *(*shoal, "start", str(run_file), "--seed", link.partition("seed=")[2].strip()),
        *("--directory", str(tmp_path / "learner"), "--listen", "/ip4/127.0.0.1/tcp/0"),
        *("--page", "off", "--threads", "1", "--yes", "--json"),
    )
    until(
        lambda: "caught up" in processes.output_of(hosting), "the keeper's state", timeout_s=WAIT_S
    )
    group = psutil.Process(hosting.pid)
    killed = part(group, "keep")
    assert killed is not None
    killed.kill()
    until(
        lambda: (again := part(group, "keep")) is not None and again.pid != killed.pid,
        "the keeper is started again",
        timeout_s=WAIT_S,
    )

    def checks() -> Mapping[str, Any]:
        return {check["name"]: check for check in (get(health) or {"checks": []})["checks"]}

    until(lambda: checks().get("keeper", {}).get("ok"), "the keeper is ready", timeout_s=WAIT_S)
    assert "started 2 times" in checks()["keeper"]["reason"]
    below = descendants(hosting.pid)
    learner.send_signal(signal.SIGTERM)
    hosting.send_signal(signal.SIGTERM)
    assert hosting.wait(WAIT_S) == 0, processes.output_of(hosting)[-3000:]
    assert not still_running(below, timeout_s=WAIT_S)
    assert learner.wait(WAIT_S) in (0, 130)
