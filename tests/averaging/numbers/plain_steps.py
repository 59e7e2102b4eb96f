"""An outer step with a displacement that is not encoded: the formula, on whole vectors."""

from __future__ import annotations

from averaging.numbers.arrays import Float32s
from averaging.numbers.codec import Scratch
from averaging.numbers.codecs import codec_named
from averaging.numbers.outer import Nesterov, Step, step_encoded


def step(theta: Float32s, momentum: Float32s, delta: Float32s, optimizer: Nesterov) -> None:
    """Take the step in place. The codec f32 loses nothing."""
    made = Step(theta, theta, momentum)
    step_encoded(made, codec_named("f32"), delta.tobytes(), (delta.size,), optimizer, Scratch())
