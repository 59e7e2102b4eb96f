"""``python -m peer.extras.site.publishing JOB``: one export, in a process of its own.

The process ends with its parent. JOB is a ``Job`` in JSON. Events are lines of JSON on
standard output. Standard input is never written to: when it ends, the parent is gone.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from dht.errors import DhtError
from peer.errors import PeerError
from peer.extras.site.publishing.exporting import Job, publish

NICE = 10
"""Others on this machine go first: nobody waits for an export."""


def main(arguments: Sequence[str]) -> int:
    job = msgspec.json.decode(arguments[0], type=Job)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.nice(NICE)
    try:
        publish(job, _tell, now=time.time())
    except (PeerError, DhtError, OSError, MemoryError) as error:
        _tell("publish_failed", {"text": str(error) or type(error).__name__})
        return 1
    return 0


def _tell(name: str, fields: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps({"event": name, **fields}) + "\n")
    sys.stdout.flush()


def _end_with_parent() -> None:
    # Not by way of sys.stdin, whose lock would not be free when this process has done its work.
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
