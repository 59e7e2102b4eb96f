"""Optimizers without torch's compiler, and the compiler when it is wanted."""

from __future__ import annotations

import subprocess
import sys

import pytest

TRAIN = """
import sys
import torch
from peer.model.recipes import build_model, build_optimizer
from peer.run_file.sections import GptModel, RunFile
from peer.trainer.computing.deferred_compiler import defer_compiler
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
