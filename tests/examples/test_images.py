"""The steps of the Dockerfiles, carried out in a bare Debian, and what they have made, started.

Debian's package debootstrap makes that root. Packages come from PyPI.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.examples.dockerfile import build
from tests.processes import Processes
from tests.swarms.commands import until

ROOT = Path(__file__).parents[2]
DEBIAN = os.environ.get("DEBIAN_MIRROR", "http://deb.debian.org/debian")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(shutil.which("debootstrap") is None, reason="debootstrap is not installed"),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root may change its root folder"),
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stands for python:3.12-slim: Debian with its own Python, which is 3.11."""
    folder = tmp_path_factory.mktemp("debian")
    packages = "--include=python3,python3-venv,ca-certificates"
    command = ["debootstrap", "--variant=minbase", packages, "bookworm", str(folder), DEBIAN]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=900)
    (folder / "usr/bin/python").symlink_to("python3")
    for path in ("etc/resolv.conf", "etc/ssl/certs/ca-certificates.crt"):
        shutil.copy(f"/{path}", folder / path)
    return folder


INDEX = os.environ.get("TORCH_INDEX")
"""An index with a torch for processors: that of PyPI takes gigabytes."""

LOOPBACK = ["--listen", "/ip4/127.0.0.1/tcp/0", "--page", "off"]


@pytest.mark.parametrize(
    ("name", "arguments", "told"),
    [
        ("examples/bootstrap_host/Dockerfile", LOOPBACK, "/p2p/"),
        pytest.param(
            *("examples/launch/Dockerfile", ["run", "new"], "[model]"),
            marks=pytest.mark.skipif(INDEX is None, reason="TORCH_INDEX says where torch is"),
        ),
    ],
)
def test_an_image_runs_what_it_is_for_without_root_and_writes_to_its_volume_alone(
    name: str, arguments: list[str], told: str, base: Path, processes: Processes, tmp_path: Path
) -> None:
    image = build(ROOT / name, ROOT, base, tmp_path, {"TORCH_INDEX": INDEX or ""})
    assert image.user == "7700"
    for path in ("/opt/shoal", "/usr", "/"):
        probe = image.command(["sh", "-c", f"test -w {path}"])
        assert subprocess.run(probe, check=False).returncode != 0
    assert subprocess.run(image.command(["sh", "-c", "command -v cc gcc"]), check=False).returncode
    process = processes.start(image.command([*image.entry, *arguments]))
    until(lambda: told in processes.output_of(process), told, timeout_s=120)
    if process.poll() is None:
        process.terminate()
        process.wait(60)
