"""Processor use of a peer's processes."""

from __future__ import annotations

import os
import time

from peer.guest.other_programs import OwnUse
from tests.processes import Processes


def test_the_use_of_a_process_and_its_children_is_a_share_of_all_processors(
    processes: Processes,
) -> None:
    use = OwnUse(os.getpid())
    assert use.share_since_last() is None  # nothing to compare with
    processes.python("-c", "while True: pass")
    use.share_since_last()  # the child is new: its time does not count yet
    began = time.process_time()
    while time.process_time() < began + 0.2:
        pass
    share = use.share_since_last()
    assert share is not None and 0.0 < share <= 1.0


def test_a_process_that_has_ended_uses_nothing(processes: Processes) -> None:
    child = processes.python("-c", "pass")
    child.wait(timeout=30)
    use = OwnUse(child.pid)
    use.share_since_last()
    time.sleep(0.01)
    assert use.share_since_last() == 0.0
