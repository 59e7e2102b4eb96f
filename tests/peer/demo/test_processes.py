"""Killing of processes, and reading of their output."""

from __future__ import annotations

import time
from pathlib import Path

import psutil

from peer.demo.processes import Output, kill_tree
from tests.processes import Child, descendants, still_running


def test_only_complete_json_lines_are_read(tmp_path: Path) -> None:
    log = tmp_path / "out"
    log.write_bytes(b'{"event": "a"}\n2026 WARNING something\n{"event": "b"')
    output = Output(log)
    assert [record["event"] for record in output.news()] == ["a"]
    with log.open("ab") as file:
        file.write(b"}\n")
    assert [record["event"] for record in output.news()] == ["b"]


def test_killing_a_process_takes_its_children_along() -> None:
    child = "import time; time.sleep(60)"
    parent = (
        "import subprocess, sys, time;"
        f"subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True);"
        "time.sleep(60)"
    )
    with Child("-c", parent) as started:
        family: list[psutil.Process] = []
        deadline = time.monotonic() + 60
        while not family and time.monotonic() < deadline:
            family = descendants(started.pid)
        assert family
        kill_tree(started.process)
        assert still_running(family, timeout_s=60) == []
