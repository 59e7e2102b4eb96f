"""Pauses and thread limits that keep a trainer to what the machine's owner allows."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

from peer.bridge.messages import Report
from peer.rules.limits import Limits
from peer.run_file.reading import parse
from peer.status import PeerStatus
from peer.trainer import pacing
from peer.trainer.pacing import GivenBack, Pacer, SynchronousRounds


class Clock:
    """A clock that advances by work and by sleep."""

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
    monkeypatch.setattr(pacing, "time", made)
    return made


@pytest.fixture
def pacer() -> Iterator[Pacer]:
    threads = torch.get_num_threads()
    yield Pacer(pace_s=0.0, device=torch.device("cpu"))
    torch.set_num_threads(threads)


def test_a_share_of_the_time_is_worked_and_the_rest_is_slept(pacer: Pacer, clock: Clock) -> None:
    limited = Limits(cpu_share=0.25, gpu_share=0.1)
    pacer.pause(limited)  # the step before was not under a limit
    for _ in range(3):
        clock.now += 2.0
        pacer.pause(limited)
    assert clock.slept == [6.0, 6.0, 6.0]
    clock.now += 2.0
    pacer.pause(Limits())
    assert len(clock.slept) == 3, "the limit was taken away"


def test_queued_work_of_an_accelerator_counts_as_work(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def synchronize(device: torch.device) -> None:
        assert device == torch.device("cuda", 1)
        clock.now += 3.0  # queued kernels

    monkeypatch.setattr(torch.accelerator, "synchronize", synchronize)
    pacer = Pacer(pace_s=0.0, device=torch.device("cuda", 1))
    limited = Limits(gpu_share=0.5)
    pacer.pause(limited)
    clock.now += 0.5  # all that this thread does for a step
    pacer.pause(limited)
    assert clock.slept == [3.5]
    before = clock.now
    pacer.pause(Limits())
    assert clock.now == before, "without a limit it waits for nothing"


def test_threads_are_limited_and_given_back(pacer: Pacer, clock: Clock) -> None:
    torch.set_num_threads(3)
    pacer.pause(Limits(threads=2))
    assert torch.get_num_threads() == 2
    pacer.pause(Limits(threads=16))
    assert torch.get_num_threads() == 3, "never more than the program had"
    pacer.pause(Limits(threads=1))
    assert torch.get_num_threads() == 1
    pacer.pause(Limits())
    assert torch.get_num_threads() == 3
    torch.set_num_threads(2)  # the program's own business again
    pacer.pause(Limits())
    assert torch.get_num_threads() == 2


def test_code_for_an_accelerator_is_not_compiled_anew_for_another_number_of_threads(
    clock: Clock,
) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    doubled = torch.compile(lambda values: 2 * values, backend=backend)
    pacer = Pacer(pace_s=0.0, device=torch.device("cuda"))
    try:
        for wanted in (None, 2, 1):
            pacer.pause(Limits(threads=wanted))
            doubled(torch.ones(2))
    finally:
        torch.set_num_threads(threads)
    assert len(graphs) == 1


class Rounds:
    """A trainer of two fragments with a cycle of ten steps, and the rounds that it waited for."""

    def __init__(self, *, has_company: bool = True) -> None:
        self.steps, self.merged = 0, [0, 0]
        self.waited: list[tuple[int, int]] = []
        self.fails = False
        self._waits = SynchronousRounds(
            parse("[outer]\nsteps_per_cycle = 10\noverlap_steps = 0"),
            2,
            learner=self,  # type: ignore[arg-type]
            agent=SimpleNamespace(ring=lambda: None),  # type: ignore[arg-type]
            news=SimpleNamespace(  # type: ignore[arg-type]
                report=Report(status=PeerStatus(phase="ready"), others_train=has_company)
            ),
            leaving=lambda: False,
        )

    def merged_steps(self, fragment: int) -> int:
        return self.merged[fragment]

    def wait_for_round(self, fragment: int, **_: object) -> None:
        self.waited.append((fragment, self.steps))
        if not self.fails:
            self.merged[fragment] = self.steps

    def train(self, until: int) -> list[tuple[int, int]]:
        """Train up to a step. Returns the fragments that it waited for meanwhile, and where."""
        self.waited.clear()
        while self.steps < until:
            self.steps += 1
            self._waits.wait()
        return list(self.waited)


def test_each_fragment_is_waited_for_once_in_a_cycle() -> None:
    rounds = Rounds()
    assert rounds.train(20) == [(1, 5), (0, 10), (1, 15), (0, 20)]


def test_a_round_to_which_another_peer_called_begins_a_cycle() -> None:
    """Two synchronous peers out of step made two rounds in each cycle, of eight steps and two."""
    rounds = Rounds()
    rounds.train(8)
    rounds.merged[0] = 8
    assert [at for fragment, at in rounds.train(40) if fragment == 0] == [18, 28, 38]


def test_a_round_that_comes_to_nothing_is_waited_for_again_after_a_cycle() -> None:
    rounds = Rounds()
    rounds.fails = True
    assert rounds.train(20) == [(1, 5), (0, 10), (1, 15), (0, 20)]


def test_nothing_is_waited_for_alone() -> None:
    assert Rounds(has_company=False).train(40) == []


def learner() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad(set_to_none=False)
    model(torch.arange(12.0).reshape(3, 4)).square().sum().backward()
    optimizer.step()


def test_training_goes_on_with_the_same_tensors_and_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without an accelerator here: every tensor counts as one that is on it."""
    monkeypatch.setattr(pacing, "is_away", lambda tensor: True)
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, device: tensor.clone())
    model, optimizer = learner()
    step(model, optimizer)
    twin, twins = copy.deepcopy((model, optimizer))
    objects = [*map(id, model.parameters())]
    places = {each.data_ptr() for each in (*model.parameters(), *model.buffers())}
    released = []
    held = GivenBack(model, [optimizer], release=lambda: released.append(True))
    held.give()
    held.give()
    moved = {each.data_ptr() for each in (*model.parameters(), *model.buffers())}
    assert not places & moved and released == [True]
    with torch.no_grad():  # what is merged meanwhile
        for each, same in zip(model.parameters(), twin.parameters(), strict=True):
            each.add_(1.0)
            same.add_(1.0)
    held.take()
    held.take()
    assert [*map(id, model.parameters())] == objects
    step(model, optimizer)
    step(twin, twins)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, twin.state_dict()[name]), name


def test_on_a_processor_there_is_nothing_to_give_back() -> None:
    model, optimizer = learner()
    held = GivenBack(model, [optimizer], release=lambda: pytest.fail("nothing to release"))
    held.give()
    held.take()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_memory_of_a_gpu_is_free_while_training_rests() -> None:
    model = torch.nn.Linear(4096, 4096, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    inputs = torch.randn(8, 4096, device="cuda")
    model(inputs).sum().backward()
    optimizer.step()
    held = GivenBack(model, [optimizer])
    before = torch.cuda.memory_reserved()
    held.give()
    assert torch.cuda.memory_reserved() < before - 4 * 4096**2
    held.take()
    model(inputs).sum().backward()
    optimizer.step()
