"""Muon: momentum whose updates of matrices are orthogonal, with AdamW for all other parameters.

One optimizer for a whole model. Groups with ``orthogonal=True`` hold the matrices inside a model's
blocks; embeddings, head and vectors are in the others. Method: K. Jordan et al., 2024,
https://kellerjordan.github.io/posts/muon/. The size of its updates is that of AdamW's (Liu et al.,
2025, arXiv 2502.16982 2.2), so that learning rates for AdamW carry over.

``torch.optim.Muon`` computes the same updates, one matrix at a time, and has no AdamW for the rest.
Here matrices of one shape are a batch, and those of several processes (FSDP2) are divided among
the processes: each matrix is gathered by one of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from peer.model.naming import local_part
from peer.processes import is_out_of_memory

ITERATIONS = 5
"""Newton-Schulz steps: singular values are then between about 0.7 and 1.2."""

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of a x + b x^3 + c x^5, steep at 0 without diverging."""

ADAMW_RMS = 0.2
"""Root mean square of a typical update of AdamW, per unit of learning rate."""

BATCH_VALUES = 1 << 26
"""Upper bound on the values of a batch of matrices, which bounds the memory of a step."""


class Muon(torch.optim.Optimizer):
    """Steps matrices of groups with ``orthogonal=True`` by Muon, everything else by AdamW.

    ``weight_decay`` is decoupled in both. ``momentum`` is Nesterov's. ``fused``: use the fused
    kernel of AdamW, which needs floating-point parameters on a CPU or a CUDA device.
    """

    _batch_values: int | None = None
    """Bound on the values of a batch, where memory has run out with a larger one. An
    attribute of the class: torch copies nothing but state, groups and defaults of an optimizer."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        *,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        fused: bool = False,
    ) -> None:
        for name, value in (("lr", float(lr)), ("weight_decay", weight_decay), ("eps", eps)):
            if value < 0:
                raise ValueError(f"{name} is {value}; it must be at least 0")
        for name, value in (("momentum", momentum), ("betas", betas[0]), ("betas", betas[1])):
            if not 0 <= value < 1:
                raise ValueError(f"{name} has {value}; it must be at least 0 and below 1")
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "betas": betas,
            "eps": eps,
            "fused": fused,
            "orthogonal": False,
        }
        super().__init__(params, defaults)
        # A GradScaler then reads nothing from the device: it sets ``grad_scale`` and ``found_inf``
        # before each step, and deletes them after it.
        self._step_supports_amp_scaling = fused

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for parameter in group["params"]:
            if group["orthogonal"] and parameter.ndim != 2:
                raise ValueError(
                    f"a parameter of the shape {tuple(parameter.shape)} is in a group with "
                    "orthogonal=True; only matrices can be, put it into another group"
                )

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            with_gradient = [p for p in group["params"] if p.grad is not None]
            if not group["orthogonal"]:
                self._step_by_adamw(group, with_gradient)
                continue
            for batch in batches(with_gradient, self._batch_values):
                self._step_in_halves(group, batch)
        return loss

    def _step_in_halves(self, group: dict[str, Any], matrices: list[Tensor]) -> None:
        """Step matrices at once, or half as many where memory runs out."""
        try:
            self._step_by_muon(group, matrices)
            return
        except Exception as error:
            # The processes of a model that is divided among them take the batches alike.
            divided = hasattr(matrices[0], "device_mesh")
            if len(matrices) == 1 or divided or not is_out_of_memory(error):
                raise
        # Outside of the handler: the error's traceback held what the step had made.
        if matrices[0].is_cuda:
            torch.cuda.empty_cache()
        half = -(-len(matrices) // 2)
        self._batch_values = min(self._batch_values or BATCH_VALUES, half * matrices[0].numel())
        self._step_in_halves(group, matrices[:half])
        self._step_in_halves(group, matrices[half:])

    def _step_by_muon(self, group: dict[str, Any], matrices: list[Tensor]) -> None:
        for matrix in matrices:
            if not self.state[matrix]:
                self.state[matrix]["momentum_buffer"] = torch.zeros_like(matrix)
        gradients = [local_part(matrix.grad) for matrix in matrices]
        buffers = [local_part(self.state[matrix]["momentum_buffer"]) for matrix in matrices]
        grad_scale, found_inf = self._of_scaler("grad_scale"), self._of_scaler("found_inf")
        if grad_scale is not None:
            gradients = list(torch._foreach_div(gradients, grad_scale))
        if found_inf is not None:
            # With its buffer as gradient the buffer stays as it is.
            pairs = zip(gradients, buffers, strict=True)
            gradients = [torch.where(found_inf > 0, b, g) for g, b in pairs]
        kept = 1 - group["momentum"]
        after = torch._foreach_lerp(buffers, gradients, kept)
        ahead = torch._foreach_lerp(gradients, after, group["momentum"])  # Nesterov
        del after
        updates = _orthogonal_parts(torch.stack(list(ahead)), matrices[0])
        rate = float(group["lr"])
        scale = ADAMW_RMS * math.sqrt(max(matrices[0].shape))
        values = [local_part(matrix) for matrix in matrices]
        decay: float | Tensor = rate * group["weight_decay"]
        if found_inf is not None:
            updates, decay = updates * (1 - found_inf), decay * (1 - found_inf)
        left, added = 1 - decay, list(updates.to(values[0].dtype))
        # Nothing from here on takes memory: where it runs out, nothing has been changed.
        torch._foreach_lerp_(buffers, gradients, kept)
        torch._foreach_mul_(values, left)
        torch._foreach_add_(values, added, alpha=-rate * scale)

    def _step_by_adamw(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        states = [self.state[parameter] for parameter in parameters]
        for parameter, state in zip(parameters, states, strict=True):
            if not state:
                device = parameter.device if group["fused"] else "cpu"
                state["step"] = torch.zeros((), dtype=torch.float32, device=device)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
        adamw(
            [local_part(parameter) for parameter in parameters],
            [local_part(parameter.grad) for parameter in parameters],
            [local_part(state["exp_avg"]) for state in states],
            [local_part(state["exp_avg_sq"]) for state in states],
            [],
            [state["step"] for state in states],
            fused=True if group["fused"] else None,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
            grad_scale=self._of_scaler("grad_scale"),
            found_inf=self._of_scaler("found_inf"),
        )

    def _of_scaler(self, name: str) -> Tensor | None:
        """A value that a ``GradScaler`` has set for this step; ``None`` without one."""
        value: Tensor | None = getattr(self, name, None)
        return value


def batches(matrices: Iterable[Tensor], values_max: int | None = None) -> Iterator[list[Tensor]]:
    """Matrices that are orthogonalised together: of one shape, type and place."""

    def kind(matrix: Tensor) -> str:
        place = (getattr(matrix, "device_mesh", None), getattr(matrix, "placements", None))
        return str((tuple(matrix.shape), matrix.dtype, matrix.device, place))

    # A sorted order of kinds: all processes of an island must take the batches alike.
    for _, alike in groupby(sorted(matrices, key=kind), kind):
        same = list(alike)
        size = max(1, (values_max or BATCH_VALUES) // max(1, same[0].numel()))
        for start in range(0, len(same), size):
            yield same[start : start + size]


def orthogonalised(matrices: Tensor) -> Tensor:
    """About U V^T for each matrix U S V^T of a batch, by the Newton-Schulz iteration."""
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = (matrices.mT if tall else matrices).to(product_dtype(matrices.device))
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)  # the largest singular value is < 1
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def product_dtype(device: torch.device) -> torch.dtype:
    """The type in which the iteration is fastest on this device; bf16 is exact enough for it."""
    if device.type == "cuda":
        fast = torch.cuda.get_device_capability(device) >= (8, 0)
    else:
        fast = device.type == "cpu" and _CPU_HAS_BF16
    return torch.bfloat16 if fast else torch.float32


_CPU_HAS_BF16 = bool(getattr(torch.cpu, "_is_avx512_bf16_supported", bool)())
"""Products in bf16 then take half the time of fp32, without these instructions several times it."""


def _orthogonal_parts(stacked: Tensor, like: Any) -> Tensor:
    """The parts in this process of the orthogonalised matrices.

    ``stacked``: the parts in this process, one for each matrix. ``like``: one of the matrices.
    """
    if not hasattr(like, "device_mesh"):
        return orthogonalised(stacked)
    from torch.distributed.tensor import DTensor, Shard

    mesh, shape = like.device_mesh, torch.Size((stacked.shape[0], *like.shape))
    stride = (like.shape[0] * like.shape[1], like.shape[1], 1)
    by_part = [Shard(p.dim + 1) if p.is_shard() else p for p in like.placements]
    by_matrix = [Shard(0) if p.is_shard() else p for p in like.placements]

    def distributed(part: Tensor, placements: list[Any]) -> Any:
        return DTensor.from_local(
            part, mesh, placements, run_check=False, shape=shape, stride=stride
        )

    # Half the bytes: the iteration begins by rounding to this type anyway.
    sent = stacked.to(product_dtype(stacked.device)).contiguous()
    own = distributed(sent, by_part).redistribute(mesh, by_matrix).to_local()
    done = orthogonalised(own).contiguous()
    part: Tensor = distributed(done, by_matrix).redistribute(mesh, by_part).to_local()
    return part
