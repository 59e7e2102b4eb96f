"""The release before this one, as its users have it installed: code alone, in a folder.

``tests/golden/protocol_1/shoal.tar.xz`` has the packages of the last commit that spoke protocol 1
only, without ``peer/lab``. ``python -m tests.integration.previous_release COMMIT FILE`` writes such
a file: do it with the last commit of a release when the protocol number is raised after it.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
from pathlib import Path

ARCHIVE = Path(__file__).parent.parent / "golden" / "protocol_1" / "shoal.tar.xz"
PACKAGES = ("peer", "dht", "averaging")
LEFT_OUT = ("peer/lab/",)


def unpack(directory: Path) -> Path:
    """Unpack the release; returns the folder that has to be first in ``PYTHONPATH``."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(directory, filter="data")
    return directory


def write_archive(commit: str, file: Path) -> None:
    """Write the packages of a commit of this repository."""
    command = ["git", "archive", "--format=tar", commit, *PACKAGES]
    made = subprocess.run(command, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(made)) as whole, tarfile.open(file, "w:xz") as archive:
        for member in sorted(whole.getmembers(), key=lambda each: each.name):
            if member.isfile() and not member.name.startswith(LEFT_OUT):
                archive.addfile(member, whole.extractfile(member))


if __name__ == "__main__":
    write_archive(sys.argv[1], Path(sys.argv[2]))
