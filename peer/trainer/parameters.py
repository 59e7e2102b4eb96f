"""Which parameters of a model are exchanged, and how they are cut into fragments."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from averaging.numbers.layout import Layout, TensorSpec
from peer.errors import PeerError, RunRefused
from peer.model import recipes
from peer.run_file.sections import CustomModel, RunFile


class NothingToTrain(PeerError):
    """A model without a single trainable parameter."""

    exit_code = 2

    def __str__(self) -> str:
        return "no parameter of the model has requires_grad; there is nothing to train together"


class LayoutUnknown(PeerError):
    """The run's model is not in its run file."""

    exit_code = 2

    def __init__(self, run: str) -> None:
        super().__init__(run)
        self.run = run

    def __str__(self) -> str:
        return (
            f"the model of run {self.run!r} is 'custom': only a program that brings it can take "
            "part, with peer.join(..., model=...)"
        )


def trained_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The exchanged parameters: those with ``requires_grad``, tied ones once, by the first name."""
    found = {name: p for name, p in recipes.trained_parameters(model).items() if p.numel()}
    if not found:
        raise NothingToTrain
    return found


def specs_of(parameters: Mapping[str, torch.Tensor]) -> list[TensorSpec]:
    """The parameters' descriptions for ``averaging.numbers.layout``."""
    return [
        TensorSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in parameters.items()
    ]


def model_layout(model: torch.nn.Module, fragments: int) -> Layout:
    """The model's division into fragments, which is the same at every peer of a run."""
    parameters = trained_parameters(model)
    return Layout.build(
        specs_of(parameters),
        fragments,
        embeddings=recipes.embedding_names(model) & parameters.keys(),
        heads=recipes.head_names(model) & parameters.keys(),
    )


def recipe_layout(run: RunFile) -> Layout:
    """The layout of the run's own model. Raises ``LayoutUnknown`` if a program brings the model."""
    if isinstance(run.model, CustomModel):
        raise LayoutUnknown(run.name)
    return model_layout(recipes.build_model(run, weights=False), run.outer.fragments)


def is_coarse(parameters: Mapping[str, torch.Tensor]) -> bool:
    """True if some parameters have fewer than 32 bits, so that adopting a delta rounds."""
    return any(tensor.dtype.itemsize < 4 for tensor in parameters.values())


def check_layout(layout: Layout, expected_hash: str | None) -> None:
    """Raise ``RunRefused`` if the run is for other parameters."""
    if expected_hash is not None and layout.hash.hex() != expected_hash:
        raise RunRefused("the layout of the model", layout.hash.hex(), expected_hash)
