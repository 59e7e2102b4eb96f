"""The loss that never holds all logits: the same loss and gradients for every kind of model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from peer.model.recipes import build_model, chunked_loss, next_token_loss
from peer.model.recipes.chunked_loss import can_chunk, loss_in_chunks
from peer.run_file.reading import parse

VOCABULARY, TOKENS = 256, 16

SMALL = f"vocab_size = {VOCABULARY}, initializer_range = 0.2"
LLAMA = (
    f"{SMALL}, hidden_size = 16, intermediate_size = 16, num_hidden_layers = 1, "
    "num_attention_heads = 2"
)
MODELS = {
    "gpt": "layers = 1\nwidth = 16\nheads = 2\ncontext = 16",
    "soft cap": "layers = 1\nwidth = 16\nheads = 2\ncontext = 16\nlogit_soft_cap = 5.0",
    "llama": f"recipe = 'hf'\nconfig = {{ model_type = 'llama', {LLAMA} }}",
    "tied llama": "recipe = 'hf'\n"
    f"config = {{ model_type = 'llama', {LLAMA}, tie_word_embeddings = true }}",
    "gpt2": f"recipe = 'hf'\nconfig = {{ model_type = 'gpt2', {SMALL}, n_embd = 16, n_layer = 1, "
    "n_head = 2, n_positions = 32, resid_pdrop = 0.0, embd_pdrop = 0.0, attn_pdrop = 0.0 }",
}
CAPPED = (
    f"recipe = 'hf'\nconfig = {{ model_type = 'gemma2', vocab_size = {VOCABULARY}, "
    "hidden_size = 16, intermediate_size = 16, num_hidden_layers = 1, num_attention_heads = 2, "
    "num_key_value_heads = 1, head_dim = 8, final_logit_softcapping = 30.0 }"
)
"""Its first logits are so small that the cap does not change them."""

SCALED = f"recipe = 'hf'\nconfig = {{ model_type = 'granite', {LLAMA}, logits_scaling = 4.0 }}"


def model_of(section: str) -> nn.Module:
    if "hf" in section:
        pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
    run = parse(f"[model]\n{section}\n[data]\nsequence_length = {TOKENS}\n")
    return build_model(run)


def batch_of(count: int) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(0, VOCABULARY, (count, TOKENS + 1), generator=generator)


class Sizes(TorchDispatchMode):
    """The largest tensor that any operation returns."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.largest = max(self.largest, found.numel() if isinstance(found, Tensor) else 0)
        return found


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_all_logits(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked_loss, "LOGITS_AT_ONCE", VOCABULARY * 10)  # 11 chunks and a rest
    model = model_of(MODELS[name])
    assert can_chunk(model)
    losses, gradients = [], []
    for loss_of in (next_token_loss, loss_in_chunks):
        model.zero_grad()
        loss = loss_of(model, batch_of(7))
        loss.backward()
        losses.append(loss.detach())
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(losses[1], losses[0])
    assert len(gradients[1]) == len(gradients[0])
    for found, expected in zip(*reversed(gradients), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("name", MODELS)
def test_the_loss_in_chunks_never_holds_all_logits(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked_loss, "LOGITS_AT_ONCE", VOCABULARY * 10)
    model, all_logits = model_of(MODELS[name]), 7 * TOKENS * VOCABULARY
    for loss_of, holds_all in ((loss_in_chunks, False), (next_token_loss, True)):
        with Sizes() as sizes:
            loss_of(model, batch_of(7)).backward()
        assert (sizes.largest >= all_logits) == holds_all


@pytest.mark.parametrize("section", [SCALED, CAPPED])
def test_a_model_that_changes_its_logits_after_the_head_is_recognised(section: str) -> None:
    model = model_of(section)
    model.train()
    assert not can_chunk(model)
    assert all(module.training for module in model.modules())
    assert not can_chunk(nn.Linear(2, 2))
