"""The built-in model: a decoder with RMSNorm, rotary positions and causal attention.

Shapes: B sequences, T tokens, D width, H heads, K heads of keys and of values (grouped-query
attention, arXiv 2305.13245: each serves H / K heads), E = D / H features per head, V vocabulary.
"""

from __future__ import annotations

# ruff: noqa: N803, N806 (shape suffixes)
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from peer.model.weights import draw
from peer.run_file.sections import GptModel

NORM_EPSILON = 1e-5
EMBEDDING_STD = 0.02

Rotation: TypeAlias = tuple[Tensor, Tensor]
CallBlock: TypeAlias = Callable[[nn.Module, Tensor, Rotation], Tensor]


def call_block(block: nn.Module, x_BTD: Tensor, rotation: Rotation) -> Tensor:
    """The residual stream behind a block."""
    result: Tensor = block(x_BTD, rotation)
    return result


class Gpt(nn.Module):
    """``model(tokens_BT)`` returns logits_BTV. Weights are meaningless until ``draw_weights``."""

    def __init__(self, shape: GptModel) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, eps=NORM_EPSILON)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self._recomputes = False
        if shape.tied_head:
            self.head.weight = self.embedding.weight

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return self.logits(self.hidden(tokens_BT))

    def hidden(self, tokens_BT: Tensor) -> Tensor:
        """The normalised residual stream that ``logits`` are computed from."""
        normalised: Tensor = self.norm(self.residual(tokens_BT))
        return normalised

    def residual(self, tokens_BT: Tensor, *, call: CallBlock = call_block) -> Tensor:
        """The residual stream behind all blocks. ``call`` calls one, such as by compiled code."""
        rotation = self._rotation(0, tokens_BT)
        x_BTD: Tensor = self.embedding(tokens_BT)
        for block in self.blocks:
            if self._recomputes:
                x_BTD = checkpoint(call, block, x_BTD, rotation, use_reentrant=False)
            else:
                x_BTD = call(block, x_BTD, rotation)
        return x_BTD

    def _rotation(self, before: int, tokens_BT: Tensor) -> Rotation:
        length = before + tokens_BT.shape[1]
        if length > self.shape.context:
            raise ValueError(
                f"a sequence has {length} tokens; the model's context is {self.shape.context}"
            )
        cos_TE, sin_TE = rotary(self.shape, length, tokens_BT.device)
        return cos_TE[before:], sin_TE[before:]

    def continued(self, tokens_BT: Tensor, pasts: Sequence[Past]) -> Tensor:
        """logits_BV after the last token, where each block has a ``Past`` of the tokens before.

        Several tokens at once need empty pasts.
        """
        rotation = self._rotation(pasts[0].length, tokens_BT)
        x_BTD = self.embedding(tokens_BT)
        for block, past in zip(self.blocks, pasts, strict=True):
            x_BTD = block(x_BTD, rotation, past)
        return self.logits(self.norm(x_BTD[:, -1]))

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.head(hidden)
        cap = self.shape.logit_soft_cap
        return logits if cap == "off" else cap * torch.tanh(logits / cap)

    def recompute_activations(self, wanted: bool) -> None:
        """Keep the inputs of each block alone, and compute its activations again when needed."""
        self._recomputes = wanted

    def get_output_embeddings(self) -> nn.Linear:
        """The output head; models of transformers have a method of the same name."""
        return self.head

    def draw_weights(self, random_seed: int) -> None:
        """Set the first weights: the same bits on every machine for the same seed.

        Matrices keep the scale of their input; outputs that are added to the residual stream are
        divided by the square root of the number of such additions (GPT-2).
        """

        def fill(name: str, parameter: Tensor) -> None:
            if parameter.ndim < 2:
                parameter.fill_(1.0)  # only norms have vectors
                return
            std = 1 / math.sqrt(parameter.shape[1])  # sqrt is exact everywhere, pow is not
            if name == "embedding.weight":
                std = EMBEDDING_STD
            elif name.endswith(("attention.out.weight", "mlp.down.weight")):
                std /= math.sqrt(2 * self.shape.layers)
            parameter.copy_(draw(tuple(parameter.shape), std, random_seed=random_seed, name=name))

        names, parameters = zip(*self.named_parameters(), strict=True)
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            # Lists make errors of the threads known.
            list(pool.map(fill, names, [parameter.detach() for parameter in parameters]))

    @torch.no_grad()
    def clear_weights(self) -> None:
        """Set all weights to zero."""
        for parameter in self.parameters():
            parameter.zero_()


class Past:
    """Keys and values of the tokens that one block has read, for generation."""

    def __init__(self, context: int) -> None:
        self.length = 0
        self._context = context
        self._both: tuple[Tensor, ...] = ()

    def extended(self, *new_BKTE: Tensor) -> tuple[Tensor, ...]:
        """Keys and values of all tokens, with those of the next ones."""
        start, added = self.length, new_BKTE[0].shape[2]
        if start and added > 1:  # the mask would be neither causal nor none
            raise ValueError("after the first tokens, one is read at a time")
        if not self._both:
            B, K, _, E = new_BKTE[0].shape
            self._both = tuple(new.new_empty(B, K, self._context, E) for new in new_BKTE)
        self.length += added
        for held, new in zip(self._both, new_BKTE, strict=True):
            held[:, :, start : self.length] = new
        return tuple(held[:, :, : self.length] for held in self._both)


class Block(nn.Module):
    def __init__(self, shape: GptModel) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.width, eps=NORM_EPSILON)
        self.attention = Attention(shape)
        self.mlp_norm = nn.RMSNorm(shape.width, eps=NORM_EPSILON)
        self.mlp: nn.Module = SwigluMlp(shape) if shape.mlp == "swiglu" else GeluMlp(shape)

    def forward(self, x_BTD: Tensor, rotation: Rotation, past: Past | None = None) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), rotation, past)
        result: Tensor = x_BTD + self.mlp(self.mlp_norm(x_BTD))
        return result


class Attention(nn.Module):
    def __init__(self, shape: GptModel) -> None:
        super().__init__()
        self.features = shape.width // shape.heads
        self.groups = (shape.heads, shape.kv_heads or shape.heads, shape.kv_heads or shape.heads)
        self.query_key_value = nn.Linear(shape.width, sum(self.groups) * self.features, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)
        # Bounds the products of queries and keys (arXiv 2302.05442), before positions rotate them.
        if shape.qk_norm:
            self.query_norm: nn.Module = HeadNorm(self.features, eps=NORM_EPSILON)
            self.key_norm: nn.Module = HeadNorm(self.features, eps=NORM_EPSILON)
        else:
            self.query_norm, self.key_norm = nn.Identity(), nn.Identity()

    def forward(self, x_BTD: Tensor, rotation: Rotation, past: Past | None = None) -> Tensor:
        B, T, D = x_BTD.shape
        all_BNTE = self.query_key_value(x_BTD).view(B, T, -1, self.features).transpose(1, 2)
        query_BHTE, key_BKTE, value_BKTE = all_BNTE.split(self.groups, dim=1)
        query_BHTE = rotate(self.query_norm(query_BHTE), rotation)
        key_BKTE = rotate(self.key_norm(key_BKTE), rotation)
        if past is not None:
            key_BKTE, value_BKTE = past.extended(key_BKTE, value_BKTE)
        mixed_BHTE = F.scaled_dot_product_attention(
            query_BHTE,
            key_BKTE,
            value_BKTE,
            is_causal=past is None or T > 1,  # a single next token sees all keys
            enable_gqa=query_BHTE.shape[1] != key_BKTE.shape[1],
        )
        result: Tensor = self.out(mixed_BHTE.transpose(1, 2).reshape(B, T, D))
        return result


class HeadNorm(nn.RMSNorm):
    """RMSNorm in the type of its weights: under autocast queries and keys have fewer bits."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


class SwigluMlp(nn.Module):
    """down(silu(gate(x)) * up(x)), Shazeer 2020 (arXiv 2002.05202)."""

    def __init__(self, shape: GptModel) -> None:
        super().__init__()
        # 8/3: three matrices then have as many weights as the two of GELU; 32 suits the kernels.
        inner = shape.mlp_width or -(-8 * shape.width // (3 * 32)) * 32
        self.gate_up = nn.Linear(shape.width, 2 * inner, bias=False)
        self.down = nn.Linear(inner, shape.width, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        gate, up = self.gate_up(x_BTD).chunk(2, dim=-1)
        result: Tensor = self.down(F.silu(gate) * up)
        return result


class GeluMlp(nn.Module):
    def __init__(self, shape: GptModel) -> None:
        super().__init__()
        inner = shape.mlp_width or 4 * shape.width
        self.up = nn.Linear(shape.width, inner, bias=False)
        self.down = nn.Linear(inner, shape.width, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        result: Tensor = self.down(F.gelu(self.up(x_BTD)))
        return result


def rotary(shape: GptModel, length: int, device: torch.device) -> Rotation:
    """cos_TE and sin_TE of the angles position * base^(-2i/E) (arXiv 2104.09864), in fp32."""
    features = shape.width // shape.heads
    exponent = torch.arange(0, features, 2, device=device, dtype=torch.float32) / features
    position = torch.arange(length, device=device, dtype=torch.float32)
    angle = torch.outer(position, shape.rotary_base**-exponent)
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


def rotate(x_BHTE: Tensor, rotation: Rotation) -> Tensor:
    """Rotate feature i together with feature i + E/2, as the Llama family does."""
    cos, sin = (part.to(x_BHTE.dtype) for part in rotation)
    first, second = x_BHTE.chunk(2, dim=-1)
    return x_BHTE * cos + torch.cat((-second, first), dim=-1) * sin
