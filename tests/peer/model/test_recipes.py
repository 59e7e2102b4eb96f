from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from blake3 import blake3
from torch import Tensor, nn

from peer.errors import ExtraMissing, RunFileError
from peer.model.recipes import (
    build_model,
    build_optimizer,
    clip_gradients,
    embedding_names,
    head_names,
    held_out_loss,
    next_token_loss,
    trained_parameters,
)
from peer.model.recipes.gpt import Gpt, Past, rotary, rotate
from peer.model.weights import draw
from peer.run_file.presets import SIZES
from peer.run_file.sections import (
    AdamwInner,
    CustomInner,
    CustomModel,
    GptModel,
    HfModel,
    Inner,
    MuonInner,
    RunFile,
    SgdInner,
)

SMALL = GptModel(layers=2, width=32, heads=2, context=16)


def gpt(**settings: object) -> Gpt:
    run = RunFile(model=msgspec.structs.replace(SMALL, **settings))
    model = build_model(run)
    assert isinstance(model, Gpt)
    return model


def digest(model: nn.Module) -> str:
    hasher = blake3()
    for name, parameter in sorted(model.named_parameters()):
        hasher.update(name.encode())
        hasher.update(parameter.detach().numpy().astype("<f4").tobytes())
    return hasher.hexdigest()


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, shape))


def test_every_founder_draws_the_same_bits() -> None:
    """A golden digest: these bits must not depend on the machine, nor change with a release."""
    assert digest(gpt()) == "26ef3208feac919281b7e4b80f262a51cbb58f26541b8d755e29ea0f92457be9"


def test_another_seed_draws_other_weights() -> None:
    run = RunFile(model=SMALL, random_seed=1)
    assert digest(build_model(run)) != digest(gpt())


def test_building_a_model_does_not_change_the_generator_of_torch() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    draw((4, 4), 1.0, random_seed=0, name="x")
    assert torch.equal(torch.rand(3), expected)


def test_draws_are_centred_scaled_and_bounded() -> None:
    values = draw((1500, 1000), 0.5, random_seed=3, name="w").double()
    assert abs(values.mean().item()) < 0.002
    assert abs(values.std().item() - 0.5) < 0.002
    assert values.abs().max().item() <= 0.5 * 12**0.5


def test_a_draw_depends_on_its_name_but_not_on_how_much_else_is_drawn() -> None:
    assert not torch.equal(
        draw((8,), 1.0, random_seed=0, name="a"), draw((8,), 1.0, random_seed=0, name="b")
    )
    long = draw((1 << 20,), 1.0, random_seed=0, name="a")
    longer = draw(((1 << 20) + 5,), 1.0, random_seed=0, name="a")
    assert torch.equal(longer[: 1 << 20], long)


def test_no_logit_depends_on_a_later_token() -> None:
    model = gpt()
    before = tokens(2, 16)
    after = before.clone()
    after[:, 10:] = tokens(2, 6, seed=1)
    first, second = model(before), model(after)
    torch.testing.assert_close(first[:, :10], second[:, :10])
    assert not torch.allclose(first[:, 10:], second[:, 10:])


def test_every_logit_depends_on_all_earlier_tokens() -> None:
    model = gpt()
    before = tokens(1, 16)
    after = before.clone()
    after[0, 0] = (after[0, 0] + 1) % 256
    changed = (model(before) - model(after)).abs().sum(dim=-1)[0]
    assert (changed > 0).all()


def test_the_order_of_earlier_tokens_matters() -> None:
    """One block without positions would see a set: the last logits would stay."""
    model = gpt(layers=1)
    before = tokens(1, 16)
    after = before.clone()
    after[0, :10] = before[0, :10].flip(0)
    changed = (model(before)[0, -1] - model(after)[0, -1]).abs().max().item()
    assert changed > 1e-3


def test_rotary_products_depend_on_the_distance_alone() -> None:
    cos, sin = rotary(SMALL, 16, torch.device("cpu"))
    query, key = torch.randn(16, generator=torch.Generator().manual_seed(0)), torch.ones(16)
    at = [
        (
            rotate(query[None], (cos[q : q + 1], sin[q : q + 1]))
            * rotate(key[None], (cos[k : k + 1], sin[k : k + 1]))
        ).sum()
        for q, k in ((3, 1), (9, 7), (15, 13), (9, 6))
    ]
    torch.testing.assert_close(at[0], at[1])
    torch.testing.assert_close(at[0], at[2])
    assert abs((at[0] - at[3]).item()) > 1e-3


def test_a_rotation_keeps_lengths() -> None:
    x = torch.randn(1, 2, 16, 16, generator=torch.Generator().manual_seed(0))
    turned = rotate(x, rotary(SMALL, 16, torch.device("cpu")))
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))


def test_grouped_queries_share_keys_and_values() -> None:
    grouped, full = gpt(heads=4, kv_heads=2), gpt(heads=4)
    assert grouped.get_parameter("blocks.0.attention.query_key_value.weight").shape == (64, 32)
    with torch.no_grad():
        for name, parameter in full.named_parameters():
            values: torch.Tensor = grouped.get_parameter(name)
            if name.endswith("query_key_value.weight"):
                query, key, value = values.view(8, 8, 32).split((4, 2, 2))
                repeated = [part.repeat_interleave(2, dim=0) for part in (key, value)]
                values = torch.cat([query, *repeated]).flatten(0, 1)
            parameter.copy_(values)
    torch.testing.assert_close(grouped(tokens(2, 16)), full(tokens(2, 16)))


def test_normalised_queries_and_keys_do_not_depend_on_the_size_of_their_weights() -> None:
    for qk_norm in (False, True):
        model = gpt(qk_norm=qk_norm)
        before = model(tokens(2, 16))
        with torch.no_grad():
            model.get_parameter("blocks.0.attention.query_key_value.weight")[:64] *= 20
        assert torch.allclose(before, model(tokens(2, 16)), atol=1e-3) is qk_norm


def test_a_cap_bounds_the_logits_and_leaves_small_ones() -> None:
    capped, free = gpt(logit_soft_cap=2.0), gpt()
    torch.testing.assert_close(capped(tokens(2, 16)), 2.0 * torch.tanh(free(tokens(2, 16)) / 2.0))
    with torch.no_grad():
        capped.get_parameter("norm.weight").fill_(1000.0)
    assert 1.9 < capped(tokens(2, 16)).abs().max() <= 2.0


def test_normalised_heads_train_in_bf16() -> None:
    model = gpt(heads=4, kv_heads=2, qk_norm=True, logit_soft_cap=30.0)
    with torch.autocast("cpu", torch.bfloat16):
        loss = next_token_loss(model, tokens(4, 17))
    torch.autograd.backward(loss)
    assert abs(loss.item() - np.log(256)) < 0.2
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(
    ("size", "parameters"), [("124m", 123_588_864), ("350m", 355_127_296), ("1b", 1_017_835_264)]
)
def test_sizes_have_as_many_parameters_as_they_are_called(size: str, parameters: int) -> None:
    model = build_model(RunFile(model=GptModel(**SIZES[size])), weights=False)
    assert sum(p.numel() for p in trained_parameters(model).values()) == parameters


def test_a_tied_head_is_counted_once() -> None:
    tied, untied = gpt(), gpt(tied_head=False)
    assert "head.weight" not in trained_parameters(tied)
    assert embedding_names(tied) == {"embedding.weight"}
    assert head_names(tied) == frozenset()
    assert embedding_names(untied) == {"embedding.weight"}
    assert head_names(untied) == {"head.weight"}
    count = sum(p.numel() for p in trained_parameters(untied).values())
    assert count - sum(p.numel() for p in trained_parameters(tied).values()) == 256 * 32


@pytest.mark.parametrize("mlp", ["swiglu", "gelu"])
def test_both_feed_forward_parts_have_about_the_same_size(mlp: str) -> None:
    model = gpt(mlp=mlp, width=96, heads=3)
    sizes = [p.numel() for name, p in model.named_parameters() if ".0.mlp." in name]
    assert sum(sizes) == 8 * 96 * 96


def test_frozen_parameters_are_neither_exchanged_nor_optimized() -> None:
    model = gpt()
    model.embedding.weight.requires_grad_(False)
    assert "embedding.weight" not in trained_parameters(model)
    optimizer = build_optimizer(RunFile(model=SMALL), model)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert id(model.embedding.weight) not in held


def test_a_model_without_weights_has_the_same_names_and_shapes() -> None:
    run = RunFile(model=SMALL)
    shapes = {name: p.shape for name, p in build_model(run).named_parameters()}
    ghost = build_model(run, weights=False)
    assert {name: p.shape for name, p in ghost.named_parameters()} == shapes
    assert all(p.is_meta for p in ghost.parameters())


def test_a_sequence_over_the_context_is_refused() -> None:
    gpt()(tokens(1, 16))
    with pytest.raises(ValueError, match="17 tokens; the model's context is 16"):
        gpt()(tokens(1, 17))


def test_an_untrained_model_has_the_loss_of_guessing() -> None:
    assert abs(next_token_loss(gpt(), tokens(32, 17)).item() - np.log(256)) < 0.1


def test_only_matrices_decay() -> None:
    optimizer = build_optimizer(RunFile(model=SMALL, inner=AdamwInner(weight_decay=0.3)), gpt())
    for group in optimizer.param_groups:
        decays = {p.ndim >= 2 for p in group["params"]}
        assert decays == {group["weight_decay"] == 0.3}


@pytest.mark.parametrize(
    "inner",
    [
        AdamwInner(learning_rate=0.01),
        SgdInner(learning_rate=0.5, nesterov=True),
        MuonInner(learning_rate=0.01),
    ],
)
def test_each_optimizer_learns_a_repeated_pattern(inner: Inner) -> None:
    run = RunFile(model=SMALL, inner=inner)
    model = build_model(run)
    optimizer = build_optimizer(run, model)
    batch = tokens(1, 17).repeat(4, 1)
    first = next_token_loss(model, batch).item()
    for _ in range(60):
        loss = next_token_loss(model, batch)
        torch.autograd.backward(loss)
        clip_gradients(run, model)
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < 0.5 * first


def test_gradients_are_clipped_to_the_runs_norm() -> None:
    def norm(clip: float | str) -> float:
        run = RunFile(
            model=SMALL,
            inner=msgspec.convert({"optimizer": "adamw", "clip_norm": clip}, AdamwInner),
        )
        model = build_model(run)
        torch.autograd.backward(next_token_loss(model, tokens(4, 17)))
        clip_gradients(run, model)
        parts = [p.grad.norm() for p in model.parameters() if p.grad is not None]
        return float(torch.stack(parts).norm())

    whole = norm("off")
    assert whole > 0.2
    assert norm(0.1) == pytest.approx(0.1, rel=1e-3)
    assert norm(whole * 2) == pytest.approx(whole)


def test_held_out_loss_is_the_mean_over_tokens_and_leaves_the_model_in_training() -> None:
    model = gpt()
    model.train()
    sequences = tokens(7, 17)
    whole = next_token_loss(model, sequences).item()
    for at_once in (1, 3, 7, 100):
        assert held_out_loss(model, sequences.numpy(), at_once=at_once) == pytest.approx(whole)
    between: list[int] = []
    held_out_loss(model, sequences.numpy(), at_once=3, meanwhile=lambda: between.append(1))
    assert len(between) == 3
    assert model.training
    assert all(p.grad is None for p in model.parameters())


def test_custom_models_and_optimizers_are_not_built() -> None:
    with pytest.raises(ValueError, match=r"peer\.join\(\.\.\., model=model\)"):
        build_model(RunFile(model=CustomModel()))
    with pytest.raises(ValueError, match="optimizer="):
        build_optimizer(RunFile(model=SMALL, inner=CustomInner()), gpt())


def test_a_missing_extra_is_one_line_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(ExtraMissing, match=r"pip install 'shoal\[hf\]'"):
        build_model(RunFile(model=HfModel(config={"model_type": "llama"})))


# --- with the extra 'hf' ----------------------------------------------------------------------

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 256,
}


def llama(**settings: object) -> nn.Module:
    pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
    return build_model(RunFile(model=HfModel(config=LLAMA | settings)))


def test_a_transformers_model_is_drawn_from_the_runs_seed() -> None:
    model = llama()
    assert digest(model) == digest(llama())
    assert head_names(model) == {"lm_head.weight"}
    assert embedding_names(model) == {"model.embed_tokens.weight"}
    assert abs(next_token_loss(model, tokens(8, 33)).item() - np.log(256)) < 0.2
    ghost = build_model(RunFile(model=HfModel(config=LLAMA)), weights=False)
    assert all(p.is_meta for p in ghost.parameters())


def test_a_transformers_model_is_trained_in_fp32_whatever_its_configuration_says() -> None:
    assert {p.dtype for p in llama(dtype="bfloat16").parameters()} == {torch.float32}


@pytest.mark.parametrize(
    "settings",
    [
        {"model_type": "nope"},
        {"hidden_size": "x"},
        {"hidden_size": 65},
        {"model_type": "t5"},
        {"num_attention_heads": 0},
        {"pad_token_id": 10**8},
    ],
)
def test_a_configuration_that_transformers_refuses_is_a_run_file_error(
    settings: dict[str, object],
) -> None:
    with pytest.raises(RunFileError, match=r"model\.config is refused by transformers") as caught:
        llama(**settings)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "settings", [{}, {"qk_norm": True, "mlp": "gelu"}, {"heads": 4, "kv_heads": 2}]
)
def test_reading_tokens_one_at_a_time_is_reading_all_at_once(settings: dict[str, object]) -> None:
    model, read = gpt(**settings).eval(), tokens(1, 16)
    pasts = [Past(16) for _ in model.blocks]
    with torch.no_grad():
        whole = model(read)[0]
        torch.testing.assert_close(model.continued(read[:, :5], pasts)[0], whole[4])
        for at in range(5, 16):
            torch.testing.assert_close(model.continued(read[:, at : at + 1], pasts)[0], whole[at])
        with pytest.raises(ValueError, match="17 tokens"):
            model.continued(read[:, :1], pasts)


def test_several_tokens_at_once_are_read_only_as_the_first() -> None:
    model = gpt().eval()
    pasts = [Past(16) for _ in model.blocks]
    with torch.no_grad():
        model.continued(tokens(1, 4), pasts)
        with pytest.raises(ValueError, match="one is read at a time"):
            model.continued(tokens(1, 2), pasts)
