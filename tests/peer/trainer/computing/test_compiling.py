"""Compiled code of the built-in model: one graph for all blocks, and the same gradients."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

from peer.model.recipes import build_model, chunked_loss, next_token_loss
from peer.model.recipes.chunked_loss import loss_in_chunks
from peer.run_file.sections import GptModel, RunFile
from peer.trainer.computing.compiling import Loss, compiled
from peer.trainer.computing.engine import recompute_activations
from tests.peer.trainer.counting_compiler import counting

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")

SHAPE = GptModel(layers=3, width=32, heads=2, context=16, vocabulary=64, qk_norm=True)


def model() -> nn.Module:
    return build_model(RunFile(model=SHAPE))


def tokens() -> Tensor:
    drawn = torch.randint(0, 64, (4, 17), generator=torch.Generator().manual_seed(3))
    drawn[1, 5:] = ~drawn[1, 5:]  # read, but not predicted
    return drawn


def gradients(loss_of: Loss, of: nn.Module) -> list[Tensor]:
    torch.autograd.backward(loss_of(of, tokens()))
    return [p.grad for p in of.parameters() if p.grad is not None]


@pytest.mark.parametrize("lean", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_code_of_blocks_gives_the_gradients_of_the_model(
    lean: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked_loss, "LOGITS_AT_ONCE", 64 * 10)
    torch._dynamo.reset()
    whole = loss_in_chunks if lean else next_token_loss
    by_blocks, expected = model(), gradients(next_token_loss, model())
    recompute_activations(by_blocks, lean)
    found = gradients(compiled(whole, by_blocks, "aot_eager"), by_blocks)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-7)


def test_all_blocks_and_both_models_share_one_graph() -> None:
    """The second model is what another thread's twin is: its code is made beforehand."""
    torch._dynamo.reset()
    graphs: list[int] = []
    one, other = model(), model()
    loss_of = compiled(next_token_loss, one, counting(graphs))
    gradients(loss_of, one)
    gradients(loss_of, other)
    assert len(graphs) == 2, "one of a block, one of what comes behind the blocks"


def test_another_loss_is_compiled_as_a_whole() -> None:
    torch._dynamo.reset()
    graphs: list[int] = []

    def doubled(model: nn.Module, tokens: Tensor) -> Tensor:
        return 2.0 * next_token_loss(model, tokens)

    one = model()
    gradients(compiled(doubled, one, counting(graphs)), one)
    assert len(graphs) == 1


def test_gradients_of_a_block_are_there_before_the_pass_goes_on() -> None:
    """Ranks sum them meanwhile. Code of a whole model hands over all at its end."""
    # Slow to import, and only the worker that runs this needs it.
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch._aot_autograd.utils import make_boxed_func

    torch._dynamo.reset()
    seen: list[str] = []

    def backward(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        def run(*tensors: Tensor) -> object:
            seen.append("backward")
            return graph(*tensors)

        return make_boxed_func(run)

    def forward(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        return make_boxed_func(graph.forward)

    one = model()
    for name, parameter in one.named_parameters():
        if name.endswith("mlp.down.weight"):
            parameter.register_post_accumulate_grad_hook(lambda of: seen.append("gradient"))
    backend = aot_autograd(fw_compiler=forward, bw_compiler=backward)
    gradients(compiled(next_token_loss, one, backend), one)
    assert seen == ["backward", *["backward", "gradient"] * 3]


TRAIN = """
import sys
import torch
from peer.model.recipes import build_model, build_optimizer
from peer.run_file.sections import GptModel, RunFile
from peer.trainer.computing.compiling import defer_compiler
from peer.model.muon import Muon

if "deferred" in sys.argv:
    defer_compiler()

def trained(make):
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    optimizer = make(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 8)).square().sum().backward()
        optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    return model, optimizer

for make in (torch.optim.AdamW, torch.optim.SGD, Muon):
    model, optimizer = trained(make)
    print(model.weight.detach().numpy().tobytes().hex())
"""

BUILD = """
run = RunFile(model=GptModel(layers=1, width=32, heads=4, context=64))
for weights in (False, True):
    build_optimizer(run, build_model(run, weights=weights))
print([name for name in sys.modules if name.startswith(("torch._dynamo.", "sympy"))])
"""

COMPILE = """
compiled = torch.compile(model, backend="eager", fullgraph=True)
assert torch.equal(compiled(torch.ones(2, 8)), model(torch.ones(2, 8)))
optimizer.zero_grad()
optimizer.step()
assert type(sys.modules["torch._dynamo"]) is type(sys)
"""


LOOK = """
import inspect, sys, warnings
inspect.getmodule(sys._getframe())
for module in list(sys.modules.values()):
    getattr(module, "__warningregistry__", None)
assert "torch._dynamo.convert_frame" not in sys.modules
import torch.distributed.tensor
"""


def run(program: str, *arguments: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_recipe_is_built_and_trained_without_compiler_and_symbolic_algebra() -> None:
    """The two take as long to import as torch."""
    *_, modules = run(TRAIN + BUILD, "deferred")
    assert modules == "[]"


@pytest.mark.slow  # it imports torch once more
def test_to_look_through_all_modules_is_no_reason_to_import_it() -> None:
    """As torch does where it registers an operator, in the middle of its own imports."""
    run(TRAIN + LOOK, "deferred")


@pytest.mark.slow  # it imports the compiler twice
def test_the_compiler_is_there_when_it_is_wanted_and_changes_no_bit() -> None:
    assert run(TRAIN + COMPILE, "deferred") == run(TRAIN + COMPILE, "at once")
