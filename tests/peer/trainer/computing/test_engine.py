"""The computing part of a step: the same gradient however it is divided, and no step lost."""

from __future__ import annotations

import json
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from peer.errors import MachineTooSmall
from peer.model import muon
from peer.model.recipes import build_model, build_optimizer, chunked_loss, next_token_loss
from peer.model.recipes.gpt import Block
from peer.processes import is_out_of_memory
from peer.run_file.reading import parse
from peer.trainer.computing import device_facts, fitting, probing, tuning
from peer.trainer.computing.choices import (
    Choices,
    DeviceFacts,
    OwnerChoices,
    Precision,
    Probe,
    choose,
)
from peer.trainer.computing.device_facts import facts_of, free_bytes
from peer.trainer.computing.engine import Engine
from peer.trainer.computing.fitting import (
    Fit,
    Goal,
    Remembered,
    begin,
    key_of,
    meanwhile,
    room_bytes,
    size_of_compiled,
)
from peer.trainer.computing.probing import probe
from peer.trainer.computing.tuning import Tuner
from tests.peer.trainer.counting_compiler import counting
from tests.peer.trainer.recipe_run import TEXT

RUN = parse(TEXT.replace("batch_size = 2", "batch_size = 7"))
CPU = DeviceFacts(kind="cpu", name="a processor", fast=("fp32",), emulated=("bf16", "fp16"))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    yield
    torch.set_num_threads(threads)


def engine_of(
    run: Any = RUN, *, choices: Choices | None = None, device: str = "cpu", **own: Any
) -> Engine:
    model = build_model(run).to(device)
    chosen = choices or Choices(micro_batch=run.inner.batch_size)
    return Engine(run, model, build_optimizer(run, model), chosen, **own)


def batch_of(count: int = 7) -> Tensor:
    return torch.randint(0, 256, (count, 17), generator=torch.Generator().manual_seed(5))


def gradients_of(engine: Engine, batch: Tensor) -> dict[str, Tensor]:
    engine.gradients(batch)
    found = {name: p.grad for name, p in engine.model.named_parameters()}
    return {name: grad.clone() for name, grad in found.items() if grad is not None}


def parameters_of(engine: Engine) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in engine.model.named_parameters()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], *, atol: float) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values, rtol=1e-4, atol=atol, msg=name)


@pytest.mark.parametrize("micro_batch", [1, 2, 4, 6, 7, 100])
def test_micro_batches_add_up_to_the_gradient_of_the_whole_batch(micro_batch: int) -> None:
    """7 in parts of 4 or 6: the last one is smaller, and counts less."""
    whole, divided = engine_of(), engine_of(choices=Choices(micro_batch=micro_batch))
    expected = whole.gradients(batch_of())
    torch.testing.assert_close(divided.gradients(batch_of()), expected)
    whole.optimizer.zero_grad()
    divided.optimizer.zero_grad()
    assert_same(gradients_of(divided, batch_of()), gradients_of(whole, batch_of()), atol=1e-7)


def test_recomputed_activations_and_a_loss_in_chunks_change_no_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chunked_loss, "LOGITS_AT_ONCE", 256 * 10)  # 112 rows: 11 chunks and a rest
    lean = engine_of(choices=Choices(micro_batch=7, lean=True))
    assert_same(gradients_of(lean, batch_of()), gradients_of(engine_of(), batch_of()), atol=1e-7)


def test_the_held_out_loss_is_measured_in_chunks_where_training_needs_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All logits at once ran out of memory at a safe point, where no step is repeated."""
    monkeypatch.setattr(chunked_loss, "LOGITS_AT_ONCE", 256 * 10)
    at_once: list[int] = []
    found = []
    for lean in (False, True):
        engine = engine_of(choices=Choices(micro_batch=7, lean=lean))
        head = engine.model.get_submodule("head")
        at_once.clear()
        head.register_forward_hook(lambda _, given, made: at_once.append(made.numel()))
        found.append(engine.held_out_loss(batch_of().numpy()))
        assert (max(at_once) > 256 * 10) == (not lean)
    assert found[1] == pytest.approx(found[0], rel=1e-6)


def test_activations_recomputed_for_want_of_memory_are_not_recomputed_later() -> None:
    """As while something is compiled: memory runs out, and the code there is then needs less."""
    engine = engine_of()
    calls: list[nn.Module] = []
    for module in engine.model.modules():
        if isinstance(module, Block):
            module.register_forward_pre_hook(lambda block, arguments: calls.append(block))
    for lean, expected in ((True, 2), (False, 1), (True, 2)):
        calls.clear()
        engine.choose(Choices(micro_batch=7, lean=lean))
        engine.gradients(batch_of())
        assert len(calls) == expected, "the model has one block"


def test_a_model_that_changes_its_logits_keeps_its_own_loss_and_that_is_said_once() -> None:
    pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
    text = TEXT[TEXT.index("[data]") :]
    shape = (
        "vocab_size = 256, hidden_size = 16, intermediate_size = 16, num_hidden_layers = 1, "
        "num_attention_heads = 2, logits_scaling = 4.0"
    )
    model = f"[model]\nrecipe = 'hf'\nconfig = {{ model_type = 'granite', {shape} }}\n"
    engine = engine_of(parse(model + text), choices=Choices(micro_batch=1, lean=True))
    engine.gradients(batch_of(2))
    engine.choose(replace(engine.choices, micro_batch=2))
    assert [event["event"] for event in engine.events] == ["logits_at_once"]


# --- running out of memory ------------------------------------------------------------------------


def noisy(most: int, seen: list[tuple[int, float]]) -> Callable[[nn.Module, Tensor], Tensor]:
    """A loss with a random factor that runs out of memory above ``most`` sequences."""

    def loss(model: nn.Module, tokens: Tensor) -> Tensor:
        factor = 1.0 + float(torch.rand(()))
        seen.append((len(tokens), factor))
        found = next_token_loss(model, tokens)
        if len(tokens) > most:
            found.backward(retain_graph=True)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return found * factor

    return loss


def test_a_step_that_runs_out_of_memory_is_repeated_with_half_as_many_sequences() -> None:
    run = parse(TEXT.replace("batch_size = 2", "batch_size = 8"))
    seen: list[tuple[int, float]] = []
    engine = engine_of(run, loss=noisy(2, seen))
    torch.manual_seed(9)
    found = gradients_of(engine, batch_of(8))
    after = torch.rand(())
    sizes = [size for size, _ in seen]
    assert sizes == [8, 4, 2, 2, 2, 2]
    assert [event["event"] for event in engine.events] == ["micro_batch_reduced"] * 2

    # As if it had been 2 from the beginning, also for the random generator.
    torch.manual_seed(9)
    small = engine_of(run, choices=Choices(micro_batch=2), loss=noisy(2, []))
    torch.manual_seed(9)
    assert_same(found, gradients_of(small, batch_of(8)), atol=0.0)
    assert torch.rand(()) == after


def test_one_sequence_that_does_not_fit_gets_recomputed_activations_and_then_fails() -> None:
    calls = 0

    def never(model: nn.Module, tokens: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        raise torch.OutOfMemoryError("CUDA out of memory")

    engine = engine_of(loss=never)
    assert engine.gradients(batch_of()).isfinite()  # not this loss: the one in chunks
    assert engine.choices == Choices(micro_batch=1, lean=True)
    assert calls == 4  # 7, 4, 2 and 1 sequences

    class Never(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, tokens: Tensor) -> Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory")

    model = Never()
    hopeless = Engine(
        RUN, model, torch.optim.SGD(model.parameters(), lr=0.1), Choices(micro_batch=1)
    )
    with pytest.raises(torch.OutOfMemoryError):
        hopeless.gradients(batch_of())


def limited_to(most: int, seen: list[int]) -> Callable[[nn.Module, Tensor], Tensor]:
    """A loss that runs out of memory above ``most`` sequences."""

    def loss(model: nn.Module, tokens: Tensor) -> Tensor:
        seen.append(len(tokens))
        if len(tokens) > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return next_token_loss(model, tokens)

    return loss


def test_a_held_out_measurement_that_runs_out_of_memory_is_repeated_with_half_as_many() -> None:
    """It is not compiled, so it may not fit where compiled code trains. It ended the training."""
    seen: list[int] = []
    engine = engine_of(loss=limited_to(2, seen))
    sequences = batch_of(8).numpy()
    expected = engine_of().held_out_loss(sequences)
    assert engine.measured(sequences, lambda: None) == (pytest.approx(expected, rel=1e-6), 8)
    assert seen == [7, 3, 1, *[1] * 7]
    assert engine.model.training
    seen.clear()
    engine.held_out_loss(sequences)
    assert seen == [1] * 8, "the next one begins with what has fitted"
    assert engine.choices.micro_batch == 7, "training may have more at once"


def test_a_held_out_loss_of_which_no_sequence_fits_is_left_out_and_that_is_said_once() -> None:
    engine = engine_of(loss=limited_to(0, []))
    for _ in range(2):
        assert engine.measured(batch_of().numpy(), lambda: None) == (0.0, 0)
    assert [event["event"] for event in engine.events] == ["not_measured"]
    assert engine.model.training
    with pytest.raises(torch.OutOfMemoryError):
        engine.held_out_loss(batch_of().numpy())


OPTIMIZERS = {
    "adamw": 'optimizer = "adamw"',
    "sgd": 'optimizer = "sgd"\nlearning_rate = 0.01\nweight_decay = 0.1',
    "plain sgd": 'optimizer = "sgd"\nlearning_rate = 0.01\nmomentum = 0.0\nnesterov = false',
    "muon": 'optimizer = "muon"',
}


def run_with(optimizer: str) -> Any:
    return parse(TEXT.replace('optimizer = "adamw"', OPTIMIZERS[optimizer]))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_optimizer_s_state_is_made_before_the_first_pass_and_changes_nothing(
    optimizer: str,
) -> None:
    """Memory for it was taken in the first step, after the micro-batch had been chosen."""
    run = run_with(optimizer)
    engine, without = engine_of(run), engine_of(run)
    without.model.load_state_dict(engine.model.state_dict())
    before = parameters_of(engine)
    engine.make_states()
    assert_same(parameters_of(engine), before, atol=0.0)

    def places() -> list[int]:
        states = engine.optimizer.state.values()
        return [v.data_ptr() for state in states for v in state.values() if v is not None]

    made = places()
    assert bool(made) == (optimizer != "plain sgd")
    for _ in range(3):
        for each in (engine, without):
            each.gradients(batch_of(2))
            assert each.apply() == 1
    assert places() == made, "no step has made any"
    for name, values in parameters_of(without).items():
        assert torch.equal(parameters_of(engine)[name], values), name
    state = deepcopy(engine.optimizer.state_dict()["state"])
    engine.make_states()
    torch.testing.assert_close(engine.optimizer.state_dict()["state"], state, rtol=0, atol=0)


def test_a_device_without_room_for_the_optimizer_s_state_is_refused_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = engine_of()

    def full(*arguments: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    rates = [group["lr"] for group in engine.optimizer.param_groups]
    monkeypatch.setattr(engine.optimizer, "step", full)
    with pytest.raises(MachineTooSmall, match=r"state of its optimizer .*--device"):
        engine.make_states()
    assert [group["lr"] for group in engine.optimizer.param_groups] == rates
    assert all(p.grad is None for p in engine.model.parameters())


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_matrices_that_do_not_fit_at_once_are_stepped_in_smaller_batches(
    precision: Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other programs had the memory, and it ended training: some matrices were changed already."""
    run = parse(
        TEXT.replace('optimizer = "adamw"', 'optimizer = "muon"').replace(
            "layers = 1", "layers = 3"
        )
    )
    choices = Choices(precision=precision, micro_batch=2)
    engine, undisturbed = (engine_of(run, choices=choices) for _ in range(2))
    undisturbed.model.load_state_dict(engine.model.state_dict())
    sizes: list[int] = []
    most = free = 10**9
    short = 2 * max(p.numel() for p in engine.optimizer.param_groups[0]["params"])
    original = muon.orthogonalised

    def limited(matrices: Tensor) -> Tensor:
        sizes.append(matrices.numel())
        if matrices.numel() > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(matrices)

    monkeypatch.setattr(muon, "orthogonalised", limited)
    for number in range(4):
        for each in (undisturbed, engine):
            most = short if each is engine and number else free
            sizes.clear()
            each.gradients(batch_of(2))
            assert each.apply() == 1
        assert (max(sizes) <= short) == (number > 1), "it begins with what has fitted"
    # In fp16 some processors add up in another order where fewer matrices are multiplied at once.
    assert_same(parameters_of(engine), parameters_of(undisturbed), atol=1e-5)
    found, expected = (each.optimizer.state_dict()["state"] for each in (engine, undisturbed))
    torch.testing.assert_close(found, expected)
    most = 0
    engine.gradients(batch_of(2))
    with pytest.raises(torch.OutOfMemoryError):
        engine.apply()


class Held(TorchDispatchMode):
    """The most memory of tensors that were made since it was entered and are still held."""

    def __init__(self, known: set[int]) -> None:
        super().__init__()
        self._known, self.peak_bytes = known, 0
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for each in tree_leaves(made):
            if isinstance(each, Tensor) and each.untyped_storage().data_ptr() not in self._known:
                storage = each.untyped_storage()
                self._made[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        self._made = {key: pair for key, pair in self._made.items() if not pair[0].expired()}
        self.peak_bytes = max(self.peak_bytes, sum(size for _, size in self._made.values()))
        return made


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_a_step_of_muon_takes_is_kept_free(
    precision: Precision, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (fitting, muon):
        monkeypatch.setattr(module, "product_dtype", lambda device: dtype)
    run = parse(
        TEXT.replace('optimizer = "adamw"', 'optimizer = "muon"')
        .replace("layers = 1", "layers = 4")
        .replace("width = 16", "width = 64")
    )
    engine = engine_of(run, choices=Choices(precision=precision, micro_batch=2))
    engine.make_states()
    engine.gradients(batch_of(2))
    known = {p.untyped_storage().data_ptr() for p in engine.model.parameters()}
    known |= {
        p.grad.untyped_storage().data_ptr() for p in engine.model.parameters() if p.grad is not None
    }
    for state in engine.optimizer.state.values():
        known |= {value.untyped_storage().data_ptr() for value in state.values()}
    with Held(known) as held:
        assert engine.apply() == 1
    kept = fitting.step_bytes(engine)
    assert 0.6 * kept < held.peak_bytes <= 1.02 * kept, "a few numbers beside the matrices"


@pytest.mark.parametrize(
    "text",
    [
        "MPS backend out of memory (MPS allocated: 17.10 GiB, max allowed: 18.13 GiB)",
        "CUDA error: out of memory",  # a kernel that is loaded when it is first used
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory",
    ],
)
def test_each_device_has_its_own_words_for_memory_that_is_short(text: str) -> None:
    assert is_out_of_memory(RuntimeError(text))


def test_another_error_is_no_reason_to_try_again() -> None:
    def broken(model: nn.Module, tokens: Tensor) -> Tensor:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="mat1"):
        engine_of(loss=broken).gradients(batch_of())


# --- precision ------------------------------------------------------------------------------------


def overflowing(steps: set[int]) -> Callable[[nn.Module, Tensor], Tensor]:
    """A loss whose gradient overflows in the given calls."""
    calls = 0

    def loss(model: nn.Module, tokens: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        found = next_token_loss(model, tokens)
        return found * float("inf") if calls in steps else found

    return loss


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon"])
def test_a_step_that_the_scaler_skips_is_none(optimizer: str) -> None:
    chosen = f'optimizer = "{optimizer}"\nlearning_rate = 0.01'
    run = parse(TEXT.replace('optimizer = "adamw"', chosen))
    choices = Choices(precision="fp16", micro_batch=2)
    engine = engine_of(run, choices=choices, loss=overflowing({2}))
    steps = []
    for _ in range(3):
        before = parameters_of(engine)
        engine.gradients(batch_of(2))
        state = deepcopy(engine.optimizer.state_dict()["state"])
        made = engine.apply() == 1
        if not made:
            torch.testing.assert_close(
                engine.optimizer.state_dict()["state"], state, rtol=0, atol=0, equal_nan=True
            )
        after = parameters_of(engine)
        steps.append((made, any(not torch.equal(before[n], after[n]) for n in before)))
        assert all(bool(values.isfinite().all()) for values in after.values())
    assert steps == [(True, True), (False, False), (True, True)]


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon"])
def test_a_scaler_reads_nothing_from_the_device(
    optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answers arrive late, as those of a GPU do: they count one step later, each once."""
    monkeypatch.setattr(device_facts.LateValue, "is_late", True)
    chosen = f'optimizer = "{optimizer}"\nlearning_rate = 0.01'
    run = parse(TEXT.replace('optimizer = "adamw"', chosen))
    choices = Choices(precision="fp16", micro_batch=2)
    engine = engine_of(run, choices=choices, loss=overflowing({2}))
    with synchronizations() as counter:
        made = []
        for _ in range(5):
            engine.gradients(batch_of(2))
            counter.count = 0
            made.append(engine.apply())
            # The one is ``LateValue``'s, of a number that is on the host by then.
            assert counter.count <= 1
    assert made == [0, 1, 0, 1, 1], "the second step was skipped"


def losses(precision: Any, steps: int, *, device: str = "cpu") -> list[float]:
    engine = engine_of(choices=Choices(precision=precision, micro_batch=7), device=device)
    generator = torch.Generator().manual_seed(3)
    found = []
    for _ in range(steps):
        # Arithmetic sequences: there is something to learn.
        first = torch.randint(0, 64, (7, 1), generator=generator)
        pace = torch.randint(1, 4, (7, 1), generator=generator)
        batch = (first + pace * torch.arange(17)) % 256
        found.append(float(engine.gradients(batch.to(device))))
        assert engine.apply()
    return found


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_parameters_stay_fp32_and_losses_near_those_of_fp32(precision: str) -> None:
    found, expected = losses(precision, 40), losses("fp32", 40)
    assert found != expected
    assert found == pytest.approx(expected, abs=0.03)
    engine = engine_of(choices=Choices(precision="bf16", micro_batch=7))
    gradients = gradients_of(engine, batch_of())
    assert {values.dtype for values in gradients.values()} == {torch.float32}


@pytest.mark.slow
def test_bf16_learns_as_well_as_fp32_over_a_thousand_steps() -> None:
    assert_alike_over_a_thousand_steps("bf16")


def assert_alike_over_a_thousand_steps(precision: str, *, device: str = "cpu") -> None:
    """Means of a hundred steps each are those of fp32, to the noise between two trainings."""
    found, expected = (losses(kind, 1000, device=device) for kind in (precision, "fp32"))
    assert expected[-1] < 0.6 * expected[0]
    for end in range(100, 1001, 100):
        mean = sum(found[end - 100 : end]) / 100
        assert mean == pytest.approx(sum(expected[end - 100 : end]) / 100, abs=0.03), end


# --- compiling and synchronising ------------------------------------------------------------------


def goal_of(engine: Engine, choices: Choices, *, compile_s: float | None = None) -> Goal:
    """To compile and train with these choices, which are known to fit."""
    known = Fit(choices, 1.0, 1.0, compile_s)
    return Goal(first=engine.choices, choices=choices, room_bytes=1e9, known=known)


def compiled(engine: Engine, choices: Choices) -> None:
    """Train until there is code for these choices."""
    engine.tuning = Tuner(engine, goal_of(engine, choices))
    with engine.tuning:
        until_settled(engine)


def until_settled(engine: Engine) -> int:
    """Make steps until nothing is left to find out. Returns their number."""
    steps = 0
    deadline = time.monotonic() + 600.0
    while engine.tuning.text is not None:
        assert time.monotonic() < deadline
        engine.gradients(batch_of(engine.batch_size))
        assert engine.apply()
        steps += 1
    return steps


def test_it_trains_while_code_is_compiled_and_then_with_it_also_after_an_adoption() -> None:
    torch._dynamo.reset()
    graphs: list[int] = []
    go_on = threading.Event()

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        assert go_on.wait(60.0)
        return counting(graphs)(graph, inputs)

    run = parse(TEXT.replace("layers = 1", "layers = 3").replace("size = 2", "size = 7"))
    engine = engine_of(run, choices=Choices(micro_batch=2), backend=backend)
    choices = Choices(micro_batch=4, compile=True)
    goal = goal_of(engine, choices, compile_s=1e6)
    engine.tuning = Tuner(engine, goal)
    with engine.tuning:
        for _ in range(3):
            engine.gradients(batch_of())
            assert engine.apply()
        assert not graphs
        assert str(engine.tuning.text).startswith("compiling [          ] 0% for 0:")
        go_on.set()
        until_settled(engine)
    assert engine.choices == choices
    assert [event["event"] for event in engine.events] == ["compiling", "compiled"]
    assert len(graphs) == 4, "one for all blocks and one for the rest, of 4 sequences and of 3"
    with torch.compiler.set_stance("fail_on_recompile"):
        for step in range(6):
            engine.gradients(batch_of())
            assert engine.apply()
            if step % 2:
                for parameter in engine.model.parameters():  # as a safe point adopts
                    parameter.data.reshape(-1)[1:].add_(0.001)
            for group in engine.optimizer.param_groups:
                group["lr"] *= 0.9
    assert len(graphs) == 4


@pytest.mark.parametrize(("earlier_s", "bar"), [(1e6, " "), (None, " "), (1e-6, "#########")])
def test_a_compilation_has_a_bar_also_the_first_time(earlier_s: float | None, bar: str) -> None:
    torch._dynamo.reset()
    go_on = threading.Event()

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        assert go_on.wait(60.0)
        return graph.forward

    engine = engine_of(choices=Choices(micro_batch=7), backend=backend)
    choices = Choices(micro_batch=7, compile=True)
    engine.tuning = Tuner(engine, goal_of(engine, choices, compile_s=earlier_s))
    with engine.tuning:
        text = engine.tuning.text
        engine.tuning.leaving()
        go_on.set()
    assert str(text).startswith(f"compiling [{bar}")
    assert "100%" not in str(text), "it is still at work"
    assert [event["event"] for event in engine.events] == ["compiling", "compiler_awaited"]


def test_compiling_meanwhile_changes_no_gradient() -> None:
    """Every step has the gradients of one that nothing happens beside."""
    torch._dynamo.reset()
    alone, busy = engine_of(), engine_of(choices=Choices(micro_batch=3), backend=counting([]))
    choices = Choices(micro_batch=4, compile=True)
    busy.tuning = Tuner(busy, goal_of(busy, choices))
    deadline = time.monotonic() + 60.0
    with busy.tuning:
        while busy.tuning.text is not None:
            assert time.monotonic() < deadline
            alone.model.load_state_dict(busy.model.state_dict())
            found, expected = gradients_of(busy, batch_of()), gradients_of(alone, batch_of())
            assert_same(found, expected, atol=1e-6)
            assert busy.apply()
            alone.optimizer.zero_grad()
    assert busy.choices == choices


def test_a_step_that_a_compiler_disturbs_is_made_when_it_has_ended() -> None:
    """A tracer changes methods of all modules for a moment, whichever thread calls them."""
    torch._dynamo.reset()
    traces, disturbed = threading.Event(), threading.Event()

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        traces.set()
        assert disturbed.wait(60.0)
        return graph.forward

    calls: list[bool] = []

    def loss(model: nn.Module, tokens: Tensor) -> Tensor:
        if model is not engine.model:  # the compiler's twin of it
            return next_token_loss(model, tokens)
        calls.append(traces.is_set() and not disturbed.is_set())
        if calls[-1]:
            disturbed.set()
            raise NameError("module is not installed as a submodule")
        return next_token_loss(model, tokens)

    engine, alone = engine_of(loss=loss, backend=backend), engine_of()
    choices = Choices(micro_batch=7, compile=True)
    engine.tuning = Tuner(engine, goal_of(engine, choices))
    with engine.tuning:
        assert traces.wait(60.0)
        found, expected = (gradients_of(each, batch_of()) for each in (engine, alone))
        assert_same(found, expected, atol=1e-6)
    assert calls == [True, False]


def test_what_is_done_during_a_measurement_fails_although_a_compiler_works() -> None:
    """The callback's error was taken for that of a tracer, and was lost."""
    torch._dynamo.reset()
    traces, failed = threading.Event(), threading.Event()

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        traces.set()
        assert failed.wait(60.0)
        return graph.forward

    def fail() -> None:
        if not failed.is_set():
            failed.set()
            raise ConnectionError("the agent is lost")

    engine = engine_of(backend=backend)
    engine.gradients(batch_of())
    engine.tuning = Tuner(engine, goal_of(engine, Choices(micro_batch=7, compile=True)))
    with engine.tuning:
        assert traces.wait(60.0)
        with pytest.raises(ConnectionError, match="agent is lost"):
            engine.measured(batch_of().numpy(), fail)


def test_a_measurement_that_a_tracer_disturbs_is_repeated_and_a_step_is_not_disturbed() -> None:
    """``torch.fx`` replaces the call of all modules while it traces one, in all threads."""
    torch._dynamo.reset()
    traces, disturbed = threading.Event(), threading.Event()

    class Slow(nn.Module):
        def forward(self, value: Tensor) -> Tensor:
            traces.set()
            assert disturbed.wait(60.0)
            return value + 1

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        torch.fx.symbolic_trace(Slow())
        return graph.forward

    failed: list[Exception] = []

    def loss(model: nn.Module, tokens: Tensor) -> Tensor:
        try:
            return next_token_loss(model, tokens)
        except NameError as error:
            failed.append(error)
            disturbed.set()
            raise

    engine, alone = engine_of(loss=loss, backend=backend), engine_of()
    alone.model.load_state_dict(engine.model.state_dict())
    for each in (engine, alone):
        each.gradients(batch_of())
    engine.tuning = Tuner(engine, goal_of(engine, Choices(micro_batch=7, compile=True)))
    with engine.tuning:
        assert traces.wait(60.0)
        assert engine.apply() == alone.apply() == 1
        assert_same(parameters_of(engine), parameters_of(alone), atol=0.0)
        sequences = batch_of().numpy()
        found = engine.measured(sequences, lambda: None)
    assert found == (pytest.approx(alone.held_out_loss(sequences), rel=1e-6), 7)
    assert "not installed as a submodule" in str(failed[0])
    assert len(failed) == 1


def test_a_compiler_that_fails_is_left_out_and_that_is_said_once() -> None:
    torch._dynamo.reset()

    def backend(graph: Any, inputs: Any) -> Any:
        raise KeyError("no such instruction")

    engine = engine_of(choices=Choices(micro_batch=4), backend=backend)
    compiled(engine, Choices(micro_batch=4, compile=True))
    engine.gradients(batch_of())
    assert engine.apply()
    began, failed, found = engine.events
    assert (began["event"], failed["event"]) == ("compiling", "compile_failed")
    assert found == {"event": "way_found", "text": "fp32, 4 sequences at once"}
    assert "no such instruction" in str(failed["reason"])
    assert not engine.choices.compile


def test_a_compiler_that_fails_is_tried_again_at_the_next_start() -> None:
    torch._dynamo.reset()

    def backend(graph: Any, inputs: Any) -> Any:
        raise OSError("no space left on device")

    engine = engine_of(choices=Choices(micro_batch=7, compile=True), backend=backend)
    kept = begun(engine, GPU, OwnerChoices(), room=1e9)
    with engine.tuning:
        until_settled(engine)
    assert engine.choices == Choices(micro_batch=7)
    assert not kept, "what is remembered is not looked for again"


def test_leaving_waits_for_the_thread_that_compiles() -> None:
    torch._dynamo.reset()
    graphs: list[int] = []

    def slow(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        time.sleep(0.2)
        return counting(graphs)(graph, inputs)

    engine = engine_of(choices=Choices(micro_batch=7), backend=slow)
    choices = Choices(micro_batch=7, compile=True)
    engine.tuning = Tuner(engine, goal_of(engine, choices))
    with engine.tuning:
        pass
    assert len(graphs) == 2, "of a block, and of what comes behind the blocks"
    assert not [thread for thread in threading.enumerate() if thread.name == "compile"]


@pytest.mark.parametrize("batch_size", [2, pytest.param(9, marks=pytest.mark.slow)])
def test_no_size_that_is_measured_is_compiled_in_the_way_of_training(batch_size: int) -> None:
    """A device with room for one sequence to begin with."""
    torch._dynamo.reset()
    compiling: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        compiling.append(threading.current_thread().name)
        return graph.forward

    run = parse(TEXT.replace("batch_size = 2", f"batch_size = {batch_size}"))
    choices = Choices(micro_batch=batch_size, compile=True)
    engine = engine_of(run, choices=choices, backend=backend)
    begun(engine, GPU, OwnerChoices(), room=1.5 * probe(engine_of(run), 1).peak_bytes)
    with engine.tuning:
        until_settled(engine)
    assert engine.choices.compile
    assert set(compiling) == {"compile"}


@pytest.mark.parametrize(
    ("bytes_each", "most", "size"),
    [(1.0, 64, 16), (6.0, 64, 16), (7.0, 64, 32), (12.0, 64, 32), (12.0, 20, 20), (12.0, 16, 16)],
)
def test_code_is_made_for_more_sequences_where_memory_kept_them_from_being_tried(
    bytes_each: float, most: int, size: int
) -> None:
    eager = Probe(16, 1.0, 16 * bytes_each)
    assert size_of_compiled(eager, fixed=0.0, most=most, room=200.0) == size
    fixed = Probe(16, 1.0, 1000.0 + 16 * bytes_each)
    assert size_of_compiled(fixed, fixed=1000.0, most=most, room=1200.0) == size


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("lean", [False, True])
def test_the_real_compiler_measures_and_trains_with_the_same_gradients(lean: bool) -> None:
    torch._dynamo.reset()
    run = parse(TEXT.replace("batch_size = 2", "batch_size = 6"))
    engine = engine_of(run, choices=Choices(micro_batch=1, lean=lean))
    wanted = Choices(micro_batch=6, compile=True, lean=lean)
    engine.tuning = Tuner(
        engine, Goal(first=engine.choices, choices=wanted, room_bytes=1e9, grows=True)
    )
    with warnings.catch_warnings():
        # Modules of the compiler use functions of torch that are deprecated.
        warnings.simplefilter("ignore", DeprecationWarning)
        with engine.tuning:
            until_settled(engine)
        names = [event["event"] for event in engine.events]
        assert names == ["compiling", "compiled"]
        assert engine.choices.compile
        reference = engine_of(run)
        reference.model.load_state_dict(engine.model.state_dict())
        with torch.compiler.set_stance("fail_on_recompile"):
            gradients = gradients_of(engine, batch_of(6))
    # The largest gradients are 0.1, and sums are rounded in another order.
    assert_same(gradients, gradients_of(reference, batch_of(6)), atol=1e-5)


def test_a_probe_changes_nothing() -> None:
    engine = engine_of()
    before, state = parameters_of(engine), torch.get_rng_state()
    assert probe(engine, 3).peak_bytes > probe(engine, 1).peak_bytes > 0
    assert probe(engine, 1, length=8).peak_bytes < probe(engine, 1).peak_bytes
    assert_same(parameters_of(engine), before, atol=0.0)
    assert all(p.grad is None for p in engine.model.parameters())
    assert not engine.optimizer.state
    assert torch.equal(torch.get_rng_state(), state)


def test_an_error_of_the_model_reaches_the_loop() -> None:
    def broken(model: nn.Module, tokens: Tensor) -> Tensor:
        raise ValueError("not this model")

    torch._dynamo.reset()
    engine = engine_of(choices=Choices(micro_batch=7), loss=broken, backend=counting([]))
    with pytest.raises(ValueError, match="not this model"):
        compiled(engine, Choices(micro_batch=7, compile=True))


class Synchronizations(TorchDispatchMode):
    """Counts reads of a value from the device."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self.count += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def synchronizations() -> Iterator[Synchronizations]:
    with Synchronizations() as counter:
        assert float(torch.ones(())) == 1.0
        assert counter.count == 1, "it counts"
        counter.count = 0
        yield counter


def test_a_step_reads_nothing_from_the_device() -> None:
    engine = engine_of(choices=Choices(precision="bf16", micro_batch=2))
    with synchronizations() as counter:
        for _ in range(3):
            engine.gradients(batch_of())
            assert engine.apply()
        assert counter.count == 0


# --- what fits ------------------------------------------------------------------------------------


GPU = DeviceFacts(kind="cuda", name="a device of a few sequences", fast=("fp32",))
SIXTEEN = parse(TEXT.replace("batch_size = 2", "batch_size = 16"))


def begun(engine: Engine, facts: DeviceFacts, wishes: OwnerChoices, *, room: float) -> list[Fit]:
    """Let the engine find out what is left. Returns the list that gets what it keeps."""
    kept: list[Fit] = []
    goal, _ = begin(engine, facts, wishes, room=room, known=None)
    engine.tuning = Tuner(engine, goal, keep=kept.append)
    return kept


def test_a_processor_begins_with_one_sequence_and_has_all_that_fit_in_its_first_step() -> None:
    engine = engine_of(SIXTEEN)
    kept = begun(engine, CPU, OwnerChoices(), room=1e9)
    assert engine.choices.micro_batch == 1
    with engine.tuning:
        until_settled(engine)
    (found,) = kept
    assert engine.choices == found.choices == Choices(micro_batch=16)
    assert found.sequence_s > 0
    # It was never said, after "1 sequence at once to begin with". The next start says the same.
    assert list(engine.events) == [{"event": "way_found", "text": "fp32, 16 sequences at once"}]
    next_goal, _ = begin(engine, CPU, OwnerChoices(), room=1e9, known=found)
    assert next_goal.text == "fp32, 16 sequences at once"
    engine.tuning = Tuner(engine, next_goal)
    with engine.tuning:
        until_settled(engine)
    assert len(engine.events) == 1

    two = probe(engine, 2).peak_bytes
    tight = engine_of(SIXTEEN)
    (kept,) = [begun(tight, CPU, OwnerChoices(), room=1.5 * two)]
    with tight.tuning:
        until_settled(tight)
    assert 1 <= kept[0].choices.micro_batch <= 4
    assert kept[0].step_bytes <= 1.5 * two


class Clock:
    """Time in which nothing but ``sleep`` takes any: it does not tell how busy the machine is."""

    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def perf_counter(self) -> float:
        return self.now

    process_time = perf_counter


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock by which passes before joining are measured."""
    made = Clock()
    for module in (fitting, probing):
        monkeypatch.setattr(module, "time", made)
    return made


def test_the_speed_of_a_small_model_is_not_that_of_loading_the_libraries(clock: Clock) -> None:
    """Each pass takes a second the first time."""
    loaded: list[int] = []

    def loading(model: nn.Module, tokens: Tensor) -> Tensor:
        clock.sleep(0.01)
        if len(loaded) < 2:  # the one without gradients, and the first with them
            loaded.append(len(tokens))
            clock.sleep(1.0)
        return next_token_loss(model, tokens)

    _, found = begin(engine_of(SIXTEEN, loss=loading), CPU, OwnerChoices(), room=1e9, known=None)
    assert len(loaded) == 2
    assert found.sequence_s < 0.5


@pytest.mark.parametrize("in_half", [False, True])
def test_the_speed_is_that_of_many_sequences_where_a_pass_takes_as_long_for_any_number(
    in_half: bool,
    clock: Clock,
) -> None:
    """The upload that people agreed to was 18 times too low: 26.8 MB an hour for 494."""

    def loss(model: nn.Module, tokens: Tensor) -> Tensor:
        is_half = model(tokens[:, :-1]).dtype == torch.bfloat16
        clock.sleep(0.4 if is_half else 0.1)
        return next_token_loss(model, tokens)

    facts = replace(CPU, fast=("bf16", "fp32")) if in_half else CPU
    choices = choose(facts, OwnerChoices(), batch_size=16)
    engine = engine_of(SIXTEEN, choices=choices, loss=loss)
    _, found = begin(engine, facts, OwnerChoices(), room=1e9, known=None)
    assert found.sequence_s < 0.1 / 4
    assert found.choices == engine.choices == replace(choices, micro_batch=1)


def test_a_slow_machine_takes_a_bounded_time_for_its_trial(
    monkeypatch: pytest.MonkeyPatch,
    clock: Clock,
) -> None:
    monkeypatch.setattr(fitting, "TRIAL_S", 1.0)
    passes: list[float] = []

    def loss(model: nn.Module, tokens: Tensor) -> Tensor:
        passes.append(0.01 * tokens.numel())
        clock.sleep(passes[-1])
        return next_token_loss(model, tokens)

    begin(engine_of(SIXTEEN, loss=loss), CPU, OwnerChoices(), room=1e9, known=None)
    memory = 3  # passes that tell the memory of a sequence
    assert passes[memory:]
    assert sum(passes[memory:]) <= 1.0


@pytest.mark.parametrize("most", [1, 3, 5, 16])
def test_a_device_of_limited_size_trains_at_once_and_measures_meanwhile(most: int) -> None:
    """A device that runs out of memory above ``most`` sequences, which nobody has told.

    Each step is made, with the gradients of a device without a limit, whatever is tried.
    """
    seen: list[int] = []

    def limited(model: nn.Module, tokens: Tensor) -> Tensor:
        seen.append(len(tokens))
        if len(tokens) > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return next_token_loss(model, tokens)

    engine, free = engine_of(SIXTEEN, loss=limited), engine_of(SIXTEEN)
    kept = begun(engine, GPU, OwnerChoices(), room=5 * probe(engine, 1).peak_bytes)
    assert max(seen) <= 3, "few sequences were tried before joining"
    assert 1 < engine.choices.micro_batch <= 4
    with engine.tuning:
        assert engine.tuning.text is not None
        for _ in range(12):
            found, expected = (gradients_of(each, batch_of(16)) for each in (engine, free))
            assert_same(found, expected, atol=1e-6)
            assert engine.apply()
            assert free.apply()
    assert engine.tuning.text is None
    (best,) = kept
    assert engine.choices == best.choices
    assert best.choices.micro_batch <= most
    assert_same(parameters_of(engine), parameters_of(free), atol=1e-4)


@pytest.mark.parametrize(
    ("each", "first", "told"),
    [(1e9, 32, 32.75e9), (4e9, 8, 68.75e9), (1e6, 32, 0.75e9 + 32 * 20e6)],
)
def test_gradients_and_copies_of_weights_count_once_in_the_memory_told_before_joining(
    each: float, first: int, told: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """124 million parameters: 0.5 GB of gradients and 0.25 GB of weights in bf16.

    For 32 sequences of 1 GB 47.9 GB were told. Less than the allocator's blocks is not seen.
    """
    run = parse(TEXT.replace("batch_size = 2", "batch_size = 32"))
    engine = engine_of(run, choices=Choices(precision="bf16", micro_batch=32))
    engine.device = torch.device("cuda")
    monkeypatch.setattr(fitting, "_trained", lambda engine: 125_000_000)
    monkeypatch.setattr(
        fitting, "probe", lambda engine, size: Probe(size, 0.02, 0.75e9 + size * max(each, 20e6))
    )
    goal, found = begin(engine, GPU, OwnerChoices(), room=70e9, known=None)
    assert found.step_bytes == pytest.approx(told)
    assert goal.first.micro_batch == first, "half of the room to begin with"


def test_memory_is_told_where_two_sequences_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of()
    engine.device = torch.device("cuda")
    monkeypatch.setattr(fitting, "_trained", lambda engine: 125_000_000)
    sizes = {1: 1.5e9, 2: float("inf")}
    monkeypatch.setattr(fitting, "probe", lambda engine, size: Probe(size, 0.02, sizes[size]))
    _, found = begin(engine, GPU, OwnerChoices(), room=2e9, known=None)
    assert (found.choices.micro_batch, found.step_bytes) == (1, 1.5e9)
    with pytest.raises(MachineTooSmall):
        begin(engine, GPU, OwnerChoices(), room=1.4e9, known=None)


def test_several_devices_need_room_for_sums_and_processes_share_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = engine_of()
    values = 4.0 * sum(p.numel() for p in engine.model.parameters())
    monkeypatch.setattr(fitting, "free_bytes", lambda device: 100.0 * values / 0.9)
    alone, both = (room_bytes(engine, others_bytes=8 * values, devices=n) for n in (1, 2))
    assert alone == pytest.approx(89 * values)  # without two moments and the gradients
    # (92 + the model that is measured) / 2, without model, moments, gradients and their sums.
    assert both == pytest.approx(41.5 * values)

    engine.device = torch.device("cuda")
    alone, both = (room_bytes(engine, others_bytes=0.0, devices=n) for n in (1, 2))
    assert alone - both == pytest.approx(values), "each has a memory of its own"


@pytest.mark.parametrize("compiles", [False, True])
def test_memory_that_becomes_less_is_remembered_and_nothing_is_compiled_in_the_way(
    compiles: bool,
) -> None:
    """Another program takes memory of the device while this one trains."""
    torch._dynamo.reset()
    most = 16
    compiling: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        compiling.append(threading.current_thread().name)
        return graph.forward

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def allocate(sequences: int) -> None:
        if sequences > most:
            raise torch.OutOfMemoryError("CUDA out of memory")

    def limited(model: nn.Module, tokens: Tensor) -> Tensor:
        allocate(len(tokens))
        return next_token_loss(model, tokens)

    choices = Choices(micro_batch=8, compile=compiles)
    first = replace(choices, compile=False)
    engine = engine_of(SIXTEEN, choices=first, loss=limited, backend=backend)
    kept: list[Fit] = []
    known = Fit(choices, 1.0, 8e6)
    goal = Goal(first=first, choices=choices, room_bytes=1e9, known=known)
    engine.tuning = Tuner(engine, goal, keep=kept.append)
    free = engine_of(SIXTEEN)
    with engine.tuning:
        until_settled(engine)
        assert engine.choices == choices
        assert not kept
        most = 3
        for _ in range(4):
            free.model.load_state_dict(engine.model.state_dict())
            found, expected = (gradients_of(each, batch_of(16)) for each in (engine, free))
            assert_same(found, expected, atol=1e-6)
            free.optimizer.zero_grad()
            assert engine.apply()
            until_settled(engine)
    assert engine.choices.micro_batch == 2
    assert engine.choices.compile == compiles
    said = [event["text"] for event in engine.events if "text" in event]
    assert said[-1] == engine.choices.text
    assert said.count(engine.choices.text) == 1, "once for each change"
    assert set(compiling) == ({"compile"} if compiles else set())
    assert (kept[-1].compile_s is not None) == compiles
    assert replace(kept[-1], compile_s=None) == Fit(engine.choices, 1.0, 2e6)


def test_the_owner_s_number_of_sequences_is_taken_and_nothing_else_is_tried() -> None:
    engine = engine_of(SIXTEEN)
    kept = begun(engine, GPU, OwnerChoices(micro_batch=16), room=1e9)
    assert engine.choices.micro_batch == 16
    with engine.tuning:
        until_settled(engine)
    assert [fit.choices.micro_batch for fit in kept] == [16]


def test_a_model_that_fits_only_with_recomputed_activations_gets_them() -> None:
    one = probe(engine_of(), 1).peak_bytes
    engine = engine_of()
    kept = begun(engine, CPU, OwnerChoices(), room=0.9 * one)
    with engine.tuning:
        until_settled(engine)
    assert kept[0].choices.lean
    assert kept[0].step_bytes <= 0.9 * one


def test_a_batch_that_cannot_fit_is_refused_with_a_remedy() -> None:
    with pytest.raises(MachineTooSmall, match=r"one sequence at once does not fit, .*--device"):
        begun(engine_of(), CPU, OwnerChoices(), room=100.0)
    one = probe(engine_of(choices=Choices(micro_batch=1, lean=True)), 1)
    with pytest.raises(MachineTooSmall, match=r"7 sequences at once .*--micro-batch auto"):
        begun(engine_of(), CPU, OwnerChoices(micro_batch=7), room=3.0 * one.peak_bytes)


def test_what_any_number_of_sequences_takes_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that are kept for the backward pass: 3 sequences were said to fit where 8 do."""
    run = parse(
        TEXT.replace("batch_size = 2", "batch_size = 16").replace("width = 16", "width = 64")
    )
    room = 1.01 * probe(engine_of(run), 8).peak_bytes
    engine = engine_of(run)
    (kept,) = [begun(engine, CPU, OwnerChoices(), room=room)]
    with engine.tuning:
        until_settled(engine)
    assert 7 <= kept[0].choices.micro_batch <= 8
    assert kept[0].fixed_bytes == pytest.approx(
        2 * probe(engine, 1).peak_bytes - probe(engine, 2).peak_bytes, rel=0.1
    )

    # fp32 is tried with one sequence where passes take long.
    monkeypatch.setattr(tuning, "COMPARED_S", 0.0)
    facts = DeviceFacts(kind="cpu", name="a processor", fast=("bf16", "fp32"))

    def loss(model: nn.Module, tokens: Tensor) -> Tensor:
        logits = model(tokens[:, :-1])
        began = time.process_time()
        while logits.dtype == torch.bfloat16 and time.process_time() - began < SLOWER_S:
            pass
        return next_token_loss(model, tokens)

    takes = probe(engine_of(run, loss=loss), 16).peak_bytes
    room = 1.3 * takes
    engine = engine_of(run, choices=choose(facts, OwnerChoices(), batch_size=16), loss=loss)
    (kept,) = [begun(engine, facts, OwnerChoices(), room=room)]
    with engine.tuning:
        until_settled(engine)
    assert kept[0].choices == Choices(precision="fp32", micro_batch=16)
    assert takes <= kept[0].step_bytes <= room


def test_little_is_trained_while_a_compiler_has_most_of_the_memory() -> None:
    """Gradients are there twice: those of training, and those of the compiler's passes."""
    wanted = Choices(micro_batch=8, compile=True)
    # 4 for both, and 1 for each sequence; half of that in compiled code.
    assert meanwhile(wanted, 8.0, fixed=4.0, room=20.0) == Choices(micro_batch=8)
    assert meanwhile(wanted, 8.0, fixed=4.0, room=15.0) == Choices(micro_batch=3)
    assert meanwhile(wanted, 8.0, fixed=4.0, room=9.0) == Choices(micro_batch=1)


SLOWER_S = 0.04
"""Time for which a pass computes in the slower precision; the other one takes a fraction of it."""


def test_a_processor_with_two_precisions_takes_the_faster_one() -> None:
    facts = DeviceFacts(kind="cpu", name="a processor", fast=("bf16", "fp32"))
    slow = {torch.bfloat16: 0.0, torch.float32: 0.0}

    def loss(model: nn.Module, tokens: Tensor) -> Tensor:
        kind = model(tokens[:, :-1]).dtype
        began = time.process_time()
        while time.process_time() - began < slow[kind]:
            pass
        return next_token_loss(model, tokens)

    cases: tuple[tuple[torch.dtype, Precision], ...] = (
        (torch.float32, "bf16"),
        (torch.bfloat16, "fp32"),
    )
    for slower, wanted in cases:
        slow.update({torch.float32: 0.0, torch.bfloat16: 0.0, slower: SLOWER_S})
        engine = engine_of(choices=choose(facts, OwnerChoices(), batch_size=7), loss=loss)
        kept = begun(engine, facts, OwnerChoices(), room=1e9)
        with engine.tuning:
            until_settled(engine)
        assert kept[0].choices == engine.choices == Choices(precision=wanted, micro_batch=7)


@pytest.mark.slow  # it computes for the time that it pretends to take
def test_precisions_are_compared_by_so_many_sequences_that_casting_weights_counts_little(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One sequence alone is slower in half precision here, and seven are twice as fast."""
    monkeypatch.setattr(tuning, "COMPARED_S", SLOWER_S)
    facts = DeviceFacts(kind="cpu", name="a processor", fast=("bf16", "fp32"))

    def loss(model: nn.Module, tokens: Tensor) -> Tensor:
        is_half = model(tokens[:, :-1]).dtype == torch.bfloat16
        takes_s = 0.03 + 0.005 * len(tokens) if is_half else 0.02 * len(tokens)
        began = time.process_time()
        while time.process_time() - began < takes_s:
            pass
        return next_token_loss(model, tokens)

    engine = engine_of(choices=choose(facts, OwnerChoices(), batch_size=7), loss=loss)
    begun(engine, facts, OwnerChoices(), room=1e9)
    with engine.tuning:
        until_settled(engine)
    assert engine.choices == Choices(precision="bf16", micro_batch=7)


def test_a_micro_batch_that_ran_out_of_memory_is_not_chosen_after_comparing_precisions() -> None:
    tried: list[tuple[torch.dtype, int]] = []

    def loss(model: nn.Module, tokens: Tensor) -> Tensor:
        tried.append((model(tokens[:, :-1]).dtype, len(tokens)))
        return limited_to(3, [])(model, tokens)

    facts = DeviceFacts(kind="cpu", name="a processor", fast=("bf16", "fp32"))
    engine = engine_of(choices=choose(facts, OwnerChoices(), batch_size=7), loss=loss)
    goal, _ = begin(engine, facts, OwnerChoices(micro_batch=3), room=1e9, known=None)
    wanted = replace(goal.choices, micro_batch=7)  # as if so many had been thought to fit
    engine.tuning = Tuner(engine, replace(goal, wished=False, choices=wanted))
    tried.clear()
    with engine.tuning:
        until_settled(engine)
    assert {size for kind, size in tried if kind == torch.float32} == {1}
    assert engine.choices.micro_batch <= 3


def test_a_measurement_is_remembered_for_the_same_machine_and_model(tmp_path: Path) -> None:
    remembered = Remembered(tmp_path / "cache" / "measured.json")
    key = key_of(RUN, CPU, OwnerChoices())
    assert remembered.get(key) is None
    found = Fit(Choices(micro_batch=3), 0.25, 1e6)
    remembered.put(key, found)
    assert Remembered(tmp_path / "cache" / "measured.json").get(key) == found
    remembered.put_speed(key, 0.5)
    assert remembered.get(key) == replace(found, sequence_s=0.5)
    remembered.put_speed("unknown", 0.5)
    assert remembered.get("unknown") is None
    assert key_of(RUN, replace(CPU, name="another"), OwnerChoices()) != key
    assert key_of(parse(TEXT), CPU, OwnerChoices()) != key
    (tmp_path / "cache" / "measured.json").write_text('{"broken"', encoding="utf-8")
    assert remembered.get(key) is None


@pytest.mark.parametrize(
    "changed",
    [
        {"choices": {"micro_batch": "many"}},
        {"choices": {"micro_batch": 2, "precision": "fp8"}},
        {"choices": {"micro_batch": 2}, "step_bytes": None},
    ],
)
def test_a_measurement_that_this_version_cannot_use_is_made_again(
    tmp_path: Path, changed: dict[str, Any]
) -> None:
    path = tmp_path / "measured.json"
    entry = {"choices": {"micro_batch": 2}, "sequence_s": 0.25, "step_bytes": 1e6}
    path.write_text(json.dumps({"key": entry}), encoding="utf-8")
    assert Remembered(path).get("key") == Fit(Choices(micro_batch=2), 0.25, 1e6)
    path.write_text(json.dumps({"key": {**entry, **changed}}), encoding="utf-8")
    assert Remembered(path).get("key") is None


def test_a_compiler_that_was_installed_since_is_used() -> None:
    """Remembered was a way without code, for good."""
    without = DeviceFacts(kind="cuda", name="a device", fast=("bf16", "fp32"))
    assert key_of(RUN, without, OwnerChoices()) != key_of(
        RUN, replace(without, compiles=True), OwnerChoices()
    )


def test_what_cannot_be_remembered_does_not_end_training(tmp_path: Path) -> None:
    """Such as on a full disk: the error came in the middle of a step."""
    (tmp_path / "cache").write_text("no folder", encoding="utf-8")
    remembered = Remembered(tmp_path / "cache" / "measured.json")
    engine = engine_of(SIXTEEN)
    goal, _ = begin(engine, CPU, OwnerChoices(), room=1e9, known=None)
    engine.tuning = Tuner(engine, goal, keep=partial(remembered.put, "key"))
    with engine.tuning:
        until_settled(engine)
    assert remembered.get("key") is None


# --- with a device --------------------------------------------------------------------------------


def needs_cuda(test: Callable[..., None]) -> Callable[..., None]:
    missing = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    marked: Callable[..., None] = pytest.mark.gpu(missing(test))
    return marked


@needs_cuda
@pytest.mark.usefixtures("compiler_processes")
def test_a_compiled_engine_measures_trains_and_reads_nothing_on_cuda() -> None:
    device = torch.device("cuda")
    facts = facts_of(device)
    model = build_model(RUN).to(device)
    choices = choose(facts, OwnerChoices(), batch_size=7)
    engine = Engine(RUN, model, build_optimizer(RUN, model), choices)
    kept = begun(engine, facts, OwnerChoices(), room=free_bytes(device))
    with engine.tuning:
        deadline = time.monotonic() + 600.0
        while engine.tuning.text is not None:
            assert time.monotonic() < deadline
            engine.gradients(batch_of().to(device))
            assert engine.apply()
    assert engine.choices.compile == facts.compiles, list(engine.events)
    assert kept[0].step_bytes > 0
    torch.cuda.set_sync_debug_mode("error")
    try:
        losses = []
        for _ in range(20):
            batch = batch_of().pin_memory().to(device, non_blocking=True)
            losses.append(engine.gradients(batch))
            assert engine.apply()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert losses[-1] < losses[0]


@needs_cuda
@pytest.mark.parametrize("precision", ["bf16", "tf32"])
def test_a_thousand_steps_on_cuda_learn_as_well_as_in_fp32(precision: str) -> None:
    assert_alike_over_a_thousand_steps(precision, device="cuda")


@needs_cuda
def test_a_batch_larger_than_the_device_is_divided_until_it_fits() -> None:
    """65536 tokens with half a million logits each: 137 GB in fp32, of which two are needed."""
    run = parse(
        TEXT.replace("batch_size = 2", "batch_size = 4096").replace(
            "layers = 1", "layers = 1\nvocabulary = 524288"
        )
        + "[limits]\nstep_tokens_max = 1000000\n"
    )
    model = build_model(run).cuda()
    engine = Engine(run, model, build_optimizer(run, model), Choices(micro_batch=4096))
    engine.gradients(batch_of(4096).cuda())
    assert engine.choices.micro_batch < 4096
    assert engine.apply()
