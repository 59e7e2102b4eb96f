"""A trainer's inner state: its optimizers, its position in the data, its random generators.

Parameters are not part of it: after a restart they come from the swarm, or from the agent's
checkpoint. State is stored by the names of parameters, as raw tensors and plain numbers, without
pickle. ``capture`` copies (fast, on the trainer's thread); ``save`` writes (slow, on any thread).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch

from peer.errors import PeerError
from peer.model.naming import local_part, named_parameters
from peer.storage.checkpoint import CheckpointFolder
from peer.storage.tensor_file import Tensor, type_name

_PLAIN = (bool, int, float, str, type(None))


Optimizers: TypeAlias = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
"""One optimizer, or several that each have a part of the model's parameters."""


class InnerStateUnknown(PeerError):
    """The state of an optimizer has a value that is neither a tensor nor a plain number."""

    optimizer: str
    key: str
    kind: str
    message = (
        "the state of {optimizer} cannot be saved: {key!r} is of type {kind}; "
        "after a restart the optimizer starts without its state"
    )


@dataclass(frozen=True, slots=True)
class InnerState:
    """A copy of the inner state, which training does not change any more."""

    tensors: Mapping[str, torch.Tensor]
    meta: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Restored:
    """The content of a checkpoint that was restored."""

    step: int
    """Step of the incarnation that saved it."""
    data: Mapping[str, int]
    """Position for ``TokenStream.restore_position``; empty if the program reads its data itself."""
    reason: str
    """Why the state of the optimizer was not restored; empty if it was."""
    scaler: Mapping[str, float] = field(default_factory=dict)
    """State of the ``GradScaler``; empty if none was saved."""


def capture(
    model: torch.nn.Module,
    optimizer: Optimizers,
    *,
    run_id: str,
    step: int,
    data: Mapping[str, int],
    scaler: Mapping[str, float] | None = None,
) -> InnerState:
    """Copy the inner state to the CPU. Raises ``InnerStateUnknown``."""
    names = {id(p): name for name, p in named_parameters(model)}
    kind = _kind(optimizer)
    tensors: dict[str, torch.Tensor] = {"rng/cpu": torch.get_rng_state()}
    if (device := _cuda_device(model)) is not None:
        tensors["rng/cuda"] = torch.cuda.get_rng_state(device)
    plain: dict[str, dict[str, Any]] = {}
    seen: set[str] = set()
    for parameter, state in _states(optimizer):
        name = names.get(id(parameter))
        if name is None:
            raise InnerStateUnknown(kind, "a parameter", "stranger to the model")
        if name in seen:
            raise InnerStateUnknown(kind, name, "parameter of two optimizers")
        seen.add(name)
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and type_name(value.dtype) is not None:
                # Copy even on the CPU: the optimizer changes the original.
                held = local_part(value.detach())
                tensors[f"state/{name}/{key}"] = held.to("cpu", copy=True).contiguous()
            elif isinstance(value, _PLAIN):
                plain.setdefault(name, {})[key] = value
            else:
                raise InnerStateUnknown(kind, str(key), type(value).__qualname__)
    meta = {
        "kind": "inner",
        "run_id": run_id,
        "step": step,
        "data": dict(data),
        "optimizer": kind,
        "plain": plain,
    }
    if scaler:
        meta["scaler"] = dict(scaler)
    return InnerState(tensors, meta)


def save(folder: CheckpointFolder, inner: InnerState) -> Path:
    """Write a checkpoint. Raises ``DiskFull`` and keeps the earlier checkpoints."""
    tensors = {name: _writable(tensor) for name, tensor in inner.tensors.items()}
    return folder.save(tensors, inner.meta)


def _writable(tensor: torch.Tensor) -> Tensor:
    raw = tensor.reshape(-1).view(torch.uint8).numpy()
    name = type_name(tensor.dtype)
    assert name is not None, "``capture`` has checked it"
    return Tensor(name, tuple(tensor.shape), (raw,))


def restore_inner(
    folder: CheckpointFolder,
    model: torch.nn.Module,
    optimizer: Optimizers,
    *,
    run_id: str,
) -> Restored | None:
    """Put the newest usable inner state of this run into the optimizer and torch's generators.

    ``None`` if there is none. The optimizer keeps its settings (rate, decay), which come from the
    run file.
    """
    checkpoint = folder.load_latest()
    if checkpoint is None or checkpoint.meta.get("kind") != "inner":
        return None
    meta = checkpoint.meta
    if meta["run_id"] != run_id:
        return None
    with checkpoint.tensors("pt") as tensors:
        names = tensors.keys()
        kept = {name: tensors.get_tensor(name).clone() for name in names}
    reason = _mismatch(kept, meta["optimizer"], model, optimizer)
    if not reason:
        for each in several(optimizer):
            _load(kept, meta["plain"], model, each)
    torch.set_rng_state(kept["rng/cpu"])
    if "rng/cuda" in kept and (device := _cuda_device(model)) is not None:
        torch.cuda.set_rng_state(kept["rng/cuda"], device)
    return Restored(meta["step"], meta["data"], reason, meta.get("scaler", {}))


def several(optimizer: Optimizers) -> tuple[torch.optim.Optimizer, ...]:
    """One or several optimizers, as a tuple."""
    return (optimizer,) if isinstance(optimizer, torch.optim.Optimizer) else tuple(optimizer)


def _cuda_device(model: torch.nn.Module) -> torch.device | None:
    """The GPU that the model is on, which need not be torch's current one; ``None`` without."""
    return next((p.device for p in model.parameters() if p.is_cuda), None)


def _kind(optimizer: Optimizers) -> str:
    return " + ".join(type(each).__qualname__ for each in several(optimizer))


def _as_part_of(parameter: Any, held: torch.Tensor) -> torch.Tensor:
    """A tensor distributed like ``parameter``, of which this process has the part ``held``."""
    if not hasattr(parameter, "to_local") or held.shape != parameter.to_local().shape:
        return held
    from torch.distributed.tensor import DTensor

    spread: torch.Tensor = DTensor.from_local(
        held.to(parameter.device),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return spread


def _states(optimizer: Optimizers) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
    for each in several(optimizer):
        yield from each.state.items()


def _mismatch(
    kept: Mapping[str, torch.Tensor], kept_kind: str, model: torch.nn.Module, optimizer: Optimizers
) -> str:
    kind = _kind(optimizer)
    if not kept_kind:
        return "it was saved without the state of the optimizer"
    if kept_kind != kind:
        return f"it belongs to {kept_kind}, this trainer uses {kind}"
    parameters = dict(named_parameters(model))
    for name, key, tensor in _states_of(kept):
        if name not in parameters:
            return f"it has a parameter {name!r}, which the model does not have"
        shape, expected = tuple(tensor.shape), tuple(local_part(parameters[name]).shape)
        if shape not in ((), (1,), expected) and len(shape) == len(expected):
            return f"{key!r} of {name!r} has the shape {shape}, not {expected}"
    return ""


def _load(
    kept: Mapping[str, torch.Tensor],
    kept_plain: Mapping[str, Mapping[str, Any]],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
) -> None:
    parameters = dict(named_parameters(model))
    names = {id(p): name for name, p in parameters.items()}
    state: dict[str, dict[str, Any]] = {}
    for name, key, tensor in _states_of(kept):
        state.setdefault(name, {})[key] = _as_part_of(parameters[name], tensor)
    for name, plain in kept_plain.items():
        state.setdefault(name, {}).update(plain)
    # torch numbers parameters through all groups; its loader casts values and moves them.
    current = optimizer.state_dict()
    ordered = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [n for group in current["param_groups"] for n in group["params"]]
    current["state"] = {
        number: state[names[id(p)]]
        for number, p in zip(numbers, ordered, strict=True)
        if names.get(id(p)) in state
    }
    optimizer.load_state_dict(current)


def _states_of(kept: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Each tensor of an optimizer's state, with the name of its parameter and its own."""
    for key, tensor in kept.items():
        if key.startswith("state/"):
            name, _, own = key.removeprefix("state/").rpartition("/")
            yield name, own, tensor
