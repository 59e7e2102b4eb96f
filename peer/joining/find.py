"""Finding a run file for a process without a network: locally, on the web, or at peers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from threading import Timer

from peer.bridge.agent_process import agent_environment
from peer.errors import RunNotFound, SeedsElsewhere
from peer.joining.link import ELSEWHERE, MEANWHILE, Link, find_run
from peer.run_file.reading import RUN_FILE_MAX_BYTES
from peer.run_file.sections import RunFile

FETCH_TIMEOUT_S = 120.0
"""The fetching process ends by itself before that."""


def read_run(where: str) -> RunFile:
    """The run of a file, an ``https`` address or a ``shoal://`` link."""
    return find_run(where, ask_peers=ask_peers).run


def ask_peers(link: Link, tell: Callable[[str], None] = lambda reason: None) -> bytes:
    """The canonical run file of ``link``, fetched from peers by a child process. Not verified.

    Blocks for about ``FETCH_TIMEOUT_S`` at most. ``tell`` is called with each new reason why there
    is none yet.
    """
    if not link.seeds:
        raise RunNotFound(str(link), "the link has no seed to ask; ask for a link with one")
    child_end, own_end = os.pipe()  # closed with this process, however it ends
    command = [sys.executable, "-P", "-m", "peer.joining.fetch", str(link), str(child_end)]
    child = subprocess.Popen(
        command,
        env=agent_environment(os.environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=[child_end],
    )
    os.close(child_end)
    late = Timer(FETCH_TIMEOUT_S, child.kill)
    late.start()
    last = ""
    try:
        with child:
            assert child.stdout is not None and child.stderr is not None
            try:
                for line in child.stderr:
                    text = line.decode(errors="replace").strip()
                    if text.startswith(MEANWHILE):
                        tell(text.removeprefix(MEANWHILE))
                    else:
                        last = text or last
                content = child.stdout.read(RUN_FILE_MAX_BYTES + 1)  # a pipe holds as much
            except BaseException:
                child.kill()  # here: the end of the block waits for it
                raise
    finally:
        late.cancel()
        os.close(own_end)
    if child.returncode != 0:
        kind = SeedsElsewhere if child.returncode == ELSEWHERE else RunNotFound
        raise kind("the link's seeds", last or f"exit code {child.returncode}")
    if len(content) > RUN_FILE_MAX_BYTES:
        raise RunNotFound("the link's seeds", f"an answer of over {RUN_FILE_MAX_BYTES} bytes")
    return content
