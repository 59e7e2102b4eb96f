"""The steps of the Dockerfiles, carried out in a bare Debian, and what they have made, started.

Debian's package debootstrap makes that root. Packages come from PyPI.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from peer.errors import ExitCode
from tests.examples.dockerfile import Image, build
from tests.processes import Processes, free_port
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


LISTEN = ["--listen", "/ip4/127.0.0.1/tcp/0"]


def index_of_torch(folder: Path, processes: Processes) -> str:
    """An index with a torch for processors: that of PyPI takes gigabytes.

    The one of ``TORCH_INDEX``, or one of what pip of this machine finds for the torch that is
    installed, if that is such a one.
    """
    if named := os.environ.get("TORCH_INDEX"):
        return named
    if not version("torch").endswith("+cpu"):
        pytest.skip("TORCH_INDEX says where a torch for processors is")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(folder)]
    pinned = ["--constraint", str(ROOT / "constraints.txt"), f"torch=={version('torch')}"]
    subprocess.run([*pip, *pinned], check=True, timeout=600)
    for wheel in [*folder.iterdir()]:
        of_package = folder / re.sub(r"[-_.]+", "-", wheel.name.partition("-")[0]).lower()
        of_package.mkdir(exist_ok=True)
        wheel.rename(of_package / wheel.name)
    server = ["-u", "-m", "http.server", "--bind", "127.0.0.1", "--directory", str(folder), "0"]
    said = processes.wait_for_line(processes.python(*server), "Serving", timeout_s=30)
    return re.findall(r"\((http:.*)\)", said)[0]


def assert_only_its_volume_is_open(image: Image) -> None:
    """It runs without root, and without a compiler."""
    assert image.user == "7700"
    for path in ("/opt/shoal", "/usr", "/"):
        probe = image.command(["sh", "-c", f"test -w {path}"])
        assert subprocess.run(probe, check=False).returncode != 0
    assert subprocess.run(image.command(["sh", "-c", "command -v cc gcc"]), check=False).returncode


def at(port: int, image: Image) -> list[str]:
    """The option for a page at this port of this machine, where its own may be taken, and ask there
    from now on."""
    (own,) = re.findall(r"127\.0\.0\.1:(\d+)/", " ".join(image.health))
    image.health = [word.replace(f":{own}/", f":{port}/") for word in image.health]
    return ["--page", f"127.0.0.1:{port}"]


def is_well(image: Image) -> bool:
    return subprocess.run(image.command(image.health), check=False).returncode == 0


def test_the_image_of_a_host_prints_its_address(
    base: Path, processes: Processes, tmp_path: Path
) -> None:
    image = build(ROOT / "examples/bootstrap_host/Dockerfile", ROOT, base, tmp_path, {})
    assert_only_its_volume_is_open(image)
    command = [*image.entry, *LISTEN, *at(free_port(), image)]
    process = processes.start(image.command(command))
    until(lambda: "/p2p/" in processes.output_of(process), "its address", timeout_s=120)
    assert is_well(image)
    process.terminate()
    assert process.wait(60) == ExitCode.DONE


def test_the_image_of_a_learner_trains_is_well_and_hands_over(
    base: Path, processes: Processes, tmp_path: Path
) -> None:
    arguments = {"TORCH_INDEX": index_of_torch(tmp_path / "wheels", processes)}
    image = build(ROOT / "examples/launch/Dockerfile", ROOT, base, tmp_path, arguments)
    assert_only_its_volume_is_open(image)
    shoal = [*image.entry, "run", "new", "/data/my.run.toml"]
    subprocess.run(image.command(shoal), check=True, timeout=120)
    shoal = [*image.entry, "start", "/data/my.run.toml", "--yes", "--json", *LISTEN]
    process = processes.start(image.command([*shoal, *at(free_port(), image)]))

    def trains() -> bool:
        return any(each["steps"] > 0 for each in processes.records_of(process, "progress"))

    until(trains, "it trains", timeout_s=180)
    assert is_well(image)
    process.terminate()
    assert process.wait(120) == ExitCode.INTERRUPTED
    (done,) = processes.records_of(process, "done")
    assert done["fates"]["processed"] > 0 and done["fates"]["pending"] == 0
    assert any((image.root / "data/peer").rglob("*.safetensors"))
