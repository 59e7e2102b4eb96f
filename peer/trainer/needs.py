"""Link, memory and disk that a peer of a run needs, by calculation. Nothing is measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from averaging.history.state import value_bytes
from averaging.numbers.codecs import codec_named
from averaging.numbers.layout import Layout
from averaging.rules.policy import RoundPolicy
from peer.model.recipes import build_model, build_optimizer
from peer.model.recipes.counting import measured
from peer.quantities import bytes_text, count_text, plural
from peer.run_file.merging import Outer
from peer.run_file.places import base_of
from peer.run_file.sections import GptModel, HfModel, RunFile
from peer.trainer.computing.choices import FREE_FRACTION, flops_per_token, peak_flops
from peer.trainer.parameters import recipe_layout, statistics_of

AGENT_BYTES = 450e6
"""Memory of interpreter, libraries and daemon without any parameter."""

AGENT_COPIES = 1.5
"""Largest number of fp32 copies of the model in agent and shared memory, beside the state."""

OUTER_CHECKPOINTS, INNER_CHECKPOINTS = 3, 2

EXAMPLES = {"RTX 3090": 24e9, "RTX 4090": 24e9, "RTX 5090": 32e9, "H100": 80e9}
"""Devices whose settings and need of a link are told, with their memory in bytes."""

BLOCK_BYTES, LOGIT_BYTES = 28.0, 4.0
"""Memory of activations per token in compiled bf16: for each layer and unit of its width, and for
each logit. With these a model of 124 million parameters takes what was measured of it on an H100:
5.8 GB with 8 sequences of 1024 tokens, 17 GB with 32."""

USUAL_SHARE = 0.4
"""Share of its peak that a device reaches in a compiled bf16 loop; 0.37 was measured of an H100."""

STEP_MIN_S = 0.02
"""Shorter steps take as long as the processor needs to start their many small operations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Needs of one peer. Sizes are in bytes."""

    run: RunFile
    layout: Layout
    parameters: int
    """Number of trained parameters."""
    frozen: int
    """Number of parameters of the base below adapters."""
    frozen_bytes: int
    buffers: int
    """Values of buffers that are saved with the model."""
    cycle_bytes: int
    """Upper bound on what is sent in a cycle, and on what is received."""
    device_bytes: int
    """Weights, gradients and the state of the optimizer; the base below adapters."""
    agent_bytes: float
    disk_bytes: float

    @property
    def cycle_tokens(self) -> int:
        """Tokens that one peer trains on in a cycle."""
        inner, sequence = self.run.inner, self.run.data.sequence_length
        return self.run.outer.steps_per_cycle * inner.batch_size * sequence

    def link_bits_per_s(self, tokens_per_s: float) -> float:
        """Upload, and download, at which the exchange keeps up with training at this speed."""
        return 8.0 * self.cycle_bytes * tokens_per_s / self.cycle_tokens

    @property
    def least_share(self) -> float:
        """Share of those bytes per step that is left on lines which carry no more."""
        outer = self.run.outer
        codecs = outer.smaller_pairs[-1] if outer.smaller_pairs else outer.codecs
        cycle_max = outer.steps_per_cycle_max or outer.steps_per_cycle
        least = coded_bytes(outer, codecs, self.layout)
        return least / self.cycle_bytes * outer.steps_per_cycle / cycle_max

    @property
    def lines(self) -> tuple[str, ...]:
        """A summary for the author of the run."""
        return tuple(self._lines())

    def _lines(self) -> Iterator[str]:
        outer, rule = self.run.outer, self.run.outer.buffers
        parts = plural(outer.fragments, "fragment")
        yield f"Model    {count_text(self.parameters)} parameters in {parts}"
        yield from self._base_lines()
        if self.buffers:
            fate = "merged as exact means" if rule == "mean" else "each peer's own"
            yield f'Buffers  {self.buffers} values, {fate} (outer.buffers = "{rule}")'
        yield (
            f"Link     at most {bytes_text(self.cycle_bytes)} up and as much down "
            f"({outer.codecs_text}) in {outer.steps_per_cycle} steps"
        )
        for device, memory in EXAMPLES.items():
            yield from self._lines_of(device, memory)
        if self.least_share < 1.0:
            yield (
                f"         down to {self.least_share:.0%} of that on lines that carry no more "
                "(outer.smaller_codecs)"
            )
        yield (
            f"Device   {bytes_text(self.device_bytes)} of memory, and the activations of one "
            "sequence or more"
        )
        yield (
            f"Machine  {bytes_text(self.agent_bytes)} of memory beside that, "
            f"{bytes_text(self.disk_bytes)} of disk"
        )

    def _base_lines(self) -> Iterator[str]:
        model, base = self.run.model, base_of(self.run.model)
        if base is None:
            return
        if not self.frozen:
            yield f"Base     {base.text}, which the founder alone fetches"
            return
        assert isinstance(model, HfModel) and model.lora is not None
        yield (
            f"Base     {base.text}, {count_text(self.frozen)} parameters, frozen in "
            f"{model.lora.base_dtype}: {bytes_text(self.frozen_bytes)} of the device, "
            "and its files on the disk"
        )

    def _lines_of(self, device: str, memory: float) -> Iterator[str]:
        """The need of a link of one device, and its micro-batch, as far as they are known."""
        speed = expected_tokens_per_s(self.run, self.parameters, device, frozen=self.frozen)
        if speed is None:
            return
        rate, size = _speed_text(self.link_bits_per_s(speed)), bytes_text(memory)
        yield f"         {rate} each way for one {device} at about {count_text(speed)} tokens/s"
        fits = self.sequences_at_once(memory)
        if fits:
            yield f"           {plural(fits, 'sequence')} at once in its {size}"
        elif fits is not None:
            yield f"           more than its {size}: recompute activations, or several"

    def sequences_at_once(self, memory: float) -> int | None:
        """Sequences that fit into so much memory of a device, at most a batch of them.

        By calculation, in bf16 and compiled. ``None``: the model's activations are not known.
        """
        run, model = self.run, self.run.model
        if not isinstance(model, GptModel):
            return None
        token = BLOCK_BYTES * model.layers * model.width + LOGIT_BYTES * model.vocabulary
        room = (1.0 - FREE_FRACTION) * memory - self.device_bytes
        fits = int(room / (token * run.data.sequence_length))
        return max(0, min(fits, run.inner.batch_size))


def _speed_text(bits_per_s: float) -> str:
    scale, unit = (1e9, "Gbit/s") if bits_per_s >= 1e9 else (1e6, "Mbit/s")
    return f"{bits_per_s / scale:.3g} {unit}"


def needs_of(run: RunFile) -> Needs:
    """The needs of a run whose file describes its model. Raises ``Unusable``."""
    layout = recipe_layout(run)
    model = build_model(run, weights=False)
    buffers = statistics_of(model, "mean")
    size = measured(run.model, model)
    return Needs(
        run=run,
        layout=layout,
        parameters=sum(part.size for part in layout.fragments if not part.has_statistics),
        frozen=size.frozen,
        frozen_bytes=size.frozen_bytes,
        buffers=sum(buffer.numel() for buffer in buffers.values()),
        cycle_bytes=cycle_bytes(run, layout),
        device_bytes=8 * layout.size + optimizer_bytes(run) + size.frozen_bytes,
        agent_bytes=agent_bytes(run, layout.size),
        disk_bytes=disk_bytes(run, layout.size),
    )


def cycle_bytes(run: RunFile, layout: Layout) -> int:
    """An exchange sends every value at most twice: own work, and the merged slice."""
    return coded_bytes(run.outer, run.outer.codecs, layout)


def coded_bytes(outer: Outer, codecs: tuple[str, str], layout: Layout) -> int:
    """All fragments in these encodings, up and down, except those with encodings of their own."""
    up, down = codecs
    policy = RoundPolicy(codec=up, codec_down=down, embedding_codecs=outer.embedding_pair)
    return sum(
        codec_named(codec).encoded_size(fragment.unit_sizes)
        for fragment in layout.fragments
        for codec in policy.of_kinds(fragment.kinds).codecs
    )


def agent_bytes(run: RunFile, parameters: int) -> float:
    """Memory of the agent, shared memory included."""
    return (4 * AGENT_COPIES + value_bytes(run.outer.momentum)) * parameters + AGENT_BYTES


def disk_bytes(run: RunFile, parameters: int) -> float:
    """Checkpoints, and one of each kind that is being written."""
    outer = value_bytes(run.outer.momentum) * (OUTER_CHECKPOINTS + 1)
    return float(parameters * (outer + 8 * (INNER_CHECKPOINTS + 1)))


def optimizer_bytes(run: RunFile) -> int:
    """Memory of the inner optimizer's state: fp32, like the weights."""
    optimizer = build_optimizer(run, build_model(run, weights=False))
    total = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if "betas" in group and not group.get("orthogonal"):
                total += 2 * 4 * parameter.numel() + 4  # two moments and a count of steps
            elif group["momentum"]:
                total += 4 * parameter.numel()
    return total


def expected_tokens_per_s(
    run: RunFile, parameters: int, device: str, *, frozen: int = 0
) -> float | None:
    """Speed of a device by its peak in bf16; ``None`` if device or model are not known.

    ``None`` also if a step would be so short that its length does not depend on the peak.

    Of frozen parameters the backward pass computes no gradients: two thirds of the work remain.
    """
    peak = peak_flops(device, "bf16")
    if peak is None:
        return None
    if frozen:
        parameters = round(parameters + 2 / 3 * frozen)
    elif not isinstance(run.model, GptModel):
        return None
    speed = USUAL_SHARE * peak / flops_per_token(run, parameters)
    step_s = run.inner.batch_size * run.data.sequence_length / speed
    return speed if step_s >= STEP_MIN_S else None
