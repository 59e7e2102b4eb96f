"""A model's weights: the first ones, and those of safetensors files, to start from or to keep.

First weights are the same bits on every machine (``draw``). The normal distributions of torch and
numpy use the platform's vectorised logarithms, whose last bits differ between processors; founders
with different weights would begin different runs. Here a value is the sum of four 16-bit integers
of a counter-based generator, whose stream numpy promises to keep, times one factor: bell-shaped,
cut at 3.46 standard deviations, with a single rounding.

Files of other programs and folders of transformers checkpoints can be read. Names are those of
the bare model (``peer.model.naming``).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dht.whole_files import new_file
from peer.errors import PathError, one_line
from peer.model.naming import bare_name, unwrapped

_FILE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_ADAPTER = "adapter_model.safetensors"

_UNREADABLE = ValueError, RecursionError, KeyError, TypeError, AttributeError
"""Errors of reading JSON, and of finding other types in it than expected."""

NAMES_MAX = 10
"""Number of names that an error lists."""


_NOTHING_FITS = (
    "none of its names is one of the model's (what `shoal export --to hf` writes of a built-in "
    "model has those of transformers: export without --to)"
)


class WeightsUnfit(PathError):
    """A file of weights is missing, is damaged, or belongs to another model."""

    exit_code = 2
    message = "cannot load weights for this model from {path}: {reason}"


def save_weights(model: torch.nn.Module, path: str | Path) -> None:
    """Write parameters and persistent buffers, tied ones once.

    If the model is distributed over several processes, every rank has to call this; rank 0 writes.
    The file is replaced atomically.
    """
    path = Path(path)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in _named(model):
        full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        tensors[name] = full.detach().to("cpu").contiguous()
    if torch.distributed.is_initialized() and torch.distributed.get_rank():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with new_file(path) as temporary:
        save_file(tensors, temporary, metadata={"format": "pt"})


@dataclass(frozen=True, slots=True)
class Unmatched:
    """Names that ``load_weights`` found on one side only."""

    missing: tuple[str, ...]
    """Parameters and buffers of the model that are not in the file and were left alone."""
    superfluous: tuple[str, ...]
    """Tensors of the file that are not in the model."""


@torch.no_grad()
def load_weights(model: torch.nn.Module, path: str | Path, *, strict: bool = True) -> Unmatched:
    """Load weights written by ``save_weights``, ``save_pretrained`` or ``shoal export``.

    ``path``: a file, or a folder with one file or with the index of several. It must hold exactly
    the parameters and persistent buffers of the model, with their shapes; values are cast to the
    model's dtypes. The parameters that a run exchanges (``shoal export``), and the adapter that
    peft has saved, need not have frozen parameters and buffers. With ``strict=False`` names may be
    missing or superfluous, as long as there is one that fits. Raises ``WeightsUnfit`` and leaves
    the model unchanged if they do not fit.
    """
    path = Path(path)
    wanted = dict(_named(model))
    aliases = _aliases(model)
    places, is_part = _places(path)
    superfluous = sorted(name for name in places if name not in aliases)
    weights = {aliases[name]: (name, file) for name, file in places.items() if name in aliases}
    missing = sorted(wanted.keys() - weights.keys())
    needed = missing
    if is_part or _adapters(model):
        # Buffers do not require gradients either.
        needed = [name for name in missing if wanted[name].requires_grad]
    if not weights or (strict and (needed or superfluous)):
        reason = _differences(needed or missing, superfluous)
        raise WeightsUnfit(str(path), reason if weights else f"{_NOTHING_FITS}: {reason}")
    try:
        for name, (there, file) in weights.items():
            with safe_open(file, "pt") as opened:
                shape = tuple(opened.get_slice(there).get_shape())
            if shape != tuple(wanted[name].shape):
                reason = (
                    f"{name!r} has the shape {shape}, the model's is {tuple(wanted[name].shape)}"
                )
                raise WeightsUnfit(str(path), reason)
        for name, (there, file) in weights.items():
            with safe_open(file, "pt") as opened:
                _fill(wanted[name], opened.get_tensor(there))
    except (SafetensorError, OSError) as error:
        raise WeightsUnfit(str(path), str(error)) from error
    return Unmatched(tuple(missing), tuple(superfluous))


def _fill(held: Any, values: torch.Tensor) -> None:
    if hasattr(held, "device_mesh"):
        from torch.distributed.tensor import distribute_tensor

        values = values.to(held.device, held.dtype)
        values = distribute_tensor(values, held.device_mesh, held.placements)
    if not held.is_floating_point() and values.is_floating_point():
        values = values.round()  # an export of a run has its counters in fp32
    held.detach().copy_(values)


def _named(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers, tied ones once."""
    seen: set[int] = set()
    for name, tensor in unwrapped(model).state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor) and id(tensor) not in seen:
            seen.add(id(tensor))
            yield bare_name(name), tensor


def _aliases(model: torch.nn.Module) -> Mapping[str, str]:
    """Map every name of a tensor to the first name of the same tensor."""
    first: dict[int, str] = {}
    aliases = {}
    for name, tensor in unwrapped(model).state_dict(keep_vars=True).items():
        aliases[bare_name(name)] = first.setdefault(id(tensor), bare_name(name))
    for adapter in _adapters(model):
        for name, known in list(aliases.items()):
            aliases.setdefault(_name_in_adapter_file(name, adapter), known)
    return aliases


def _adapters(model: torch.nn.Module) -> tuple[str, ...]:
    """Names of the adapters of a model of peft."""
    configurations = getattr(unwrapped(model), "peft_config", None)
    return tuple(configurations) if isinstance(configurations, Mapping) else ()


def _name_in_adapter_file(name: str, adapter: str) -> str:
    """The name that peft writes: without that of the adapter, which may change."""
    return ".".join(
        part
        for part in name.replace(f"modules_to_save.{adapter}.", "").split(".")
        if part != adapter
    )


def _places(path: Path) -> tuple[Mapping[str, Path], bool]:
    """The file of each tensor, and whether they are what a run exchanges of a model."""
    try:
        if (path / _INDEX).is_file():
            index = json.loads((path / _INDEX).read_text(encoding="utf-8"))["weight_map"]
            # Only the file name: a path could refer to a file outside this folder.
            return {str(name): path / Path(str(file)).name for name, file in index.items()}, False
        file = path
        if path.is_dir():
            file = path / (_FILE if (path / _FILE).exists() else _ADAPTER)
        with safe_open(file, "pt") as opened:
            is_export = "shoal_run_id" in (opened.metadata() or {})
            return dict.fromkeys(opened.keys(), file), is_export
    except (OSError, SafetensorError, *_UNREADABLE) as error:
        raise WeightsUnfit(str(path), one_line(error)) from error


def _differences(missing: Sequence[str], superfluous: Sequence[str]) -> str:
    parts = []
    for names, what in ((missing, "not in it"), (superfluous, "not in the model")):
        if names:
            more = f" and {len(names) - NAMES_MAX} more" if len(names) > NAMES_MAX else ""
            listed = ", ".join(map(repr, names[:NAMES_MAX]))
            parts.append(f"{listed}{more} {'is' if len(names) == 1 else 'are'} {what}")
    return "; ".join(parts)


_CHUNK = 1 << 16
"""Values computed at once: intermediate values stay in the processor's cache, which halves the time
of a million."""

_MEAN = 4 * 65535 // 2  # mean of the sum of four integers from 0 to 65535
_LOW = np.uint64(0x0000FFFF0000FFFF)
_STD = math.sqrt(4 * (65536**2 - 1) / 12)


def draw(shape: tuple[int, ...], std: float, *, random_seed: int, name: str) -> Tensor:
    """An fp32 tensor with mean 0, whose bits depend on nothing but the arguments."""
    key = blake3(f"{random_seed}/{name}".encode()).digest(length=16)
    bits = np.random.Philox(key=int.from_bytes(key, "little"))
    values: NDArray[np.float32] = np.empty(math.prod(shape), np.float32)
    scale = np.float32(std / _STD)
    for start in range(0, values.size, _CHUNK):
        part = values[start : start + _CHUNK]
        raw = bits.random_raw(part.size)
        # The four integers of each word are added two at a time.
        pairs = (raw & _LOW) + ((raw >> np.uint64(16)) & _LOW)
        total = (pairs & np.uint64(0xFFFFFFFF)) + (pairs >> np.uint64(32))
        total = total.astype(np.int64) - _MEAN
        np.multiply(total.astype(np.float32), scale, out=part)  # |total| < 2^24: exact before
    return torch.from_numpy(values).view(shape)
