"""Finding a run file for a process without a network: locally, on the web, or at peers."""

from __future__ import annotations

import os
import subprocess
import sys

from peer.bridge.agent_process import agent_environment
from peer.errors import RunNotFound, SeedsElsewhere
from peer.joining.link import ELSEWHERE, Link, find_run
from peer.run_file.reading import RUN_FILE_MAX_BYTES
from peer.run_file.sections import RunFile

FETCH_TIMEOUT_S = 90.0


def read_run(where: str) -> RunFile:
    """The run of a file, an ``https`` address or a ``shoal://`` link."""
    return find_run(where, ask_peers=ask_peers).run


def ask_peers(link: Link) -> bytes:
    """The canonical run file of ``link``, fetched from peers by a child process. Not verified.

    Blocks for about ``FETCH_TIMEOUT_S`` at most.
    """
    if not link.seeds:
        raise RunNotFound(str(link), "the link has no seed to ask; ask for a link with one")
    child_end, own_end = os.pipe()  # closed with this process, however it ends
    command = [sys.executable, "-P", "-m", "peer.joining.fetch", str(link), str(child_end)]
    try:
        done = subprocess.run(
            command,
            env=agent_environment(os.environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            pass_fds=[child_end],
            timeout=FETCH_TIMEOUT_S + 30.0,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise RunNotFound("the link's seeds", f"no answer in {error.timeout:.0f} s") from error
    finally:
        os.close(child_end)
        os.close(own_end)
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        kind = SeedsElsewhere if done.returncode == ELSEWHERE else RunNotFound
        raise kind("the link's seeds", lines[-1] if lines else f"exit code {done.returncode}")
    if len(done.stdout) > RUN_FILE_MAX_BYTES:
        raise RunNotFound("the link's seeds", f"an answer of {len(done.stdout)} bytes")
    return done.stdout
