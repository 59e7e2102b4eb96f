"""Tokens are drawn from what the model computes, however much of it is kept."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence

import msgspec
import pytest
import torch
from torch import nn

from peer.errors import PeerError
from peer.extras.use.continuing import Sampling, continued, drawn
from peer.model.recipes.gpt import Gpt
from tests.peer.extras.export.exported_run import LLAMA, RUN, trained_model

GREEDY = Sampling(temperature=0, tokens_max=60)


def read_whole(model: nn.Module, tokens: Sequence[int]) -> int:
    with torch.no_grad():
        output = model(torch.tensor([tokens]))
    logits = output if isinstance(output, torch.Tensor) else output.logits
    return int(logits[0, -1].argmax())


@pytest.mark.parametrize("recipe", [RUN.model, LLAMA])
def test_kept_keys_change_nothing_and_a_full_context_goes_on_with_its_newest_half(
    recipe: object,
) -> None:
    if recipe is LLAMA:
        pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
    model = trained_model(msgspec.structs.replace(RUN, model=recipe))
    known = [1, 2, 3]
    seen = known[:]  # the context by hand: all of it is read for each token
    for token in itertools.islice(continued(model, known, GREEDY, context=16), 60):
        if len(seen) > 16:
            seen = seen[-8:]
        assert token == read_whole(model, seen)
        seen.append(token)


def test_a_text_longer_than_the_context_is_read_from_its_newest_tokens() -> None:
    model = trained_model(RUN)
    long = [n % 256 for n in range(7, 100)]
    one = Sampling(temperature=0, tokens_max=1)
    assert list(continued(model, long, one, context=32)) == [read_whole(model, long[-32:])]


def test_a_seed_gives_the_same_tokens_and_an_end_is_left_out() -> None:
    model = trained_model(RUN)
    sampling = Sampling(temperature=1.5, seed=7, tokens_max=12)
    first = list(continued(model, [1], sampling, context=32))
    assert first == list(continued(model, [1], sampling, context=32)) and len(first) == 12
    other = Sampling(temperature=1.5, seed=8, tokens_max=12)
    assert first != list(continued(model, [1], other, context=32))
    last = first.index(first[5])
    assert list(continued(model, [1], sampling, context=32, ends={first[5]})) == first[:last]


def test_what_is_unlikely_is_left_out_and_never_all() -> None:
    logits = torch.tensor([0.6, 0.3, 0.07, 0.03]).log()
    generator = torch.Generator().manual_seed(1)

    def numbers(temperature: float) -> set[int]:
        sampling = Sampling(temperature=temperature)
        return {drawn(logits, sampling, generator) for _ in range(300)}

    assert numbers(1) == {0, 1, 2}
    assert numbers(100) == {0, 1, 2, 3}
    assert numbers(0) == numbers(1e-300) == {0}


def test_a_model_that_has_diverged_is_said_to_have() -> None:
    model = trained_model(RUN)
    assert isinstance(model, Gpt)
    with torch.no_grad():
        model.norm.weight.fill_(float("nan"))
    with pytest.raises(PeerError, match="not finite"):
        list(continued(model, [1], GREEDY, context=32))


def test_a_text_comes_without_the_advice_of_transformers(
    capfd: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    """`shoal say` printed what transformers deprecates before the text."""
    transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")

    def advise(*_: object) -> None:
        transformers.utils.logging.get_logger("transformers.models").warning("deprecated")
        warnings.warn("it will go", FutureWarning, stacklevel=1)

    model = trained_model(msgspec.structs.replace(RUN, model=LLAMA))
    model.register_forward_pre_hook(advise)
    assert len(list(continued(model, [1], Sampling(tokens_max=2), context=16))) == 2
    assert capfd.readouterr().err == "" and not recwarn.list
