"""Processor use of other programs: the total less that of all peers on the machine."""

from __future__ import annotations

from peer.guest.other_programs import (
    Process,
    ProcessorTimes,
    names_of_others,
    others_share,
    shoal_processes,
    times_now,
)

AGENT = ("python", "-P", "-m", "peer.agent", "3", "4", "5")
TRAINER = ("python", "train.py", "--config", "a.toml")


def process(parent: int, *command: str, busy_s: float = 0.0, began: float = 1.0) -> Process:
    return Process(parent, command, began, busy_s)


def test_trainers_their_ranks_and_all_that_they_started_count_as_shoal() -> None:
    seen = {
        1: process(0, "init"),
        10: process(1, "bash"),
        11: process(10, *TRAINER),
        12: process(11, *AGENT),
        13: process(12, "p2pd"),
        14: process(11, "python", "-c", "a worker that reads data"),
        20: process(10, *TRAINER),  # another rank, without an agent of its own
        30: process(1, "/opt/shoal/bin/python", "/opt/shoal/bin/shoal", "keep", "shoal://..."),
        31: process(30, "p2pd"),
        40: process(10, "cc1plus"),
        41: process(1, *AGENT),  # its trainer is gone; it ends by itself
    }
    assert set(shoal_processes(seen)) == {11, 12, 13, 14, 20, 30, 31}


def test_the_share_of_others_is_the_total_less_that_of_shoal() -> None:
    before = {
        5: process(1, *TRAINER, busy_s=100.0),
        6: process(5, *AGENT, busy_s=10.0),
        7: process(1, "game", busy_s=50.0),
        8: process(5, "worker", busy_s=1.0),
    }
    after = {
        5: process(1, *TRAINER, busy_s=105.0),
        6: process(5, *AGENT, busy_s=11.0),
        7: process(1, "game", busy_s=54.0),
        8: process(5, "another of the same number", busy_s=90.0, began=2.0),
    }
    share = others_share(
        ProcessorTimes(1000.0, 4000.0, before), ProcessorTimes(1010.0, 4020.0, after)
    )
    assert share == (10.0 - 6.0) / 20.0


def test_the_share_of_others_is_between_0_and_1() -> None:
    nothing = ProcessorTimes(10.0, 20.0, {})
    assert others_share(nothing, nothing) == 0.0
    assert others_share(nothing, ProcessorTimes(50.0, 30.0, {})) == 1.0


def test_this_machine_can_be_sampled() -> None:
    times = times_now()
    assert 0 < times.busy_s < times.all_s
    assert any("pytest" in " ".join(p.command) for p in times.processes.values())


def test_the_names_of_other_programs_are_without_folder_and_without_shoal() -> None:
    seen = {
        11: process(1, *TRAINER),
        12: process(11, *AGENT),
        20: process(1, "/usr/bin/Blender", "--background"),
        21: process(1, "wine", r"C:\\games\\Chess.EXE"),
        22: process(1, "python", "/opt/editor.py"),
        23: process(2),  # a thread of the kernel
    }
    names = names_of_others(seen)
    assert {"blender", "chess", "wine", "python", "editor.py"} <= names
    assert "train.py" not in names and "peer.agent" not in names
