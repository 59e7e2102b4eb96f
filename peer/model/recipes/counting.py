"""Counting what a model of a run file takes, in a child process with limits.

The configuration of a transformers model may come from a stranger, and building its modules runs
loops that the configuration sizes, before anybody has agreed to anything: the child has limits
(``peer.processes``).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

import msgspec
from torch import nn

from peer.errors import Fault, RunFileError
from peer.installed import extra
from peer.model.recipes import build_model, trained_parameters
from peer.model.recipes.hf import build_hf, check_installed
from peer.processes import (
    ended_by_limit,
    limit_memory,
    limit_processor,
    ran_out_of_memory,
    refuse_network,
)
from peer.run_file.sections import HfModel, Model, RunFile

MEMORY_MAX_BYTES = 2 << 30
"""Memory for building the modules, without their weights. One of 1000 layers takes 0.1 GB."""

PROCESSOR_MAX_S = 60
"""One of 1000 layers takes 4 s, and 2 s to import transformers."""

WAIT_MAX_S = 600.0
"""A machine that is busy gives the child little time."""


class Size(msgspec.Struct, frozen=True):
    """Number of trained parameters of a model, and the memory of what is not trained."""

    parameters: int
    buffer_bytes: int
    """Size of its buffers, such as a mask."""
    frozen: int = 0
    """Number of parameters of the base below adapters."""
    frozen_bytes: int = 0


def size_of(run: RunFile) -> Size:
    """Count the parameters and buffers of a run's model, which is not built.

    Raises ``RunFileError`` for a configuration that exceeds the limits or that transformers
    refuses, and ``ExtraMissing``.
    """
    if not isinstance(run.model, HfModel):
        return measured(run.model, build_model(run, weights=False))
    check_installed()
    if run.model.lora is not None:
        extra("bases.lora").check_peft()
    command = [sys.executable, "-P", "-m", "peer.model.recipes.counting"]
    try:
        child = subprocess.run(
            command,
            input=msgspec.json.encode(run.model),
            capture_output=True,
            timeout=WAIT_MAX_S,
            check=False,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"},
        )
    except subprocess.TimeoutExpired:
        raise _refused(f"it took longer than {WAIT_MAX_S:g} s") from None
    if ended_by_limit(child.returncode) or child.returncode == -signal.SIGKILL:
        raise _refused(f"it took more than {PROCESSOR_MAX_S} s of processor time, or all memory")
    try:
        answer = msgspec.json.decode(child.stdout.splitlines()[-1], type=Size | str)
    except (msgspec.MsgspecError, IndexError):
        lines = child.stderr.decode(errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "nothing was said")
        raise _refused(f"it ended with status {child.returncode}: {last[:300]}") from None
    if isinstance(answer, str):
        raise RunFileError("run file", [Fault("model.config", answer)])
    return answer


def _refused(reason: str) -> RunFileError:
    problem = f"model.config is too large or too strange to be counted: {reason}"
    return RunFileError("run file", [Fault("model.config", problem)])


def measured(recipe: Model, model: nn.Module) -> Size:
    """The size of a run's model, which may be on the meta device."""
    parameters = sum(p.numel() for p in trained_parameters(model).values())
    buffer_bytes = sum(buffer.nbytes for buffer in model.buffers())
    if not isinstance(recipe, HfModel) or recipe.lora is None:
        return Size(parameters, buffer_bytes)
    frozen = [p for p in model.parameters() if not p.requires_grad]
    return Size(
        parameters,
        buffer_bytes,
        sum(p.numel() for p in frozen),
        extra("bases.lora").frozen_bytes(model, recipe.lora),
    )


# The child


def _count(recipe: HfModel) -> Size | str:
    """The size of a model, or why it cannot be counted."""
    import transformers

    # Loaded before the limits: the size of libraries depends on the machine.
    _ = transformers.AutoConfig, transformers.AutoModelForCausalLM
    if recipe.lora is not None:
        with contextlib.suppress(ImportError):
            import peft  # noqa: F401
    refuse_network()
    limit_memory(MEMORY_MAX_BYTES)
    limit_processor(PROCESSOR_MAX_S)
    try:
        return measured(recipe, build_hf(recipe, random_seed=0, weights=False))
    except RunFileError as error:
        return error.faults[0].problem
    except (MemoryError, SystemError, OSError) as error:
        if not ran_out_of_memory(error):
            raise
        return f"model.config takes more than {MEMORY_MAX_BYTES >> 20} MB to be counted"


if __name__ == "__main__":
    answer = _count(msgspec.json.decode(sys.stdin.buffer.read(), type=HfModel))
    sys.stdout.buffer.write(b"\n" + msgspec.json.encode(answer) + b"\n")
