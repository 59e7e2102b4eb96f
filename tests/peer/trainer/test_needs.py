from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from averaging.numbers.codec import Scratch
from averaging.numbers.codecs import codec_named
from peer.model.recipes import build_model, build_optimizer, next_token_loss
from peer.quantities import count_text
from peer.run_file.merging import Outer
from peer.run_file.presets import preset
from peer.run_file.sections import AdamwInner, GptModel, Inner, MuonInner, RunFile, SgdInner
from peer.trainer.needs import (
    AGENT_BYTES,
    OUTER_CHECKPOINTS,
    expected_tokens_per_s,
    needs_of,
)
from peer.trainer.parameters import Buffers, recipe_layout

SMALL = GptModel(layers=2, width=32, heads=2, context=16, qk_norm=True)


@pytest.mark.parametrize("codec", ["f32", "f16", "int8", "int4"])
def test_a_cycle_has_the_bytes_of_two_encodings_of_every_fragment(codec: str) -> None:
    run = RunFile(model=SMALL, outer=Outer(codec=codec, fragments=3))  # type: ignore[arg-type]
    encoded = 0
    for fragment in recipe_layout(run).fragments:
        sizes = [unit.size for unit in fragment.units]
        out = bytearray(codec_named(codec).encoded_size(sizes))
        values = np.ones(fragment.size, np.float32)
        codec_named(codec).encode(values, sizes, out, Scratch())
        encoded += len(out)
    needs = needs_of(run)
    assert needs.cycle_bytes == 2 * encoded
    assert needs.parameters == sum(p.numel() for p in build_model(run).parameters())


def test_the_size_of_a_small_model_is_not_rounded_to_nothing() -> None:
    """Adapters of 10,240 parameters were "0.0 M parameters"."""
    run = RunFile(model=SMALL, outer=Outer(fragments=1))
    needs = needs_of(run)
    assert needs.parameters < 1000 * 1000
    assert needs.lines[0] == f"Model    {count_text(needs.parameters)} parameters in 1 fragment"


def test_fragments_of_embeddings_are_counted_in_their_own_encodings() -> None:
    outer = Outer(codec="int4", embedding_codecs="f32/int8", fragments=3)
    run = RunFile(model=SMALL, outer=outer)
    encoded = 0
    for fragment in recipe_layout(run).fragments:
        apart = set(fragment.kinds) <= {"embedding", "head"}
        codecs = ("f32", "int8") if apart else ("int4", "int4")
        encoded += sum(codec_named(codec).encoded_size(fragment.unit_sizes) for codec in codecs)
    assert needs_of(run).cycle_bytes == encoded
    assert encoded != needs_of(RunFile(model=SMALL, outer=Outer(fragments=3))).cycle_bytes


@pytest.mark.parametrize("inner", [AdamwInner(), MuonInner(), SgdInner(), SgdInner(momentum=0.0)])
def test_memory_of_the_device_is_that_of_weights_gradients_and_state(inner: Inner) -> None:
    run = RunFile(model=SMALL, inner=inner)
    model = build_model(run)
    optimizer = build_optimizer(run, model)
    torch.autograd.backward(next_token_loss(model, torch.zeros(1, 17, dtype=torch.int64)))
    optimizer.step()
    held = [*model.parameters(), *(p.grad for p in model.parameters())]
    held += [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
    total = sum(tensor.nbytes for tensor in held if tensor is not None)
    assert needs_of(run).device_bytes == total


@pytest.mark.parametrize("rule", ["own", "mean"])
def test_the_author_reads_what_becomes_of_buffers(
    rule: Buffers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_norm(run: RunFile, **given: Any) -> torch.nn.Module:
        model = build_model(run, **given)
        model.add_module("norm", torch.nn.BatchNorm1d(8, affine=False))
        return model

    monkeypatch.setattr("peer.trainer.needs.build_model", with_norm)
    monkeypatch.setattr("peer.model.recipes.build_model", with_norm)
    plain = needs_of(RunFile(model=SMALL, outer=Outer(buffers="own")))
    needs = needs_of(RunFile(model=SMALL, outer=Outer(buffers=rule)))
    assert needs.parameters == plain.parameters
    assert needs.cycle_bytes - plain.cycle_bytes == (2 * 4 * 17 if rule == "mean" else 0)
    assert any("17 values" in line and f'"{rule}"' in line for line in needs.lines)


def test_the_link_carries_a_cycle_in_the_time_of_its_steps() -> None:
    needs = needs_of(preset("124m"))
    assert needs.cycle_tokens == 30 * 128 * 1024
    cycle_s = needs.cycle_tokens / 100e3
    assert needs.link_bits_per_s(100e3) * cycle_s == pytest.approx(8 * needs.cycle_bytes)


def test_lines_that_carry_less_are_told_what_is_enough() -> None:
    fixed = needs_of(RunFile(model=SMALL))
    assert fixed.least_share == 1.0 and not any("down to" in line for line in fixed.lines)

    needs = needs_of(preset("124m"))
    assert needs.least_share == pytest.approx(0.5 * 30 / 120, rel=0.01)
    assert any("down to 13% of that" in line for line in needs.lines), needs.lines


def test_links_are_told_in_units_that_people_use() -> None:
    lines = needs_of(preset("124m")).lines
    assert any("8.42 Mbit/s" in line for line in lines), lines


def test_no_speed_is_foretold_of_steps_that_do_not_depend_on_the_peak() -> None:
    """By its peak an H100 would train 16 000 batches of the default model in a second."""
    assert not any("each way for one" in line for line in needs_of(RunFile()).lines)
    assert any("each way for one H100" in line for line in needs_of(preset("124m")).lines)


def test_the_expected_speed_is_near_the_measured_one() -> None:
    """425 k tokens/s were measured of an H100, in a compiled bf16 loop."""
    run = preset("124m")
    speed = expected_tokens_per_s(run, needs_of(run).parameters, "H100")
    assert speed == pytest.approx(425e3, rel=0.15)
    assert expected_tokens_per_s(run, 1, "abacus") is None


def test_a_micro_batch_takes_the_memory_that_was_measured_on_an_h100() -> None:
    run = preset("124m")
    run = msgspec.structs.replace(run, inner=AdamwInner(batch_size=128))
    needs = needs_of(run)
    for memory, sequences in ((5.8e9, 8), (17e9, 32)):
        fits = needs.sequences_at_once(memory / 0.9)
        assert fits is not None
        assert abs(fits - sequences) <= 0.05 * sequences
    assert needs.sequences_at_once(1e12) == 128, "a batch has no more"


def test_the_author_reads_what_fits_into_usual_devices() -> None:
    lines = "\n".join(needs_of(preset("124m")).lines)
    assert "RTX 4090 at about" in lines
    assert "sequences at once in its 24 GB" in lines
    wide = GptModel(layers=32, width=4096, heads=32, context=1024)
    assert "more than its 24 GB: recompute activations, or several" in "\n".join(
        needs_of(RunFile(model=wide)).lines
    )


def test_without_outer_momentum_memory_and_each_checkpoint_are_four_bytes_a_value_less() -> None:
    needs, plain = (
        needs_of(RunFile(model=SMALL, outer=Outer(fragments=3, momentum=mu))) for mu in (0.5, 0.0)
    )
    size = needs.layout.size
    assert needs.agent_bytes == 14 * size + AGENT_BYTES
    assert needs.agent_bytes - plain.agent_bytes == 4 * size
    assert needs.disk_bytes - plain.disk_bytes == 4 * size * (OUTER_CHECKPOINTS + 1)
    assert needs.cycle_bytes == plain.cycle_bytes
