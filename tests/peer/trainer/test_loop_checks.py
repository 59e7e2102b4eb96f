"""Mistakes of training loops: what is told, when, and what it costs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from peer.errors import LoopWarning
from peer.run_file.reading import parse
from peer.run_file.schedule import Rates
from peer.trainer.loop_checks import (
    LOGS_LOOKED_AT_MIN,
    LOGS_MAX,
    NO_EXCHANGE_S,
    OTHERS_STEPS_MAX,
    FirstBatch,
    LoopChecks,
    restart_broken_moments,
    warn_unless_entered,
)
from tests.peer.trainer.custom_run import toml

CYCLE = 5


class Loop:
    """A loop with its checks, and a clock that the test moves."""

    def __init__(self, *, auto: bool = True, cycle: int = CYCLE) -> None:
        self.now = 0.0
        self.told: list[tuple[str, str]] = []
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2))
        self.model[0].bias.requires_grad_(False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.checks = LoopChecks(
            self.model,
            (self.optimizer,),
            auto=auto,
            cycle=cycle,
            tell=lambda mistake, text: self.told.append((mistake, text)),
            clock=lambda: self.now,
        )

    def steps(self, count: int, **facts: Any) -> None:
        given = {"tokens": 8, "exchanged": True, "alone": False} | facts
        for _ in range(count):
            self.checks.stepped(**given)

    @contextmanager
    def watched(self) -> Iterator[None]:
        with ExitStack() as stack:
            self.checks.watch_optimizers(stack)
            yield


def test_a_loop_without_mistakes_hears_nothing() -> None:
    loop = Loop()
    with loop.watched():
        other = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        for _ in range(40):
            other.step()  # of another model
            loop.optimizer.step()
            loop.steps(1)
            loop.checks.logged()
            loop.checks.check_loss(0.5)
    assert loop.told == []


def test_another_optimizer_that_trains_the_model_instead_is_told_at_once() -> None:
    loop = Loop()
    with loop.watched(), pytest.warns(LoopWarning, match="does not step any more: AdamW has made"):
        other = torch.optim.AdamW(loop.model.parameters())
        for _ in range(OTHERS_STEPS_MAX):
            other.step()
        assert loop.told == []
        for _ in range(3):
            other.step()
    assert [mistake for mistake, _ in loop.told] == ["optimizer"]
    other.step()  # no longer watched


def test_an_optimizer_around_another_one_is_none_too_many() -> None:
    loop = Loop()
    inner = torch.optim.SGD(loop.model.parameters(), lr=0.1)
    with loop.watched():
        for _ in range(3 * OTHERS_STEPS_MAX):
            inner.step()
            loop.steps(1)
    assert loop.told == []


def test_steps_without_run_step_are_told_where_the_loop_has_to_call_it() -> None:
    loop = Loop(auto=False)
    with loop.watched(), pytest.warns(LoopWarning, match=r"call run\.step\(tokens="):
        for _ in range(OTHERS_STEPS_MAX + 1):
            loop.optimizer.step()


def test_batches_without_a_step_are_told() -> None:
    loop = Loop()
    for _ in range(LOGS_MAX):
        loop.checks.logged()
    assert loop.told == []
    with pytest.warns(LoopWarning, match="no step was seen"):
        loop.checks.logged()


@pytest.mark.parametrize("cycle", [1, 2])
def test_a_batch_that_is_reported_after_its_update_is_no_mistake_in_a_short_cycle(
    cycle: int,
) -> None:
    """Each learner of a run with cycles of two steps was told that no step was seen."""
    loop = Loop(auto=False, cycle=cycle)
    with loop.watched():
        for _ in range(40):
            for _ in range(3):  # optimizers, or updates of one of two models
                loop.optimizer.step()
            for parameter in loop.model.parameters():
                parameter.data.add_(torch.ones_like(parameter), alpha=-0.1)
            for _ in range(2):
                loop.checks.logged()
            loop.steps(1)
    assert loop.told == []


@pytest.mark.parametrize(
    ("auto", "remedy"),
    [(True, r"pass optimizer=None and auto=False"), (False, r"by hand, call run\.step")],
)
def test_updates_by_hand_are_told_within_a_cycle(auto: bool, remedy: str) -> None:
    loop = Loop(auto=auto, cycle=LOGS_LOOKED_AT_MIN)

    def batch() -> None:
        for parameter in loop.model.parameters():
            parameter.data.add_(torch.ones_like(parameter), alpha=-0.1)
        loop.checks.logged()

    for _ in range(LOGS_LOOKED_AT_MIN - 1):
        batch()
    assert loop.told == []
    with pytest.warns(LoopWarning, match=f"have changed and no step.*{remedy}"):
        batch()
    assert [mistake for mistake, _ in loop.told] == ["optimizer"]


def test_updates_by_hand_that_were_not_reported_are_told_at_the_end() -> None:
    loop = Loop()
    loop.model.get_parameter("0.weight").data.add_(1.0)
    with pytest.warns(LoopWarning, match="have changed and no step"):
        loop.checks.left()


def test_many_batches_for_one_step_are_no_updates_by_hand() -> None:
    loop = Loop()
    for _ in range(3):
        for _ in range(4 * CYCLE):
            loop.checks.logged()
        loop.optimizer.step()
        loop.steps(1)
    loop.checks.left()
    assert loop.told == []


class Scheduled(Loop):
    """A loop whose steps are of 100 tokens, in a run that others train in as well."""

    def __init__(self, *, joined_at: int, by_run: bool) -> None:
        super().__init__()
        self.run_tokens = joined_at
        self.rates = Rates(parse(toml()))
        if by_run:
            self.rates.follow(self.optimizer)
            self.rates.set(self.run_tokens)

    def train(self, steps: int, rate: Callable[[int], float] | None, *, others: int = 300) -> None:
        with ExitStack() as stack:
            self.checks.watch_rates(stack, self.rates, lambda: self.run_tokens)
            for step in range(steps):
                if rate is not None:
                    self.optimizer.param_groups[0]["lr"] = rate(step)
                self.optimizer.step()
                self.steps(1, tokens=100)
                self.run_tokens += 100 + others
                self.rates.set(self.run_tokens)


def test_a_program_that_overrules_the_runs_schedule_is_told_both_rates() -> None:
    loop = Scheduled(joined_at=0, by_run=True)
    loop.train(3, None)
    assert loop.told == []
    with pytest.warns(LoopWarning, match=r"SGD after run\.schedule.*\(0\.003 in place of 0\.1\)"):
        loop.train(3, lambda step: 0.003)
    assert [mistake for mistake, _ in loop.told] == ["rates"]


def test_a_late_peer_that_warms_up_again_is_told() -> None:
    loop = Scheduled(joined_at=100_000, by_run=False)
    with pytest.warns(LoopWarning, match=r"had trained on 100000 tokens when this peer joined"):
        loop.train(20, lambda step: 1e-3 * (step + 1) / 20)


@pytest.mark.parametrize("joined_at", [0, 100, 2000, 100_000])
def test_schedules_over_the_runs_tokens_and_those_of_the_first_peer_are_right(
    joined_at: int,
) -> None:
    def of_the_run(step: int) -> float:
        return 1e-3 * min(1.0, (loop.run_tokens + 1) / 50_000)

    loop = Scheduled(joined_at=joined_at, by_run=False)
    loop.train(100, of_the_run)
    loop.train(100, lambda step: 1e-3)
    first = Scheduled(joined_at=0, by_run=False)
    first.train(100, lambda step: 1e-3 * (step + 1) / 100, others=0)
    assert loop.told == first.told == []


@pytest.mark.parametrize("change", ["replaced", "unfrozen", "added"])
def test_a_model_that_was_changed_after_joining_is_told_within_a_cycle(change: str) -> None:
    loop = Loop()
    loop.steps(CYCLE + 1)
    name = {"replaced": "1.weight", "unfrozen": "0.bias", "added": "2.weight and 2.bias"}[change]
    if change == "replaced":
        loop.model[1].weight = torch.nn.Parameter(torch.zeros(2, 2))
    elif change == "unfrozen":
        loop.model[0].bias.requires_grad_(True)
    else:
        loop.model.append(torch.nn.Linear(2, 1))
    with pytest.warns(LoopWarning, match=f"{name} {change}"):
        loop.steps(CYCLE)


def test_two_cycles_without_an_exchange_are_told_but_not_those_of_a_lone_or_quick_peer() -> None:
    loop = Loop()
    loop.steps(100, exchanged=False)
    loop.now = NO_EXCHANGE_S
    loop.steps(1, exchanged=True)
    loop.now += 2 * NO_EXCHANGE_S
    loop.steps(2 * CYCLE, exchanged=False)
    loop.steps(1, exchanged=False, alone=True)
    loop.now += NO_EXCHANGE_S
    loop.checks.rested()
    loop.steps(2 * CYCLE + 1, exchanged=False)
    assert loop.told == []
    loop.now += NO_EXCHANGE_S
    with pytest.warns(LoopWarning, match="no fragment was exchanged in the last 12 steps"):
        loop.steps(1, exchanged=False)


def test_each_mistake_is_told_once_and_is_an_error_on_request() -> None:
    loop = Loop()
    with pytest.warns(LoopWarning, match="no weight in the run") as told:
        loop.steps(5, tokens=0)
    assert len(told) == 1
    loop.model[1].weight = torch.nn.Parameter(torch.zeros(2, 2))
    with warnings.catch_warnings(), pytest.raises(LoopWarning, match=r"1\.weight replaced"):
        warnings.simplefilter("error", LoopWarning)
        loop.steps(CYCLE)
    assert [mistake for mistake, _ in loop.told] == ["no_tokens", "parameters"]
    with pytest.warns(LoopWarning, match="the loss is nan"):
        loop.checks.check_loss(float("nan"))


def test_a_joined_run_that_is_not_entered_is_told_at_its_first_step() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    warn_unless_entered((optimizer,))
    with pytest.warns(LoopWarning, match=r"with peer\.join\(\.\.\.\) as run:"):
        optimizer.step()
    entered = warn_unless_entered((optimizer,))
    entered()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


def test_broken_moments_and_statistics_begin_anew_and_others_stay() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    broken, sound = model.get_parameter("0.weight"), model.get_parameter("0.bias")
    variance = model.get_buffer("1.running_var")
    optimizer.state[broken]["momentum_buffer"].fill_(float("nan"))
    variance.fill_(float("inf"))
    restart_broken_moments(model, (optimizer,))
    assert broken not in optimizer.state and sound in optimizer.state
    assert torch.equal(variance, torch.ones(2))


RUN = "ab" * 32


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, inputs: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.layer(inputs.float())


def digest_of(*batches: torch.Tensor, run: str = RUN, train: bool = True) -> str:
    model = Model().train(train)
    first = FirstBatch(model, run)
    for batch in batches:
        model(batch, mask=torch.ones(1))
    first.close()
    model(torch.zeros(3, 4))
    return first.digest


@pytest.fixture(autouse=True)
def seed() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        yield


def test_equal_batches_have_one_digest_whatever_the_seeds_are() -> None:
    batch = torch.arange(12).reshape(3, 4)
    found = digest_of(batch)
    assert found.startswith("batch ")
    torch.manual_seed(2)
    assert digest_of(batch, torch.zeros(3, 4)) == found
    others = (batch + 1, batch[:2], batch.float(), batch.t().reshape(3, 4))
    assert found not in {digest_of(other) for other in others}
    assert digest_of(batch, run="cd" * 32) != found


def test_what_is_evaluated_first_is_no_batch() -> None:
    batch = torch.arange(12).reshape(3, 4)
    model = Model()
    first = FirstBatch(model, RUN)
    model.eval()
    model(torch.zeros(3, 4))
    model.train()
    model(batch, mask=torch.ones(1))
    assert first.digest == digest_of(batch)


def test_without_a_forward_pass_of_the_model_it_is_of_the_seed() -> None:
    same = [digest_of(), digest_of(torch.ones(3, 4), train=False)]
    assert same[0] == same[1] and same[0].startswith("seed ")
    torch.manual_seed(2)
    assert digest_of() != same[0]


def test_a_compiled_model_keeps_one_graph_and_values_that_are_not_there_are_left() -> None:
    model = Model()
    first = FirstBatch(model, RUN)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    compiled(torch.ones(3, 4))
    assert first.digest.startswith("seed ")
    torch.vmap(model)(torch.ones(3, 4))
    assert first.digest.startswith("seed ")
    model(torch.ones(3, 4))
    assert first.digest.startswith("batch ")
