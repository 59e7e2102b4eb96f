"""The tensors of a model that are exchanged, and their cutting into fragments.

These are the parameters with ``requires_grad`` and, with ``outer.buffers = "mean"``, the
statistics: floating-point buffers that are saved with the model, and counters (scalar whole
numbers, such as ``num_batches_tracked``), whose mean is rounded. Other buffers of whole numbers are
indices or masks, which have no mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

import blake3
import torch

from averaging.numbers.layout import Layout, TensorSpec
from peer.description import ABSENT, Described
from peer.errors import Declined, ModelMismatch, Unusable
from peer.model import recipes
from peer.model.naming import local_part, named_parameters, saved_buffers
from peer.run_file.sections import CustomModel, GptModel, RunFile

Buffers: TypeAlias = Literal["own", "mean"]

DIFFERENCES_SHOWN = 4

_COUNTERS = frozenset({torch.int32, torch.int64})


def trained_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The exchanged parameters: those with ``requires_grad``, tied ones once, by the first name."""
    exchanged = {name: p for name, p in recipes.trained_parameters(model).items() if p.numel()}
    if not exchanged:
        raise Unusable(
            "no parameter of the model has requires_grad; there is nothing to train together",
            section="nothing-to-train",
        )
    return exchanged


def statistics_of(model: torch.nn.Module, buffers: Buffers) -> dict[str, torch.Tensor]:
    """The exchanged buffers."""
    if buffers == "own":
        return {}
    return {
        name: buffer
        for name, buffer in saved_buffers(model)
        if buffer.numel()
        and (buffer.is_floating_point() or (buffer.ndim == 0 and buffer.dtype in _COUNTERS))
    }


def exchanged_tensors(model: torch.nn.Module, buffers: Buffers) -> dict[str, torch.Tensor]:
    """Everything that peers exchange of the model, by name."""
    return {**trained_parameters(model), **statistics_of(model, buffers)}


def check_statistics(statistics: Mapping[str, torch.Tensor]) -> None:
    """Raise ``Unusable`` for a buffer such as a mask of infinities."""
    for name, buffer in statistics.items():
        if not bool(buffer.isfinite().all()):
            raise Unusable(
                f"buffer {name!r} has values that are not finite, so it has no mean; register it "
                'with persistent=False, or use outer.buffers = "own"',
                section="buffer-not-finite",
            )


def specs_of(tensors: Mapping[str, torch.Tensor]) -> list[TensorSpec]:
    """The tensors' descriptions for ``averaging.numbers.layout``. Counters are sent as fp32."""
    return [
        TensorSpec(
            name,
            tuple(tensor.shape),
            "float32" if tensor.dtype in _COUNTERS else str(tensor.dtype).removeprefix("torch."),
        )
        for name, tensor in tensors.items()
    ]


def model_layout(model: torch.nn.Module, fragments: int, *, buffers: Buffers = "own") -> Layout:
    """The model's division into fragments, which is the same at every peer of a run."""
    tensors = exchanged_tensors(model, buffers)
    return Layout.build(
        specs_of(tensors),
        fragments,
        embeddings=recipes.embedding_names(model) & tensors.keys(),
        heads=recipes.head_names(model) & tensors.keys(),
        statistics=statistics_of(model, buffers).keys(),
    )


def recipe_layout(run: RunFile) -> Layout:
    """The layout of the run's own model. Raises ``Unusable`` if a program brings the model."""
    if isinstance(run.model, CustomModel):
        raise Unusable(
            f"the model of run {run.name!r} is 'custom': only a program that brings it can take "
            "part, with peer.join(..., model=...)",
            section="layout-unknown",
        )
    model = recipes.build_model(run, weights=False)
    return model_layout(model, run.outer.fragments, buffers=run.outer.buffers)


def is_coarse(parameters: Mapping[str, torch.Tensor]) -> bool:
    """True if some parameters have fewer than 32 bits, so that adopting a delta rounds."""
    return any(tensor.dtype.itemsize < 4 for tensor in parameters.values())


def check_layout(layout: Layout, run: RunFile) -> None:
    """Raise ``ModelMismatch`` if the run is for other parameters."""
    expected, own = run.model.layout_hash, layout.hash.hex()
    if expected is not None and own != expected:
        raise ModelMismatch(run.name, own, expected)


def is_whole(parameter: torch.Tensor) -> bool:
    """Say whether this process holds all of a parameter, which may be distributed."""
    return local_part(parameter.detach()).shape == parameter.shape


def check_recipe(run: RunFile, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ``Declined`` if parameters are not those of the model that the file describes."""
    if isinstance(run.model, CustomModel):
        return
    model = recipes.build_model(run, weights=False)
    theirs = {name: tuple(p.shape) for name, p in trained_parameters(model).items()}
    differing = [
        (name, str(shapes.get(name, ABSENT)), str(theirs.get(name, ABSENT)))
        for name in sorted(shapes.keys() | theirs.keys())
        if shapes.get(name) != theirs.get(name)
    ]
    if differing:
        recipe = str(run.model.__struct_config__.tag)
        words = [f"{name}: {here} here, {there} there" for name, here, there in differing]
        if more := words[DIFFERENCES_SHOWN:]:
            words[DIFFERENCES_SHOWN:] = [f"and {len(more)} more"]
        raise Declined(
            f"these are not the parameters of the model that the file of run {run.name!r} "
            f"describes (model.recipe is {recipe!r}): {'; '.join(words)}; build that model "
            "with peer.build_model, or begin a run of your own model: `shoal run new --custom`",
            section="not-the-recipe",
        )


def check_program(run: RunFile, model: torch.nn.Module) -> None:
    """Raise ``Declined`` if a program's model is not the built-in one that its file describes.

    A model of transformers may have other parameters: a program may train adapters of it.
    """
    if isinstance(run.model, GptModel):
        check_recipe(run, {name: tuple(p.shape) for name, p in named_parameters(model)})


def check_state(run: RunFile, layout: Layout) -> None:
    """Raise ``Declined`` if a state of the run cannot be loaded into the model of its file."""
    units = (unit for fragment in layout.fragments for unit in fragment.units)
    statistics = {unit.tensor for unit in units if unit.kind == "statistic"}
    specs = (spec for spec in layout.specs if spec.name not in statistics)
    check_recipe(run, {spec.name: tuple(spec.shape) for spec in specs})


def frozen_parameters(model: torch.nn.Module) -> tuple[Described, ...] | None:
    """Parameters that are not exchanged, tied ones once, with digests of their values.

    ``None`` if a process has only a part of some (DTensor), or if some are held in 4 or 8 bits
    (bitsandbytes), which devices round differently. They are hashed at about 1 GB/s.
    """
    frozen = {name: p for name, p in named_parameters(model) if not p.requires_grad}
    packed = ("quant_state", "CB")
    if any(
        p.is_meta or not is_whole(p) or any(hasattr(p, mark) for mark in packed)
        for p in frozen.values()
    ):
        return None
    return tuple(
        Described(name, tuple(p.shape), _digest(local_part(p.detach())))
        for name, p in frozen.items()
    )


def _digest(values: torch.Tensor) -> str:
    """Hash of the values and their dtype: the same numbers in bf16 are other parameters."""
    hasher = blake3.blake3(str(values.dtype).encode(), max_threads=blake3.blake3.AUTO)
    if values.numel():
        raw = values.to("cpu").contiguous().reshape(-1).view(torch.uint8)
        hasher.update(raw.numpy().data)
    return hasher.hexdigest(length=8)
