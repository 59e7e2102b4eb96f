"""The outer step: its formula, its rounding, and steps on encoded displacements."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from averaging.errors import BadPayload
from averaging.numbers.arrays import Float32s
from averaging.numbers.codec import Scratch
from averaging.numbers.codecs import codec_named
from averaging.numbers.outer import Nesterov, Step, step_encoded
from averaging.numbers.tiles import TILE
from tests.averaging.numbers.plain_steps import step

SIZES = (5 * TILE + 3, 2000, 2000, 64, 64, 1)


def vectors(count: int, size: int = sum(SIZES), seed: int = 0) -> list[Float32s]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(size).astype(np.float32) for _ in range(count)]


floats = st.floats(-(2.0**40), 2.0**40, width=32)


@given(theta=floats, b=floats, delta=floats, eta=st.floats(0, 2), mu=st.floats(0, 1))
def test_a_value_follows_the_formula_rounded_at_each_operation(
    theta: float, b: float, delta: float, eta: float, mu: float
) -> None:
    f = np.float32
    new_b = f(f(f(b) * f(mu)) + f(delta)) if f(mu) else f(b)
    new_theta = f(f(theta) - f(f(eta) * f(f(delta) + f(f(mu) * new_b))))

    thetas, bs = np.full(65, theta, f), np.full(65, b, f)  # vector instructions and a rest
    step(thetas, bs, np.full(65, delta, f), Nesterov(eta, mu))
    assert (bs == new_b).all()
    assert (thetas == new_theta).all()


def test_without_momentum_and_at_full_rate_theta_becomes_the_mean_of_the_learners() -> None:
    theta, momentum, delta = vectors(3)
    momentum.fill(0)
    expected = theta - delta
    step(theta, momentum, delta, Nesterov(1.0, 0.0))

    assert np.array_equal(theta, expected)


@pytest.mark.parametrize("name", ["f32", "f16", "int8", "int4"])
def test_an_encoded_step_has_the_bits_of_decoding_first(name: str) -> None:
    theta, momentum, delta = vectors(3)
    codec = codec_named(name)
    payload = bytearray(codec.encoded_size(SIZES))
    codec.encode(delta, SIZES, payload, Scratch())
    codec.decode(payload, SIZES, delta, Scratch())
    theta_first, momentum_first = theta.copy(), momentum.copy()
    step(theta_first, momentum_first, delta, Nesterov(0.7, 0.9))

    made = Step(theta, theta, momentum)
    step_encoded(made, codec, payload, SIZES, Nesterov(0.7, 0.9), Scratch())
    assert np.array_equal(theta, theta_first)
    assert np.array_equal(momentum, momentum_first)


def test_a_payload_of_another_length_changes_nothing() -> None:
    theta, momentum = vectors(2)
    before = theta.copy()
    codec = codec_named("int8")
    payload = bytes(codec.encoded_size(SIZES) - 1)
    with pytest.raises(BadPayload):
        step_encoded(Step(theta, theta, momentum), codec, payload, SIZES, Nesterov(1, 0), Scratch())

    assert np.array_equal(theta, before)
