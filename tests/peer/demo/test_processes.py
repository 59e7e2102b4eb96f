"""Killing of processes, and reading of their output."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil

from peer.demo.processes import Output, kill_tree


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
    process = subprocess.Popen([sys.executable, "-c", parent])
    deadline = time.monotonic() + 60
    family: list[psutil.Process] = []
    while not family and time.monotonic() < deadline:
        family = psutil.Process(process.pid).children(recursive=True)
    assert family
    kill_tree(process)
    _, alive = psutil.wait_procs(family, timeout=60)
    assert alive == []
