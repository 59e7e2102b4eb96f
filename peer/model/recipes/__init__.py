"""The model and the inner optimizer of a run file, as torch objects, and the loss.

In: a ``RunFile``. Out: a module with the same parameter names and shapes at every peer, and with
the same first weights at every founder; its optimizer; its loss on token sequences.

A recipe is data. The code behind it belongs to this package or to the installed transformers:
``gpt`` is the built-in decoder, ``hf`` builds a model of transformers or loads a published one,
``chunked_loss`` is the loss in little memory, ``counting`` tells what a model takes before it is
built. No code, weights or configuration is downloaded here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from peer.model.muon import Muon
from peer.model.naming import named_parameters, unwrapped
from peer.model.recipes.chunked_loss import inputs_and_targets
from peer.model.recipes.gpt import Gpt
from peer.model.recipes.hf import build_hf
from peer.run_file.places import base_of
from peer.run_file.sections import (
    AdamwInner,
    CustomInner,
    CustomModel,
    GptModel,
    HfModel,
    MuonInner,
    RunFile,
    SgdInner,
)

__all__ = [
    "build_model",
    "build_optimizer",
    "clip_gradients",
    "embedding_names",
    "head_names",
    "held_out_loss",
    "loss_of_logits",
    "needs_base",
    "next_token_loss",
    "trained_parameters",
]


def build_model(
    run: RunFile, *, weights: bool = True, draw: bool = True, base: Path | None = None
) -> nn.Module:
    """The run's model on the CPU, with its first weights: fp32, but for a base below adapters.

    With ``weights=False`` the parameters are on torch's meta device: names and shapes, but no
    memory. ``draw=False``: the weights are about to be replaced, and may be zeros, which is faster.
    ``base``: folder with the published weights that the run begins from (``peer.fetch_base``).
    Raises ``ValueError`` for a custom model or if it needs a ``base``, ``ExtraMissing`` for a
    package that is not installed, ``RunFileError`` for a configuration that transformers refuses,
    ``BaseUnfit`` for weights that are not those of the configuration.
    """
    if isinstance(run.model, GptModel):
        with torch.device("cpu" if weights else "meta"), _Undrawn():
            model = Gpt(run.model)
        if weights:
            model.draw_weights(run.random_seed) if draw else model.clear_weights()
        return model
    if isinstance(run.model, HfModel):
        if weights and base is None and needs_base(run, founds=draw):
            raise ValueError(
                f"the run begins from {run.model.base}: pass base=peer.fetch_base(run)"
            )
        return build_hf(run.model, random_seed=run.random_seed, weights=weights, base=base)
    assert isinstance(run.model, CustomModel)
    raise ValueError(
        "the run's model is 'custom': pass it to peer.join(..., model=model); "
        "there is no recipe to build it from"
    )


class _Undrawn(TorchFunctionMode):
    """Layers draw no first weights: the recipe does. To draw nothing on the meta device, torch
    would import a package of symbolic algebra: 0.4 s of processor time."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function.__name__ in ("normal_", "uniform_"):
            return args[0] if args else kwargs["tensor"]
        return function(*args, **(kwargs or {}))


def needs_base(run: RunFile, *, founds: bool) -> bool:
    """Return whether a peer needs the published model that the run begins from.

    The founder does. All others get the parameters of the run from its peers, and need the base
    only below adapters.
    """
    adapts = isinstance(run.model, HfModel) and run.model.lora is not None
    return base_of(run.model) is not None and (founds or adapts)


def build_optimizer(run: RunFile, model: nn.Module) -> torch.optim.Optimizer:
    """The run's inner optimizer for the trained parameters; only matrices have weight decay."""
    inner = run.inner
    parameters = list(trained_parameters(model).values())
    if isinstance(inner, CustomInner):
        raise ValueError("the run's optimizer is 'custom': pass it to peer.join(..., optimizer=)")
    blocks = _matrices_of_blocks(model) if isinstance(inner, MuonInner) else []
    in_blocks = set(map(id, blocks))
    matrices = [p for p in parameters if p.ndim >= 2 and id(p) not in in_blocks]
    vectors = [p for p in parameters if p.ndim < 2]
    groups: list[dict[str, Any]] = [
        {"params": blocks, "weight_decay": inner.weight_decay, "orthogonal": True},
        {"params": matrices, "weight_decay": inner.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if isinstance(inner, MuonInner):
        return Muon(
            groups,
            lr=inner.learning_rate,
            momentum=inner.momentum,
            betas=(inner.beta1, inner.beta2),
            eps=inner.epsilon,
            fused=_can_fuse(parameters),
        )
    if isinstance(inner, AdamwInner):
        return torch.optim.AdamW(
            groups,
            lr=inner.learning_rate,
            betas=(inner.beta1, inner.beta2),
            eps=inner.epsilon,
            fused=_can_fuse(parameters),
        )
    assert isinstance(inner, SgdInner)
    return torch.optim.SGD(
        groups,
        lr=inner.learning_rate,
        momentum=inner.momentum,
        nesterov=inner.nesterov and inner.momentum > 0,
        fused=_can_fuse(parameters),
    )


def _matrices_of_blocks(model: nn.Module) -> list[nn.Parameter]:
    """Matrices other than embeddings and the output head, whose rows are tokens."""
    of_tokens = embedding_names(model) | head_names(model)
    named = trained_parameters(model).items()
    return [p for name, p in named if p.ndim == 2 and name not in of_tokens]


def _can_fuse(parameters: Iterable[Tensor]) -> bool:
    # On a small model the Python loop over tensors costs as much as the arithmetic.
    return all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for p in parameters)


def clip_gradients(run: RunFile, model: nn.Module) -> None:
    """Clip the gradients to ``inner.clip_norm``; call it before the optimizer's step."""
    if run.inner.clip_norm != "off":
        nn.utils.clip_grad_norm_(trained_parameters(model).values(), run.inner.clip_norm)


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that require gradients, tied ones once, in model order: peers exchange these."""
    return {name: p for name, p in named_parameters(model) if p.requires_grad}


def embedding_names(model: nn.Module) -> frozenset[str]:
    """Names of the trained parameters that are embeddings."""
    weights = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    return frozenset(name for name, p in trained_parameters(model).items() if id(p) in weights)


def head_names(model: nn.Module) -> frozenset[str]:
    """Names of the trained parameters of the output head, unless it is tied to an embedding."""
    # Models of transformers have this method, and Gpt as well.
    find_head = getattr(unwrapped(model), "get_output_embeddings", None)
    head = find_head() if callable(find_head) else None
    if not isinstance(head, nn.Module):
        return frozenset()
    parameters = {id(p) for p in head.parameters()}
    named = {name for name, p in trained_parameters(model).items() if id(p) in parameters}
    return frozenset(named) - embedding_names(model)


def next_token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean cross-entropy, in nats, of predicting each of ``tokens[:, 1:]`` from those before it.

    A token that is read and not predicted is given as its complement, a negative number.
    """
    inputs, targets = inputs_and_targets(tokens)
    output = model(inputs)
    logits = output if isinstance(output, Tensor) else output.logits
    return loss_of_logits(logits, targets)


def loss_of_logits(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy, in fp32, of the targets that are not to be ignored."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


@torch.no_grad()
def held_out_loss(
    model: nn.Module,
    sequences: NDArray[np.int64],
    *,
    at_once: int = 32,
    meanwhile: Callable[[], None] = lambda: None,
    loss: Callable[[nn.Module, Tensor], Tensor] = next_token_loss,
) -> float:
    """Mean cross-entropy, in nats per token, over held-out sequences (``peer.data.sources``).

    Depends on parameters and sequences alone: all peers measure the same, except for rounding.
    ``meanwhile`` is called before each ``at_once`` of them, and must not change parameters.
    ``loss``: another way to compute the same loss.
    """
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    # Sequences of examples are predicted in part: each token that is counts once.
    partly = bool((sequences < 0).any())
    total, weights = 0.0, 0
    try:
        for start in range(0, len(sequences), at_once):
            part = sequences[start : start + at_once]
            weight = int((part[:, 1:] >= 0).sum()) if partly else len(part)
            meanwhile()
            if weight:
                batch = torch.from_numpy(part).to(device)
                total += loss(model, batch).item() * weight
                weights += weight
    finally:
        model.train(training)
    return total / weights
