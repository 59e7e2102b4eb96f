"""Descriptions of models: what differs, and how they travel."""

from __future__ import annotations

import pickle

import pytest

from averaging.numbers.layout import Layout, TensorSpec
from dht.errors import CallRefused
from dht.identity import PeerId, RunId
from dht.memory.virtual_loop import run
from peer import description
from peer.description import Described, Description, tensors_of
from peer.errors import ModelMismatch, remade

RUN = RunId("5f" * 32)


def made(shapes: dict[str, tuple[int, ...]], frozen: dict[str, str] | None = None) -> Description:
    return Description.of(
        [Described(name, shape) for name, shape in shapes.items()],
        None
        if frozen is None
        else [Described(name, (2,), hash_) for name, hash_ in frozen.items()],
    )


def test_differences_are_told_by_name_with_both_shapes() -> None:
    here = made({"a": (2, 3), "b": (4,), "c": (1,)}, {"base": "11"})
    there = made({"a": (2, 5), "c": (1,), "d": (6,)}, {"base": "22", "b": "33"})
    assert here.differences(there) == (
        ("a", "(2, 3)", "(2, 5)"),
        ("b", "(4,)", "(2,), frozen"),
        ("base", "(2,), frozen with other values than there", "(2,), frozen"),
        ("d", "absent", "(6,)"),
    )
    assert here.differences(here) == ()


def test_frozen_parameters_that_one_side_does_not_know_are_not_compared() -> None:
    here, there = made({"a": (2,)}, {"base": "11"}), made({"a": (2,)})
    assert here.differences(there) == there.differences(here) == ()
    assert here.frozen_hash and not there.frozen_hash
    assert made({"a": (2,)}, {}).frozen_hash not in ("", here.frozen_hash)


class Lines:
    """A host whose calls reach one description."""

    def __init__(self, there: Description) -> None:
        self.there, self.calls = there, 0

    async def call(self, peer: PeerId, protocol: str, request: bytes, *, timeout_s: float) -> bytes:
        self.calls += 1
        try:
            return description.page(self.there, description.CALL.asked(request, RUN))
        except ValueError as error:
            raise CallRefused(peer, protocol, str(error)) from error


def test_a_large_description_comes_in_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(description, "PAGE_BYTES", 500)
    there = made({f"layer.{n}.weight": (n + 1, 4) for n in range(40)}, {"base": "ab"})
    host = Lines(there)
    found = run(description.ask(host, PeerId("anna"), RUN, timeout_s=1.0))  # type: ignore[arg-type]
    assert found == there
    assert 4 < host.calls < 40
    with pytest.raises(CallRefused):
        run(description.ask(host, PeerId("anna"), RunId("0" * 64), timeout_s=1.0))  # type: ignore[arg-type]


def test_a_mismatch_names_the_first_parameters_and_survives_the_way_to_the_trainer() -> None:
    differences = [(f"w{n:02}", "(2,)", "(3,)") for n in range(12)]
    error = ModelMismatch("words", "aa", "bb", differences, 12)
    text = str(error)
    assert "w00: (2,) here, (3,) there" in text and "w09" in text and "w10" not in text
    assert text.count("and 2 more") == 1 and "aa" not in text.split()
    assert str(pickle.loads(pickle.dumps(error))) == text  # noqa: S301
    assert str(remade("ModelMismatch", error.args)) == text
    assert remade("ValueError", ()) is None


def test_a_mismatch_without_names_has_both_hashes() -> None:
    assert "here it is aa, the run has bb" in str(ModelMismatch("words", "aa", "bb"))


def test_a_reader_makes_the_layout_of_a_model_that_it_does_not_have() -> None:
    shapes = {"words": (50, 4), "up": (8, 4), "head": (50, 4), "norm.running_mean": (4,)}
    specs = [TensorSpec(name, shape) for name, shape in shapes.items()]
    layout = Layout.build(
        specs, 3, embeddings=["words"], heads=["head"], statistics=["norm.running_mean"]
    )
    there = Description.of(tensors_of(layout), [Described("base", (3,), "11")])
    made = run(description.read_layout(Lines(there), PeerId("anna"), RUN, 3, timeout_s=1.0))  # type: ignore[arg-type]
    assert made.hash == layout.hash
    assert [spec.name for spec in made.specs] == sorted(shapes)


def test_a_claimed_model_of_any_size_costs_a_reader_nothing() -> None:
    there = made({"a": (1 << 30, 1 << 30)})
    with pytest.raises(ValueError, match="are the most"):
        run(description.read_layout(Lines(there), PeerId("anna"), RUN, 3, timeout_s=1.0))  # type: ignore[arg-type]
