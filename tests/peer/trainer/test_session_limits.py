"""What a trainer does between its steps to keep to what the machine's owner allows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import peer
from peer.bridge.agent_link import Facts
from peer.trainer import session as running
from peer.trainer.session import Run


def facts(**limits: object) -> Facts:
    known: dict[str, object] = {
        "peer_id": "me",
        "link": "",
        "merged_tokens": 0,
        "global_tokens": 0,
        "versions": (),
        "peers": 1,
        "held_out_loss": None,
        "fates": {},
        "rounds": 0,
        "rounds_missed": 0,
        "bytes_sent": 0,
        "bytes_received": 0,
        "synchronous": False,
    }
    return Facts(**{**known, **limits})  # type: ignore[arg-type]


class Clock:
    """Time passes when somebody works or sleeps."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(running, "time", made)
    return made


@pytest.fixture
def run() -> Iterator[Run]:
    """One that nobody entered: no agent, no network."""
    model = torch.nn.Linear(2, 2)
    threads = torch.get_num_threads()
    yield peer.join("x.toml", model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    torch.set_num_threads(threads)


def test_a_share_of_the_time_is_worked_and_the_rest_is_slept(run: Run, clock: Clock) -> None:
    run._facts = facts(cpu_share=0.25, accelerator_share=0.1)
    run._pace()  # the step before was not under a limit
    for _ in range(3):
        clock.now += 2.0
        run._pace()
    assert clock.slept == [6.0, 6.0, 6.0]
    run._facts = facts(cpu_share=1.0)
    clock.now += 2.0
    run._pace()
    assert len(clock.slept) == 3, "the limit was taken away"


def test_what_an_accelerator_still_has_to_do_counts_as_work(
    run: Run, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def synchronize(device: torch.device) -> None:
        assert device == torch.device("cuda", 1)
        clock.now += 3.0  # queued kernels

    monkeypatch.setattr(torch.accelerator, "synchronize", synchronize)
    run._accelerator = torch.device("cuda", 1)
    run._facts = facts(cpu_share=1.0, accelerator_share=0.5)
    run._pace()
    clock.now += 0.5  # all that this thread does for a step
    run._pace()
    assert clock.slept == [3.5]
    run._facts = facts(cpu_share=1.0, accelerator_share=1.0)
    before = clock.now
    run._pace()
    assert clock.now == before, "without a limit it waits for nothing"


def test_threads_are_limited_and_given_back(run: Run, clock: Clock) -> None:
    torch.set_num_threads(3)
    run._facts = facts(threads=2)
    run._pace()
    assert torch.get_num_threads() == 2
    run._facts = facts(threads=16)
    run._pace()
    assert torch.get_num_threads() == 3, "never more than the program had"
    run._facts = facts(threads=1)
    run._pace()
    assert torch.get_num_threads() == 1
    run._facts = facts()
    run._pace()
    assert torch.get_num_threads() == 3
    torch.set_num_threads(2)  # the program's own business again
    run._pace()
    assert torch.get_num_threads() == 2
