"""Finding a run file: here, on the web, or at peers, for a process without a network of its own."""

from __future__ import annotations

import os
import subprocess
import sys

from peer.bridge.agent_link import agent_environment
from peer.errors import RunNotFound
from peer.joining.link import Link, find_run
from peer.run_file.reading import RUN_FILE_MAX_BYTES
from peer.run_file.sections import RunFile

FETCH_TIMEOUT_S = 90.0


def read_run(where: str) -> RunFile:
    """The run that a file, an ``https`` address or a ``shoal://`` link stands for."""
    return find_run(where, ask_peers=ask_peers).run


def ask_peers(link: Link) -> bytes:
    """The canonical run file of ``link``, from whoever is behind its seeds.

    Blocks for at most about ``FETCH_TIMEOUT_S``. What comes back is not judged here.
    """
    line_at, our_end = os.pipe()  # closed with this process, however it ends
    command = [sys.executable, "-P", "-m", "peer.joining.fetch", str(link), str(line_at)]
    try:
        done = subprocess.run(
            command,
            env=agent_environment(os.environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            pass_fds=[line_at],
            timeout=FETCH_TIMEOUT_S + 30.0,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise RunNotFound("the link's seeds", f"no answer in {error.timeout:.0f} s") from error
    finally:
        os.close(line_at)
        os.close(our_end)
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise RunNotFound("the link's seeds", lines[-1] if lines else f"code {done.returncode}")
    if len(done.stdout) > RUN_FILE_MAX_BYTES:
        raise RunNotFound("the link's seeds", f"an answer of {len(done.stdout)} bytes")
    return done.stdout
