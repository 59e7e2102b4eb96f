"""Memory shared by two processes, also when one of them is killed."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import textwrap
from pathlib import Path

import numpy as np
import pytest

from peer.bridge.messages import LineBroken
from peer.bridge.shared_memory import (
    Adoption,
    AdoptionOrder,
    Base,
    MemoryUnavailable,
    SharedTensors,
    SlotState,
)
from tests.processes import Child

LAYOUT = bytes(range(32))


def memory(*sizes: int, coarse: bool = False) -> SharedTensors:
    return SharedTensors.create(sizes or (5, 3000), layout=LAYOUT, incarnation=77, coarse=coarse)


def run_on(made: SharedTensors, code: str) -> str:
    """What a second process with the same memory says."""
    prelude = (
        "import sys, time; from peer.bridge.shared_memory import *; "
        "m = SharedTensors(int(sys.argv[1]))"
    )
    program = f"{prelude}\n{textwrap.dedent(code)}"
    at = made.descriptor
    with Child("-c", program, str(at), pass_fds=(at,)) as other:
        return other.rest()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere slots keep their memory")
def test_an_empty_slot_takes_no_memory_and_its_neighbours_keep_theirs() -> None:
    made = memory(3000, 1 << 18, 3000)
    for fragment in range(3):
        made.slot(fragment).fill(fragment + 1)
    full = os.fstat(made.descriptor).st_blocks

    made.empty(1)
    assert full - os.fstat(made.descriptor).st_blocks == (4 << 18) // 512
    assert [float(made.slot(fragment).mean()) for fragment in (0, 2)] == [1.0, 3.0]

    made.fill(1)
    assert os.fstat(made.descriptor).st_blocks == full
    assert not made.slot(1).any()
    made.slot(1).fill(5.0)
    made.fill(1)
    assert (made.slot(1) == 5.0).all(), "only what is missing is filled"


def test_another_process_sees_slots_counters_and_state_words() -> None:
    made = memory(5, 3000, coarse=True)
    made.slot(1)[:] = np.arange(3000)
    made.report(step=4, tokens=90, step_time_s=0.25, batch_tokens_max=30)
    made.offer(1, mark=4, tokens=90)
    said = run_on(
        made,
        """
        print(m.incarnation, m.coarse, m.layout == bytes(range(32)), m.step, m.tokens)
        print(m.state(1).name, m.offered(1), float(m.slot(1).sum()))
        m.slot(1)[:] *= 2
        m.give(1, AdoptionOrder(Adoption.ADD, 3, b"l" * 32, None, 8))
        """,
    )
    assert said.splitlines() == ["77 True True 4 90", "OFFERED (4, 90) 4498500.0"]
    assert made.state(1) is SlotState.ADOPT
    assert made.order(1) == AdoptionOrder(Adoption.ADD, 3, b"l" * 32, None, 8)
    assert float(made.slot(1).sum()) == 2 * 4498500.0
    assert made.state(0) is SlotState.FREE


def test_an_adoption_moves_the_base_before_the_slot_is_passed_on() -> None:
    for coarse, turn in ((False, SlotState.FREE), (True, SlotState.BASE)):
        made = memory(coarse=coarse)
        assert made.base(0) is None
        order = AdoptionOrder(Adoption.ADD, 2, b"a" * 32, 10, 100)
        made.note_adoption(0, order, step=12, tokens=120)
        assert made.base(0) == Base(2, b"a" * 32, 10, 100)
        assert made.adopted_at(0) == (12, 120)
        assert made.state(0) is turn
        made.note_adoption(
            0, AdoptionOrder(Adoption.ADD, 3, b"b" * 32, None, 0), step=13, tokens=130
        )
        assert made.base(0) == Base(3, b"b" * 32, 10, 100)
        made.note_adoption(
            0, AdoptionOrder(Adoption.SET, 4, b"c" * 32, None, 0), step=14, tokens=140
        )
        assert made.base(0) == Base(4, b"c" * 32, 14, 140)


def test_slots_do_not_overlap() -> None:
    made = memory(5, 1, 1024, 3000)
    for fragment in range(4):
        made.slot(fragment)[:] = fragment + 1
    for fragment in range(4):
        assert set(made.slot(fragment).tolist()) == {fragment + 1.0}
    assert made.states() == [0, 0, 0, 0]


@pytest.mark.parametrize("killed", ["child", "parent"])
def test_nothing_is_left_behind_when_either_side_is_killed(killed: str, tmp_path: Path) -> None:
    """The file has no name, and its pages go with the last process that maps them."""
    places = [Path("/dev/shm"), Path(tempfile.gettempdir())]

    def left() -> set[str]:
        return {
            str(path)
            for place in places
            if place.is_dir()
            for path in place.iterdir()
            if "shoal-slots" in path.name
        }

    before = left()
    child_code = "import time; print('up', flush=True); time.sleep(60)"
    code = f"""
import os, subprocess, sys, time
from peer.bridge.shared_memory import SharedTensors
m = SharedTensors.create([1 << 20], layout=bytes(32), incarnation=1, coarse=False)
m.slot(0)[:] = 1
child = subprocess.Popen([sys.executable, "-c", {child_code!r}], pass_fds=(m.descriptor,))
print(child.pid, flush=True)
time.sleep(60)
"""
    with Child("-c", code, start_new_session=True) as parent:
        child = int(parent.line())
        assert parent.line() == "up"
        try:
            assert left() == before  # also while both are alive
            os.kill(child if killed == "child" else parent.pid, signal.SIGKILL)
        finally:
            os.killpg(parent.pid, signal.SIGKILL)
    assert left() == before


def test_memory_of_another_kind_is_refused(tmp_path: Path) -> None:
    for content in (b"", b"\x00" * 8192, b"short"):
        path = tmp_path / "other"
        path.write_bytes(content)
        descriptor = os.open(path, os.O_RDWR)
        with pytest.raises((ValueError, LineBroken)):
            SharedTensors(descriptor)
        os.close(descriptor)


def test_too_little_memory_is_an_error_that_says_how_much(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(MemoryUnavailable) as caught:
        memory(1 << 20)
    assert caught.value.needed_bytes > 4 << 20
    assert "No space left" in str(caught.value)
